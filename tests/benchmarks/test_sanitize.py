"""The sanitizer's runs: what it says is read rightly, and nothing is called clean that was not seen to be."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import measure, sanitize
from benchmarks.sanitize import CASES, CHECKOUT, TOOLS, Case, find_sanitizer, options, summary_of, verdict

MANUAL = "--tool --target-processes --print-limit --report-api-errors --kernel-name-exclude"
SUMMARIES = {
    "memcheck": "========= ERROR SUMMARY: {} errors\n",
    "racecheck": "========= RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)\n",
}


def pretend_sanitizer(folder: Path, says: str) -> Path:
    """A program that runs what it is given, as the real one does, and then says something."""
    path = folder / "compute-sanitizer"
    path.write_text(
        f"#!{sys.executable}\n"
        "import subprocess, sys\n"
        f"if '--help' in sys.argv: print({MANUAL!r}); sys.exit()\n"
        f"ran = subprocess.run(sys.argv[sys.argv.index({sys.executable!r}):])\n"
        f"print({says!r}.replace('TOOL', sys.argv[sys.argv.index('--tool') + 1]))\n"
        "sys.exit(ran.returncode)\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


@pytest.mark.parametrize("errors", [0, 3])
@pytest.mark.parametrize("tool", TOOLS)
def test_the_summary_of_each_tool_is_read(tool: str, errors: int) -> None:
    output = "....\n12 passed, 3 skipped, 1 warning in 4.21s\n" + SUMMARIES[tool].format(errors)
    row = summary_of(tool, output)
    assert (row["errors"], row["passed"], row["skipped"]) == (errors, 12, 3)
    assert bool(verdict(tool, row)) is bool(errors)


def test_a_race_that_is_only_a_warning_is_not_clean() -> None:
    row = summary_of("racecheck", "1 passed in 1.00s\nRACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)")
    assert "1 error" in verdict("racecheck", row)


def test_without_a_summary_nothing_is_clean() -> None:
    assert "no summary" in verdict("memcheck", summary_of("memcheck", "5 passed in 1.00s"))
    assert "0 passed" in verdict("memcheck", summary_of("memcheck", SUMMARIES["memcheck"].format(0)))
    failed = summary_of("memcheck", "1 failed, 4 passed in 1.00s\n" + SUMMARIES["memcheck"].format(0))
    assert "1 tests failed" in verdict("memcheck", failed)


def test_options_that_a_version_does_not_know_are_left_out() -> None:
    new, old = options("memcheck", MANUAL), options("memcheck", MANUAL.replace("name-exclude", "regex-exclude"))
    assert "--kernel-name-exclude" in new and "--report-api-errors" in new
    assert "--kernel-regex-exclude" in old and "--kernel-name-exclude" not in old
    assert options("racecheck", "") == ["--tool", "racecheck"]


def test_the_environment_may_name_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPUTE_SANITIZER", str(tmp_path / "it"))
    assert find_sanitizer() == tmp_path / "it"


def test_it_is_found_on_the_path_in_a_toolkit_and_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPUTE_SANITIZER", raising=False)
    for part in ("path", "toolkit/bin", "site/nvidia/cu13/bin"):
        (tmp_path / part).mkdir(parents=True)
        pretend_sanitizer(tmp_path / part, "")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    for place in ("path", "toolkit/bin", "site/nvidia/cu13/bin"):
        found = find_sanitizer()
        assert found == tmp_path / place / "compute-sanitizer"
        found.unlink()


def test_every_case_has_tests() -> None:
    """Tests of the GPU cannot be collected without one; there the words are looked for in the names."""
    for case in CASES:
        source = (CHECKOUT / case.path).read_text()
        words = re.findall(r"\w+", re.sub(r"\b(or|not)\b", "", case.chosen))
        names = re.findall(r"^def (test_\w+)", source, re.MULTILINE)
        assert names and all(any(word in name for name in names) for word in words), case


def test_every_kernel_of_tritons_is_looked_at() -> None:
    """By the tests of its own file; what has none is imported by such tests, or by a module that they are of."""
    paths = {case.path for case in CASES}
    tests = "".join((CHECKOUT / path).read_text() for path in paths)
    sources = {path.stem: path.read_text() for path in (CHECKOUT / "te_compile/kernels").glob("*.py")}
    kernels = {name for name, source in sources.items() if re.search(r"^@triton\.jit", source, re.MULTILINE)}
    tested = {name for name in sources if f"tests/kernels/test_{name}.py" in paths}
    assert len(tested) > 10
    for name in kernels - tested:
        assert any(f"te_compile.kernels.{name} " in text for text in (tests, *(sources[each] for each in tested))), name


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "DEVICE", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(measure, "describe_device", lambda rows: None)


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("says", "status"), [(SUMMARIES["memcheck"].format(0), 0), (SUMMARIES["memcheck"].format(2), 1)]
)
def test_a_run_from_the_command_line(says: str, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sanitize, "CASES", (Case("weights", "tests/benchmarks/test_measure.py", "sqnr"),))
    monkeypatch.setenv("COMPUTE_SANITIZER", str(pretend_sanitizer(tmp_path, says)))
    out = tmp_path / "rows.jsonl"
    command = ["--only", "memcheck", "--cases", "weights", "--logs", str(tmp_path / "logs"), "--out", str(out)]
    assert sanitize.main(command) == status
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["name"] for row in rows] == ["plain", "memcheck"] and all(row["passed"] > 0 for row in rows)
    assert ("wrong" in rows[1]) is bool(status)


def test_a_run_that_takes_too_long_is_ended_and_told(tmp_path: Path) -> None:
    slow = [sys.executable, "-c", "import time; time.sleep(60)"]
    row = sanitize.run(Case("slow", "nothing"), "memcheck", slow, 1.0, tmp_path)
    assert row["timed_out"] and row["seconds"] < 30
    assert "not finished" in verdict("memcheck", row)


ENDED_EARLY = """
import sys
from pathlib import Path
from benchmarks import sanitize
sanitize.end_with_us()
slow = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
sanitize.run(sanitize.Case("slow", "nothing"), "memcheck", slow, 50.0, Path(sys.argv[1]))
"""


def test_who_ends_it_ends_its_runs(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ENDED_EARLY, str(tmp_path)], cwd=CHECKOUT)
    log, start = tmp_path / "memcheck_slow.log", time.monotonic()
    while not (log.exists() and log.read_text().strip()):
        assert process.poll() is None and time.monotonic() - start < 50
        time.sleep(0.1)
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


@pytest.mark.usefixtures("on_a_gpu")
def test_without_the_program_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMPUTE_SANITIZER", str(tmp_path / "absent"))
    assert sanitize.main([]) == 2
    assert "no compute-sanitizer" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_without_a_gpu_one_line_says_so() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.sanitize"], cwd=CHECKOUT, capture_output=True, text=True, env={**os.environ}
    )
    assert ran.returncode == 2 and "needs a CUDA device" in ran.stderr


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments: list[Any] = ["--only", "synccheck"]
    with pytest.raises(SystemExit):
        sanitize.parsed(arguments)
    assert "choose from memcheck, racecheck" in capsys.readouterr().err


@pytest.mark.usefixtures("on_a_gpu")
def test_a_case_runs_under_its_own_tools_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitize, "CASES", (Case("it", "nothing", tools=("memcheck",)),))
    monkeypatch.setattr(sanitize, "run", lambda case, tool, *_: {"passed": 1, "errors": 0})
    monkeypatch.setenv("COMPUTE_SANITIZER", str(pretend_sanitizer(tmp_path, "")))
    assert sanitize.main(["--cases", "it", "--logs", str(tmp_path)]) == 0
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == ["plain", "memcheck"]
