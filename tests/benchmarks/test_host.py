"""The table of what calls cost the host: its calls are right, and what is not replayed is a failure and no row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import host
from te_compile.kernels import native, player
from te_compile.kernels.recording import Step
from te_compile.kernels.replay import Tape
from te_compile.ops import calibration
from te_compile.ops.library import implementations

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here calls are made on the CPU")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shapes and the references."""
    monkeypatch.setattr(host, "ROWS", 32)
    monkeypatch.setattr(host, "COLUMNS", 48)
    for name in ("TRITON", "CUBLASLT", "CUDA"):
        monkeypatch.setattr(host, name, "reference")


@pytest.mark.parametrize("case", host.CALLS)
def test_every_call_is_one_that_the_operator_takes(case: str) -> None:
    name, make = host.CALLS[case]
    given = make()
    first, second = (implementations[name](*given[0], **given[1]) for _ in range(2))
    assert host.equal(first, second)


def test_what_is_not_replayed_is_a_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    waiting = calibration._waiting
    assert host.main(["--only", "quantize_pair", "--out", str(tmp_path / "rows.jsonl")]) == 1
    assert "not replayed" in capsys.readouterr().err
    device, row = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert device["what"] == "device" and row["operator"] == "fused_quantize_pair" and "error" in row
    assert calibration._waiting is waiting
    with pytest.raises(SystemExit):
        host.main(["--only", "nothing"])


def test_a_row_says_what_is_beyond_the_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where replays work, as on a GPU."""
    times = iter([40.0, 22.0, 4.0, 9.0])  # the code, Python, launches, the core

    class Placed:
        bound = True

        def __call__(self, *arguments: Any, **named: Any) -> Any:
            return implementations["gemm"](*arguments, **named)

    monkeypatch.setattr(host, "placed", lambda *given: (Placed(), None))
    monkeypatch.setattr(host, "microseconds", lambda call: next(times))
    monkeypatch.setattr(host, "_launches", lambda *given: {"launches": 1, "launches_us": next(times)})
    monkeypatch.setattr(player, "core", lambda: object())
    row = host.row_of("gemm")
    assert [row[name] for name in ("code_us", "python_us", "launches_us", "core_us", "beyond_us")] == [40, 22, 4, 9, 5]
    monkeypatch.setattr(host, "equal", lambda one, other: False)
    times = iter([40.0] * 4)
    with pytest.raises(RuntimeError, match="others"):
        host.row_of("gemm")


def test_launches_alone_go_to_the_addresses_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.missing():
        pytest.skip("the C++ core is not built")
    monkeypatch.setattr(player, "core", native.module)
    x, made = torch.zeros(4), torch.zeros(3)
    told: list[Any] = []
    step = Step(lambda *given: told.append(given), ["a", None, None, None], [(1, 0, 4), (2, 1, 0), (3, -1, 0)])
    alone = host.launches_alone(Tape([lambda device, stream: made], [step], []), [x], 0, 77)
    assert alone is not None
    alone()
    alone()
    assert told == [("a", x.data_ptr() + 4, made.data_ptr(), 77)] * 2
    with player.by_python():
        monkeypatch.undo()
        assert host.launches_alone(Tape([], [], []), [], 0, 77) is None
