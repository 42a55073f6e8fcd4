"""How long compiling takes: torch.compile and te_fp8 on one model, each in a fresh process with empty caches.

    python -m benchmarks.compile_time --models llama8b            one training step of each
    python -m benchmarks.compile_time --models llama8b --passes   and what each of te_fp8's passes took

``seconds`` is the first training step, forward and backward, less a later one: Dynamo, AOTAutograd, the passes,
Inductor, its kernels and their tuning. ``passes_seconds`` is what te_fp8's own passes took of it, by the clock of their
manager (a collection of garbage falls to whichever pass it interrupts), and ``triton_seconds`` what Triton took for
kernels in the process itself, one after the other: ours that were not compiled ahead, while Inductor's are compiled by
workers. ``kernels_ahead``: how many of ours workers compiled meanwhile and a launch then found; ``ahead_in_vain``: as
something else than the launch wanted; ``ahead_waited``: the seconds that first launches waited for workers. All three,
as ``triton_seconds``, are of all steps: the second one launches what knows its scales. The processes run one after the
other, for each compiles in several of its own; ``ratio`` is of medians over ``--repeats``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import measure, models
from benchmarks.models import MODELS, Task
from te_compile.kernels import ahead

VARIANTS = {"compile": "inductor", "te_fp8": "te_fp8"}
GOAL = 1.3
"""How many times as long as Inductor te_fp8 may take."""


class PassTimes(logging.Handler):
    """Adds up what the manager of passes logs about each run of each pass."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seconds: dict[str, float] = defaultdict(float)

    def emit(self, record: logging.LogRecord) -> None:
        """Take ``graph 3: fuse_producers: 12 in 80.1 ms``."""
        if record.levelno == logging.DEBUG and isinstance(record.args, tuple) and len(record.args) == 4:
            _, name, _, milliseconds = record.args
            self.seconds[str(name)] += float(str(milliseconds)) / 1e3


class KernelTimes:
    """Adds up what Triton says about each kernel that this process compiles. Inductor's are compiled by its workers."""

    def __init__(self) -> None:
        self.seconds, self.kernels = 0.0, 0

    def __call__(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """What Triton calls after each compilation; its times are microseconds."""
        if not cache_hit:
            self.seconds += times.total / 1e6
            self.kernels += 1

    def listen(self) -> None:
        """From now on, where this Triton tells."""
        try:
            from triton import knobs
        except ImportError:
            return
        if hasattr(knobs, "compilation") and hasattr(knobs.compilation, "listener"):
            knobs.compilation.listener = self


def one_step(name: str, variant: str) -> dict[str, Any]:
    """Compile and run one training step here and now. Returns the columns of its row."""
    times, kernel_times = PassTimes(), KernelTimes()
    kernel_times.listen()
    logger = logging.getLogger("te_compile")
    logger.addHandler(times)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    task = Task(name, "train", "sdpa", torch.bfloat16)
    runnable = models.compiled(task, backend=VARIANTS[variant])
    inputs = task.inputs()

    def seconds() -> float:
        measure.synchronize()
        start = time.perf_counter()
        models.call_once(runnable, inputs, training=True)
        measure.synchronize()
        return time.perf_counter() - start

    first = seconds()
    later = min(seconds() for _ in range(3))
    row: dict[str, Any] = {"seconds": first - later, "step_seconds": later}
    row |= {"triton_seconds": kernel_times.seconds, "triton_kernels": kernel_times.kernels}
    if variant == "te_fp8":
        row |= {"kernels_ahead": ahead.statistics.found, "ahead_in_vain": ahead.statistics.missed}
        row |= {"ahead_ordered": ahead.statistics.ordered, "ahead_waited": ahead.statistics.waited}
        row["passes_seconds"] = sum(times.seconds.values())
        row["passes_share"] = row["passes_seconds"] / row["seconds"]
        row["passes"] = dict(sorted(times.seconds.items(), key=lambda each: -each[1]))
    return row


def in_a_fresh_process(name: str, variant: str, timeout: float) -> dict[str, Any]:
    """:func:`one_step` where nothing was ever compiled. Raises RuntimeError with what the process said last."""
    with tempfile.TemporaryDirectory(prefix="compile-time-") as empty:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": empty, "TRITON_CACHE_DIR": f"{empty}/triton"}
        command = [sys.executable, "-m", "benchmarks.compile_time", "--one", f"{name}/{variant}"]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    if ran.returncode:
        raise RuntimeError(ran.stderr.strip()[-400:])
    row: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return row


def measure_model(name: str, arguments: argparse.Namespace, rows: measure.Rows) -> None:
    """The rows of one model, and the ratio against the goal."""
    medians: dict[str, float] = {}
    for variant in VARIANTS:
        what = {"what": "compile_time", "model": name, "name": variant}
        try:
            found = [in_a_fresh_process(name, variant, arguments.timeout) for _ in range(arguments.repeats)]
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            rows.write(**what, error=str(error)[-400:])
            rows.fail(f"{name} {variant}", str(error)[-200:])
            continue
        row = sorted(found, key=lambda each: each["seconds"])[len(found) // 2]
        medians[variant] = statistics.median(each["seconds"] for each in found)
        passes = row.pop("passes", {})
        if arguments.passes and passes:
            row["passes"] = {each: round(seconds, 4) for each, seconds in passes.items()}
        ratio = {"ratio": medians[variant] / medians["compile"]} if "compile" in medians else {}
        rows.write(**what, **row, **ratio)
    ratio = medians.get("te_fp8", 0.0) / medians.get("compile", float("inf"))
    if ratio > GOAL and measure.DEVICE.type == "cuda":
        rows.fail(name, f"te_fp8 compiles in {ratio:.2f} times what Inductor takes, goal {GOAL}")


def main(given: Sequence[str] | None = None) -> int:
    """Measure every model; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama8b", help=f"of {', '.join(MODELS)} (%(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="processes a row (%(default)s)")
    parser.add_argument("--passes", action="store_true", help="also the seconds of each pass, longest first")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a process may take (%(default)s)")
    measure.add_out(parser)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.one:
        name, variant = arguments.one.split("/")
        print(json.dumps(one_step(name, variant)))
        return 0
    names = models.choose(arguments.models, tuple(MODELS), "--models")
    rows = measure.Rows(arguments.out)
    measure.describe_device(rows)
    for name in names:
        measure_model(name, arguments, rows)
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
