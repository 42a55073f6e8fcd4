"""The table of ``benchmarks.kernels``: a line per job and shape, ours beside everyone else's who does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

OURS = "te_compile"


def jobs(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """The rows with the chosen tile by (kernel, shape), and there by whose they are."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row.get("tile") == "chosen":
            found.setdefault((row["kernel"], row["shape"]), {})[row["by"]] = row
    return found


def _cell(row: Row | None) -> str:
    """Time and share of the ceiling; what failed or was wrong says so."""
    if row is None:
        return "–"
    if "error" in row:
        return "failed"
    return f"{1e3 * row['ms']:.1f} µs, {row['share']:.0%}" + ("" if row["right"] else ", WRONG")


def _work(by: dict[str, Row]) -> str:
    """What the job moves or multiplies."""
    row = next(iter(by.values()))
    return f"{row['flops'] / 1e9:.0f} GFLOP" if "flops" in row else f"{row['bytes'] / 2**20:.1f} MiB"


def _speed(by: dict[str, Row], other: str) -> str:
    """How many times as fast as ``other`` ours is."""
    pair = [by.get(name, {}).get("ms") for name in (other, OURS)]
    return "–" if None in pair else f"{pair[0] / pair[1]:.2f}×"


def table(rows: Sequence[Row]) -> str:
    """Markdown; the columns are those who have rows, and the last one compares with Transformer Engine."""
    found = jobs(rows)
    names = [name for name in (OURS, "torch", "Transformer Engine") if any(name in by for by in found.values())]
    compared = "Transformer Engine" if "Transformer Engine" in names else ""
    lines = [["kernel", "shape", "work", *names, *([f"times as fast as {compared}"] if compared else [])]]
    lines.append(["---", "---", *("---:" for _ in lines[0][2:])])
    for (kernel, shape), by in found.items():
        cells = [kernel, shape, _work(by), *(_cell(by.get(name)) for name in names)]
        lines.append([*cells, *([_speed(by, compared)] if compared else [])])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def document(rows: Sequence[Row]) -> str:
    """The table under what its shares are shares of."""
    copy = next((row["tb_s"] for row in rows if row["kernel"] == "copy"), None)
    ceiling = f", {copy:.2f} TB/s, " if copy else " "
    return (
        "**kernels**: time of a call, and its share of the bandwidth of a plain copy"
        f"{ceiling}each byte counted once; of products, the share of an 8192³ FP8 product's rate\n\n{table(rows)}"
    )
