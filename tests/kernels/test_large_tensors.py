"""Kernels on tensors of more than 2^31 elements, and on rows that lie farther apart than a tile's offsets in 32 bits
can say: what is written in the last corner is right, and no address is outside of a tensor."""

from __future__ import annotations

import pytest
import torch
import triton
from torch import Tensor

from te_compile.kernels import (
    cross_entropy,
    dropout_attention,
    dropout_attention_backward,
    dropout_bits,
    dropout_masks,
    fp8_attention,
    grouped_gemm,
    norm,
    norm_backward,
    pointwise,
    quantize,
    weights,
)
from te_compile.ops.cross_entropy import cross_entropy_backward_reference, cross_entropy_forward_reference
from te_compile.ops.dropout_attention import dropout_attention_backward_reference, dropout_attention_reference
from te_compile.ops.dropout_bits import words_of
from te_compile.ops.fp8_attention import fp8_attention_reference
from te_compile.ops.gemm import gemm_reference
from te_compile.ops.norm_backward import norm_backward_reference
from te_compile.ops.norm_quantize import Norm, Wanted, norm_quantize_reference
from te_compile.ops.pointwise import Spec
from te_compile.ops.quantize import quantize_reference
from te_compile.recipe import ScaleRule
from tests.kernels.sparse import run_corners, sparse

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="of memory that is not there")
BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn  # the interpreter multiplies no bfloat16
RULE = ScaleRule()
FAR = 1 << 26  # elements from one row to the next: the last hidden state of 8192 positions of 8192 features
ROWS, COLUMNS = 80, 64
SCALE = torch.tensor(3.0)


