"""``te::fused_quantize``: reference, fake, choice of implementation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.fused_quantize import FIRST_EMITTED, FUSED_QUANTIZE
from te_compile.ops.pointwise import Spec, evaluate
from te_compile.ops.quantize import QUANTIZE, padded
from te_compile.ops.registry import Target
from te_compile.recipe import ScaleRule

RULE = ScaleRule().text()
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
GATE = (
    "x0: bfloat16[M, K]; x1: bfloat16[M, K]; t0 = sigmoid(x0); t1 = mul(x0, t0); t2 = mul(t1, x1); t3 = bfloat16(t2); "
    "quantize t3; emit t3: bfloat16; sum t3: float32; sum t3: bfloat16"
)


def gate_and_up(rows: int = 21, columns: int = 40) -> list[Tensor]:
    packed = torch.randn(rows, 2 * columns).bfloat16()
    return list(packed.chunk(2, dim=1))


def same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = (x.contiguous().flatten() for x in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("scale", [None, torch.tensor(5.0), torch.tensor(0.0)], ids=["current", "given", "unknown"])
@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, True), (True, False), (False, True), (False, False)])
def test_it_is_the_quantize_of_what_the_spec_says(
    dtype: torch.dtype, scale: Tensor | None, rowwise: bool, columnwise: bool
) -> None:
    inputs = gate_and_up()
    z, emitted, sums = evaluate(Spec.parse(GATE), inputs)
    expected = [*QUANTIZE(z.bfloat16(), scale, dtype, rowwise, columnwise, RULE), *emitted, *sums]
    got = FUSED_QUANTIZE(inputs, scale, GATE, dtype, rowwise, columnwise, RULE)
    assert len(got) == len(expected) == FIRST_EMITTED + 3
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("rows", [1, 16, 21])
def test_the_fake_promises_what_the_reference_delivers(rows: int) -> None:
    inputs = gate_and_up(rows)
    real = FUSED_QUANTIZE(inputs, None, GATE, torch.float8_e4m3fn, True, True, RULE)
    meta = FUSED_QUANTIZE([x.to("meta") for x in inputs], None, GATE, torch.float8_e4m3fn, True, True, RULE)
    assert [(x.shape, x.dtype, x.stride()) for x in real] == [(x.shape, x.dtype, x.stride()) for x in meta]
    assert real[1].shape == (40, padded(rows))


def test_the_operator_keeps_its_contract_with_pytorch() -> None:
    arguments = (gate_and_up(), torch.tensor(3.0), GATE, torch.float8_e4m3fn, True, True, RULE)
    torch.library.opcheck(FUSED_QUANTIZE, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_one_value_that_is_not_finite_makes_the_amax_infinite(poison: float) -> None:
    gate, up = gate_and_up()
    up[3, 7] = poison
    _, _, amax, scale_inv, *_ = FUSED_QUANTIZE([gate, up], None, GATE, torch.float8_e4m3fn, True, True, RULE)
    assert amax == torch.inf and scale_inv == 1


def test_an_empty_batch_has_an_empty_result() -> None:
    q, qt, amax, _, emitted, total, _ = FUSED_QUANTIZE(
        gate_and_up(0), None, GATE, torch.float8_e4m3fn, True, True, RULE
    )
    assert q.shape == (0, 40) and qt.shape == (40, 0) and emitted.shape == (0, 40)
    assert amax == 0 and not total.any()


def test_the_reference_runs_on_a_cpu_and_the_reason_is_told() -> None:
    name, reasons = registry.choose("fused_quantize", Target("cpu"), {"spec": GATE})
    assert name == "reference" and any("needs a CUDA device" in reason for reason in reasons)


def test_an_old_gpu_falls_back_with_its_capability_named() -> None:
    name, reasons = registry.choose("fused_quantize", Target("cuda", (8, 0)), {"spec": GATE})
    assert name == "reference" and any("(8, 0)" in reason for reason in reasons)


def test_a_new_gpu_gets_the_generated_kernel() -> None:
    pytest.importorskip("triton")
    arguments = {"inputs": gate_and_up(), "spec": GATE}
    assert registry.choose("fused_quantize", Target("cuda", (9, 0)), arguments)[0] == "triton"


def test_inductor_compiles_it_with_its_list_of_results() -> None:
    def function(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        q, qt, amax, scale_inv, emitted, *sums = FUSED_QUANTIZE(
            [gate, up], None, GATE, torch.float8_e4m3fn, True, True, RULE
        )
        return q.float() * scale_inv, qt.float(), amax, emitted + 1, sums[0] * 2

    inputs = gate_and_up()
    for got, expected in zip(torch.compile(function, fullgraph=True)(*inputs), function(*inputs), strict=True):
        assert torch.equal(got, expected)
