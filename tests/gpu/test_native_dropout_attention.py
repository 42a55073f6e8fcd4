"""Attention with dropout by the C++ core's kernels: against its definition, and where it may not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.kernels import dropout_attention_backward as by_triton
from te_compile.kernels import native
from te_compile.kernels.native_dropout_attention import backward, forward
from te_compile.ops.dropout_bits import dropout_bits_reference
from tests.compiling import relative_error
from tests.dropout_attention import Operands, Sizes, drawn, expected
from tests.needs import HOPPER_CORE

pytestmark = [
    HOPPER_CORE,
    pytest.mark.usefixtures("fresh_dynamo"),
]
CLOSE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
ALONE: Any = {"cost_model": False}


def bits_for(sizes: Sizes, probability: float) -> Tensor:
    seed = torch.randint(-(2**62), 2**62, (1,), device="cuda")
    return dropout_bits_reference(seed, sizes.batch * sizes.heads, sizes.queries, sizes.keys, probability)


def inputs(operands: Operands, bits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return operands.q, operands.k, operands.v, bits


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("width", [48, 64, 72, 96, 128])
@pytest.mark.parametrize(("queries", "keys"), [(128, 128), (384, 384), (64, 384), (448, 128)])
def test_both_passes_compute_the_definition(
    queries: int, keys: int, width: int, causal: bool, dtype: torch.dtype
) -> None:
    if causal and queries != keys:
        pytest.skip("causal attention has as many keys as queries here")
    sizes = Sizes(2, queries, keys, 3, width)
    operands = drawn(sizes, "cuda", dtype, packed=queries == keys)
    bits, scale = bits_for(sizes, 0.3), width**-0.5
    out, logsumexp, gradients = expected(operands, bits, 0.3, causal, scale)
    got = forward(*inputs(operands, bits), 0.3, causal, scale)
    assert got[0].is_contiguous() and relative_error(got[0], out) < CLOSE[dtype]
    assert relative_error(got[1], logsumexp) < 1e-3
    found = backward(operands.grad, *inputs(operands, bits), *got, 0.3, causal, scale)
    for one, wanted in zip(found, gradients, strict=True):
        assert one.is_contiguous() and relative_error(one, wanted) < CLOSE[dtype]
        columns = (one - wanted).norm(dim=(0, 1)) / wanted.norm(dim=(0, 1))
        assert columns.max() < 3 * CLOSE[dtype]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (197, 197), (333, 333), (570, 570), (130, 70), (70, 130), (1, 700)]
)
def test_a_forward_pass_of_any_length_computes_the_definition(
    queries: int, keys: int, width: int, causal: bool
) -> None:
    if causal and queries != keys:
        pytest.skip("causal attention has as many keys as queries here")
    sizes = Sizes(2, queries, keys, 2, width)
    operands = drawn(sizes, "cuda", torch.float16, shift=8.0 if causal else 0.0)
    bits = bits_for(sizes, 0.2)
    out, logsumexp, _ = expected(operands, bits, 0.2, causal, 0.05)
    got = forward(*inputs(operands, bits), 0.2, causal, 0.05)
    assert relative_error(got[0], out) < 2e-3 and relative_error(got[1], logsumexp) < 1e-3


def test_strides_that_copies_cannot_follow_are_no_trouble() -> None:
    sizes = Sizes(2, 128, 128, 2, 128)
    operands, bits = drawn(sizes, "cuda", torch.float16), bits_for(sizes, 0.1)
    want = forward(*inputs(operands, bits), 0.1, False, 0.1)
    wanted = backward(operands.grad, *inputs(operands, bits), *want, 0.1, False, 0.1)
    odd = torch.zeros(2, 128, 2, 3 * 131, device="cuda", dtype=torch.float16)
    for place, x in enumerate((operands.q, operands.k, operands.v)):
        odd[..., 131 * place + 1 : 131 * place + 129] = x
    q, k, v = (odd[..., 131 * place + 1 : 131 * place + 129] for place in range(3))
    across = operands.grad.transpose(2, 3).contiguous().transpose(2, 3)
    got = forward(q, k, v, bits, 0.1, False, 0.1)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    found = backward(across, q, k, v, bits, *got, 0.1, False, 0.1)
    assert torch.equal(found[1], wanted[1]) and torch.equal(found[2], wanted[2])
    assert relative_error(found[0], wanted[0]) < 1e-4
    one = operands.q[:1].expand(2, -1, -1, -1)  # no two of its heads' rows lie apart
    apart = forward(one.contiguous(), operands.k, operands.v, bits, 0.1, False, 0.1)
    assert torch.equal(forward(one, operands.k, operands.v, bits, 0.1, False, 0.1)[0], apart[0])


def test_what_is_no_number_spreads_and_nothing_waits_for_it() -> None:
    sizes = Sizes(1, 256, 256, 2, 128)
    operands, bits = drawn(sizes, "cuda", torch.bfloat16), bits_for(sizes, 0.1)
    operands.q[0, 3, 0] = torch.nan
    operands.k[0, 7, 1] = -torch.inf
    got = forward(*inputs(operands, bits), 0.1, False, 0.1)
    assert got[0][0, 3, 0].isnan().all() and got[0][0, :, 1].isnan().any() and got[0][0, :3, 0].isfinite().all()
    found = backward(operands.grad, *inputs(operands, bits), *got, 0.1, False, 0.1)
    assert found[0][0, 3, 0].isnan().all() and found[0][0, :3, 0].isfinite().all()


def test_where_every_run_must_be_the_same_tritons_backward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(2, 512, 512, 3, 128)
    operands, bits = drawn(sizes, "cuda", torch.bfloat16), bits_for(sizes, 0.1)
    got = forward(*inputs(operands, bits), 0.1, True, 0.1)
    given = (operands.grad, *inputs(operands, bits), *got, 0.1, True, 0.1)
    torch.use_deterministic_algorithms(True)
    try:
        found = backward(*given)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, wanted in zip(found, by_triton.backward(*given), strict=True):
        assert torch.equal(one, wanted)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_compiled_call_runs_them_and_its_replays_too(
    causal: bool, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of a compiled step that is replayed are those that its own bits make."""
    ran: list[str] = []
    call = native.call
    monkeypatch.setattr(native, "call", lambda function, *rest: (ran.append(function.__name__), call(function, *rest)))
    q, k, v = (torch.randn(2, 3, 256, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    grad = torch.randn_like(q)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=causal)

    options = {**ALONE, **({"mode": mode} if mode else {})}
    compiled = torch.compile(attend, backend="te_fp8", options=options)
    mean, steps = torch.zeros_like(q, dtype=torch.float32), 24
    means = [mean.clone() for _ in range(4)]
    for _ in range(steps):
        out = compiled(q, k, v)
        gradients = torch.autograd.grad(out, (q, k, v), grad)
        for total, one in zip(means, (out, *gradients), strict=True):
            total += one.float() / steps
    assert {"cuda_attention", "cuda_attention_backward"} <= set(ran)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    wanted = torch.autograd.grad(want, (q, k, v), grad)
    for total, one in zip(means, (want, *wanted), strict=True):
        assert relative_error(total, one) < 0.12
