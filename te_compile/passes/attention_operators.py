"""Whether kernels of ours run the operators that stand for an attention."""

from __future__ import annotations

from typing import Any

import torch

from te_compile.ops import registry


def are_run_by_kernels(operators: tuple[str, ...], q: Any, k: Any, v: Any, probability: float) -> bool:
    """Has the registry something better than the references for ``operators``, whose gradients differ in their last
    bits from run to run? q, k, v: example values, [B, S, H, D]; probability: of a dropout, whose bits are drawn."""
    if torch.are_deterministic_algorithms_enabled():
        return False
    drawing = ("dropout_bits",) if probability else ()
    given = {"q": q, "k": k, "v": v, "probability": probability}
    return registry.are_run_by_kernels((*operators, *drawing), q.device, given)
