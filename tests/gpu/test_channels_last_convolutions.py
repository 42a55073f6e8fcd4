"""Convolutions along one dimension read and write their channels last on a GPU, and nobody copies them for cuDNN."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from te_compile.passes import manager
from tests.compiling import BACKEND, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

OPTIONS = {"exclude": ["*"], "cost_model": False}
"""One with as many taps as its stride would be a linear in FP8."""
STEPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
WIDTH = 512


class Listening(nn.Module):
    """The convolutions of wav2vec 2.0 behind the first, of the base models or the large ones."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        taps = (3, 3, 2)
        self.convolutions = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, each, stride=2, bias=normed) for each in taps)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) if normed else nn.Identity() for _ in taps)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.gelu(norm(convolution(x).transpose(1, 2)).transpose(1, 2))
        return x


def step(run: nn.Module, model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The result, and the gradients of x and the parameters."""
    x = x.detach().requires_grad_()
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)]


@pytest.mark.parametrize("dtype", STEPS, ids=str)
@pytest.mark.parametrize(  # with norms Inductor 2.11 fails to compile symbols, whatever the backend
    ("normed", "dynamic"), [(False, False), (True, False), (False, True)], ids=["bare", "normed", "bare, symbols"]
)
def test_results_and_gradients_are_right(dtype: torch.dtype, normed: bool, dynamic: bool) -> None:
    model = Listening(normed).to("cuda", dtype)
    exact = deepcopy(model).double()
    fast = torch.compile(model, backend=BACKEND, dynamic=dynamic, options=OPTIONS)
    with manager.recording() as records:
        for length in (1999, 2011) if dynamic else (1999,):
            x = torch.randn(4, WIDTH, length, device="cuda", dtype=dtype)
            wanted = exact(x.double())
            dy = torch.randn(wanted.shape, device="cuda", dtype=dtype)
            got, right = step(fast, model, x, dy), step(exact, exact, x.double(), dy.double())
            for one, other in zip(got, right, strict=True):
                assert relative_error(one, other) < 4 * STEPS[dtype]
    counts = [each.count for record in records for each in record.passes if each.name.startswith("channels_last")]
    assert counts == [0 if dynamic else 6]


def test_nothing_is_copied_into_another_order() -> None:
    model = Listening(normed=False).to("cuda", torch.bfloat16)
    fast = torch.compile(model, backend=BACKEND, options=OPTIONS)
    x = torch.randn(4, WIDTH, 1999, device="cuda", dtype=torch.bfloat16)
    dy = torch.ones_like(fast(x))
    step(fast, model, x, dy)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step(fast, model, x, dy)
        torch.cuda.synchronize()
    kernels = [each.key for each in seen.key_averages()]
    assert kernels and not any("nchwToNhwc" in each or "nhwcToNchw" in each for each in kernels)
