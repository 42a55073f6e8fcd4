"""A tensor that is changed as the next thing after it was made is made so; what somebody saw before stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from te_compile.passes.make_apart import make_apart
from te_compile.passes.text import ops_text
from tests.capturing import captured

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Run = Callable[[Tensor], Tensor]


def _applied(run: Run, x: Tensor) -> tuple[int, str]:
    """How many changes are made apart, with the same result; and the graph."""
    gm, examples = captured(run, x)
    count = make_apart(gm.graph)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*examples)[0], run(x))
    return count, ops_text(gm.graph)


@pytest.mark.parametrize(("run", "expected"), [
    (lambda x: torch.full((3, 3), -1.0).triu_(1) + x, 1),
    (lambda x: torch.empty(3, 3).fill_(2).tril_() + x, 2),
    (lambda x: x.new_zeros(3, 3).masked_fill_(x > 0, 4.0) + x, 1),
    (lambda x: torch.zeros(3, 3, dtype=torch.int64).fill_(1.5) + x, 1),
])  # fmt: skip
def test_what_changes_a_new_tensor_makes_another(run: Run, expected: int) -> None:
    count, text = _applied(run, torch.randn(3, 3))
    assert count == expected
    assert "_(" not in text, text


def _seen_before(x: Tensor) -> Tensor:
    made = torch.ones(3, 3)
    view = made[0]
    made.triu_(1)
    return made + view + x


def _dropped(x: Tensor) -> Tensor:
    made = torch.ones(3, 3)
    made.triu_(1)
    return made + x


@pytest.mark.parametrize("run", [
    _seen_before, _dropped, lambda x: (x * 2).triu_(1), lambda x: torch.ones(3, 3).fill_(x[0, 0]) + x,
    lambda x: torch.ones(3, 3).cos().fill_(1.0) + x,
])  # fmt: skip
def test_what_somebody_else_may_see_stays(run: Run) -> None:
    assert _applied(run, torch.randn(3, 3))[0] == 0
