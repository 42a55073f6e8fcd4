"""The whole road on a GPU: kernels and libraries in place of references, Inductor, CUDA graphs.

The yardstick is the same as on the CPU, tests/emulation.py, evaluated on the GPU.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from te_compile import state
from te_compile.ops import registry
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of
from te_compile.state_files import state_dict
from tests.compiling import BACKEND, compiled, cosine, relative_error, te_nodes, train_step
from tests.emulation import emulated
from tests.needs import FP8_GPU

pytestmark = [
    *FP8_GPU,
    pytest.mark.usefixtures("fresh_dynamo"),
]


class Block(nn.Module):
    """Norm, shared input, gate, activation, residual sums."""

    def __init__(self, d: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.q, self.k = nn.Linear(d, d), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.q(h) * torch.sigmoid(self.k(h))
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Two blocks, recomputed in the backward pass if asked for."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return x


def on_gpu(dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Stack:
    return Stack(**settings).to("cuda", dtype)


def data(rows: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A batch of any number of tokens."""
    return torch.randn(2, rows or random.randrange(17, 200), 256, device="cuda", dtype=dtype)


def fast_on_gpu(model: nn.Module, **options: Any) -> Any:
    """Everything in FP8, however small."""
    return compiled(model, **{"cost_model": False, "compiler": "inductor", **options})


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_train_as_the_textbook_says(dtype: torch.dtype, recipe: str, compiler: str) -> None:
    model, x = on_gpu(dtype), data(dtype=dtype)
    reference = emulated(model, lambda name, module: True)
    expected, expected_gradients = train_step(reference, reference, x)
    fast = fast_on_gpu(model, recipe=recipe, compiler=compiler)
    for _ in range(2):
        got, got_gradients = train_step(model, fast, x)
        assert relative_error(got, expected) < 2e-2
        assert got_gradients.keys() == expected_gradients.keys()
        for name, gradient in expected_gradients.items():
            assert cosine(got_gradients[name], gradient) > 0.99, name


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_inference_computes_what_the_textbook_says(recipe: str) -> None:
    model, x = on_gpu(), data()
    with torch.no_grad():
        got, expected = fast_on_gpu(model, recipe=recipe)(x), emulated(model, lambda name, module: True)(x)
    assert relative_error(got, expected) < 2e-2


def test_no_reference_runs_where_there_is_a_kernel() -> None:
    model = on_gpu()
    with manager.recording() as records:
        train_step(model, fast_on_gpu(model, compiler="aot_eager"), data())
    for operator in ["quantize", "fused_quantize", "norm_quantize", "norm_backward", "gemm", "update_scales_"]:
        chosen = {arguments_of(node)["implementation"] for node in te_nodes(records[0], operator)}
        assert registry.REFERENCE not in chosen, operator
    of_weights = [name for group in records[0].plan.groups for name in group.implementations.values()]
    assert of_weights and registry.REFERENCE not in of_weights
    # x itself wants no gradient here, so the first norm adds none to that of the residual.
    residuals = [arguments_of(node)["residual"] is not None for node in te_nodes(records[0], "norm_backward")]
    assert sorted(residuals) == [False, True]


