"""A report as text for people: a summary, the tables of linears and of attentions, and what else is worth a line.

Layers that repeat are one line: ``h.0–11.attn.c_attn ×12``, but only where nothing but the numbers in their names
differs. With rich and a terminal the table has colours; without, it is plain text of 120 columns.
"""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_compile.inspect import attentions
from te_compile.inspect.coverage import flops_text, percent
from te_compile.inspect.folding import folded

if TYPE_CHECKING:
    from te_compile.inspect.report import Report, Row

WIDTH = 120  # where there is no terminal to ask
NAME_WIDTH = 44
_HEADINGS = ("linear", "", "tokens × in → out", "FLOPs", "form", "runs in", "fused with, or why it is kept")


@dataclass(frozen=True)
class Line:
    """One line of the table: rows that differ in nothing but the numbers in their names."""

    name: str
    count: int
    row: Row

    def cells(self, all_flops: int) -> tuple[str, ...]:
        """As ``_HEADINGS``; the FLOPs are a share of those of all linears."""
        detail = "; ".join(self.row.fused) if self.row.status == "fp8" else self.row.reason
        count = f"×{self.count}" if self.count > 1 else ""
        share = percent(self.count * self.row.flops / (all_flops or 1))
        name = elided(self.name, NAME_WIDTH)
        return name, count, shape_text(self.row), share, self.row.form, self.row.status, detail


def shape_text(row: Row) -> str:
    """``256 × 100+12 → 64``: tokens, features, and how many of them are added inside."""
    tokens, *features = row.shape
    sizes = (f"{size}+{added}" if added else str(size) for size, added in zip(features, row.padding, strict=True))
    return f"{tokens} × {' → '.join(sizes)}"


def elided(text: str, width: int) -> str:
    """``text`` with its middle left out where it is longer than ``width``."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[-end:]}"


def lines_of(rows: Sequence[Row]) -> list[Line]:
    """The rows, folded where they repeat, in the order in which each first occurs."""
    return [Line(name, count, row) for name, count, row in folded(rows)]


def attention_cells(report: Report) -> list[tuple[str, str, str, str]]:
    """The lines of the second table, as ``attentions.HEADINGS``."""
    lines = folded(report.attentions)
    return [(name, f"×{count}" if count > 1 else "", row.runs_as, row.detail) for name, count, row in lines]


# --- the text around the table -------------------------------------------------------------------------------------


def summary(report: Report) -> list[str]:
    """What is read first."""
    totals = report.totals
    share = "" if totals["fp8"] else "; none is eligible"
    if totals["eligible_flops"]:
        flops = f"{flops_text(totals['fp8_flops'])} of {flops_text(totals['eligible_flops'])} a forward"
        share = f", {percent(report.fp8_flops_fraction)} of the eligible linear FLOPs ({flops})"
    found = f"{totals['fp8']} of {totals['linears']} linears in FP8{share}"
    lines = [f"te_fp8: {found if totals['linears'] else 'no linear in what torch.compile captured'}"]
    kept = [(totals[key], text) for key, text in KEPT.items() if totals[key]]
    if kept:
        lines.append(f"kept in high precision: {', '.join(f'{count} {text}' for count, text in kept)}")
    if any(row.precision for row in report.attentions):
        in_fp8 = sum(row.precision == "fp8" for row in report.attentions)
        lines.append(f"{in_fp8} of {_count(len(report.attentions), 'attention')} in FP8")
    what = "forward and backward" if report.training else "inference"
    lines.append(f"{what}, {_count(len(report.graphs), 'graph')}; recipe {report.recipe}")
    return lines


KEPT = {
    "kept_by_rule": "by a rule that protects quality or speed",
    "kept_by_user": "on your request",
    "kept_unsupported": "for want of support",
}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def details(report: Report) -> Iterator[str]:
    """What follows the table."""
    by_implementation: dict[str, list[str]] = {}
    for operator, by_name in sorted(report.implementations.items()):
        for name, count in by_name.items():
            by_implementation.setdefault(name, []).append(f"{operator} ×{count}")
    for name, operators in by_implementation.items():
        yield f"run by {name}: {', '.join(operators)}"
    yield from _declined(report.declined)
    for reason in report.breaks:
        yield f"graph break: {reason}"
    for name, counts in report.skipped.items():
        roles = ", ".join(f"{count} of {role}" for role, count in counts.items() if count)
        yield f"not finite so far, and skipped: {name}: {roles}"
    for note in report.notes:
        yield f"note: {note}"


def _declined(reasons: Sequence[str]) -> Iterator[str]:
    """``te::gemm cublaslt: why`` for many operators, one line for each why."""
    by_why: dict[str, dict[str, list[str]]] = {}
    for reason in reasons:
        which, _, why = reason.partition(": ")
        operator, _, name = which.partition(" ")
        by_why.setdefault(why, {}).setdefault(name, []).append(operator.removeprefix("te::"))
    for why, by_name in by_why.items():
        which = ", ".join(f"{name} ({', '.join(operators)})" for name, operators in by_name.items())
        yield f"not taken: {which}: {why}"


# --- two ways to draw it -------------------------------------------------------------------------------------------


def plain_text(report: Report) -> str:
    """The whole report without colours, in lines of ``WIDTH``."""
    return _plain(report, WIDTH)


def report_text(report: Report) -> str:
    """The whole report: in colour on a terminal if rich is installed, else plain."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size((WIDTH, 24)).columns
        try:
            return _rich(report, width)
        except ImportError:
            return _plain(report, max(width, 80))
    return plain_text(report)


