"""Features that are no multiples of 16 run in FP8, and no number shows that they were padded."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from te_compile import state
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of
from tests.compiling import compiled, error_but_for_ties, producers, relative_error, te_nodes, train_step
from tests.emulation import emulated, emulated_linear

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SIZES = ((33, 48), (32, 50), (33, 50), (17, 131))


def odd() -> int:
    """A number of features that is no multiple of 16."""
    return random.choice([n for n in range(17, 100) if n % 16])


class Stored(nn.Module):
    """Hugging Face's Conv1D: the weight is stored [K, N]."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features))
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


@pytest.mark.parametrize("recipe", ("delayed", "current"))
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients_are_those_of_the_unpadded_textbook(size: tuple[int, int], recipe: str) -> None:
    model, x = nn.Linear(*size), torch.randn(3, random.randrange(2, 9), size[0], requires_grad=True)
    y, got = train_step(model, compiled(model, strict=True, recipe=recipe), x)
    dx, x.grad = x.grad, None
    expected_y, expected = train_step(model, lambda x: emulated_linear(x, model.weight, model.bias), x)
    assert y.shape == expected_y.shape and y.is_contiguous()
    assert error_but_for_ties(y, expected_y) < 1e-4 and error_but_for_ties(dx, x.grad) < 1e-3
    assert all(error_but_for_ties(got[name], expected[name]) < 1e-3 for name in expected)
    assert all(got[name].shape == parameter.shape for name, parameter in model.named_parameters())


@pytest.mark.parametrize("around", ("in the open", "checkpointed"))
def test_a_weight_that_is_stored_by_its_inputs(around: str) -> None:
    model = Stored(odd(), odd())
    x = torch.randn(2, 5, model.weight.shape[0])
    run = model if around == "in the open" else (lambda x: checkpoint(model, x, use_reentrant=False))
    y, got = train_step(model, compiled(run, strict=True), x)
    expected_y, expected = train_step(model, lambda x: emulated_linear(x, model.weight.t(), model.bias), x)
    assert error_but_for_ties(y, expected_y) < 1e-4
    assert all(error_but_for_ties(got[name], expected[name]) < 1e-3 for name in expected)


def test_the_state_holds_the_amaxes_of_the_data_alone() -> None:
    model = nn.Linear(33, 50)
    x = torch.randn(6, 33)
    y = compiled(model, strict=True)(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    found = state.existing_state(model.weight, 1024)
    assert found is not None
    expected = torch.stack([each.detach().abs().max() for each in (x, model.weight, dy)])
    assert torch.equal(found.history[:, 0], expected)


def test_a_number_that_is_none_reaches_no_other_row() -> None:
    model, x = nn.Linear(33, 50), torch.randn(6, 33)
    x[2, 5] = torch.nan
    y = compiled(model, recipe="current")(x)
    finite = y.isfinite().all(1)
    assert y.shape == (6, 50) and finite.tolist() == [row != 2 for row in range(6)]


def test_linears_of_one_odd_input_pad_and_quantise_it_once() -> None:
    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(33, 48) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = x.sin()
            return self.q(x) * self.k(x) + self.v(x)

    model, x = Projections(), torch.randn(2, 5, 33)
    with manager.recording() as records:
        train_step(model, compiled(model, strict=True), x)
    (compilation,) = records
    (quantize,) = producers(compilation)
    assert len(te_nodes(compilation, "gemm")) == 3 + 3
    assert arguments_of(quantize)["dtype"] == torch.float8_e4m3fn


def test_aligned_sizes_are_not_padded() -> None:
    model, x = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)), torch.randn(7, 32)
    with manager.recording() as records:
        train_step(model, compiled(model), x)
    joint = records[0].joint
    assert joint is not None
    assert not joint.find_nodes(op="call_function", target=torch.ops.aten.constant_pad_nd.default)


@pytest.mark.parametrize("change", (lambda y: y.add_(1.0), lambda y: y.view(-1), lambda y: y[..., 3:].mul_(2.0)))
def test_a_result_can_be_viewed_and_changed_in_place(change: Callable[[Tensor], Tensor]) -> None:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(33, 50)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            return change(y) + y.abs().mean()

    model, x = Changed(), torch.randn(2, 5, 33)
    reference = emulated(model, lambda name, module: True)
    expected_y, expected = train_step(reference, reference, x)
    y, got = train_step(model, compiled(model, strict=True), x)
    assert error_but_for_ties(y, expected_y) < 1e-4
    assert all(relative_error(got[name], expected[name]) < 2e-2 for name in expected)


@pytest.mark.parametrize("rows", (0, 1))
def test_empty_and_single_rows(rows: int) -> None:
    model, x = nn.Linear(33, 50), torch.randn(rows, 33, requires_grad=True)
    y = compiled(model, strict=True)(x)
    y.sum().backward()
    assert y.shape == (rows, 50) and x.grad is not None and x.grad.shape == x.shape
    assert model.weight.grad is not None and model.weight.grad.shape == (50, 33)
    assert model.weight.grad.isfinite().all()


def test_any_number_of_tokens_in_one_dynamic_graph() -> None:
    model = nn.Sequential(nn.Linear(33, 50), nn.Tanh(), nn.Linear(50, 35))
    fast = compiled(model, dynamic=True, strict=True, recipe="current")
    reference = emulated(model, lambda name, module: True)
    with manager.recording() as records:
        for rows in (5, 16, 9):
            x = torch.randn(rows, 33)
            assert relative_error(train_step(model, fast, x)[0], train_step(reference, reference, x)[0]) < 2e-2
    assert len(records) == 1


class Tied(nn.Module):
    """A head on the embedding's weight, with a vocabulary of an odd size."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(vocabulary, 32), nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.fc(self.embed(ids)))
        logits = F.linear(hidden, self.embed.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1])[:-1], ids.view(-1)[1:])


@pytest.mark.parametrize("vocabulary", (131, 50257))
def test_a_head_of_an_odd_vocabulary_on_a_tied_weight(vocabulary: int) -> None:
    model, ids = Tied(vocabulary), torch.randint(0, vocabulary, (2, 6))
    expected_loss, expected = train_step(model, model, ids)
    with manager.recording() as records:
        loss, got = train_step(model, compiled(model, strict=True, lm_head=True), ids)
    assert [site.status for site in records[0].plan.sites] == ["fp8", "fp8"]
    assert records[0].plan.sites[1].padding == (0, -vocabulary % 16)
    assert relative_error(loss, expected_loss) < 0.05
    assert all(relative_error(got[name], expected[name]) < 0.2 for name in expected)


@pytest.mark.slow
def test_inductor_pads_and_cuts_as_well() -> None:
    model, x = nn.Sequential(nn.Linear(33, 50), nn.GELU(), nn.Linear(50, 33)), torch.randn(2, 5, 33)
    reference = emulated(model, lambda name, module: True)
    expected_y, expected = train_step(reference, reference, x)
    y, got = train_step(model, compiled(model, compiler="inductor", strict=True), x)
    assert relative_error(y, expected_y) < 2e-2
    assert all(relative_error(got[name], expected[name]) < 5e-2 for name in expected)
