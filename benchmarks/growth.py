"""How te_fp8's gain grows with size: one GPT layer, hidden 1024 to 8192, 1k to 32k tokens, beside torch.compile.

    python -m benchmarks.growth --warm 14                                  all sizes: compile in 14 processes, then time
    python -m benchmarks.growth --hidden 1024,2048 --tokens 1024,2048      some of them

Three variants a size: torch.compile, te_fp8 as a user gets it, and te_fp8 with ``cost_model=False``, every linear in
FP8 whether it pays or not. Where the cost model keeps no linear back the two are one graph, and one measurement stands
for both (``same_as``). One row per size and variant, written as soon as it is known; with ``--out`` a run goes on
where one that was interrupted stopped. A size that does not fit leaves a row that says so.

Compiling takes most of the time, and compiling needs no quiet machine. ``--warm`` lets that many processes compile
everything first, into one cache directory; the process that times then finds code and kernels on disk. What these
processes timed themselves, all at once on one GPU, is thrown away: Inductor's choices of tiles are made again.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from benchmarks import layer, measure
from benchmarks.growth_tables import BASELINE, DEFAULT, FORCED, WORKS, document, plot
from benchmarks.layer import Work
from benchmarks.measure import DEVICE, Runnable
from te_compile.backend import rewrite
from te_compile.options import Options
from te_compile.passes import manager
from te_compile.passes.plan import Plan

HIDDEN = (1024, 2048, 4096, 8192)
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
TINY_HIDDEN, TINY_TOKENS = (64,), (32, 64)  # without a GPU
HEAD, LONGEST = 128, 2048
VARIANTS = (BASELINE, FORCED, DEFAULT)


@dataclass(frozen=True)
class Size:
    """One point of the table."""

    hidden: int
    tokens: int

    def work(self) -> Work:
        """The layer of this size: feed-forward 4 times as wide, heads of 128, sequences of up to 2048 tokens."""
        sequence = min(LONGEST, self.tokens)
        heads = max(1, self.hidden // HEAD)
        return Work(self.hidden, 4 * self.hidden, heads, sequence, self.tokens // sequence)


def compiled(variant: str, model: nn.Module, compiler: str) -> Runnable:
    """``model`` under torch.compile as ``variant``. Sizes are fixed: each has code of its own."""
    if variant == BASELINE:
        backend = "inductor" if compiler == "inductor" else "aot_eager"
        return Runnable(torch.compile(model, backend=backend, dynamic=False), model)
    options = {"cost_model": variant == DEFAULT, "compiler": compiler}
    return Runnable(torch.compile(model, backend="te_fp8", dynamic=False, options=options), model)


def forward(runnable: Runnable, x: Tensor) -> Tensor:
    """A forward without gradients."""
    with torch.no_grad():
        result: Tensor = runnable.call(x)
        return result


def in_fp8(model: nn.Module, x: Tensor) -> dict[str, list[int]]:
    """How many linears each variant of ours puts in FP8, in training and without gradients. Compiles nothing."""
    counts: dict[str, list[int]] = {DEFAULT: [], FORCED: []}

    def look(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        for variant, found in counts.items():
            chosen = Options.resolve({"cost_model": variant == DEFAULT})
            compilation = manager.begin(Plan(), chosen.recipe.key(), chosen.key())
            rewrite(copy.deepcopy(gm), example_inputs, chosen, compilation)
            found.append(len(compilation.plan.selected))
        return gm.forward

    looked_at = Runnable(torch.compile(model, backend=look, dynamic=False), model)
    looked_at.call(x)
    forward(looked_at, x)
    torch._dynamo.reset()
    return {BASELINE: [0, 0], **counts}


def same_graph(fp8: dict[str, list[int]], variants: Sequence[str]) -> bool:
    """Does the cost model keep nothing back, so that one measurement stands for both variants of ours?"""
    return {DEFAULT, FORCED} <= set(variants) and fp8[DEFAULT] == fp8[FORCED]


def settle(runnable: Runnable, x: Tensor, dy: Tensor, works: Sequence[str] = tuple(WORKS), calls: int = 3) -> None:
    """Compile the works and run each often enough that nothing new happens: scales, plans of products, tiles."""
    for _ in range(calls):
        layer.train_step(runnable, x, dy)
        if "fwd_nograd_ms" in works:
            forward(runnable, x)


def timed(ready: dict[str, Runnable], call: Callable[[Runnable], Any]) -> dict[str, float]:
    """Milliseconds of ``call`` for each variant."""
    return measure.in_turns({name: partial(call, runnable) for name, runnable in ready.items()})


def measure_size(
    size: Size, variants: Sequence[str], compiler: str, works: Sequence[str] = tuple(WORKS)
) -> Iterator[dict[str, Any]]:
    """The rows of one size. All variants train one layer: its weights are random and never updated."""
    work = size.work()
    model = layer.plain(work)
    x, dy = layer.data(work)
    fp8 = in_fp8(model, x)
    same = {DEFAULT: FORCED} if same_graph(fp8, variants) else {}
    ready = {variant: compiled(variant, model, compiler) for variant in variants if variant not in same}
    for runnable in ready.values():
        settle(runnable, x, dy, works)
    calls = {"step_ms": lambda runnable: layer.train_step(runnable, x, dy), "fwd_nograd_ms": lambda r: forward(r, x)}
    times = {work: timed(ready, calls[work]) for work in works}
    for variant in variants:
        timed_as = same.get(variant, variant)
        row = {work: found[timed_as] for work, found in times.items()}
        row |= {"fp8_linears": fp8[variant], **({"same_as": timed_as} if variant in same else {})}
        yield {"name": variant, **row}


def what_of(size: Size) -> dict[str, Any]:
    """The columns that say which size a row is about."""
    work = size.work()
    return {"what": "growth", **asdict(size), "sequence": work.sequence, "batch": work.batch, "heads": work.heads}


def attempt(
    size: Size, variants: Sequence[str], compiler: str, rows: measure.Rows, works: Sequence[str] = tuple(WORKS)
) -> None:
    """Write the rows of one size. That memory does not suffice is a finding; any other error is a failure."""
    measure.fresh_start()
    try:
        for row in measure_size(size, variants, compiler, works):
            rows.write(**what_of(size), **row)
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            rows.write(**what_of(size), name="all", skipped="does not fit into the GPU's memory")
            return
        traceback.print_exc()
        rows.write(**what_of(size), name="all", error=repr(error)[:400])
        rows.fail(f"hidden {size.hidden}, {size.tokens} tokens", repr(error)[:200])


# --- compiling ahead ------------------------------------------------------------------------------------------------


def share_of(sizes: Sequence[Size], variants: Sequence[str], number: int, processes: int) -> list[tuple[Size, str]]:
    """What process ``number`` of ``processes`` compiles. Shuffled, so that the largest do not meet on the GPU."""
    work = [(size, variant) for size in sizes for variant in variants]
    random.Random(0).shuffle(work)
    return work[number::processes]


def compile_one(size: Size, variant: str, variants: Sequence[str], compiler: str, works: Sequence[str]) -> None:
    """Compile and run once. What is timed as another variant's is not compiled."""
    shape = size.work()
    model, (x, dy) = layer.plain(shape), layer.data(shape)
    if variant == DEFAULT and same_graph(in_fp8(model, x), variants):
        return
    settle(compiled(variant, model, compiler), x, dy, works, calls=1)


