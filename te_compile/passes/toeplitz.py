"""Convolutions in groups along one dimension, and their gradients, as products of matrices.

    y[b, o, l] = Σ w[o, c, k] · x[b, c, l + k - P]                    over the channels c of o's group, and K taps k

S positions at a time read the same S + K - 1 of x, here up to a multiple of eight, U:

    windows of x [B · L / S, C · U]   ·   a matrix [C · U, O · S] of w[o, c, u - s], and 0 outside        for each group

It has the S diagonals of a Toeplitz matrix for every pair of channels, so the product multiplies U / K times as much as
the convolution. The gradient of x is a convolution itself, of dy with the taps in reverse; that of w has the S
diagonals of a product of x with the same windows of dy, which are summed.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST = 8
"""Positions of one product: fewer make narrow matrices."""


def positions_of(places: int, channels: int, taps: int) -> int:
    """S for ``places`` = B · L, ``channels`` of one group, and K ``taps``: the power of two by which windows and matrix
    are about as large, but for the waste that many positions are where taps are few."""
    even = math.isqrt(max(places // channels, 1))
    most = max(_LEAST, taps // 4)
    size = _LEAST
    while 2 * size <= min(even, most):
        size *= 2
    return size


def convolution(x: Tensor, weight: Tensor, padding: int, groups: int, size: int) -> Tensor:
    """The convolution with a stride of 1.

    x: [B, G · C, L]; weight: [G · O, C, K]; padding: P, 0 to K - 1; size: S.
    Returns [B, G · O, L + 2 P - K + 1].
    """
    taps = weight.shape[2]
    length = x.shape[2] + 2 * padding - taps + 1
    left = _windows(x, padding, length, taps, groups, size)
    return _positions(left @ _toeplitz(weight, groups, size).mT, x.shape[0], size)[..., :length]


def input_gradient(dy: Tensor, weight: Tensor, padding: int, groups: int, size: int) -> Tensor:
    """The gradient of x [B, G · C, L] for that of the result, dy [B, G · O, L + 2 P - K + 1]."""
    reverse = weight.flip(2).unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return convolution(dy, reverse, weight.shape[2] - 1 - padding, groups, size)


def weight_gradient(dy: Tensor, x: Tensor, taps: int, padding: int, groups: int, size: int) -> Tensor:
    """The gradient of the weight [G · O, C, K]. Its ``size`` terms are rounded as products are, and their sum is.

    The windows are those of :func:`input_gradient`.
    """
    windows = _windows(dy, taps - 1 - padding, x.shape[2], taps, groups, size)
    diagonals = _blocks(x, groups, size).mT @ windows
    pairs = diagonals.view(groups, -1, size, dy.shape[1] // groups, _reach(taps, size))  # [G, C, S, O, U]
    total = pairs[:, :, 0, :, :taps].float()
    for place in range(1, size):
        total = total + pairs[:, :, place, :, place : place + taps].float()
    return total.to(dy.dtype).flip(3).transpose(1, 2).flatten(0, 1)


def _reach(taps: int, size: int) -> int:
    """U: how many positions ``size`` of them read, rounded up such that rows begin at multiples of 16 bytes."""
    return (size + taps - 1 + 7) // 8 * 8


def _number(length: int, size: int) -> int:
    """How many products ``length`` positions are."""
    return (length + size - 1) // size


def _windows(x: Tensor, padding: int, length: int, taps: int, groups: int, size: int) -> Tensor:
    """What each ``size`` of ``length`` positions read of ``x``, with zeros at its ends: [G, B · N, C · U]."""
    reach = _reach(taps, size)
    behind = (_number(length, size) - 1) * size + reach - padding - x.shape[2]
    windows = F.pad(x, (padding, behind)).unfold(2, reach, size)  # [B, G · C, N, U]
    apart = windows.unflatten(1, (groups, -1)).permute(1, 0, 3, 2, 4)
    return _copied(apart).flatten(3).flatten(1, 2)


def _blocks(x: Tensor, groups: int, size: int) -> Tensor:
    """``size`` positions of ``x`` at a time: [G, B · N, C · S]."""
    length = x.shape[2]
    number = _number(length, size)
    blocks = F.pad(x, (0, number * size - length)).unflatten(2, (number, size)).unflatten(1, (groups, -1))
    return _copied(blocks.permute(1, 0, 3, 2, 4)).flatten(3).flatten(1, 2)


def _toeplitz(weight: Tensor, groups: int, size: int) -> Tensor:
    """[G, O · S, C · U], where w[o, c, u - s] or 0 is at [o · S + s, c · U + u]."""
    reach = _reach(weight.shape[2], size)
    # Rows of U + 1 numbers one behind the other, read in rows of U: each is one place further to the right.
    rows = F.pad(weight, (0, reach + 1 - weight.shape[2])).unsqueeze(2).expand(-1, -1, size, -1).flatten(2)
    shifted = rows[..., : size * reach].unflatten(2, (size, reach))  # [G · O, C, S, U]
    return shifted.transpose(1, 2).flatten(2).unflatten(0, (groups, -1)).flatten(1, 2)


def _positions(products: Tensor, batch: int, size: int) -> Tensor:
    """[G, B · N, O · S] as [B, G · O, N · S]."""
    apart = products.unflatten(2, (-1, size)).unflatten(1, (batch, -1))  # [G, B, N, O, S]
    return _copied(apart.permute(1, 0, 3, 2, 4)).flatten(3).flatten(1, 2)


def _copied(x: Tensor) -> Tensor:
    """``x`` in memory of its own, whether a view would do or not: of which sizes it would do is nobody's business."""
    return x.clone(memory_format=torch.contiguous_format)
