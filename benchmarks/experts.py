"""The products of experts, each on the tokens that were sent to it: the project's kernels beside PyTorch's in 16 bits.

    python -m benchmarks.experts
    python -m benchmarks.experts --shapes mixtral_up,gpt_oss_up --parts wgrad

One JSON line a row, of a linear of the experts of a real model, forward (fast accumulation), dgrad and wgrad (split).
``bf16`` is ``torch._grouped_mm``; ``triton`` and ``cuda`` are the implementations of te::grouped_gemm and
te::grouped_wgrad, which multiply the same codes. How the tokens are spread over the experts is drawn anew. Each
implementation's result is held against the reference in the same run; the exit status is 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import DEVICE, Rows, Runnable, Variant, add_out, attempt, chosen, describe_device, median_ms
from te_compile.ops import registry
from te_compile.ops.grouped_gemm import grouped_gemm_reference, grouped_wgrad_reference
from te_compile.ops.registry import Target

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PARTS = {"forward": "fast", "dgrad": "split", "wgrad": "split"}
CLOSE = 0.02
"""How far a result may lie from the reference, relative to its norm."""


@dataclass(frozen=True)
class Shape:
    """``experts`` linears, and so many rows for all of them: tokens times the experts of each."""

    experts: int
    rows: int
    features_in: int
    features_out: int


SHAPES = {
    "mixtral_up": Shape(8, 16384, 4096, 28672),
    "mixtral_down": Shape(8, 16384, 14336, 4096),
    "gpt_oss_up": Shape(32, 16384, 2880, 5760),
    "gpt_oss_down": Shape(32, 16384, 2880, 2880),
    "qwen3_moe_up": Shape(128, 32768, 2048, 1536),
    "qwen3_moe_down": Shape(128, 32768, 768, 2048),
}
TINY = {"tiny": Shape(3, 80, 32, 48)}


def drawn_ends(shape: Shape) -> Tensor:
    """Where each expert's rows end; the busiest has some four times as many as the idlest."""
    shares = 0.3 + torch.rand(shape.experts)
    experts = torch.multinomial(shares / shares.sum(), shape.rows, replacement=True)
    return experts.bincount(minlength=shape.experts).cumsum(0).to(DEVICE, torch.int32)


def drawn(*size: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers, rounded."""
    return torch.randn(size, device=DEVICE, dtype=torch.bfloat16).to(dtype)


@dataclass(frozen=True)
class Product:
    """One part of a linear: what the operator gets but for its codes, and what PyTorch's product gets."""

    part: str
    shape: Shape
    ends: Tensor

    @property
    def operator(self) -> str:
        """The one that makes it."""
        return "grouped_wgrad" if self.part == "wgrad" else "grouped_gemm"

    @property
    def flops(self) -> float:
        """Two per multiply-add, whoever gets the rows."""
        return 2.0 * self.shape.rows * self.shape.features_in * self.shape.features_out

    def codes(self) -> tuple[Tensor, Tensor]:
        """Both operands in FP8, along the contraction; dy is E5M2, and dgrad reads weights as their transposed copy."""
        of = self.shape
        if self.part == "forward":
            return drawn(of.rows, of.features_in, dtype=E4M3), drawn(
                of.experts, of.features_out, of.features_in, dtype=E4M3
            )
        if self.part == "dgrad":
            turned = drawn(of.features_in, of.experts, of.features_out, dtype=E4M3).transpose(0, 1)
            return drawn(of.rows, of.features_out, dtype=E5M2), turned
        return drawn(of.features_out, of.rows, dtype=E5M2), drawn(of.features_in, of.rows, dtype=E4M3)

    def in_16_bits(self) -> Callable[[], Tensor]:
        """The same by PyTorch, whose operands are made here."""
        of = self.shape
        half = partial(drawn, dtype=torch.bfloat16)
        if self.part == "wgrad":
            dy, x = half(of.rows, of.features_out), half(of.rows, of.features_in)
            return lambda: torch._grouped_mm(dy.t(), x, offs=self.ends)
        weight = half(of.experts, of.features_out, of.features_in)
        if self.part == "forward":
            x = half(of.rows, of.features_in)
            return lambda: torch._grouped_mm(x, weight.mT, offs=self.ends)
        dy = half(of.rows, of.features_out)
        return lambda: torch._grouped_mm(dy, weight, offs=self.ends)


def reference(product: Product, *operands: Any) -> Tensor:
    """What te::grouped_gemm or te::grouped_wgrad is defined to give."""
    function = grouped_wgrad_reference if product.part == "wgrad" else grouped_gemm_reference
    return function(*operands)


def implementations(product: Product, arguments: dict[str, Any]) -> Iterator[registry.Implementation]:
    """Those that can run it here; the reference where there is no GPU."""
    for entry in registry.implementations(product.operator):
        if entry.name == registry.REFERENCE and DEVICE.type == "cuda":
            continue
        try:
            entry.check(Target.of(DEVICE), arguments)
        except registry.Unsupported:
            continue
        yield entry


def variants(product: Product) -> Iterator[Variant]:
    """PyTorch's and the project's, each on operands of its own."""
    yield Variant("bf16", lambda: Runnable(product.in_16_bits(), nn.Identity()))
    one = torch.ones((), device=DEVICE)
    a, b = product.codes()
    names = ("a", "b", "a_scale_inv", "b_scale_inv", "ends", "out_dtype", "accumulation")
    given = (a, b, one, one, product.ends, torch.bfloat16, PARTS[product.part])
    for entry in implementations(product, dict(zip(names, given, strict=True))):
        call = partial(entry.function, *given)
        yield Variant(entry.name, lambda call=call: Runnable(call, nn.Identity()), ours=True)


def row_of(product: Product, iterations: int, variant: Variant) -> dict[str, Any]:
    """The columns of one row."""
    call = variant.build().call
    row: dict[str, Any] = {"ms": median_ms(call, iterations, 3)}
    row["pflops"] = product.flops / row["ms"] / 1e12
    if variant.ours:
        assert isinstance(call, partial)  # of the operands
        got, wanted = call(), reference(product, *call.args)
        error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
        row["error"] = error
        if not error <= CLOSE:
            row["wrong"] = f"{product.part}: {error:.3g} from the reference"
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = TINY if DEVICE.type == "cpu" else SHAPES
    parser.add_argument("--shapes", default=",".join(shapes), help="(%(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="(%(default)s)")
    parser.add_argument("--only", default="", help="comma-separated variants; all when empty")
    parser.add_argument("--iters", type=int, default=2 if DEVICE.type == "cpu" else 20)
    add_out(parser)
    given = parser.parse_args(arguments)
    rows = Rows(given.out)
    describe_device(rows)
    for name in given.shapes.split(","):
        for part in given.parts.split(","):
            product = Product(part, shapes[name], drawn_ends(shapes[name]))
            described = {"what": "experts", "shape": name, "part": part}
            for variant in chosen(variants(product), given.only):
                attempt(variant, rows, described, partial(row_of, product, given.iters))
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
