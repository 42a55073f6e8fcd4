"""Drawing the mask of an ordinary dropout: see ops/dropout_masks.py for which bit belongs to which element.

A thread draws a word, whose bits become the bytes of 32 elements: four at a time are spread over the bytes of an int32
by one multiplication. Elements of one word are 16 here and 16 there, for if the 32 lay side by side, two threads would
have to share a word for stores of 16 bytes beside each other, and Triton would have both of them draw it. Some of its
versions do so as well where the four int32 of a store are one expression, of a word and a number from 0 to 3, and take
35 µs for 8192 × 4096 elements on an H200. So they are four expressions, joined: 10 µs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.dropout_bits import drawn
from te_compile.kernels.launch import launch
from te_compile.ops.dropout_bits import nearest_share
from te_compile.ops.dropout_masks import GROUP, LANES, PIECE

_GROUP, _LANES, _PIECE = tl.constexpr(GROUP), tl.constexpr(LANES), tl.constexpr(PIECE)
WORDS_A_PROGRAM = 256


@triton.jit
def _spread(bits):
    """The last four bits, one in each byte."""
    # Bit i goes to bits i, i + 7, i + 14 and i + 21, and all that is left of these is bit 8 i.
    return ((bits & 0xF) * 0x00204081) & 0x01010101


@triton.jit
def _mask_kernel(seed, mask, count, SHARE: tl.constexpr, IN_PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """mask: the bytes of ``count`` elements, which are a multiple of 16 if IN_PIECES."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    word = first + tl.arange(0, BLOCK)
    kept = drawn(tl.load(seed), word, SHARE, BLOCK)
    fours = mask.to(tl.pointer_type(tl.int32), bitcast=True)
    for half in tl.static_range(2):
        piece = word // _LANES * _GROUP + word % _LANES * _PIECE + half * (_GROUP // 2)
        at = piece[:, None] // 4 + tl.arange(0, 4)[None, :]
        bits = kept >> half * _PIECE
        first_and_third = tl.join(_spread(bits), _spread(bits >> 8))
        second_and_fourth = tl.join(_spread(bits >> 4), _spread(bits >> 12))
        spread = tl.reshape(tl.join(first_and_third, second_and_fourth), (BLOCK, 4))
        tl.store(fours + at, spread.to(tl.int32, bitcast=True), mask=(piece + _PIECE <= count)[:, None])
        if not IN_PIECES:  # noqa: SIM102 - this is known when it is compiled, and the next is not
            if (first + BLOCK) * (_GROUP // _LANES) > count:  # the last piece is in this program
                is_left = (piece + _PIECE > count)[:, None]
                tl.store(fours + at, spread.to(tl.int32, bitcast=True), mask=is_left & (4 * at + 4 <= count))
                for rest in tl.static_range(3):
                    is_last = (4 * at + 4 > count) & (4 * at + rest < count)
                    tl.store(mask + 4 * at + rest, ((spread >> (8 * rest)) & 1).to(tl.uint8), mask=is_last)


def draw_mask(seed: Tensor, size: Sequence[int], probability: float) -> Tensor:
    """See ``dropout_mask_reference`` in ops/dropout_masks.py."""
    count = math.prod(size)
    groups = triton.cdiv(count, GROUP)
    with on_device_of(seed):
        mask = buffers.empty(seed, size, torch.bool)
        launch(
            _mask_kernel, triton.cdiv(groups * LANES, WORDS_A_PROGRAM), seed, mask.view(torch.uint8), count,
            SHARE=nearest_share(probability), IN_PIECES=count % PIECE == 0, BLOCK=WORDS_A_PROGRAM, num_warps=4,
        )  # fmt: skip
    return mask
