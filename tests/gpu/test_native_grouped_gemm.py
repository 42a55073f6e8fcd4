"""Experts' products by the C++ core, csrc/cuda/grouped_gemm_kernel.cuh and grouped_wgrad_kernel.cuh."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.kernels import native, native_grouped_gemm
from te_compile.ops import registry
from te_compile.ops.grouped_gemm import grouped_gemm_reference, grouped_wgrad_reference
from te_compile.ops.quantize import transposed_reference
from tests.compiling import relative_error
from tests.grouped_products import BF16, E4M3, E5M2, LIMITS, SIZES, codes, drawn_ends, experts_of, number

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a CUDA device of compute capability 9.0",
    ),
]


def all_along(dim: int, got: Tensor, wanted: Tensor, limit: float) -> bool:
    """Is each row or column as close as that? A dead one hides in the whole. float16 has steps of 2^-24 near zero."""
    allowed = limit * wanted.norm(dim=dim) + 2.0**-24 * wanted.shape[dim] ** 0.5
    return bool(((got.float() - wanted).norm(dim=dim) <= allowed).all())


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtypes", [(E5M2, E4M3), (E4M3, E5M2), (E4M3, E4M3)], ids=str)
@pytest.mark.parametrize("accumulation", ["fast", "split"])
@pytest.mark.parametrize("sizes", [*SIZES, (200, 144, 656, 300), (3000, 1040, 768, 2)], ids=str)
def test_each_row_meets_its_own_expert(
    sizes: tuple[int, int, int, int],
    accumulation: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    out_dtype: torch.dtype,
) -> None:
    rows, length, columns, experts = sizes
    a = codes(rows, length, dtype=dtypes[0])
    for as_columns in (False, True):
        b = experts_of(columns, length, experts, as_columns, dtypes[1])
        operands = a, b, number(0.03), number(0.7), drawn_ends(rows, experts, 5)
        got = native_grouped_gemm.grouped_gemm(*operands, out_dtype, accumulation)
        wanted = grouped_gemm_reference(*operands, torch.float32, accumulation)
        assert got.dtype == out_dtype and relative_error(got, wanted) < LIMITS[accumulation] + BF16
        assert all(all_along(dim, got, wanted, 4 * (LIMITS[accumulation] + BF16)) for dim in (0, 1))
        assert not got[int(operands[-1][-1]) :].any()


def test_products_of_integers_are_exact() -> None:
    """A row too many or too few, or one of another expert, shows."""
    for accumulation in ("fast", "split"):
        a = torch.randint(-2, 3, (1024, 272), device="cuda").to(E4M3)
        b = torch.randint(-2, 3, (7, 656, 272), device="cuda").to(E4M3)
        ends = torch.randint(0, 1025, (7,), device="cuda", dtype=torch.int32).sort().values
        operands = a, b, number(1.0), number(1.0), ends
        got = native_grouped_gemm.grouped_gemm(*operands, torch.float32, accumulation)
        assert torch.equal(got, grouped_gemm_reference(*operands, torch.float32, accumulation))


def test_a_row_that_is_not_finite_is_one() -> None:
    a, b = codes(512, 80), codes(5, 48, 80)
    ends = torch.tensor([37, 101, 101, 300, 512], device="cuda", dtype=torch.int32)
    bad = [36, 101, 299]
    a[bad] = torch.nan
    for accumulation in ("fast", "split"):
        got = native_grouped_gemm.grouped_gemm(a, b, number(1.0), number(1.0), ends, torch.float32, accumulation)
        assert torch.nonzero(~got.isfinite().all(1)).flatten().tolist() == bad


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtypes", [(E5M2, E4M3), (E4M3, E5M2), (E4M3, E4M3)], ids=str)
@pytest.mark.parametrize("sizes", [*SIZES, (2048, 144, 656, 3), (8192, 4096, 272, 2)], ids=str)
def test_each_weight_gradient_sums_over_its_own_rows(
    sizes: tuple[int, int, int, int], dtypes: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype
) -> None:
    rows, length, columns, experts = sizes
    dy, x = codes(rows, columns, dtype=dtypes[0]), codes(rows, length, dtype=dtypes[1])
    operands = transposed_reference(dy), transposed_reference(x), number(0.03), number(0.7)
    for rest in (0, 5):
        ends = drawn_ends(rows, experts, rest)
        got = native_grouped_gemm.grouped_wgrad(*operands, ends, out_dtype, "split")
        wanted = grouped_wgrad_reference(*operands, ends, torch.float32, "split")
        for part, expected in zip(got, wanted, strict=True):
            assert part.dtype == out_dtype and part.any() == expected.any()
            assert not expected.any() or relative_error(part, expected) < LIMITS["split"] + BF16
            assert all_along(1, part, expected, 4 * (LIMITS["split"] + BF16))


def test_sums_of_integers_are_exact() -> None:
    """Whatever group a token is in, and wherever that begins: one that is missing or one too many shows."""
    for _ in range(8):
        dy, x = (torch.randint(-2, 3, (1024, width), device="cuda").float() for width in (272, 144))
        ends = torch.randint(0, 1025, (7,), device="cuda", dtype=torch.int32).sort().values
        operands = transposed_reference(dy.to(E5M2)), transposed_reference(x.to(E4M3)), number(1.0), number(1.0)
        got = native_grouped_gemm.grouped_wgrad(*operands, ends, torch.float32, "split")
        bounds = [0, *ends.tolist()]
        for part, first, end in zip(got, bounds, bounds[1:], strict=False):
            assert torch.equal(part, dy[first:end].T @ x[first:end])


def test_what_is_not_finite_stays_in_its_group() -> None:
    dy, x = codes(512, 48, dtype=E5M2), codes(512, 80)
    ends = torch.tensor([37, 101, 101, 300, 512], device="cuda", dtype=torch.int32)
    for row in (36, 101, 299):
        dy[row] = torch.inf
        x[row] = torch.nan
    operands = transposed_reference(dy), transposed_reference(x), number(1.0), number(1.0)
    got = native_grouped_gemm.grouped_wgrad(*operands, ends, torch.float32, "split")
    assert [bool(part.isfinite().all()) for part in got] == [False, True, True, False, True]


def test_a_captured_graph_follows_the_groups() -> None:
    dy, x, w = codes(2048, 256, dtype=E5M2), codes(2048, 512), codes(8, 256, 512)
    ends = drawn_ends(2048, 8, 0)
    rest = number(0.5), number(2.0), ends, torch.float32, "split"
    turned = transposed_reference(dy), transposed_reference(x)
    native_grouped_gemm.grouped_gemm(x, w, *rest)
    native_grouped_gemm.grouped_wgrad(*turned, *rest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dw = native_grouped_gemm.grouped_gemm(x, w, *rest), native_grouped_gemm.grouped_wgrad(*turned, *rest)
    for unused in (0, 900):
        ends.copy_(drawn_ends(2048, 8, unused))
        graph.replay()
        assert relative_error(y, grouped_gemm_reference(x, w, *rest)) < LIMITS["split"]
        assert relative_error(dw, grouped_wgrad_reference(*turned, *rest)) < LIMITS["split"]


def test_it_is_what_runs() -> None:
    arguments = {
        **{"a": codes(32, 64, dtype=E5M2), "b": codes(16, 64), "ends": drawn_ends(64, 2, 0)},
        **{"out_dtype": torch.bfloat16, "accumulation": "split"},
    }
    target = registry.Target.of(torch.device("cuda"))
    assert registry.choose("grouped_wgrad", target, arguments)[0] == "cuda"
    for changed in (
        {"b": codes(16, 64, dtype=E5M2)},
        {"ends": drawn_ends(64, 2, 0).long()},
        {"accumulation": "fast"},
    ):
        assert registry.choose("grouped_wgrad", target, {**arguments, **changed})[0] != "cuda"
    arguments |= {"a": codes(64, 32, dtype=E5M2), "b": codes(2, 16, 32)}
    assert registry.choose("grouped_gemm", target, arguments)[0] == "cuda"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": 40}, "multiple of 16"),
        ({"columns": 6}, "columns of 4"),
        ({"experts": 0}, "there must be"),
        ({"a": 8}, "aligned to 16"),
        ({"y_dtype": 3}, "y must be"),
    ],
)
def test_a_weight_gradient_that_is_none_is_refused(change: dict[str, int], reason: str) -> None:
    names = "a a_dtype b b_dtype rows columns tokens experts a_scale_inv b_scale_inv ends y y_dtype workspace stream"
    given = dict.fromkeys(names.split(), 4096) | {"a_dtype": 3, "b_dtype": 3, "y_dtype": 0}
    given |= {"rows": 16, "columns": 16, "tokens": 64, "experts": 2, "stream": 0} | change
    with pytest.raises(ValueError, match=reason):
        native.module().cuda_grouped_wgrad(0, *given.values())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"depth": 40}, "multiples of 16"),
        ({"feature_stride": 8}, "multiples of 16"),
        ({"features": 6}, "features of 4"),
        ({"tokens": 0}, "there must be"),
        ({"b": 8}, "aligned to 16"),
        ({"a_dtype": 1}, "must be FP8"),
    ],
)
def test_a_product_that_is_none_is_refused(change: dict[str, int], reason: str) -> None:
    names = "a a_dtype b b_dtype tokens features depth experts feature_stride expert_stride a_scale_inv b_scale_inv"
    given = dict.fromkeys(f"{names} ends y y_dtype fast stream".split(), 4096)
    given |= {"a_dtype": 3, "b_dtype": 3, "y_dtype": 0, "fast": 1, "stream": 0} | change
    with pytest.raises(ValueError, match=reason):
        native.module().cuda_grouped_gemm(0, *given.values())
