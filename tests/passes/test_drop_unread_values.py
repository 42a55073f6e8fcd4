"""What nobody reads goes, unless it does something besides, and then reads nothing that others look at."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_compile import explain
from te_compile.passes.drop_unread_values import drop_unread_values
from te_compile.passes.text import ops_text
from tests.capturing import captured
from tests.spelled_out import assert_recognised, operands

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_a_copy_and_what_is_made_of_it_go() -> None:
    def run(x: Tensor) -> Tensor:
        kept = (x * 2).clone()
        kept.softmax(-1).mean(-1)
        x.max(-1)
        return x + 1

    gm, examples = captured(run, torch.randn(2, 3))
    assert drop_unread_values(gm.graph) >= 5
    gm.graph.lint()
    gm.recompile()
    assert ops_text(gm.graph).replace("operator.", "") == textwrap.dedent("""\
        add = add(l_x_, 1)
        return (add,)""")
    assert torch.equal(gm(*examples)[0], run(*examples))


def _writes(x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(2)
    y[0] = 1
    torch.add(x, 1, out=y)
    return y


def _draws(x: Tensor) -> Tensor:
    F.dropout(x, 0.5)
    torch.rand_like(x)
    x.clamp(0, 1).bernoulli()
    return x + 1


def _multiplies(x: Tensor) -> Tensor:
    x @ x.mT
    F.linear(x, x)
    return x + 1


def _switches(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x + 1
    return y * x


@pytest.mark.parametrize("run", [_writes, _draws, _multiplies, _switches])
def test_what_writes_draws_multiplies_or_switches_stays(run: Callable[[Tensor], Tensor]) -> None:
    gm, _ = captured(run, torch.randn(3, 3))
    before = ops_text(gm.graph)
    assert drop_unread_values(gm.graph) == 0
    assert ops_text(gm.graph) == before


def test_a_size_that_the_data_decides_stays_known() -> None:
    def run(x: Tensor) -> Tensor:
        (x > 0).nonzero()
        return x + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        gm, _ = captured(run, torch.randn(4))
    assert drop_unread_values(gm.graph) == 0


def _keeps_its_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    asked_for_by_nobody = scores.clone()
    weights = scores.softmax(-1)
    shown = (asked_for_by_nobody, weights.mean(1))  # noqa: F841
    return weights @ v


def test_attention_whose_scores_are_kept_for_nobody_is_recognised() -> None:
    assert_recognised(_keeps_its_scores, *operands())


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        return _keeps_its_scores(*self.qkv(x).unflatten(-1, (6, 16)).transpose(1, 2).chunk(3, 1))


def test_a_report_does_not_say_that_somebody_reads_them() -> None:
    (attention,) = explain(_Attention(), torch.randn(2, 8, 32)).attentions
    assert attention.status == "recognised", attention
