"""Convolutions in groups with long kernels are products on a GPU, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from te_compile.passes import manager
from tests.compiling import BACKEND, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

STEPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class Positions(nn.Module):
    """Those of wav2vec 2.0, but for its activation."""

    def __init__(self, width: int, taps: int, groups: int) -> None:
        super().__init__()
        convolution = nn.Conv1d(width, width, taps, padding=taps // 2, groups=groups)
        self.positions, self.up = weight_norm(convolution, dim=2), nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.positions(x.transpose(1, 2)).transpose(1, 2)
        return y, F.gelu(self.up(y.detach()))


def step(run: Callable[..., tuple[Tensor, Tensor]], model: Positions, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The convolution's result, and the gradients of x and of what the convolution has learned."""
    x = x.detach().requires_grad_()
    y, _ = run(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.positions.parameters()], dy)]


@pytest.mark.parametrize("dtype", STEPS, ids=str)
@pytest.mark.parametrize("size", [(4, 499, 1024, 128, 16), (2, 301, 768, 128, 16), (3, 200, 256, 31, 4)], ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["sizes", "symbols"])
def test_results_and_gradients_are_right(dtype: torch.dtype, size: tuple[int, ...], dynamic: bool) -> None:
    batch, length, width, taps, groups = size
    model = Positions(width, taps, groups).to("cuda", dtype)
    exact = deepcopy(model).double()
    fast = torch.compile(model, backend=BACKEND, dynamic=dynamic, options={"cost_model": False})
    with manager.recording() as records:
        for frames in (length, length + 13) if dynamic else (length,):
            x = torch.randn(batch, frames, width, device="cuda", dtype=dtype)
            dy = torch.randn(batch, frames + 1 - taps % 2, width, device="cuda", dtype=dtype)
            got, wanted = step(fast, model, x, dy), step(exact, exact, x.double(), dy.double())
            for one, other in zip(got, wanted, strict=True):
                # The norm of the weight is computed in 16 bits, and so is its gradient.
                assert relative_error(one, other) < 3 * STEPS[dtype]
            for one, other in zip(got[0].flatten(0, 1).T, wanted[0].flatten(0, 1).T, strict=True):
                assert relative_error(one, other) < 4 * STEPS[dtype]
    assert [each.count for record in records for each in record.passes if each.name == "long_convolutions"] == [2]
