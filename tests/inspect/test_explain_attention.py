"""What ``te_compile.explain`` says of attention, for models as people write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import te_compile
from te_compile.inspect import AttentionRow

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

TOKENS, WIDTH = 16, 32
SMALL = {
    "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def llama(attention: str, **changes: int) -> nn.Module:
    config = transformers.LlamaConfig(**{**SMALL, **changes}, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config).bfloat16()


def example() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 64, (2, TOKENS))}


def padded() -> dict[str, Tensor]:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :3] = 0
    return {**example(), "attention_mask": mask}


def attentions(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[AttentionRow, ...]:
    return te_compile.explain(model, *args, **kwargs).attentions


class Attention(nn.Module):
    """One head behind a causal mask that is built as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=x.device).tril()
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0]


class Blocks(nn.Module):
    """Three equal ones; with a break after each, they share one graph."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.blocks, self.breaks = nn.ModuleList(nn.ModuleDict({"attn": Attention()}) for _ in range(3)), breaks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block["attn"](x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


def test_the_eager_attention_of_a_llama_with_shared_heads_is_told_under_its_name() -> None:
    report = te_compile.explain(llama("eager"), **example())
    expected = AttentionRow("model.layers.0.self_attn", "recognised", mask="folded_causal", heads="undone")
    assert report.attentions[0] == expected
    assert [row.name for row in report.attentions] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    expected_line = "self_attn  ×2  sdpa, recognised  mask folded away: causal; copies of key heads undone"
    assert expected_line in str(report)


def test_attention_that_is_a_call_already_is_not_claimed_as_recognised() -> None:
    first, second = attentions(llama("sdpa"), **example())
    assert (first.name, first.status) == ("model.layers.0.self_attn", "sdpa")
    assert first.mask in ("is_causal", "folded_causal")  # some versions of transformers build a mask for this call
    assert second.name == "model.layers.1.self_attn"


def test_a_causal_mask_built_as_a_tensor_is_told_as_folded() -> None:
    rows = attentions(Blocks(), torch.randn(2, TOKENS, WIDTH))
    assert rows == tuple(AttentionRow(f"blocks.{i}.attn", "sdpa", mask="folded_causal") for i in range(3))


def test_blocks_that_share_a_graph_have_an_attention_each() -> None:
    report = te_compile.explain(Blocks(breaks=True), torch.randn(2, TOKENS, WIDTH))
    assert [row.name for row in report.attentions] == [f"blocks.{i}.attn" for i in range(3)]
    assert [row.name for row in report.rows] == [f"blocks.{i}.attn.qkv" for i in range(3)]


def test_a_mask_of_real_padding_is_kept_and_says_what_it_depends_on() -> None:
    row, _ = attentions(llama("sdpa"), **padded())
    assert row.mask == "kept" and "it depends on attention_mask" in row.mask_reason
    assert row.heads == "copied" and "with a mask" in row.heads_reason


class Divides(nn.Module):
    """Attention that masks its scores before it divides them, as CodeGen's did."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(self.embed(input_ids)).chunk(3, -1))
        seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=q.device).tril()
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, :].bool()
        scores = torch.where(seen, q.float() @ k.float().mT, torch.finfo(torch.float32).min)
        return F.softmax(scores / WIDTH**0.5, dim=-1).to(v.dtype) @ v


def test_a_mask_that_is_divided_with_the_scores_is_folded() -> None:
    model = Divides().bfloat16()
    assert {(each.status, each.mask) for each in attentions(model, **example())} == {("recognised", "folded_causal")}
    assert {each.mask for each in attentions(model, **padded())} == {"kept"}


def test_flex_attention_has_a_row_and_linears_around_it_run_in_fp8() -> None:
    with torch.no_grad():
        report = te_compile.explain(llama("flex_attention").eval(), **example())
    assert [row.name for row in report.attentions] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all(row.status == "stays" and "flex_attention kernel" in row.reason for row in report.attentions)
    assert {row.name for row in report.rows if row.status == "kept"} == {"lm_head"}


