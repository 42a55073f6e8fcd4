"""With or without the compiled core, the reason for what cannot run is said in words."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_compile.kernels import cublaslt, native, native_norm
from te_compile.ops.registry import Target, Unsupported

HOPPER = Target("cuda", (9, 0))


@pytest.fixture
def forgetful() -> Iterator[None]:
    """What native.py found out about the module is found out anew, in the test and after it."""
    native._loaded.cache_clear()
    yield
    native._loaded.cache_clear()


@pytest.fixture
def with_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if built with CUDA, with a library that refuses nothing."""
    monkeypatch.setattr(native, "missing", lambda cuda=False: "")
    monkeypatch.setattr(cublaslt, "_refused", lambda *arguments: "")


def arguments(**changes: Any) -> dict[str, Any]:
    """te::gemm's arguments, by name: a 64 x 96 result over 128."""
    usual: dict[str, Any] = {
        "a": torch.empty(64, 128, dtype=torch.float8_e4m3fn, device="meta"),
        "b": torch.empty(96, 128, dtype=torch.float8_e4m3fn, device="meta"),
        "bias": None,
        "out_dtype": torch.bfloat16,
        "accumulation": "fast",
    }
    return {**usual, **changes}


def fp8(rows: int, columns: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=dtype, device="meta")


