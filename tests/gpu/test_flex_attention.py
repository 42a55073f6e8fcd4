"""A training step through ``flex_attention`` on its own kernels, between linears in FP8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from te_compile.passes import manager
from tests.compiling import compiled, cosine, train_step
from tests.needs import FP8_GPU

pytestmark = [
    *FP8_GPU,
    pytest.mark.usefixtures("fresh_dynamo"),
]

BATCH, LENGTH, WIDTH, HEADS = 4, 512, 512, 8


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 20 * torch.tanh(score / 20)


class Layer(nn.Module):
    """Capped causal attention between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        out = flex_attention(q, k, v, score_mod=capped, block_mask=self.mask)
        return self.out(out.transpose(1, 2).flatten(-2))


def test_it_trains_as_in_high_precision() -> None:
    layer = Layer().to("cuda", torch.bfloat16)
    x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    wanted, expected = train_step(layer, torch.compile(layer), x)
    torch._dynamo.reset()
    with manager.recording() as records:
        y, got = train_step(layer, compiled(layer, compiler="inductor", cost_model=False), x)
    (record,) = records
    assert [site.status for site in record.plan.sites] == ["fp8", "fp8"]
    assert [(each.status, "flex_attention" in each.reason) for each in record.plan.attentions] == [("stays", True)]
    assert cosine(y, wanted) > 0.99 and all(cosine(got[name], expected[name]) > 0.98 for name in expected)
