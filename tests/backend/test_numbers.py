"""From ``torch.compile(model, backend="te_fp8")`` to numbers: every way in which a model may use a linear.

The yardstick for numbers is tests/emulation.py. On a first step delayed scaling calibrates itself and is current
scaling, so both recipes are measured with it; what is particular to later steps is in test_steps.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_compile import state
from te_compile.passes import manager
from te_compile.state_files import state_dict
from tests.backend.models import (
    TOLERANCE,
    Attention,
    Conv1DModel,
    L,
    Linear,
    Mlp,
    all_fp8,
    any_length,
    assert_same_numbers,
)
from tests.compiling import compiled, cosine, error_but_for_ties, gemm_labels, producers, relative_error, train_step
from tests.emulation import emulated, emulated_linear

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# --- forms of a linear ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize(
    ("dtype", "bias", "leading"),
    [
        (torch.float32, True, 1),
        (torch.float32, False, 3),
        (torch.bfloat16, True, 2),
        (torch.bfloat16, False, 1),
        (torch.float16, True, 3),
        (torch.float16, False, 2),
    ],
)
def test_a_linear_computes_what_the_textbook_says(recipe: str, dtype: torch.dtype, bias: bool, leading: int) -> None:
    """With and without bias, 2-D, 3-D and 4-D input, all three dtypes; tokens in any number."""
    model = Linear(bias=bias, dtype=dtype)
    x = torch.randn(*(random.randrange(1, 6) for _ in range(leading - 1)), any_length(), 32, dtype=dtype)
    assert_same_numbers(model, emulated(model, all_fp8), x, TOLERANCE[dtype], recipe=recipe)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_conv1d_is_a_linear_with_its_weight_stored_the_other_way_round(recipe: str) -> None:
    model = Conv1DModel()
    x = torch.randn(2, any_length(), 32)
    y, got = train_step(model, compiled(model, recipe=recipe), x)
    model.zero_grad()
    expected = emulated_linear(x, model.weight.t(), model.bias)
    expected.square().mean().backward()
    assert error_but_for_ties(y, expected.detach()) < 1e-4
    assert error_but_for_ties(got["weight"], model.weight.grad) < 1e-4
    assert error_but_for_ties(got["bias"], model.bias.grad) < 1e-4


def test_the_gradient_of_the_input_comes_back() -> None:
    model = Linear()
    x = torch.randn(any_length(), 32, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    compiled(model)(x).square().mean().backward()
    emulated(model, all_fp8)(other).square().mean().backward()
    assert error_but_for_ties(x.grad, other.grad) < 1e-4


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_an_mlp_trains_as_the_textbook_says(compiler: str) -> None:
    model = Mlp()
    assert_same_numbers(model, emulated(model, all_fp8), torch.randn(3, any_length(), 32), 3e-2, compiler=compiler)


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_autocast_around_the_call_sets_the_dtype_of_the_result(parameters: torch.dtype) -> None:
    model = Linear(dtype=parameters)
    x = torch.randn(any_length(), 32)
    fast = compiled(model)
    with torch.autocast("cpu", torch.bfloat16), manager.recording() as records:
        expected, got = model(x), fast(x)
    assert [site.status for record in records for site in record.plan.sites] == ["fp8"]
    assert got.dtype == expected.dtype == torch.bfloat16
    assert cosine(got, expected) > 0.995
    got.float().square().mean().backward()
    assert model.fc.weight.grad.dtype == parameters
    got_gradient, model.fc.weight.grad = model.fc.weight.grad, None
    expected.float().square().mean().backward()
    assert cosine(got_gradient, model.fc.weight.grad) > 0.99


# --- weights that several share ------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Logits through the embedding's own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.fc = nn.Linear(32, 32)
        self.lm_head = nn.Linear(32, 64, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.fc(self.embed(ids)))


@pytest.mark.parametrize("lm_head", [True, False])
def test_a_weight_tied_to_an_embedding_stays_usable_by_both(lm_head: bool) -> None:
    model = Tied()
    reference = emulated(model, lambda name, module: lm_head or name == "fc")
    reference.lm_head.weight = reference.embed.weight
    ids = torch.randint(0, 64, (2, any_length()))
    expected, expected_gradients = train_step(reference, reference, ids)
    got, got_gradients = train_step(model, compiled(model, lm_head=lm_head), ids)
    assert relative_error(got, expected) < 1e-2
    for name, gradient in expected_gradients.items():
        assert cosine(got_gradients[name], gradient) > 0.999, name
    assert model.lm_head.weight is model.embed.weight


class Twice(nn.Module):
    """One weight for two products, the second on numbers a hundred times larger."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 32**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(100 * torch.tanh(F.linear(x, self.weight)), self.weight)