def test_a_checkout_that_was_never_built_says_how_to_build(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    monkeypatch.setitem(sys.modules, "te_compile._native", None)
    assert "not built" in native.missing()
    assert "csrc/build.sh" in native.missing(cuda=True)
    with pytest.raises(ImportError, match="not built"):
        native.module()
    with pytest.raises(Unsupported, match="not built"):
        cublaslt.check(HOPPER, arguments())


def test_a_core_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    class WithoutCuda:
        cuda_built, INTERFACE = False, native.INTERFACE

    monkeypatch.setitem(sys.modules, "te_compile._native", WithoutCuda())
    assert native.missing() == ""
    assert "without CUDA" in native.missing(cuda=True)


def test_a_core_of_other_sources_is_not_called(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    """As after an update that nobody has built."""

    class Older:
        cuda_built, INTERFACE = True, native.INTERFACE - 1

    for core in (Older(), object()):
        native._loaded.cache_clear()
        monkeypatch.setitem(sys.modules, "te_compile._native", core)
        assert "built from other sources" in native.missing() and "csrc/build.sh" in native.missing(cuda=True)


def test_what_fits_passes(with_library: None) -> None:
    cublaslt.check(HOPPER, arguments())
    cublaslt.check(HOPPER, arguments(a=fp8(7, 128, torch.float8_e5m2)))
    cublaslt.check(Target("cuda", (8, 9)), arguments(out_dtype=torch.float32))


@pytest.mark.parametrize(
    ("target", "changes", "reason"),
    [
        (Target("cpu"), {}, "needs a CUDA device, not cpu"),
        (Target("cuda", (8, 0)), {}, "compute capability 8.9"),
        (HOPPER, {"a": torch.empty(64, 128, device="meta")}, "multiplies FP8"),
        (HOPPER, {"a": fp8(64, 128, torch.float8_e5m2), "b": fp8(96, 128, torch.float8_e5m2)}, "E5M2 by E5M2"),
        (HOPPER, {"out_dtype": torch.float64}, "float64"),
        (HOPPER, {"a": fp8(64, 120), "b": fp8(96, 120)}, "K=120 is not a multiple of 16"),
        (HOPPER, {"b": fp8(90, 128)}, "N=90 is not a multiple of 16"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    with_library: None, target: Target, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason):
        cublaslt.check(target, arguments(**changes))


def test_the_librarys_own_refusal_is_the_reason(monkeypatch: pytest.MonkeyPatch, with_library: None) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cublaslt, "_refused", lambda *details: asked.append(details) or "no algorithm")
    with pytest.raises(Unsupported, match="no algorithm"):
        cublaslt.check(HOPPER, arguments(bias=torch.empty(96, dtype=torch.bfloat16, device="meta")))
    with pytest.raises(Unsupported, match="no algorithm"):
        cublaslt.check(HOPPER, arguments(addend=torch.empty(64, 96, dtype=torch.bfloat16, device="meta")))
    e4m3 = torch.float8_e4m3fn
    product = (0, 64, 96, 128, e4m3, e4m3, torch.bfloat16)
    assert asked == [(*product, True, False, True), (*product, False, True, True)]


@pytest.mark.parametrize("text", ["0", "33", "many", "-1", ""])
def test_a_bad_number_of_candidates_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TE_COMPILE_GEMM_CANDIDATES", text)
    with pytest.raises(ValueError, match="from 1 to 32"):
        cublaslt._configured_candidates.__wrapped__()


def norm_arguments(**changes: Any) -> dict[str, Any]:
    """te::norm_quantize's arguments that decide, by name."""
    usual: dict[str, Any] = {
        "x": torch.empty(64, 128, dtype=torch.bfloat16, device="meta"),
        "weight": torch.empty(128, dtype=torch.bfloat16, device="meta"),
        "bias": None,
        "kind": "rms",
        "scale": empty(dtype=torch.float32),
        "dtype": torch.float8_e4m3fn,
    }
    return {**usual, **changes}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("columns", [8, 128, 1032, 16384])
def test_norms_of_two_byte_rows_go_to_the_core(columns: int, with_library: None) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        native_norm.check(HOPPER, norm_arguments(x=empty(64, columns, dtype=dtype), weight=None))
    # T5 keeps its weight in fp32 and rounds to it; a layer norm in bfloat16 may have parameters in fp32.
    wide = empty(128, dtype=torch.float32)
    native_norm.check(HOPPER, norm_arguments(kind="layer", weight=wide, bias=wide))


@pytest.mark.parametrize("scale", [None, empty(dtype=torch.float32)], ids=["current", "delayed"])
def test_few_rows_without_a_transposed_copy_go_to_the_core_with_any_scaling(
    scale: torch.Tensor | None, with_library: None
) -> None:
    def given(rows: int, columnwise: bool) -> dict[str, Any]:
        return norm_arguments(x=empty(rows, 128), scale=scale, columnwise=columnwise)

    for rows in (1, native_norm.FEW_ROWS):
        native_norm.check(HOPPER, given(rows, columnwise=False))
    with pytest.raises(Unsupported, match="Triton's"):
        native_norm.check(HOPPER, given(native_norm.FEW_ROWS + 1, columnwise=False))
    if scale is None:
        with pytest.raises(Unsupported, match="current scaling"):
            native_norm.check(HOPPER, given(1, columnwise=True))


def test_many_long_rows_without_a_transposed_copy_go_to_the_core_if_there_is_a_bias(with_library: None) -> None:
    scale = empty(dtype=torch.float32)

    def given(rows: int, columns: int, **changes: Any) -> dict[str, Any]:
        parameter = empty(columns)
        usual = {"weight": parameter, "bias": parameter, "kind": "layer", "scale": scale, "columnwise": False}
        return norm_arguments(**{**usual, "x": empty(rows, columns), **changes})

    native_norm.check(HOPPER, given(4096, 5120))
    native_norm.check(HOPPER, given(32768, 16384))
    for fewer in (given(4095, 5120), given(4096, 5112), given(4096, 5120, bias=None)):
        with pytest.raises(Unsupported, match="Triton's"):
            native_norm.check(HOPPER, fewer)
    with pytest.raises(Unsupported, match="current scaling"):
        native_norm.check(HOPPER, given(4096, 5120, scale=None))


@pytest.mark.parametrize(
    ("target", "changes", "reason"),
    [
        (Target("cpu"), {}, "CUDA device"),
        (Target("cuda", (8, 9)), {}, "capability"),
        (Target("cuda", (12, 0)), {}, "capability"),
        (HOPPER, {"kind": "group"}, "'group'"),
        (HOPPER, {"dtype": torch.float8_e5m2}, "float8_e5m2"),
        (HOPPER, {"x": empty(64, 128, dtype=torch.float32)}, "float32"),
        (HOPPER, {"weight": empty(128, dtype=torch.float64)}, "float64"),
        (HOPPER, {"weight": empty(128, dtype=torch.float32), "kind": "rms_mixed"}, "y is torch.float32"),
        (HOPPER, {"scale": None}, "current scaling"),
        (HOPPER, {"x": empty(64, 100)}, "K=100"),
        (HOPPER, {"x": empty(64, 16392)}, "K=16392"),
    ],
)
def test_norms_that_the_core_cannot_do_are_left_to_others_with_the_reason(
    target: Target, changes: dict[str, Any], reason: str, with_library: None
) -> None:
    with pytest.raises(Unsupported, match=re.escape(reason)):
        native_norm.check(target, norm_arguments(**changes))
