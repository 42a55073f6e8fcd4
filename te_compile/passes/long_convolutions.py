"""Convolutions in groups with long kernels, along one dimension, become products of matrices; forward and backward.

cuDNN runs such a convolution group by group, or without tensor cores. The one by which wav2vec 2.0, HuBERT and WavLM
tell positions apart has 128 taps and 16 groups: in the base model, 8 sequences of 499 frames in bf16, cuDNN 9.19 takes
34.6 ms for it on an H200, and 4.0 ms for the gradient of its input. As products (toeplitz.py) they take 0.2 ms each.

A convolution in 16 bits on a GPU is taken, if stride and dilation are 1, and its gradients with it. What has few
channels in a group makes narrow products, and depthwise convolutions none at all; what has few taps cuDNN runs well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph

from te_compile.passes import toeplitz
from te_compile.passes.captured_nodes import size_hint
from te_compile.passes.convolution_ways import is_narrow, rewrite_convolutions
from te_compile.passes.new_nodes import keep_in_backward

ON = {"cuda"}
"""The types of device on which cuDNN would run it."""

LEAST_CHANNELS, MOST_CHANNELS = 16, 128
"""Of a group, in and out; where taps are few, no more than four times those."""
LEAST_TAPS = 16
"""On an H200 products with 9 taps win one direction of three, and those with 19 halve the sum (docs/passes.md)."""


@dataclass(frozen=True)
class AsProducts:
    """The way, by the options of toeplitz.py."""

    padding: int
    groups: int
    size: int

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """One product for each group."""
        return toeplitz.convolution(x, weight, self.padding, self.groups, self.size)

    def gradients(
        self, dy: Tensor, x: Tensor, weight: Tensor, of_x: bool, of_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """One each."""
        how = self.padding, self.groups, self.size
        return (
            toeplitz.input_gradient(dy, weight, *how) if of_x else None,
            toeplitz.weight_gradient(dy, x, weight.shape[2], *how) if of_weight else None,
        )


def long_convolutions(graph: Graph) -> int:
    """Write each such convolution, and each backward of one, as products; returns how many."""
    written = rewrite_convolutions(graph, _way_of)
    for nodes in written:
        keep_in_backward(nodes)  # windows and matrices are larger than what they are made of
    return len(written)


def _way_of(given: dict[str, Any]) -> AsProducts | None:
    """How a convolution with these arguments is computed; None if that is not for us."""
    if not is_narrow(given, ON) or given["groups"] == 1:
        return None
    x, (outputs, channels, taps) = given["input"].meta["val"], given["weight"].meta["val"].shape
    groups, (padding,), options = given["groups"], given["padding"], (*given["stride"], *given["dilation"])
    if options != (1, 1) or not 0 <= padding < taps or taps < LEAST_TAPS:
        return None
    most = min(MOST_CHANNELS, 4 * taps)
    if not all(LEAST_CHANNELS <= size <= most for size in (channels, outputs // groups)):
        return None
    places = size_hint(x.shape[0]) * size_hint(x.shape[2])
    return AsProducts(padding, groups, toeplitz.positions_of(places, channels, taps))
