"""What cuBLASLt could also do, beside what te_fp8 has it do: the measurements behind two decisions.

    python -m benchmarks.untaken                      half a minute on a GPU machine; it needs the C++ core's CUDA part
    python -m benchmarks.untaken --only epilogue      or "shared"

``epilogue``: products that apply GELU or its gradient on their way out. What that adds to a product must be less than
the pass over memory that it saves, for the result still has to be read once more: FP8 is wanted in both layouts, and
an epilogue writes one. ``shared``: linears that read one input as one product, which FP8 allows only if their weights
share a scale and their gradients, too. ``apart`` is what te_fp8 does, ``one`` the single product.

One JSON line a row, in microseconds: variants of a row take turns, and the time is the median of their turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.measure import Rows, add_out, describe_device
from te_compile.kernels import cublaslt, native

DEVICE = "cuda"
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
TURNS, CALLS = 12, 6
FEED_FORWARDS = {
    "hidden 4096": (8192, 16384, 4096),
    "hidden 1600": (16384, 6400, 1600),
    "hidden 1024": (32768, 4096, 1024),
}
"""Tokens, feed-forward and hidden size."""
SHARED = {
    "q, k, v of grouped heads": (4096, 1024, 1024),
    "q, k, v": (4096, 4096, 4096),
    "gate, up": (14336, 14336),
}
TOKENS, HIDDEN = 8192, 4096

Variants = dict[str, Callable[[], object]]


def codes(rows: int, columns: int, dtype: torch.dtype = E4M3) -> Tensor:
    """Random codes, [rows, columns]."""
    return torch.randn(rows, columns, device=DEVICE, dtype=BF16).to(dtype)


def product(a: Tensor, b: Tensor, accumulation: str, bias: Tensor | None = None, added: Tensor | None = None) -> Tensor:
    """a [M, K] · b [N, K]ᵀ in bf16, as te_fp8 multiplies; added to ``added`` in its place."""
    one = torch.ones((), device=DEVICE)
    return cublaslt.gemm(a, b, one, one, bias, BF16, accumulation, added, added)


def epilogues(tokens: int, wide: int, hidden: int) -> Iterator[tuple[str, Variants]]:
    """The feed-forward's first product, and the gradient that its activation takes in."""
    one, bias = torch.ones((), device=DEVICE), torch.randn(wide, device=DEVICE, dtype=BF16)
    x, w = codes(tokens, hidden), codes(wide, hidden)
    yield (
        "forward",
        {
            "bias": lambda: product(x, w, "fast", bias),
            "bias, gelu": lambda: cublaslt.gemm_gelu_aux(x, w, one, one, bias, "fast"),
            "bias, gelu, cast": lambda: cublaslt.gemm_to_fp8(x, w, one, one, bias, one, E4M3, "fast", gelu=True),
        },
    )
    dy, wt, aux = codes(tokens, hidden, E5M2), codes(wide, hidden), torch.randn(tokens, wide, device=DEVICE, dtype=BF16)
    yield (
        "dgrad",
        {
            "none": lambda: product(dy, wt, "split"),
            "dgelu": lambda: cublaslt.gemm_dgelu(dy, wt, one, one, aux, "split", bias_gradient=False),
            "dgelu, bias gradient": lambda: cublaslt.gemm_dgelu(dy, wt, one, one, aux, "split", bias_gradient=True),
        },
    )


def shared(widths: Sequence[int]) -> Iterator[tuple[str, Variants]]:
    """Linears of such widths that read one input: each by itself, and all as one."""
    whole = sum(widths)
    x, xt = codes(TOKENS, HIDDEN), codes(HIDDEN, TOKENS)
    weights, weight = [codes(width, HIDDEN) for width in widths], codes(whole, HIDDEN)
    yield (
        "forward",
        {
            "apart": lambda: [product(x, each, "fast") for each in weights],
            "one": lambda: product(x, weight, "fast"),
        },
    )
    gradients, gradient = [codes(TOKENS, width, E5M2) for width in widths], codes(TOKENS, whole, E5M2)
    columns, column = [codes(HIDDEN, width) for width in widths], codes(HIDDEN, whole)

    def added_up() -> None:
        total: Tensor | None = None
        for dy, wt in zip(gradients, columns, strict=True):
            total = product(dy, wt, "split", added=total)

    yield "dgrad", {"apart": added_up, "one": lambda: product(gradient, column, "split")}
    rows, row = [codes(width, TOKENS, E5M2) for width in widths], codes(whole, TOKENS, E5M2)
    yield (
        "wgrad",
        {
            "apart": lambda: [product(dyt, xt, "split") for dyt in rows],
            "one": lambda: product(row, xt, "split"),
        },
    )


def microseconds(variants: Variants) -> dict[str, float]:
    """Of one call of each; variants take turns, so that none has the cooler device."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(TURNS + 1):
        for name, call in variants.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(CALLS):
                call()
            end.record()
            end.synchronize()
            if turn:  # the first one chooses algorithms
                times[name].append(start.elapsed_time(end) * 1e3 / CALLS)
    return {name: statistics.median(each) for name, each in times.items()}


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("epilogue", "shared"), help="one of the two")
    add_out(parser)
    arguments = parser.parse_args(given)
    if not torch.cuda.is_available() or native.missing(cuda=True):
        print(f"cuBLASLt is needed: {native.missing(cuda=True) or 'there is no GPU'}", file=sys.stderr)
        return 2
    rows = Rows(arguments.out)
    describe_device(rows)
    for what, cases in (("epilogue", FEED_FORWARDS), ("shared", SHARED)):
        for name, sizes in cases.items() if arguments.only in (None, what) else ():
            for part, variants in epilogues(*sizes) if what == "epilogue" else shared(sizes):
                rows.write(what=what, name=name, part=part, **microseconds(variants))
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
