"""A norm's backward reads a widened gradient before it was widened, without a bit of difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_compile.ops.norm_backward import NORM_BACKWARD
from te_compile.passes import JOINT_PASSES, manager
from te_compile.passes.arguments import arguments_of
from te_compile.passes.narrow_norm_gradients import narrow_norm_gradients
from te_compile.passes.pointwise_nodes import value_of
from tests.capturing import changed
from tests.compiling import compiled, te_nodes, train_step

ROWS, COLUMNS = 6, 32
SHAPE = (2, 3, COLUMNS)


def backward(dy: Tensor, x: Tensor, w: Tensor) -> Any:
    """A layer norm's backward from matrices; its statistics are those of x up to a constant, which is of no matter."""
    mean, rstd = x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True).rsqrt()
    return NORM_BACKWARD(dy, x, w, mean, rstd, None, "layer", True, True, torch.float32)


def read(function: Callable[..., Any], dtype: torch.dtype = torch.bfloat16) -> tuple[int, torch.dtype]:
    """What the pass counts, and of which dtype the norm then reads dy; results stay as they are."""
    given = torch.randn(ROWS, COLUMNS).to(dtype), torch.randn(ROWS, COLUMNS), torch.randn(COLUMNS)
    count, graph, results = changed(narrow_norm_gradients, function, *given)
    assert all(torch.equal(got, want) and got.stride() == want.stride() for got, want in results)
    (norm,) = graph.find_nodes(op="call_function", target=NORM_BACKWARD)
    value = value_of(arguments_of(norm)["dy"])
    assert value is not None and value.shape == (ROWS, COLUMNS)
    return count, value.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_widened_gradient_is_read_as_it_was(dtype: torch.dtype) -> None:
    assert read(lambda dy, x, w: backward(dy.float(), x, w), dtype) == (1, dtype)


def test_views_between_the_two_are_seen_through() -> None:
    def function(dy: Tensor, x: Tensor, w: Tensor) -> Any:
        return backward(dy.view(SHAPE).float().view(1, *SHAPE).view(ROWS, COLUMNS), x, w)

    assert read(function) == (1, torch.bfloat16)


def test_whoever_else_reads_the_copy_still_does() -> None:
    def function(dy: Tensor, x: Tensor, w: Tensor) -> Any:
        wide = dy.float()
        return (*backward(wide, x, w), wide.sin())

    assert read(function) == (1, torch.bfloat16)


LEFT: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "computed in float32": lambda dy, x, w: backward(dy.float() * 2, x, w),
    "another order": lambda dy, x, w: backward(dy.float().view(COLUMNS, ROWS).t(), x, w),
    "never narrow": lambda dy, x, w: backward(x.view(SHAPE).view(ROWS, COLUMNS), dy.float(), w),
    "narrowed on the way": lambda dy, x, w: backward(x.bfloat16(), dy.float(), w),
}


@pytest.mark.parametrize("case", LEFT)
def test_other_gradients_are_left_alone(case: str) -> None:
    assert read(LEFT[case])[0] == 0


def test_a_double_is_no_gradient_that_a_kernel_would_widen() -> None:
    assert read(lambda dy, x, w: backward(dy.float(), x, w), torch.float64) == (0, torch.float32)


class Block(nn.Module):
    """A norm before a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(COLUMNS), nn.Linear(COLUMNS, COLUMNS)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., COLUMNS]."""
        out: Tensor = self.fc(self.norm(x))
        return out


@pytest.mark.usefixtures("fresh_dynamo", "norm_backward_kernel")
@pytest.mark.parametrize("autocast", [False, True])
def test_a_training_step_under_autocast_has_the_same_bits(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Block(), torch.randn(SHAPE)
    results = []
    for passes in (JOINT_PASSES, tuple(each for each in JOINT_PASSES if each is not narrow_norm_gradients)):
        torch._dynamo.reset()
        monkeypatch.setattr("te_compile.compilers.JOINT_PASSES", passes)
        fast = compiled(model, recipe="current")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), manager.recording() as records:
            results.append(train_step(model, fast, x)[1])
        (norm,) = te_nodes(records[0], "norm_backward")
        value = value_of(arguments_of(norm)["dy"])
        assert value is not None
        assert (value.dtype == torch.bfloat16) == (autocast and passes is JOINT_PASSES)
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[1][name], gradient) for name, gradient in results[0].items())
