"""Attention of odd shapes on the kernels that suit it: the results and gradients of the model in float32."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_compile.passes import manager
from tests.compiling import compiled, cosine, relative_error

IS_MEASURED = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_MEASURED, reason="needs a CUDA device of compute capability 9.0"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

HEADS, ROWS = 4, 3


class Attention(nn.Module):
    """Self-attention as models write it. form: "sdpa", or "spelled" out; bias: "none", "fixed", "learned" or "bool", of
    which one key is hidden from all and one query sees a single key."""

    def __init__(self, form: str, bias: str, length: int, width: int) -> None:
        super().__init__()
        features = HEADS * width
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.form, self.dropout = form, 0.0
        self.bias: Tensor | None
        if bias == "none":
            self.bias = None
        elif bias == "learned":
            self.bias = nn.Parameter(torch.randn(1, HEADS, length, length))
        else:
            table = (
                torch.randn(1, HEADS, length, length) if bias == "fixed" else torch.rand(ROWS, 1, length, length) < 0.8
            )
            if bias == "bool":
                table[..., 0], table[:, :, 1], table[:, :, 1, 2] = False, False, True
            self.register_buffer("bias", table)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, HEADS · D]."""
        rows, length, features = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.form == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias, dropout_p=self.dropout)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            y = torch.softmax(scores if self.bias is None else scores + self.bias, -1) @ v
        return x + self.out(y.transpose(1, 2).reshape(rows, length, features))


def gradients(model: nn.Module, run: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    given = x.clone().requires_grad_()
    y = run(given)
    (y.float().sin() * torch.linspace(0.5, 1.5, y.numel(), device="cuda").view(y.shape)).sum().backward()
    learned = {name: parameter.grad.float().clone() for name, parameter in model.named_parameters()}
    return y.detach().float(), {**learned, "x": given.grad.float()}


def check(model: Attention, x: Tensor, ways: list[str]) -> None:
    """Train and infer in bfloat16, linears in high precision, and hold both against float32; ways: of each graph."""
    half = copy.deepcopy(model).to("cuda", torch.bfloat16)
    wide = copy.deepcopy(half).float()
    x = x.cuda().bfloat16()
    wanted, before = gradients(wide, wide, x.float())
    fast = compiled(half, compiler="inductor", exclude=["*"])
    with manager.recording() as records:
        got, after = gradients(half, fast, x)
        with torch.no_grad():
            inferred = fast(x).float()
    assert [f"{each.status} {each.kernel}".strip() for r in records for each in r.plan.attentions] == ways
    assert relative_error(got, wanted) < 1e-2 and relative_error(inferred, wanted) < 1e-2
    assert after.keys() == before.keys()
    for name in before:
        assert cosine(after[name], before[name]) > 0.998, name


@pytest.mark.parametrize("length", [49, 64, 36])
@pytest.mark.parametrize("width", [32, 64, 20])
@pytest.mark.parametrize("bias", ["none", "fixed", "bool"])
def test_few_positions(bias: str, width: int, length: int) -> None:
    check(Attention("sdpa", bias, length, width), torch.randn(ROWS, length, HEADS * width), ["sdpa short"] * 2)


@pytest.mark.parametrize("length", [49, 64])
def test_few_positions_with_a_bias_that_learns(length: int) -> None:
    trained = "efficient" if length % 8 == 0 else ""
    ways = [f"recognised {trained}".strip(), "recognised short"]
    check(Attention("spelled", "learned", length, 32), torch.randn(ROWS, length, HEADS * 32), ways)


def test_very_few_positions_stay_spelled_out() -> None:
    check(Attention("spelled", "fixed", 16, 32), torch.randn(ROWS, 16, HEADS * 32), ["stays"] * 2)


@pytest.mark.parametrize("length", [196, 197, 256])
@pytest.mark.parametrize("bias", ["none", "fixed", "bool"])
@pytest.mark.parametrize("form", ["sdpa", "spelled"])
def test_heads_of_odd_width(form: str, bias: str, length: int) -> None:
    if form == "spelled" and bias == "bool":
        pytest.skip("booleans are not added to scores")
    model = Attention(form, bias, length, 52)
    x = torch.randn(ROWS, length, HEADS * 52)
    status = "recognised" if form == "spelled" else "sdpa"
    half, given = copy.deepcopy(model).to("cuda", torch.bfloat16), x.cuda().bfloat16()
    with manager.recording() as records:
        compiled(half, compiler="inductor", exclude=["*"])(given)
    (record,) = records
    assert {each.name: each.count for each in record.passes}["widen_heads"] == 1
    ways = [f"{each.status} {each.kernel}".strip() for each in record.plan.attentions]
    assert ways[0].startswith(status)
    torch._dynamo.reset()
    check(model, x, ways * 2)


@pytest.mark.parametrize(("length", "width"), [(256, 64), (197, 52), (72, 32), (129, 40), (160, 128)])
@pytest.mark.parametrize("form", ["sdpa", "spelled"])
def test_a_bias_that_learns_goes_to_kernels_of_ours(form: str, length: int, width: int) -> None:
    status = "recognised" if form == "spelled" else "sdpa"
    x = torch.randn(ROWS, length, HEADS * width)
    check(Attention(form, "learned", length, width), x, [f"{status} biased"] * 2)


def test_a_bias_that_learns_beside_wide_heads_stays_with_products() -> None:
    model = Attention("spelled", "learned", 256, 256)
    with_scores, without = (compiled(copy.deepcopy(model).cuda().bfloat16(), compiler="inductor", save_memory=saves)
                            for saves in (False, True))  # fmt: skip
    x = torch.randn(ROWS, 256, HEADS * 256, device="cuda", dtype=torch.bfloat16)
    for run, way in ((with_scores, "stays "), (without, "recognised efficient")):
        with manager.recording() as records:
            run(x)
        assert [f"{each.status} {each.kernel}" for record in records for each in record.plan.attentions] == [way]
    check(model, x.cpu().float(), ["stays", "recognised"])


def test_a_dropout_of_odd_heads_drops_what_it_should() -> None:
    model = Attention("sdpa", "fixed", 256, 52).cuda().bfloat16()
    model.dropout = 0.25
    x = torch.randn(ROWS, 256, HEADS * 52, device="cuda", dtype=torch.bfloat16)
    run = compiled(model, compiler="inductor", exclude=["*"])
    mean = torch.stack([run(x).float() for _ in range(300)]).mean(0) - x.float()
    model.dropout = 0.0
    wanted = model(x).float() - x.float()
    assert relative_error(mean, wanted) < 0.15