@pytest.fixture(autouse=True)
def corners(device: str, poisoned_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run_corners(monkeypatch)


def filled(x: Tensor) -> Tensor:
    """``x`` with random numbers."""
    return x.copy_(torch.randn(x.shape))


def apart(*size: int, row: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    """Random numbers of this size, where dimension ``row`` has a stride of FAR and the others lie together."""
    strides = list(torch.empty([1 if at == row else length for at, length in enumerate(size)]).stride())
    strides[row] = FAR
    return filled(sparse(size, dtype, strides))


def same(got: Tensor, wanted: Tensor) -> bool:
    return torch.equal(got.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))


# --- rows that lie far apart ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_quantize_of_rows_far_apart(measure: bool, turned: bool) -> None:
    x = apart(ROWS, COLUMNS)
    x = x.t() if turned else x
    got = quantize.quantize(x, None if measure else SCALE, E4M3, True, True, RULE, measure)
    wanted = quantize_reference(x.contiguous(), None if measure else SCALE, E4M3, True, True, RULE)
    assert all(map(same, got, wanted))


@pytest.mark.parametrize("columnwise", [False, True])
def test_norm_of_rows_far_apart(columnwise: bool) -> None:
    x, weight, bias = apart(ROWS, COLUMNS), torch.ones(COLUMNS, dtype=BF16), torch.zeros(COLUMNS, dtype=BF16)
    task = Norm(weight, bias, 1e-5, "layer"), Wanted(SCALE, E4M3, True, columnwise, True, RULE)
    got = norm.norm_quantize(x, *task, False)
    wanted = norm_quantize_reference(x.contiguous(), *task)
    for one, other in zip(got[1:3], wanted[1:3], strict=True):  # what is next to the mean may be a zero of either sign
        assert torch.equal(one.float(), other.float())


def test_norm_backward_of_rows_far_apart() -> None:
    dy, x, residual = (apart(ROWS, COLUMNS) for _ in range(3))
    mean, rstd, weight = torch.zeros(ROWS, 1), torch.ones(ROWS, 1), torch.ones(COLUMNS, dtype=BF16)
    rest = (weight, mean, rstd, residual, "layer", True, True, BF16)
    got = norm_backward.norm_backward(dy, x, *rest)
    wanted = norm_backward_reference(dy.contiguous(), x.contiguous(), *rest)
    assert torch.allclose(got[0].float(), wanted[0].float(), atol=0.05)


@pytest.mark.parametrize("turned", [False, True])
def test_producer_of_rows_far_apart(turned: bool) -> None:
    spec = Spec.parse("x0: bfloat16[M, K]; t0 = relu(x0); quantize t0")
    x = apart(ROWS, COLUMNS)
    x = x.t() if turned else x
    got = pointwise.fused_quantize([x], SCALE, spec, E4M3, True, True, RULE, False)
    assert all(map(same, got, quantize_reference(x.relu(), SCALE, E4M3, True, True, RULE)))


@pytest.mark.parametrize("text", ["of 64", "of a[0:64]"])
def test_producer_of_heads_whose_rows_are_far_apart(text: str) -> None:
    spec = Spec.parse(f"x0: bfloat16[M, K {text}]; t0 = relu(x0); quantize t0")
    x = apart(1, 64, 1, 64, row=1)
    got = pointwise.fused_quantize([x], SCALE, spec, E4M3, True, True, RULE, False)
    assert all(map(same, got, quantize_reference(x.reshape(64, 64).relu(), SCALE, E4M3, True, True, RULE)))


def test_attention_with_dropout_of_rows_far_apart() -> None:
    q, k, v, grad = (apart(1, ROWS, 1, 32, row=1, dtype=FP16) for _ in range(4))
    near = [x.contiguous() for x in (q, k, v)]
    bits = torch.randint(-(2**31), 2**31, (1, words_of(ROWS), ROWS), dtype=torch.int32)
    rest = (bits, 0.5, False, 0.2)
    out, sums = dropout_attention.forward(q, k, v, *rest)
    assert torch.allclose(out.float(), dropout_attention_reference(*near, *rest)[0].float(), atol=0.05)
    rest = (bits, out, sums, 0.5, False, 0.2)
    got = dropout_attention_backward.backward(grad, q, k, v, *rest)
    wanted = dropout_attention_backward_reference(grad.contiguous(), *near, *rest)
    assert all(torch.allclose(a.float(), b.float(), atol=0.1) for a, b in zip(got, wanted, strict=True))


def test_fp8_attention_of_rows_far_apart() -> None:
    q, k = (apart(1, 400, 1, 32, row=1, dtype=E4M3) for _ in range(2))
    operands = (torch.randn(32, 400).to(E4M3), *[torch.tensor(0.5)] * 3, False, 2.0, BF16)
    got, _ = fp8_attention.fp8_attention(q, k, *operands)
    wanted, _ = fp8_attention_reference(q.contiguous(), k.contiguous(), *operands)
    assert torch.allclose(got.float(), wanted.float(), atol=0.1)


# --- tensors of more than 2^31 elements -------------------------------------------------------------------------------


def test_quantize_of_many_elements() -> None:
    x = sparse((1 << 20, 1 << 12), BF16)
    corner = filled(x[-64:, -128:])
    q, qt, _, _ = quantize.quantize(x, SCALE, E4M3, True, True, RULE, False)
    wanted_q, wanted_qt, _, _ = quantize_reference(corner, SCALE, E4M3, True, True, RULE)
    assert same(q[-64:, -128:], wanted_q) and same(qt[-128:, -64:], wanted_qt)


def test_producer_of_many_elements() -> None:
    spec = Spec.parse("x0: bfloat16[M, K]; t0 = relu(x0); quantize t0; emit t0: bfloat16")
    x = sparse((1 << 20, 1 << 12), BF16)
    corner = filled(x[-64:, -64:])
    q, qt, _, _, emitted = pointwise.fused_quantize([x], SCALE, spec, E4M3, True, True, RULE, False)
    wanted_q, wanted_qt, _, _ = quantize_reference(corner.relu(), SCALE, E4M3, True, True, RULE)
    assert (
        same(q[-64:, -64:], wanted_q) and same(qt[-64:, -64:], wanted_qt) and same(emitted[-64:, -64:], corner.relu())
    )


@pytest.mark.parametrize("columnwise", [False, True])
def test_norm_of_many_elements(columnwise: bool) -> None:
    x, weight = sparse((1 << 20, 1 << 12), BF16), torch.ones(1 << 12, dtype=BF16)
    last = filled(x[-1:])  # few of the programs run that find statistics
    task = Norm(weight, None, 1e-5, "rms"), Wanted(SCALE, E4M3, True, columnwise, True, RULE)
    y, q, qt, _, _, _, rstd = norm.norm_quantize(x, *task, False)
    wanted = norm_quantize_reference(last, *task)
    assert torch.allclose(rstd[-1], wanted[6])
    assert same(y[-1, -128:], wanted[0][0, -128:]) and same(q[-1, -128:], wanted[1][0, -128:])
    assert not columnwise or same(qt[-128:, -1], wanted[2][-128:, 0])


def test_norm_backward_of_many_elements() -> None:
    shape = (1 << 21, 1 << 11)
    dy, x = sparse(shape, BF16), sparse(shape, BF16)
    filled(dy[-1:]), filled(x[-1:])
    mean, rstd = torch.zeros(shape[0], 1), torch.ones(shape[0], 1)
    few = norm_backward.Walk(1, 1 << 11, 1, 1 << 21, 1)  # a program a row
    rest = (None, None, "layer", True, False, None)
    dx, _, _ = norm_backward.norm_backward(dy, x, None, mean, rstd, *rest[1:], walk=few)
    wanted, _, _ = norm_backward_reference(dy[-1:], x[-1:], None, mean[-1:], rstd[-1:], *rest[1:])
    assert torch.allclose(dx[-1:].float(), wanted.float(), atol=0.05)


def test_loss_of_many_logits() -> None:
    logits, addend = sparse((1 << 15, (1 << 17) + 8), BF16), sparse((1 << 15, (1 << 17) + 8), BF16)
    targets = torch.full((1 << 15,), 77)
    last = filled(logits[-1:])
    losses, sums = cross_entropy.cross_entropy_forward(logits, targets, -100)
    wanted, wanted_sums = cross_entropy_forward_reference(last, targets[-1:], -100)
    assert torch.allclose(losses[-1:], wanted) and torch.allclose(sums[-1:], wanted_sums)
    gradients = torch.ones(())[None].expand(1 << 15)
    got = cross_entropy.cross_entropy_backward(logits, targets, sums, gradients, -100, addend)
    wanted = cross_entropy_backward_reference(last, targets[-1:], wanted_sums, gradients[-1:], -100, None)
    assert torch.allclose(got[-1:].float(), wanted.float(), atol=1e-3)


def test_loss_with_sums_of_many_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "MOST_PARTIALS", 1 << 15)  # a program for each row: few of them run
    monkeypatch.setattr(cross_entropy, "MOST_PARTIAL_BYTES", 1 << 40)
    shape = (1 << 15, (1 << 17) + 8)
    logits, addend = sparse(shape, BF16), sparse(shape, BF16)
    targets, numbers = torch.full((1 << 15,), 77), torch.ones(1 << 15)
    last, more = filled(logits[-1:]), filled(addend[-1:])
    rest = (numbers, numbers, -100, addend, torch.float32)
    got, sums = cross_entropy.cross_entropy_backward_with_sums(
        logits, targets, *rest, cross_entropy.Descent(1, 1 << 18, 1, 1)
    )
    wanted = cross_entropy_backward_reference(last, targets[-1:], numbers[-1:], numbers[-1:], -100, more)
    assert torch.allclose(got[-1:].float(), wanted.float(), atol=1e-3, rtol=1e-2)
    row = (got[0].float() + got[-1].float())[-8:]  # where the programs that ran lie
    assert torch.allclose(sums[-8:], row)


