"""te_fp8 beside torch.compile over many architectures as users run them: where is it slower, and what does it save?

    python -m benchmarks.survey                                  all works
    python -m benchmarks.survey --only "bert, padded" --only t5

A process for each work and variant, for those that share a process share Dynamo's limits and its guards. So many at
once build, compile and warm up (``--jobs``); once all of them are ready they take turns with the GPU, of which nobody
else wants anything then. A row for each work: milliseconds of a training step and of a forward without gradients, and
how many of these the device is busy, for the host is waited for in the rest; GiB at the step's peak, the loss of the
first step, and how many linears te_fp8 runs in FP8, of all graphs that it met. The exit status is 1 if a loss is off by
2%, or te_fp8 slower by more than that.

Products take the first of cuBLASLt's proposals, for timing them means nothing while others compile.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.measure import DEVICE
from benchmarks.survey_works import WORKS

VARIANTS = ("compile", "te_fp8")
_Answer = TypeVar("_Answer")
CALLED = ("step", "forward")
CALLS, WARM = (6, 3) if DEVICE.type == "cuda" else (1, 1)  # for the device's time; before anything is timed
SECONDS = 3.0 if DEVICE.type == "cuda" else 0.05  # of turns, for each call: these processes drift apart
_ANSWER_SECONDS = 60.0  # in which a process that is ready has timed a few calls
_LOSS, _SLOWER = 0.02, 0.02


# --- a process of one work and variant ------------------------------------------------------------------------------


def peak_of(call: Callable[[], Any]) -> float:
    """GiB at the peak of ``call``; NaN without a GPU."""
    with measure.Memory() as memory:
        call()
    return memory.peak


def median_of(call: Callable[[], Any], count: int) -> float:
    """Milliseconds of one of so many calls."""
    return measure.median_ms(call, count, 1)


def kernels(call: Callable[[], Any]) -> list[measure.Kernel]:
    """What the device runs in ``call``."""
    return measure.kernels_of(call, CALLS)


def calls_of(name: str, variant: str, compiler: str) -> dict[str, Callable[[], Tensor]]:
    """A training step and a forward of the work, compiled when they are first called."""
    work = WORKS[name]
    model, inputs, context = work.build(), work.inputs(), work.context()
    given: dict[str, Any] = {"backend": compiler}
    if variant == "te_fp8":
        given = {"backend": "te_fp8", "options": {"compiler": compiler}}
    fast = torch.compile(model, dynamic=work.dynamic, **given)

    def step() -> Tensor:
        if not model.training:
            model.train()
        model.zero_grad(set_to_none=True)
        with context():
            loss: Tensor = fast(**inputs).loss
        loss.backward()
        return loss.detach()

    def forward() -> Tensor:
        if model.training:
            model.eval()
        with torch.no_grad(), context():
            loss: Tensor = fast(**inputs).loss
        return loss

    return {"step": step, "forward": forward}


def serve(name: str, variant: str, compiler: str, pipe: Connection) -> None:
    """Compile, tell what was seen, and answer questions about a call until there are no more."""
    from te_compile.passes import manager

    try:
        calls = calls_of(name, variant, compiler)
        with manager.recording() as records:
            loss = calls["step"]().item()
            for call in calls.values():
                for _ in range(WARM):
                    call()
        sites = [site for record in records for site in record.plan.sites]
        fp8 = f"{sum(site.status == 'fp8' for site in sites)} of {len(sites)}"
        measure.free_memory()
        pipe.send({"loss": loss, **({"fp8": fp8} if variant == "te_fp8" else {})})
        while True:
            asked, call = pipe.recv()
            pipe.send(asked(calls[call]))
    except EOFError:  # nobody asks any more
        return
    except Exception as error:
        traceback.print_exc()
        pipe.send({"error": repr(error)[:300]})


# --- the process that asks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worker:
    """One of those processes, and the end of a pipe to it."""

    work: str
    variant: str
    process: SpawnProcess
    pipe: Connection

    @staticmethod
    def start(work: str, variant: str, compiler: str) -> Worker:
        """It begins at once."""
        context = multiprocessing.get_context("spawn")
        ours, its = context.Pipe()
        process = context.Process(target=serve, args=(work, variant, compiler, its), daemon=True)
        process.start()
        return Worker(work, variant, process, ours)

    def hear(self, seconds: float) -> Any:
        """What it says next, or an error."""
        try:
            return self.pipe.recv() if self.pipe.poll(seconds) else {"error": f"nothing in {seconds:.0f} s"}
        except EOFError:
            return {"error": "it ended"}

    def ask(self, question: Callable[[Callable[[], Any]], _Answer], call: str) -> _Answer:
        """The answer to ``question`` about ``call``. RuntimeError for an error in its place."""
        self.pipe.send((question, call))
        said = self.hear(_ANSWER_SECONDS)
        if isinstance(said, dict):
            raise RuntimeError(f"{self.variant}, {call}: {said['error']}")
        answer: _Answer = said
        return answer

    def median(self, call: str, count: int) -> float:
        """Milliseconds of one of so many of ``call``. RuntimeError for an error in their place."""
        return self.ask(partial(median_of, count=count), call)

    def stop(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.join()


def first_words(workers: Sequence[Worker], seconds: float) -> dict[tuple[str, str], dict[str, Any]]:
    """What each of ``workers`` has seen once it has compiled; an error for one that has not in so many seconds."""
    until, waiting = time.monotonic() + seconds, {each.pipe: each for each in workers}
    said: dict[tuple[str, str], dict[str, Any]] = {}
    while waiting and (left := until - time.monotonic()) > 0:
        ready = wait(list(waiting), left)
        for pipe in [each for each in waiting if each in ready]:
            worker = waiting.pop(pipe)
            said[worker.work, worker.variant] = worker.hear(0)
    late = {"error": f"not compiled in {seconds:.0f} s"}
    return {**{(each.work, each.variant): late for each in waiting.values()}, **said}


def measured(workers: dict[str, Worker]) -> tuple[dict[str, Any], dict[str, list[measure.Kernel]]]:
    """Columns of a row, times the best of a few medians taken in turns; and what the device ran in a step."""
    row: dict[str, Any] = {}
    for call in CALLED:
        medians = {name: partial(each.median, call) for name, each in workers.items()}
        best = measure.best_in_turns(medians, SECONDS)
        row |= {f"{call}_{variant}_ms": value for variant, value in best.items()}
        row[f"{call}_ratio"] = best["compile"] / best["te_fp8"]
    peaks = {variant: worker.ask(peak_of, "step") for variant, worker in workers.items()}
    row |= {f"{variant}_gib": value for variant, value in peaks.items() if not math.isnan(value)}
    # Behind all that is timed, for what was profiled may be slower for a while.
    found = {call: {variant: worker.ask(kernels, call) for variant, worker in workers.items()} for call in CALLED}
    for call, variants in found.items():
        row |= {f"{call}_{variant}_busy_ms": sum(each.us for each in ran) / 1e3 for variant, ran in variants.items()}
    return row, found["step"]


def write_row(
    work: str, workers: dict[str, Worker], said: dict[str, dict[str, Any]], rows: measure.Rows, longest: int = 0
) -> None:
    """Time one work whose processes are ready, and say what is wrong with it; and the ``longest`` kernels of a step."""
    errors = {variant: words["error"] for variant, words in said.items() if "error" in words}
    try:
        if errors:
            raise RuntimeError("; ".join(f"{variant}: {error}" for variant, error in errors.items()))
        row, ran = measured(workers)
    except (RuntimeError, OSError) as error:
        rows.write(what="survey", work=work, error=str(error)[:400])
        rows.fail(work, str(error)[:200])
        return
    loss, ours = (said[variant]["loss"] for variant in VARIANTS)
    rows.write(what="survey", work=work, **row, loss=loss, te_fp8_loss=ours, fp8=said["te_fp8"]["fp8"])
    for variant, found in ran.items():
        for each in found[:longest]:
            shown = {"kernel": each.name[:110], "us": each.us, "count": each.count}
            rows.write(what="kernel", work=work, name=variant, **shown)
    if not abs(ours - loss) <= _LOSS * max(1.0, loss):
        rows.fail(work, f"a loss of {ours:.4g} for {loss:.4g}")
    for call in CALLED:
        if DEVICE.type == "cuda" and row[f"{call}_ratio"] < 1 - _SLOWER:
            rows.fail(work, f"{call} at {row[f'{call}_ratio']:.3f} of torch.compile's speed")


def in_batches(names: Sequence[str], jobs: int) -> Iterator[list[str]]:
    """So many works at a time that each of their processes is one of ``jobs``."""
    size = max(1, jobs // len(VARIANTS))
    for start in range(0, len(names), size):
        yield list(names[start : start + size])


def measure_batch(names: Sequence[str], arguments: argparse.Namespace, rows: measure.Rows) -> None:
    """Compile works side by side, then time one after the other."""
    compiler = arguments.compiler
    workers = {(name, variant): Worker.start(name, variant, compiler) for name in names for variant in VARIANTS}
    try:
        said = first_words(list(workers.values()), arguments.seconds)
        for key, words in said.items():
            if "error" in words:
                workers[key].stop()
        for name in names:
            its = {variant: workers[name, variant] for variant in VARIANTS}
            write_row(name, its, {variant: said[name, variant] for variant in VARIANTS}, rows, arguments.kernels)
            for worker in its.values():
                worker.stop()
    finally:
        for worker in workers.values():
            worker.stop()


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line; argparse exits for what it refuses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a work, by its name; may be given more than once (all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=300.0, help="to compile in (%(default)s)")
    parser.add_argument("--compiler", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--kernels", type=int, default=0, help="of a step, so many that take longest (none)")
    measure.add_out(parser)
    arguments = parser.parse_args(given)
    for name in arguments.only or []:
        if name not in WORKS:
            parser.error(f"--only: no {name!r}; there are {'; '.join(WORKS)}")
    return arguments


def main(given: Sequence[str] | None = None) -> int:
    """Print a row for each work; returns the exit status."""
    arguments = parsed(given)
    os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="1", OMP_NUM_THREADS="1", TE_COMPILE_GEMM_CANDIDATES="1")
    rows = measure.Rows(arguments.out)
    measure.describe_device(rows)
    for names in in_batches(arguments.only or list(WORKS), arguments.jobs):
        measure_batch(names, arguments, rows)
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
