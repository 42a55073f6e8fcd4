"""A bias of relative positions that learns: fused attention, with the results and gradients of the model as it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_compile.passes import manager
from tests.compiling import compiled, cosine, relative_error

HAS_EFFICIENT = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_EFFICIENT, reason="needs a CUDA device with FP8"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

HEADS, WIDTH, BUCKETS = 8, 64, 32


class Attention(nn.Module):
    """Self-attention with a bias that is looked up by distance and head, as T5 has it."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        features = HEADS * WIDTH
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.bias, self.causal = nn.Embedding(BUCKETS, HEADS), causal

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, HEADS * WIDTH]."""
        rows, length, features = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
        place = torch.arange(length, device=x.device)
        distance = place[:, None] - place[None, :]
        bias = self.bias(distance.abs().clamp(max=BUCKETS - 1)).permute(2, 0, 1).unsqueeze(0)
        if self.causal:
            bias = torch.where(distance >= 0, bias, torch.finfo(x.dtype).min)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0 / 16)
        return x + self.out(y.transpose(1, 2).reshape(rows, length, features))


@pytest.mark.parametrize("length", [256, 200, 77])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_it_trains_as_before(length: int, causal: bool, autocast: bool) -> None:
    model = Attention(causal).cuda()
    model = model if autocast else model.bfloat16()
    x = torch.randn(3, length, HEADS * WIDTH, device="cuda", dtype=torch.float32 if autocast else torch.bfloat16)

    def gradients(run: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = run(x)
        (y.float().sin() * torch.linspace(0.5, 1.5, y.numel(), device="cuda").view(y.shape)).sum().backward()
        return y.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    torch._C._set_sdp_use_cudnn(False)  # eager mode's cuDNN has no gradient for a bias
    try:
        wanted, before = gradients(model)
    finally:
        torch._C._set_sdp_use_cudnn(True)
    with manager.recording() as records:
        got, after = gradients(compiled(model, compiler="inductor", exclude=["*"]))
    expected = ["efficient" if length % 8 == 0 else ""]
    assert [each.kernel for record in records for each in record.plan.attentions] == expected
    assert relative_error(got, wanted) < 2e-2
    assert after.keys() == before.keys() and "bias.weight" in after
    for name in before:
        assert cosine(after[name], before[name]) > 0.998, name
    got, after = gradients(compiled(model, compiler="inductor", cost_model=False))  # and with linears in FP8
    assert cosine(got, wanted) > 0.99 and cosine(after["bias.weight"], before["bias.weight"]) > 0.97


def test_a_bias_is_laid_out_where_nothing_learns() -> None:
    model = Attention(causal=True).cuda().bfloat16()
    x = torch.randn(2, 256, HEADS * WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        got, wanted = compiled(model, compiler="inductor", exclude=["*"])(x), model(x)
    assert relative_error(got, wanted) < 2e-2