def test_cuda_graphs_train_like_plain_launches() -> None:
    """Replays read and update the states in place, at the addresses that were captured."""
    plain = on_gpu()
    graphed = copy.deepcopy(plain)
    batches = [1.5**step * data(rows=64) for step in range(6)]
    fast = fast_on_gpu(plain)
    expected = [train_step(plain, fast, batch) for batch in batches]
    torch._dynamo.reset()
    fast = fast_on_gpu(graphed, mode="reduce-overhead")
    for batch, (result, gradient) in zip(batches, expected, strict=True):
        torch.compiler.cudagraph_mark_step_begin()
        got, got_gradients = train_step(graphed, fast, batch)
        assert relative_error(got.clone(), result) < 2e-2
        assert all(cosine(got_gradients[name], g) > 0.99 for name, g in gradient.items())
    mine, others = state_dict(graphed), state_dict(plain)
    for name, entry in others.items():
        torch.testing.assert_close(mine[name], entry, rtol=0.1, atol=1e-6)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_checkpointing_computes_the_gradients_of_no_checkpointing(compiler: str) -> None:
    plain = on_gpu()
    recomputed = copy.deepcopy(plain)
    recomputed.recomputed = True
    batches = [3.0**step * data(rows=48) for step in range(3)]
    results = []
    for model in (plain, recomputed):
        torch._dynamo.reset()
        fast = fast_on_gpu(model, compiler=compiler)
        results.append([train_step(model, fast, batch)[1] for batch in batches])
    for expected, got in zip(*results, strict=True):
        for name, gradient in expected.items():
            assert relative_error(got[name], gradient) < (1e-6 if compiler == "aot_eager" else 2e-2), name


def test_a_model_that_moves_to_the_gpu_takes_its_state_along() -> None:
    model = Stack()
    fast = compiled(model)
    train_step(model, fast, data(rows=32, dtype=torch.float32).cpu())
    before = state_dict(model)
    model.cuda()
    torch._dynamo.reset()
    with torch.no_grad():
        fast_on_gpu(model)(data(rows=32, dtype=torch.float32))
    after = state_dict(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_dynamic_lengths_compile_twice_at_most() -> None:
    model = on_gpu()
    reference = emulated(model, lambda name, module: True)
    fast = fast_on_gpu(model, recipe="current")
    with manager.recording() as records:
        for rows in (48, 33, 96, 17):
            x = data(rows)
            got, got_gradients = train_step(model, fast, x)
            expected, expected_gradients = train_step(reference, reference, x)
            assert relative_error(got, expected) < 2e-2
            assert all(cosine(got_gradients[name], g) > 0.99 for name, g in expected_gradients.items())
    assert len(records) <= 2


def test_an_empty_batch_runs() -> None:
    model = on_gpu()
    fast = fast_on_gpu(model)
    train_step(model, fast, data(rows=32))
    y = fast(torch.randn(0, 32, 256, device="cuda", dtype=torch.bfloat16))
    assert y.shape == (0, 32, 256)
    y.sum().backward()


def test_a_non_finite_activation_is_counted_and_harms_no_scale() -> None:
    model = on_gpu()
    fast = fast_on_gpu(model)
    x = data(rows=32)
    train_step(model, fast, x)
    held = state.existing_state(model.blocks[0].q.weight, 1024)
    before = held.scale.clone()
    bad = x.clone()
    bad[0, 3, 5] = float("nan")
    train_step(model, fast, bad)
    assert held.skipped[0] == 1 and torch.equal(held.scale[0], before[0])


def test_the_cost_model_leaves_small_linears_alone_and_says_so() -> None:
    model = on_gpu()
    with manager.recording() as records:
        torch.compile(model, backend=BACKEND, options={"compiler": "aot_eager"})(data(rows=20))
    assert all(site.status == "kept" and "small" in site.reason for site in records[0].plan.sites)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_products_add_biases_of_fp32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On their way out, without two more passes over the result; and results and gradients are autocast's."""
    from te_compile.kernels import cublaslt

    monkeypatch.setattr(cublaslt, "_gemm_with_foreign_bias", lambda *_: pytest.fail("a bias of another dtype"))
    model = Stack().cuda()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    x, fast = torch.randn(4, 64, 256, device="cuda"), compiled(model, cost_model=False)
    results = []
    for run in (fast, fast, model):
        model.zero_grad()
        with torch.autocast("cuda", dtype):
            y = run(x)
        y.float().square().mean().backward()
        results.append([y.detach(), *(p.grad for p in model.parameters())])
    _, got, wanted = results
    assert [each.dtype for each in got] == [each.dtype for each in wanted]
    assert all(cosine(one, other) > 0.98 for one, other in zip(got, wanted, strict=True))
