"""Launchers take the tile that was found to be the fastest, and no tile changes a bit of what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from te_compile.kernels import norm, pointwise, quantize, tiles
from te_compile.kernels.tiles import Question, Tile, Work, choose, trying
from te_compile.ops.norm_quantize import Norm, Wanted
from te_compile.ops.pointwise import Spec
from te_compile.recipe import ScaleRule

OWN, OTHER, STRANGE = Tile(64, 128, 8), Tile(64, 64, 4), Tile(16, 16, 1)
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
SUMS = "x0: bfloat16[M, K]; x1: bfloat16[M, K]; t0 = add(x0, x1); quantize t0; sum t0: bfloat16"
Launcher = Callable[[Tensor, Tensor, Tensor], list[Tensor]]
PAIR = "x0: bfloat16[M, K]; x1: bfloat16[M, K]; t0 = add(x0, x1); t1 = mul(x0, x1); quantize t0; quantize t1"


@pytest.fixture(autouse=True)
def none_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiles, "chosen", {})
    yield


def asked(x: Tensor, *what: object) -> Question:
    with trying() as trial:
        assert choose(OWN, lambda: Work([x], what, [OTHER])) == OWN
    assert trial.asked is not None
    return trial.asked


def test_a_launcher_takes_its_own_tile_and_is_asked_nothing_where_nobody_timed() -> None:
    assert choose(OWN, lambda: pytest.fail("what the work is was worked out for nothing")) == OWN  # type: ignore[arg-type, return-value]


def test_the_chosen_tile_is_taken_for_its_kind_alone() -> None:
    x = torch.zeros(4, 6)
    question = asked(x, "quantize", True)
    assert question.tiles == (OWN, OTHER)
    tiles.chosen[question.device, question.kind] = OTHER

    def taken(x: Tensor, *what: object) -> Tile:
        return choose(OWN, lambda: Work([x], what, [OTHER]))

    assert taken(torch.ones(4, 6), "quantize", True) == OTHER
    assert taken(x, "quantize", False) == taken(x[:, ::2], "quantize", True) == OWN
    assert taken(x.to(BF16), "quantize", True) == taken(torch.zeros(6, 4).t(), "quantize", True) == OWN


def test_a_tile_that_is_not_offered_is_not_taken() -> None:
    x = torch.zeros(4, 6)
    question = asked(x)
    tiles.chosen[question.device, question.kind] = STRANGE
    assert choose(OWN, lambda: Work([x], (), [OTHER])) == OWN


def test_in_a_trial_the_tile_on_trial_is_taken_and_afterwards_not() -> None:
    with trying(STRANGE), trying(OTHER) as trial:
        assert choose(OWN, lambda: Work([torch.zeros(2)], ("x",), [])) == OTHER
        assert trial.asked is not None and trial.asked.tiles == (OWN,)
    assert choose(OWN, lambda: Work([torch.zeros(2)], ("x",), [OTHER])) == OWN


# --- the launchers' own ---


def of_quantize(x: Tensor, y: Tensor, scale: Tensor) -> list[Tensor]:
    return list(quantize.quantize(x, scale, E4M3, True, True, ScaleRule(), False))


def of_norm(x: Tensor, y: Tensor, scale: Tensor) -> list[Tensor]:
    wanted = Wanted(scale, E4M3, True, True, True, ScaleRule())
    return list(norm.norm_quantize(x, Norm(None, None, 1e-5, "layer"), wanted, False))


def of_sums(x: Tensor, y: Tensor, scale: Tensor) -> list[Tensor]:
    return pointwise.fused_quantize([x, y], scale, Spec.parse(SUMS), E4M3, True, True, ScaleRule(), False)


def of_pair(x: Tensor, y: Tensor, scale: Tensor) -> list[Tensor]:
    layouts = [(True, True), (False, True)]
    return pointwise.fused_quantize_pair([x, y], [scale] * 2, Spec.parse(PAIR), E4M3, layouts, ScaleRule(), False)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))


def asked_by(launcher: Launcher, device: torch.device) -> Question:
    x = torch.zeros(64, 64, dtype=BF16, device=device)
    with trying() as trial:
        launcher(x, x, torch.tensor(20.0, device=device))
    assert trial.asked is not None
    return trial.asked


def test_columns_are_added_up_in_one_order_whatever_the_tile(device: torch.device) -> None:
    """Triton spreads rows over threads and warps by a tile's rows, columns and warps, and adds sums up by that."""
    tiles_of_sums = asked_by(of_sums, device).tiles
    assert len(tiles_of_sums) > 1
    assert len({(tile.rows, tile.columns, tile.warps) for tile in tiles_of_sums}) == 1


@pytest.mark.parametrize("launcher", [of_quantize, of_norm, of_pair])
def test_where_nothing_is_added_up_there_are_many_to_choose_from(launcher: Launcher, device: torch.device) -> None:
    assert len(asked_by(launcher, device).tiles) > 3


@pytest.mark.parametrize("launcher", [of_quantize, of_norm, of_sums, of_pair])
def test_no_tile_changes_a_bit(launcher: Launcher, device: torch.device) -> None:
    x, y = (torch.randn(75, 150, dtype=BF16, device=device) for _ in range(2))
    scale = torch.tensor(20.0, device=device)
    with trying() as trial:
        expected = launcher(x, y, scale)
    assert trial.asked is not None and len(trial.asked.tiles) > 1
    for tile in trial.asked.tiles[1:]:
        with trying(tile):
            for one, other in zip(expected, launcher(x, y, scale), strict=True):
                assert same_bits(one, other), tile
