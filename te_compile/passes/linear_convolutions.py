"""Convolutions that are linears: with a kernel of one, and those whose patches do not overlap.

    kernel 1, stride 1                     y[b, n, …] = Σ_c w[n, c] · x[b, c, …]              over the channels
    stride = kernel                        y[b, n, i, j] = Σ w[n, c, p, q] · x[b, c, iP + p, jQ + q]        over patches

The second is how vision transformers cut an image into patches; what is left over at the edges takes no part. Neither
has padding, dilation or groups. The channels come last for the product, and go back behind it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from te_compile.passes.captured_nodes import argument, size_hint, value_of
from te_compile.passes.plan import Site
from te_compile.passes.regions import Region
from te_compile.passes.weight_expressions import Weights
from te_compile.passes.writing import Writer

_CONVOLUTIONS: tuple[Any, ...] = (torch.conv1d, torch.conv2d, torch.conv3d)


def is_convolution(node: Node) -> bool:
    """Is ``node`` a call of a convolution in one, two or three dimensions?"""
    return node.op == "call_function" and node.target in _CONVOLUTIONS


def _each(option: Any, dimensions: int) -> list[Any]:
    """An option for each spatial dimension, given once for all or one by one."""
    given = [*option] if isinstance(option, (tuple, list)) else [option]
    return given * dimensions if len(given) == 1 else given


def _is_linear(node: Node, x: Tensor, kernel: Sequence[Any]) -> bool:
    """Does each element of ``x`` take part in one position of the result at most, with nothing added at the edges?"""
    dimensions = len(kernel)
    stride, dilation = (_each(argument(node, i, name, 1), dimensions) for i, name in ((3, "stride"), (5, "dilation")))
    padding = argument(node, 4, "padding", 0)
    # "same" wants a stride of 1, which is that of a kernel of one here: it adds nothing to that.
    is_padded = padding not in ("valid", "same") and any(each != 0 for each in _each(padding, dimensions))
    if is_padded or argument(node, 6, "groups", 1) != 1 or stride != list(kernel):
        return False
    if all(size == 1 for size in kernel):
        return True
    # Dynamo guards that an image of another size, where that is a symbol, holds a patch, too.
    has_patches = all(size_hint(size) >= place for size, place in zip(x.shape[2:], kernel, strict=True))
    return has_patches and all(each == 1 for each in dilation)


def convolution_site(region: Region, node: Node, weights: Weights) -> Site | None:
    """A site for a convolution that is a linear; None for any other."""
    x, weight, bias = argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")
    value, kernels = value_of(x), value_of(weight)
    if not isinstance(value, Tensor) or not isinstance(kernels, Tensor) or value.dim() != kernels.dim():
        return None  # also a single image, which has no batch dimension
    out_features, *inner = kernels.shape
    if not all(isinstance(size, int) for size in kernels.shape) or not _is_linear(node, value, inner[1:]):
        return None
    positions = math.prod(size_hint(size) for size in value_of(node).shape) // max(out_features, 1)
    features = math.prod(inner), out_features
    site = Site("", "convolution", region, node, positions, features, x, weight, bias)
    if not site.has_a_parameter(weights):
        return None
    site.spell = partial(_spelled, kernel=inner[1:], weights=weights)
    return site


def is_of_patches(site: Site) -> bool:
    """Is ``site`` a convolution as the model wrote it, whose kernel has more than one place?"""
    return site.form == "convolution" and any(size > 1 for size in value_of(site.weight).shape[2:])


def _patches(write: Writer, x: Node, kernel: Sequence[int]) -> Node:
    """x [B, C, iP + p, jQ + q] as [B, i, j, C · P · Q]; with a kernel of one, the channels last."""
    dimensions = len(kernel)
    if all(size == 1 for size in kernel):
        return write.method("movedim", x, 1, -1)
    for index, size in enumerate(kernel):
        x = _cut(write, x, 2 + 2 * index, size)
    positions = [2 + 2 * index for index in range(dimensions)]
    x = write.method("permute", x, 0, *positions, 1, *(place + 1 for place in positions))
    return write.method("flatten", x, 1 + dimensions)


def _cut(write: Writer, x: Node, place: int, size: int) -> Node:
    """``x`` with its dimension ``place`` in pieces of ``size``, one dimension for each piece and one inside of it."""
    whole = value_of(x).shape[place]
    if isinstance(whole, int):
        count, left = divmod(whole, size)
        x = write.method("narrow", x, place, 0, count * size) if left else x
        return write.method("unflatten", x, place, (count, size))
    number = write.call(operator.floordiv, write.method("size", x, place), size)
    x = write.method("narrow", x, place, 0, write.call(operator.mul, number, size))
    return write.method("unflatten", x, place, (number, size))


def _spelled(site: Site, kernel: Sequence[int], weights: Weights) -> tuple[Node, list[Site]]:
    """Write the convolution as a linear on its patches; returns the result and the one site."""
    assert site.x is not None and site.weight is not None
    write = Writer(site.node)
    x, weight = _patches(write, site.x, kernel), write.method("flatten", site.weight, 1)
    linear = write.product(F.linear, x, weight, site.bias)
    result = write.laid_out_like(write.method("movedim", linear, -1, 1), site.node)
    spelled = replace(site, node=linear, x=x, spell=None)
    spelled.multiplies_by(weights.weight(weight, site.region, transposed=False))
    return result, [spelled]