def test_weights_of_many_elements() -> None:
    weight, first = sparse((1 << 14, 1 << 18), BF16), sparse((64, 64), BF16)
    corner = filled(weight[-128:, -128:])
    many = weight.numel()
    lengths = (many + 4096, many + 4096)
    q, qt, _, _ = weights.quantize_weights(
        [first, weight], torch.full((2,), 3.0), E4M3, [0, 4096], [0, 4096], *lengths, RULE, False
    )
    wanted_q, wanted_qt, _, _ = quantize_reference(corner, SCALE, E4M3, True, True, RULE)
    assert same(q[4096:].view(1 << 14, 1 << 18)[-128:, -128:], wanted_q)
    assert same(qt[4096:].view(1 << 18, 1 << 14)[-128:, -128:], wanted_qt)


def test_products_of_many_experts() -> None:
    experts, columns, length = 1 << 11, 1 << 13, 1 << 8
    b = sparse((experts, columns, length), E4M3)
    first = filled(b[-1, :128])  # whose rows the first program has, for no other expert has any
    a = torch.randn(1 << 10, length).to(E4M3)
    ends = torch.zeros(experts, dtype=torch.int32)
    ends[-1] = len(a)
    one = torch.ones(())
    y = grouped_gemm.grouped_gemm(a, b, one, one, ends, torch.float32, "split")
    wanted = gemm_reference(a[:64], first, one, one, None, torch.float32, "split")
    assert torch.allclose(y[:64, :128], wanted, atol=1e-3)


