"""Choices of algorithms that are kept in a file, by processes that multiply on a pretended GPU (tests/csrc/pretend).

The library suggests four algorithms: 1 is the fastest unless a process is told that another one is, and 2 does not run.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TIMED, UNTIMED = 10, 1  # products that a call runs, at least and exactly


class Processes:
    """Each call is a process. ``choices``: the file that they share."""

    def __init__(self, program: Path, choices: Path) -> None:
        self.program, self.choices = program, choices

    def start(self, *work: int | str, **settings: object) -> subprocess.Popen[str]:
        """A process that works on products of so many rows, or on a check. ``settings`` are those of main.cpp."""
        given = {"CHOICES": self.choices, **settings}
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self.program.parent)}
        environment.update({name: str(value) for name, value in given.items() if value is not None})
        return subprocess.Popen(
            [self.program, *map(str, work)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @staticmethod
    def finish(process: subprocess.Popen[str]) -> list[tuple[int, int]]:
        """The algorithm of each product, and how many were run for it."""
        out, err = process.communicate(timeout=60)
        *lines, last = out.splitlines() or [""]
        assert process.returncode == 0 and last == "passed", out + err
        return [(int(algorithm), int(products)) for algorithm, products in map(str.split, lines)]

    def __call__(self, *work: int | str, **settings: object) -> list[tuple[int, int]]:
        return self.finish(self.start(*work, **settings))

    def lines(self) -> list[str]:
        """What is in the file."""
        return self.choices.read_text().splitlines()


@pytest.fixture
def run(program: Path, tmp_path: Path) -> Processes:
    return Processes(program, tmp_path / "choices.txt")


def test_a_later_process_takes_the_same_algorithm_without_timing(run: Processes) -> None:
    [(algorithm, products)] = run(11, FASTEST=3)
    assert algorithm == 3 and products > TIMED
    assert len(run.lines()) == 1
    assert run(11) == [(3, UNTIMED)]  # by its own timing it would be 1
    assert run(11, 11, FASTEST=0) == [(3, UNTIMED), (3, UNTIMED)]
    assert len(run.lines()) == 1


def test_what_differs_in_any_way_is_timed_for_itself(run: Processes) -> None:
    run(11)
    for rows, candidates in ((12, 8), (11, 3)):
        [(_, products)] = run(rows, CANDIDATES=candidates)
        assert products > UNTIMED
    assert run(11, 12) == [(1, UNTIMED), (1, UNTIMED)] and run(11, CANDIDATES=3) == [(1, UNTIMED)]


def test_what_the_library_does_not_suggest_is_never_run(run: Processes) -> None:
    run(11)
    [line] = run.lines()
    product = line.rpartition(" ")[0]
    run.choices.write_text(f"{product} {'ab' * 64}\n")
    [(algorithm, products)] = run(11)
    assert algorithm == 1 and products > TIMED
    assert run.lines()[1:] == [line]
    assert run(11, FASTEST=3) == [(1, UNTIMED)]  # what was worked out now counts


def test_one_candidate_neither_reads_nor_writes(run: Processes) -> None:
    assert run(11, CANDIDATES=1) == [(0, UNTIMED)]
    assert not run.choices.exists()
    run(11)
    assert run(11, CANDIDATES=1) == [(0, UNTIMED)]
    assert len(run.lines()) == 1


def test_nothing_is_kept_unless_a_file_is_named(run: Processes) -> None:
    for _ in range(2):
        [(algorithm, products)] = run(11, CHOICES=None)
        assert algorithm == 1 and products > TIMED


def test_a_captured_product_takes_what_is_known(run: Processes) -> None:
    assert run(11, CAPTURING=1) == [(0, UNTIMED)]
    assert not run.choices.exists()
    run(11)
    assert run(11, CAPTURING=1) == [(1, UNTIMED)]


def test_lengths_that_are_not_timed_take_what_is_known(run: Processes) -> None:
    run(100)
    *_, unknown, known = run(*range(1, 66), 100, FASTEST=3)
    assert unknown == (0, UNTIMED) and known == (1, UNTIMED)
    assert len(run.lines()) == 65


def test_who_was_faster_while_one_was_timing_decides(run: Processes, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.txt"
    run(11, CHOICES=theirs, FASTEST=3)
    [(algorithm, products)] = run(11, MEANWHILE=theirs)
    assert algorithm == 3 and products > TIMED  # its timing said 1
    assert len(run.lines()) == 2
    assert run(11) == [(3, UNTIMED)]


def test_processes_that_time_at_once_agree(run: Processes) -> None:
    lengths = range(1, 41)
    at_once = [run.start(*lengths, FASTEST=fastest) for fastest in (0, 1, 3)]
    algorithms = [[algorithm for algorithm, _ in run.finish(process)] for process in at_once]
    assert algorithms[0] == algorithms[1] == algorithms[2]
    assert run(*lengths) == [(algorithm, UNTIMED) for algorithm in algorithms[0]]


def test_torn_and_foreign_lines_cost_nothing_but_themselves(run: Processes) -> None:
    run(11)
    [line] = run.lines()
    broken = ["", "hello", line[:-1], line[: len(line) // 2], line.replace(" ", "  ", 1), line + "0", line[:-1] + "g"]
    for text in broken:
        run.choices.write_text(f"{text}\n{line[:-7]}")  # the last one ends where a disk was full
        [(algorithm, products)] = run(11, FASTEST=3)
        assert algorithm == 3 and products > TIMED, text
        assert run.lines()[:2] == [text, line[:-7]] and len(run.lines()) == 3
        assert run(11) == [(3, UNTIMED)]
    run.choices.write_text("\n".join([*broken, line, ""]))
    assert run(11, FASTEST=3) == [(1, UNTIMED)]
    run.choices.write_bytes(os.urandom(4096))
    [(algorithm, products)] = run(11)
    assert algorithm == 1 and products > TIMED


def test_a_file_that_cannot_be_used_is_as_good_as_none(run: Processes, tmp_path: Path) -> None:
    for impossible in (tmp_path / "nowhere" / "choices.txt", tmp_path, "/dev/null", ""):
        for _ in range(2):
            (algorithm, first), again = run(11, 11, CHOICES=impossible)
            assert algorithm == 1 and first > TIMED and again == (1, UNTIMED)


def test_a_file_does_not_grow_for_ever(run: Processes) -> None:
    run.choices.write_text("0\n" * (1 << 19))
    (algorithm, first), again = run(11, 11)
    assert algorithm == 1 and first > TIMED and again == (1, UNTIMED)
    assert run.choices.stat().st_size == 1 << 20


@pytest.mark.parametrize("check", ["one_file", "one_file_at_once"])
def test_users_of_one_file_agree(run: Processes, check: str) -> None:
    assert run(check) == []
