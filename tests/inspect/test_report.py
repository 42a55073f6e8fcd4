"""The report as text and as JSON."""

from __future__ import annotations

import json
import random
import sys
from itertools import product

import pytest

from te_compile.inspect.report import Report
from te_compile.inspect.table import NAME_WIDTH, WIDTH, elided, lines_of
from tests.inspect.reports import attention, full_report, report, row, staying


def test_a_report_survives_json() -> None:
    before = full_report()
    assert Report.from_json(before.to_json()) == before


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"rows": []}', '{"rows": [], "weights": []}'])
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no report"):
        Report.from_json(text)


@pytest.mark.parametrize("rows", [3, [3], [{}], [{"name": "fc"}]], ids=str)
def test_rows_that_are_none_are_refused(rows: object) -> None:
    data = json.loads(full_report().to_json()) | {"rows": rows}
    with pytest.raises(ValueError, match="no report"):
        Report.from_json(json.dumps(data))


def test_where_nothing_is_eligible_no_share_is_claimed() -> None:
    before = report([row("fc", status="kept", reason="exclude pattern 'fc'", cause="user")])
    totals = {**before.totals, "fp8": 0, "kept": 1, "kept_by_user": 1, "eligible_flops": 0, "fp8_flops": 0}
    nothing = report(list(before.rows), totals=totals)
    assert "0 of 1 linears in FP8; none is eligible" in str(nothing) and "100.0% of" not in str(nothing)
    assert "no linear is eligible" in nothing.to_html()


def test_a_call_of_no_rows_has_eligible_linears_all_the_same() -> None:
    before = report([row("fc")])
    empty = report([row("fc")], totals={**before.totals, "eligible_flops": 0, "fp8_flops": 0})
    assert "1 of 1 linears in FP8\n" in str(empty) and "no linear is eligible" not in empty.to_html()


def test_the_fraction_is_that_of_the_eligible_flops() -> None:
    assert report([row("fc")]).fp8_flops_fraction == 0.9
    nothing = dict.fromkeys(report([]).totals, 0)
    assert report([], totals=nothing).fp8_flops_fraction == 1.0


def test_the_text_says_all_that_was_found() -> None:
    text = str(full_report())
    for expected in (
        "90.0% of the eligible", "h.0–", "attn.qkv", "x: norm (rms), shared by 3", "projection to logits", "model.py:7",
        "te::gemm ×3", "cublaslt (gemm), triton (quantize): needs a CUDA device", "fc.weight: 2 of gradient", "a note",
        "h.0–3.attn", "mask folded away: causal; copies of key heads undone", "through tanh before softmax",
    ):  # fmt: skip
        assert expected in text


def test_no_line_is_wider_than_120_columns() -> None:
    long = ".".join(["a_rather_long_component"] * random.randint(4, 9))
    rows = [row(f"{long}.{i}.proj", fused=("x: " + "mul·" * 60,)) for i in range(3)]
    rows.append(row(long, status="kept", reason="because " * 40))
    text = str(report(rows, breaks=("word " * 80,)))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" in text and ".0–2.proj" in text


def test_long_names_lose_their_middle() -> None:
    name = "".join(random.choices("abc.", k=random.randint(NAME_WIDTH + 1, 200)))
    short = elided(name, NAME_WIDTH)
    assert len(short) == NAME_WIDTH
    start, end = short.split("…")
    assert name.startswith(start) and name.endswith(end)
    assert elided(name, len(name)) == name


def test_equal_layers_are_one_line() -> None:
    rows = [row(f"h.{i}.experts.{j}.w1") for i, j in product(range(3), range(4))]
    (line,) = lines_of(random.sample(rows, len(rows)))
    assert (line.name, line.count) == ("h.0–2.experts.0–3.w1", 12)


def test_layers_that_differ_in_anything_are_not_folded_together() -> None:
    rows = [row(f"h.{i}.fc") for i in range(6)]
    rows[2] = row("h.2.fc", fused=())
    rows[4] = row("h.4.fc", shape=(16, 32, 128))
    folded = [(line.name, line.count) for line in lines_of(rows)]
    assert folded == [("h.0,1,3,5.fc", 4), ("h.2.fc", 1), ("h.4.fc", 1)]


