"""Grouped products with a weight of three dimensions: a mixture's experts, each on the tokens sent to it.

    torch._grouped_mm(x[T, K], weight[E, K, N], offs=ends[E])

Tokens are sorted by expert, and ``offs`` says where each expert's end. Hugging Face passes a weight stored [E, N, K] as
``weight.transpose(-2, -1)``, and where torch's product takes no such dtype under torch.compile (fp32), it calls an
operator of its own with the same operands.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from te_compile.passes.captured_nodes import argument, size_hint, value_of
from te_compile.passes.plan import Cause, Site
from te_compile.passes.regions import Region
from te_compile.passes.weight_expressions import NotAWeightError, Weights

FORM = "grouped_mm"
_PRODUCTS = {torch._grouped_mm, getattr(F, "grouped_mm", torch._grouped_mm)}
_FALLBACK = "transformers::grouped_mm_fallback"
"""The name of Hugging Face's operator, which is there only once its library is imported."""

OTHER_FORM = (
    "this grouped product has other operands than FP8 takes; give it tokens [T, K], experts [E, K, N] and offs, where "
    "each expert's tokens end"
)
"""Why a grouped product that is none of these stays in high precision."""


def _is_fallback(function: Any) -> bool:
    """Is it what Hugging Face's experts call where PyTorch has no grouped product?"""
    if isinstance(function, OpOverload):
        return bool(function._schema.name == _FALLBACK)
    return isinstance(function, OpOverloadPacket) and function._qualified_op_name == _FALLBACK


def is_grouped_product(node: Node) -> bool:
    """Is ``node`` a product of groups of rows or columns, in any of its forms?"""
    return node.op == "call_function" and (node.target in _PRODUCTS or _is_fallback(node.target))


def _operands(node: Node) -> tuple[Any, Any, Any] | None:
    """x, the weight and the ends of the groups, if that is all that the product has."""
    names = ("input", "weight") if _is_fallback(node.target) else ("mat_a", "mat_b")
    names = ("self", "mat2") if names[0] not in node.kwargs and "self" in node.kwargs else names
    x, weight = (argument(node, position, name) for position, name in enumerate(names))
    ends, bias = argument(node, 2, "offs"), argument(node, 3, "bias")
    return None if bias is not None else (x, weight, ends)


def grouped_site(region: Region, node: Node, weights: Weights) -> Site | None:
    """A site for tokens times experts; None for any other grouped product."""
    x, weight, ends = _operands(node) or (None, None, None)
    values: list[Any] = [value_of(each) if isinstance(each, Node) else None for each in (x, weight, ends)]
    if any(not isinstance(value, Tensor) for value in values) or [value.dim() for value in values] != [2, 3, 1]:
        return None
    experts, in_features, out_features = map(size_hint, values[1].shape)
    features = in_features, out_features
    site = Site("", FORM, region, node, size_hint(values[0].shape[0]), features, x, weight, linears=experts, ends=ends)
    try:
        # As given the weight is [E, K, N]: one stored that way is the transpose of a linear's.
        site.multiplies_by(weights.weight(weight, region, transposed=True, dimensions=3))
    except NotAWeightError as reason:
        site.keep(Cause.UNSUPPORTED, str(reason))
    return site
