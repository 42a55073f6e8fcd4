"""Attention that is as fast, or faster, as the model spells it out, which Inductor compiles.

Fused kernels store no scores. That gains nothing where scores are smaller than what they are made of, or where most of
a kernel's tile is empty. And of PyTorch's kernels the memory-efficient one alone has a gradient for a bias: it was made
for an older generation of tensor cores, and on an H200 products of matrices outrun it, scores and all
(``python -m benchmarks.odd_attention``). They do not where rows of scores are not aligned, where softmax is taken in
float32, or where the bias would have to be copied before it is added; nor where kernels of ours run
(``biased_attentions``).

Scores are memory: with ``save_memory=True`` attention is fused all the same, as it is without the ``cost_model``.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from te_compile.options import Options
from te_compile.passes.attention_calls import HEAD_STEP, WIDEST_HEAD
from te_compile.passes.attention_scores import NotAttentionError
from te_compile.passes.bias_kernels import FEWEST_POSITIONS, is_run_by_kernels
from te_compile.passes.captured_nodes import size_hint, value_of
from te_compile.passes.efficient_attention import ALIGNED_KEYS, HALVES, bias_learns
from te_compile.passes.softmax_attention import SoftmaxAttention

_FEWEST = 24  # positions from which on a fused kernel gains
_FEW_KEYS, _SHORT, _NARROW = 64, 128, 64
"""Up to where the kernel gains with a bias that learns: keys of heads that must be widened for it; keys in aligned
rows, if heads have no more features than the last."""


def check_that_scores_are_large(key: Node) -> None:
    """Raise for attention between channels, say, whose features are all positions: it stores few scores."""
    keys, width = map(size_hint, value_of(key).shape[-2:])
    if width > WIDEST_HEAD and keys <= width:
        why = f"its heads have {width} features and only {keys} keys, so that its scores are smaller than its operands"
        raise NotAttentionError(f"{why}; nothing to do: no fused kernel gains there")


def check_that_kernels_are_faster(
    found: SoftmaxAttention, query: Node, key: Node, bias: Node | None, options: Options
) -> None:
    """Raise where fused kernels on a GPU would take longer than the model's own products. query, key: [B, H, …, D]."""
    value: Tensor = value_of(found.output)
    if not options.cost_model or options.save_memory or value.device.type != "cuda" or value.dtype not in HALVES:
        return
    queries, keys = (size_hint(value_of(each).shape[-2]) for each in (query, key))
    if max(queries, keys) < _FEWEST:
        why = f"{queries} queries and {keys} keys are too few for a fused kernel to gain"
        raise NotAttentionError(f"{why}; cost_model=False has one all the same")
    if not bias_learns(value_of(bias)) or _has_kernels_of_ours(found, value_of(query), value_of(key)):
        return
    if _is_slow_with_its_gradient(found, value_of(key), value_of(bias)):
        of = f"{keys} keys of {size_hint(value_of(key).shape[-1])} features"
        why = f"its bias learns, and the one kernel that has a gradient for it takes longer than products for {of}"
        raise NotAttentionError(f"{why}; save_memory=True or cost_model=False has it all the same")


def _has_kernels_of_ours(found: SoftmaxAttention, query: Tensor, key: Tensor) -> bool:
    """Is there a kernel of ours for it, whose values may be as wide as its keys, and which may all be widened?"""
    dtype, width = value_of(found.output).dtype, key.shape[-1]
    widened = -(-width // HEAD_STEP) * HEAD_STEP if isinstance(width, int) else width
    rows = (each.transpose(1, 2) for each in (query, key))
    q, k = (each.new_empty((*each.shape[:3], widened), dtype=dtype) for each in rows)
    is_long = min(size_hint(query.shape[-2]), size_hint(key.shape[-2])) >= FEWEST_POSITIONS
    return is_long and is_run_by_kernels(q, k, k, found.dropout)


def _is_slow_with_its_gradient(found: SoftmaxAttention, key: Tensor, bias: Tensor) -> bool:
    """Does the one kernel that has a gradient for a bias take longer than products of matrices?"""
    keys, width = map(size_hint, key.shape[-2:])
    has_aligned_rows = isinstance(key.shape[-2], int) and keys % ALIGNED_KEYS == 0
    reads_no_more = value_of(found.softmax).dtype in HALVES and bias.stride(-1) == 1
    if width % HEAD_STEP and keys > _FEW_KEYS:
        return True
    return (keys > _SHORT or width > _NARROW) and has_aligned_rows and reads_no_more
