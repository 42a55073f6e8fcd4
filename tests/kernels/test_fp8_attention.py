"""FP8 attention's kernel: what its definition says in fp64, whatever the tiles, the sizes and the strides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from te_compile.kernels.attention_tiles import AttentionTile
from te_compile.kernels.fp8_attention import fp8_attention
from te_compile.ops.fp8_attention import fp8_attention_reference
from tests.compiling import relative_error
from tests.fp8_attention import Operands, Sizes, assert_is, drawn, expected, looseness

TILES = [AttentionTile(64, 32, 4, 2), AttentionTile(32, 64, 4, 2), AttentionTile(128, 128, 8, 2)]
SIZES = {
    "one tile": Sizes(1, 32, 64, 1, 1, 64),
    "many": Sizes(2, 192, 192, 2, 2, 64),
    "ragged": Sizes(2, 133, 133, 2, 2, 128),
    "shared heads": Sizes(2, 70, 70, 6, 2, 64),
    "odd width": Sizes(1, 65, 65, 2, 1, 96),
    "narrow": Sizes(1, 70, 70, 2, 1, 16),
    "fewer keys": Sizes(2, 150, 71, 2, 1, 64),
    "fewer queries": Sizes(2, 71, 150, 2, 1, 64),
    "one query": Sizes(3, 1, 100, 2, 2, 64),
    "one key": Sizes(2, 40, 1, 2, 2, 64),
}


# As shares of the whole result: what the limits may come to, and what the kernel may be off from the reference. Tensor
# cores drop bits of scores, so some codes are the next ones; on a CPU that is a matter of a tie here and there.
LOOSEST = {"cpu": 2e-2, "cuda": 0.4}
FARTHEST = {"cpu": 3e-3, "cuda": 3e-2}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_the_kernel_computes_the_definition(sizes: Sizes, tile: AttentionTile, causal: bool, device: str) -> None:
    scale = sizes.width**-0.5
    for _ in range(5):  # where a large p of few lies where two codes meet, a draw has wide limits and tells little
        operands = drawn(sizes, device)
        wanted = expected(operands, sizes, causal, scale, torch.float32)
        if looseness(wanted) <= LOOSEST[device]:
            break
    got = fp8_attention(*operands.all(), causal, scale, torch.float32, tile)
    assert_is(got, wanted, LOOSEST[device])
    reference = fp8_attention_reference(*operands.all(), causal, scale, torch.float32)
    assert relative_error(got[0], reference[0]) < FARTHEST[device]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_maximum_that_rises_with_every_block_changes_no_code(tile: AttentionTile, device: str) -> None:
    sizes = Sizes(1, 64, 300, 2, 1, 64)
    operands = drawn(sizes, device, spread=1.0, rising=True)
    got = fp8_attention(*operands.all(), False, 0.3, torch.float32, tile)
    # Scores of some hundred: their last bits weigh more.
    assert_is(got, expected(operands, sizes, False, 0.3, torch.float32), 5 * LOOSEST[device])
    reference = fp8_attention_reference(*operands.all(), False, 0.3, torch.float32)
    assert relative_error(got[0], reference[0]) < 5 * FARTHEST[device]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_result_is_rounded_once(dtype: torch.dtype, device: str) -> None:
    sizes = Sizes(1, 100, 100, 2, 1, 64)
    operands = drawn(sizes, device)
    wide, logsumexp = fp8_attention(*operands.all(), True, 0.125, torch.float32, TILES[0])
    narrow, same_logsumexp = fp8_attention(*operands.all(), True, 0.125, dtype, TILES[0])
    assert torch.equal(narrow, wide.to(dtype)) and torch.equal(logsumexp, same_logsumexp)


def with_heads_outside(x: Tensor) -> Tensor:
    """The same [B, S, H, D], in memory as [B, H, S, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def inside_a_wider(x: Tensor) -> Tensor:
    """The same, as a part of a tensor with more heads."""
    return torch.cat([x.view(torch.uint8)] * 3, dim=2).view(x.dtype)[:, :, : x.shape[2]]


@pytest.mark.parametrize("laid", [with_heads_outside, inside_a_wider])
def test_strides_change_no_bit(laid: object, device: str) -> None:
    operands = drawn(Sizes(2, 66, 66, 4, 2, 64), device)
    assert callable(laid)
    other = replace(operands, q=laid(operands.q), k=laid(operands.k))
    assert other.q.stride() != operands.q.stride()
    first, second = (fp8_attention(*each.all(), True, 0.125, torch.float32, TILES[0]) for each in (operands, other))
    assert all(map(torch.equal, first, second))


def spoilt(operands: Operands, name: str, at: tuple[int, ...]) -> Operands:
    codes = getattr(operands, name).clone()
    codes.view(torch.uint8)[at] = 0x7F
    return replace(operands, **{name: codes})


@pytest.mark.parametrize(("name", "at"), [("q", (0, 7, 1, 3)), ("k", (0, 40, 0, 5)), ("vt", (3, 40))])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_nan_spoils_what_the_reference_says_and_hides_nowhere(
    name: str, at: tuple[int, ...], causal: bool, device: str
) -> None:
    sizes = Sizes(2, 64, 64, 2, 1, 64)
    operands = spoilt(drawn(sizes, device), name, at)
    arguments = *operands.all(), causal, 0.125, torch.float32
    got, wanted = fp8_attention(*arguments, AttentionTile(32, 32, 4, 2))[0], fp8_attention_reference(*arguments)[0]
    # A key that a query does not see may be NaN to it or not: kernels skip whole blocks of them.
    sees = torch.ones(64, 64, dtype=torch.bool, device=device).tril() if causal else torch.ones(64, 64, device=device)
    visible = sees[:, at[1]].bool() if name != "q" else torch.ones(64, dtype=torch.bool, device=device)
    assert wanted.isnan().any()
    assert torch.equal(got.isnan()[:, visible], wanted.isnan()[:, visible])
    assert not bool((got.isnan() & ~wanted.isnan()).any())
