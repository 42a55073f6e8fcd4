"""Let attention read the heads of keys and values that exist, instead of copies of them.

Models with fewer heads of keys than of queries repeat them before attention, which writes both out as often as queries
share a head, and again for their gradients. The flash kernels take such heads as they are: ``enable_gqa=True``.

Only those kernels do. With a mask, in float32 or with wide heads, ``enable_gqa`` falls back to the kernel that stores
all scores, which costs far more than the copies; there the copies stay. So masks must have been folded before. What
became of the copies is written on the attention, ``meta[UNDONE]`` or ``meta[COPIES_STAY]``, for the report.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from te_compile.passes.attention_calls import WIDEST_HEAD, attention_calls
from te_compile.passes.attention_scores import same_sizes
from te_compile.passes.captured_nodes import argument, is_tensor, value_of
from te_compile.passes.fold_masks import MASK_STAYS
from te_compile.passes.side_effects import changes_after, may_change, undisturbed

UNDONE = "te_undone_heads"
"""Meta key of an attention that reads the key heads themselves, of which the model had made copies."""

COPIES_STAY = "te_copies_stay"
"""Meta key of an attention: why it goes on reading copies of key heads."""

_DTYPES = (torch.bfloat16, torch.float16)
_ALL = slice(None, None, None)


def _is_method(node: Any, *names: str) -> bool:
    return isinstance(node, Node) and node.op == "call_method" and node.target in names and is_tensor(node)


def _before_new_dimension(node: Any) -> Node | None:
    """[B, G, S, D] of which ``node`` is [B, G, 1, S, D]."""
    if _is_method(node, "unsqueeze") or (isinstance(node, Node) and node.target is torch.unsqueeze):
        return node.args[0] if argument(node, 1, "dim") in (2, -3) else None
    if isinstance(node, Node) and node.target is operator.getitem and isinstance(node.args[1], tuple):
        index = list(node.args[1])
        while len(index) > 3 and index[-1] == _ALL:
            index.pop()
        source = node.args[0]
        return source if index == [_ALL, _ALL, None] and is_tensor(source) else None
    return None


def _unrepeated(node: Any) -> Node | None:
    """[B, G, S, D] of which ``node`` [B, H, S, D] has every head H / G times, one copy after the other."""
    if _is_method(node, "reshape", "view", "flatten") and _is_method(node.args[0], "expand"):
        source = _before_new_dimension(node.args[0].args[0])
        wide = node.args[0]
    elif _is_method(node, "expand"):
        source = node.args[0] if value_of(node.args[0]).dim() == 4 and value_of(node.args[0]).shape[1] == 1 else None
        wide = node
    elif _is_method(node, "repeat_interleave") or (
        isinstance(node, Node) and node.target is torch.repeat_interleave and is_tensor(node)
    ):
        repeats = argument(node, 1, "repeats")
        source = node.args[0] if argument(node, 2, "dim") in (1, -3) and isinstance(repeats, int) else None
        wide = node
    else:
        return None
    if not is_tensor(source) or value_of(source).dim() != 4 or value_of(node).dim() != 4:
        return None
    (batch, heads, *rest), (new_batch, new_heads, *new_rest) = value_of(source).shape, value_of(node).shape
    if not isinstance(heads, int) or not isinstance(new_heads, int) or new_heads % heads:
        return None
    if (
        wide.target == "expand"
        and wide is not node
        and not same_sizes(value_of(wide).shape, (batch, heads, new_heads // heads, *rest))
    ):
        return None
    return source if same_sizes((batch, *rest), (new_batch, *new_rest)) else None


def _what_to_do_about_the_mask(attention: Node) -> str:
    """For a report that says first why the mask stays: a bias has to, and a window hides something for sure."""
    why = attention.meta.get(MASK_STAYS)
    if why is None:
        return "leave it out where it hides nothing"
    return "nothing to do: the mask has to stay" if "; nothing to do: " in why else "take the advice on the mask"


def why_not_shared(attention: Node) -> str:
    """Why no fused kernel computes this attention with heads shared; "" if one does."""
    query, value = value_of(argument(attention, 0, "query")), value_of(argument(attention, 2, "value"))
    widths = [query.shape[-1], value.shape[-1]]
    if argument(attention, 3, "attn_mask") is not None:
        return f"with a mask no fused kernel shares them; {_what_to_do_about_the_mask(attention)}"
    if value_of(attention).dtype not in _DTYPES:
        return f"in {value_of(attention).dtype} no fused kernel shares them; use bfloat16 or float16"
    if not all(isinstance(width, int) for width in widths):
        why = "how wide its heads are is unknown when compiling, and of wide ones no fused kernel shares any"
        return f"{why}; compile with dynamic=False"
    if widths[0] != widths[1] or widths[0] > WIDEST_HEAD:
        why = f"no fused kernel shares heads wider than {WIDEST_HEAD}, or of several widths"
        return f"{why}; nothing to do: it would be slower"
    if query.dim() != 4 or argument(attention, 7, "enable_gqa", False) is not False:
        return "queries share them a second time (enable_gqa=True); make copies or enable_gqa do it all"
    return ""


def _may_be_read(source: Node, attention: Node, changes: dict[Node, bool]) -> bool:
    """Is ``source`` what it was when the copies were made, for as long as ``attention`` and its gradients need it?"""
    return undisturbed(source, attention, (), (source,)) and not changes_after(source, attention, changes)


def heads_before_copies(attention: Node, key: Any, value: Any, changes: dict[Node, bool]) -> tuple[Node, Node] | None:
    """Keys and values [B, G, S, D] of which ``key`` and ``value`` are copies for every head of queries, if they can be
    read in their place; for kernels that share heads. changes: what ``may_change`` remembers."""
    keys, values = _unrepeated(key), _unrepeated(value)
    if keys is None or values is None or value_of(keys).shape[1] != value_of(values).shape[1]:
        return None
    alike = value_of(key).shape[1] == value_of(value).shape[1]
    stay_copies = not any(may_change(each, changes) for each in (key, value))
    may_be_read = all(_may_be_read(each, attention, changes) for each in (keys, values))
    return (keys, values) if alike and stay_copies and may_be_read else None


def _why_copies_stay(attention: Node, repeated: list[Any], sources: list[Any], changes: dict[Node, bool]) -> str:
    """Why ``attention`` cannot read ``sources`` for their copies ``repeated``; "" if it can. changes: what
    ``may_change`` remembers."""
    if not all(_may_be_read(source, attention, changes) for source in sources):
        return "what they are copies of is changed in place; write to something else"
    if any(may_change(each, changes) for each in repeated):
        return "they are changed in place; change the heads before they are copied"
    heads = {value_of(source).shape[1] for source in sources}
    if len(heads) != 1 or value_of(argument(attention, 0, "query")).shape[1] != value_of(repeated[0]).shape[1]:
        return "keys and values, or keys and queries, differ in their heads; give keys and values equally many"
    return why_not_shared(attention)


def undo_repeated_heads(graph: Graph) -> int:
    """Hand attention the heads of keys and values before they were repeated; returns how many attentions changed."""
    count, changes = 0, dict[Node, bool]()
    for attention in attention_calls(graph):
        repeated = [argument(attention, 1, "key"), argument(attention, 2, "value")]
        sources = [_unrepeated(node) for node in repeated]
        if any(source is None for source in sources):
            continue
        why = _why_copies_stay(attention, repeated, sources, changes)
        if why:
            attention.meta[COPIES_STAY] = why
            continue
        for position, (name, source) in enumerate(zip(("key", "value"), sources, strict=True), 1):
            if len(attention.args) > position:
                attention.update_arg(position, source)
            else:
                attention.update_kwarg(name, source)
        attention.kwargs = {**attention.kwargs, "enable_gqa": True}
        attention.meta[UNDONE] = True
        count += 1
    return count
