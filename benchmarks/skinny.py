"""The products of a decoding step, of few rows: by PyTorch in 16 bits, by cuBLASLt and by the project's kernel in FP8.

    python -m benchmarks.skinny
    python -m benchmarks.skinny --shapes llama8b --rows 8 --only cublaslt,joined

One JSON line a row, in microseconds: all products of one decoder layer, as a CUDA graph replays them, which is how a
step that is worth it runs. Every turn has weights of its own, so that they come from memory and not from the cache.
``apart`` has one launch for each product, ``joined`` one for those that read one input, as passes/join_products.py
has it; ``share`` is what reading the weights would take at the speed of a plain copy, 4.26 TB/s on an H200, of the
time. Each result is held against the reference; the exit status is 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_timing import TURNS, replayed
from benchmarks.measure import DEVICE, Rows, add_out, describe_device, known, median_ms
from te_compile.ops import registry
from te_compile.ops.gemm import gemm_reference
from te_compile.ops.gemms import gemms_reference

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
COPY_BYTES_PER_MICROSECOND = 4.26e6
CLOSE = 0.005
"""How far a result may lie from the reference, relative to its norm."""
Products = tuple[tuple[int, tuple[int, ...]], ...]
"""The length of an input, and the features of the linears that read it, for each input of a layer."""

SHAPES: dict[str, Products] = {
    "llama8b": ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,))),
    "qwen3_32b": ((5120, (8192, 1024, 1024)), (8192, (5120,)), (5120, (25600, 25600)), (25600, (5120,))),
    "gpt2xl": ((1600, (1600, 1600, 1600)), (1600, (1600,)), (1600, (6400,)), (6400, (1600,))),
}
TINY: dict[str, Products] = {"tiny": ((64, (64, 16, 16)), (64, (64,)))}
VARIANTS = ("bf16", "cublaslt", "apart", "joined")


@dataclass(frozen=True)
class Layer:
    """One turn's operands: of each input its rows, and the weights that read them, in FP8 and in 16 bits."""

    inputs: list[Tensor]
    weights: list[list[Tensor]]

    @classmethod
    def drawn(cls, products: Products, rows: int, dtype: torch.dtype) -> Layer:
        """Normal numbers, rounded."""

        def numbers(*size: int) -> Tensor:
            return torch.randn(size, device=DEVICE, dtype=BF16).to(dtype)

        inputs = [numbers(rows, length) for length, _ in products]
        return cls(inputs, [[numbers(width, length) for width in widths] for length, widths in products])

    @property
    def bytes(self) -> int:
        """Of its weights."""
        return sum(weight.nbytes for of_one in self.weights for weight in of_one)


def one_by_one(layer: Layer, product: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Every product of ``layer`` by itself."""
    pairs = zip(layer.inputs, layer.weights, strict=True)
    return [product(x, weight) for x, of_one in pairs for weight in of_one]


def calls(one: Tensor) -> dict[str, Callable[[Layer], list[Tensor]]]:
    """What computes a layer's products, by variant, as far as it can run here."""
    on_gpu = DEVICE.type == "cuda"

    def by(name: str) -> Callable[[Layer], list[Tensor]]:
        function = registry.function_of("gemm", name) if on_gpu else gemm_reference
        return lambda layer: one_by_one(layer, lambda x, w: function(x, w, one, one, None, BF16, "fast"))

    several = registry.function_of("gemms", "cuda") if on_gpu else gemms_reference

    def joined(layer: Layer) -> list[Tensor]:
        made: list[Tensor] = []
        for x, of_one in zip(layer.inputs, layer.weights, strict=True):
            nothing = [None] * len(of_one)
            made += several(x, of_one, one, [one] * len(of_one), nothing, BF16, "fast")
        return made

    in_16_bits = torch.nn.functional.linear
    return {
        "bf16": lambda layer: one_by_one(layer, in_16_bits),
        "cublaslt": by("cublaslt"),
        "apart": by("cuda"),
        "joined": joined,
    }


def row_of(products: Products, rows: int, name: str) -> dict[str, Any]:
    """The columns of one row."""
    one = torch.ones((), device=DEVICE)
    dtype = BF16 if name == "bf16" else E4M3
    turns = TURNS if DEVICE.type == "cuda" else 1
    layers = [Layer.drawn(products, rows, dtype) for _ in range(turns)]
    call = calls(one)[name]
    wanted = one_by_one(layers[0], lambda x, w: x.float() @ w.float().t())
    pairs = zip(call(layers[0]), wanted, strict=True)
    error = max(float((got.float() - exact).norm() / exact.norm()) for got, exact in pairs)
    if DEVICE.type == "cuda":
        microseconds = 1e3 * replayed(lambda turn: call(layers[turn]))
    else:
        microseconds = 1e3 * median_ms(lambda: call(layers[0]), 2, 1)
    row = {"us": microseconds, "share": layers[0].bytes / COPY_BYTES_PER_MICROSECOND / microseconds, "error": error}
    return row if error <= CLOSE else {**row, "wrong": f"{error:.3g} from the reference"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = TINY if DEVICE.type == "cpu" else SHAPES
    parser.add_argument("--shapes", default=",".join(shapes), help="(%(default)s)")
    parser.add_argument("--rows", default="1,8,16", help="tokens, comma-separated, up to 16 (%(default)s)")
    parser.add_argument("--only", default=",".join(VARIANTS), help="(%(default)s)")
    add_out(parser)
    given = parser.parse_args(arguments)
    out = Rows(given.out)
    describe_device(out)
    for shape in known("--shapes", given.shapes, shapes):
        for rows in map(int, given.rows.split(",")):
            for name in known("--only", given.only, VARIANTS):
                row = row_of(shapes[shape], rows, name)
                out.write(what="skinny", shape=shape, rows=rows, name=name, **row)
                if "wrong" in row:
                    out.fail(f"{shape} {rows} {name}", row["wrong"])
    return out.exit_status()


if __name__ == "__main__":
    sys.exit(main())
