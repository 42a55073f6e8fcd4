"""Convolutions in groups with long kernels, along one dimension, become products of matrices; forward and backward.

cuDNN runs such a convolution group by group, or without tensor cores. The one by which wav2vec 2.0, HuBERT and WavLM
tell positions apart has 128 taps and 16 groups: in the base model, 8 sequences of 499 frames in bf16, cuDNN 9.19 takes
34.6 ms for it on an H200, and 4.0 ms for the gradient of its input. As products (toeplitz.py) they take 0.2 ms each.

A convolution in 16 bits on a GPU is taken, if stride and dilation are 1, and its gradients with it. What has few
channels in a group makes narrow products, and depthwise convolutions none at all; what has few taps cuDNN runs well.
float32 stays: convolutions and products have each their own setting for TF32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from te_compile.passes import toeplitz
from te_compile.passes.arguments import arguments_of
from te_compile.passes.captured_nodes import size_hint
from te_compile.passes.new_nodes import keep_in_backward
from te_compile.passes.traced import laid_out_like, no_guards, put_in_place, traced

aten = torch.ops.aten

ON = {"cuda"}
"""The types of device on which cuDNN would run it."""

LEAST_CHANNELS, MOST_CHANNELS = 16, 128
"""Of a group, in and out; where taps are few, no more than four times those."""
LEAST_TAPS = 16
"""On an H200 products with 9 taps win one direction of three, and those with 19 halve the sum (docs/passes.md)."""

_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Convolution:
    """What is known of a convolution of x [B, G · C, L] with a weight [G · O, C, K]."""

    taps: int
    padding: int
    groups: int
    size: int
    """Positions of one product."""


def long_convolutions(graph: Graph) -> int:
    """Write each such convolution, and each backward of one, as products; returns how many."""
    writers = {aten.convolution.default: _write_forward, aten.convolution_backward.default: _write_backward}
    count = 0
    for target, write in writers.items():
        for node in graph.find_nodes(op="call_function", target=target):
            given = arguments_of(node)
            found = _convolution(given)
            if found is not None:
                write(node, given, found)
                count += 1
    return count


def _convolution(given: dict[str, Any]) -> Convolution | None:
    """What a call with these arguments convolves; None if that is not for us."""
    x, weight = (given[name].meta["val"] for name in ("input", "weight"))
    if given["transposed"] or x.dim() != 3 or weight.dim() != 3 or x.dtype not in _NARROW or x.device.type not in ON:
        return None
    if weight.dtype != x.dtype or not all(isinstance(size, int) for size in weight.shape):
        return None
    groups, (padding,), options = given["groups"], given["padding"], (*given["stride"], *given["dilation"])
    outputs, channels, taps = weight.shape
    if groups == 1 or options != (1, 1) or not isinstance(padding, int) or not 0 <= padding < taps:
        return None
    most = min(MOST_CHANNELS, 4 * taps)
    if taps < LEAST_TAPS or not all(LEAST_CHANNELS <= size <= most for size in (channels, outputs // groups)):
        return None
    places = size_hint(x.shape[0]) * size_hint(x.shape[2])
    return Convolution(taps, padding, groups, toeplitz.positions_of(places, channels, taps))


def _write_forward(node: Node, given: dict[str, Any], found: Convolution) -> None:
    def products(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = toeplitz.convolution(x, weight, bias, found.padding, found.groups, found.size)
        return laid_out_like(y, node.meta["val"])

    _write(node, products, [given[name] for name in ("input", "weight", "bias") if given[name] is not None])


def _write_backward(node: Node, given: dict[str, Any], found: Convolution) -> None:
    def products(dy: Tensor, x: Tensor, weight: Tensor) -> list[Tensor | None]:
        how = found.padding, found.groups, found.size
        ways: tuple[Callable[[], Tensor], ...] = (
            lambda: toeplitz.input_gradient(dy, weight, *how),
            lambda: toeplitz.weight_gradient(dy, x, found.taps, *how),
            lambda: dy.sum((0, 2)),
        )
        values = node.meta["val"]
        return [None if value is None else laid_out_like(way(), value) for way, value in zip(ways, values, strict=True)]

    _write(node, products, [given[name] for name in ("grad_output", "input", "weight")])


def _write(node: Node, function: Callable[..., Any], inputs: Sequence[Node]) -> None:
    """Put ``function`` of ``inputs`` in the place of ``node``, and in its pass."""
    with no_guards(node):
        opened = traced(function, [each.meta["val"] for each in inputs])
    keep_in_backward(put_in_place(node, opened, inputs))  # windows and matrices are larger than what they are made of
