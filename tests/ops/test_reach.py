"""Matrices that a tile's offsets in 32 bits do not reach across: kernels refuse them, at run time as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from te_compile.ops import reach, registry
from te_compile.ops.norm import KINDS
from te_compile.ops.pointwise import Spec
from te_compile.ops.reach import MOST_COLUMNS, MOST_ROWS, near
from te_compile.ops.registry import Target
from te_compile.recipe import ScaleRule

E4M3 = torch.float8_e4m3fn
RELU = Spec.parse("x0: bfloat16[M, K]; t0 = relu(x0); quantize t0")
FEW = torch.ones(1, dtype=torch.bfloat16)


def arguments_for(x: Tensor) -> dict[str, dict[str, Any]]:
    norm = {"x": x, "weight": None, "bias": None, "kind": KINDS[0], "scale": None, "dtype": E4M3}
    return {
        "quantize": {"x": x, "dtype": E4M3},
        "norm_quantize": norm,
        "fused_quantize": {"inputs": [x], "spec": RELU.text()},
        "quantize_weights": {"weights": [x], "dtype": E4M3},
    }


@pytest.mark.parametrize("operator", arguments_for(FEW))
@pytest.mark.parametrize(("rows", "columns"), [(1, MOST_COLUMNS + 1), (MOST_ROWS + 1, 1)], ids=["wide", "tall"])
def test_matrices_out_of_reach_get_the_reference_and_the_reason(operator: str, rows: int, columns: int) -> None:
    pytest.importorskip("triton")
    arguments = arguments_for(FEW.expand(rows, columns))[operator]
    name, declined = registry.choose(operator, Target("cuda", (9, 0)), arguments)
    assert name == "reference" and any("offsets have 32 bits" in line for line in declined)


@pytest.mark.parametrize("operator", ["quantize", "fused_quantize"])
def test_a_size_that_shows_at_run_time_gets_the_reference(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(reach, "MOST_COLUMNS", 15)
    x, rest = torch.randn(8, 16, dtype=torch.bfloat16), (E4M3, True, True, ScaleRule())
    given = {"quantize": (x, None, *rest), "fused_quantize": ([x], None, RELU, *rest)}[operator]
    by_triton, by_reference = (registry.function_of(operator, name)(*given) for name in ("triton", "reference"))
    assert all(map(torch.equal, (x.float() for x in by_triton), (x.float() for x in by_reference)))


def test_experts_whose_rows_are_out_of_reach_get_the_reference() -> None:
    b = torch.empty(0, dtype=E4M3).as_strided((0, 16, 16), (1 << 25, 1 << 24, 1))
    arguments = {"a": torch.empty(16, 16, dtype=E4M3), "b": b, "out_dtype": torch.bfloat16}
    name, declined = registry.choose("grouped_gemm", Target("cuda", (9, 0)), arguments)
    assert name == "reference" and any("a row's stride" in line for line in declined)


def test_bits_of_a_dropout_out_of_reach_get_the_reference() -> None:
    q = torch.empty(0, dtype=torch.bfloat16).as_strided((0, 1 << 18, 1, 32), (1, 32, 32, 1))
    arguments = {"q": q, "k": q, "v": q, "probability": 0.1}
    name, declined = registry.choose("dropout_attention_forward", Target("cuda", (9, 0)), arguments)
    assert name != "triton" and any("32 bits" in line for line in declined)


def test_only_what_lies_too_far_apart_is_copied() -> None:
    storage = torch.zeros(1 << 25, dtype=torch.uint8)
    last = storage.view(2, 1 << 24)[:, :16]
    assert near(last, 0).stride() == (16, 1)
    assert near(last, 1) is last and near(last[:1], 0).data_ptr() == storage.data_ptr()
    assert near(storage.view(4, 1 << 23)[:, :16], 0).data_ptr() == storage.data_ptr()