def _plain(report: Report, width: int) -> str:
    all_flops = sum(row.flops for row in report.rows)
    rule = "─" * width
    drawn = _table([_HEADINGS, *(line.cells(all_flops) for line in lines_of(report.rows))], width)
    if report.attentions:
        cells = [(elided(name, NAME_WIDTH), *others) for name, *others in attention_cells(report)]
        drawn += [rule, *_table([attentions.HEADINGS, *cells], width)]
    after = [text for line in details(report) for text in textwrap.wrap(line, width, subsequent_indent="    ")]
    before = [text for line in summary(report) for text in textwrap.wrap(line, width, subsequent_indent="    ")]
    return "\n".join([*before, rule, *drawn, rule, *after])


def _table(table: Sequence[tuple[str, ...]], width: int) -> list[str]:
    """Lines of text: the headings, a rule and the rest; the last column takes what room there is, and is wrapped."""
    widths = [max(len(cells[column]) for cells in table) for column in range(len(table[0]) - 1)]
    last = max(width - sum(widths) - 2 * len(widths), 20)
    drawn = []
    for index, (*cells, detail) in enumerate(table):
        left = "  ".join(cell.ljust(size) for cell, size in zip(cells, widths, strict=True))
        first, *more = textwrap.wrap(detail, last) or [""]
        drawn.append(f"{left}  {first}".rstrip())
        drawn += [" " * (len(left) + 2) + text for text in more]
        if index == 0:
            drawn.append("─" * width)
    return drawn


def _rich(report: Report, width: int) -> str:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    def headed(headings: Sequence[str]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, header_style="bold")
        for index, heading in enumerate(headings):
            last = index == len(headings) - 1
            table.add_column(heading, no_wrap=not last, ratio=1 if last else None, justify="left")
        return table

    table, second = headed(_HEADINGS), headed(attentions.HEADINGS)
    all_flops = sum(row.flops for row in report.rows)
    for line in lines_of(report.rows):
        name, count, shape, share, form, status, detail = map(escape, line.cells(all_flops))
        colour = "green" if status == "fp8" else "yellow"
        table.add_row(name, count, shape, share, form, f"[{colour}]{status}[/]", f"[dim]{detail}[/]")
    for cells in attention_cells(report):
        name, count, runs_as, detail = map(escape, cells)
        second.add_row(elided(name, NAME_WIDTH), count, runs_as, f"[dim]{detail}[/]")
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=width, highlight=False)
    first, *others = summary(report)
    console.print(f"[bold]{escape(first)}[/]")
    for text in others:
        console.print(escape(text))
    console.print(table)
    if report.attentions:
        console.print(second)
    for text in details(report):
        console.print(f"[dim]{escape(text)}[/]")
    return drawn.getvalue().rstrip("\n")
