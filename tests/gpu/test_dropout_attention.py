"""Attention with dropout on a GPU: large tiles, the step that is compiled, its report, its draws."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_compile
from te_compile.kernels.dropout_attention import forward
from te_compile.kernels.dropout_attention_backward import backward
from te_compile.kernels.dropout_bits import draw
from te_compile.ops.dropout_bits import dropout_bits_reference, kept_share
from tests.compiling import relative_error
from tests.dropout_attention import Sizes, drawn, expected

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
    pytest.mark.usefixtures("fresh_dynamo"),
]
CLOSE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
ALONE: Any = {"cost_model": False}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("width", [32, 64, 80, 128])
@pytest.mark.parametrize(("queries", "keys"), [(512, 512), (333, 333), (200, 640)])
def test_the_kernels_compute_the_definition(
    queries: int, keys: int, width: int, causal: bool, dtype: torch.dtype
) -> None:
    if causal and queries != keys:
        pytest.skip("causal attention has as many keys as queries here")
    sizes = Sizes(2, queries, keys, 3, width)
    operands = drawn(sizes, "cuda", dtype, packed=queries == keys)
    seed = torch.randint(2**62, (1,), device="cuda")
    assert torch.equal(draw(seed, 6, queries, keys, 0.1), dropout_bits_reference(seed, 6, queries, keys, 0.1))
    bits = draw(seed, 6, queries, keys, 0.1, causal)
    scale = width**-0.5
    given = (operands.q, operands.k, operands.v, bits)
    out, logsumexp, gradients = expected(operands, bits, 0.1, causal, scale)
    got = forward(*given, 0.1, causal, scale)
    assert relative_error(got[0], out) < CLOSE[dtype] and relative_error(got[1], logsumexp) < 1e-3
    of_inputs = [backward(operands.grad, *given, *got, 0.1, causal, scale) for _ in range(2)]
    for one, again, wanted in zip(*of_inputs, gradients, strict=True):
        assert torch.equal(one, again), "the same bits in every run"
        assert relative_error(one, wanted) < CLOSE[dtype]
        columns = (one - wanted).norm(dim=(0, 1)) / wanted.norm(dim=(0, 1))
        assert columns.max() < 3 * CLOSE[dtype]


def test_a_batch_may_have_more_heads_than_one_dimension_of_a_grid_holds() -> None:
    operands = drawn(Sizes(35_000, 16, 16, 2, 32), "cuda", torch.float16)
    bits = draw(torch.randint(2**62, (1,), device="cuda"), 70_000, 16, 16, 0.1)
    given = (operands.q, operands.k, operands.v, bits)
    out, _, gradients = expected(operands, bits, 0.1, False, 32**-0.5)
    got = forward(*given, 0.1, False, 32**-0.5)
    of_inputs = backward(operands.grad, *given, *got, 0.1, False, 32**-0.5)
    for one, wanted in zip((got[0], *of_inputs), (out, *gradients), strict=True):
        assert relative_error(one, wanted) < CLOSE[torch.float16]
        assert relative_error(one[-100:], wanted[-100:]) < 2 * CLOSE[torch.float16]


class Attends(nn.Module):
    """Uniform attention whose values are the identity: its result shows what was kept."""

    def forward(self, x: Tensor) -> Tensor:
        none = torch.zeros_like(x)
        attend: Any = F.scaled_dot_product_attention
        return attend(none, none, x, dropout_p=0.3)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_every_step_draws_anew_and_a_seed_brings_a_draw_back(mode: str | None) -> None:
    length = 128
    x = torch.eye(length, device="cuda", dtype=torch.bfloat16).expand(2, 3, length, length).contiguous()
    x.requires_grad_()
    compiled = torch.compile(Attends(), backend="te_fp8", mode=mode, options=None if mode else ALONE)
    if mode:
        te_compile.configure(**ALONE)
    try:
        draws = []
        for _ in range(6):  # operators are recorded at a second call and replayed from the third on
            out = compiled(x)
            draws.append((out > 0).clone())
            (gradient,) = torch.autograd.grad(out.sum(), x)
            whole = 65536 / kept_share(0.3) / length
            torch.testing.assert_close(
                gradient.float(), (draws[-1].sum(2) * whole)[..., None].expand_as(x), atol=0, rtol=1e-2
            )
        for one, other in itertools.pairwise(draws):
            assert 0.67 < one.double().mean() < 0.73 and 0.36 < (one != other).double().mean() < 0.48
        kept = []
        for _ in range(2):
            torch.manual_seed(5)
            kept.append((compiled(x) > 0).clone())
        assert torch.equal(*kept)
    finally:
        te_compile.configure(cost_model=True)


class Block(nn.Module):
    """Attention as GPT-2 has it, spelled out or by SDPA, between FP8 linears."""

    def __init__(self, spelled_out: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.spelled_out = nn.Linear(256, 768), nn.Linear(256, 256), spelled_out

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 4, 192).transpose(1, 2).chunk(3, dim=-1)
        p = 0.1 if self.training else 0.0
        attend: Any = F.scaled_dot_product_attention
        if self.spelled_out:
            y = F.dropout(torch.softmax(q @ k.mT * 0.125, dim=-1), p, self.training) @ v
        else:
            y = attend(q, k, v, dropout_p=p, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("spelled_out", [False, True], ids=["sdpa", "spelled out"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_block_trains_with_it(spelled_out: bool, checkpointed: bool) -> None:
    """On average over draws, results and gradients are those without dropout: unbiased, and from one draw each."""
    block = Block(spelled_out).cuda().bfloat16()
    x = torch.randn(2, 256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(2, 256, 256, device="cuda", dtype=torch.bfloat16)

    def run(x: Tensor) -> Tensor:
        if checkpointed:
            result: Tensor = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return result
        return block(x)

    compiled = torch.compile(run, backend="te_fp8", options=ALONE)
    outs, gradients = [], []
    for _ in range(40):
        out = compiled(x)
        outs.append(out.detach().float())
        (gradient,) = torch.autograd.grad(out, x, dy)
        gradients.append(gradient.float())
    block.eval()
    want = block(x)
    (wanted,) = torch.autograd.grad(want, x, dy)
    assert relative_error(torch.stack(outs).mean(0), want) < 0.1
    assert relative_error(torch.stack(gradients).mean(0), wanted) < 0.15
    assert relative_error(outs[0], outs[1]) > 0.05


def test_the_report_says_which_kernels_run() -> None:
    block = Block(False).cuda().bfloat16()
    report = te_compile.explain(block, torch.randn(2, 256, 256, device="cuda", dtype=torch.bfloat16), options=ALONE)
    (row,) = report.attentions
    assert row.kernel == "te" and "as bits" in str(report)
