"""How long the convolutions of a graph take on the device, by estimate, where they are no linears.

They run in high precision whatever becomes of the linears, and are part of what a step takes: the features that
wav2vec 2.0 listens to are seven convolutions of a long signal, and a step that waits for these does not wait for the
host. Those that are linears are weighed as such.

    y[b, n, …] = Σ w[n, c, p, …] · x[b, c, …]          2 FLOPs for each element of the result and of one w[n]

One that is transposed spreads each element of x over the result instead. The gradients of x and of w are products of
as many FLOPs each, where anybody wants them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from torch import Tensor
from torch.fx import Graph, Node

from te_compile.passes import speed
from te_compile.passes.captured_nodes import argument, called, size_hint, value_of

_CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}
_TRANSPOSED = {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}


def convolutions_microseconds(graphs: Iterable[Graph], linears: Collection[Node], training: bool) -> float:
    """The device's time for the convolutions of Dynamo's ``graphs`` that are none of ``linears``."""
    return sum(
        _time_of(node, training)
        for graph in graphs
        for node in graph.nodes
        if called(node) in _CONVOLUTIONS | _TRANSPOSED and node not in linears
    )


def _time_of(node: Node, training: bool) -> float:
    """The device's time for one; 0 where nobody knows its shape or nobody reads it."""
    x, weight = (value_of(argument(node, place, name)) for place, name in ((0, "input"), (1, "weight")))
    result = value_of(node)
    if not node.users or not all(isinstance(each, Tensor) for each in (x, weight, result)):
        return 0.0
    is_transposed = called(node) in _TRANSPOSED
    of_x, of_weight, of_result = (math.prod(map(size_hint, each.shape)) for each in (x, weight, result))
    first, second = map(size_hint, weight.shape[:2])
    flops = 2.0 * (of_x if is_transposed else of_result) * of_weight / max(first, 1)
    return speed.convolution_microseconds(
        flops, result.element_size() * (of_x + of_result), result.element_size() * of_weight,
        channels=first if is_transposed else second,
        gradients=x.requires_grad + weight.requires_grad if training else 0,
    )  # fmt: skip
