"""The HTML page: complete, escaped, without outside resources, and alive in a browser where there is one."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from difflib import SequenceMatcher
from html.parser import HTMLParser
from pathlib import Path

import pytest

from te_compile.inspect import graph_changes
from te_compile.inspect.coverage import percent, shares
from te_compile.inspect.graph_changes import CONTEXT, Change, changes, counts
from te_compile.inspect.layers import by_layer, layer_of
from te_compile.inspect.markup import Markup, element, joined
from te_compile.inspect.page import features_text, page
from te_compile.inspect.report import GraphPass, Report
from tests.inspect.reports import attention, full_report, report, row, staying

VOID = {"meta", "input", "wbr"}


class Outline(HTMLParser):
    """Checks that every element is closed, and keeps what can load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def hostile(name: str = "h.0.<script>alert('x')</script>\"&") -> Report:
    return report(
        [row(name, reason="<b>because</b>", status="kept", fused=(), cause="unsupported")],
        model="<img src=x>",
        attentions=(staying("<q>attn", "<small>"), attention("<var>", mask="kept", mask_reason="<kbd>")),
        breaks=("<i>break</i>",),
        notes=("</script><script>",),
        skipped={"<u>.weight": {"x": 1}},
        graphs=((GraphPass("<em>", "a = '<s>'", "b = '</pre>{{body}}'", 1, 1.0),),),
    )


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    text = page(full_report())
    outline = Outline(text)
    assert not outline.open and not outline.loads
    assert not re.search(r"https?://|@import|url\(", text)


def test_everything_of_the_report_is_on_the_page() -> None:
    found = page(full_report())
    for expected in (
        "attn.qkv",
        "projection to logits",
        "model.py:7",
        "a note",
        "find_linears",
        "te::gemm",
        "fc.weight",
        "capped.attn",
        "copies of key heads undone",
        "through tanh before softmax",
    ):
        assert expected in found.replace("<wbr>", "")


def test_what_a_user_named_is_never_markup() -> None:
    text = page(hostile()).replace("<wbr>", "")
    raws = ["<img", "<b>because", "<i>", "<u>", "<em>", "<s>", "alert('x')</script>", "</pre>{{"]
    for raw in [*raws, "<q>", "<small>", "<var>", "<kbd>"]:
        assert raw not in text
    assert text.count("<script>") == 1 and "&lt;script&gt;alert(&#x27;x&#x27;)" in text
    assert "{{body}}" in text  # a mark in the data stays data
    assert "<img" not in hostile()._repr_html_() and "<script" not in hostile()._repr_html_()


def test_an_empty_report_is_a_page_too() -> None:
    text = page(report([], totals=dict.fromkeys(report([]).totals, 0), graphs=((),)))
    assert not Outline(text).open and "No linears were found" in text


def test_a_notebook_is_not_restyled() -> None:
    text = full_report()._repr_html_()
    outline = Outline(text)
    assert not outline.open and not outline.loads and "script" not in outline.tags
    rules = re.sub(r"/\*.*?\*/", "", text[text.index("<style>") + 7 : text.index("</style>")], flags=re.DOTALL)
    selectors = [each for head in re.findall(r"([^{}]+)\{", rules) for each in head.split(",")]
    assert selectors and all(each.strip().startswith(".te-report") for each in selectors)


def test_a_report_is_saved_in_the_form_of_its_suffix(tmp_path: Path) -> None:
    given = full_report()
    for suffix in ("html", "json", "txt", "HTML"):
        given.save(tmp_path / f"report.{suffix}")
    assert Report.from_json((tmp_path / "report.json").read_text(encoding="utf-8")) == given
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert "90.0% of the eligible" in (tmp_path / "report.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["report.pdf", "report", ".html/report"])
def test_a_suffix_that_says_no_form_is_an_error_that_names_those_that_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"choose one of \.html, \.json, \.txt"):
        full_report().save(tmp_path / name)


def test_added_features_are_shown() -> None:
    assert features_text(row("fc", shape=(4, 100, 2500), padding=(12, 0))) == "100+12 → 2,500"


def test_each_attention_is_a_line_that_can_be_searched() -> None:
    text = page(full_report())
    assert text.count('<tr class="attention"') == 5 and 'aria-label="Search attentions"' in text
    assert "h.0–3.attn" in full_report()._repr_html_() and "<input" not in full_report()._repr_html_()


# --- parts ---------------------------------------------------------------------------------------------------------


def test_text_is_escaped_and_markup_is_not() -> None:
    inner = element("b", "1 < 2")
    assert element("p", inner, "&", None, class_='a"b', hidden=True, title=None) == (
        '<p class="a&quot;b" hidden><b>1 &lt; 2</b>&amp;</p>'
    )
    assert joined(["a", Markup("<br>"), "<"], "-") == "a-<br>-&lt;"


