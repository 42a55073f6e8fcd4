"""The gradient of a table of few rows, added up as Inductor does it and as a product: what ``sum_few_rows`` chooses by.

    python -m benchmarks.few_rows                          tables of 2 to 1024 rows, bf16
    python -m benchmarks.few_rows --shape 2,20480,768
    python -m benchmarks.few_rows --shape 32,262144,12 --across

A shape is R,N,D: rows of the table, places that look one up, and features; ``--across``: the gradient [N, D] lies by
features, as that of a bias by heads does. Two rows are asked for by parts of sequences, others at random. One JSON line
a way: microseconds of the device in one call, compiled by torch.compile, and how far the result is from one in
float64; the exit status is 1 if that is more than 2⁻⁷ of the largest sum.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.measure import DEVICE, Rows, add_out, busy_microseconds, describe_device

WORKS = [
    ("2,512,768", False),
    ("2,8192,768", False),
    ("2,20480,768", False),
    ("4,8192,1024", False),
    ("16,8192,768", False),
    ("64,8192,768", False),
    ("256,8192,768", False),
    ("512,32768,768", False),
    ("1024,32768,1024", False),
    ("32,262144,8", False),
    ("32,262144,12", True),
    ("64,1048576,16", True),
    ("169,2401,6", True),
    ("732,38809,12", True),
]
MOST_OFF = 2.0**-7


def added_up(dy: Tensor, ids: Tensor, rows: int) -> Tensor:
    """As PyTorch decomposes the backward of an embedding."""
    zeros = torch.zeros(rows, dy.shape[1], device=dy.device, dtype=torch.float32)
    return zeros.index_put((ids,), dy.float(), accumulate=True).to(dy.dtype)


def product(dy: Tensor, ids: Tensor, rows: int) -> Tensor:
    """As ``sum_few_rows`` writes it."""
    return (ids[None] == torch.arange(rows, device=dy.device)[:, None]).to(dy.dtype) @ dy


WAYS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {"added up": added_up, "product": product}


def drawn(rows: int, places: int, features: int, across: bool) -> tuple[Tensor, Tensor]:
    """dy [N, D] in bf16 and ids [N]."""
    shape = (features, places) if across else (places, features)
    dy = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    parts = (torch.arange(places, device=DEVICE) % 512 > 400).long()
    return dy.t() if across else dy, parts if rows == 2 else torch.randint(rows, (places,), device=DEVICE)


def measure(shape: str, across: bool, out: Rows, calls: int) -> None:
    """The rows of one table."""
    rows, places, features = map(int, shape.split(","))
    dy, ids = drawn(rows, places, features, across)
    right = torch.zeros(rows, features, device=DEVICE, dtype=torch.float64)
    right.index_add_(0, ids, dy.double())
    for name, way in WAYS.items():
        torch._dynamo.reset()
        compiled = torch.compile(way, dynamic=False, backend="inductor" if DEVICE.type == "cuda" else "aot_eager")
        off = float((compiled(dy, ids, rows).double() - right).abs().max() / right.abs().max())
        us = busy_microseconds(lambda compiled=compiled: compiled(dy, ids, rows), calls)
        out.write(what="few rows", name=name, shape=shape, across=across, us=us, off=off)
        if not off < MOST_OFF:
            out.fail(name, f"{shape}: off by {off:.3f} of the largest sum, {MOST_OFF:.3f} allowed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny = DEVICE.type != "cuda"
    parser.add_argument("--shape", help="R,N,D; those of real models and beyond if left out")
    parser.add_argument("--across", action="store_true")
    parser.add_argument("--iters", type=int, default=2 if tiny else 10)
    add_out(parser)
    given = parser.parse_args(arguments)
    shape = given.shape or ("4,512,8" if tiny else "")
    rows = Rows(given.out)
    describe_device(rows)
    for size, across in [(shape, given.across)] if shape else WORKS:
        measure(size, across, rows, given.iters)
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
