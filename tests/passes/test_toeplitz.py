"""Convolutions as products: in float64 they are PyTorch's, whatever the sizes."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.passes import toeplitz

SIZES = [  # batch, length, groups, channels in and out of one, taps, padding, positions of a product
    (2, 37, 4, 3, 5, 13, 6, 8),
    (1, 16, 1, 1, 1, 1, 0, 8),
    (3, 50, 2, 4, 4, 128, 64, 8),  # more taps than places
    (2, 9, 2, 2, 3, 16, 15, 16),
    (1, 20, 3, 2, 2, 20, 0, 8),  # one position
    (2, 64, 2, 3, 2, 8, 7, 32),
]


def drawn(size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """x and the weight, in float64."""
    batch, length, groups, channels, outputs, taps, *_ = size
    shapes = (batch, groups * channels, length), (groups * outputs, channels, taps)
    x, weight = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return x, weight


def check(size: tuple[int, ...]) -> None:
    *_, taps, padding, positions = size
    groups = size[2]
    x, weight = (each.requires_grad_() for each in drawn(size))
    y = F.conv1d(x, weight, padding=padding, groups=groups)
    dy = torch.randn_like(y)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    x, weight = x.detach(), weight.detach()
    torch.testing.assert_close(toeplitz.convolution(x, weight, padding, groups, positions), y)
    torch.testing.assert_close(toeplitz.input_gradient(dy, weight, padding, groups, positions), dx)
    got = toeplitz.weight_gradient(dy, x, taps, padding, groups, positions)  # whose last sum is one in float32
    torch.testing.assert_close(got, dweight, rtol=1e-4, atol=1e-5 * float(dweight.abs().max()))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_they_are_what_pytorch_computes(size: tuple[int, ...]) -> None:
    check(size)


def test_of_any_size() -> None:
    for _ in range(30):
        taps = random.randint(1, 40)
        padding = random.randint(0, taps - 1)
        length = random.randint(max(1, taps - 2 * padding), 70)
        groups, channels, outputs = (random.randint(1, 4) for _ in range(3))
        check((random.randint(1, 3), length, groups, channels, outputs, taps, padding, random.choice((8, 16, 32))))


@pytest.mark.parametrize(
    ("places", "channels", "taps", "size"),
    [
        (8 * 499, 64, 128, 8),
        (8 * 3000, 64, 128, 16),  # windows would be larger than the matrix
        (64 * 3000, 64, 128, 32),
        (64 * 3000, 64, 19, 8),  # 32 positions of 19 taps would multiply with zeros most of the time
        (1, 64, 128, 8),
        (0, 16, 16, 8),
    ],
)
def test_how_many_positions_a_product_has(places: int, channels: int, taps: int, size: int) -> None:
    assert toeplitz.positions_of(places, channels, taps) == size
