"""Run passes in order, and remember what each did.

A pass is a function from a graph to a count. The manager times it, lints the graph after it, and keeps the text of the
graph before and after where someone wants to read it: ``explain``, or ``TE_COMPILE_DEBUG=directory``.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch.distributed as dist
from torch.fx import Graph

from te_compile.optional_passes import OPTIONAL_PASSES
from te_compile.passes.plan import Plan
from te_compile.passes.text import graph_text, ops_text

LOG = logging.getLogger("te_compile")
DECIDED_BY = "select_linears"  # after this pass the plan is complete, and worth a line in the log
_NUMBERS = count()


class PassError(RuntimeError):
    """A pass failed on a captured graph, which is a fault of te_compile's; the message says how to go on."""


@dataclass
class PassRecord:
    """One run of one pass; the texts are empty unless graphs are being kept."""

    name: str
    count: int
    seconds: float
    before: str = ""
    after: str = ""


@dataclass
class Compilation:
    """Everything that happened to one captured graph. ``number`` counts compilations in this process; ``skipped`` are
    the passes to leave out."""

    plan: Plan
    recipe: str
    options: str
    skipped: tuple[str, ...] = ()
    number: int = field(default_factory=lambda: next(_NUMBERS))
    passes: list[PassRecord] = field(default_factory=list)
    joint: Graph | None = None
    keep_graphs: bool = False

    def run(self, name: str, work: Callable[[], int], graph: Graph) -> int:
        """Run one pass over ``graph`` (``work`` is the pass, bound to it) and record it; returns its count.

        Raises PassError where it fails for want of foresight. Errors of PyTorch's own classes, some of which steer
        Dynamo, and those that tell a user of an input go through as they are.
        """
        if name in self.skipped:
            return 0
        directory = os.environ.get("TE_COMPILE_DEBUG")
        dump = _Dump(Path(directory), self.number) if directory else None
        if dump is not None and not self.passes:
            dump.write("00_captured", graph_text(graph))
        before = ops_text(graph) if self.keep_graphs else ""
        start = time.perf_counter()
        try:
            changed = work()
            seconds = time.perf_counter() - start
            graph.lint()
        except Exception as error:
            if type(error).__module__ != "builtins":
                raise
            raise PassError(_failure(name, error)) from error
        self.passes.append(PassRecord(name, changed, seconds, before, ops_text(graph) if self.keep_graphs else ""))
        LOG.debug("graph %d: %s: %d in %.1f ms", self.number, name, changed, 1e3 * seconds)
        if name == DECIDED_BY:
            LOG.info("graph %d: %s", self.number, summary(self.plan))
            self._warn_of_nothing()
        if dump is not None:
            head = f"# {name}: {changed} in {1e3 * seconds:.1f} ms"
            decided = [f"# {line}" for line in decisions(self.plan)] if name == DECIDED_BY else []
            dump.write(f"{len(self.passes):02d}_{name}", "\n".join([head, *decided, graph_text(graph)]))
        return changed

    def _warn_of_nothing(self) -> None:
        """Who asks for FP8 and gets none should not find out from the time that a training takes. Whoever records the
        compilation reads that there. The same words for equal graphs, because Python shows a warning once."""
        reasons = "" if self.keep_graphs else self.plan.why_nothing_runs()
        if reasons:
            how_many = f"none of the {len(self.plan.sites)} linears" if len(self.plan.sites) > 1 else "not one linear"
            warnings.warn(
                f"te_fp8: {how_many} of a captured graph runs in FP8: {reasons} (te_compile.explain(model, …) has the "
                "details; strict=True makes this an error)",
                stacklevel=2,
            )


def _failure(name: str, error: Exception) -> str:
    """That a pass failed, why, and how to go on."""
    way_out = f"options={{'skip_passes': {name!r}}} compiles without it"
    if name not in OPTIONAL_PASSES:
        way_out = "nothing can be compiled to FP8 without it"
    return f"the pass {name} failed with {type(error).__name__}: {error}; that is a fault of te_compile's: {way_out}"


def summary(plan: Plan) -> str:
    """What was decided about a captured graph, in one line; linears kept for the same reason are named together."""
    if not plan.sites:
        return "no linears"
    kept: dict[str, list[str]] = {}
    for site in plan.sites:
        if site.status != "fp8":
            kept.setdefault(site.reason, []).append(site.name)
    share = f"{100 * plan.fp8_flops_fraction:.0f}% of eligible FLOPs" if plan.eligible else "none is eligible"
    line = f"{len(plan.selected)} of {len(plan.sites)} linears in FP8 ({share})"
    reasons = "; ".join(f"{_some(names)}: {reason}" for reason, names in kept.items())
    return f"{line}; kept: {reasons}" if reasons else line


def _some(names: list[str]) -> str:
    """The first few of many names."""
    shown = list(dict.fromkeys(names))
    return ", ".join(shown[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def decisions(plan: Plan) -> list[str]:
    """A line for each linear: what it is and what becomes of it."""
    shapes = [f"{site.tokens}×{site.features[0]}→{site.features[1]}" for site in plan.sites]
    return [
        f"{site.name}  {site.form} {shape}  {site.status}  {site.reason}".rstrip()
        for site, shape in zip(plan.sites, shapes, strict=True)
    ]


@dataclass(frozen=True)
class _Dump:
    """Where the texts of one captured graph go. Ranks of a distributed run must not write over one another."""

    root: Path
    number: int

    def write(self, name: str, text: str) -> None:
        is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        root = self.root / f"rank_{dist.get_rank()}" if is_distributed else self.root
        directory = root / f"graph_{self.number:03d}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise OSError(f"TE_COMPILE_DEBUG={str(self.root)!r}: graphs cannot be written there: {error}") from error


_LISTENER: ContextVar[list[Compilation] | None] = ContextVar("te_compile_listener", default=None)


@contextmanager
def recording() -> Iterator[list[Compilation]]:
    """Collect the compilations that start inside, with their graphs."""
    collected: list[Compilation] = []
    token = _LISTENER.set(collected)
    try:
        yield collected
    finally:
        _LISTENER.reset(token)


def begin(plan: Plan, recipe: str, options: str, skipped: tuple[str, ...] = ()) -> Compilation:
    """A record for one captured graph, also handed to whoever is recording."""
    compilation = Compilation(plan, recipe, options, skipped)
    listener = _LISTENER.get()
    if listener is not None:
        compilation.keep_graphs = True
        listener.append(compilation)
    return compilation
