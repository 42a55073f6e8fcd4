"""Drawing and reading the bits of a dropout: see ops/dropout_bits.py for what they are and where they lie.

Bits lie where the threads want them. In the accumulators of Hopper's products a thread holds columns 2 l and 2 l + 1 of
every eight, so the bits of all that a thread holds of a row are in half a word, at places known when the kernel is
compiled, and the select takes one instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.launch import launch
from te_compile.ops.dropout_bits import MULTIPLIERS, PLACES, ROUNDS, WEYL, kept_share, words_of

_ROUNDS, _CALLS = tl.constexpr(ROUNDS), tl.constexpr(PLACES // 4)
_MULTIPLIERS, _WEYL = tl.constexpr(MULTIPLIERS), tl.constexpr(WEYL)
WORDS_A_PROGRAM = 512


@triton.jit
def _product(x, MULTIPLIER: tl.constexpr):
    """The high and the low word of x · MULTIPLIER, by one multiplication. ``tl.philox`` takes two, and that of the high
    word has the lower throughput; with these a word of bits is a fifth fewer instructions."""
    wide = x.to(tl.uint64) * MULTIPLIER
    return (wide >> 32).to(tl.uint32), wide.to(tl.uint32)


@triton.jit
def _philox(seed, first, second, third, fourth):
    """Four random words of each counter of four: ``philox`` in ops/dropout_bits.py."""
    key, other = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        high, low = _product(first, _MULTIPLIERS[0])
        other_high, other_low = _product(third, _MULTIPLIERS[1])
        first, second = other_high ^ second ^ key, other_low
        third, fourth = high ^ fourth ^ other, low
        key += _WEYL[0]
        other += _WEYL[1]
    return first, second, third, fourth


@triton.jit
def _kept(kept, random, SHARE: tl.constexpr, PLACE: tl.constexpr):
    """One more binary place of the share: a bit is on with probability (its place's digit + what it was before) / 2."""
    if (SHARE >> PLACE) & 1:
        return kept | random
    else:
        return kept & random


@triton.jit
def drawn(seed, word, SHARE: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of BLOCK words by their numbers, of which SHARE of 2¹⁶ are on; see ops/dropout_bits.py."""
    low, high = (word & 0xFFFFFFFF).to(tl.uint32), (word >> 32).to(tl.uint32)
    none = tl.zeros((BLOCK,), tl.uint32)
    kept = none
    for call in tl.static_range(_CALLS):
        if SHARE % (16 << 4 * call) != 0:  # else no bit is on yet, nor will be after these places
            one, two, three, four = _philox(seed, low, none + call, high, none)
            kept = _kept(kept, one, SHARE, 4 * call)
            kept = _kept(kept, two, SHARE, 4 * call + 1)
            kept = _kept(kept, three, SHARE, 4 * call + 2)
            kept = _kept(kept, four, SHARE, 4 * call + 3)
    return kept


@triton.jit
def _are_hidden(first, last, queries, count):
    """Are the words from the first to the last all of one row, and of keys that come after its queries?"""
    row = first // queries
    return (row == last // queries) & (last % queries < row % count // 2 * 64)


@triton.jit
def _draw_kernel(
    seed, bits, words, queries, count, SHARE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if CAUSAL:
        hidden = _are_hidden(first, first + BLOCK - 1, queries, count)
        if hidden:
            return
    word = first + tl.arange(0, BLOCK)
    kept = drawn(tl.load(seed), word, SHARE, BLOCK)
    tl.store(bits + word, kept.to(tl.int32, bitcast=True), mask=word < words)


def draw(seed: Tensor, heads: int, queries: int, keys: int, probability: float, causal: bool = False) -> Tensor:
    """See ``dropout_bits_reference`` in ops/dropout_bits.py."""
    count = words_of(keys)
    with on_device_of(seed):
        bits = buffers.empty(seed, (heads, count, queries), torch.int32)
        launch(
            _draw_kernel, triton.cdiv(bits.numel(), WORDS_A_PROGRAM), seed, bits, bits.numel(), queries, count,
            SHARE=kept_share(probability), CAUSAL=causal, BLOCK=WORDS_A_PROGRAM, num_warps=2,
        )  # fmt: skip
    return bits


@triton.jit
def _chosen():
    """[8, 1, 2]: the bit of each of eight columns' places in half a word, for pairs of columns."""
    return 1 << (tl.arange(0, 8)[:, None, None] + 8 * tl.arange(0, 2)[None, None, :])


@triton.jit
def keeps(bits, tile_m, tile_n, queries, keys, M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr):
    """Which weights of a tile of M queries and N keys are kept: [M, N]."""
    m, word = tile_m + tl.arange(0, M), tile_n // 32 + tl.arange(0, N // 32)
    at = bits + word[None, :] * queries + m[:, None]
    if EVEN:
        words = tl.load(at)
    else:  # a tile of 128 keys may have words that no key has
        words = tl.load(at, mask=(m < queries)[:, None] & (word // 2 * 64 < keys)[None, :], other=0)
    halves = tl.reshape(words, (M, N // 64, 2, 1)) >> (16 * tl.arange(0, 2))[None, None, None, :]
    return tl.reshape((tl.reshape(halves, (M, N // 64, 1, 4, 1)) & _chosen()[None, None, :, :, :]) != 0, (M, N))


@triton.jit
def keeps_across(bits, tile_m, tile_n, queries, keys, M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr):
    """The same with a row for each key: [N, M]."""
    m, word = tile_m + tl.arange(0, M), tile_n // 32 + tl.arange(0, N // 32)
    at = bits + word[:, None] * queries + m[None, :]
    if EVEN:
        words = tl.load(at)
    else:
        words = tl.load(at, mask=(m < queries)[None, :] & (word // 2 * 64 < keys)[:, None], other=0)
    halves = tl.reshape(words, (N // 64, 2, 1, M)) >> (16 * tl.arange(0, 2))[None, None, :, None]
    return tl.reshape((tl.reshape(halves, (N // 64, 1, 4, 1, M)) & _chosen()[None, :, :, :, None]) != 0, (N, M))
