"""``te::fused_quantize_cat``: the quantised cat of both values; reference, fake, sums, choice of implementation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.fused_quantize_cat import FUSED_QUANTIZE_CAT
from te_compile.ops.pointwise import Spec, SpecError
from te_compile.ops.quantize import QUANTIZE
from te_compile.ops.registry import Target
from te_compile.recipe import ScaleRule
from tests.ops.test_fused_quantize_pair import FIRST, PAIR, inputs, same_bits

RULE = ScaleRule().text()
WITH_SUMS = PAIR + "; sum t2: float32; sum t5: bfloat16"


def values(given: list[Tensor]) -> tuple[Tensor, Tensor]:
    """What PAIR computes, written out."""
    x, y, z = (each.float() for each in given)
    return (x.sigmoid() * y).bfloat16(), (x * z - x.sigmoid()).bfloat16()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scale", [None, 5.0, 0.0], ids=["current", "given", "unknown"])
@pytest.mark.parametrize("layouts", [(True, True), (True, False), (False, True)], ids=str)
def test_it_is_the_quantised_cat(dtype: torch.dtype, scale: float | None, layouts: tuple[bool, bool]) -> None:
    given, known = inputs(), None if scale is None else torch.tensor(scale)
    expected = QUANTIZE(torch.cat(values(given), 1), known, dtype, *layouts, RULE)
    got = FUSED_QUANTIZE_CAT(given, known, PAIR, dtype, *layouts, RULE)
    assert len(got) == len(expected) == 4
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


def test_sums_are_those_of_each_half() -> None:
    given = inputs()
    *_, first, second = FUSED_QUANTIZE_CAT(given, None, WITH_SUMS, torch.float8_e5m2, True, True, RULE)
    one, other = values(given)
    torch.testing.assert_close(first, one.float().sum(0))
    torch.testing.assert_close(second, other.float().sum(0).bfloat16())


@pytest.mark.parametrize("spec", [PAIR, WITH_SUMS], ids=["codes", "sums"])
@pytest.mark.parametrize("rows", [0, 1, 21])
def test_the_fake_promises_what_the_reference_delivers(rows: int, spec: str) -> None:
    given, arguments = inputs(rows), (spec, torch.float8_e5m2, True, False, RULE)
    real = FUSED_QUANTIZE_CAT(given, None, *arguments)
    meta = FUSED_QUANTIZE_CAT([x.to("meta") for x in given], None, *arguments)
    assert [(x.shape, x.dtype, x.stride()) for x in real] == [(x.shape, x.dtype, x.stride()) for x in meta]


def test_one_value_has_no_halves() -> None:
    with pytest.raises(SpecError, match="second half"):
        FUSED_QUANTIZE_CAT(inputs(), None, FIRST, torch.float8_e5m2, True, True, RULE)


def test_the_operator_keeps_its_contract_with_pytorch() -> None:
    arguments = (inputs(), torch.tensor(3.0), WITH_SUMS, torch.float8_e4m3fn, True, True, RULE)
    torch.library.opcheck(FUSED_QUANTIZE_CAT, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_gpu_gets_the_generated_kernel_and_a_cpu_the_reference() -> None:
    arguments = {"inputs": inputs(), "spec": Spec.parse(PAIR).text()}
    chosen, _ = registry.choose("fused_quantize_cat", Target("cpu"), arguments)
    assert chosen == registry.REFERENCE
    pytest.importorskip("triton")
    chosen, _ = registry.choose("fused_quantize_cat", Target("cuda", (9, 0)), arguments)
    assert chosen == "triton"
