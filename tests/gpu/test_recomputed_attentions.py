"""Checkpointed attention with a bias, which kernels take in few layouts: spelled out and as a call of SDPA."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_compile.ops.recomputed_attention import RECOMPUTED
from te_compile.passes import manager
from tests.compiling import BACKEND, cosine, joint_of
from tests.needs import FP8_GPU

pytestmark = [*FP8_GPU, pytest.mark.usefixtures("fresh_dynamo")]

HEADS, WIDTH = 4, 32


class Attention(nn.Module):
    """Attention with a learned bias. Its values come from outside: in them the result is linear."""

    def __init__(self, spelled_out: bool, p: float, recomputed: bool) -> None:
        super().__init__()
        self.query, self.key = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(2))
        self.distances = nn.Parameter(torch.randn(HEADS, 1024))
        self.spelled_out, self.p = spelled_out, p
        self.around: Any = partial(checkpoint, use_reentrant=False) if recomputed else lambda call, *given: call(*given)

    def attend(self, x: Tensor, values: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k = (linear(x).view(batch, length, HEADS, WIDTH).transpose(1, 2) for linear in (self.query, self.key))
        places = torch.arange(length, device=x.device)
        bias = self.distances[:, places[:, None] - places + 512].expand(batch, HEADS, length, length)
        if not self.spelled_out:
            return F.scaled_dot_product_attention(q, k, values, bias, dropout_p=self.p)
        # As DeBERTa has it: Inductor writes what a division by a tensor makes of keys feature by feature, if it may.
        q, k = (each.contiguous().view(batch * HEADS, length, WIDTH) for each in (q, k))
        root = torch.sqrt(torch.tensor(WIDTH, dtype=torch.float)).to(q.dtype)
        scores = torch.bmm(q, k.transpose(-1, -2) / root).view(bias.shape) + bias
        return F.dropout(scores.softmax(-1), self.p) @ values

    def forward(self, x: Tensor, values: Tensor) -> Tensor:
        return self.around(self.attend, x, values)


def stepped(model: nn.Module, x: Tensor, values: Tensor, dy: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """The result and all gradients of the second step."""
    fast = torch.compile(model, backend=BACKEND, options={"cost_model": False, **options})
    for _ in range(2):
        model.zero_grad()
        values.grad = None
        result = fast(x, values)
        result.backward(dy)
    assert values.grad is not None
    return result.detach(), values.grad, *(each.grad for each in model.parameters() if each.grad is not None)


@pytest.mark.parametrize("fallback_random", [False, True], ids=["", "eager's numbers"])
@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("length", [64, 37])
@pytest.mark.parametrize("spelled_out", [True, False], ids=["spelled out", "sdpa"])
def test_checkpointed_attention_with_a_bias(spelled_out: bool, length: int, p: float, fallback_random: bool) -> None:
    x, dy = torch.randn(2, length, HEADS * WIDTH), torch.randn(2, HEADS, length, WIDTH)
    x, dy = x.to("cuda", torch.bfloat16), dy.to("cuda", torch.bfloat16)
    values = torch.randn_like(dy).requires_grad_()
    model = Attention(spelled_out, p, recomputed=True).to("cuda", torch.bfloat16)
    with manager.recording() as records:
        found = stepped(model, x, values, dy, fallback_random=fallback_random)
    targets = [node.target for record in records for node in joint_of(record).nodes]
    assert sum(target in {each for both in RECOMPUTED.values() for each in both} for target in targets) == 1
    # What backward drops is what forward dropped: then the values' gradient is the transposed of what made the result.
    torch.testing.assert_close(
        (found[0].double() * dy).sum(), (found[1].double() * values).sum(), rtol=1e-2, atol=0.05 * length
    )
    if p == 0:
        plain = Attention(spelled_out, p, recomputed=False).to("cuda", torch.bfloat16)
        plain.load_state_dict(model.state_dict())
        expected = stepped(plain, x, values, dy, fallback_random=fallback_random)
        assert all(cosine(one, other) > 0.999 for one, other in zip(found, expected, strict=True))
