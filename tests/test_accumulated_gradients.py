"""Gradients that products add to ``.grad``: the same numbers as autograd's sums, and only where nobody could tell."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_compile import accumulated_gradients, fallbacks
from te_compile.passes import manager
from tests.compiling import compiled, gradients, te_nodes
from tests.in_backward import doing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
WIDTH, INNER = 32, 48


class Mlp(nn.Module):
    """Two linears without biases, so that every gradient is a product."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, INNER, bias=False)
        self.b = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [M, WIDTH]."""
        return self.b(torch.relu(self.a(x)))


def batch() -> Tensor:
    return torch.randn(16, WIDTH)


Step = Callable[[nn.Module, Callable[..., Any], Tensor], Any]
"""What is done with a model, the same compiled, and a batch."""


def backward(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
    run(x).square().mean().backward()


def both_ways(
    step: Step, before: Step = backward, model: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, list[Any]]:
    """Run ``step`` after ``before``, with products that add and without, and require the same gradients to the bit.

    In fp32 they are: what a product adds it would have written unrounded. Returns the model and what both steps gave.
    """
    first, x = model or Mlp(), [batch() for _ in range(2)]
    second = copy.deepcopy(first)
    results = []
    for each, option in ((first, True), (second, False)):
        torch._dynamo.reset()
        run = compiled(each, accumulate_in_products=option, **options)
        before(each, run, x[0])
        results.append(step(each, run, x[1]))
    got, expected = gradients(first), gradients(second)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(got[name].nan_to_num(7.0), gradient.nan_to_num(7.0)), name
    return first, results


def require_close(got: Tensor | None, expected: Tensor | None) -> None:
    """The same sums, added up in another order."""
    assert got is not None and expected is not None
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("compiler", "directly"),
    [
        ("aot_eager", False),
        pytest.param("inductor", False, marks=pytest.mark.slow),
        pytest.param("inductor", True, marks=pytest.mark.slow),
    ],
)
def test_micro_batches_are_summed_as_autograd_sums_them(
    compiler: str, directly: bool, added: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    if directly:
        monkeypatch.setattr(fallbacks, "DIRECT_ON", {"cpu"})
    model, batches, sums = Mlp(), [batch() for _ in range(4)], []
    for option in (True, False):
        torch._dynamo.reset()
        each = copy.deepcopy(model)
        run = compiled(each, compiler=compiler, accumulate_in_products=option)
        for x in batches:
            backward(each, run, x)
        sums.append(gradients(each))
    assert len(added) == 2 * 3
    assert all(torch.equal(sums[0][name], gradient) for name, gradient in sums[1].items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_sixteen_bits_are_no_worse_than_autograds(dtype: torch.dtype, added: list[Tensor]) -> None:
    model, batches, sums = Mlp(), [batch() for _ in range(6)], []
    for option in (True, False):
        torch._dynamo.reset()
        each = copy.deepcopy(model).to(dtype)
        run = compiled(each, accumulate_in_products=option)
        for x in batches:
            run(x.to(dtype)).float().square().sum().backward()
        sums.append(gradients(each))
    assert len(added) == 2 * 5
    for name, gradient in sums[1].items():
        step = torch.finfo(dtype).eps * float(gradient.float().abs().max())
        torch.testing.assert_close(sums[0][name].float(), gradient.float(), rtol=0, atol=6 * step)


def test_the_gradient_is_changed_in_place_and_stays_the_users_tensor(added: list[Tensor]) -> None:
    model = Mlp()
    run = compiled(model)
    backward(model, run, batch())
    held = {name: weight.grad for name, weight in model.named_parameters()}
    backward(model, run, batch())
    assert all(weight.grad is held[name] for name, weight in model.named_parameters())
    assert {id(gradient) for gradient in added} == {id(gradient) for gradient in held.values()}


def test_calls_of_a_first_step_add_as_later_ones_do(added: list[Tensor]) -> None:
    """Though a hook tells when the backward of such a call has run."""

    def nothing(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        """The step is the first one."""

    def late(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        losses = [run(x).square().mean(), run(2 * x).square().mean()]
        for loss in losses:
            loss.backward()

    both_ways(late, before=nothing)
    assert len(added) == 2


def test_gradients_set_to_zero_are_added_to(added: list[Tensor]) -> None:
    def zeroed(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        backward(model, run, x)
        model.zero_grad(set_to_none=False)

    both_ways(backward, zeroed)
    assert len(added) == 2


def test_gradients_that_lie_in_one_buffer_are_added_to(added: list[Tensor]) -> None:
    def flat(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        buffer = torch.zeros(sum(weight.numel() for weight in model.parameters()))
        start = 0
        for weight in model.parameters():
            weight.grad = buffer[start : start + weight.numel()].view(weight.shape)
            start += weight.numel()

    both_ways(backward, flat)
    assert len(added) == 2


def test_a_pass_without_gradients_to_add_to_returns_them(added: list[Tensor]) -> None:
    def dropped(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        backward(model, run, x)
        model.zero_grad()

    both_ways(backward, dropped)
    assert not added


def test_a_gradient_for_one_weight_alone(added: list[Tensor]) -> None:
    def first_alone(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        backward(model, run, x)
        model.b.weight.grad = None

    model, _ = both_ways(backward, first_alone)
    assert [gradient.shape for gradient in added] == [model.a.weight.shape]


def test_frozen_weights_have_no_gradient(added: list[Tensor]) -> None:
    model = Mlp()
    model.a.weight.requires_grad_(False)
    both_ways(backward, model=model)
    assert model.a.weight.grad is None and [gradient.shape for gradient in added] == [model.b.weight.shape]


def test_infinities_and_nans_come_through(added: list[Tensor]) -> None:
    def overflowing(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        x[3] = torch.inf
        backward(model, run, x)

    model, _ = both_ways(overflowing)
    assert len(added) == 2 and not model.a.weight.grad.isfinite().all()


# --- several uses -----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One weight for two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: [M, WIDTH]."""
        return self.b(torch.relu(self.a(x)))


