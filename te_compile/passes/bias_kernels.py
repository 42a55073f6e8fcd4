"""Where kernels of ours run attention with a bias that is added to its scores (ops/biased_attention.py)."""

from __future__ import annotations

from typing import Any

import torch

from te_compile.ops import registry

FEWEST_POSITIONS = 65
"""Queries and keys: up to 64 are one tile of the memory-efficient kernel, and half of one of these."""

_OPERATORS = ("biased_attention_forward", "biased_attention_backward")


def is_run_by_kernels(q: Any, k: Any, v: Any, probability: float) -> bool:
    """Has the registry something better than the references? q, k, v: [B, S, H, D]; probability: of a dropout."""
    if torch.are_deterministic_algorithms_enabled():
        return False  # the last bits of gradients differ from run to run
    operators = (*_OPERATORS, "dropout_bits") if probability else _OPERATORS
    return registry.are_run_by_kernels(operators, q.device, {"q": q, "k": k, "v": v, "probability": probability})
