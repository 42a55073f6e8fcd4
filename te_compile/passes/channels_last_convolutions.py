"""Convolutions along one dimension get their channels last, forward and backward, as cuDNN's kernels want them.

    y = conv1d(x, w)          becomes          conv2d(x as [B, C, 1, L] with the channels last in memory, w alike)

cuDNN's kernels for tensor cores read 16 bits with the channels last. Of two dimensions PyTorch knows that layout, of
one it does not: there cuDNN copies input, weight and result, before and behind its kernel and in each direction. Once
the layout is in the graph Inductor has whoever computes x write it so, and whoever reads y read it so. A step of the
seven convolutions by which wav2vec 2.0 and HuBERT listen took 13.3 ms on an H200 (the large models', with LayerNorm; 8
times 10 seconds, bf16), and 8.9 so; that of the base models', with one GroupNorm, 6.9 and 6.3.

Taken are convolutions in 16 bits on a GPU without groups, of many channels in and out: of few cuDNN makes no more than
it would so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from te_compile.passes.arguments import arguments_of
from te_compile.passes.traced import laid_out_like, no_guards, put_in_place, traced

aten = torch.ops.aten

ON = {"cuda"}
"""The types of device on which cuDNN would run it."""

LEAST_CHANNELS = 64
"""In and out; and a multiple of eight, which is how many of 16 bits the kernels read at once."""

_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Convolution:
    """The options of one along L, as one along 1 and L has them."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def of(self, x: Tensor, weight: Tensor) -> Tensor:
        """y [B, O, 1, L'] for x [B, C, 1, L] and the weight [O, C, 1, K]."""
        y: Tensor = aten.convolution(x, weight, None, self.stride, self.padding, self.dilation, False, [0, 0], 1)
        return y

    def gradients(self, dy: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Those of x and of the weight."""
        options = self.stride, self.padding, self.dilation, False, [0, 0], 1, [*wanted[:2], False]
        found: tuple[Tensor | None, ...] = aten.convolution_backward(dy, x, weight, None, *options)
        return found[:2]


def channels_last_convolutions(graph: Graph) -> int:
    """Give each such convolution, and each backward of one, its channels last; returns how many."""
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
    if given["transposed"] or given["groups"] != 1 or x.dim() != 3 or weight.dim() != 3:
        return None
    if x.dtype not in _NARROW or weight.dtype != x.dtype or x.device.type not in ON:
        return None
    channels = weight.shape[:2]
    if not all(isinstance(size, int) and size >= LEAST_CHANNELS and size % 8 == 0 for size in channels):
        return None
    (stride,), (padding,), (dilation,) = given["stride"], given["padding"], given["dilation"]
    if not all(isinstance(option, int) for option in (stride, padding, dilation)):
        return None
    return Convolution((1, stride), (0, padding), (1, dilation))


def _channels_last(x: Tensor) -> Tensor:
    """x [B, C, L] as [B, C, 1, L], copied: what computes it may write it so."""
    return x.unsqueeze(2).clone(memory_format=torch.channels_last)


def _write_forward(node: Node, given: dict[str, Any], found: Convolution) -> None:
    def convolved(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = found.of(_channels_last(x), _channels_last(weight)).squeeze(2)
        return laid_out_like(y if bias is None else y + bias[:, None], node.meta["val"])

    _write(node, convolved, [given[name] for name in ("input", "weight", "bias") if given[name] is not None])


def _write_backward(node: Node, given: dict[str, Any], found: Convolution) -> None:
    values = node.meta["val"]

    def gradients(dy: Tensor, x: Tensor, weight: Tensor) -> list[Tensor | None]:
        wanted = [value is not None for value in values]
        of_two = found.gradients(_channels_last(dy), _channels_last(x), _channels_last(weight), wanted)
        made = [None if each is None else each.squeeze(2) for each in of_two]
        made.append(dy.sum((0, 2)) if wanted[2] else None)
        return [each if each is None else laid_out_like(each, value) for each, value in zip(made, values, strict=True)]

    _write(node, gradients, [given[name] for name in ("grad_output", "input", "weight")])


def _write(node: Node, function: Callable[..., Any], inputs: Sequence[Node]) -> None:
    """Put ``function`` of ``inputs`` in the place of ``node``. PyTorch will find that a backward pass copies the input
    as the forward pass does, and save the copy in place of the input."""
    with no_guards(node):
        opened = traced(function, [each.meta["val"] for each in inputs])
    put_in_place(node, opened, inputs)