def test_scores_under_a_soft_cap_stay_with_the_reason() -> None:
    config = transformers.Gemma2Config(**SMALL, attn_implementation="eager")
    row, _ = attentions(transformers.Gemma2ForCausalLM(config).bfloat16(), **example())
    assert (row.name, row.status, row.mask) == ("model.layers.0.self_attn", "stays", "")
    assert "tanh before softmax" in row.reason and row.detail == row.reason


FP8 = {"recipe": "delayed fp8_dpa=True"}


def test_attention_in_fp8_is_told_as_such_and_counted() -> None:
    report = te_compile.explain(llama("eager", head_dim=64), **example(), options=FP8)
    name = "model.layers.0.self_attn"
    assert report.attentions[0] == AttentionRow(
        name, "recognised", mask="folded_causal", heads="undone", precision="fp8"
    )
    assert "2 of 2 attentions in FP8" in str(report)
    expected_line = "self_attn  ×2  fp8, recognised  mask folded away: causal; copies of key heads undone"
    assert expected_line in str(report)
    assert report.implementations["te::fp8_attention"] == {"reference": 2}
    assert te_compile.inspect.Report.from_json(report.to_json()).attentions == report.attentions


def test_attention_that_stays_in_high_precision_says_why() -> None:
    report = te_compile.explain(llama("sdpa"), **example(), options=FP8)
    row, _ = report.attentions
    assert row.precision == "kept" and "16 features; make them a multiple of 16" in row.precision_reason
    assert row.runs_as == "sdpa" and row.detail.startswith("kept in high precision: its heads have 16 features")
    assert "0 of 2 attentions in FP8" in str(report)


def test_a_recipe_that_does_not_ask_tells_nothing_of_precision() -> None:
    report = te_compile.explain(llama("sdpa"), **example())
    assert "precision" not in str(report.attentions[0].detail) and "attentions in FP8" not in str(report)


class Core(nn.Module):
    """Attention without a parameter of its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class AroundCore(nn.Module):
    """One head of 64 features."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.core = nn.Linear(WIDTH, 192), Core()

    def forward(self, x: Tensor) -> Tensor:
        return self.core(*(part[:, None] for part in self.qkv(x).chunk(3, -1)))


@pytest.mark.parametrize(("options", "precision", "idle"), [(FP8, "kept", False), ({}, "", True)])
def test_a_pattern_for_attention_alone_is_idle_only_where_the_recipe_does_not_ask(
    options: dict[str, Any], precision: str, idle: bool
) -> None:
    report = te_compile.explain(AroundCore(), torch.randn(2, TOKENS, WIDTH), options={**options, "exclude": "core"})
    assert [row.precision for row in report.attentions] == [precision]
    assert any("exclude pattern 'core' fits no linear" in note for note in report.notes) == idle


@pytest.mark.slow
def test_what_the_option_changes_is_a_difference() -> None:
    model = llama("sdpa", head_dim=64)
    plain, asked = (te_compile.explain(model, **example(), options=options) for options in ({}, FP8))
    found = te_compile.diff(plain, asked)
    assert [change.fields["precision"] for change in found.attentions] == [("", "fp8")] * 2
    assert "precision: nothing → fp8" in str(found)
    assert "fp8" in asked.to_html()


def test_a_model_without_attention_has_no_such_rows() -> None:
    report = te_compile.explain(nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH))
    assert report.attentions == () and "attention" not in str(report)


@pytest.mark.slow
def test_what_padding_costs_attention_is_a_difference() -> None:
    model = llama("eager")
    found = te_compile.diff(te_compile.explain(model, **example()), te_compile.explain(model, **padded()))
    assert [change.fields["mask"] for change in found.attentions] == [("folded_causal", "kept")] * 2
    assert "heads: undone → copied: with a mask no fused kernel shares them" in str(found)
