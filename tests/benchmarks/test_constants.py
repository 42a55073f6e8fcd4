"""The constants that are printed are those that the cost model reads."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks import constants
from te_compile.passes import speed
from te_compile.passes.speed import HostCost


def test_two_steps_give_back_the_line_that_they_lie_on() -> None:
    wanted = HostCost(step=random.uniform(10, 900), linear=random.uniform(10, 900))
    found = constants.host_cost(wanted.of(4), wanted.of(12), [4, 12])
    assert (found.step, found.linear) == (pytest.approx(wanted.step), pytest.approx(wanted.linear))


def test_noise_never_makes_a_step_cheaper_than_nothing() -> None:
    assert constants.host_cost(100, 1000, [4, 12]).step == 0


@pytest.mark.parametrize(("value", "text"), [(1.234e9, "1234e6"), (6.51e8, "651e6"), (3.24e6, "3.2e6"), (4.04, "4.0")])
def test_numbers_are_written_as_the_source_has_them(value: float, text: str) -> None:
    assert constants.rounded(value) == text
    assert float(text) == pytest.approx(value, rel=0.02)


@pytest.mark.slow
def test_what_is_printed_can_stand_in_the_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU only the host's; the names must be those of the module, and both formats must have been run."""
    out = tmp_path / "constants.jsonl"
    assert constants.main(["--compiler", "aot_eager", "--calls", "2", "--out", str(out)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " = " in line]
    found: dict[str, object] = {"HostCost": HostCost}
    exec("\n".join(lines), found)
    names = [line.partition(" = ")[0] for line in lines]
    assert {"HIGH_PRECISION_TRAINING", "FP8_TRAINING", "HIGH_PRECISION_INFERENCE", "FP8_INFERENCE"} <= set(names)
    assert all(type(found[name]) is type(getattr(speed, name)) for name in names)
    assert found["FP8_TRAINING"].linear > 0
