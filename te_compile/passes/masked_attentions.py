"""Attention under a mask that nothing was proved about, without what the mask hides.

Padding, packed documents, a prefix, a mask made before a graph break: what a boolean mask says is known when it runs,
not when it is compiled. PyTorch's kernels read it for each pair of query and key and compute all pairs. Here
``te::mask_tiles`` packs it into bits and lists the tiles in which something is seen, once for all layers that read it,
and ``te::masked_attention`` visits those. On an H200 attention with its gradients takes, in milliseconds, bf16:

    rows × heads, of keys × positions × features     mask                                cuDNN with it     by tiles
    4 × 32, 8 × 2048 × 128                           causal, padded to 683 … 2048        3.24              1.06
    4 × 32, 8 × 2048 × 128                           causal, documents of 256            3.24              0.50
    8 × 32, 8 × 1024 × 64                            causal, padded in front             1.04              0.37
    64 × 12, 12 × 512 × 64                           padded to 171 … 512, dropout 0.1    1.30              0.62
    64 × 12, 12 × 512 × 64                           hides nothing                       0.94              0.61
    64 × 16, 16 × 128 × 64                           padded to 42 … 128                  0.17              0.12

and packing the mask 0.005 to 0.03 (``python -m benchmarks.masked_attention``). The mask must be one for all heads. One
that is added must be made of zeros and minus infinities, by the way it is written (added_masks.py): others may hide by
a number that is only small, and stay, and so does attention of few queries, as in decoding.
A dropout is drawn as ``te::dropout_attention`` draws its own, in bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_compile.ops.mask_tiles import MASK_TILES
from te_compile.ops.masked_attention import MASKED_ATTENTION
from te_compile.options import Options
from te_compile.passes.added_masks import Shown, shown_by
from te_compile.passes.attention_kernels import ordinary_attentions
from te_compile.passes.attention_operators import are_run_by_kernels
from te_compile.passes.captured_nodes import argument, size_hint, value_of, wrapped_kind
from te_compile.passes.dropout_attentions import wants_eager_draws
from te_compile.passes.fold_masks import WINDOW
from te_compile.passes.plan import Attention, Plan
from te_compile.passes.regions import Region
from te_compile.passes.side_effects import may_change
from te_compile.passes.step_cost import waits_for_host
from te_compile.passes.undo_repeated_heads import heads_before_copies
from te_compile.passes.window_attentions import may_be_an_operator, put_operator, read_as_rows
from te_compile.passes.writing import Writer

FEWEST_QUERIES = 128
"""A tile: with fewer most of one is not there."""

_OPERATORS = ("mask_tiles", "masked_attention_forward", "masked_attention_backward")

Runs = Callable[[Any, Any, Any, float], bool]
"""Is there a kernel for q, k and v, [B, S, H, D], and a dropout of this probability?"""


def is_run_by_kernels(q: Any, k: Any, v: Any, probability: float) -> bool:
    """Do kernels run attention under a mask? q, k, v: [B, S, H, D]; probability: of a dropout."""
    return are_run_by_kernels(_OPERATORS, q, k, v, probability)


def masked_attentions(regions: list[Region], plan: Plan, options: Options, runs: Runs = is_run_by_kernels) -> int:
    """Give attention under a mask of booleans to kernels that skip what it hides; returns how many. The plan's linears
    must have been selected. runs: is there a kernel?"""
    found = [index for index in ordinary_attentions(regions, plan) if plan.attentions[index].mask == "kept"]
    if not found or waits_for_host(plan, options, torch.is_grad_enabled()):
        return 0
    changed, changes, tiles = 0, dict[Node, bool](), dict[tuple[Any, ...], list[Node]]()
    for index in found:
        node: Any = plan.attentions[index].node
        operands = operands_before_copies(node, changes)
        if not may_be_an_operator(node, operands, changes) or not _fits(node) or not may_drop(node, options):
            continue
        q, k, v = read_as_rows(node, operands)
        shown = _shown(node, changes)
        if shown is not None and runs(q, k, v, float(argument(node, 4, "dropout_p", 0.0))):
            plan.attentions[index] = _replaced(plan.attentions[index], operands, shown, changes, tiles)
            changed += 1
    return changed


def operands_before_copies(node: Node, changes: dict[Node, bool]) -> list[Node]:
    """Queries, keys and values, these as they were before copies were made of them, unless each is to drop others."""
    query, key, value = (argument(node, place, name) for place, name in enumerate(("query", "key", "value")))
    drops = argument(node, 4, "dropout_p", 0.0) != 0
    return [query, *((None if drops else heads_before_copies(node, key, value, changes)) or (key, value))]


def may_drop(node: Node, options: Options) -> bool:
    """Is there no dropout, or one whose draw is Inductor's to choose, of heads that have keys of their own?"""
    probability = argument(node, 4, "dropout_p", 0.0)
    heads = (value_of(argument(node, place, name)).shape[1] for place, name in enumerate(("query", "key")))
    return probability == 0 or (0 < probability < 1 and len(set(heads)) == 1 and not wants_eager_draws(options))


