"""Which weights are quantised outside of the graph, so that a call can use the FP8 copies that an earlier one made.

A weight in front of the graph is quantised on every call, whether it has changed or not. What is a parameter as it is
stored, or a contiguous part of one (a packed projection's third, the experts of one tensor, a convolution's filters),
changes only when the parameter does, and that can be seen from outside: weight_cache.py makes its copies, and they
become inputs of the graph. Other weights are computed in the graph, and stay there.

Parameters that FSDP gathers for each use stay in the graph as well: what FSDP frees after use, we must not keep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.nn import Parameter

from te_compile.ops import registry
from te_compile.ops.registry import Target
from te_compile.ops.weight_refresh import Layout
from te_compile.passes.captured_nodes import guards_of, storage_of, value_of, wrapped_kind
from te_compile.passes.weight_expressions import Matrix

OUTPUTS = ("codes", "transposed", "amax", "scale_inv")
"""What te::quantize_weights returns."""


@dataclass
class WeightGroup:
    """Weights of one dtype and device that are quantised by one call, outside of the graph.

    ``weights``: the root placeholders of the parameters; ``owners``: for each matrix of ``layout`` the number of the
    FP8 state that it is cast by; ``inputs``: which of ``OUTPUTS`` the graph takes, each through a placeholder of its
    own; ``implementations`` run ``te::quantize_weights`` and what goes with it; ``declined``: why better ones cannot.
    """

    weights: list[Node]
    owners: list[int]
    layout: Layout
    dtype: torch.dtype
    device: torch.device
    implementations: dict[str, str]
    declined: list[str]
    inputs: list[int] = field(default_factory=list)


def offset_in_parameter(matrix: Matrix, parameter: Any) -> int | None:
    """Where ``matrix`` begins in the memory of ``parameter``, which owns it, in elements; None if it is no part of it
    that lies there as it is, or if the parameter is none whose changes can be seen."""
    value, owner = value_of(matrix.value), value_of(matrix.owner)
    is_plain = isinstance(parameter, Parameter) and not wrapped_kind(matrix.owner) and type(owner) is type(value)
    if not is_plain or _is_sharded(matrix.owner):
        return None
    # A subclass has a meaning of its own; a fake parameter is that of a compiler's dry run.
    if type(parameter) is not Parameter and not isinstance(parameter, torch._subclasses.FakeTensor):
        return None
    storage = storage_of(matrix.value)
    if storage is None or storage != storage_of(matrix.owner) or value.dtype != owner.dtype:
        return None
    return value.storage_offset() - owner.storage_offset() if value.is_contiguous() else None


def _is_sharded(placeholder: Node) -> bool:
    """Does the parameter belong to a module that FSDP manages?"""
    guards = guards_of(placeholder)
    return guards is not None and bool(guards.is_fsdp_module())


def stored_shape(matrix: Matrix) -> tuple[int, int]:
    """[R, C], a batch of experts as one matrix, the experts on top of each other."""
    *above, columns = value_of(matrix.value).shape
    return math.prod(above), columns


def implementations_for(matrices: list[Matrix], dtype: torch.dtype) -> tuple[dict[str, str], list[str]] | None:
    """What runs te::quantize_weights, te::snapshot and the check of copies that are kept, by name, and why not better
    ones. None where a check would make the host wait for the device: then nothing is kept."""
    values = [value_of(matrix.value) for matrix in matrices]
    target = Target.of(values[0].device)
    arguments = {"weights": values, "dtype": dtype, "states": []}
    chosen, declined = {}, []
    for operator in ("quantize_weights", "refresh_weights", "snapshot"):
        chosen[operator], reasons = registry.choose(operator, target, arguments)
        declined += [f"te::{operator} {reason}" for reason in reasons if operator == "quantize_weights"]
    waits = target.device != "cpu" and chosen["refresh_weights"] == registry.REFERENCE
    return None if waits else (chosen, declined)
