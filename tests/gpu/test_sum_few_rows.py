"""Gradients of tables of few rows are sums by products on a GPU, where Inductor would add them up one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from te_compile.passes import manager
from tests.compiling import BACKEND, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

WIDTH = 768
STEPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class Looked(nn.Module):
    """What rows of a table add to x before a linear; the gradient of that sum is the caller's."""

    def __init__(self, rows: int, padding: int | None, by_index: bool) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(rows, WIDTH, padding_idx=padding), nn.Linear(WIDTH, WIDTH)
        self.by_index = by_index

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        y = x + (self.table.weight[ids] if self.by_index else self.table(ids))
        return y, torch.relu(self.up(y.detach()))


class Biased(nn.Module):
    """A bias of relative positions for each head, added to scores [heads, queries, keys] as T5 does."""

    def __init__(self, rows: int, heads: int) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(rows, heads), nn.Linear(WIDTH, WIDTH)

    def forward(self, scores: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(scores.shape[-1], device=scores.device)
        distances = (places[:, None] - places).abs().clamp(max=self.table.num_embeddings - 1)
        return scores + self.table(distances).permute(2, 0, 1), torch.relu(self.up(x))


def check(got: Tensor, ids: Tensor, dy: Tensor, padding: int | None = None) -> None:
    """Are the sums right in aggregate and row by row? dy: [..., D], ids: [...]. cuBLAS may add up parts of a sum that
    are rounded to 16 bits each."""
    rows, step = len(got), STEPS[dy.dtype]
    values = dy.double().flatten(0, -2)
    if padding is not None:
        values = values * (ids.flatten() != padding)[:, None]
    wanted = torch.zeros(rows, dy.shape[-1], dtype=torch.double, device=dy.device)
    wanted.index_add_(0, ids.flatten() % rows, values)
    assert relative_error(got, wanted) < 2 * step
    for row, expected in zip(got, wanted, strict=True):
        assert relative_error(row, expected) < 4 * step if expected.any() else not row.any()


def gradient(model: nn.Module, dy: Tensor, *inputs: Tensor, fires: bool = True) -> tuple[Tensor, str]:
    """That of the table, and the code of the backward pass."""
    fast = torch.compile(model, backend=BACKEND, options={"cost_model": False, "strict": True})

    def step() -> None:
        y, z = fast(*inputs)
        torch.autograd.backward([y, z], [dy, torch.ones_like(z)])

    with manager.recording() as records:
        _, codes = run_and_get_code(step)
    counts = [each.count for each in records[-1].passes if each.name == "sum_few_rows"]
    assert counts == [int(fires)]
    assert model.table.weight.grad is not None  # type: ignore[union-attr]
    return model.table.weight.grad, codes[-1]  # type: ignore[union-attr, return-value]


@pytest.mark.parametrize("dtype", STEPS, ids=str)
@pytest.mark.parametrize("rows", [2, 4, 16, 64])
@pytest.mark.parametrize("form", ["an embedding", "with padding", "by index"])
def test_the_gradient_is_the_sum_and_nothing_is_added_up_in_memory(form: str, rows: int, dtype: torch.dtype) -> None:
    padding = rows - 1 if form == "with padding" else None
    model = Looked(rows, padding, form == "by index").to("cuda", dtype)
    ids = torch.randint(-rows if form == "by index" else 0, rows, (16, 512), device="cuda")
    x, dy = (torch.randn(16, 512, WIDTH, device="cuda", dtype=dtype) for _ in range(2))
    got, code = gradient(model, dy, x, ids)
    check(got, ids, dy, padding)
    assert "tl.atomic_add" not in code and "aten.index_put_(" not in code


@pytest.mark.parametrize("dtype", STEPS, ids=str)
@pytest.mark.parametrize("heads", [8, 12])
def test_the_gradient_of_a_bias_by_heads_is_the_sum(heads: int, dtype: torch.dtype) -> None:
    rows, length = 32, 512
    model = Biased(rows, heads).to("cuda", dtype)
    scores, dy = (torch.randn(heads, length, length, device="cuda", dtype=dtype) for _ in range(2))
    got, code = gradient(model, dy, scores, torch.randn(64, WIDTH, device="cuda", dtype=dtype))
    places = torch.arange(length, device="cuda")
    check(got, (places[:, None] - places).abs().clamp(max=rows - 1), dy.permute(1, 2, 0))
    assert "tl.atomic_add" not in code


def test_a_table_of_float32_under_autocast_gets_a_sum_of_16_bits() -> None:
    model, rows = Looked(2, None, False).to("cuda"), 2
    ids = torch.randint(rows, (16, 512), device="cuda")
    x = torch.randn(16, 512, WIDTH, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn_like(x)

    class Narrowed(nn.Module):
        """A sum that is rounded, as a norm's result is to a linear under autocast."""

        def __init__(self) -> None:
            super().__init__()
            self.table, self.up = model.table, model.up

        def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            y = x + self.table(ids).to(x.dtype)
            return y, torch.relu(self.up(y.detach()))

    with torch.autocast("cuda", dtype=torch.bfloat16):
        got, code = gradient(Narrowed(), dy, x, ids)
    assert got.dtype == torch.float32 and "tl.atomic_add" not in code
    check(got, ids, dy)


def test_batches_of_other_lengths_have_right_sums() -> None:
    rows, model = 2, Looked(2, None, False).to("cuda", torch.bfloat16)
    fast = torch.compile(model, backend=BACKEND, dynamic=True, options={"cost_model": False})
    with manager.recording() as records:
        for length in (512, 200, 37, 640):
            model.zero_grad()
            ids = torch.randint(rows, (16, length), device="cuda")
            x, dy = (torch.randn(16, length, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            y, z = fast(x, ids)
            torch.autograd.backward([y, z], [dy, torch.ones_like(z)])
            assert model.table.weight.grad is not None
            check(model.table.weight.grad, ids, dy)
    assert [each.count for each in records[-1].passes if each.name == "sum_few_rows"] == [1]


@pytest.mark.parametrize("rows", [256, 512])
def test_tables_of_many_rows_are_added_up_as_before(rows: int) -> None:
    model = Looked(rows, None, False).to("cuda", torch.bfloat16)
    ids = torch.randint(rows, (16, 512), device="cuda")
    x, dy = (torch.randn(16, 512, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    got, _ = gradient(model, dy, x, ids, fires=False)
    check(got, ids, dy)
