"""A report as one HTML page that needs nothing but itself: it opens from a file, prints, and can be passed on.

Everything is written here and readable without the script, which adds searching, sorting and folding. The look is in
``report.css``, which a notebook shares, and ``page.css``; the frame is ``report.html``, the scripts ``report.js`` and
``attentions.js``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING

from te_compile.inspect.attentions_page import attentions_section
from te_compile.inspect.coverage import KINDS, flops_text, kind_of, percent, shares
from te_compile.inspect.graph_changes import Change, changes, counts
from te_compile.inspect.layers import by_layer
from te_compile.inspect.markup import Markup, breakable, element, joined

if TYPE_CHECKING:
    from te_compile.inspect.report import GraphPass, Report, Row

HEADINGS = (
    ("linear", "text", "name"),
    ("tokens", "number", "tokens"),
    ("in → out", "number", "features"),
    ("share of FLOPs", "number", "flops"),
    ("form", "text", "form"),
    ("runs in", "text", "status"),
    ("fused with, or why it is kept", "text", "detail"),
)
"""Of the table: text, how it sorts, and the name by which a link to the page can ask for it."""


@lru_cache
def asset(name: str) -> str:
    """A file that lies beside this module."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def page(report: Report) -> str:
    """The whole page."""
    parts = {
        "title": element("title", f"te_fp8: {report.model or 'model'}"),
        "style": Markup(asset("report.css") + asset("page.css")),
        "body": joined(_body(report)),
        "script": Markup(asset("report.js") + asset("attentions.js")),
    }
    # One pass over the frame alone: what is filled in is never searched for marks.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], asset("report.html"))


def _body(report: Report) -> Iterable[Markup]:
    yield from _head(report)
    yield _linears(report)
    yield from attentions_section(report)
    yield from _findings(report)
    yield from _graphs(report)


# --- what is read first --------------------------------------------------------------------------------------------


def _head(report: Report) -> Iterable[Markup]:
    what = "forward and backward" if report.training else "inference"
    subtitle = f"{what} · recipe {report.recipe}"
    title = element("h1", element("span", "te_fp8", class_="brand"), " ", report.model)
    yield element("header", title, element("p", subtitle, class_="subtitle"))
    yield element("div", *tiles(report), class_="tiles")
    yield coverage_bar(report.rows)


def tiles(report: Report) -> list[Markup]:
    """The few numbers that sum the report up."""
    totals = report.totals
    ran = f"{flops_text(totals['fp8_flops'])} of {flops_text(totals['eligible_flops'])} a forward"
    share = percent(report.fp8_flops_fraction)
    if not totals["eligible_flops"]:
        share, ran = "–", "the call had no rows" if totals["fp8"] else "no linear is eligible"
    return [
        _tile(share, "of the eligible linear FLOPs in FP8", ran),
        _tile(f"{totals['fp8']} of {totals['linears']}", "linears in FP8"),
        _tile(str(len(report.graphs)), "captured graph" + ("" if len(report.graphs) == 1 else "s")),
        _tile(str(len(report.breaks)), "graph break" + ("" if len(report.breaks) == 1 else "s")),
    ]


def _tile(number: str, what: str, more: str = "") -> Markup:
    return element(
        "div",
        element("div", number, class_="number"),
        element("div", what),
        element("div", more, class_="more") if more else None,
        class_="tile",
    )


def coverage_bar(rows: Sequence[Row]) -> Markup:
    """Every linear's FLOPs by what becomes of them: a bar and its legend."""
    found = shares(rows)
    said = ", ".join(f"{percent(share.fraction)} {KINDS[share.kind]}" for share in found)
    segments = [
        element(
            "span",
            class_=f"segment {share.kind}",
            style=f"flex-grow:{share.fraction:.6f}",
            title=f"{KINDS[share.kind]}: {percent(share.fraction)}, {flops_text(share.flops)}",
        )
        for share in found
        if share.flops
    ]
    legend = [
        element(
            "li",
            element("span", class_=f"swatch {share.kind}"),
            element("b", percent(share.fraction)),
            f" {KINDS[share.kind]} ",
            element("span", f"({share.count})", class_="quiet"),
        )
        for share in found
    ]
    bar = element("div", *segments, class_="bar", role="img", aria_label=f"linear FLOPs: {said or 'none'}")
    return element("div", bar, element("ul", *legend, class_="legend"), class_="coverage")


# --- the table of linears ------------------------------------------------------------------------------------------


