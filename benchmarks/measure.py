"""How every row is measured: the clock, the memory, the distance from high precision, and the line of JSON.

Times are medians over single calls, each between two CUDA events, after warm-up. Rows of one run compare with each
other; rows of different machines or runs do not (power states alone differ by 15%). Without a GPU everything runs on
tiny shapes: that exercises the scripts and their checks, and the times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

from te_compile.passes.attention_kernels import cudnn_version

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDS, MOST_ROUNDS = 4, 16  # how often those that take turns do so; the more the sooner they are done
ROUND_MS = 150 if DEVICE.type == "cuda" else 5  # how long a turn lasts, where one call takes less
ROUNDS_SECONDS = 1.5 if DEVICE.type == "cuda" else 0.05


Context = Callable[[], AbstractContextManager[Any]]
"""Makes what a forward runs in."""


@dataclass(frozen=True)
class Runnable:
    """A model as one variant runs it, and the context its forward needs (autocast, FP8 autocast of a peer)."""

    call: Callable[..., Any]
    model: nn.Module
    context: Context = nullcontext


@dataclass(frozen=True)
class Variant:
    """A way to run a work. ``build`` makes it from nothing; ``ours`` marks the ones that must run and be right."""

    name: str
    build: Callable[[], Runnable]
    ours: bool = False


@dataclass
class Rows:
    """Prints each row as a line of JSON, appends it to a file if there is one, and remembers whether all was well."""

    path: Path | None = None
    failures: list[str] = field(default_factory=list)
    append: bool = False  # go on with the file of an earlier run

    def __post_init__(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not (self.append and self.path.exists()):
                self.path.write_text("")

    def write(self, **row: Any) -> None:
        """Emit one row; floats keep four significant digits."""
        rounded = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in row.items()}
        line = json.dumps(rounded)
        print(line, flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(line + "\n")

    def fail(self, name: str, reason: str) -> None:
        """Remember that a variant of ours did not run or was wrong."""
        self.failures.append(f"{name}: {reason}")

    def exit_status(self) -> int:
        """0 if nothing failed; otherwise the reasons go to stderr."""
        for failure in self.failures:
            print(f"FAILED {failure}", file=sys.stderr)
        return 1 if self.failures else 0


def add_arguments(parser: argparse.ArgumentParser, iterations: int) -> None:
    """The arguments that all benchmarks share."""
    parser.add_argument("--attn", choices=("sdpa", "eager"), default="sdpa")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--only", default="", help="comma-separated variants; all that can run when empty")
    parser.add_argument("--iters", type=int, default=iterations, help="timed calls per row (%(default)s)")
    one_by_one_or_in_turns = parser.add_mutually_exclusive_group()
    one_by_one_or_in_turns.add_argument(
        "--profile", action="store_true", help="also print each step's GPU kernels, longest first"
    )
    one_by_one_or_in_turns.add_argument(
        "--turns", action="store_true", help="variants take turns, and nothing is checked"
    )
    add_out(parser)


def add_out(parser: argparse.ArgumentParser) -> None:
    """The argument that every benchmark with rows has: ``Rows`` takes it."""
    parser.add_argument("--out", type=Path, help="write the rows to this file too")


def chosen(variants: Iterable[Variant], only: str) -> list[Variant]:
    """The variants that ``only`` names, or all; a name that does not exist ends the program with the list of names."""
    (found,) = chosen_of_each([variants], only)
    return found


def chosen_of_each(works: Iterable[Iterable[Variant]], only: str) -> list[list[Variant]]:
    """The same of several works, whose variants differ: a name is to exist in one of them."""
    found = [list(variants) for variants in works]
    names = [name for name in only.split(",") if name]
    there = list(dict.fromkeys(variant.name for variants in found for variant in variants))
    if unknown := set(names) - set(there):
        raise SystemExit(f"--only: no variant {', '.join(sorted(unknown))}; there are {', '.join(there)}")
    return [[variant for variant in variants if not names or variant.name in names] for variants in found]


def known(option: str, given: str, names: Iterable[str]) -> list[str]:
    """The names in ``given``, a comma-separated list; one that is not of ``names`` ends the program with these."""
    found, there = given.split(","), list(names)
    for name in found:
        if name not in there:
            raise SystemExit(f"{option}: no {name!r}; there are {', '.join(there)}")
    return found


def describe_device(rows: Rows) -> None:
    """One row that says what the others were measured on: the machine, torch, and which attention PyTorch takes.

    The cuDNN that is loaded decides that: with an older one than PyTorch's own, which a peer may bring into the
    process, torch.compile's attention is slower on some GPUs, and so is every baseline.
    """
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    version = ".".join(map(str, cudnn_version()))
    cudnn = {"cudnn": version, "attention": default_attention()} if version else {}
    rows.write(what="device", name=name, torch=torch.__version__, **cudnn)


def default_attention() -> str:
    """The kernel that PyTorch takes for an ordinary attention: "cudnn_attention", "flash_attention" or another's name.

    Asked, and not read off its order of kernels, which PyTorch settles when it is first asked.
    """
    heads = torch.empty(1, 1, 128, 64, dtype=torch.bfloat16, device=DEVICE)
    return SDPBackend(torch._fused_sdp_choice(heads, heads, heads, is_causal=True)).name.lower()


def free_memory() -> None:
    """Collect what nothing refers to, and give its memory back."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def fresh_start() -> None:
    """Forget what the variant before compiled and allocated, and seed, so that all have the same weights."""
    torch._dynamo.reset()
    free_memory()
    torch.manual_seed(0)


