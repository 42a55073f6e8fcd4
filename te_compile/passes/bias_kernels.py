"""Where kernels of ours run attention with a bias that is added to its scores (ops/biased_attention.py)."""

from __future__ import annotations

from typing import Any

from te_compile.passes.attention_operators import are_run_by_kernels

FEWEST_POSITIONS = 65
"""Queries and keys: up to 64 are one tile of the memory-efficient kernel, and half of one of these."""

_OPERATORS = ("biased_attention_forward", "biased_attention_backward")


def is_run_by_kernels(q: Any, k: Any, v: Any, probability: float) -> bool:
    """Do kernels run attention with a bias? q, k, v: [B, S, H, D]; probability: of a dropout."""
    return are_run_by_kernels(_OPERATORS, q, k, v, probability)
