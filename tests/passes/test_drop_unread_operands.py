"""Who wants a shape or a dtype gets it as such, and reads no tensor for it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from te_compile.passes.drop_unread_operands import drop_unread_operands
from te_compile.passes.text import ops_text
from tests.capturing import captured

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_a_mask_and_weights_that_look_at_the_scores_read_them_no_more() -> None:
    def run(scores: Tensor, mask: Tensor) -> Tensor:
        return mask.view_as(scores[:1]).expand_as(scores) + scores.double().type_as(scores)

    inputs = torch.randn(2, 3, 4), torch.randn(3, 4)
    gm, examples = captured(run, *inputs)
    assert drop_unread_operands(gm.graph) == 3
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    assert ops_text(gm.graph).replace("operator.", "") == textwrap.dedent("""\
        view_as = .view(l_mask_, 1, 3, 4)
        expand_as = .expand(view_as, 2, 3, 4)
        double = .double(l_scores_)
        type_as = .to(double, float32)
        add = add(expand_as, type_as)
        return (add,)""")
    assert torch.equal(gm(*examples)[0], run(*inputs))


@pytest.mark.parametrize(
    "run",
    [
        lambda x, y: x.expand(2, 3, 4) + y,
        lambda x, y: torch.where(y > 0, x, y),
        lambda x, y: x.to(y),
    ],
)
def test_other_calls_stay(run: Callable[[Tensor, Tensor], Tensor]) -> None:
    gm, _ = captured(run, torch.randn(3, 4), torch.randn(2, 3, 4))
    assert drop_unread_operands(gm.graph) == 0


def test_a_symbolic_shape_stays_that_of_its_tensor() -> None:
    x, y = torch.randn(4), torch.randn(6, 4)
    torch._dynamo.mark_dynamic(y, 0)
    gm, _ = captured(lambda x, y: x.expand_as(y) + y, x, y)
    assert drop_unread_operands(gm.graph) == 0
