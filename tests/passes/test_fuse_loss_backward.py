"""The gradient of logits that are returned becomes part of the loss's backward, and is rounded with it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from te_compile.ops.cross_entropy import CROSS_ENTROPY_BACKWARD, cross_entropy_backward_reference
from te_compile.passes.arguments import arguments_of
from te_compile.passes.fuse_loss_backward import fuse_loss_backward
from te_compile.passes.text import ops_text
from tests.capturing import changed, traced

CLASSES = 40
SHAPE = (2, 3, CLASSES)
BF16 = torch.bfloat16


def inputs(dtype: torch.dtype = BF16) -> list[Tensor]:
    """Logits [N, V], targets, logsumexp and gradients [N], and the other gradient of the logits, [B, S, V]."""
    logits, targets = torch.randn(6, CLASSES).to(dtype), torch.randint(0, CLASSES, (6,))
    return [logits, targets, logits.float().logsumexp(1), torch.randn(6), torch.randn(SHAPE).to(dtype)]


def fused(function: Callable[..., Any], *given: Tensor) -> tuple[int, str]:
    """What the pass counts on the graph of ``function``, and the text after it. Results stay, up to one rounding."""
    count, graph, results = changed(fuse_loss_backward, function, *given)
    for got, want in results:
        assert got.shape == want.shape and got.stride() == want.stride() and got.dtype == want.dtype
        # The sum of two that are rounded apart may be off by a rounding of each, which is more of a small sum.
        torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)
    for node in graph.find_nodes(op="call_function", target=CROSS_ENTROPY_BACKWARD):
        assert node.meta["val"].shape == (6, CLASSES)
    return count, ops_text(graph)


def backward(x: Tensor, t: Tensor, lse: Tensor, g: Tensor) -> Tensor:
    return CROSS_ENTROPY_BACKWARD(x, t, lse, g, -100)


def test_the_graph_after() -> None:
    def function(x: Tensor, t: Tensor, lse: Tensor, g: Tensor, tangent: Tensor) -> Any:
        return (tangent + backward(x, t, lse, g).view(SHAPE),)

    count, text = fused(function, *inputs())
    assert count == 1
    assert text == textwrap.dedent("""\
        view_1 = aten.view(tangent_1, [-1, 40])
        cross_entropy_backward = te.cross_entropy_backward(x_1, t_1, lse_1, g_1, -100, addend=view_1)
        view = aten.view(cross_entropy_backward, [2, 3, 40])
        return (view,)""")


def test_the_sum_is_rounded_once() -> None:
    def function(x: Tensor, t: Tensor, lse: Tensor, g: Tensor, tangent: Tensor) -> Any:
        return backward(x, t, lse, g) + tangent.view(6, CLASSES)

    x, t, lse, g, tangent = given = inputs()
    gm = traced(function, *given)
    assert fuse_loss_backward(gm.graph) == 1
    gm.recompile()
    exact = cross_entropy_backward_reference(x.float(), t, lse, g, -100, tangent.view(6, CLASSES).float())
    assert torch.equal(gm(*given), exact.to(BF16))


Rest = Callable[[Tensor, Tensor], Any]
FUSED: dict[str, Rest] = {
    "the gradient of the loss first": lambda dx, r: (dx.view(SHAPE) + r,),
    "matrices": lambda dx, r: (r.view(6, CLASSES) + dx,),
    "a bias that reads the sum too": lambda dx, r: (lambda total: (total, total.sum((0, 1))))(r + dx.view(SHAPE)),
    "a gradient that comes later": lambda dx, r: (dx.view(SHAPE) + r.sin().cos(),),
    "of several sums the first": lambda dx, r: (r + dx.view(SHAPE) + r.sin(),),
    "rows apart in memory": lambda dx, r: (dx + torch.cat([r, r], 2).view(6, 2 * CLASSES)[:, :CLASSES],),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_it_fires(name: str, dtype: torch.dtype) -> None:
    def function(x: Tensor, t: Tensor, lse: Tensor, g: Tensor, tangent: Tensor) -> Any:
        return FUSED[name](backward(x, t, lse, g), tangent)

    assert fused(function, *inputs(dtype))[0] == 1


def test_a_gradient_in_float32_is_read_before_its_cast() -> None:
    def function(x: Tensor, t: Tensor, lse: Tensor, g: Tensor, tangent: Tensor) -> Any:
        narrow = torch.ops.prims.convert_element_type.default(tangent, BF16)
        return (narrow + backward(x, t, lse, g).view(SHAPE),)

    x, t, lse, g, tangent = inputs()
    count, text = fused(function, x, t, lse, g, tangent.float())
    assert count == 1 and "addend=view_1" in text and "view_1 = aten.view(tangent_1" in text


def test_a_cast_that_somebody_else_reads_is_read_as_it_is() -> None:
    def function(x: Tensor, t: Tensor, lse: Tensor, g: Tensor, tangent: Tensor) -> Any:
        narrow = torch.ops.prims.convert_element_type.default(tangent, BF16)
        return narrow + backward(x, t, lse, g).view(SHAPE), narrow.sin()

    x, t, lse, g, tangent = inputs()
    count, text = fused(function, x, t, lse, g, tangent.float())
    assert count == 1 and "= aten.view(convert_element_type" in text


LEFT: dict[str, Rest] = {
    "another reader of the gradient": lambda dx, r: (dx.view(SHAPE) + r, dx.sin()),
    "another reader of its view": lambda dx, r: (lambda v: (v + r, v.sin()))(dx.view(SHAPE)),
    "the gradient is an output": lambda dx, r: (dx.view(SHAPE) + r, dx),
    "alpha": lambda dx, r: (torch.add(dx.view(SHAPE), r, alpha=2),),
    "a wider dtype": lambda dx, r: (dx.view(SHAPE) + r.double(),),
    "a broadcast row": lambda dx, r: (dx.view(SHAPE) + r[0, 0],),
    "a broadcast of the gradient": lambda dx, r: (dx.view(1, *SHAPE) + torch.stack([r, r]),),
    "a number": lambda dx, r: (dx.view(SHAPE) + 1.0,),
    "twice itself": lambda dx, r: (lambda v: (v + v,))(dx.view(SHAPE)),
    "no rows in memory": lambda dx, r: (dx.view(SHAPE) + r.transpose(1, 2).contiguous().transpose(1, 2),),
    "a difference": lambda dx, r: (dx.view(SHAPE) - r,),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone(name: str) -> None:
    def function(x: Tensor, t: Tensor, lse: Tensor, g: Tensor, tangent: Tensor) -> Any:
        return LEFT[name](backward(x, t, lse, g), tangent)

    count, text = fused(function, *inputs())
    assert count == 0 and "addend" not in text


def test_a_second_sum_is_not_taken_into_a_backward_that_adds_already() -> None:
    def function(x: Tensor, t: Tensor, lse: Tensor, g: Tensor, tangent: Tensor) -> Any:
        return (CROSS_ENTROPY_BACKWARD(x, t, lse, g, -100, x) + tangent.view(6, CLASSES),)

    assert fused(function, *inputs())[0] == 0


@pytest.mark.parametrize("key", ["partitioner_tag", "recompute", "ac_graph_id"])
def test_sums_of_another_phase_or_region_are_left(key: str) -> None:
    def function(x: Tensor, t: Tensor, lse: Tensor, g: Tensor, tangent: Tensor) -> Any:
        return (tangent + backward(x, t, lse, g).view(SHAPE),)

    gm = traced(function, *inputs())
    (total,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    total.meta[key] = "another"
    assert fuse_loss_backward(gm.graph) == 0
    (node,) = gm.graph.find_nodes(op="call_function", target=CROSS_ENTROPY_BACKWARD)
    assert arguments_of(node)["addend"] is None
