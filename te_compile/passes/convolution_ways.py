"""Other ways to compute the convolutions along one dimension that a joint graph has, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, Node

from te_compile.passes.arguments import arguments_of
from te_compile.passes.traced import laid_out_like, no_guards, put_in_place, traced

_FORWARD, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
_NARROW = (torch.bfloat16, torch.float16)


class Way(Protocol):
    """How y [B, O, L'] of x [B, C, L] and a weight [O, C / groups, K] is computed, but for the bias."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """y, in whatever order in memory."""
        ...

    def gradients(
        self, dy: Tensor, x: Tensor, weight: Tensor, of_x: bool, of_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Those of x and the weight that are wanted, in whatever order in memory."""
        ...


def is_narrow(given: dict[str, Any], on: Collection[str]) -> bool:
    """Is a call with these arguments one along one dimension in 16 bits, by a weight of known size, on such a device?

    float32 is another matter: convolutions and products have each their own setting for TF32.
    """
    x, weight = (given[name].meta["val"] for name in ("input", "weight"))
    if given["transposed"] or x.dim() != 3 or weight.dim() != 3 or x.device.type not in on:
        return False
    options = (*given["stride"], *given["padding"], *given["dilation"])
    if not all(isinstance(size, int) for size in (*weight.shape, *options)):
        return False
    return x.dtype in _NARROW and weight.dtype == x.dtype


def rewrite_convolutions(graph: Graph, way_of: Callable[[dict[str, Any]], Way | None]) -> list[list[Node]]:
    """Have each convolution, and each backward of one, be computed as ``way_of`` its arguments says, if it says so.

    Returns the nodes of each. What they compute lies in memory as before: views of it are views still.
    """
    written: list[list[Node]] = []
    for target, write in ((_FORWARD, _write_forward), (_BACKWARD, _write_backward)):
        for node in graph.find_nodes(op="call_function", target=target):
            given = arguments_of(node)
            way = way_of(given)
            if way is not None:
                written.append(write(node, given, way))
    return written


def _write_forward(node: Node, given: dict[str, Any], way: Way) -> list[Node]:
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = way.forward(x, weight)
        return laid_out_like(y if bias is None else y + bias[:, None], node.meta["val"])

    return _write(node, forward, [given[name] for name in ("input", "weight", "bias") if given[name] is not None])


def _write_backward(node: Node, given: dict[str, Any], way: Way) -> list[Node]:
    values = node.meta["val"]

    def backward(dy: Tensor, x: Tensor, weight: Tensor) -> list[Tensor | None]:
        of_x, of_weight, of_bias = (value is not None for value in values)
        made = (*way.gradients(dy, x, weight, of_x, of_weight), dy.sum((0, 2)) if of_bias else None)
        return [each if each is None else laid_out_like(each, value) for each, value in zip(made, values, strict=True)]

    return _write(node, backward, [given[name] for name in ("grad_output", "input", "weight")])


def _write(node: Node, function: Callable[..., Any], inputs: Sequence[Node]) -> list[Node]:
    with no_guards(node):
        opened = traced(function, [each.meta["val"] for each in inputs])
    return put_in_place(node, opened, inputs)
