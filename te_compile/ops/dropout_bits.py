"""``te::dropout_bits``: which attention weights a dropout keeps, one bit for each pair of query and key.

Bits come in words of 32, [B · H, W, Sq] int32 with W = 2 · ⌈Sk / 64⌉ words for the keys of a query, and lie as kernels
want them (kernels/dropout_bits.py): key 64 b + 8 j + 2 l + e, with j < 8, l < 4 and e < 2, has

    word 2 b + l // 2        bit 16 · (l % 2) + 8 e + j

Each is on with the probability ``kept_share(p)`` / 2¹⁶, that of keeping rounded to so many binary places that neither
it nor that of dropping is off by more than 0.2%, sixteen at most: twelve for one in ten. All are drawn by Philox4x32
with seven rounds, which passes every test of BigCrush (Salmon et al. 2011), from a seed and a counter: the number of
the word and of the call. A call gives four words of random bits; four calls give one for each binary place of the
share, and from the last place to the first ``kept = kept | random`` where it is 1 and ``kept & random`` where it is 0
leaves each bit on with just that probability. Calls for last places that are all 0 change nothing, and kernels leave
them out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.library import define

PLACES = 16  # binary places of a probability
ROUNDS = 7
COLUMNS = 64  # keys of two words
_CLOSE = 1 / 512  # how far a probability may be rounded, of itself
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF


def kept_share(probability: float) -> int:
    """Of 2¹⁶ weights those that a dropout of this probability keeps: 0 and 2¹⁶ are no dropout for these kernels.

    A multiple of 2⁴, 2⁸ or 2¹² where that is close enough, for a call gives four places.
    """
    kept = 1.0 - probability
    for places in range(4, PLACES, 4):
        share = round(kept * 2**places) << PLACES - places
        if abs(share / 2**PLACES - kept) <= _CLOSE * min(probability, kept):
            return share
    return nearest_share(probability)


def nearest_share(probability: float) -> int:
    """The same with all places, whatever the probability: it is off by 2⁻¹⁷ at the most."""
    return 2**PLACES - round(probability * 2**PLACES)


def growth_of(probability: float) -> float:
    """What a weight that is kept is multiplied by; 1 without a dropout."""
    return 2**PLACES / kept_share(probability) if probability else 1.0


def words_of(keys: int) -> int:
    """How many words the keys of a query take."""
    return 2 * -(-keys // COLUMNS)


def _product(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of x · multiplier, of words in int64."""
    upper = x * (multiplier >> 16)
    lower = x * (multiplier & 0xFFFF)
    return (upper + (lower >> 16)) >> 16, (x * multiplier) & _WORD


def philox(seed: Tensor, counter: list[Tensor]) -> list[Tensor]:
    """Four random words of each counter of four words, all int64."""
    keys = [seed & _WORD, (seed >> 32) & _WORD]
    first, second, third, fourth = counter
    for _ in range(ROUNDS):
        high, low = _product(first, MULTIPLIERS[0])
        other_high, other_low = _product(third, MULTIPLIERS[1])
        first, second = other_high ^ second ^ keys[0], other_low
        third, fourth = high ^ fourth ^ keys[1], low
        keys = [(key + weyl) & _WORD for key, weyl in zip(keys, WEYL, strict=True)]
    return [first, second, third, fourth]


def drawn(seed: Tensor, count: int, share: int) -> Tensor:
    """So many words of bits, int64 [count], of which ``share`` of 2¹⁶ are on."""
    word = torch.arange(count, device=seed.device)
    none = torch.zeros_like(word)
    kept = none
    for place in range(PLACES):
        if place % 4 == 0:
            random = philox(seed, [word & _WORD, none + place // 4, word >> 32, none])
        kept = (kept | random[place % 4]) if share >> place & 1 else (kept & random[place % 4])
    return kept


@registry.register("dropout_bits", registry.REFERENCE)
def dropout_bits_reference(
    seed: Tensor, heads: int, queries: int, keys: int, probability: float, causal: bool = False
) -> Tensor:
    """See the module. seed: int64 [1]; heads: B · H; probability: of dropping; causal: bits of keys that come after
    their query may be anything. Returns int32 [heads, W, queries]."""
    shape = heads, words_of(keys), queries
    kept = drawn(seed, math.prod(shape), kept_share(probability))
    return kept.where(kept < 2**31, kept - 2**32).to(torch.int32).view(shape)


def unpacked(bits: Tensor, keys: int) -> Tensor:
    """The bits one by one: bool [heads, queries, keys]."""
    key = torch.arange(keys, device=bits.device)
    pair = key % 8 // 2
    word, bit = key // COLUMNS * 2 + pair // 2, 16 * (pair % 2) + 8 * (key % 2) + key % COLUMNS // 8
    return ((bits[:, word] >> bit[None, :, None].to(torch.int32)) & 1).bool().transpose(1, 2)


def _dropout_bits(
    seed: Tensor,
    heads: int,
    queries: int,
    keys: int,
    probability: float,
    causal: bool,
    implementation: str = registry.REFERENCE,
) -> Tensor:
    return registry.function_of("dropout_bits", implementation)(seed, heads, queries, keys, probability, causal)


def _dropout_bits_fake(seed: Tensor, heads: int, queries: int, keys: int, *_: Any, **__: Any) -> Tensor:
    return seed.new_empty((heads, words_of(keys), queries), dtype=torch.int32)


DROPOUT_BITS = define(
    "dropout_bits(Tensor seed, SymInt heads, SymInt queries, SymInt keys, float probability, bool causal, "
    'str implementation="reference") -> Tensor',
    _dropout_bits,
    _dropout_bits_fake,
)
