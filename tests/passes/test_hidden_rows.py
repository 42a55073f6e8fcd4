"""Queries that a mask hides from every key get what the model computes for them, whatever number hides."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.passes.recognise_attention import STAYS
from tests.spelled_out import (
    BATCH,
    HEADS,
    LENGTH,
    MINIMUM,
    WIDTH,
    assert_recognised,
    assert_stays,
    heads,
    operands,
    rewritten,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

NUMBERS = (-1e4, -1e6, -1e8, -1e9, -1e20, -1e30, MINIMUM)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 3e-2}

Attention = Callable[..., Tensor]


def hidden_keys() -> Tensor:
    """Causal, and the first keys of one sequence are padding: its first queries see nothing."""
    padding = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    padding[0, ..., :5] = True
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) | padding


def outcome(run: Attention, inputs: list[Any], leaves: list[Tensor], pull: Tensor) -> list[Tensor]:
    """The result of ``run`` and the gradients of ``leaves``, where ``pull`` is the result's."""
    result = run(*inputs)
    result = result[0] if isinstance(result, (tuple, list)) else result
    return [result.detach(), *torch.autograd.grad((result.float() * pull).sum(), leaves)]


def assert_rows_agree(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    """In the whole, and in each row beside its own size; what is far smaller than the others, beside theirs."""
    got, wanted = got.double(), wanted.double()
    wrong, size = (got - wanted).norm(dim=-1), wanted.norm(dim=-1)
    assert float((got - wanted).norm()) <= tolerance * float(wanted.norm())
    assert float((wrong / size.clamp(min=float(size.mean()))).max()) <= tolerance


def assert_agrees(
    run: Attention,
    hidden: Tensor,
    *masks: Tensor,
    dtype: torch.dtype = torch.float32,
    tolerance: float | None = None,
    forgets: bool = False,
) -> None:
    """``run(q, k, v, *masks)`` is recognised, and every row of its result and of its gradients is the model's.

    forgets: autograd does not see that the scores of rows that are hidden entirely are rounded away, and they get no
    gradient here. Then queries and keys are compared with what other rows alone send them.
    """
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    q, k, v = operands(dtype)
    count, gm, examples = rewritten(run, q, k, v, *masks)
    assert count == 1, [node.meta.get(STAYS) for node in gm.graph.nodes if STAYS in node.meta]
    pull = torch.randn(BATCH, HEADS, LENGTH, WIDTH)
    got = outcome(gm, examples, [q, k, v], pull)
    wanted = outcome(run, [q, k, v, *masks], [q, k, v], pull)
    if forgets:
        shown = ~hidden.all(-1, keepdim=True)
        _, wanted[1], wanted[2], _ = outcome(run, [q, k, v, *masks], [q, k, v], pull * shown)
    for mine, theirs in zip(got, wanted, strict=True):
        assert_rows_agree(mine, theirs, tolerance)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_overwritten_rows_agree_with_their_gradients(dtype: torch.dtype, wide: bool, number: float) -> None:
    number = max(number, torch.finfo(torch.float32 if wide else dtype).min)

    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        scores = q @ k.mT * 0.3
        scores = scores.float() if wide else scores
        return F.softmax(scores.masked_fill(hidden, number), dim=-1).to(v.dtype) @ v

    assert_agrees(run, hidden_keys(), hidden_keys(), dtype=dtype)


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.softmax(q @ k.mT * 0.3 + mask, dim=-1) @ v


@pytest.mark.parametrize("number", [-1e9, -1e20, -1e30, MINIMUM])
def test_added_numbers_that_swallow_scores_leave_rows_alike(number: float) -> None:
    mask = torch.zeros(hidden_keys().shape).masked_fill(hidden_keys(), number)
    assert_agrees(added, hidden_keys(), mask, forgets=True)


@pytest.mark.parametrize("number", NUMBERS)
def test_added_in_bfloat16_every_number_swallows_scores(number: float) -> None:
    number = max(number, torch.finfo(torch.bfloat16).min)
    mask = torch.zeros(hidden_keys().shape, dtype=torch.bfloat16).masked_fill(hidden_keys(), number)
    assert_agrees(added, hidden_keys(), mask, dtype=torch.bfloat16, forgets=True)


def test_a_small_number_added_in_float32_keeps_the_scores_and_their_gradients() -> None:
    mask = torch.zeros(hidden_keys().shape).masked_fill(hidden_keys(), -1e4)
    assert_agrees(added, hidden_keys(), mask, tolerance=4e-3)  # float32 has steps of 1e-3 there


@pytest.mark.parametrize("mask", [
    lambda hidden: -(10**9 * hidden.float()), lambda hidden: torch.tensor([0.0, -1e9])[hidden.long()],
    lambda hidden: F.embedding(hidden.long(), torch.tensor([[0.0], [-1e9]]))[..., 0],
], ids=["whole number", "list", "table"])  # fmt: skip
def test_numbers_that_hide_are_found_wherever_they_stand(mask: Callable[[Tensor], Tensor]) -> None:
    """The values of rows that are hidden entirely get their gradient."""

    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return F.softmax(q @ k.mT * 0.3 + mask(hidden), dim=-1) @ v

    assert_agrees(run, hidden_keys(), hidden_keys(), forgets=True)


@pytest.mark.parametrize("number", [-1e6, -1e8])
def test_an_added_number_that_keeps_scores_in_coarse_steps_stays_where_it_may_hide_a_row(number: float) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return F.softmax(q @ k.mT * 0.3 + hidden.float() * number, dim=-1) @ v

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.mT * 0.3 + torch.ones(LENGTH, LENGTH).triu(1) * number, dim=-1) @ v

    assert_stays("rounds the scores", run, *operands(), hidden_keys())
    assert_recognised(causal, *operands())


