"""Two reports beside each other."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import te_compile
from te_compile.inspect.report import GraphPass, Report
from tests.inspect.reports import attention, full_report, report, row, staying


def counted(number: int) -> tuple[tuple[GraphPass, ...], ...]:
    return ((GraphPass("fuse_producers", "", "", number, 1.0),), (GraphPass("fuse_producers", "", "", 1, 1.0),))


def pair() -> tuple[Report, Report]:
    before = report([row("a"), row("b"), row("gone"), row("same")], graphs=counted(3), breaks=("old break",))
    after = report(
        [
            row("a", status="kept", reason="excluded", cause="user", fused=()),
            row("b", fused=("x: relu",), implementation="gemm cublaslt"),
            row("new"),
            row("same"),
        ],
        graphs=counted(5),
        totals={**before.totals, "fp8": 3, "fp8_flops": 1500},
    )
    return before, after


def test_a_report_does_not_differ_from_itself() -> None:
    given = full_report()
    found = te_compile.diff(given, Report.from_json(given.to_json()))
    assert not found and str(found) == "no difference"


def test_each_kind_of_change_is_found() -> None:
    before, after = pair()
    found = before.diff(after)
    fields = {change.name: change.fields for change in found.rows}
    assert fields["a"]["status"] == ("fp8", "kept") and fields["a"]["reason"] == ("", "excluded")
    assert fields["b"]["fused"][1] == ("x: relu",) and fields["b"]["implementation"] == ("", "gemm cublaslt")
    assert fields.keys() == {"a", "b"}
    assert (found.removed, found.added) == (("gone",), ("new",))
    assert found.passes == {"fuse_producers": (4, 6)} and found.totals == {"fp8": (4, 3), "fp8_flops": (2700, 1500)}
    assert found.breaks == (("old break",), ()) and found.coverage == (0.9, 0.5)


def test_the_text_tells_the_changes() -> None:
    text = str(te_compile.diff(*pair()))
    for expected in (
        "90.0% → 50.0%", "fp8 → kept: excluded", "fused: x: norm (rms), shared by 3 → x: relu", "- gone", "+ new",
        "- graph break: old break", "pass fuse_producers: 4 → 6",
    ):  # fmt: skip
        assert expected in text
    assert "same" not in text


def test_the_way_back_is_the_other_way_round() -> None:
    before, after = pair()
    assert "kept → fp8: no longer: excluded" in str(after.diff(before))


def test_linears_that_changed_alike_are_told_once() -> None:
    before = report([row(f"h.{i}.fc") for i in range(8)])
    after = replace(before, rows=tuple(replace(each, implementation="gemm cublaslt") for each in before.rows))
    lines = str(before.diff(after)).splitlines()
    assert sum("cublaslt" in line for line in lines) == 1 and any("and 5 more" in line for line in lines)


def test_uses_of_one_weight_are_matched_in_their_order() -> None:
    before = report([row("fc"), row("fc")])
    after = replace(before, rows=(row("fc"), row("fc", fused=())))
    (change,) = before.diff(after).rows
    assert change.name == "fc (2)"


def test_another_recipe_is_a_difference_of_the_question() -> None:
    before = report([row("fc", recipe="delayed")])
    after = replace(before, recipe="current", rows=(row("fc", recipe="current"),))
    found = before.diff(after)
    assert str(found).startswith("recipe: delayed → current") and not found.rows


def test_attentions_that_changed_went_or_came_are_told() -> None:
    before = report([], attentions=(attention("h.0.attn"), attention("h.1.attn"), attention("same"), attention("gone")))
    kept = {"mask": "kept", "mask_reason": "it depends on padding", "heads": "copied", "heads_reason": "of its mask"}
    now = (attention("h.0.attn", **kept), attention("h.1.attn", **kept), attention("same"), staying("new"))
    found = before.diff(report([], attentions=now))
    assert [change.name for change in found.attentions] == ["h.0.attn", "h.1.attn"]
    assert found.attentions[0].fields["mask"] == ("folded_causal", "kept")
    assert (found.attentions_removed, found.attentions_added) == (("gone",), ("new",))
    lines = str(found).splitlines()
    at = lines.index("~ attention h.0.attn, h.1.attn")
    assert lines[at + 1] == "    mask: folded_causal → kept: it depends on padding"
    assert lines[at + 2] == "    heads: undone → copied: of its mask"
    assert lines[at + 3 :] == ["- attention gone", "+ attention new"]
    assert json.loads(found.to_json())["attentions_added"] == ["new"]


def test_an_attention_that_stays_from_now_on_says_why_and_nothing_else() -> None:
    before, after = report([], attentions=(attention("attn"),)), report([], attentions=(staying("attn", "so"),))
    assert str(before.diff(after)).splitlines()[-2:] == ["~ attention attn", "    status: recognised → stays: so"]
    assert "status: stays → recognised" in str(after.diff(before))
    other = report([], attentions=(staying("attn", "else"),))
    assert "    status: so → else" in str(after.diff(other))


def test_only_reports_are_compared() -> None:
    with pytest.raises(TypeError, match="expected two reports"):
        te_compile.diff(report([row("fc")]), {})


def test_a_difference_is_json() -> None:
    data = json.loads(te_compile.diff(*pair()).to_json())
    assert data["coverage"] == [0.9, 0.5] and {change["name"] for change in data["rows"]} == {"a", "b"}
