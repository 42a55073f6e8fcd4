"""Attention with dropout that ``te::dropout_attention`` stands for, which is faster than PyTorch's kernels.

Those draw each number as they go, in the forward pass and again in the backward pass, and round the probability; the
operator draws bits once and reads them (kernels/dropout_attention.py has the times). As with every dropout that
Inductor compiles, other numbers are drawn than in eager mode, by the same generator: who asks Inductor for eager mode's
own draws (``fallback_random``) keeps PyTorch's kernel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._inductor import config
from torch.fx import Node

from te_compile.ops import registry
from te_compile.ops.dropout_attention import DROPOUT_ATTENTION
from te_compile.options import Options
from te_compile.passes.captured_nodes import argument, value_of, wrapped_kind
from te_compile.passes.side_effects import may_change
from te_compile.passes.step_cost import asked_of_inductor
from te_compile.passes.writing import Writer

_OPERATORS = ("dropout_bits", "dropout_attention_forward", "dropout_attention_backward")


def _operands(node: Node) -> list[Node]:
    return [argument(node, place, name) for place, name in enumerate(("query", "key", "value"))]


def _fits(node: Node) -> bool:
    """Are these heads of one size and number for queries, keys and values, all of a known length?"""
    query, key, value = (value_of(operand).shape for operand in _operands(node))
    if not all(isinstance(size, int) for size in (*query, *key, *value)) or key != value:
        return False
    if argument(node, 5, "is_causal", False) and query[2] != key[2]:
        return False  # causal positions are counted from the first key, where PyTorch's kernels differ
    return bool((*query[:2], query[3]) == (*key[:2], key[3]))


def _is_run_by_kernels(node: Node) -> bool:
    """Does the registry have something better than the references, for all that it takes?"""
    q, k, v = (value_of(operand).transpose(1, 2) for operand in _operands(node))
    arguments = {"q": q, "k": k, "v": v, "probability": float(argument(node, 4, "dropout_p", 0.0))}
    return registry.are_run_by_kernels(_OPERATORS, value_of(node).device, arguments)


def wants_eager_draws(options: Options) -> bool:
    """Does the user ask Inductor for the numbers that eager mode draws?"""
    return bool(asked_of_inductor(options).get("fallback_random", config.fallback_random))


def draws_bits(node: Node, options: Options) -> bool:
    """May the operator take the place of this call, whose arguments are plain (``attention_kernels``)?"""
    if not 0 < argument(node, 4, "dropout_p", 0.0) < 1 or any(map(wrapped_kind, (*_operands(node), node))):
        return False
    if wants_eager_draws(options):
        return False
    if torch.is_grad_enabled() and may_change(node):
        return False  # the gradients read the result as it was
    devices = {value_of(each).device for each in (*_operands(node), node)}
    return len(devices) == 1 and _fits(node) and _is_run_by_kernels(node)


def with_bits(node: Node) -> Node:
    """Put the operator in the place of the call; returns it."""
    write, query = Writer(node), value_of(argument(node, 0, "query"))
    assert isinstance(query, Tensor)
    scale = argument(node, 6, "scale")
    constants = (
        float(argument(node, 4, "dropout_p", 0.0)),
        argument(node, 5, "is_causal", False),
        1 / math.sqrt(query.shape[3]) if scale is None else float(scale),
    )
    call = write.call(DROPOUT_ATTENTION, *_operands(node), *constants)
    write.put_in_place(call)
    return call
