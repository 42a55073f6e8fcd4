"""Masks in bits and lists of tiles by Triton: every word of the reference."""

from __future__ import annotations

import pytest
import torch

from te_compile.kernels.mask_tiles import mask_tiles
from te_compile.ops.mask_tiles import mask_tiles_reference
from tests.masks import KINDS, drawn_mask


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (130, 300), (1, 5), (389, 65), (64, 700)])
def test_every_word_is_that_of_the_reference(queries: int, keys: int, kind: str, both: bool, device: str) -> None:
    mask = drawn_mask(kind, 2, queries, keys, device)
    for one, other in zip(mask_tiles(mask, both), mask_tiles_reference(mask, both), strict=True):
        assert one.dtype == torch.int32 and torch.equal(one, other)


def test_strides_may_be_any(device: str) -> None:
    mask = drawn_mask("random", 2, 90, 140, device)
    for laid_out in (mask.mT.contiguous().mT, mask.repeat(1, 1, 2)[:, :, ::2], mask[:1].expand(3, 90, 140)):
        wanted = mask_tiles_reference(laid_out.contiguous(), True)
        assert all(map(torch.equal, mask_tiles(laid_out, True), wanted))
