"""The table of attentions on the page, with a search field of its own, and the shorter one in a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from te_compile.inspect.attentions import HEADINGS, AttentionRow
from te_compile.inspect.folding import folded
from te_compile.inspect.markup import Markup, breakable, element

if TYPE_CHECKING:
    from te_compile.inspect.report import Report

_BADGES = {"recognised": "fp8", "sinks": "fp8", "sdpa": "fp8", "stays": "rule"}
"""The colour of each status: that of linears that are fine, or of those that are kept."""


def attentions_section(report: Report) -> Iterable[Markup]:
    """Every attention as a line; nothing where there is none."""
    if not report.attentions:
        return
    search = element("input", type="search", class_="search", placeholder="Search names, masks, reasons")
    search = Markup(search.replace("<input", '<input aria-label="Search attentions"', 1).removesuffix("</input>"))
    controls = element(
        "div", search, element("output", class_="shown"), class_="controls attention-controls", hidden=True
    )
    headings = [heading for heading in HEADINGS if heading]
    head = element("tr", *(element("th", heading, scope="col") for heading in headings))
    rows = (_row(breakable(row.name), row) for row in report.attentions)
    table = element("table", element("thead", head), element("tbody", *rows), class_="attentions")
    nothing = element("p", "No attention fits the search.", class_="nothing", hidden=True)
    frame = element("div", table, class_="scroll")
    yield element("section", element("h2", "Attention"), controls, frame, nothing, class_="attention-section")


def attentions_table(report: Report) -> Markup | None:
    """Attentions that repeat as one line, as a notebook shows them."""
    if not report.attentions:
        return None
    head = element("tr", *(element("th", heading) for heading in HEADINGS))
    rows = (
        _row(name, row, element("td", f"×{count}" if count > 1 else "", class_="quiet"))
        for name, count, row in folded(report.attentions)
    )
    return element("div", element("table", element("thead", head), element("tbody", *rows)), class_="scroll")


def _badge(row: AttentionRow) -> str:
    return "rule" if row.precision == "kept" else _BADGES[row.status]


def _row(name: str, row: AttentionRow, count: Markup | None = None) -> Markup:
    return element(
        "tr",
        element("td", name, class_="name", data_value=row.name),
        count,
        element("td", element("span", row.runs_as, class_=f"badge {_badge(row)}"), class_="nowrap"),
        element("td", row.detail, class_="detail"),
        class_="attention",
    )