def test_the_shares_add_up_and_know_their_causes() -> None:
    rows = [
        row("a"),
        row("b", status="kept", cause="rule"),
        row("c", status="kept"),
        row("d", status="kept", cause="user"),
    ]
    found = {share.kind: share for share in shares(rows)}
    assert list(found) == ["fp8", "unsupported", "rule", "user"]
    assert sum(share.fraction for share in found.values()) == pytest.approx(1)
    assert found["fp8"].flops == 2 * 16 * 32 * 64


@pytest.mark.parametrize(
    ("fraction", "text"), [(1.0, "100.0%"), (0.99999, "99.9%"), (0.0, "0.0%"), (0.00001, "<0.1%"), (0.123, "12.3%")]
)
def test_nearly_all_is_not_rounded_to_all(fraction: float, text: str) -> None:
    assert percent(fraction) == text


def test_a_layer_is_all_below_the_first_number() -> None:
    assert [layer_of(name) for name in ("model.layers.0.mlp.up", "h.3.fc", "pooler.dense", "lm_head", "seq.0")] == [
        "model.layers.0", "h.3", "pooler", "", "seq",
    ]  # fmt: skip
    rows = [row("h.0.a"), row("lm_head"), row("h.0.b")]
    assert {name: len(each) for name, each in by_layer(rows).items()} == {"h.0": 2, "": 1}


def test_a_comparison_shows_what_differs_and_a_little_around_it() -> None:
    old = [f"line {i}" for i in range(30)]
    new = [*old[:10], "new", *old[11:25], *old[26:]]
    found = changes("\n".join(old), "\n".join(new))
    assert counts(found) == (1, 2)
    assert [each.text for each in found if each.mark != " "] == [
        "7 lines", "line 10", "new", "8 lines", "line 25", "1 lines",
    ][:5]  # fmt: skip
    assert found[1 : 1 + CONTEXT] == [Change(" ", f"line {i}") for i in (7, 8, 9)]
    assert changes("same", "same") == []


def test_before_and_after_can_be_read_back_from_a_comparison() -> None:
    old, new = "a\nb\nc\nd", "a\nx\nc\nd\ne"
    found = changes(old, new)
    assert "\n".join(each.text for each in found if each.mark in " -") == old
    assert "\n".join(each.text for each in found if each.mark in " +") == new


def test_comparisons_of_any_lines_can_be_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that come once or often, moved, and with nothing in common."""
    monkeypatch.setattr(graph_changes, "CONTEXT", 100)  # nothing is left out
    for _ in range(300):
        old, new = ([random.choice("abcdefghijkl") for _ in range(random.randrange(1, 20))] for _ in range(2))
        found = changes("\n".join(old), "\n".join(new))
        assert "".join(each.text for each in found if each.mark in " -") == ("" if old == new else "".join(old))
        assert "".join(each.text for each in found if each.mark in " +") == ("" if old == new else "".join(new))


def test_a_comparison_takes_as_long_for_each_layer_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    class Counting(SequenceMatcher[str]):
        def __init__(self, junk: None, a: list[str], b: list[str], autojunk: bool) -> None:
            given.append(len(a) + len(b))
            super().__init__(junk, a, b, autojunk)

    monkeypatch.setattr(graph_changes, "SequenceMatcher", Counting)
    old = [f"{layer}.{i} = f({i})" for layer in range(40) for i in range(20)]
    new = [line if i % 20 else f"{line} + 1" for i, line in enumerate(old)]
    assert counts(changes("\n".join(old), "\n".join(new))) == (40, 40)
    assert given == [2] * 40, "what is alike needs no matcher"


# --- in a browser --------------------------------------------------------------------------------------------------


def browser() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


@pytest.mark.slow
@pytest.mark.skipif(browser() is None, reason="no Chromium to run the page in")
def test_the_page_searches_filters_and_sorts_as_its_address_says(tmp_path: Path) -> None:
    rows = [row(f"h.{i}.fc", shape=(16, 32, 16 * (i + 1))) for i in range(4)]
    rows.append(row("lm_head", status="kept", cause="rule", reason="because", fused=()))
    report(rows, attentions=(attention("h.0.attn"), staying("h.1.attn"))).save(tmp_path / "report.html")

    def visible(asked: str, what: str = "linear") -> list[str]:
        command = [
            str(browser()), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{tmp_path}/report.html#{asked}",
        ]  # fmt: skip
        text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        found = re.findall(rf'<tr class="({what}[^"]*)".*?data-value="([^"]*)"', text)
        return [name for classes, name in found if not {"out", "folded"} & set(classes.split())]

    assert visible("q=FC+norm&sort=flops&down") == ["h.3.fc", "h.2.fc", "h.1.fc", "h.0.fc"]
    assert visible("kind=rule") == ["lm_head"]
    assert visible("kind=rule&attention=H.+tanh", "attention") == ["h.1.attn"]
    assert visible("kind=rule", "attention") == ["h.0.attn", "h.1.attn"]