def test_one_weight_used_twice_has_one_state_and_the_sum_of_both_gradients() -> None:
    model = Twice()
    x = torch.randn(any_length(), 32)
    y, got = train_step(model, compiled(model), x)
    model.zero_grad()
    first = emulated_linear(x, model.weight)
    expected = emulated_linear(100 * torch.tanh(first), model.weight)
    expected.square().mean().backward()
    assert cosine(y, expected.detach()) > 0.999
    assert cosine(got["weight"], model.weight.grad) > 0.999
    (entries,) = {name.rpartition(".")[0] for name in state_dict(model)}
    assert entries == "weight"
    seen = state.existing_state(model.weight, L).history[0, 0]
    torch.testing.assert_close(seen, (100 * torch.tanh(first)).abs().max().detach(), rtol=1e-4, atol=0)


class LaterOne(nn.Module):
    """Two weights, the first for numbers a hundred times as large, until somebody makes them one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(32, 32) / 32**0.5) for _ in range(2))

    def tie(self) -> None:
        self.first = self.second = nn.Parameter(torch.randn(32, 32) / 32**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(100 * x, self.first) / 100), self.second)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_weights_that_become_one_after_compiling_are_measured_at_both_places(compiler: str) -> None:
    """Dynamo takes it that parameters stay different from each other, and does not look."""
    model, x = LaterOne(), torch.randn(any_length(), 32)
    fast = compiled(model, compiler=compiler)
    with manager.recording() as records:
        train_step(model, fast, x)
        model.tie()
        for _ in range(3):
            y, got = train_step(model, fast, x)
    assert len(records) == 1, "the graph is another: nothing was tested"
    model.zero_grad()
    expected = emulated_linear(torch.tanh(emulated_linear(100 * x, model.first) / 100), model.first)
    expected.square().mean().backward()
    assert cosine(y, expected) > 0.999
    assert cosine(got["first"], model.first.grad) > 0.99
    history = state.existing_state(model.first, L).history
    assert history[:, :3].all() and not history[:, 3:].any()
    torch.testing.assert_close(history[0, :3], (100 * x).abs().max().expand(3))


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_linears_that_share_an_input_quantise_it_once(recipe: str) -> None:
    model = Attention()
    fast = compiled(model, recipe=recipe)
    with manager.recording() as records:
        train_step(model, fast, torch.randn(2, any_length(), 32))
    (record,) = records
    assert len(producers(record)) == 1
    assert len(producers(record, torch.float8_e5m2)) == 3
    assert sum(gemm_labels(record).values()) == 9


def test_linears_that_share_an_input_compute_what_the_textbook_says() -> None:
    model = Attention()
    assert_same_numbers(model, emulated(model, all_fp8), torch.randn(2, any_length(), 32), 2e-2)


@pytest.mark.parametrize(
    "ends", [lambda y: y, lambda y: y.detach(), lambda y: y.detach().detach()], ids=["view", "once", "twice"]
)
def test_a_view_that_was_made_without_gradients_may_be_changed_in_place(ends: Callable[[Tensor], Tensor]) -> None:
    """As a table of positions is, which a model then adds learned ones to."""
    table, learned = torch.randn(10, 16), nn.Parameter(torch.randn(16))

    def rows(places: Tensor) -> Tensor:
        with torch.no_grad():
            return ends(table.index_select(0, places).view(2, 4, 16))

    found = compiled(rows)(torch.arange(8))
    found += learned
    found.sum().backward()
    assert torch.equal(found, table[:8].view(2, 4, 16) + learned) and torch.equal(learned.grad, torch.full((16,), 8.0))


def test_a_result_and_the_same_detached_are_two() -> None:
    fc, x = nn.Linear(32, 32), torch.randn(4, 8, 32)
    y, detached = compiled(lambda x: (y := fc(x), y.detach()), lm_head=True)(x)
    assert y.requires_grad and not detached.requires_grad and torch.equal(y, detached)
    y.sum().backward()
    assert fc.weight.grad is not None
