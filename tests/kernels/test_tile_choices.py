"""Which tiles were the fastest is kept on disk, and what is damaged there is passed over."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_compile.kernels import replay, tile_choices, tiles
from te_compile.kernels.tiles import Question, Tile

OWN, OTHER = Tile(64, 128, 8, 64), Tile(64, 64, 4)
QUESTION = Question(0, "quantize bfloat16(8,16)(16,1)", (OWN, OTHER))
Forget = Callable[[], None]


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Forget:
    """Makes this process one that has read nothing yet, on a machine with three H200s."""
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(tile_choices, "cache_dir", lambda: str(tmp_path / "cache"))
    chosen: dict[tuple[int, str], Tile] = {}
    loaded: set[int] = set()
    for module in (tiles, tile_choices):
        monkeypatch.setattr(module, "chosen", chosen)
    monkeypatch.setattr(tile_choices, "_loaded", loaded)

    def now() -> None:
        chosen.clear()
        loaded.clear()

    return now


def keep(question: Question, tile: Tile) -> None:
    tile_choices.keep(question, tile, dict.fromkeys(question.tiles, 10.0))


def test_a_later_process_takes_what_an_earlier_one_found(forget: Forget) -> None:
    keep(QUESTION, OTHER)
    keep(Question(0, "another kind", (OWN, OTHER)), OWN)
    assert tiles.chosen[0, QUESTION.kind] == OTHER
    forget()
    assert tiles.chosen == {}
    for device in (0, 1):  # of one kind, which share a file
        tile_choices.load(device)
        assert tiles.chosen[device, QUESTION.kind] == OTHER and tiles.chosen[device, "another kind"] == OWN


def test_the_file_says_which_device_and_triton_it_is_for(forget: Forget, tmp_path: Path) -> None:
    import triton

    name = f"tile_choices_v1_NVIDIA-H200_sm90_132_triton{triton.__version__}.jsonl"
    assert tile_choices.path_for(2) == tmp_path / "cache" / "te_compile" / name


def test_people_can_read_it(forget: Forget) -> None:
    tile_choices.keep(QUESTION, OTHER, {OWN: 12.345, OTHER: 10.0})
    kept = json.loads(tile_choices.path_for(0).read_text())
    assert kept == {"kind": QUESTION.kind, "tile": [64, 64, 4, None], "microseconds": 10.0, "own": 12.35}
    assert tile_choices.described(3) == f"1 in {tile_choices.path_for(0)}"


@pytest.mark.parametrize(
    "line",
    [
        *("", "{", "3", '{"kind": "x"}', '{"kind": "x", "tile": [1, 2]}', '{"tile": null}', "\x00", "[" * 100_000),
        *('{"kind": "x", "tile": [64.0, 64, 4, null]}', '{"kind": "x", "tile": "abcd"}', '{"kind": "x", "tile": [{}]}'),
    ],
)
def test_damaged_lines_are_passed_over(forget: Forget, line: str) -> None:
    keep(QUESTION, OTHER)
    path = tile_choices.path_for(0)
    path.write_text(line + "\n" + path.read_text())
    forget()
    tile_choices.load(0)
    assert tiles.chosen == {(0, QUESTION.kind): OTHER}


def test_of_two_choices_for_one_kind_the_later_one_counts(forget: Forget) -> None:
    gone = Tile(16, 16, 1)  # which launchers offered once
    keep(Question(0, QUESTION.kind, (OWN, gone)), gone)
    keep(QUESTION, OTHER)
    forget()
    tile_choices.load(0)
    assert tiles.chosen[0, QUESTION.kind] == OTHER


def test_calls_that_were_recorded_before_take_the_tile_as_well(forget: Forget) -> None:
    operator = replay.Replayed("quantize", lambda x: x)

    def record() -> None:
        operator.met.add(("a kind",))
        operator.tapes["a kind",] = None

    record()
    keep(QUESTION, OTHER)
    assert not operator.tapes and not operator.met
    record()
    tile_choices.load(0)
    assert not operator.tapes and not operator.met
    record()
    tile_choices.load(0)  # nothing is new
    assert operator.tapes and operator.met


def test_a_choice_is_written_at_once(forget: Forget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what two processes write would mix; longer than any buffer, as a producer's kind may be."""
    keep(QUESTION, OTHER)
    path, sizes = tile_choices.path_for(0), list[int]()
    before = path.stat().st_size
    opened = Path.open

    def noting(self: Path, *how: Any, **named: Any) -> Any:
        file = opened(self, *how, **named)
        assert isinstance(file, io.RawIOBase), "what is written goes through a buffer"
        write = file.write

        def noted(text: bytes) -> int | None:
            sizes.append(len(text))
            return write(text)

        monkeypatch.setattr(file, "write", noted)
        return file

    monkeypatch.setattr(Path, "open", noting)
    keep(Question(0, "long " * 10_000, (OWN, OTHER)), OTHER)
    monkeypatch.undo()
    assert sizes == [path.stat().st_size - before]


def test_what_this_process_found_stays(forget: Forget) -> None:
    keep(QUESTION, OTHER)
    tiles.chosen[0, QUESTION.kind] = OWN
    tile_choices.load(0)
    assert tiles.chosen[0, QUESTION.kind] == OWN


def test_a_folder_that_cannot_be_made_is_no_error(
    forget: Forget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with caplog.at_level(logging.INFO, logger="te_compile"):
        keep(QUESTION, OTHER)
        tile_choices.load(0)
    assert "not kept" in caplog.text
    assert tiles.chosen[0, QUESTION.kind] == OTHER


def test_a_cache_that_cannot_be_made_is_no_error(
    forget: Forget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> str:
        raise PermissionError("not yours")

    monkeypatch.setattr(tile_choices, "cache_dir", fail)
    with caplog.at_level(logging.INFO, logger="te_compile"):
        tile_choices.load(0)
        keep(QUESTION, OTHER)
    assert "not read: not yours" in caplog.text and "not kept for later processes: not yours" in caplog.text
    assert tiles.chosen[0, QUESTION.kind] == OTHER
    assert tile_choices.described(1) == "not yours"


def test_choices_for_another_device_or_triton_are_not_taken(forget: Forget, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    keep(QUESTION, OTHER)
    part = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=16)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda index: part)
        forget()
        tile_choices.load(0)
        assert tiles.chosen == {}
    monkeypatch.setattr(triton, "__version__", "99.0")
    forget()
    tile_choices.load(0)
    assert tiles.chosen == {}
