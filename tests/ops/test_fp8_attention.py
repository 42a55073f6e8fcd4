"""Attention in FP8 and its gradients: by the letter of the definition, and close to attention in high precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import sqnr
from te_compile.ops.attention import ATTENTION
from te_compile.ops.attention_backward import ATTENTION_BACKWARD
from te_compile.ops.fp8_attention import FP8_ATTENTION, fp8_attention_reference
from te_compile.ops.quantize import quantize_reference
from te_compile.ops.registry import Target, choose
from te_compile.recipe import ScaleRule
from tests.compiling import cosine
from tests.fp8_attention import E4M3, Sizes, assert_is, drawn, expected

RULE = ScaleRule()
HOPPER = Target("cuda", (9, 0))
SIZES = {
    "square": Sizes(2, 90, 90, 2, 2, 64),
    "shared heads": Sizes(2, 33, 33, 6, 2, 32),
    "fewer keys": Sizes(1, 80, 41, 2, 1, 64),
    "fewer queries": Sizes(1, 41, 80, 2, 1, 64),
}
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
EVERY_SIZE = pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))


def rounded_to_e4m3(x: float) -> float:
    """To nearest even, spelled out: 3 bits behind the leading one, and steps of 2^-9 below 2^-6."""
    step = 2.0 ** (max(math.floor(math.log2(x)), -6) - 3) if x > 0 else 1.0
    return round(x / step) * step  # Python rounds halves to even


def one_row(q: list[float], keys: list[list[float]], values: list[list[float]], factor: float) -> list[float]:
    """A query's result before v_scale_inv, number by number."""
    scores = [sum(a * b for a, b in zip(q, key, strict=True)) * factor for key in keys]
    m = math.ceil(max(scores))
    p = [2.0 ** (s - m + 8) for s in scores]
    codes = [rounded_to_e4m3(each) for each in p]
    return [sum(c * v for c, v in zip(codes, column, strict=True)) / sum(p) for column in zip(*values, strict=True)]


@CAUSAL
def test_the_reference_is_the_definition_number_by_number(causal: bool) -> None:
    sizes = Sizes(1, 6, 9, 2, 1, 16)
    operands, scale = drawn(sizes), 0.2
    out, _ = FP8_ATTENTION(*operands.all(), causal, scale, torch.float32, "")
    q_scale_inv, k_scale_inv, v_scale_inv = (float(each) for each in operands.scales)
    keys, values = operands.k[0, :, 0].tolist(), operands.vt[:, :9].t().tolist()
    for head in range(2):
        for query in range(6):
            seen = query + 1 if causal else 9
            factor = q_scale_inv * k_scale_inv * scale * math.log2(math.e)
            row = one_row(operands.q[0, query, head].tolist(), keys[:seen], values[:seen], factor)
            wanted = torch.tensor(row) * v_scale_inv
            torch.testing.assert_close(out[0, query, head], wanted, rtol=1e-3, atol=1e-3)


@CAUSAL
@EVERY_SIZE
def test_the_reference_is_within_the_limits_of_the_definition(sizes: Sizes, causal: bool) -> None:
    operands, scale = drawn(sizes), sizes.width**-0.5
    got = FP8_ATTENTION(*operands.all(), causal, scale, torch.float32, "")
    assert_is(got, expected(operands, sizes, causal, scale, torch.float32), 2e-2)


def test_codes_are_the_same_whatever_the_blocks_in_which_keys_come() -> None:
    """What the whole-numbered maximum is for: rescaling moves no normal code, and the others by 2^-9 at most."""
    scores = torch.randn(50, 96) * 8
    final = scores.amax(-1, keepdim=True).ceil()
    p = torch.exp2(scores - final + 8)
    running = torch.full_like(final, -math.inf)
    in_blocks = []
    for block in scores.split([1, 31, 16, 40, 8], dim=-1):
        running = torch.maximum(running, block.amax(-1, keepdim=True).ceil())
        in_blocks.append(torch.exp2(block - running + 8).to(E4M3).float() * torch.exp2(running - final))
    blockwise, whole = torch.cat(in_blocks, -1), p.to(E4M3).float()
    assert (running == final).all() and not torch.equal(blockwise, whole)
    assert torch.equal(blockwise[p >= 2.0**-6], whole[p >= 2.0**-6])
    assert float((blockwise - whole).abs().max()) <= 2.0**-9