def attempt(variant: Variant, rows: Rows, what: dict[str, Any], measure: Callable[[Variant], dict[str, Any]]) -> None:
    """Write the row that ``measure`` returns for ``variant``; an exception becomes a row too, and the run goes on."""
    fresh_start()
    try:
        row = measure(variant)
    except Exception as error:
        traceback.print_exc()
        rows.write(**what, name=variant.name, error=repr(error)[:400])
        if variant.ours:
            rows.fail(variant.name, repr(error)[:200])
    else:
        rows.write(**what, name=variant.name, **row)
        if row.get("wrong"):
            rows.fail(variant.name, row["wrong"])


def synchronize() -> None:
    """Wait until the device has nothing left to do."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def median_ms(call: Callable[[], Any], iterations: int, warmup: int) -> float:
    """Median time of one ``call`` in milliseconds."""
    for _ in range(warmup):
        call()
    synchronize()
    return statistics.median(_once_ms(call) for _ in range(iterations))


def in_turns(calls: dict[str, Callable[[], Any]], most: int = 20) -> dict[str, float]:
    """Milliseconds of each of ``calls``; most: see :func:`best_in_turns`."""
    medians = {name: partial(median_ms, call, warmup=1) for name, call in calls.items()}
    return best_in_turns(medians, ROUNDS_SECONDS, most)


def best_in_turns(medians: dict[str, Callable[[int], float]], seconds: float, most: int = 20) -> dict[str, float]:
    """The best of a few of each of ``medians``, taken in turns, for clocks and hosts drift.

    A step of a millisecond waits for the host, whose drift is larger than a GPU's: short calls get more turns.
    medians: milliseconds, of so many calls. seconds: after these no round begins beyond the first few. most: calls in
    a turn, which is shorter where that would last long.
    """
    best = dict.fromkeys(medians, math.inf)
    counts = dict.fromkeys(medians, 2)
    until = time.monotonic() + seconds
    for turn in range(MOST_ROUNDS):
        if turn >= ROUNDS and time.monotonic() > until:
            break
        for name, median in medians.items():
            found = median(counts[name])
            best[name] = min(best[name], found)
            counts[name] = max(2, min(most, int(ROUND_MS / found)))
    return best


def rows_in_turns(
    variants: Sequence[Variant],
    columns: dict[str, Callable[[Runnable], Any]],
    rows: Rows,
    what: dict[str, Any],
    iterations: int,
) -> None:
    """Write a row for each variant, all built before one is timed. One that fails ends the work.

    columns: what to time of each, by the name of its column.
    """
    fresh_start()
    found: dict[str, dict[str, float]] = {variant.name: {} for variant in variants}
    try:
        # All variants are code of the same functions; beyond Dynamo's usual limit some would run in eager mode.
        with torch._dynamo.config.patch(recompile_limit=16 * len(variants), fail_on_recompile_limit_hit=True):
            built: dict[str, Runnable] = {}
            for variant in variants:
                torch.manual_seed(0)
                built[variant.name] = variant.build()
            for column, call in columns.items():
                calls = {name: partial(call, runnable) for name, runnable in built.items()}
                for each in calls.values():
                    for _ in range(3):
                        each()
                for name, milliseconds in in_turns(calls, iterations).items():
                    found[name][column] = milliseconds
    except Exception as error:
        traceback.print_exc()
        rows.write(**what, turns=True, error=repr(error)[:400])
        rows.fail("in turns", repr(error)[:200])
        return
    for name, row in found.items():
        rows.write(**what, turns=True, name=name, **row)


def _once_ms(call: Callable[[], Any]) -> float:
    """The time of one call, by the GPU's clock where there is one."""
    if DEVICE.type != "cuda":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


