"""What was changed in place is read from the change on; what was read before it, and results that are used, stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from te_compile.passes.follow_writes import follow_writes
from tests.capturing import captured

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_what_follows_a_statement_that_writes_reads_its_result() -> None:
    def run(x: Tensor, mask: Tensor) -> Tensor:
        scores = x * 2.0
        before = scores.sin()
        scores.masked_fill_(mask, -1.0)
        scores.add_(1.0)
        return before + scores.cos()

    inputs = torch.randn(3, 4), torch.rand(3, 4) > 0.5
    gm, examples = captured(run, *inputs)
    assert follow_writes(gm.graph) == 2
    gm.graph.lint()
    gm.recompile()
    (cos,), (sin,), (add,), (fill,) = (
        gm.graph.find_nodes(op="call_method", target=each) for each in ("cos", "sin", "add_", "masked_fill_")
    )
    assert cos.args[0] is add and add.args[0] is fill and sin.args[0] is fill.args[0]
    torch.testing.assert_close(gm(*examples)[0], run(*inputs))


def _taken_from_there(x: Tensor, out: Tensor) -> Tensor:
    y = x + 1.0
    return y.mul_(2.0).sin() + y


def _an_input(x: Tensor, out: Tensor) -> Tensor:
    x.mul_(2.0)
    return x.sin()


def _never_read_again(x: Tensor, out: Tensor) -> Tensor:
    y = x + 1.0
    z = y.sin()
    y.mul_(2.0)
    return z


@pytest.mark.parametrize("run", [_taken_from_there, _an_input, _never_read_again])
def test_other_writes_are_left_alone(run: object) -> None:
    gm, _ = captured(run, torch.randn(3, 4), torch.empty(3, 4))
    assert follow_writes(gm.graph) == 0


def test_a_write_into_a_parameter_is_left_alone() -> None:
    weight = nn.Parameter(torch.randn(3, 4), requires_grad=False)

    def run(x: Tensor) -> Tensor:
        weight.mul_(0.5)
        return x @ weight

    gm, _ = captured(run, torch.randn(2, 3))
    assert follow_writes(gm.graph) == 0