def test_combinations_that_no_name_has_are_not_listed_to_see_that() -> None:
    """Of three numbers there are 27 million here."""
    names = [f"a.{i}.b.{i}.c.{i}" for i in range(300)]
    assert [(line.name, line.count) for line in lines_of([row(name) for name in names])] == [
        (name, 1) for name in names
    ]


def test_a_range_may_have_gaps() -> None:
    rows = [row(f"h.{i}.fc") for i in (0, 2, 3, 4, 5, 9)]
    assert [line.name for line in lines_of(rows)] == ["h.0,2–5,9.fc"]


def test_flops_are_those_of_the_model_and_added_features_are_shown() -> None:
    padded = row("fc", shape=(8, 100, 64), padding=(12, 0))
    assert padded.flops == 2 * 8 * 100 * 64
    assert "8 × 100+12 → 64" in str(report([padded, row("other")]))
    assert Report.from_json(report([padded]).to_json()).rows == (padded,)


def test_a_row_of_an_older_version_has_no_padding() -> None:
    text = report([row("fc")]).to_json().replace('"padding"', '"unknown"')
    with pytest.raises(ValueError, match="no report"):
        Report.from_json(text)
    without = json.loads(report([row("fc")]).to_json())
    del without["rows"][0]["padding"], without["rows"][0]["cause"], without["model"]
    assert Report.from_json(json.dumps(without)).rows[0].padding == (0, 0)


def test_names_that_form_no_range_stay_single() -> None:
    rows = [row("h.0.experts.1.w"), row("h.1.experts.0.w")]
    assert [line.name for line in lines_of(rows)] == [each.name for each in rows]


def test_numbers_inside_of_words_are_names() -> None:
    assert [line.name for line in lines_of([row("fc1"), row("fc2"), row("conv2d")])] == ["fc1", "fc2", "conv2d"]


def test_one_linear_that_runs_twice_is_one_line() -> None:
    (line,) = lines_of([row("shared"), row("shared")])
    assert (line.name, line.count) == ("shared", 2)


def test_attentions_are_a_table_of_their_own_after_the_linears() -> None:
    kept = attention("a.attn", status="sdpa", mask="kept", mask_reason="because", heads="copied", heads_reason="so")
    lines = str(report([row("fc")], attentions=(kept, staying("b.attn")))).splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("attention"))
    assert heading > next(i for i, line in enumerate(lines) if line.startswith("fc"))
    first, second = (" ".join(line.split()) for line in lines[heading + 2 : heading + 4])
    assert first == "a.attn sdpa mask kept: because; key heads stay copied: so"
    assert second.startswith("b.attn as written its scores")


def test_where_there_is_no_attention_none_is_spoken_of() -> None:
    nothing = report([row("fc")])
    assert "attention" not in str(nothing)
    assert '<tr class="attention"' not in nothing.to_html() and "attention" not in nothing._repr_html_()


def test_attentions_of_equal_layers_are_one_line_and_others_are_not() -> None:
    rows = (*(attention(f"h.{i}.attn") for i in range(3)), attention("h.3.attn", mask="kept", mask_reason="x"))
    text = str(report([], attentions=rows))
    assert "h.0–2.attn  ×3" in text and "h.3.attn" in text


def test_a_report_of_an_older_version_has_no_attentions() -> None:
    data = json.loads(report([row("fc")], attentions=(attention("attn"),)).to_json())
    assert data["attentions"][0]["mask"] == "folded_causal"
    del data["attentions"]
    assert Report.from_json(json.dumps(data)).attentions == ()


def test_a_terminal_gets_colours_where_rich_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    text = str(full_report())
    assert "\x1b[" in text and "attn.qkv" in text and "projection to logits" in text
    assert "h.0–3.attn" in text and "sdpa, recognised" in text


def test_a_terminal_without_rich_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    text = str(full_report())
    assert "\x1b[" not in text and "attn.qkv" in text
