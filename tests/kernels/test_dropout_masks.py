"""The kernel that draws the mask of a dropout: the reference's, element by element, and nothing beyond its end."""

from __future__ import annotations

import pytest
import torch

from te_compile.kernels import buffers
from te_compile.kernels.dropout_masks import WORDS_A_PROGRAM, draw_mask
from te_compile.ops.dropout_bits import nearest_share
from te_compile.ops.dropout_masks import dropout_mask_reference

PROGRAM = 32 * WORDS_A_PROGRAM
SIZES = [
    *((), (1,), (2,), (3,), (4,), (15,), (16,), (17,), (31,), (35,), (64,), (511,), (513,), (1024,), (1039,)),
    *((PROGRAM,), (PROGRAM - 1,), (PROGRAM + 1,), (2, PROGRAM - 32), (3, 5, 7, 11), (129, 257)),
]


def seed(device: str) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, (1,), device=device)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_mask_is_that_of_the_reference(size: tuple[int, ...], device: str) -> None:
    key = seed(device)
    mask = draw_mask(key, size, 0.1)
    assert mask.dtype == torch.bool and mask.is_contiguous()
    assert set(mask.view(torch.uint8).flatten().tolist()) <= {0, 1}
    assert torch.equal(mask, dropout_mask_reference(key, size, 0.1))


@pytest.mark.parametrize("probability", [0.5, 0.25, 0.9, 0.013, 2**-16, 1 - 2**-16])
def test_every_probability_has_the_references_mask(probability: float, device: str) -> None:
    key = seed(device)
    assert 0 < nearest_share(probability) < 65536
    assert torch.equal(draw_mask(key, (77, 65), probability), dropout_mask_reference(key, (77, 65), probability))


@pytest.mark.parametrize("count", [1, 2, 3, 15, 30, 33, 64, 511, 1021, 1026])
def test_every_element_is_written_and_no_other(count: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = seed(device)
    whole = torch.full((count + 1024,), 7, dtype=torch.uint8, device=device)
    monkeypatch.setattr(buffers, "empty", lambda *_: whole[:count].view(torch.bool))
    assert torch.equal(draw_mask(key, (count,), 0.5), dropout_mask_reference(key, (count,), 0.5))
    assert whole[:count].max() <= 1 and whole[count:].eq(7).all()