@pytest.mark.parametrize(("number", "factor"), [(2.0**15, 1.0), (2.0**16, 0.5), (2.0**14, 2.0)])
def test_up_to_steps_of_a_256th_an_added_number_keeps_scores_and_above_it_stays(number: float, factor: float) -> None:
    """As it counts after it was scaled; float32 has steps of 2^-9 before 2^15, and of 2^-8 behind it."""

    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return F.softmax((q @ k.mT * 0.3 + hidden.float() * -number) * factor, dim=-1) @ v

    def one_more(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return F.softmax((q @ k.mT * 0.3 + hidden.float() * -(number + 1)) * factor, dim=-1) @ v

    assert_agrees(run, hidden_keys(), hidden_keys(), tolerance=2e-2)
    assert_stays("rounds the scores", one_more, *operands(), hidden_keys())


@pytest.mark.parametrize(("number", "factor"), [(2.0**28, 1.0), (2.0**29, 0.5), (2.0**27, 2.0)])
def test_from_steps_of_32_on_an_added_number_swallows_scores_and_below_it_stays(number: float, factor: float) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return F.softmax((q @ k.mT * 0.1 + hidden.float() * -number) * factor, dim=-1) @ v

    def a_little_less(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return F.softmax((q @ k.mT * 0.1 + hidden.float() * -(number - 1)) * factor, dim=-1) @ v

    assert_agrees(run, hidden_keys(), hidden_keys(), forgets=True)
    assert_stays("rounds the scores", a_little_less, *operands(), hidden_keys())


def test_a_mask_in_which_each_token_sees_those_before_it_agrees() -> None:
    """Its first row is hidden entirely by its values, and it does not depend on data."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.mT * 0.3 + (1.0 - torch.ones(LENGTH, LENGTH).tril(-1)) * -1e9, dim=-1) @ v

    assert_agrees(run, torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(), forgets=True)


@pytest.mark.parametrize("first", [-1e4, -1e9, MINIMUM])
@pytest.mark.parametrize("second", [-1e5, -1e9, -2e9, MINIMUM])
def test_of_two_numbers_the_larger_decides_in_hidden_rows(first: float, second: float) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, also: Tensor) -> Tensor:
        return F.softmax((q @ k.mT).masked_fill(hidden, first).masked_fill(also, second), dim=-1) @ v

    assert_agrees(run, hidden_keys(), hidden_keys(), hidden_keys() & (torch.rand(LENGTH) < 0.5))


def test_a_bias_behind_overwritten_scores_is_what_hidden_rows_are_made_of() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, bias: Tensor) -> Tensor:
        return F.softmax((q @ k.mT).masked_fill(hidden, -1e4) + bias, dim=-1) @ v

    assert_agrees(run, hidden_keys(), hidden_keys(), torch.randn(HEADS, 1, LENGTH, requires_grad=True))


def test_the_smallest_number_of_wider_scores_is_the_smallest_of_bfloat16_beside_a_bias() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, bias: Tensor) -> Tensor:
        scores = (q @ k.mT * 0.3 + bias).float().masked_fill(hidden, MINIMUM)
        return F.softmax(scores, dim=-1).to(v.dtype) @ v

    bias = torch.randn(HEADS, 1, LENGTH).bfloat16().requires_grad_()
    assert_agrees(run, hidden_keys(), hidden_keys(), bias, dtype=torch.bfloat16)


@pytest.mark.parametrize("number", [-1e9, MINIMUM])
def test_overwritten_and_added_masks_of_other_numbers_agree(number: float) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, mask: Tensor) -> Tensor:
        return F.softmax((q @ k.mT).masked_fill(hidden, -1e9) + mask, dim=-1) @ v

    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    padding = torch.zeros(BATCH, 1, 1, LENGTH)
    padding[0, ..., :5] = number
    assert_agrees(run, hidden_keys(), causal, padding, forgets=True)


# --- numbers that are scaled after they overwrote scores -----------------------------------------------------------


@pytest.mark.parametrize("number", [-1e4, -1e9])
def test_a_number_that_is_scaled_down_to_hide_nothing_stays(number: float) -> None:
    factor = -2.0 / number

    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return F.softmax((q @ k.mT).masked_fill(hidden, number) * factor, dim=-1) @ v

    def divided(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return F.softmax((q @ k.mT).masked_fill(hidden, number) / -factor, dim=-1) @ v

    assert_stays("counts as -2 after", run, *operands(), hidden_keys())
    assert_stays("counts as", divided, *operands(), hidden_keys())


@pytest.mark.parametrize(("number", "factor"), [(-1e4, 3.0), (-1e9, 1e-3), (MINIMUM, 0.25)])
def test_a_number_that_hides_after_it_was_scaled_agrees(number: float, factor: float) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return F.softmax((q @ k.mT).masked_fill(hidden, number) * factor, dim=-1) @ v

    assert_agrees(run, hidden_keys(), hidden_keys())


def test_a_number_that_a_tensor_scales_stays_unless_it_is_about_the_smallest() -> None:
    for number in (-1e4, -1e9, MINIMUM, -math.inf):

        def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: Tensor, by: float = number) -> Tensor:
            return F.softmax((q @ k.mT).masked_fill(hidden, by) * scale, dim=-1) @ v

        causal, scale = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), torch.tensor(2e-4)
        if number > -1e30:
            assert_stays("a tensor scales that", run, *operands(), causal, scale)
        else:
            assert_recognised(run, *operands(), causal, scale)


def test_scores_divided_by_zero_stay() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return F.softmax((q @ k.mT).masked_fill(hidden, MINIMUM) / 0.0, dim=-1) @ v

    assert_stays("PyTorch refuses it", run, *operands(), hidden_keys())


def test_in_float16_a_smallest_number_that_is_scaled_stays() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(hidden, torch.finfo(q.dtype).min)
        return F.softmax(scores / 16.0, dim=-1) @ v

    assert_stays("counts as -4094", run, *[heads(dtype=torch.float16) for _ in "qkv"], hidden_keys())