def _linears(report: Report) -> Markup:
    if not report.rows:
        return element("section", element("h2", "Linears"), element("p", "No linears were found."))
    total = sum(row.flops for row in report.rows) or 1
    heads = (
        element(
            "th",
            element("button", heading, type="button", data_key=key),
            scope="col",
            data_sort=sort,
            aria_sort="none",
            class_="right" if sort == "number" else None,
        )
        for heading, sort, key in HEADINGS
    )
    largest = max(row.flops for row in report.rows) or 1
    bodies = (_layer(name, rows, total, largest) for name, rows in by_layer(report.rows).items())
    table = element("table", element("thead", element("tr", *heads)), *bodies, class_="linears")
    nothing = element("p", "No linear fits the filter.", class_="nothing", hidden=True)
    frame = element("div", table, class_="scroll")
    return element("section", element("h2", "Linears"), _controls(report.rows), frame, nothing)


def _controls(rows: Sequence[Row]) -> Markup:
    """The search field and filters; without the script they would do nothing, so it shows them."""
    search = element("input", type="search", class_="search", placeholder="Search names, forms, reasons")
    search = Markup(search.replace("<input", '<input aria-label="Search linears"', 1).removesuffix("</input>"))
    options = [element("option", "all", value="")]
    options += [element("option", f"{KINDS[each.kind]} ({each.count})", value=each.kind) for each in shares(rows)]
    chosen = element("select", *options, class_="kind", aria_label="Show which linears")
    layers = element("button", "collapse layers", type="button", class_="fold")
    shown = element("output", class_="shown")
    return element("div", search, chosen, layers, shown, class_="controls", hidden=True)


def _layer(name: str, rows: list[Row], total: int, largest: int) -> Markup:
    """A group of rows, and one line that sums it up."""
    flops = sum(row.flops for row in rows)
    fp8 = sum(row.status == "fp8" for row in rows)
    summed = f"{len(rows)} linear{'' if len(rows) == 1 else 's'}, {fp8} in FP8, {percent(flops / total)} of the FLOPs"
    toggle = element("button", name or "outside of layers", type="button", aria_expanded="true", class_="toggle")
    cell = element("th", toggle, " ", element("span", summed, class_="quiet"), colspan=len(HEADINGS), scope="rowgroup")
    head = element("tr", cell, class_="layer")
    return element("tbody", head, *(_row(row, total, largest) for row in rows), data_layer=name)


def _row(row: Row, total: int, largest: int) -> Markup:
    """total, largest: FLOPs of all linears, and of the heaviest, which fills its meter."""
    tokens, features_in, features_out = row.shape
    cells = (
        element("td", breakable(row.name), class_="name", data_value=row.name),
        element("td", f"{tokens:,}", class_="right", data_value=tokens),
        element("td", features_text(row), class_="right nowrap", data_value=features_in * features_out),
        element(
            "td",
            element("span", class_="meter", style=f"--share:{row.flops / largest:.4f}"),
            percent(row.flops / total),
            class_="right nowrap",
            title=flops_text(row.flops),
            data_value=row.flops,
        ),
        element("td", row.form),
        element("td", element("span", row.status, class_=f"badge {kind_of(row)}")),
        element("td", _detail(row), class_="detail"),
    )
    return element("tr", *cells, class_="linear", data_kind=kind_of(row))


def features_text(row: Row) -> str:
    """``100 → 256``, with what is added inside: ``100+12 → 256``."""
    pairs = zip(row.shape[1:], row.padding, strict=True)
    return " → ".join(f"{size:,}" + (f"+{added}" if added else "") for size, added in pairs)


def _detail(row: Row) -> Markup:
    if row.status != "fp8":
        return joined([row.reason])
    fused = joined(element("div", _fused(text)) for text in row.fused) if row.fused else Markup("")
    return joined([fused, element("div", row.implementation, class_="quiet") if row.implementation else None])


def _fused(text: str) -> Markup:
    which, colon, what = text.partition(": ")
    return joined([element("code", which), f" {what}"]) if colon else joined([text])


# --- everything that is worth a sentence ---------------------------------------------------------------------------


def _findings(report: Report) -> Iterable[Markup]:
    yield from _section("Why linears stay in high precision", reasons(report.rows))
    yield from _section("Graph breaks", [joined([text]) for text in report.breaks])
    skipped = [_skipped(name, counted) for name, counted in report.skipped.items()]
    yield from _section("Amaxes that were not finite, and were skipped", skipped)
    yield from _section("Notes", [joined([note]) for note in report.notes])
    yield from _implementations(report)


