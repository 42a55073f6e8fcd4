"""``te::fused_quantize_pair``: both producers' results in one list; spec, reference, fake, choice of implementation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.fused_quantize import FUSED_QUANTIZE
from te_compile.ops.fused_quantize_pair import FUSED_QUANTIZE_PAIR, RESULTS_OF_ONE
from te_compile.ops.pointwise import Spec, SpecError
from te_compile.ops.registry import Target
from te_compile.recipe import ScaleRule

RULE = ScaleRule().text()
INPUTS = "x0: bfloat16[M, K]; x1: bfloat16[M, K]; x2: float32[K]; "
PAIR = INPUTS + (
    "t0 = sigmoid(x0); t1 = mul(t0, x1); t2 = bfloat16(t1); t3 = mul(x0, x2); t4 = sub(t3, t0); t5 = bfloat16(t4); "
    "quantize t2; quantize t5"
)
FIRST = INPUTS + "t0 = sigmoid(x0); t1 = mul(t0, x1); t2 = bfloat16(t1); quantize t2"
SECOND = INPUTS + "t0 = sigmoid(x0); t1 = mul(x0, x2); t2 = sub(t1, t0); t3 = bfloat16(t2); quantize t3"


def inputs(rows: int = 21, columns: int = 40) -> list[Tensor]:
    return [*torch.randn(rows, 2 * columns).bfloat16().chunk(2, dim=1), torch.randn(columns)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = (x.contiguous().flatten() for x in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_a_spec_of_two_values_is_text_and_back_and_each_alone() -> None:
    spec = Spec.parse(PAIR)
    assert spec.text() == PAIR and spec.roots == spec.leaving == ("t2", "t5")
    assert (spec.alone(0).text(), spec.alone(1).text()) == (FIRST, SECOND)


@pytest.mark.parametrize(
    "wrong",
    [PAIR + "; quantize t1", FIRST + "; quantize t2", PAIR + "; emit t2: bfloat16"],
    ids=["three", "twice the same", "a value"],
)
def test_what_no_kernel_writes_is_no_spec(wrong: str) -> None:
    with pytest.raises(SpecError):
        Spec.parse(wrong)


@pytest.mark.parametrize("wrong", [FIRST, PAIR + "; sum t2: float32"], ids=["one value", "a sum"])
def test_what_it_does_not_return_is_refused(wrong: str) -> None:
    with pytest.raises(SpecError, match="two values of which codes alone"):
        FUSED_QUANTIZE_PAIR(inputs(), None, None, wrong, torch.float8_e5m2, True, True, True, True, RULE)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scales", [(None, None), (5.0, 0.25), (0.0, 3.0)], ids=["current", "given", "one unknown"])
@pytest.mark.parametrize("layouts", [(True, True, True, True), (True, False, False, True)], ids=str)
def test_it_is_both_producers(
    dtype: torch.dtype, scales: tuple[float | None, float | None], layouts: tuple[bool, bool, bool, bool]
) -> None:
    given = inputs()
    one, two = (None if scale is None else torch.tensor(scale) for scale in scales)
    expected = [
        *FUSED_QUANTIZE(given, one, FIRST, dtype, *layouts[:2], RULE),
        *FUSED_QUANTIZE(given, two, SECOND, dtype, *layouts[2:], RULE),
    ]
    got = FUSED_QUANTIZE_PAIR(given, one, two, PAIR, dtype, *layouts, RULE)
    assert len(got) == len(expected) == 2 * RESULTS_OF_ONE
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("rows", [0, 1, 21])
def test_the_fake_promises_what_the_reference_delivers(rows: int) -> None:
    given = inputs(rows)
    arguments = PAIR, torch.float8_e5m2, True, True, False, True, RULE
    real = FUSED_QUANTIZE_PAIR(given, None, None, *arguments)
    meta = FUSED_QUANTIZE_PAIR([x.to("meta") for x in given], None, None, *arguments)
    assert [(x.shape, x.dtype, x.stride()) for x in real] == [(x.shape, x.dtype, x.stride()) for x in meta]


def test_the_operator_keeps_its_contract_with_pytorch() -> None:
    scales = torch.tensor(3.0), torch.tensor(0.5)
    arguments = (inputs(), *scales, PAIR, torch.float8_e4m3fn, True, True, True, True, RULE)
    torch.library.opcheck(FUSED_QUANTIZE_PAIR, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_gpu_gets_the_generated_kernel_and_a_cpu_the_reference() -> None:
    arguments = {"inputs": inputs(), "spec": PAIR}
    chosen, _ = registry.choose("fused_quantize_pair", Target("cpu"), arguments)
    assert chosen == registry.REFERENCE
    pytest.importorskip("triton")
    chosen, _ = registry.choose("fused_quantize_pair", Target("cuda", (9, 0)), arguments)
    assert chosen == "triton"
