"""Gradients of a table of scales and shifts are there, where Inductor sums rows and columns in one kernel."""

from __future__ import annotations

import pytest
import torch

from tests.compiling import BACKEND, cosine, gradients
from tests.scale_tables import Modulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

ROWS, WIDTH = 8192, 1024  # enough of both that Inductor has one kernel for both


@pytest.mark.parametrize("exclude", [[], ["*"]], ids=["in FP8", "in high precision"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_part_of_the_table_lacks_its_gradient(dtype: torch.dtype, exclude: list[str]) -> None:
    model = Modulated(WIDTH).to("cuda", dtype)
    x = torch.randn(1, ROWS, WIDTH, device="cuda", dtype=dtype)
    model(x).square().mean().backward()
    wanted = gradients(model)["table"]
    fast = torch.compile(model, backend=BACKEND, options={"exclude": exclude, "cost_model": False})
    for _ in range(2):
        model.zero_grad()
        torch.full((1, 4, WIDTH), float("nan"), device="cuda", dtype=dtype)  # what memory that nobody fills would hold
        fast(x).square().mean().backward()
        got = gradients(model)["table"]
        assert all(cosine(got[0, part], wanted[0, part]) > 0.98 for part in range(4))