def _fits(node: Node) -> bool:
    """Is the mask one for all heads, and are queries many?"""
    mask, (batch, _, queries, _) = argument(node, 3, "attn_mask"), value_of(node).shape
    seen = value_of(mask)
    if not isinstance(seen, Tensor) or wrapped_kind(mask) or not 2 <= seen.dim() <= 4:
        return False
    if argument(node, 5, "is_causal", False) or seen.device != value_of(node).device:
        return False
    if size_hint(queries) < FEWEST_QUERIES:
        return False
    is_one_for_heads = seen.dim() < 3 or statically_known_true(seen.shape[-3] == 1) or seen.stride(-3) == 0
    of_batch = seen.shape[0] if seen.dim() == 4 else 1
    return bool(is_one_for_heads) and any(statically_known_true(of_batch == count) for count in (1, batch))


def _shown(node: Node, changes: dict[Node, bool]) -> Node | Shown | None:
    """The mask's booleans; None if it may be made of other numbers than they would be."""
    mask = argument(node, 3, "attn_mask")
    return mask if value_of(mask).dtype == torch.bool else shown_by(mask, changes)


def _replaced(
    attention: Attention,
    operands: list[Node],
    shown: Node | Shown,
    changes: dict[Node, bool],
    tiles: dict[tuple[Any, ...], list[Node]],
) -> Attention:
    """The attention with the operator in the place of its call. tiles: those of masks that were met before, which may
    be broadcast for other queries."""
    node: Any = attention.node
    lengths = (str(value_of(argument(node, place, name)).shape[2]) for place, name in enumerate(("query", "key")))
    key = (node.graph, shown.key if isinstance(shown, Shown) else shown, *lengths)
    known = tiles.get(key)
    if known is None:
        known = _tiles_of(node, shown)
        if isinstance(shown, Shown) or not may_change(shown, changes):
            tiles[key] = known
    undone = operands[1] is not argument(node, 1, "key")
    probability = float(argument(node, 4, "dropout_p", 0.0))
    call = put_operator(MASKED_ATTENTION, node, operands, [*known, probability])
    changed = {"heads": "undone", "heads_reason": ""} if undone else {}
    if WINDOW in node.meta:  # that no kernel skips what is outside is not true of these
        changed |= {"mask_reason": ""}
    return replace(attention, node=call, kernel="tiles", **changed)


def _tiles_of(node: Node, shown: Node | Shown) -> list[Node]:
    """The results of ``te::mask_tiles`` for the mask of this call, in front of it."""
    write, sizes = Writer(node), []
    mask = shown.written(write) if isinstance(shown, Shown) else shown
    for operand, name in enumerate(("query", "key")):
        tensor = argument(node, operand, name)
        size = value_of(tensor).shape[2]
        sizes.append(size if isinstance(size, int) else write.method("size", tensor, 2))
    if value_of(mask).dim() > 2:
        mask = write.method("select", mask, -3, 0)  # of one head
    if value_of(mask).dim() < 3:
        mask = write.method("unsqueeze", mask, 0)
    mask = write.method("expand", mask, -1, *sizes)
    made = write.call(MASK_TILES, mask, torch.is_grad_enabled())
    return [write.call(operator.getitem, made, place) for place in range(len(value_of(made)))]
