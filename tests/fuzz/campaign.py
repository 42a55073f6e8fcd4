"""Many programs in a row: what came of each, and what to tell a person."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.fuzz.check import Case, Failure, NotOurs, check
from tests.fuzz.generate import generate
from tests.fuzz.program import Program
from tests.fuzz.shrink import fails_alike, shrink

ONE_IN = 4
"""Of so many programs one also runs under no_grad."""


@dataclass
class Campaign:
    """``inductor``: the chance that a program is compiled with Inductor; ``theirs``: as of :func:`check`; ``found``:
    (seed, failure, program)."""

    inductor: float = 0.0
    device: str = "cpu"
    theirs: tuple[str, ...] = ("aot_eager", "inductor")
    counts: Counter[str] = field(default_factory=Counter)
    linears: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    found: list[tuple[int, Failure, Program]] = field(default_factory=list)

    def run(self, seeds: Iterable[int], progress: Callable[[Campaign], None] = lambda campaign: None) -> None:
        for seed in seeds:
            program = generate(seed, self.inductor, self.device)
            try:
                outcome = check(Case.of(program), inference=seed % ONE_IN == 0, theirs=self.theirs)
            except NotOurs as reason:
                self.counts["not comparable"] += 1
                self.refused[str(reason).splitlines()[0][:100]] += 1
            except Failure as failure:
                self.counts[failure.kind] += 1
                self.found.append((seed, failure, program))
            else:
                self.counts["right"] += 1
                for site in outcome.sites:
                    self.linears["fp8" if site.status == "fp8" else f"kept: {site.reason[:100]}"] += 1
            progress(self)

    def failures_text(self, shrunk: int = 3) -> str:
        """The failures; the first few with the smallest program that still shows them, as a test."""
        parts = []
        for i, (seed, failure, program) in enumerate(self.found):
            part = f"seed {seed}: {str(failure)[:2000]}"
            if i < shrunk:
                part += "\n" + shrink(program, fails_alike(failure)).test_text(f"test_seed_{seed}")
            parts.append(part)
        return "\n".join(parts)

    def summary(self) -> str:
        """What the programs came to, and what their linears ran in."""
        lines = [", ".join(f"{count} {what}" for what, count in self.counts.most_common())]
        lines += [f"  {count:6d} linears {what}" for what, count in self.linears.most_common()]
        lines += [f"  {count:6d} not comparable: {why}" for why, count in self.refused.most_common(10)]
        return "\n".join(lines)


def progress_line(total: int) -> Callable[[Campaign], None]:
    """Prints each failure, and once in a while how far it is."""
    start = last = time.monotonic()
    shown = 0

    def show(campaign: Campaign) -> None:
        nonlocal last, shown
        for seed, failure, _ in campaign.found[shown:]:
            print(f"seed {seed}: {str(failure)[:300]}", flush=True)
        shown = len(campaign.found)
        done, now = campaign.counts.total(), time.monotonic()
        if now - last > 10 or done == total:
            last = now
            print(
                f"{done}/{total} programs, {len(campaign.found)} failures, {(now - start) / done:.2f} s each",
                flush=True,
            )

    return show
