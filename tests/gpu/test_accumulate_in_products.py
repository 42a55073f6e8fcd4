"""Products that add to gradients on a GPU: near the exact sum, replayed, and on the usual stream alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_compile.kernels import native, player
from te_compile.ops import gemm_into_grad
from te_compile.ops.gemm import gemm_reference
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of
from tests.compiling import compiled, gradients, te_nodes
from tests.needs import FP8_GPU
from tests.ops.test_gemm_into_grad import into_parameter

pytestmark = [
    *FP8_GPU,
    pytest.mark.skipif(bool(native.missing(cuda=True)), reason="the core was built without CUDA"),
    pytest.mark.usefixtures("fresh_dynamo"),
]
M, N, K = 256, 384, 512
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(params=["Python", "core"])
def by(request: pytest.FixtureRequest) -> Iterator[str]:
    with player.by_python() if request.param == "Python" else nullcontext():
        yield request.param


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes = (torch.randn(M, K, device="cuda").to(E5M2), torch.randn(N, K, device="cuda").to(E4M3))
    return *codes, torch.rand((), device="cuda") + 1, torch.rand((), device="cuda") + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_sum_is_as_near_as_autograds_replayed_or_not(
    dtype: torch.dtype, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the exact product, rounded, and the gradient before, rounded again."""
    from te_compile import direct
    from te_compile.kernels.replay import Replayed
    from te_compile.ops.library import implementations

    monkeypatch.setattr("te_compile.ops.calibration._waiting", set())
    add = Replayed("add_to_grad", gemm_into_grad.add_to_grad)
    function = direct.Choosing(gemm_into_grad.into_grad, Replayed("gemm", implementations["gemm"]), add).site()
    weight = nn.Parameter(torch.zeros(M, N, dtype=dtype, device="cuda"))
    weight.grad = gradient = torch.randn(M, N, device="cuda").to(dtype)
    for _ in range(6):
        given, before, version = operands(), gradient.double(), gradient._version
        call = lambda: function(*given, dtype, "split", "fc wgrad", [M, N], 1, 2, "cublaslt")  # noqa: B023, E731
        assert into_parameter(weight, call) is None and weight.grad is gradient and gradient._version > version
        a, b, a_scale_inv, b_scale_inv = given
        product = (a.double() @ b.double().t()) * (a_scale_inv.double() * b_scale_inv.double())
        # Tensor cores add with fewer bits than fp32 has: as far off as the product alone, whatever algorithm it takes.
        alone = implementations["gemm"](*given, None, torch.float32, "split", "", None, "cublaslt")
        unrounded = 2 * (alone.double() - product).abs().max()
        exact = product + before
        step = 0.5 * torch.finfo(dtype).eps * (product.abs() + exact.abs()) + unrounded
        assert bool(((gradient.double() - exact).abs() <= step).all())
    assert len(add.tapes) == 1 and None not in add.tapes.values(), "it is not replayed"


@pytest.mark.parametrize("size", [[2 * M, N // 2], [M // 2, 2 * N], [M, N // 4, 2, 2]])
def test_a_gradient_of_another_shape_gets_the_same_sum(size: list[int], by: str) -> None:
    """Beside memory that is somebody else's: a product written by the wrong shape would end there."""
    from te_compile.direct import CALLS
    from te_compile.ops.library import implementations

    function = CALLS.gemm_into_grad.site()
    weight = nn.Parameter(torch.zeros(size, device="cuda"))
    memory = torch.zeros(3, M * N, device="cuda")
    weight.grad = memory[1].view(size)
    given = operands()
    for count in range(1, 7):
        assert (
            into_parameter(weight, lambda: function(*given, torch.float32, "split", "", size, 1, 2, "cublaslt")) is None
        )
        product = gemm_reference(*given, None, torch.float32, "split")
        # Tensor cores add with fewer bits than fp32 has: each sum may be as far off as the product alone, twice.
        alone = implementations["gemm"](*given, None, torch.float32, "split", "", None, "cublaslt")
        off = 2 * (alone - product).abs().max().item()
        torch.testing.assert_close(memory[1].view(M, N), count * product, rtol=1e-5, atol=off * count)
        assert not memory[0].any() and not memory[2].any()


class Mlp(nn.Module):
    """Linears with and without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, N), nn.Linear(N, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [M, K]."""
        return self.b(torch.relu(self.a(x)))


def backward(run: Callable[..., Any], x: Tensor) -> None:
    run(x).float().square().mean().backward()


def summed(model: nn.Module, batches: list[Tensor], **options: Any) -> tuple[dict[str, Tensor], manager.Compilation]:
    """The gradients of a copy of ``model`` after a backward pass for each batch."""
    torch._dynamo.reset()
    each = copy.deepcopy(model)
    with manager.recording() as records:
        run = compiled(each, compiler="inductor", cost_model=False, **options)
        for x in batches:
            backward(run, x)
    return gradients(each), records[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches_are_summed(dtype: torch.dtype, by: str, added: list[Tensor]) -> None:
    model = Mlp().cuda().to(dtype)
    batches = [torch.randn(M, K, device="cuda", dtype=dtype) for _ in range(5)]
    got, record = summed(model, batches)
    assert len(added) == 2 * 4
    assert [arguments_of(node)["implementation"] for node in te_nodes(record, "gemm_into_grad")] == ["cublaslt"] * 2
    expected, _ = summed(model, batches, accumulate_in_products=False)
    assert len(added) == 2 * 4
    for name, gradient in expected.items():
        step = float(gradient.abs().max()) * max(torch.finfo(dtype).eps, 2**-13)
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=5 * step)


def test_on_a_stream_of_the_users_own_gradients_are_returned(added: list[Tensor]) -> None:
    model, stream = Mlp().cuda().bfloat16(), torch.cuda.Stream()
    batches = [torch.randn(M, K, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got, _ = summed(model, batches)
    torch.cuda.current_stream().wait_stream(stream)
    expected, _ = summed(model, batches, accumulate_in_products=False)
    assert not added
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=2**-6, atol=float(gradient.abs().max()) * 2**-6)


def test_replayed_cuda_graphs_add_nothing_themselves(added: list[Tensor]) -> None:
    """To gradients that are the user's own: those that a graph made are overwritten when it runs again."""
    model = Mlp().cuda().bfloat16()
    batches = [torch.randn(M, K, device="cuda", dtype=torch.bfloat16) for _ in range(5)]
    expected, _ = summed(model, batches, accumulate_in_products=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch._dynamo.reset()
    with manager.recording() as records:
        run = compiled(model, compiler="inductor", cost_model=False, **{"triton.cudagraphs": True})
        for x in batches:
            torch.compiler.cudagraph_mark_step_begin()
            backward(run, x)
    assert not added and not te_nodes(records[0], "gemm_into_grad")
    for name, gradient in gradients(model).items():
        largest = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=2**-6, atol=largest * 2**-6)


def test_a_backward_pass_makes_no_memory_for_gradients_that_are_there(added: list[Tensor]) -> None:
    size = 4096
    model = nn.Linear(size, size, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, size, device="cuda", dtype=torch.bfloat16)
    peaks = []
    for option in (True, False):
        torch._dynamo.reset()
        model.zero_grad()
        run = compiled(model, compiler="inductor", cost_model=False, accumulate_in_products=option)
        for _ in range(4):
            backward(run, x)
        y, dy = run(x), torch.randn_like(x)  # a loss's own backward would make memory as well
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y.backward(dy)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] <= 2 * x.numel(), "more than the FP8 gradient of the output, in both layouts"
    assert peaks[1] >= size * size * 2
