"""Regions: one graph or many, a value has one home at the root."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_compile.passes.regions import regions_of
from tests.capturing import captured
from tests.compiling import compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Checkpointed(nn.Module):
    """A linear in a checkpointed body, optionally with a second body inside it."""

    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.nested = nested

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))

    def middle(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) + x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.middle if self.nested else self.inner, x.sin(), use_reentrant=False)


def test_a_plain_graph_is_one_region() -> None:
    gm, _ = captured(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(4, 16))
    regions, left = regions_of(gm)
    assert [region.module for region in regions] == [gm] and not left
    assert regions[0].parent is None


@pytest.mark.parametrize("nested", [False, True])
def test_checkpointed_bodies_are_regions_below_the_one_that_calls_them(nested: bool) -> None:
    gm, _ = captured(Checkpointed(nested), torch.randn(4, 16))
    regions, left = regions_of(gm)
    assert len(regions) == (3 if nested else 2) and not left
    assert regions[1].parent is regions[0]
    assert all(region.call in region.parent.graph.nodes for region in regions[1:])


@pytest.mark.parametrize("nested", [False, True])
def test_a_placeholder_of_a_body_has_its_parameter_at_the_root(nested: bool) -> None:
    gm, examples = captured(Checkpointed(nested), torch.randn(4, 16))
    regions, _ = regions_of(gm)
    innermost = regions[-1]
    (linear,) = innermost.graph.find_nodes(op="call_function", target=torch._C._nn.linear)
    root = innermost.at_root(linear.args[1])
    position = gm.graph.find_nodes(op="placeholder").index(root)
    assert isinstance(examples[position], nn.Parameter) and examples[position].shape == (16, 16)


def test_a_value_computed_inside_a_body_is_not_at_the_root() -> None:
    gm, _ = captured(Checkpointed(), torch.randn(4, 16))
    body = regions_of(gm)[0][1]
    (linear,) = body.graph.find_nodes(op="call_function", target=torch._C._nn.linear)
    assert body.at_root(linear) is None


@pytest.mark.parametrize("nested", [False, True])
def test_values_can_be_brought_in_and_sent_out_through_every_level(nested: bool) -> None:
    model = Checkpointed(nested)
    x = torch.randn(4, 16)
    gm, examples = captured(model, x)
    regions, _ = regions_of(gm)
    innermost = regions[-1]
    with gm.graph.inserting_before(regions[1].call):
        extra = gm.graph.call_function(torch.full, ((), 7.0))
    inside = innermost.bring_in(extra)
    assert innermost.bring_in(extra) is inside, "one value needs one operand"
    with innermost.graph.inserting_before(innermost.graph.output_node()):
        changed = innermost.graph.call_function(torch.add, (inside, 1.0))
    outside = innermost.send_out(changed)
    assert outside.graph is gm.graph
    gm.graph.output_node().args = ((*gm.graph.output_node().args[0], outside),)
    for region in reversed(regions):
        region.graph.lint()
        region.module.recompile()
    y, seen = gm(*examples)
    assert seen == 8.0
    torch.testing.assert_close(y, model(x))


def attention_under(x: Tensor, mask: Tensor) -> Tensor:
    return (x @ x.mT + mask).softmax(-1) @ x


def handed_straight(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Attention in a checkpointed body that is handed what ``make`` makes of a mask, and called after how."""
    return lambda x, mask: checkpoint(attention_under, x, make(mask), use_reentrant=False)


def handed_by_a_name(x: Tensor, mask: Tensor) -> Tensor:
    new_ones = mask[..., :1].float()
    return checkpoint(lambda x, scale: (x @ x.mT * scale).softmax(-1) @ x, x, new_ones, use_reentrant=False)


@pytest.mark.parametrize(
    "run",
    [
        handed_straight(lambda mask: mask.to(torch.float32)),
        handed_straight(lambda mask: mask.float().expand(2, 3, 6, 6)),
        handed_straight(lambda mask: mask.float().clone()),
        handed_by_a_name,
    ],
)
def test_an_operand_of_a_body_is_not_taken_for_a_call_of_what_it_is_named_after(
    run: Callable[[Tensor, Tensor], Tensor],
) -> None:
    x, mask = torch.randn(2, 3, 6, 6, requires_grad=True), torch.randn(3, 6, 6).double()
    y, wanted = compiled(run)(x, mask), run(x, mask)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


def test_a_higher_order_operator_that_is_not_entered_is_reported() -> None:
    fc = nn.Linear(16, 16)

    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: fc(t), lambda t: t.sin(), (x,))

    with torch.no_grad():
        gm, _ = captured(branch, torch.randn(4, 16))
    regions, left = regions_of(gm)
    assert len(regions) == 1
    assert [each.operator for each in left] == ["cond", "cond"]


class Own(torch.autograd.Function):
    """A linear with a backward of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.t() @ x


def test_of_a_users_function_the_forward_alone_is_reported_and_what_it_is_given_is_known() -> None:
    weight = nn.Parameter(torch.randn(16, 16))
    gm, _ = captured(lambda x: Own.apply(x, weight).sin(), torch.randn(4, 16))
    _, (left,) = regions_of(gm)
    assert left.operator == "autograd_function_apply"
    assert [node.target for node in left.body.graph.nodes if node.target is torch._C._nn.linear]
    outside = gm.graph.find_nodes(op="placeholder")
    inside = left.body.graph.find_nodes(op="placeholder")
    assert list(left.handed) == inside and set(left.handed.values()) == set(outside)
