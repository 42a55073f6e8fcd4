"""``te::mask_tiles``: a boolean mask as kernels of attention read it, in bits, with the tiles that are worth a visit.

A mask says of each pair of query and key whether the one sees the other. Most say so in large pieces: what is later,
what is padding, what is another document. So the kernels walk over tiles of 128 queries × 128 keys forward, of 64 × 128
backward. They skip those in which nothing is seen, read no bit of those in which everything is, and mask the others
by bits, a sixteenth of what is read of a mask in bytes for each of two directions:

    rows           a word for 32 keys of a query        bit k % 32 of word k // 32
    columns        a word for 32 queries of a key       bit q % 32 of word q // 32

Of each list of tiles the first number says how many follow; a tile t is 2 t where all of it is seen, else 2 t + 1;
what lies behind is 0. A list is never empty: where nothing is seen at all it has tile 0, whose bits say so. Lists of
keys are in falling order, for causal attention ends with the tile that is cut, and lists of queries in rising order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.library import define

KEYS = 128
"""Of a tile."""
QUERIES = 128
"""Of a tile of the forward pass."""
STEP = 64
"""Queries of a tile of the backward pass."""
_WORD = 32
_NOTHING, _SOMETHING, _ALL = range(3)


def tiles_of(length: Any, size: int) -> Any:
    """How many tiles of so many positions there are; of a symbolic length, too."""
    return (length + (size - 1)) // size


def _padded(x: Tensor, size: int, value: bool) -> Tensor:
    """``x`` with ``value`` up to a multiple of ``size`` in its last dimension."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size), value=value)


def _packed(seen: Tensor) -> Tensor:
    """The last dimension, a multiple of 32, in words."""
    bits = seen.unflatten(-1, (-1, _WORD)).long() << torch.arange(_WORD, device=seen.device)
    words = bits.sum(-1)
    return words.where(words < 2**31, words - 2**32).to(torch.int32)


def unpacked(words: Tensor, count: int) -> Tensor:
    """The first ``count`` bits of the words of the last dimension, as booleans in their place."""
    bits = words.unsqueeze(-1) >> torch.arange(_WORD, device=words.device, dtype=torch.int32)
    return (bits & 1).bool().flatten(-2)[..., :count]


def _listed(kind: Tensor, falling: bool) -> Tensor:
    """int32 [..., n + 1]: the lists of tiles of these kinds [..., n]."""
    count = kind.shape[-1]
    tile = torch.arange(count, device=kind.device, dtype=torch.int32)
    seen = kind != _NOTHING
    # Those that are seen first, in their order: by a key that puts the others behind.
    order = (tile.flip(0) if falling else tile) + count * (~seen).int()
    places = order.argsort(-1)
    entries = 2 * tile.expand_as(kind) + (kind != _ALL).int()
    number = seen.sum(-1, keepdim=True, dtype=torch.int32)
    entries = entries.gather(-1, places).where(tile < number, 0)
    nowhere = number == 0
    entries[..., :1] = entries[..., :1].where(~nowhere, 1)
    return torch.cat([number.clamp(min=1), entries], -1)


def _kinds(mask: Tensor, queries: int) -> Tensor:
    """[M, tiles of queries, tiles of keys]: keys beyond the last are seen by nobody, queries beyond it do not count."""

    def in_tiles(beyond: bool) -> Tensor:
        whole_keys = _padded(mask, KEYS, False)
        padded = _padded(whole_keys.mT, queries, beyond).mT
        return padded.unflatten(2, (-1, KEYS)).unflatten(1, (-1, queries))

    some, whole = in_tiles(False).any(4).any(2), in_tiles(True).all(4).all(2)
    return some.int() + (some & whole).int()


@registry.register("mask_tiles", registry.REFERENCE)
def mask_tiles_reference(mask: Tensor, both: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the module. mask: bool [M, Sq, Sk], True where a query sees a key, any strides, at least one of each.

    both: also for a backward pass. Returns, all int32 and contiguous,
        rows: [M, Sq, 4 · ⌈Sk / 128⌉]; row_tiles: [M, ⌈Sq / 128⌉, ⌈Sk / 128⌉ + 1];
        columns: [M, Sk, 2 · ⌈Sq / 64⌉]; column_tiles: [M, ⌈Sk / 128⌉, ⌈Sq / 64⌉ + 1]; without ``both`` M = 0 of them.
    """
    rows, row_tiles = _packed(_padded(mask, KEYS, False)), _listed(_kinds(mask, QUERIES), falling=True)
    across = mask.mT if both else mask[:0].mT
    columns = _packed(_padded(across, STEP, False))
    column_tiles = _listed(_kinds(across.mT, STEP).mT, falling=False)
    return rows, row_tiles, columns, column_tiles


def _mask_tiles(
    mask: Tensor, both: bool, implementation: str = registry.REFERENCE
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return registry.function_of("mask_tiles", implementation)(mask, both)


def sizes_of(mask: Tensor, both: bool) -> list[tuple[Any, ...]]:
    """The sizes of all results."""
    batch, queries, keys = mask.shape
    tiles, steps, other = tiles_of(keys, KEYS), tiles_of(queries, STEP), batch if both else 0
    return [
        (batch, queries, KEYS // _WORD * tiles),
        (batch, tiles_of(queries, QUERIES), tiles + 1),
        (other, keys, STEP // _WORD * steps),
        (other, tiles, steps + 1),
    ]


def _fake(mask: Tensor, both: bool, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return tuple(mask.new_empty(size, dtype=torch.int32) for size in sizes_of(mask, both))


MASK_TILES = define(
    "mask_tiles(Tensor mask, bool both, "
    'str implementation="reference") -> (Tensor rows, Tensor row_tiles, Tensor columns, Tensor column_tiles)',
    _mask_tiles,
    _fake,
)