def test_tied_weights_get_the_sum_of_both_uses(added: list[Tensor]) -> None:
    both_ways(backward, model=Tied())
    assert not added, "the graph sums them"


@pytest.mark.parametrize("there_before", [False, True])
def test_two_forwards_in_one_backward(there_before: bool, added: list[Tensor]) -> None:
    """Where there is none before, autograd gathers two gradients; neither may go to the one that it then installs."""

    def twice(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        (run(x).square().mean() + run(2 * x).square().mean()).backward()

    def nothing(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        run(x)

    first, x = Mlp(), [batch() for _ in range(2)]
    second = copy.deepcopy(first)
    for each, option in ((first, True), (second, False)):
        torch._dynamo.reset()
        run = compiled(each, accumulate_in_products=option)
        (backward if there_before else nothing)(each, run, x[0])
        twice(each, run, x[1])
    assert len(added) == (4 if there_before else 0)
    for got, expected in zip(first.parameters(), second.parameters(), strict=True):
        require_close(got.grad, expected.grad)


def test_a_weight_that_two_compiled_modules_and_eager_code_share(added: list[Tensor]) -> None:
    sums = []
    start, batches = torch.randn(WIDTH, WIDTH), [batch() for _ in range(3)]
    for option in (True, False):
        torch._dynamo.reset()
        modules = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
        modules[1].weight = modules[0].weight
        modules[0].weight.data.copy_(start)
        runs = [compiled(module, accumulate_in_products=option) for module in modules]
        for x in batches:
            y = runs[1](torch.relu(runs[0](x)))
            (y.square().mean() + 1e-3 * modules[0].weight.square().sum()).backward()
        sums.append(modules[0].weight.grad)
    assert len(added) == 2 * 2
    require_close(sums[0], sums[1])


def test_a_checkpoint_around_the_compiled_model(added: list[Tensor]) -> None:
    def checkpointed(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        checkpoint(run, x.requires_grad_(), use_reentrant=False).square().mean().backward()

    both_ways(checkpointed)
    assert len(added) == 2


def test_a_reentrant_checkpoint_around_the_compiled_model(added: list[Tensor]) -> None:
    """Autograd then runs within autograd."""

    def checkpointed(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        checkpoint(run, run(x), use_reentrant=True).square().mean().backward()

    first, x = Mlp(), [batch() for _ in range(3)]
    second = copy.deepcopy(first)
    for each, option in ((first, True), (second, False)):
        torch._dynamo.reset()
        run = compiled(each, accumulate_in_products=option)
        for one in x:
            checkpointed(each, run, one)
    assert len(added) >= 2 * 2 * 2
    for got, expected in zip(first.parameters(), second.parameters(), strict=True):
        require_close(got.grad, expected.grad)


# --- what products cannot add to --------------------------------------------------------------------------------------


class Subclass(Tensor):
    """A tensor of another kind."""


def transposed(gradient: Tensor) -> Tensor:
    return gradient.t().contiguous().t()


def displaced(gradient: Tensor) -> Tensor:
    return torch.cat([gradient.new_zeros(1), gradient.flatten()])[1:].view(gradient.shape)


def of_a_graph(gradient: Tensor) -> Tensor:
    return gradient.clone().requires_grad_()


def subclass(gradient: Tensor) -> Tensor:
    return gradient.clone().as_subclass(Subclass)


@pytest.mark.parametrize("another", [transposed, displaced, of_a_graph, subclass])
def test_a_gradient_of_another_kind_is_autograds(another: Callable[[Tensor], Tensor], added: list[Tensor]) -> None:
    def replaced(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        backward(model, run, x)
        model.a.weight.grad = another(model.a.weight.grad)

    model, _ = both_ways(backward, replaced)
    assert [gradient.shape for gradient in added] == [model.b.weight.shape]


def test_a_gradient_made_in_inference_mode_is_autograds_to_refuse(added: list[Tensor]) -> None:
    model = Mlp()
    run = compiled(model)
    backward(model, run, batch())
    with torch.inference_mode():
        gradient = torch.zeros_like(model.a.weight)
    assert not accumulated_gradients._fits(gradient, gradient.shape, gradient.dtype, gradient.device)
    model.a.weight.grad = gradient
    with pytest.raises(RuntimeError, match="inference tensor"):
        backward(model, run, batch())
    assert all(each is not gradient for each in added)


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="gradients have their tensors' dtypes")
def test_gradients_of_another_dtype_are_autograds(added: list[Tensor]) -> None:
    def wide(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        model.a.weight.grad_dtype = torch.float64
        backward(model, run, x)

    model, _ = both_ways(backward, wide)
    assert model.a.weight.grad.dtype == torch.float64
    assert [gradient.shape for gradient in added] == [model.b.weight.shape]


def test_a_weight_computed_from_a_parameter_is_none(added: list[Tensor]) -> None:
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    x = [batch() for _ in range(3)]
    start = torch.randn(INNER, WIDTH)
    sums = []
    for option in (True, False):
        torch._dynamo.reset()
        weight = nn.Parameter(start.clone())
        run = compiled(linear, accumulate_in_products=option)
        for each in x:
            run(each, 2 * weight).square().mean().backward()
        sums.append(weight.grad)
    assert torch.equal(*sums) and not added


def test_a_parameter_of_another_class_is_autograds(added: list[Tensor]) -> None:
    class Own(nn.Parameter):
        pass

    model = Mlp()
    model.a.weight = Own(model.a.weight.detach().clone())
    run = compiled(model)
    for _ in range(2):
        backward(model, run, batch())
    assert [gradient.shape for gradient in added] in ([model.b.weight.shape], [])


def test_what_autograd_saved_of_a_gradient_shows_that_it_changed(added: list[Tensor]) -> None:
    model = Mlp()
    run = compiled(model)
    backward(model, run, batch())
    scale = torch.ones((), requires_grad=True)
    saved = (scale * model.a.weight.grad).sum()
    backward(model, run, batch())
    assert [gradient.shape for gradient in added] == [model.b.weight.shape]  # a's is added to by autograd, which tells
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_a_gradient_that_another_term_of_the_loss_reads_is_autograds(added: list[Tensor]) -> None:
    def step(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        other = sum((p * p.grad).sum() for p in model.parameters())
        (run(x).square().mean() + 0.1 * other).backward()

    both_ways(step)
    assert not added


def test_a_change_is_told_to_autograd() -> None:
    gradient = torch.zeros(3)
    accumulated_gradients.added_to(gradient)
    assert gradient._version == 1


# --- around it --------------------------------------------------------------------------------------------------------


def test_the_option_turns_it_off(added: list[Tensor]) -> None:
    model = Mlp()
    with manager.recording() as records:
        run = compiled(model, accumulate_in_products=False)
        for _ in range(2):
            backward(model, run, batch())
    assert not added and not te_nodes(records[0], "gemm_into_grad")


def test_outside_of_a_backward_pass_there_is_nothing_to_add_to() -> None:
    device = torch.device("cpu")
    assert accumulated_gradients.gradient_to_add_to(0, 1, (3,), torch.float32, device) is None


@pytest.fixture
def no_cycles() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_nothing_of_a_pass_is_kept_alive(added: list[Tensor], no_cycles: None) -> None:
    model = Mlp()
    run = compiled(model)
    for _ in range(2):
        backward(model, run, batch())
    assert len(added) == 2
    current = accumulated_gradients._here.current
    assert current is not None and current() is None


def test_a_pass_that_fails_keeps_nothing_alive(added: list[Tensor]) -> None:
    """Whoever takes a smaller batch then needs the memory of what the forward pass has saved."""

    def fail() -> None:
        raise MemoryError

    run_first, run_second = compiled(Mlp()), compiled(Mlp())
    y = run_first(batch())
    graph = weakref.ref(y.grad_fn)
    loss = run_second(doing(fail, y)).square().mean()
    with pytest.raises(MemoryError):
        loss.backward()
    del y, loss
    gc.collect()
    assert graph() is None


def test_a_parameter_that_is_frozen_after_the_forward_pass_is_left_alone(added: list[Tensor]) -> None:
    """As that of a discriminator whose loss is to train a generator alone."""

    def frozen(model: Mlp, run: Any, x: Tensor) -> None:
        loss = run(x).square().mean()
        model.requires_grad_(False)
        loss.backward()

    both_ways(frozen)
    assert not added


def test_models_are_freed(added: list[Tensor]) -> None:
    model = Mlp()
    run = compiled(model)
    for _ in range(2):
        backward(model, run, batch())
    alive = weakref.ref(model.a.weight)
    added.clear()
    del model, run
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None
