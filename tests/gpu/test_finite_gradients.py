"""Gradients are numbers where all scores of a query are low, and cuDNN's would be none; and where a mask is one of
float32, which it would misread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_compile.passes import manager
from tests.compiling import compiled, relative_error
from tests.kernel_order import CUDNN_FIRST, order_of_kernels
from tests.needs import FAST_CUDNN

pytestmark = [*FAST_CUDNN, pytest.mark.usefixtures("fresh_dynamo")]

BATCH, HEADS = 2, 3
Attend = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def cudnn_comes_first() -> Iterator[None]:
    """As where PyTorch finds a newer one."""
    with order_of_kernels(CUDNN_FIRST):
        yield


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def spelled_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return torch.softmax(scores if mask is None else scores + mask, dim=-1) @ v


def heads(queries: int, keys: int, width: int, dtype: torch.dtype, score: float) -> list[Tensor]:
    """q, k and v of which each score is about ``score``: the first features make it so."""
    q, k, v = (torch.randn(BATCH, HEADS, n, width, device="cuda") for n in (queries, keys, keys))
    q[..., 0], k[..., 0] = 1.0, score * math.sqrt(width)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


def lowest(length: int, dtype: torch.dtype) -> Tensor:
    """Causal, and of the first row half is padding in front: the lowest number hides, and some queries see nothing.
    What those have as a result is the kernel's: the lowest bfloat16 is infinite to it."""
    mask = torch.zeros(BATCH, 1, length, length, device="cuda", dtype=dtype)
    mask.masked_fill_(torch.ones(length, length, device="cuda", dtype=torch.bool).triu(1), torch.finfo(dtype).min)
    mask[0, :, :, : length // 2] = torch.finfo(dtype).min
    return mask


def step(call: Attend, operands: list[Tensor], mask: Tensor | None, grad: Tensor) -> list[Tensor]:
    """Result and gradients; that of queries without the feature whose gradient is a sum that cancels."""
    y = call(*operands) if mask is None else call(*operands, mask)
    dq, dk, dv = torch.autograd.grad(y, operands, grad.to(y.dtype))
    return [y, dq[..., 1:], dk, dv]


def check(attend: Attend, operands: list[Tensor], mask: Tensor | None, first: int = 0) -> list[str]:
    """Hold te_fp8 against float32, from row ``first`` of the batch on; returns the kernels that it chose."""
    wide = [x.detach().float().requires_grad_() for x in operands]
    grad = torch.randn(*operands[0].shape[:3], operands[2].shape[3], device="cuda")
    with manager.recording() as records:
        got = step(compiled(attend), operands, mask, grad)
    wanted = step(spelled_out, wide, None if mask is None else mask.float(), grad)
    for name, one, other in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        assert one.isfinite().all(), name
        assert relative_error(one[first:], other[first:]) < 3e-2, name
    return [each.kernel for record in records for each in record.plan.attentions]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attend", [by_sdpa, spelled_out])
@pytest.mark.parametrize(
    ("queries", "keys", "width"),
    [(64, 64, 128), (192, 192, 64), (576, 576, 72), (192, 192, 32), (40, 192, 64), (128, 64, 64), (1, 320, 64)],
)
def test_without_a_mask(attend: Attend, queries: int, keys: int, width: int, dtype: torch.dtype) -> None:
    assert check(attend, heads(queries, keys, width, dtype, score=-150.0), None) == ["finite"]


@pytest.mark.parametrize(("length", "width", "way"), [(192, 64, "biased"), (192, 128, "biased"), (64, 128, "finite")])
@pytest.mark.parametrize("attend", [by_sdpa, spelled_out])
def test_with_a_bias(attend: Attend, length: int, width: int, way: str) -> None:
    mask = torch.randn(1, HEADS, length, length, device="cuda", dtype=torch.bfloat16)
    assert check(attend, heads(length, length, width, torch.bfloat16, score=-150.0), mask) == [way]


@pytest.mark.parametrize("attend", [by_sdpa, spelled_out])
def test_with_a_bias_of_any_length(attend: Attend) -> None:
    fast = compiled(attend, dynamic=True)
    for length in (320, 192, 200, 256):
        mask = torch.randn(1, HEADS, length, length, device="cuda", dtype=torch.bfloat16)
        operands = heads(length, length, 64, torch.bfloat16, score=-150.0)
        wide = [x.detach().float().requires_grad_() for x in operands]
        grad = torch.randn(BATCH, HEADS, length, 64, device="cuda")
        pairs = zip(step(fast, operands, mask, grad), step(spelled_out, wide, mask.float(), grad), strict=True)
        assert all(relative_error(one, other) < 3e-2 for one, other in pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attend", [by_sdpa, spelled_out])
@pytest.mark.parametrize("length", [192, 704])
def test_where_padding_hides_by_the_lowest_number(attend: Attend, length: int, dtype: torch.dtype) -> None:
    check(attend, heads(length, length, 64, dtype, score=0.0), lowest(length, dtype), first=1)


class Encoder(nn.Module):
    """A layer of torch.nn under a mask that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.layer(x, src_mask=mask)
        return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_layer_of_torch_nn_reads_a_mask_of_float32_as_one(dtype: torch.dtype) -> None:
    model = Encoder().to("cuda", dtype)
    x, mask = torch.randn(2, 128, 256, device="cuda", dtype=dtype), torch.randn(128, 128, device="cuda")
    got = compiled(model, exclude=["*"])(x, mask)
    wanted = Encoder().to("cuda")
    wanted.load_state_dict(model.state_dict())
    assert relative_error(got, wanted(x.float(), mask)) < 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("length", [128, 192])
def test_so_does_a_call_of_sdpa(length: int, trains: bool, dtype: torch.dtype) -> None:
    mask = torch.randn(length, length, device="cuda")
    operands = heads(length, length, 64, dtype, score=0.0)
    if trains:
        check(by_sdpa, operands, mask)
        return
    with torch.no_grad():
        got = compiled(by_sdpa)(*operands, mask)
    assert relative_error(got, spelled_out(*(x.float() for x in operands), mask)) < 2e-2