def test_weight_gradients_of_many_experts() -> None:
    experts, rows, columns, padded = 16, 1 << 14, 1 << 14, 256
    a, b = sparse((rows, padded), E4M3), sparse((columns, padded), E4M3)
    tail_a, tail_b = (x[-128:].copy_(torch.randn(128, padded).to(E4M3)) for x in (a, b))
    ends = torch.zeros(experts, dtype=torch.int32)
    ends[-1] = padded
    one = torch.ones(())
    y = grouped_gemm.grouped_wgrad(a, b, one, one, ends, torch.float32, "split")
    wanted = gemm_reference(tail_a, tail_b, one, one, None, torch.float32, "split")
    assert torch.allclose(y[-1, -128:, -128:], wanted, atol=1e-3)


def test_bits_of_many_weights() -> None:
    heads, length = 1 << 15, 1 << 11
    bits = dropout_bits.draw(torch.ones(1, dtype=torch.int64), heads, length, length, 0.5, True)
    assert bits.numel() == 1 << 32 and bits[-1, -1, -1] != 0


@pytest.mark.parametrize("rest", [0, 7])
def test_the_mask_of_many_elements(rest: int) -> None:
    key, count = torch.ones(1, dtype=torch.int64), (1 << 32) + (1 << 14) + rest
    mask = dropout_masks.draw_mask(key, (count,), 0.5)
    assert 1 < mask[-20:].sum() < 20 and mask[1 << 31 : (1 << 31) + 64].sum() == 0, "programs between do not run"


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_dropout_of_many_weights(causal: bool) -> None:
    batch, heads, length, width = 1 << 10, 1 << 5, 1 << 11, 64
    q, k, v, grad = (sparse((batch, length, heads, width), FP16) for _ in range(4))
    last = [filled(x[-1:, :, -1:]) for x in (q, k, v, grad)]
    bits = sparse((batch * heads, words_of(length), length), torch.int32)
    bits[-1] = torch.randint(-(2**31), 2**31, bits.shape[1:], dtype=torch.int32)
    rest = (0.5, causal, 0.2)
    out, sums = dropout_attention.forward(q, k, v, bits, *rest)
    wanted, wanted_sums = dropout_attention_reference(*last[:3], bits[-1:], *rest)
    rows = slice(0, 128) if causal else slice(-128, None)
    assert torch.allclose(out[-1, rows, -1], wanted[0, rows, 0], atol=0.02, rtol=0.01)
    out[-1, :, -1], sums[-1, -1] = wanted[0, :, 0], wanted_sums[0, 0]
    dq, dk, dv = dropout_attention_backward.backward(grad, q, k, v, bits, out, sums, *rest)
    wanted = dropout_attention_backward_reference(last[3], *last[:3], bits[-1:], wanted, wanted_sums, *rest)
    # Of dk, and of the first queries' dq, only the addresses are looked at: few shifts of the last head are there.
    assert torch.allclose(dv[-1, -64:, -1], wanted[2][0, -64:, 0], atol=0.02, rtol=0.01)
    assert causal or torch.allclose(dq[-1, -64:, -1], wanted[0][0, -64:, 0], atol=0.02, rtol=0.01)
    assert dk.shape == k.shape


def test_fp8_attention_of_many_elements() -> None:
    batch, heads, length, width = 1 << 10, 1 << 5, 1 << 10, 128
    q, k = (sparse((batch, length, heads, width), E4M3) for _ in range(2))
    vt = sparse((heads * width, batch * length), E4M3)
    last_q, last_k = (x[-1:, :, -1:].copy_(torch.randn(1, length, 1, width).to(E4M3)) for x in (q, k))
    last_v = vt[-width:, -length:].copy_(torch.randn(width, length).to(E4M3))
    rest = (*[torch.tensor(0.5)] * 3, False, 2.0, BF16)
    got, _ = fp8_attention.fp8_attention(q, k, vt, *rest)
    wanted, _ = fp8_attention_reference(last_q, last_k, last_v, *rest)
    assert torch.allclose(got[-1, :128, -1].float(), wanted[0, :128, 0].float(), atol=0.1)
