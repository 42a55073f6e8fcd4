"""Gated MLPs with one linear for gate and up: the gradients of both leave one kernel, in FP8, side by side."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from te_compile.kernels import pointwise
from te_compile.ops.fused_quantize_cat import fused_quantize_cat_reference
from te_compile.ops.pointwise import Spec
from te_compile.passes import manager
from te_compile.recipe import ScaleRule
from tests.compiling import BACKEND, cosine, relative_error
from tests.needs import FP8_GPU

pytestmark = [*FP8_GPU, pytest.mark.usefixtures("fresh_dynamo")]

GATE = (
    "x0: bfloat16[M, K]; x1: bfloat16[M, K]; x2: bfloat16[M, K]; t0 = mul(x0, x1); t1 = bfloat16(t0); "
    "t2 = maximum(x2, 0.5); t3 = mul(x0, t2); t4 = bfloat16(t3); quantize t1; quantize t4"
)
SUMS = GATE + "; sum t1: float32; sum t4: bfloat16"
WIDTH = 640


class Gated(nn.Module):
    """Linear, gate, linear."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 2 * width, bias=bias), nn.Linear(width, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


@pytest.mark.parametrize("spec", [GATE, SUMS], ids=["codes", "sums"])
@pytest.mark.parametrize("scale", [24.0, None], ids=["delayed", "current"])
@pytest.mark.parametrize("shape", [(256, 1024), (4096, 6848), (200, 1000), (1, 4096), (1030, 72)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_the_kernel_writes_what_the_reference_does(
    dtype: torch.dtype, shape: tuple[int, int], scale: float | None, spec: str
) -> None:
    rows, columns = shape
    both = torch.randn(rows, 2 * columns, device="cuda", dtype=torch.bfloat16)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16), *both.chunk(2, 1)]
    known = None if scale is None else torch.tensor(scale, device="cuda")
    arguments = inputs, known, Spec.parse(spec), dtype, True, True, ScaleRule()
    got, right = (
        pointwise.fused_quantize_cat(*arguments, measure=known is None),
        fused_quantize_cat_reference(*arguments),
    )
    for one, other in zip(got[:4], right[:4], strict=True):
        assert one.shape == other.shape
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    for one, other in zip(got[4:], right[4:], strict=True):
        assert relative_error(one, other) < (1e-5 if one.dtype == torch.float32 else 2.0**-8)


def step(run: Any, model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The result, and the gradients of x and the parameters."""
    x = x.detach().requires_grad_()
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)]


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["bare", "bias"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["sizes", "symbols"])
def test_a_model_trains(dynamic: bool, bias: bool, dtype: torch.dtype, recipe: str) -> None:
    model = Gated(1728, bias).to("cuda", dtype)
    exact = deepcopy(model).float()
    fast = torch.compile(
        model, backend=BACKEND, dynamic=dynamic, options={"cost_model": False, "recipe": recipe, "strict": True}
    )
    with manager.recording() as records:
        for length in (256, 384, 250) if dynamic else (256,):
            x = torch.randn(2, length, WIDTH, device="cuda", dtype=dtype)
            dy = torch.randn_like(x)
            step(fast, model, x, dy)  # scales are found here
            got, right = step(fast, model, x, dy), step(exact, exact, x.float(), dy.float())
            for one, other in zip(got, right, strict=True):
                assert bool(one.isfinite().all()) and cosine(one, other) > 0.995
    counts = [each.count for record in records for each in record.passes if each.name == "cat_producers"]
    assert counts == [1]


def test_nothing_else_reads_or_writes_the_halves() -> None:
    """Between the two products of the backward is one kernel, and none of Inductor's."""
    model = Gated(1728, bias=False).to("cuda", torch.bfloat16)
    fast = torch.compile(model, backend=BACKEND, options={"cost_model": False})
    x, dy = (torch.randn(2048, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        step(fast, model, x, dy)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step(fast, model, x, dy)
        torch.cuda.synchronize()
    kernels = [each.key for each in seen.key_averages()]
    assert "produce" in kernels and not any(name.startswith("triton_") for name in kernels)
