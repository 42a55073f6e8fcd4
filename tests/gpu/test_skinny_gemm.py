"""FP8 products of few rows, one or several at once, by the C++ core: csrc/cuda/skinny_gemm.cu."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_compile
from te_compile.kernels import native, skinny_gemm
from te_compile.ops import native_implementations as implementations
from te_compile.ops import triton_implementations
from te_compile.ops.gemm import gemm_reference
from te_compile.ops.gemms import AT_ONCE, GEMMS
from te_compile.ops.norm_quantize import Norm, Wanted
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of
from te_compile.recipe import ScaleRule
from tests.compiling import compiled, relative_error, te_nodes
from tests.gpu.test_kernels import poisoned_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device with FP8 tensor cores (compute capability 8.9)",
    ),
]

__all__ = ["poisoned_memory"]  # a fixture that every test here uses

E4M3 = torch.float8_e4m3fn
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}
FAST = 2.0**-10  # of a row's size: what the tensor core's own accumulator loses
# Columns that fill no tile, tiles that fill no multiprocessor, and more of them than there are; lengths of less than a
# step, of steps for some of the warps, and of many rounds.
SIZES = [
    (48, 16),
    (16, 4096),
    (4096, 4096),
    (1000, 656),
    (9000, 272),
    (1024, 14336),
    (28672, 512),
    (1, 80),
    (136, 2064),
]


def codes(rows: int, length: int) -> Tensor:
    return torch.randn(rows, length, device="cuda").to(E4M3)


def number() -> Tensor:
    return torch.rand((), device="cuda") + 0.1


def products(a: Tensor, b: list[Tensor], out_dtype: torch.dtype = torch.float32, **given: Any) -> tuple[Any, Any]:
    """What the kernel makes, and what the reference does, in float32."""
    nothing = [None] * len(b)
    scales = [number() for _ in b]
    bias, addend = given.get("bias", nothing), given.get("addend", nothing)
    scale = number()
    got = skinny_gemm.products(a, b, scale, scales, bias, addend, out_dtype)
    parts = zip(b, scales, bias, addend, strict=True)
    return got, [gemm_reference(a, w, scale, of_it, c, torch.float32, "fast", d) for w, of_it, c, d in parts]


def agree(got: Tensor, wanted: Tensor) -> None:
    """Assert that every element is as close as its row's and its column's size permit."""
    size = torch.minimum(wanted.norm(dim=0, keepdim=True) / wanted.shape[0] ** 0.5, wanted.abs().amax(1, keepdim=True))
    allowed = 2 * STEP[got.dtype] * wanted.abs() + 4 * FAST * size + 2.0**-24
    assert got.shape == wanted.shape and bool(((got.float() - wanted).abs() <= allowed).all())


@pytest.mark.parametrize("out_dtype", list(STEP), ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_product_is_the_reference(size: tuple[int, int], rows: int, out_dtype: torch.dtype) -> None:
    columns, length = size
    (got,), (wanted,) = products(codes(rows, length), [codes(columns, length)], out_dtype)
    assert got.dtype == out_dtype
    agree(got, wanted)


@pytest.mark.parametrize("rows", [1, 7, 8, 11, 16])
def test_products_of_integers_are_exact(rows: int) -> None:
    """An element of another row, column, product or place along the contraction shows."""
    for length, widths in itertools.product((16, 80, 656, 4112), ([40], [16, 1], [5, 640, 33], [64, 32, 48, 16])):
        a, *b = (torch.randint(-2, 3, (each, length), device="cuda").to(E4M3) for each in (rows, *widths))
        one = torch.ones((), device="cuda")
        for y, weight in zip(
            skinny_gemm.products(a, b, one, [one] * len(b), *[[None] * len(b)] * 2, torch.float32), b, strict=True
        ):
            assert torch.equal(y, a.float() @ weight.float().t())


@pytest.mark.parametrize("bias_dtype", list(STEP), ids=str)
@pytest.mark.parametrize("out_dtype", list(STEP), ids=str)
def test_biases_and_addends_are_added_before_the_one_rounding(out_dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    for rows, count in itertools.product((2, 8, 13), range(1, AT_ONCE + 1)):
        b = [codes(48 + 8 * place, 160) for place in range(count)]
        bias = [
            torch.randn(each.shape[0], device="cuda").to(bias_dtype) if place != 1 else None
            for place, each in enumerate(b)
        ]
        addend = [
            torch.randn(rows, each.shape[0], device="cuda").to(out_dtype) if place != 2 else None
            for place, each in enumerate(b)
        ]
        for got, wanted in zip(*products(codes(rows, 160), b, out_dtype, bias=bias, addend=addend), strict=True):
            agree(got, wanted)


def test_what_is_not_finite_stays_in_its_row_and_column() -> None:
    for rows in (6, 12):
        a, b = codes(rows, 288), codes(80, 288)
        a[2, 100], b[33, 5] = float("nan"), float("nan")
        (got,), (wanted,) = products(a, [b])
        assert torch.equal(got.isnan(), wanted.isnan()) and got.isnan().sum() == 80 + rows - 1
        agree(got.nan_to_num(), wanted.nan_to_num())


def test_every_run_gives_the_same_bits() -> None:
    for rows in (4, 16):
        a, b, scale = codes(rows, 4096), [codes(4096, 4096), codes(1024, 4096)], number()
        given = scale, [scale, scale], [None, None], [None, None], torch.float32
        first = skinny_gemm.products(a, b, *given)
        for _ in range(10):
            again = skinny_gemm.products(a, b, *given)
            assert all(map(torch.equal, first, again))


def cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of x and 1 / scale, by a kernel that lets the next one begin before it has written either."""
    q, _, _, scale_inv = triton_implementations.quantize(x, None, E4M3, True, False, ScaleRule())
    return q, scale_inv


