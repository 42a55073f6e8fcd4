"""Reports made by hand."""

from __future__ import annotations

import random

from te_compile.inspect.attentions import AttentionRow
from te_compile.inspect.report import GraphPass, Report, Row

KEPT = "projection to logits (its weight is tied to an embedding); lm_head=True puts it in FP8"


def row(name: str, **changes: object) -> Row:
    given = {"shape": (16, 32, 64), "form": "linear", "status": "fp8", "fused": ("x: norm (rms), shared by 3",)}
    return Row(name=name, **{**given, **changes})


def attention(name: str, **changes: str) -> AttentionRow:
    given = {"status": "recognised", "mask": "folded_causal", "heads": "undone"}
    return AttentionRow(name, **{**given, **changes})


def staying(name: str, reason: str = "its scores go through tanh before softmax") -> AttentionRow:
    return attention(name, status="stays", reason=reason, mask="", heads="")


def report(rows: list[Row], **changes: object) -> Report:
    totals = {
        "linears": len(rows), "fp8": len(rows), "kept": 0, "kept_by_user": 0, "kept_by_rule": 0, "kept_unsupported": 0,
        "graphs": 1, "linear_flops": 4000, "eligible_flops": 3000, "fp8_flops": 2700,
    }  # fmt: skip
    given = {"recipe": "delayed", "training": True, "totals": totals}
    return Report(rows=tuple(rows), **{**given, **changes})


def full_report() -> Report:
    rows = [row(f"h.{i}.{name}") for i in range(random.randint(2, 30)) for name in ("attn.qkv", "mlp.up")]
    rows.append(row("lm_head", status="kept", reason=KEPT, fused=()))
    return report(
        rows,
        graphs=((GraphPass("find_linears", "a = b()\nreturn a", "return ()", 3, 1.25),),),
        breaks=("a branch on the value of a tensor, at model.py:7 in forward",),
        implementations={"te::gemm": {"cublaslt": 3}, "te::quantize": {"triton": 2}},
        declined=("te::gemm cublaslt: needs a CUDA device", "te::quantize triton: needs a CUDA device"),
        skipped={"fc.weight": {"x": 0, "w": 0, "gradient": 2}},
        notes=("a note",),
        attentions=(*(attention(f"h.{i}.attn") for i in range(4)), staying("capped.attn")),
    )
