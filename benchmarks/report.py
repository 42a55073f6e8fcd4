"""Turn rows of JSON into the tables of the README and a bar chart.

Reads every ``*.jsonl`` in a folder that ``make bench`` wrote, writes ``report.md``, ``report.png`` and, where growth
was measured, ``growth.png`` beside them and prints the tables. Speeds are relative to torch.compile in the same file,
for only rows of one run compare.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import growth_tables, kernel_table

Row = dict[str, Any]

BASELINE = "compile"


@dataclass(frozen=True)
class Column:
    """A column of a table: the row's field, how it is titled, and the digits after the point."""

    field: str
    title: str
    digits: int = 2

    def text(self, row: Row) -> str:
        """The cell of ``row``; a dash where it has no such field."""
        value = row.get(self.field)
        if value is None:
            return "–"
        return f"{value:.{self.digits}f}" if isinstance(value, float | int) else str(value)


TIMES = (
    Column("step_ms", "step, ms"),
    Column("fwd_nograd_ms", "forward, ms"),
    Column("ms", "ms"),
    Column("seconds", "compiling, s", 1),
)
SPEEDS = (
    Column("step_ms_speed", "step, speed"),
    Column("fwd_nograd_ms_speed", "forward, speed"),
    Column("ms_speed", "speed"),
)
OTHERS = (
    Column("ratio", "times Inductor's"),
    Column("passes_share", "share of the passes"),
    Column("triton_seconds", "kernels, one by one, s", 1),
    Column("peak_gib", "peak, GiB"),
    Column("output_db", "output, dB", 1),
    Column("gradient_db", "worst gradient, dB", 1),
    Column("logits_db", "logits, dB", 1),
    Column("loss_difference", "loss difference", 4),
    Column("cosine", "worst gradient, cosine", 4),
)


def read(folder: Path) -> list[Row]:
    """Every row in ``folder``, file by file."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines() if line.strip()]
    return [json.loads(line) for line in lines]


def title_of(row: Row) -> str:
    """What a row measures apart from its variant; rows with equal titles share a table."""
    names = ("what", "model", "work", "attn", "dtype", "dropout")
    return ", ".join(f"{row[name]}" if name != "dropout" else f"dropout {row[name]}" for name in names if row.get(name))


def tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The timed rows by title, each with its speed relative to torch.compile in the same table."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if "kernel" not in row and row.get("what") != "growth" and any(column.field in row for column in TIMES):
            found.setdefault(title_of(row), []).append(dict(row))
    for group in found.values():
        baseline = next((row for row in group if row["name"] == BASELINE), {})
        for row in group:
            for column in TIMES:
                if column.field in row and column.field in baseline:
                    row[f"{column.field}_speed"] = baseline[column.field] / row[column.field]
    return found


def markdown(title: str, rows: Sequence[Row]) -> str:
    """One table, with the columns that its rows have."""
    columns = [column for column in (*TIMES, *SPEEDS, *OTHERS) if any(column.field in row for row in rows)]
    lines = [["variant", *(column.title for column in columns)], ["---", *("---:" for _ in columns)]]
    lines += [[row["name"], *(column.text(row) for column in columns)] for row in rows]
    return f"**{title}**\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def machine_of(row: Row) -> str:
    """What a run was measured on, in words. Rows of older runs, and of machines without cuDNN, do not tell of it."""
    text = f"{row['name']}, torch {row['torch']}"
    if "cudnn" not in row:
        return text
    return f"{text}, cuDNN {row['cudnn']}, {row['attention'].replace('_', ' ')} by default"


def text_of(rows: Sequence[Row]) -> str:
    """All tables, the machine they were measured on, and what failed."""
    measured = [row for row in rows if "kernel" not in row and row.get("what") != "growth"]  # these have documents
    machines = {machine_of(row) for row in rows if row.get("what") == "device"}
    failed = [f"- {title_of(row)}, {row['name']}: {row['error']}" for row in measured if "error" in row]
    failed += [f"- {row['kernel']}, {row['by']}: {row['error']}" for row in rows if "error" in row and "kernel" in row]
    failed += [f"- {title_of(row)}, {row['name']}: {row['wrong']}" for row in rows if row.get("wrong")]
    parts = [f"Measured on {'; '.join(sorted(machines))}."] if machines else []
    parts += [markdown(title, group) for title, group in tables(rows).items()]
    for document, own in (
        (growth_tables.document, [row for row in rows if row.get("what") == "growth"]),
        (kernel_table.document, [row for row in rows if "kernel" in row]),
    ):
        parts += [document(own).strip()] if own else []
    parts += ["Failed:\n\n" + "\n".join(failed)] if failed else []
    return "\n\n".join(parts) + "\n"


def plot(groups: dict[str, list[Row]], path: Path) -> bool:
    """Bars of each table's first time column; returns whether matplotlib was there to draw them."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(groups), 1, figsize=(8, 1 + 3 * len(groups)), squeeze=False)
    for (title, rows), panel in zip(groups.items(), panels[:, 0], strict=True):
        column = next(each for each in TIMES if each.field in rows[0])
        timed = [row for row in rows if column.field in row]
        colours = ["tab:green" if row["name"].startswith("te_fp8") else "tab:gray" for row in timed]
        panel.barh([row["name"] for row in timed], [row[column.field] for row in timed], color=colours)
        panel.set(title=title, xlabel=column.title)
        panel.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


def main(arguments: Iterable[str] | None = None) -> int:
    """Write and print the report; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/bench"))
    folder: Path = parser.parse_args(None if arguments is None else list(arguments)).folder
    rows = read(folder)
    groups = tables(rows)
    if not any(field in row for row in rows for field in ("step_ms", "ms", "seconds")):
        print(f"{folder}: no measured rows; run `make bench` first", file=sys.stderr)
        return 1
    text = text_of(rows)
    (folder / "report.md").write_text(text)
    print(text)
    if groups and not plot(groups, folder / "report.png"):
        print("no chart drawn: matplotlib is not installed", file=sys.stderr)
    growth_tables.plot(rows, folder / "growth.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