@dataclass
class Memory:
    """Device memory of a stretch of work in GiB: what lay there when it began, and the most it ever held."""

    base: float = math.nan
    peak: float = math.nan

    def __enter__(self) -> Memory:
        synchronize()
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated() / 2**30
        return self

    def __exit__(self, *exception: object) -> None:
        if DEVICE.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated() / 2**30

    def row(self) -> dict[str, float]:
        """The columns of a row; none without a GPU."""
        return {} if math.isnan(self.peak) else {"peak_gib": self.peak, "base_gib": self.base}


@dataclass(frozen=True)
class Kernel:
    """What the device ran in one call: its name, microseconds of all its launches together, and their number."""

    name: str
    us: float
    count: float


def kernels_of(call: Callable[[], Any], calls: int) -> list[Kernel]:
    """What the device runs in one of ``calls``, those first that take longest; without a GPU what the CPU does."""
    on_gpu = DEVICE.type == "cuda"
    on = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[on]) as seen:
        for _ in range(calls):
            call()
        synchronize()
    found = [
        Kernel(each.key, time / calls, each.count / calls)
        for each in seen.key_averages()
        if (time := each.self_device_time_total if on_gpu else each.self_cpu_time_total)
    ]
    return sorted(found, key=lambda kernel: -kernel.us)


def busy_microseconds(call: Callable[[], Any], calls: int) -> float:
    """Of the device, in one of ``calls``, after two to warm up; nothing that the host does counts."""
    for _ in range(2):
        call()
    return sum(kernel.us for kernel in kernels_of(call, calls))


def print_kernels(call: Callable[[], Any], calls: int = 5, longest: int = 30) -> None:
    """One line of JSON for each of the kernels in which ``call`` spends most time."""
    if DEVICE.type != "cuda":
        return
    for kernel in kernels_of(call, calls)[:longest]:
        print(json.dumps({"kernel": kernel.name[:110], "us": round(kernel.us, 1), "count": kernel.count}), flush=True)


def sqnr(reference: Tensor, value: Tensor) -> float:
    """Signal over error power in decibels; infinite where the two are equal, NaN where ``value`` is not finite."""
    reference, value = reference.double(), value.double()
    noise = (value - reference).square().sum().item()
    signal = reference.square().sum().item()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else math.nan


def cosine(reference: Tensor, value: Tensor) -> float:
    """Cosine between two tensors seen as vectors."""
    return nn.functional.cosine_similarity(reference.double().flatten(), value.double().flatten(), dim=0).item()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every gradient by parameter name."""
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def telling(reference: dict[str, Tensor], matrices_only: bool = False) -> list[str]:
    """Names of the gradients that a comparison can judge.

    Some gradients are zero in exact arithmetic (a key bias: softmax ignores it), and what they hold is rounding noise
    in any precision. Those at least 100 times smaller than is typical for the model are left out.
    """
    sizes = {name: each.double().square().mean().sqrt().item() for name, each in reference.items()}
    typical = statistics.median(sizes.values())
    return [
        name
        for name, size in sizes.items()
        if size > typical / 100 and (reference[name].dim() > 1 or not matrices_only)
    ]
