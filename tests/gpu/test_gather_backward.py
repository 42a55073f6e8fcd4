"""Gradients of gathers whose indices all heads share: the kernel at real sizes, and disentangled attention."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from te_compile.kernels.gather_backward import gather_backward
from te_compile.ops.gather_backward import gather_backward_reference
from te_compile.passes import manager
from tests.compiling import BACKEND, relative_error
from tests.kernels.test_gather_backward import anything, relative_positions
from tests.needs import FP8_GPU
from tests.passes.test_gather_backwards import Disentangled

pytestmark = [*FP8_GPU, pytest.mark.usefixtures("fresh_dynamo")]
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("indices", [relative_positions, anything])
@pytest.mark.parametrize("size", [(192, 512, 512, 512), (100, 197, 133, 300), (16, 1000, 64, 64)], ids=str)
def test_the_kernel_agrees_with_the_reference(
    size: tuple[int, int, int, int], indices: Callable[[int, int, int], Tensor], dtype: torch.dtype
) -> None:
    batch, rows, places, columns = size
    index = indices(rows, places, columns).cuda()
    dy = torch.randn(batch, rows, places, device="cuda").to(dtype)
    got, right = gather_backward(dy, index, columns), gather_backward_reference(dy, index, columns)
    assert relative_error(got, right) < STEP[dtype]
    torch.testing.assert_close(got, right, rtol=4 * STEP[dtype], atol=2.0**-8)


def step(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The result, and the gradients of all parameters."""
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y, [*model.parameters()], dy)]


@pytest.mark.parametrize("dtype", STEP, ids=str)
def test_disentangled_attention_trains(dtype: torch.dtype) -> None:
    model = Disentangled(width=128, span=64).to("cuda", dtype)
    exact = deepcopy(model).double()
    x = torch.randn(4, 200, 128, device="cuda", dtype=dtype)
    dy = torch.randn_like(x)  # that of a mean would be beyond the small numbers of float16
    with manager.recording() as records:
        got = step(torch.compile(model, backend=BACKEND, options={"exclude": ["*"]}), model, x, dy)
    assert {each.name: each.count for each in records[0].passes}["gather_backwards"] == 2
    for one, other in zip(got, step(exact, exact, x.double(), dy.double()), strict=True):
        assert relative_error(one, other) < 8 * STEP[dtype]