def heads(sizes: Sizes, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k and v [B, H, S, D] as models have them, requiring gradients."""
    b, sq, sk, h, hk, d = vars(sizes).values()
    shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, d))
    return [torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def in_fp8(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return ATTENTION(q, k, v, causal, scale, q.dtype, RULE.text(), "attention")


def in_high_precision(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> Tensor:
    q, k, v = (x.float() for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


def gradients_of(out: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(7)
    return torch.autograd.grad((out * torch.randn(out.shape)).sum(), inputs)


@CAUSAL
@EVERY_SIZE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_result_and_gradients_are_close_to_high_precision(sizes: Sizes, causal: bool, dtype: torch.dtype) -> None:
    inputs = heads(sizes, dtype)
    got, wanted = in_fp8(*inputs, causal), in_high_precision(*inputs, causal)
    assert got.dtype == dtype and got.shape == wanted.shape
    assert got.transpose(1, 2).is_contiguous(), "as the output projection reads it"
    assert sqnr(wanted, got) >= 20
    for ours, theirs, x in zip(gradients_of(got, inputs), gradients_of(wanted, inputs), inputs, strict=True):
        assert ours.dtype == dtype and ours.shape == x.shape
        assert sqnr(theirs, ours) >= 15


def dequantized(x: Tensor) -> Tensor:
    """What the codes of ``x`` [B, H, S, D] stand for."""
    q, _, _, scale_inv = quantize_reference(x.detach().reshape(-1, x.shape[-1]), None, E4M3, True, False, RULE)
    return (q.float() * scale_inv).view(x.shape).requires_grad_()


@CAUSAL
@EVERY_SIZE
def test_gradients_are_those_of_attention_at_what_the_codes_stand_for(sizes: Sizes, causal: bool) -> None:
    """Of all rounding only that of the weights is left, which the sum Σ dout · out sees."""
    inputs = heads(sizes)
    codes = [dequantized(x) for x in inputs]
    wanted = gradients_of(in_high_precision(*codes, causal), codes)
    for ours, theirs in zip(gradients_of(in_fp8(*inputs, causal), inputs), wanted, strict=True):
        assert cosine(ours, theirs) > 0.998


@CAUSAL
@EVERY_SIZE
def test_the_backward_reference_is_the_gradient_of_attention(sizes: Sizes, causal: bool) -> None:
    inputs, scale = heads(sizes), 0.3
    out = in_high_precision(*inputs, causal, scale)
    grad = torch.randn_like(out)
    scores = inputs[0] @ inputs[1].repeat_interleave(sizes.heads // sizes.shared, 1).mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
    rows = [x.detach().transpose(1, 2) for x in (grad, *inputs, out)]
    got = ATTENTION_BACKWARD(*rows, scores.logsumexp(-1).detach(), causal, scale, "")
    for ours, theirs in zip(got, torch.autograd.grad(out, inputs, grad), strict=True):
        torch.testing.assert_close(ours.transpose(1, 2), theirs, rtol=1e-4, atol=1e-4)


def test_backward_saves_codes_and_nothing_of_q_k_and_v_in_high_precision() -> None:
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    inputs = heads(SIZES["square"], torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = in_fp8(*inputs, True)
    large = [x for x in saved if x.numel() == inputs[0].numel()]
    assert sorted(str(x.dtype) for x in large) == [str(out.dtype), *[str(E4M3)] * 3]


def test_only_what_requires_a_gradient_gets_one() -> None:
    q, k, v = heads(SIZES["square"])
    out = in_fp8(q.detach(), k, v.detach(), True)
    (grad,) = torch.autograd.grad(out.sum(), [k])
    assert grad.shape == k.shape


def test_operands_of_several_dtypes_get_gradients_of_their_own() -> None:
    q, k, v = heads(SIZES["square"])
    v = v.detach().bfloat16().requires_grad_()
    out = ATTENTION(q, k, v, False, 0.125, torch.bfloat16, RULE.text(), "")
    assert out.dtype == torch.bfloat16
    assert [x.dtype for x in gradients_of(out, [q, k, v])] == [torch.float32, torch.float32, torch.bfloat16]


@CAUSAL
def test_without_keys_the_result_is_zero_and_without_queries_empty(causal: bool) -> None:
    for queries, keys in ((3, 0), (0, 4), (0, 0)):
        q, k, v = heads(Sizes(1, queries, keys, 2, 1, 64))
        out = in_fp8(q, k, v, causal)
        assert out.shape == (1, 2, queries, 64) and not out.any()
        assert all(not x.any() for x in gradients_of(out, [q, k, v]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes_and_dtypes_are_known_without_running(dtype: torch.dtype) -> None:
    operands = drawn(SIZES["shared heads"])
    torch.library.opcheck(FP8_ATTENTION, (*operands.all(), True, 0.2, dtype, "name"), test_utils="test_faketensor")
    b, sq, sk, h, hk, d = vars(SIZES["fewer keys"]).values()
    shapes = ((b, sq, h, d), (b, sq, h, d), (b, sk, hk, d), (b, sk, hk, d), (b, sq, h, d))
    rows = [torch.randn(shape, dtype=dtype) for shape in shapes]
    arguments = (*rows, torch.randn(b, h, sq), False, 0.2, "name")
    torch.library.opcheck(ATTENTION_BACKWARD, arguments, test_utils=("test_schema", "test_faketensor"))


def arguments_of(sizes: Sizes, **changes: Any) -> dict[str, Any]:
    """What a check of an implementation of ``te::fp8_attention`` sees."""
    q, k, vt = (x for x in drawn(sizes).all()[:3])
    return {"q": q, "k": k, "vt": vt, "causal": True, "out_dtype": torch.bfloat16, **changes}


def test_a_kernel_runs_on_hopper_and_says_what_it_does_not() -> None:
    square, e5m2 = SIZES["square"], torch.float8_e5m2
    assert choose("fp8_attention", HOPPER, arguments_of(square)) == ("triton", [])
    for changes, reason in (
        ({"q": drawn(square).q.to(e5m2)}, "q is torch.float8_e5m2"),
        ({"out_dtype": torch.float64}, "torch.float64 is none of"),
        ({"vt": drawn(square).vt.t()}, "vt does not run along its contraction"),
    ):
        name, (why,) = choose("fp8_attention", HOPPER, arguments_of(square, **changes))
        assert name == "reference" and reason in why
    for target in (Target("cpu"), Target("cuda", (8, 0))):
        assert choose("fp8_attention", target, arguments_of(square))[0] == "reference"
    assert "a head of 144 features" in choose("fp8_attention", HOPPER, arguments_of(Sizes(1, 2, 2, 1, 1, 144)))[1][0]


def test_the_flash_kernels_gradients_are_taken_where_their_causality_is_ours() -> None:
    q, k = torch.empty(1, 5, 2, 64), torch.empty(1, 7, 2, 64)
    assert choose("attention_backward", HOPPER, {"q": q, "k": q, "causal": True}) == ("flash", [])
    assert choose("attention_backward", HOPPER, {"q": q, "k": k, "causal": False}) == ("flash", [])
    name, (why,) = choose("attention_backward", HOPPER, {"q": q, "k": k, "causal": True})
    assert name == "reference" and "from the end" in why
    assert choose("attention_backward", Target("cpu"), {"q": q, "k": q, "causal": True})[0] == "reference"


def test_an_infinite_query_spoils_its_row_and_no_other() -> None:
    q, k, v = (x.detach() for x in heads(SIZES["square"]))
    q[0, 1, 7, 3] = math.inf
    out = in_fp8(q, k, v, False)
    assert out[0, 1, 7].isnan().all() and int(out.isnan().any(-1).sum()) == 1


def test_the_reference_takes_values_behind_which_anything_may_lie() -> None:
    operands = drawn(Sizes(1, 5, 5, 1, 1, 64))
    assert operands.vt[:, 5:].float().isnan().all()
    out, logsumexp = fp8_attention_reference(*operands.all(), False, 0.1, torch.float32)
    assert out.isfinite().all() and logsumexp.isfinite().all()
