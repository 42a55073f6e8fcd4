"""``cache_weights=False``: each product quantises its weight for itself, and no FP8 copy of it is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of
from tests.backend.models import Attention, Chain, Conv1DModel, Linear, Mlp, any_length
from tests.compiling import compiled, gradients, te_nodes, train_step, trained

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

RECIPES = (
    "delayed",
    "delayed amax_history_len=2 amax_compute_algo=most_recent margin=1",
    "delayed fp8_format=E4M3",
    "current",
    "current use_power_2_scales=True",
)
COMPILERS = pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])


class Odd(nn.Module):
    """Features that are no multiples of 16, a weight that two linears read, and an expression of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 37), nn.Linear(37, 32, bias=False)
        self.shift = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(self.down(torch.tanh(self.up(x))))
        return F.linear(x, torch.eye(32) + self.shift)


class Recomputed(Mlp):
    """Activation checkpointing around all of it."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Frozen(Chain):
    """A first linear that only passes gradients on, and a last one whose bias alone trains."""

    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.c.weight.requires_grad_(False)


MODELS = (Chain, Mlp, Odd, Recomputed, Frozen, Attention, Conv1DModel)


def assert_same_training(make: Callable[[], nn.Module], **options: Any) -> None:
    model = make()
    other, batches = copy.deepcopy(model), [2.0**i * torch.randn(any_length(), 32) for i in range(3)]
    expected = trained(model, batches, **options)
    got = trained(other, batches, cache_weights=False, **options)
    assert len(got) == len(expected) and all(map(torch.equal, got, expected))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_training_is_the_same_to_the_bit_under_every_recipe(recipe: str) -> None:
    """Delayed scaling's first step included, in which forward and dgrad each take the scale from the weight."""
    assert_same_training(Mlp, recipe=recipe)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_training_is_the_same_to_the_bit_for_every_model(make: Callable[[], nn.Module], recipe: str) -> None:
    assert_same_training(make, recipe=recipe)


def test_a_training_is_the_same_to_the_bit_under_inductor() -> None:
    assert_same_training(Mlp, compiler="inductor")


def kept_for_backward(model: nn.Module, x: Tensor, **options: Any) -> list[tuple[int, ...]]:
    """The shapes of all FP8 tensors that wait for the backward pass."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compiled(model, **options)(x)
    return sorted(tuple(tensor.shape) for tensor in kept if tensor.dtype == torch.float8_e4m3fn)


@COMPILERS
@pytest.mark.parametrize("make", [Chain, Recomputed])
def test_no_copy_of_a_weight_waits_for_backward(make: Callable[[], nn.Module], compiler: str) -> None:
    """With the option as it is by default some do: what is looked for can be seen."""
    model, rows = make(), 112
    x = torch.randn(rows, 32, requires_grad=True)
    options = {"compiler": compiler}
    assert any(rows not in shape for shape in kept_for_backward(model, x, **options))
    torch._dynamo.reset()
    found = kept_for_backward(model, x, cache_weights=False, **options)
    assert all(rows in shape for shape in found)
    assert bool(found) is (make is Chain), "of activations, unless they are recomputed"


def test_each_product_asks_for_the_layout_that_it_reads() -> None:
    model = Conv1DModel()
    for each, forward in ((model, (False, True)), (Linear(), (True, False))):
        torch._dynamo.reset()
        with manager.recording() as records:
            train_step(each, compiled(each, cache_weights=False), torch.randn(16, 32, requires_grad=True))
        weights = [node for node in te_nodes(records[0], "quantize") if node.args[0].meta["val"].shape[0] != 16]
        layouts = [tuple(arguments_of(node)[name] for name in ("rowwise", "columnwise")) for node in weights]
        assert layouts == [forward, forward[::-1]]


def test_a_frozen_input_has_no_dgrad_and_no_second_quantize() -> None:
    with manager.recording() as records:
        model = Linear()
        train_step(model, compiled(model, cache_weights=False), torch.randn(16, 32))
    of_weight = [node for node in te_nodes(records[0], "quantize") if node.args[0].meta["val"].shape[0] == 48]
    assert len(of_weight) == 1


@COMPILERS
def test_a_backward_uses_the_scales_of_its_own_forward(compiler: str) -> None:
    """The second forward moves every scale before the first backward runs, and so does its own backward."""
    model, batches = Mlp(), [torch.randn(5, 32), 100 * torch.randn(5, 32)]
    other = copy.deepcopy(model)
    found = []
    for each, cache_weights in ((model, True), (other, False)):
        torch._dynamo.reset()
        options = {"compiler": compiler, "recipe": "delayed amax_history_len=1", "cache_weights": cache_weights}
        fast = compiled(each, **options)
        train_step(each, fast, batches[0])
        with torch.no_grad():
            each.up.weight.mul_(3)  # the scale of this step is none of this weight
        each.zero_grad()
        loss = fast(batches[0]).square().mean()
        fast(batches[1]).sum().backward()
        each.zero_grad()
        loss.backward()
        found.append(gradients(each))
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())


@COMPILERS
def test_a_weight_that_is_edited_before_its_backward_is_an_error_as_in_eager_mode(compiler: str) -> None:
    model = Chain()
    for run in (model, compiled(model, cache_weights=False, compiler=compiler)):
        loss = run(torch.randn(5, 32)).sum()
        with torch.no_grad():
            model.b.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("dynamic", [True, None])
def test_lengths_may_change(dynamic: bool | None) -> None:
    model = Mlp()
    other = copy.deepcopy(model)
    fast = compiled(model, dynamic=dynamic)
    plain = compiled(other, dynamic=dynamic, cache_weights=False)
    for rows in (7, 19, 33):
        x = torch.randn(rows, 32)
        y, expected = train_step(model, fast, x)
        z, got = train_step(other, plain, x)
        assert torch.equal(y, z) and all(torch.equal(got[name], gradient) for name, gradient in expected.items())


class Experts(nn.Module):
    """Two experts on sorted tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 48, 32).bfloat16())

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_experts_quantise_their_weight_themselves_too(recipe: str) -> None:
    model, ends = Experts(), torch.tensor([11, 40], dtype=torch.int32)
    other, x = copy.deepcopy(model), torch.randn(40, 32).bfloat16().requires_grad_()
    fast, plain = compiled(model, recipe=recipe), compiled(other, recipe=recipe, cache_weights=False)
    for _ in range(2):
        x.grad = None
        y, expected = train_step(model, fast, x, ends)
        dx, x.grad = x.grad, None
        with manager.recording() as records:
            z, got = train_step(other, plain, x, ends)
        assert torch.equal(y, z) and torch.equal(dx, x.grad) and torch.equal(got["weight"], expected["weight"])
        assert all(te_nodes(record, "grouped_gemm") and not record.plan.groups for record in records)