def normed(by: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The same of x's norm, by the Triton kernel or by the core's."""

    def cast(x: Tensor) -> tuple[Tensor, Tensor]:
        wanted = Wanted(None, E4M3, True, False, False, ScaleRule())
        results = by.norm_quantize(x, Norm(None, None, 1e-5, "rms"), wanted)
        return results[1], results[4]

    return cast


CASTS = [cast, normed(triton_implementations)]
if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
    CASTS.append(normed(implementations))  # which begins early itself


def chain(x: Tensor, weights: list[Tensor], waits: bool) -> Tensor:
    """Products of which each reads what was cast right before: the rows, and of every other one the weight as well.

    Their memory is that of earlier ones. ``waits``: nothing begins before all that was launched has ended.
    """
    one = torch.full((), 2.0**-5, device="cuda")
    for place, weight in enumerate(weights * 9):
        given, by = CASTS[place % len(CASTS)](x)
        if waits:
            torch.cuda.synchronize()
        (x,) = skinny_gemm.products(given, [weight], by, [one], [None], [None], torch.bfloat16)
        if waits:
            torch.cuda.synchronize()
        if place % 2:
            last, by_last = cast(x[:, :512].contiguous().view(-1, 512))
            if waits:
                torch.cuda.synchronize()
            (y,) = skinny_gemm.products(last, [last], by_last, [by_last], [None], [None], torch.bfloat16)
            x = x + torch.tanh(y.float().mean()).to(x.dtype)
    return x


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_what_begins_early_waits_for_what_it_reads(rows: int) -> None:
    weights = [codes(width, length) for width, length in ((1024, 2048), (4096, 1024), (512, 4096), (2048, 512))]
    x = torch.randn(rows, 2048, device="cuda").bfloat16()
    wanted = chain(x, weights, waits=True)
    assert bool(wanted.isfinite().all()) and wanted.float().std() > 0
    assert all(torch.equal(chain(x, weights, waits=False), wanted) for _ in range(20))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(x, weights, waits=False)
    for _ in range(50):
        got.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, wanted)


def test_operands_that_lie_badly_are_copied() -> None:
    raw = torch.randn(12 * 96 + 8, device="cuda").to(E4M3)
    a = raw[8:].view(12, 96)
    b = codes(96, 64).t()
    addend = torch.randn(40, 12, device="cuda").t()[:, :40]
    (got,), (wanted,) = products(a, [codes(40, 96)], addend=[addend])
    agree(got, wanted)
    (got,), (wanted,) = products(codes(3, 96), [b])
    agree(got, wanted)


def test_an_addend_may_be_where_the_result_goes() -> None:
    a, b, one = codes(5, 64), codes(32, 64), torch.ones((), device="cuda")
    y = torch.randn(5, 32, device="cuda")
    wanted = gemm_reference(a, b, one, one, None, torch.float32, "fast", y)
    empty = [0] * (AT_ONCE - 1)
    given = [
        (b.data_ptr(), *empty),
        (one.data_ptr(), *empty),
        (0, *empty),
        (y.data_ptr(), *empty),
        (y.data_ptr(), *empty),
    ]
    stream = torch.cuda.current_stream().cuda_stream
    native.module().cuda_skinny_gemm(
        0, a.data_ptr(), one.data_ptr(), 5, 64, native.dtype_codes()[torch.float32], [32], [0], *sum(given, ()), stream
    )
    agree(y, wanted)


def test_none_of_nothing() -> None:
    one = torch.ones((), device="cuda")
    for rows, columns in ((0, 32), (4, 0)):
        given = codes(rows, 64), codes(columns, 64), one, one, None, torch.float32, "fast"
        assert implementations.gemm(*given).shape == (rows, columns)
        given = codes(rows, 64), [codes(columns, 64)] * 2, one, [one] * 2, [None] * 2, torch.float32, "fast"
        assert [y.shape for y in implementations.gemms(*given)] == [(rows, columns)] * 2


def request(**changes: Any) -> list[Any]:
    """The arguments of a call that is sound but for ``changes``."""
    given = {
        "device": 0,
        "a": 4096,
        "a_scale_inv": 4096,
        "rows": 8,
        "depth": 64,
        "y_dtype": 0,
        "columns": [16],
        "bias_dtypes": [0],
    }
    of_one = {"b": 4096, "b_scale_inv": 4096, "bias": 0, "addend": 0, "y": 4096}
    parts = [(changes.get(name, value), 0, 0, 0) for name, value in of_one.items()]
    known = [changes.get(name, value) for name, value in given.items()]
    return [*known, *(address for part in parts for address in part), 0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"depth": 40}, "multiple of 16"),
        ({"rows": 0}, "there must be a row"),
        ({"a": 8}, "a must be aligned to 16"),
        ({"b": 8}, "b must be aligned to 16"),
        ({"b_scale_inv": 0}, "b_scale_inv or y is null"),
        ({"y": 0}, "b_scale_inv or y is null"),
        ({"a_scale_inv": 0}, "a_scale_inv is null"),
        ({"y_dtype": 3}, "y must be"),
        ({"bias": 4096, "bias_dtypes": [3]}, "a bias must be"),
        ({"columns": [0]}, "no column"),
        ({"columns": [], "bias_dtypes": []}, "from 1 to 4"),
        ({"columns": [16] * 5, "bias_dtypes": [0] * 5}, "more than four"),
        ({"columns": [16] * 2}, "one entry per product"),
    ],
    ids=str,
)
def test_a_product_that_is_none_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        native.module().cuda_skinny_gemm(*request(**change))
    with pytest.raises(native.module().Unsupported, match="more than 16 rows"):
        native.module().cuda_skinny_gemm(*request(rows=17))


class Block(nn.Module):
    """A decoder's layer without its attention: q, k and v of one norm, a gated feed-forward of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(512), nn.RMSNorm(512)
        self.q, self.k, self.v = nn.Linear(512, 512), nn.Linear(512, 128), nn.Linear(512, 128)
        self.o = nn.Linear(512, 512, bias=False)
        self.gate, self.up, self.down = nn.Linear(512, 1536), nn.Linear(512, 1536), nn.Linear(1536, 512)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        x = x + self.o(self.q(h) * (self.k(h) * self.v(h)).repeat(1, 4))
        h = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_step_of_few_rows_is_three_joined_products_and_right(rows: int, recipe: str, mode: str | None) -> None:
    """Bit for bit the same in calls that are replayed, by the core's player or as a CUDA graph."""
    torch._dynamo.reset()
    with torch.device("cuda"):
        model, x = Block().to(torch.bfloat16), torch.randn(rows, 512, dtype=torch.bfloat16)
    with torch.no_grad(), manager.recording() as records:
        wanted = Block.forward(model.float(), x.float())
        model.to(torch.bfloat16)
        with te_compile.configure(recipe=recipe, cost_model=False):
            fast = torch.compile(model, backend="te_fp8", mode=mode)
            results = [fast(x).clone() for _ in range(6)]
    together = te_nodes(records[0], "gemms")
    assert sorted(len(arguments_of(node)["b"]) for node in together) == [2, 3]
    alone = te_nodes(records[0], "gemm")
    assert {arguments_of(node)["implementation"] for node in (*together, *alone)} == {"cuda"} and len(alone) == 2
    assert relative_error(results[-1], wanted) < 0.06
    assert all(torch.equal(results[-1], each) for each in results[2:])


def test_more_rows_are_cublaslt() -> None:
    torch._dynamo.reset()
    with torch.device("cuda"):
        model, x = Block().to(torch.bfloat16), torch.randn(32, 512, dtype=torch.bfloat16)
    with torch.no_grad(), manager.recording() as records:
        compiled(model, compiler="inductor", cost_model=False)(x)
    assert not te_nodes(records[0], "gemms")
    assert {arguments_of(node)["implementation"] for node in te_nodes(records[0], "gemm")} == {"cublaslt"}


def test_the_operator_calls_it() -> None:
    a, b, one = codes(8, 64), [codes(32, 64), codes(48, 64)], torch.ones((), device="cuda")
    made = GEMMS(a, b, one, [one, one], [None, None], torch.bfloat16, "fast", "q forward | k forward", "cuda")
    for y, weight in zip(made, b, strict=True):
        agree(y, gemm_reference(a, weight, one, one, None, torch.float32, "fast"))