def _section(heading: str, items: Sequence[Markup]) -> Iterable[Markup]:
    if items:
        yield element("section", element("h2", heading), element("ul", *(element("li", item) for item in items)))


def reasons(rows: Sequence[Row]) -> list[Markup]:
    """Each reason once, with the linears that it keeps, the heaviest first."""
    total = sum(row.flops for row in rows) or 1
    by_reason: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.status != "fp8":
            by_reason.setdefault((kind_of(row), row.reason), []).append(row)
    heaviest = sorted(by_reason.items(), key=lambda each: -sum(row.flops for row in each[1]))
    return [_reason(kind, reason, members, total) for (kind, reason), members in heaviest]


def _reason(kind: str, reason: str, members: list[Row], total: int) -> Markup:
    names = list(dict.fromkeys(row.name for row in members))
    some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    share = percent(sum(row.flops for row in members) / total)
    quiet = element("span", f"{len(members)} × {some}, {share} of the FLOPs", class_="quiet")
    return joined([element("span", class_=f"swatch {kind}"), f"{reason} ", quiet])


def _skipped(name: str, by_role: Mapping[str, int]) -> Markup:
    roles = ", ".join(f"{count} of {role}" for role, count in by_role.items() if count)
    return joined([element("code", name), f" {roles}"])


def _number(count: int) -> Markup:
    return element("td", str(count), class_="right")


def _implementations(report: Report) -> Iterable[Markup]:
    if not report.implementations:
        return
    rows = (
        element("tr", element("td", element("code", operator)), element("td", name), _number(count))
        for operator, by_name in sorted(report.implementations.items())
        for name, count in by_name.items()
    )
    head = element("tr", element("th", "operator"), element("th", "runs by"), element("th", "times", class_="right"))
    table = element("table", element("thead", head), element("tbody", *rows))
    declined = element("ul", *(element("li", reason) for reason in report.declined))
    not_taken = element(
        "details", element("summary", f"Not taken: {len(report.declined)} better ones, and why"), declined
    )
    frame = element("div", table, class_="scroll")
    yield element("section", element("h2", "Implementations"), frame, not_taken if report.declined else None)


# --- the graphs ----------------------------------------------------------------------------------------------------


def _graphs(report: Report) -> Iterable[Markup]:
    if not report.graphs:
        return
    graphs = (_graph(number, passes) for number, passes in enumerate(report.graphs))
    text = "Each pass in its order: what it counted, its time, and the lines of the graph that it changed."
    yield element("section", element("h2", "Graphs and passes"), element("p", text, class_="quiet"), *graphs)


def _graph(number: int, passes: Sequence[GraphPass]) -> Markup:
    seconds = sum(each.milliseconds for each in passes) / 1e3
    summed = f" {len(passes)} passes in {seconds:.2f} s"
    summary = element("summary", element("b", f"Graph {number}"), element("span", summed, class_="quiet"))
    first, last = (passes[0].before, passes[-1].after) if passes else ("", "")
    whole = [_whole("The graph as captured", first), _whole("The graph after the last pass", last)]
    return element("details", summary, *map(_pass, passes), *whole, class_="graph", open=number == 0)


def _pass(each: GraphPass) -> Markup:
    found = changes(each.before, each.after)
    added, removed = counts(found)
    size = joined([element("span", f"+{added}", class_="added"), " ", element("span", f"−{removed}", class_="removed")])
    facts = (
        element("code", each.name),
        element("span", str(each.count), class_="count", title="what the pass counted"),
        element("span", f"{each.milliseconds:.1f} ms", class_="time quiet"),
        size if found else element("span", "graph unchanged", class_="quiet"),
    )
    if not found:
        return element("div", *facts, class_="pass")
    lines = joined(map(_change, found))
    return element("details", element("summary", *facts, class_="pass"), element("pre", lines, class_="diff"))


def _change(change: Change) -> Markup:
    kind = {"+": "plus", "-": "minus", "@": "left-out", " ": "same"}[change.mark]
    text = f"⋯ {change.text}" if change.mark == "@" else f"{change.mark} {change.text}"
    return element("span", f"{text}\n", class_=kind)


def _whole(title: str, text: str) -> Markup:
    lines = f" {text.count(chr(10)) + 1} lines"
    summary = element("summary", title, element("span", lines, class_="quiet"))
    return element("details", summary, element("pre", text))
