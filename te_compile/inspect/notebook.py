"""A report in a notebook: what sums it up and the folded tables, in the notebook's own colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_compile.inspect.attentions_page import attentions_table
from te_compile.inspect.coverage import kind_of, percent
from te_compile.inspect.markup import Markup, element, joined
from te_compile.inspect.page import asset, coverage_bar, tiles
from te_compile.inspect.table import Line, details, lines_of, shape_text

if TYPE_CHECKING:
    from te_compile.inspect.report import Report

_HEADINGS = ("linear", "", "tokens × in → out", "FLOPs", "form", "runs in", "fused with, or why it is kept")


def fragment(report: Report) -> Markup:
    """HTML for the middle of another page: its rules reach nothing outside of it, and it runs no script."""
    total = sum(row.flops for row in report.rows) or 1
    head = element("tr", *(element("th", heading) for heading in _HEADINGS))
    body = element("tbody", *(_line(line, total) for line in lines_of(report.rows)))
    table = element("div", element("table", element("thead", head), body), class_="scroll")
    more = element("ul", *(element("li", text) for text in details(report)))
    return element(
        "div",
        element("style", Markup(asset("report.css"))),
        element("div", *tiles(report), class_="tiles"),
        coverage_bar(report.rows),
        table,
        attentions_table(report),
        element("details", element("summary", "Implementations, graph breaks and notes"), more),
        class_="te-report",
    )


def _line(line: Line, total: int) -> Markup:
    row = line.row
    cells = (
        element("td", line.name, class_="name"),
        element("td", f"×{line.count}" if line.count > 1 else "", class_="quiet"),
        element("td", shape_text(row), class_="nowrap"),
        element("td", percent(line.count * row.flops / total), class_="right"),
        element("td", row.form),
        element("td", element("span", row.status, class_=f"badge {kind_of(row)}")),
        element("td", row.reason if row.status != "fp8" else joined(row.fused, "; "), class_="detail"),
    )
    return element("tr", *cells)
