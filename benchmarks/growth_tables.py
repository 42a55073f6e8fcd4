"""The table and the plot of ``benchmarks.growth``: speed relative to torch.compile over size, and where it crosses 1.

Speed is torch.compile's time over te_fp8's, in one size and one run. The crossover of a width is where the line of
``cost_model=False`` passes 1, between the two sizes around it, on the logarithmic axis on which it is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Points = list[tuple[int, float]]

BASELINE, DEFAULT, FORCED = "compile", "te_fp8", "te_fp8_forced"
WORKS = {"step_ms": "Training step", "fwd_nograd_ms": "Forward without gradients"}
NEVER_BELOW = 0.98
"""What te_fp8 promises with its cost model on: never more than 2% slower than torch.compile."""


def speeds(rows: Sequence[Row], variant: str, work: str) -> dict[int, Points]:
    """For each width the (tokens, speed) of ``variant``, in the order of tokens."""
    times = {(row["hidden"], row["tokens"], row["name"]): row[work] for row in rows if work in row and "hidden" in row}
    found: dict[int, Points] = {}
    for (hidden, tokens, name), milliseconds in sorted(times.items()):
        baseline = times.get((hidden, tokens, BASELINE))
        if name == variant and baseline is not None:
            found.setdefault(hidden, []).append((tokens, baseline / milliseconds))
    return found


def crossover(points: Points) -> str:
    """From how many tokens on a width gains, in words."""
    if not points:
        return "–"
    if all(speed >= 1 for _, speed in points):
        return f"below {points[0][0]}"
    last_slow = max(index for index, (_, speed) in enumerate(points) if speed < 1)
    if last_slow == len(points) - 1:
        return f"above {points[-1][0]}"
    (low, slow), (high, fast) = points[last_slow], points[last_slow + 1]
    part = (1 - slow) / (fast - slow)
    return f"{math.exp(math.log(low) + part * (math.log(high) - math.log(low))):.0f}"


def _cells(row: dict[str, Row], work: str) -> str:
    """One cell: the baseline's time, both speeds, and how many linears the cost model let go."""
    noted = next((each.get("skipped") or each.get("error") for each in row.values() if work not in each), None)
    if noted is not None:
        return "does not fit" if "does not fit" in noted else "failed"
    if not {BASELINE, DEFAULT} <= row.keys():
        return "–"
    baseline = row[BASELINE][work]
    text = f"{baseline:.2f} ms → {baseline / row[DEFAULT][work]:.2f}×"
    if FORCED in row and "same_as" not in row[DEFAULT]:
        text += f" ({baseline / row[FORCED][work]:.2f}×)"
    return text


def table(rows: Sequence[Row], work: str) -> str:
    """Tokens down, widths across, and the crossover of each width in the last line."""
    sizes: dict[tuple[int, int], dict[str, Row]] = {}
    for row in rows:
        if row.get("what") == "growth":
            sizes.setdefault((row["hidden"], row["tokens"]), {})[row["name"]] = row
    widths, lengths = (sorted({size[index] for size in sizes}) for index in (0, 1))
    lines = [["tokens", *(f"hidden {width}" for width in widths)], ["---:" for _ in range(len(widths) + 1)]]
    for length in lengths:
        lines.append([str(length), *(_cells(sizes.get((width, length), {}), work) for width in widths)])
    forced = speeds(rows, FORCED, work)
    lines.append(["FP8 gains from", *(crossover(forced.get(width, [])) for width in widths)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def slower(rows: Sequence[Row]) -> list[str]:
    """The sizes in which te_fp8, as a user gets it, is slower than it promises to be."""
    return [
        f"- {title}, hidden {hidden}, {tokens} tokens: {speed:.3f}× of torch.compile's speed"
        for work, title in WORKS.items()
        for hidden, points in speeds(rows, DEFAULT, work).items()
        for tokens, speed in points
        if speed < NEVER_BELOW
    ]


def document(rows: Sequence[Row]) -> str:
    """Both tables in Markdown, with what a cell says and which sizes break the promise."""
    parts = [
        "Time of torch.compile and te_fp8's speed relative to it; in brackets the speed with `cost_model=False`, where "
        "the cost model keeps linears in high precision."
    ]
    for work, title in WORKS.items():
        if any(work in row for row in rows):
            parts.append(f"**{title}**\n\n{table(rows, work)}")
    below = slower(rows)
    promise = f"than {1 - NEVER_BELOW:.0%} slower than torch.compile"
    parts.append(f"More {promise}:\n\n" + "\n".join(below) if below else f"No size is more {promise}.")
    failed = [f"- hidden {row['hidden']}, {row['tokens']} tokens: {row['error']}" for row in rows if "error" in row]
    return "\n\n".join([*parts, *(["Failed:\n\n" + "\n".join(failed)] if failed else [])]) + "\n"


def plot(rows: Sequence[Row], path: Path) -> bool:
    """A panel per work, a colour per width; returns whether there were points, and matplotlib to draw them."""
    try:
        import matplotlib
    except ImportError:
        return False
    works = [work for work in WORKS if speeds(rows, DEFAULT, work) or speeds(rows, FORCED, work)]
    if not works:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(works), figsize=(6.5 * len(works), 4.5), squeeze=False)
    for panel, work in zip(panels[0], works, strict=True):
        _draw(panel, speeds(rows, DEFAULT, work), speeds(rows, FORCED, work))
        panel.set(title=WORKS[work], xlabel="tokens", ylabel="speed relative to torch.compile")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _draw(panel: Any, default: dict[int, Points], forced: dict[int, Points]) -> None:
    """The lines of each width, and a diamond where every linear in FP8 begins to gain."""
    panel.set_xscale("log", base=2)
    lengths = sorted({tokens for found in (default, forced) for points in found.values() for tokens, _ in points})
    panel.set_xticks(lengths, [f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens) for tokens in lengths])
    for index, width in enumerate(sorted({*default, *forced})):
        colour = f"C{index}"
        for found, style, label in ((default, "-o", f"hidden {width}"), (forced, "--", None)):
            points = found.get(width, [])
            panel.plot([x for x, _ in points], [y for _, y in points], style, color=colour, label=label)
        begins = crossover(forced.get(width, []))
        if begins.isdecimal():
            panel.plot([int(begins)], [1.0], "D", color=colour, markeredgecolor="black", zorder=3)
    panel.plot([], [], "--", color="gray", label="cost_model=False")
    panel.axhline(1.0, color="black", linewidth=1)
    panel.axhline(NEVER_BELOW, color="gray", linewidth=1, linestyle=":")
    panel.grid(alpha=0.3)
    panel.legend()
