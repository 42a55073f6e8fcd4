"""The grouped products against their reference: groups of any size, each operand layout, sizes that fill no tile."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from te_compile.kernels.grouped_gemm import NARROW, WIDE, GemmTile, grouped_gemm, grouped_wgrad
from te_compile.ops.grouped_gemm import grouped_gemm_reference, grouped_wgrad_reference
from te_compile.ops.quantize import padded, transposed_reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

GROUPS = {
    "even": [64, 64, 64],
    "odd": [37, 1, 90, 16],
    "empty ones": [0, 33, 0, 0, 50, 0],
    "all in one": [0, 0, 211],
    "none at all": [0, 0],
    "one row each": [1] * 9,
    "longer than blocks": [7, 420, 3, 300],
}
REST = [0, 45]  # rows after the last group


def number(value: float, device: str) -> Tensor:
    return torch.tensor(value, device=device)


def codes(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """FP8 numbers over many binades."""
    return (torch.randn(shape, device=device) * 2.0 ** torch.randint(-6, 6, shape, device=device)).to(dtype)


def ends_of(counts: list[int], device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(device, dtype)


Reference = Callable[..., Tensor]


def close(got: Tensor, wanted: Tensor, reference: Reference, operands: tuple[Tensor, ...], length: int) -> None:
    """Sums of the same products in another order, and one rounding to the result's dtype.

    operands: those of ``reference`` that gave ``wanted``, up to the ends of groups. A sum of n fp32 numbers is off by
    at most n · 2^-24 of the sum of their magnitudes, whatever the order; two sums by twice that. The rounding is at
    most half a unit in the last place, twice. Tensor cores line products up with the largest of them or what they have
    so far, and drop what is below 2^-13 of that: of each product up to so much, with either sign. Six standard
    deviations of the sum of these are allowed; the largest is taken to be the root of the sum of squares, which it
    comes near where one product is most of a sum.
    """
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    a, b, a_scale_inv, b_scale_inv, ends = operands
    rest = (a_scale_inv, b_scale_inv, ends, torch.float32, "split")
    magnitudes = reference(a.float().abs(), b.float().abs(), *rest).double()
    limit = 2 * length * 2.0**-24 * magnitudes + torch.finfo(got.dtype).eps * wanted.double().abs()
    if got.is_cuda:
        squares = reference(a.float().square(), b.float().square(), *rest).double() * a_scale_inv * b_scale_inv
        limit += 6 * math.sqrt(length / 3) * 2.0**-13 * squares.sqrt()
    limit += torch.finfo(got.dtype).tiny
    off = (got.double() - wanted.double()).abs() / limit
    assert bool((off <= 1).all()), f"{off.max().item():.2f} times what is allowed"


def agrees_on_rows(
    counts: list[int], rest: int, sizes: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    tile: GemmTile, device: str, columns_of_a_copy: bool,
) -> None:  # fmt: skip
    rows, experts, (length, columns) = sum(counts) + rest, len(counts), sizes
    a = codes(rows, length, dtype=dtypes[0], device=device)
    if columns_of_a_copy:  # an expert of the transposed copy of a weight: columns of a matrix
        b = codes(columns, experts * length, dtype=dtypes[1], device=device).unflatten(1, (experts, -1)).transpose(0, 1)
    else:
        b = codes(experts, columns, length, dtype=dtypes[1], device=device)
    scales = number(0.37, device), number(1.9, device)
    ends = ends_of(counts, device)
    got = grouped_gemm(a, b, *scales, ends, dtypes[2], "split", tile)
    wanted = grouped_gemm_reference(a, b, *scales, ends, dtypes[2], "split")
    close(got, wanted, grouped_gemm_reference, (a, b, *scales, ends), length)
    assert not bool(got[sum(counts) :].any())


@pytest.mark.parametrize("columns_of_a_copy", [False, True], ids=["as stored", "transposed copy"])
@pytest.mark.parametrize("rest", REST)
@pytest.mark.parametrize("counts", GROUPS.values(), ids=list(GROUPS))
def test_each_row_meets_its_own_expert(counts: list[int], rest: int, columns_of_a_copy: bool, device: str) -> None:
    agrees_on_rows(counts, rest, (256, 144), (E4M3, E4M3, torch.float32), WIDE, device, columns_of_a_copy)


@pytest.mark.parametrize("tile", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("sizes", [(16, 16), (272, 48), (48, 272)], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sizes_that_fill_no_tile(tile: GemmTile, sizes: tuple[int, int], out_dtype: torch.dtype, device: str) -> None:
    agrees_on_rows(GROUPS["odd"], 3, sizes, (E5M2, E4M3, out_dtype), tile, device, True)


def wgrad_operands(counts: list[int], rest: int, sizes: tuple[int, int], device: str) -> tuple[Tensor, Tensor]:
    """dyᵀ and xᵀ as te::quantize gives them."""
    rows = sum(counts) + rest
    dy, x = (codes(rows, size, dtype=dtype, device=device) for size, dtype in zip(sizes, (E5M2, E4M3), strict=True))
    return transposed_reference(dy), transposed_reference(x)


@pytest.mark.parametrize("rest", REST)
@pytest.mark.parametrize("counts", GROUPS.values(), ids=list(GROUPS))
def test_each_weight_gradient_sums_over_its_own_rows(counts: list[int], rest: int, device: str) -> None:
    a, b = wgrad_operands(counts, rest, (48, 144), device)
    scales, ends = (number(0.6, device), number(1.1, device)), ends_of(counts, device)
    got = grouped_wgrad(a, b, *scales, ends, torch.float32, "split")
    wanted = grouped_wgrad_reference(a, b, *scales, ends, torch.float32, "split")
    close(got, wanted, grouped_wgrad_reference, (a, b, *scales, ends), padded(max(counts)))
    assert not any(bool(part.any()) for part, count in zip(got, counts, strict=True) if count == 0)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weight_gradients_are_rounded_once(out_dtype: torch.dtype, device: str) -> None:
    a, b = wgrad_operands(GROUPS["odd"], 0, (16, 32), device)
    scales, ends = (number(2.0**-9, device), number(2.0**-3, device)), ends_of(GROUPS["odd"], device)
    got = grouped_wgrad(a, b, *scales, ends, out_dtype, "split")
    exact = grouped_wgrad_reference(a, b, *scales, ends, torch.float32, "split")
    close(got, exact.to(out_dtype), grouped_wgrad_reference, (a, b, *scales, ends), 96)


def test_fast_accumulation_is_as_exact_off_hopper(device: str) -> None:
    a, b = codes(40, 64, dtype=E4M3, device=device), codes(2, 32, 64, dtype=E4M3, device=device)
    scales, ends = (number(1.0, device), number(1.0, device)), ends_of([17, 20], device, torch.int64)
    got = grouped_gemm(a, b, *scales, ends, torch.float32, "fast")
    wanted = grouped_gemm_reference(a, b, *scales, ends, torch.float32, "fast")
    # Hopper's own accumulator keeps 13 bits after the point of the largest product.
    assert float((got - wanted).norm() / wanted.norm()) < 2.0**-10


def test_an_empty_batch_gives_no_rows_and_no_gradient(device: str) -> None:
    agrees_on_rows([0, 0, 0], 0, (32, 48), (E4M3, E4M3, torch.bfloat16), WIDE, device, False)
    a, b = wgrad_operands([0, 0, 0], 0, (32, 48), device)
    scales, ends = (number(1.0, device), number(1.0, device)), ends_of([0, 0, 0], device)
    assert torch.equal(
        grouped_wgrad(a, b, *scales, ends, torch.bfloat16, "split"), torch.zeros(3, 32, 48, device=device).bfloat16()
    )


def test_what_other_groups_hold_does_not_matter(device: str) -> None:
    counts = [5, 0, 140, 3]
    a, b = wgrad_operands(counts, 9, (32, 48), device)
    rows, experts = sum(counts) + 9, codes(4, 48, 32, dtype=E4M3, device=device)
    x = codes(rows, 32, dtype=E4M3, device=device)
    scales, ends = (number(1.0, device), number(1.0, device)), ends_of(counts, device)
    before = grouped_gemm(x, experts, *scales, ends, torch.float32, "split")
    wgrad_before = grouped_wgrad(a, b, *scales, ends, torch.float32, "split")
    nan = number(float("nan"), device)
    others = [*range(5), *range(145, rows)]
    for held in (x, a.t(), b.t()):
        held[others] = nan.to(held.dtype)
    assert torch.equal(grouped_gemm(x, experts, *scales, ends, torch.float32, "split")[5:145], before[5:145])
    assert torch.equal(grouped_wgrad(a, b, *scales, ends, torch.float32, "split")[2], wgrad_before[2])


def test_ends_of_groups_may_lie_apart(device: str) -> None:
    """As the second column of a table of where groups begin and end."""
    counts = GROUPS["odd"]
    ends = ends_of(counts, device)
    table = torch.stack([ends - torch.tensor(counts, device=device), ends], dim=1)
    apart, scales = table.to(torch.int32)[:, 1], (number(1.0, device), number(1.0, device))
    a = codes(sum(counts), 32, dtype=E4M3, device=device)
    b = codes(len(counts), 16, 32, dtype=E4M3, device=device)
    dy, x = wgrad_operands(counts, 0, (16, 32), device)
    for product, operands in ((grouped_gemm, (a, b)), (grouped_wgrad, (dy, x))):
        found, expected = (product(*operands, *scales, each, torch.float32, "split") for each in (apart, ends))
        assert torch.equal(found, expected)