def compile_share(
    work: Sequence[tuple[Size, str]], variants: Sequence[str], compiler: str, works: Sequence[str]
) -> None:
    """Compile for what stays on disk. What fails here is compiled, and told of, where it is timed."""
    for size, variant in work:
        measure.fresh_start()
        try:
            compile_one(size, variant, variants, compiler, works)
        except Exception as error:
            print(f"not compiled ahead: {size}, {variant}: {repr(error)[:200]}", file=sys.stderr)


def warm(arguments: argparse.Namespace, cache: Path) -> None:
    """Fill ``cache`` by ``arguments.warm`` processes, and drop what they timed while they disturbed each other."""
    command = [sys.executable, "-m", "benchmarks.growth", "--compiler", arguments.compiler]
    command += ["--hidden", arguments.hidden, "--tokens", arguments.tokens, "--variants", arguments.variants]
    command += ["--step-only"] if arguments.step_only else []
    alone = {
        **environment(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "TE_COMPILE_GEMM_CANDIDATES": "1",  # products are timed by the process that times everything
    }
    shares = [f"{number}/{arguments.warm}" for number in range(arguments.warm)]
    running = [subprocess.Popen([*command, "--compile-share", share], env=alone) for share in shares]
    until = time.monotonic() + arguments.warm_seconds
    for process in running:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()  # what it has not compiled is compiled where it is timed
            process.wait()
    for choice in cache.rglob("*.best_config"):
        choice.unlink()


def environment(cache: Path) -> dict[str, str]:
    """Ours, with every compiler's cache in ``cache`` and in use."""
    return {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }


# --- the command ----------------------------------------------------------------------------------------------------


def done(path: Path | None) -> set[Size]:
    """The sizes that an earlier run left rows of; one that failed is tried again."""
    if path is None or not path.exists():
        return set()
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {Size(row["hidden"], row["tokens"]) for row in rows if row["what"] == "growth" and "error" not in row}


def numbers(text: str) -> list[int]:
    """A comma-separated list of numbers."""
    return [int(each) for each in text.split(",") if each]


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line; argparse exits for what it refuses."""
    on_gpu = DEVICE.type == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", default=",".join(map(str, HIDDEN if on_gpu else TINY_HIDDEN)), help="(%(default)s)")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS if on_gpu else TINY_TOKENS)), help="(%(default)s)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="(%(default)s)")
    parser.add_argument("--step-only", action="store_true", help="leave out the forward without gradients")
    parser.add_argument("--compiler", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--warm", type=int, default=0, help="processes that compile ahead (none)")
    parser.add_argument("--warm-seconds", type=float, default=150, help="the most that they may take (%(default)s)")
    parser.add_argument("--cache", type=Path, help="where compiled code is kept; a fresh directory if not given")
    parser.add_argument("--out", type=Path, help="rows go here too, with a table and a plot beside them")
    parser.add_argument("--compile-share", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    unknown = set(arguments.variants.split(",")) - set(VARIANTS)
    if unknown:
        parser.error(f"--variants: unknown {', '.join(sorted(unknown))}; choose from {', '.join(VARIANTS)}")
    return arguments


def main(given: Sequence[str] | None = None) -> int:
    """Measure every size; returns the exit status."""
    arguments = parsed(given)
    sizes = [Size(hidden, tokens) for hidden in numbers(arguments.hidden) for tokens in numbers(arguments.tokens)]
    variants = [name for name in VARIANTS if name in arguments.variants.split(",")]
    works = [work for work in WORKS if work == "step_ms" or not arguments.step_only]
    if arguments.compile_share:
        number, processes = (int(each) for each in arguments.compile_share.split("/"))
        compile_share(share_of(sizes, variants, number, processes), variants, arguments.compiler, works)
        return 0
    finished = done(arguments.out)
    sizes = [size for size in sizes if size not in finished]
    cache = arguments.cache or Path(tempfile.mkdtemp(prefix="growth-"))
    if sizes and (arguments.warm or arguments.cache):
        cache.mkdir(parents=True, exist_ok=True)
        os.environ.update(environment(cache))
    if sizes and arguments.warm:
        warm(arguments, cache)
    rows = measure.Rows(arguments.out, append=bool(finished))
    measure.describe_device(rows)
    for size in sizes:
        attempt(size, variants, arguments.compiler, rows, works)
    if arguments.out is not None:
        show(arguments.out)
    return rows.exit_status()


def show(path: Path) -> None:
    """The table, and the plot where matplotlib is, beside the rows in ``path``."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    text = document(rows)
    path.with_suffix(".md").write_text(text)
    print(text)
    if not plot(rows, path.with_suffix(".png")):
        print("no plot drawn: matplotlib is not installed, or nothing was measured", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
