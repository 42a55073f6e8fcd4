"""Convolutions in groups with long kernels, by cuDNN and as the products that ``long_convolutions`` writes.

    python -m benchmarks.long_convolutions                          those of models of speech, and around them; bf16
    python -m benchmarks.long_convolutions --shape 8,768,499,128,16

A shape is B,C,L,K,G: batch, channels, positions, taps and groups, with a padding of K / 2. One JSON line a direction
(forward, dgrad, wgrad) and way: microseconds of the device in one call, compiled by torch.compile, and the relative
error beside float64; the exit status is 1 if that of products is more than 2⁻⁸.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import DEVICE, Rows, add_out, busy_microseconds, describe_device
from te_compile.passes import toeplitz

WORKS = [
    "8,1024,499,128,16",  # wav2vec 2.0 large, ten seconds
    "8,768,499,128,16",  # base
    "8,1024,1499,128,16",
    "1,1024,499,128,16",
    "1,768,49,128,16",  # one second
    "8,768,499,19,16",  # data2vec
    "8,1024,499,19,16",
    "32,256,300,31,8",
    "8,256,1000,32,32",
    "8,512,1000,16,32",
    "8,1024,500,32,8",
    "8,1024,500,64,8",
    "8,512,1000,128,4",
    "8,256,1000,128,2",
    "8,512,1000,16,4",
    "8,512,1000,9,4",
]
MOST_OFF = 2.0**-8
Way = Callable[[], Tensor]


def drawn(batch: int, width: int, length: int, taps: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """dy, x and the weight, in bf16."""
    shapes = (batch, width, length + taps // 2 * 2 - taps + 1), (batch, width, length), (width, width // groups, taps)
    dy, x, weight = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes)
    return dy, x, weight


def directions_by_cudnn(dy: Tensor, x: Tensor, weight: Tensor, groups: int) -> dict[str, Way]:
    """As PyTorch calls it, in the dtype of the operands."""
    padding = weight.shape[2] // 2

    def backward(index: int) -> Tensor:
        mask = [index == 0, index == 1, False]
        options: tuple[Any, ...] = ([1], [padding], [1], False, [0], groups, mask)
        gradient: Tensor = torch.ops.aten.convolution_backward(dy, x, weight, None, *options)[index]
        return gradient

    return {
        "forward": lambda: F.conv1d(x, weight, padding=padding, groups=groups),
        "dgrad": lambda: backward(0),
        "wgrad": lambda: backward(1),
    }


def directions_by_products(dy: Tensor, x: Tensor, weight: Tensor, groups: int) -> dict[str, Way]:
    """As ``long_convolutions`` writes them."""
    taps = weight.shape[2]
    how = taps // 2, groups, toeplitz.positions_of(len(x) * x.shape[2], weight.shape[1], taps)
    return {
        "forward": lambda: toeplitz.convolution(x, weight, *how).contiguous(),
        "dgrad": lambda: toeplitz.input_gradient(dy, weight, *how).contiguous(),
        "wgrad": lambda: toeplitz.weight_gradient(dy, x, taps, *how).contiguous(),
    }


WAYS = {"convolution": directions_by_cudnn, "products": directions_by_products}


def measure(shape: str, out: Rows, calls: int) -> None:
    """The rows of one shape."""
    *sizes, groups = map(int, shape.split(","))
    dy, x, weight = drawn(*sizes, groups)
    exact = {n: way() for n, way in directions_by_cudnn(dy.double(), x.double(), weight.double(), groups).items()}
    for name, made in WAYS.items():
        for direction, way in made(dy, x, weight, groups).items():
            torch._dynamo.reset()
            fast = torch.compile(way, dynamic=False, backend="inductor" if DEVICE.type == "cuda" else "aot_eager")
            right = exact[direction]
            off = float((fast().double() - right).norm() / right.norm())
            us = busy_microseconds(fast, calls)
            out.write(what="long convolution", name=name, shape=shape, direction=direction, us=us, off=off)
            if name == "products" and not off < MOST_OFF:
                out.fail(name, f"{shape}, {direction}: off by {off:.4f}, {MOST_OFF:.4f} allowed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny = DEVICE.type != "cuda"
    parser.add_argument("--shape", help="B,C,L,K,G; those of models of speech and around them if left out")
    parser.add_argument("--iters", type=int, default=2 if tiny else 10)
    add_out(parser)
    given = parser.parse_args(arguments)
    shape = given.shape or ("2,32,40,16,2" if tiny else "")
    rows = Rows(given.out)
    describe_device(rows)
    for each in [shape] if shape else WORKS:
        measure(each, rows, given.iters)
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
