"""``save_memory=True``: less waits for backward and less lies beside it, and no bit of a result is another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from te_compile import explain
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of, is_te
from tests.backend.models import Chain, Conv1DModel, Mlp, any_length
from tests.compiling import compiled, te_nodes, train_step, trained

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

RECIPES = (
    "delayed",
    "delayed amax_history_len=2 amax_compute_algo=most_recent margin=1",
    "delayed fp8_format=E4M3",
    "current",
    "current use_power_2_scales=True",
)


class Layer(nn.Module):
    """A GPT layer: norms, packed qkv, causal attention, GELU, residual sums."""

    def __init__(self, d: int = 64, bias: bool = True) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=bias), nn.Linear(d, d, bias=bias)
        self.up, self.down = nn.Linear(d, 4 * d, bias=bias), nn.Linear(4 * d, d, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        heads = (each.unflatten(-1, (2, -1)).transpose(-3, -2) for each in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(mixed.transpose(-3, -2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Gated(nn.Module):
    """A Llama's MLP."""

    def __init__(self, d: int = 64) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d)
        self.gate, self.up = nn.Linear(d, 2 * d, bias=False), nn.Linear(d, 2 * d, bias=False)
        self.down = nn.Linear(2 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Odd(nn.Module):
    """Features that are no multiples of 16, a ReLU, and a weight that two linears read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 37), nn.Linear(37, 64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.down(F.relu(self.up(x)))
        return x


class Recomputed(Layer):
    """Activation checkpointing around all of it."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Half(nn.Module):
    """One layer as it is, the next one recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Layer(), Recomputed()

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x))


class Frozen(Layer):
    """Some weights do not train."""

    def __init__(self) -> None:
        super().__init__()
        self.down.weight.requires_grad_(False)
        self.qkv.requires_grad_(False)


MODELS = (Layer, Gated, Odd, Recomputed, Half, Frozen)


def assert_same_training(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, **options: Any) -> None:
    model = make().to(dtype)
    other = copy.deepcopy(model)
    batches = [2.0**i * torch.randn(2, any_length(), 64).to(dtype) for i in range(3)]
    expected = trained(model, batches, **options)
    got = trained(other, batches, save_memory=True, **options)
    assert len(got) == len(expected) and all(map(torch.equal, got, expected))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_training_is_the_same_to_the_bit_under_every_recipe(recipe: str) -> None:
    assert_same_training(Layer, recipe=recipe)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("make", MODELS)
def test_a_training_is_the_same_to_the_bit_for_every_model(make: Callable[[], nn.Module], recipe: str) -> None:
    assert_same_training(make, recipe=recipe)


@pytest.mark.parametrize("make", [Layer, Gated])
def test_a_training_in_bf16_is_the_same_to_the_bit(make: Callable[[], nn.Module]) -> None:
    assert_same_training(make, torch.bfloat16)


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("make", [Layer, Gated])
def test_lengths_may_change(make: Callable[[], nn.Module], dynamic: bool | None) -> None:
    """Rows that are no multiples of 16 among them, whose transposed copies are padded."""
    model = make()
    other = copy.deepcopy(model)
    fast, lean = compiled(model, dynamic=dynamic), compiled(other, dynamic=dynamic, save_memory=True)
    for rows in (7, 16, 33):
        x = torch.randn(1, rows, 64)
        y, expected = train_step(model, fast, x)
        z, got = train_step(other, lean, x)
        assert torch.equal(y, z) and all(torch.equal(got[name], gradient) for name, gradient in expected.items())


def test_a_training_under_inductor_is_as_close_as_its_own_code_allows() -> None:
    """What is left of the norms and sums is Inductor's, which may fuse it otherwise."""
    model = Layer()
    other, x = copy.deepcopy(model), torch.randn(2, 24, 64)
    for each, options in ((model, {}), (other, {"save_memory": True})):
        fast = compiled(each, compiler="inductor", recipe="current", **options)
        train_step(each, fast, x)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=2e-2, atol=2e-3)


def kept_for_backward(model: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    """What waits for the backward pass, each tensor of memory once."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compiled(model, **options)(x)
    return list(kept.values())


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("make", [Layer, Gated])
def test_no_codes_wait_for_backward_and_nothing_waits_in_their_place(
    make: Callable[[], nn.Module], compiler: str
) -> None:
    model, x = make().bfloat16(), torch.randn(4, 48, 64).bfloat16().requires_grad_()
    bytes_kept, codes = [], []
    for save_memory in (False, True):
        torch._dynamo.reset()
        kept = kept_for_backward(model, x, compiler=compiler, save_memory=save_memory)
        codes.append([t for t in kept if t.dtype == torch.float8_e4m3fn and 192 in t.shape])
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        others = [t for t in kept if t.dtype != torch.float8_e4m3fn]
        bytes_kept.append(sum(t.nbytes for t in others if t.untyped_storage().data_ptr() not in parameters))
    assert codes[0] and not codes[1]
    assert bytes_kept[1] <= bytes_kept[0] + 64, "scales at most"


def test_inference_is_left_alone() -> None:
    with torch.no_grad(), manager.recording() as records:
        compiled(Layer(), save_memory=True)(torch.randn(2, 24, 64))
    counts = {record.name: record.count for record in records[0].passes}
    assert counts["remake_transposed"] == counts["transpose_late"] == counts["delay_weight_gradients"] == 0


def test_without_the_option_no_pass_of_it_runs() -> None:
    model = Layer()
    with manager.recording() as records:
        train_step(model, compiled(model), torch.randn(2, 24, 64))
    names = {record.name for record in records[0].passes}
    assert not names & {"remake_transposed", "transpose_late", "delay_weight_gradients"}


def test_a_report_says_which_inputs_are_quantised_again() -> None:
    x = torch.randn(2, 24, 64)
    again = [row.name for row in explain(Layer(), x, options={"save_memory": True}).rows if "again" in str(row.fused)]
    assert again == ["qkv", "proj", "up", "down"]
    assert not any("again" in str(row.fused) for row in explain(Layer(), x).rows)
    # What is handed in is kept by nobody for the backward pass.
    assert not any("again" in str(row.fused) for row in explain(Conv1DModel(), x[0, :, :32], options=LEAN).rows)


LEAN = {"save_memory": True}


@pytest.mark.parametrize("make", [Chain, Mlp])
def test_a_second_producer_writes_the_transposed_copy_alone(make: Callable[[], nn.Module]) -> None:
    """And for it the first one writes the other copy alone."""
    model = make()
    with manager.recording() as records:
        train_step(model, compiled(model, **LEAN), torch.randn(24, 32))
    fused = [node for node in te_nodes(records[0], "fused_quantize") if is_te(node, "fused_quantize")]
    of_inputs = [arguments_of(node) for node in fused if arguments_of(node)["dtype"] == torch.float8_e4m3fn]
    layouts = [(arguments["rowwise"], arguments["columnwise"]) for arguments in of_inputs]
    assert sorted(layouts) == [(False, True)] * (len(layouts) // 2) + [(True, False)] * (len(layouts) // 2)
    assert layouts
