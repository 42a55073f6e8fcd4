"""Rows of ``benchmarks.kernels`` for matrix products: the twelve of a layer's training step, by all who offer them.

Each linear multiplies three times: forward with fast accumulation, dgrad and wgrad with split. FP8 goes through the
project's cuBLASLt layer and through ``torch._scaled_mm``; bf16 stands beside them. All multiply the same codes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import kernels
from benchmarks.kernels import Row
from te_compile.kernels import native

TOKENS = 8192
LINEARS = {"qkv": (4096, 12288), "proj": (4096, 4096), "fc1": (4096, 16384), "fc2": (16384, 4096)}
PARTS = {"forward": "fast", "dgrad": "split", "wgrad": "split"}
CLOSE = 0.02
"""How far a result may lie from the same product in fp32, relative to its norm: fast accumulation keeps 14 bits."""


@dataclass(frozen=True)
class Product:
    """a [M, K] · b [N, K]ᵀ, one of a linear's three."""

    name: str
    part: str
    rows: int
    columns: int
    length: int

    @property
    def flops(self) -> float:
        """Two per multiply-add."""
        return 2.0 * self.rows * self.columns * self.length

    @property
    def shape(self) -> str:
        """M x N x K."""
        return f"{self.rows}x{self.columns}x{self.length}"

    @property
    def bytes(self) -> int:
        """FP8 operands read, a bf16 result written."""
        return self.rows * self.length + self.columns * self.length + 2 * self.rows * self.columns

    def operands(self) -> tuple[Tensor, Tensor]:
        """Random codes: dy, in backward, is E5M2."""
        a, b = (torch.randn(size, self.length, device=kernels.DEVICE) for size in (self.rows, self.columns))
        return a.to(kernels.E4M3 if self.part == "forward" else kernels.E5M2), b.to(kernels.E4M3)


def products() -> Iterator[Product]:
    """The three products of each linear."""
    for name, (features_in, features_out) in LINEARS.items():
        yield Product(name, "forward", TOKENS, features_out, features_in)
        yield Product(name, "dgrad", TOKENS, features_in, features_out)
        yield Product(name, "wgrad", features_out, features_in, TOKENS)


def close(got: Tensor, a: Tensor, b: Tensor) -> bool:
    """Is ``got`` the product of the codes ``a`` and ``b``, as far as the accumulator keeps bits?"""
    wanted = a.float() @ b.float().t()
    return bool((got.float() - wanted).norm() <= CLOSE * wanted.norm())


@functools.cache
def one() -> Tensor:
    """The scale of every operand; made once, for making it is a kernel too."""
    return torch.ones((), device=kernels.DEVICE)


def scaled_mm(a: Tensor, b: Tensor, accumulation: str) -> Tensor:
    """PyTorch's own FP8 product, which ends in cuBLASLt too."""
    fast = accumulation == "fast"
    return torch._scaled_mm(a, b.t(), one(), one(), out_dtype=torch.bfloat16, use_fast_accum=fast)


def cublaslt_product(a: Tensor, b: Tensor, accumulation: str) -> Tensor:
    """The project's cuBLASLt layer."""
    from te_compile.kernels import cublaslt

    return cublaslt.gemm(a, b, one(), one(), None, torch.bfloat16, accumulation)


def row_of(product: Product, by: str, multiply: Callable[[], Any], check: Callable[[Any], bool], kind: str = "") -> Row:
    """The row of one product by one of those who offer it."""
    name = f"product {product.name} {product.part}{kind}"
    size = product.bytes
    return Row(name, product.shape, size, lambda _, turn: multiply(), check, "", False, False, by, product.flops)


def rows() -> Iterator[Row]:
    """Every product in FP8, by us where the C++ core is built and by PyTorch, and in bf16."""
    ours = [] if native.missing(cuda=True) else [(kernels.OURS, cublaslt_product)]
    for product in products():
        a, b = product.operands()
        accumulation = PARTS[product.part]

        def check(got: Tensor, a=a, b=b) -> bool:
            return close(got, a, b)

        for by, multiply in (*ours, ("torch", scaled_mm)):
            yield row_of(product, by, partial(multiply, a, b, accumulation), check)
        high_a, high_b = a.bfloat16(), b.bfloat16()
        yield row_of(product, "torch", lambda a=high_a, b=high_b: a @ b.t(), check, kind=", bf16")
