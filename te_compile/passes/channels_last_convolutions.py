"""Convolutions along one dimension get their channels last, forward and backward, as cuDNN's kernels want them.

    y = conv1d(x, w)          becomes          conv2d(x as [B, C, 1, L] with the channels last in memory, w alike)

cuDNN's kernels for tensor cores read 16 bits with the channels last. Of two dimensions PyTorch knows that layout, of
one it does not: there cuDNN copies input, weight and result, before and behind its kernel and in each direction. Once
the layout is in the graph Inductor has whoever computes x write it so, and whoever reads y read it so. A step of the
seven convolutions by which wav2vec 2.0 and HuBERT listen took 13.3 ms on an H200 (the large models', with LayerNorm; 8
times 10 seconds, bf16), and 8.9 so; that of the base models', with one GroupNorm, 6.9 and 6.3.

What sums along the length is another matter: a GroupNorm or an InstanceNorm, for whom a channel lies in one piece
otherwise. Inductor's kernel for the sums writes, or reads, the convolution's tensor as well, one element of a line each
time: with those of wav2vec 2.0's base model it took 2.9 ms a step where it takes 1.3. In training, convolutions before
and behind one stay as they are; a forward alone gains by them all the same.

Taken are convolutions in 16 bits on a GPU without groups, of many channels in and out: of few cuDNN makes no more than
it would so. Batch and length must be numbers: where they are symbols Inductor cannot compile a graph that saves the
input of such a convolution ("cannot determine truth value of Relational", when it compares the strides).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from te_compile.passes.arguments import arguments_of
from te_compile.passes.convolution_ways import is_narrow, rewrite_convolutions
from te_compile.passes.sums_along import comes_from_sums, goes_into_sums

aten = torch.ops.aten

ON = {"cuda"}
"""The types of device on which cuDNN would run it."""

LEAST_CHANNELS = 64
"""In and out; and a multiple of eight, which is how many of 16 bits the kernels read at once."""


@dataclass(frozen=True)
class WithChannelsLast:
    """The way, by the options of a convolution along 1 and L."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """In two dimensions."""
        two = _channels_last(x), _weight_of_two(weight)
        y: Tensor = aten.convolution(*two, None, self.stride, self.padding, self.dilation, False, [0, 0], 1)
        return y.squeeze(2)

    def gradients(
        self, dy: Tensor, x: Tensor, weight: Tensor, of_x: bool, of_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """In two dimensions. PyTorch will find that x is copied as the forward pass does it, and save the copy in the
        place of x."""
        if not of_x and not of_weight:
            return None, None
        two = _channels_last(dy), _channels_last(x), _weight_of_two(weight)
        options = self.stride, self.padding, self.dilation, False, [0, 0], 1, [of_x, of_weight, False]
        dx, dweight, _ = aten.convolution_backward(*two, None, *options)
        return dx.squeeze(2) if of_x else None, dweight.squeeze(2) if of_weight else None


def channels_last_convolutions(graph: Graph) -> int:
    """Give each such convolution, and each backward of one, its channels last; returns how many."""
    forwards, backwards = (
        graph.find_nodes(op="call_function", target=target)
        for target in (aten.convolution.default, aten.convolution_backward.default)
    )
    stay = {_operands(arguments_of(node)) for node in forwards if backwards and _is_beside_sums(node)}
    return len(rewrite_convolutions(graph, lambda given: None if _operands(given) in stay else _way_of(given)))


def _operands(given: dict[str, Any]) -> tuple[Node, Node]:
    """By which a convolution and its backward are known to belong together."""
    return given["input"], given["weight"]


def _is_beside_sums(node: Node) -> bool:
    """Is what a forward's convolution reads computed from sums along the length, or are some computed of its result?"""
    x, y = arguments_of(node)["input"], node
    lengths = [each.meta["val"].shape[-1] for each in (x, y)]
    if not all(isinstance(length, int) and length > 1 for length in lengths):
        return False
    return comes_from_sums(x, lengths[0]) or goes_into_sums(y, lengths[1])


def _way_of(given: dict[str, Any]) -> WithChannelsLast | None:
    """How a convolution with these arguments is computed; None if that is not for us."""
    if not is_narrow(given, ON) or given["groups"] != 1:
        return None
    if not all(isinstance(size, int) for size in given["input"].meta["val"].shape):
        return None
    if not all(size >= LEAST_CHANNELS and size % 8 == 0 for size in given["weight"].meta["val"].shape[:2]):
        return None
    (stride,), (padding,), (dilation,) = given["stride"], given["padding"], given["dilation"]
    return WithChannelsLast((1, stride), (0, padding), (1, dilation))


def _channels_last(x: Tensor) -> Tensor:
    """x [B, C, L] as [B, C, 1, L], copied: what computes it may write it so."""
    return x.unsqueeze(2).clone(memory_format=torch.channels_last)


def _weight_of_two(weight: Tensor) -> Tensor:
    """The weight [O, C, K] as [O, C, 1, K]; with one tap its channels are last as it is."""
    return weight.unsqueeze(2) if weight.shape[2] == 1 else _channels_last(weight)
