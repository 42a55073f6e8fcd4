"""Masks in bits, and the tiles that are worth a visit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.ops.mask_tiles import KEYS, MASK_TILES, QUERIES, STEP, mask_tiles_reference, unpacked
from tests.masks import KINDS, drawn_mask


def listed(lists: Tensor) -> list[int]:
    """The entries of one list."""
    return lists[1 : 1 + int(lists[0])].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (130, 300), (1, 5), (64, 128), (389, 65)])
def test_bits_and_lists_say_what_the_mask_says(kind: str, queries: int, keys: int) -> None:
    mask = drawn_mask(kind, 2, queries, keys, "cpu")
    rows, row_tiles, columns, column_tiles = mask_tiles_reference(mask, both=True)
    assert torch.equal(unpacked(rows, keys), mask) and torch.equal(unpacked(columns, queries).mT, mask)
    for lists, across, size in ((row_tiles, mask, QUERIES), (column_tiles, mask, STEP)):
        by_keys = lists is column_tiles
        for batch in range(mask.shape[0]):
            for place in range(lists.shape[1]):
                found = dict.fromkeys(range(lists.shape[2] - 1), 0)
                for other in found:
                    first, second = (other, place) if by_keys else (place, other)
                    tile = across[batch, first * size : (first + 1) * size, second * KEYS : (second + 1) * KEYS]
                    is_whole = bool(tile.all()) and tile.shape[1] == KEYS
                    found[other] = 2 if is_whole else int(tile.any())
                order = sorted(found, reverse=not by_keys)
                wanted = [2 * tile + (found[tile] == 1) for tile in order if found[tile]] or [1]
                assert listed(lists[batch, place]) == wanted
                assert not lists[batch, place, 1 + len(wanted) :].any()


def test_without_a_backward_pass_nothing_is_made_for_it() -> None:
    mask = drawn_mask("random", 3, 70, 90, "cpu")
    whole, rows_alone = (MASK_TILES(mask, both) for both in (True, False))
    assert all(map(torch.equal, whole[:2], rows_alone[:2]))
    assert [each.numel() for each in rows_alone[2:]] == [0, 0]


@pytest.mark.parametrize("both", [True, False])
def test_fake_results_have_the_shapes_of_real_ones(both: bool) -> None:
    for size in ((2, 129, 300), (1, 1, 1)):
        mask = torch.ones(size, dtype=torch.bool)
        fake = MASK_TILES(mask.to("meta"), both)
        for one, other in zip(MASK_TILES(mask, both), fake, strict=True):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
