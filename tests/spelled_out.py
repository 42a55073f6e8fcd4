"""Attention as models spell it out: operands, masks, and what the pass that recognises it must do to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from te_compile.passes.drop_noop_casts import drop_noop_casts
from te_compile.passes.drop_unread_operands import drop_unread_operands
from te_compile.passes.drop_unread_values import drop_unread_values
from te_compile.passes.follow_writes import follow_writes
from te_compile.passes.recognise_attention import RECOGNISED, STAYS, recognise_attention
from te_compile.passes.text import ops_text
from tests.capturing import captured
from tests.compiling import relative_error

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 12, 8
MINIMUM = torch.finfo(torch.float32).min

Attention = Callable[..., Any]


def heads(heads: int = HEADS, length: int = LENGTH, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    """Queries, keys or values [B, H, S, D] that want a gradient."""
    return torch.randn(BATCH, heads, length, width).to(dtype).requires_grad_()


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [heads(dtype=dtype) for _ in "qkv"]


def rewritten(run: Attention, *inputs: Any) -> tuple[int, GraphModule, list[Any]]:
    gm, examples = captured(run, *inputs)
    for each in (drop_noop_casts, drop_unread_operands, drop_unread_values, follow_writes):
        each(gm.graph)
    count = recognise_attention(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return count, gm, examples


def results(run: Callable[..., Any], inputs: list[Any], leaves: list[Tensor]) -> list[Tensor]:
    """The outputs of ``run`` and the gradients of ``leaves``."""
    outputs = run(*inputs)
    outputs = [y for y in (outputs if isinstance(outputs, (tuple, list)) else (outputs,)) if y.is_floating_point()]
    loss = sum((y.float() * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum() for y in outputs)
    return [*(y.detach() for y in outputs), *torch.autograd.grad(loss, leaves)]


def assert_recognised(
    run: Attention, *inputs: Any, tolerance: float = 1e-5, leaves: list[Tensor] | None = None
) -> GraphModule:
    """``run`` becomes one attention call and gives the same results and gradients, of all inputs or of ``leaves``."""
    count, gm, examples = rewritten(run, *inputs)
    assert count == 1, ops_text(gm.graph) + str([n.meta.get(STAYS) for n in gm.graph.nodes if STAYS in n.meta])
    text = ops_text(gm.graph)
    assert "softmax" not in text and "bmm" not in text and text.count("scaled_dot_product_attention(") == 1, text
    (new,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert new.meta[RECOGNISED]
    leaves = [x for x in inputs if x.requires_grad] if leaves is None else leaves
    for got, wanted in zip(results(gm, examples, leaves), results(run, list(inputs), leaves), strict=True):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        if got.dtype == torch.float32:
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
        else:  # where large numbers cancel, a small one is off by their roundings: judged beside the whole
            assert relative_error(got, wanted) <= tolerance
    return gm


def assert_stays(reason: str, run: Attention, *inputs: Any) -> None:
    """``run`` stays as it is, and its softmax says why."""
    gm, _ = captured(run, *inputs)
    drop_noop_casts(gm.graph)
    before = ops_text(gm.graph)
    assert recognise_attention(gm.graph) == 0
    assert ops_text(gm.graph) == before
    reasons = [node.meta[STAYS] for node in gm.graph.nodes if STAYS in node.meta]
    assert len(reasons) == 1 and reason in reasons[0], reasons


def causal_mask(length: int = LENGTH) -> Tensor:
    return torch.full((length, length), MINIMUM).triu(1)


def padding_mask(hide_a_row: bool = True) -> Tensor:
    """Hides the first keys of one sequence: with ``causal_mask``, its first queries see nothing."""
    mask = torch.zeros(BATCH, 1, 1, LENGTH)
    mask[0, ..., : 5 if hide_a_row else 0] = MINIMUM
    mask[1, ..., -3:] = MINIMUM
    return mask


def shown_rows(mask: Tensor) -> Tensor:
    """1 for the queries that see something under an added ``mask``, 0 for those that see nothing."""
    return (mask.amax(-1, keepdim=True) > MINIMUM).float()


def masks_that_hide_rows() -> list[Tensor]:
    return [causal_mask().minimum(padding_mask()), torch.full((BATCH, 1, LENGTH, LENGTH), MINIMUM)]


def hidden(rows: bool) -> Tensor:
    hidden = torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.4
    hidden[..., 3] = False
    if rows:
        hidden[0, :, 2:5] = True
    return hidden
