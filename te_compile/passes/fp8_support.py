"""Keep linears in high precision whose operands FP8 products do not take: their sizes, kinds, dtypes and devices."""

from __future__ import annotations

import torch
from torch import Tensor

from te_compile.ops.quantize import ALIGNMENT
from te_compile.ops.registry import Target
from te_compile.options import Options
from te_compile.passes.captured_nodes import value_of, wrapped_kind
from te_compile.passes.plan import Cause, Site, Verdict
from te_compile.passes.regions import Region
from te_compile.passes.weight_expressions import DTYPES, in_plain_tensors


def by_size(site: Site, options: Options) -> Verdict:
    """A feature length below 16, the least that FP8 products take, would be mostly padding."""
    for what, size in zip(("in_features", "out_features"), site.features, strict=True):
        if size < ALIGNMENT:
            what_would_do = f"make it {ALIGNMENT} or more for FP8, or leave it: padding would cost more than it gains"
            return Cause.RULE, f"too narrow for FP8: {what}={size}; {what_would_do}"
    return None


def by_kind(site: Site, options: Options) -> Verdict:
    """Sharded and otherwise wrapped tensors have rules for the operators that they know."""
    for what, node in (("input", site.x), ("weight", site.weight), ("result", site.node)):
        kind = wrapped_kind(node)
        if kind:
            return Cause.UNSUPPORTED, f"its {what} is a {kind}; {in_plain_tensors(kind)}"
    return None


def by_dtype(site: Site, options: Options) -> Verdict:
    """FP8 copies are made of the three floating dtypes that models compute in."""
    for what, node in (("input", site.x), ("weight", site.weight), ("result", site.node)):
        value = value_of(node)
        if not isinstance(value, Tensor):
            return Cause.UNSUPPORTED, f"its {what} has no dtype and shape on record; nothing to do: it cannot be judged"
        if value.dtype not in DTYPES:
            return Cause.UNSUPPORTED, f"its {what} is {value.dtype}; cast it to bfloat16, float16 or float32 for FP8"
    of_input, of_weight = value_of(site.x).dtype, value_of(site.weight).dtype
    if of_input != of_weight and not _may_be_under_autocast(site):  # Dynamo's fake tensors are not so strict
        return Cause.UNSUPPORTED, f"its input is {of_input}, its weight {of_weight}, which PyTorch refuses; cast either"
    return None


def _may_be_under_autocast(site: Site) -> bool:
    """Is an autocast at work around the graph, or does one begin in it, or around the body that the site is in?"""
    if torch.is_autocast_enabled(value_of(site.node).device.type):
        return True
    region: Region | None = site.region
    while region is not None:
        if any(node.target is torch.amp.autocast_mode._enter_autocast for node in region.graph.nodes):
            return True
        region = region.parent
    return False


def by_shape(site: Site, options: Options) -> Verdict:
    """Features must be known when the graph is compiled; the number of rows is free."""
    if value_of(site.x).dim() == 0 or any(not isinstance(size, int) for size in value_of(site.weight).shape):
        return Cause.UNSUPPORTED, "its features are not a fixed number; compile with dynamic=False for FP8"
    return None


def by_device(site: Site, options: Options) -> Verdict:
    """A GPU with FP8 tensor cores, or the CPU, which computes the same through reference operators."""
    devices = {value_of(node).device for node in (site.x, site.weight)}
    if len(devices) > 1:
        both = " and ".join(sorted(map(str, devices)))
        return Cause.UNSUPPORTED, f"its input and weight are on different devices, {both}; move them to one for FP8"
    target = Target.of(devices.pop())
    if target.device == "cpu":
        return None
    if target.device != "cuda":
        return (
            Cause.UNSUPPORTED,
            f"it is on {target.device!r}; move the model to a CUDA GPU for FP8 (a CPU runs the reference)",
        )
    if target.capability is not None and target.capability < (8, 9):
        have = ".".join(map(str, target.capability))
        return (
            Cause.UNSUPPORTED,
            f"this GPU has compute capability {have}; use one of 8.9 or newer for FP8 tensor cores",
        )
    return None


RULES_OF_SUPPORT = (by_size, by_kind, by_dtype, by_shape, by_device)
"""Asked in this order of a linear that nothing else keeps in high precision."""
