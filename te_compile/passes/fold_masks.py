"""Drop attention masks that the graph itself proves to be causal, or to mask nothing.

Hugging Face builds its masks inside the graph, and where nobody passed one it builds them from positions alone: a
boolean tensor that says "causal" the long way round. Any mask tensor keeps the fastest attention kernels out, which on
an H200 can make a compiled model slower than eager.

The proof is by evaluation. A mask that depends on no input of the graph is a constant: every node behind it is pure,
its leaves are ranges and filled tensors of sizes known at compile time. So it is computed, here and once, on the CPU,
and compared element by element with what would replace it. Where sizes are symbolic, it is a formula in positions that
is compared (``prove_masks``). A mask that depends on data (padding, packed sequences given from outside) is left as it
is, and so is every other constant. What became of a mask is written on its attention, ``meta[FOLDED]`` or
``meta[MASK_STAYS]``, for the report. A mask that is proved to be a window around each query's own place, as sliding
windows are, stays as well, and ``meta[WINDOW]`` says which: some kernels take it in place of the mask
(window_attentions.py).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.nn import Parameter

from te_compile.passes.attention_calls import attention_calls
from te_compile.passes.attention_scores import same_sizes
from te_compile.passes.captured_nodes import argument, is_tensor, value_of
from te_compile.passes.mask_numbers import HIDDEN, HIDES_A_ROW, most_that_swallows
from te_compile.passes.names import input_name
from te_compile.passes.prove_masks import Window, proven_meaning, proven_window
from te_compile.passes.regions import Region
from te_compile.passes.side_effects import may_change
from te_compile.passes.weight_expressions import is_held_by_the_model, origin

FOLDED = "te_folded_mask"
"""Meta key of an attention that had a mask: what it was proved to mean, "causal" or "all", or "rows" where it hides
whole rows and does so behind attention now."""

GUARDS = "te_guards_rows"
"""Meta key of what ``recognise_attention`` makes of a mask and of queries where the mask may hide rows entirely."""

MASK_STAYS = "te_mask_stays"
"""Meta key of an attention: why its mask was left."""

WINDOW = "te_window"
"""Meta key of an attention whose mask is proved to show each query the keys around its own place, and to hide all
others: (how many before it, how many behind it)."""

KNOWN_VALUE = "te_known_value"
"""Meta key of a placeholder: the constant that it gets in every call, on the CPU (constants_across_cuts.py)."""

MOST_ELEMENTS = 1 << 28  # of a mask that is evaluated: 256 MiB of booleans, a second or two

_PURE_FUNCTIONS = {
    torch.arange, torch.ones, torch.zeros, torch.full, torch.tensor, torch.diff, torch.cumsum, torch.where, torch.tril,
    torch.triu, torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge, torch.logical_and, torch.logical_or,
    torch.logical_not, torch.zeros_like, torch.ones_like, torch.full_like, torch.cat, torch.stack, torch.abs,
    operator.add, operator.sub, operator.mul, operator.neg, operator.floordiv, operator.mod, operator.and_,
    operator.or_, operator.invert, operator.xor, operator.eq, operator.ne, operator.lt, operator.le, operator.gt,
    operator.ge, operator.getitem, operator.truediv, torch.add, torch.sub, torch.mul, torch.div, torch.neg,
    torch.masked_fill, torch.unsqueeze, torch.squeeze, torch.transpose, torch.reshape, torch.scalar_tensor,
    operator.abs, operator.pow, torch.pow, torch.clamp, torch.minimum, torch.maximum, torch.floor_divide,
    torch.remainder, torch.logical_xor, torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor, torch.bitwise_not,
    torch.eye, torch.flip, torch.permute, torch.flatten, torch.broadcast_to, torch.concat, torch.concatenate,
    torch.hstack, torch.vstack, torch.outer, torch.meshgrid, torch.log, torch.narrow, torch.t, torch.repeat_interleave,
    torch.sum, torch.all, torch.any,
}  # fmt: skip
_PURE_METHODS = {
    "new_ones", "new_zeros", "new_full", "unsqueeze", "squeeze", "expand", "expand_as", "view", "reshape", "transpose",
    "permute", "contiguous", "clone", "to", "type", "bool", "int", "long", "float", "cumsum", "diff", "tril", "triu",
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "masked_fill", "where", "repeat",
    "sub", "add", "mul", "div", "neg", "abs", "all", "any", "flatten", "detach", "half", "bfloat16", "double",
    "clamp", "pow", "flip", "movedim", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not",
    "log", "narrow", "t", "swapaxes", "swapdims", "outer", "unfold", "sum",
}  # fmt: skip


class NotConstantError(Exception):
    """The value depends on an input of the call, on a symbolic size, or on something whose purity is not known."""


@dataclass
class Constants:
    """What has been found out about a graph so far, for all its masks: the values of constant nodes, what these mean
    for so many queries and keys, which windows masks are, of each node that was asked about whether anything writes to
    it, and of inputs why nothing is known of them. Layers share masks: each is looked at once."""

    values: dict[Node, Any] = field(default_factory=dict)
    meanings: dict[tuple[Node, int, int], str | None] = field(default_factory=dict)
    windows: dict[Node, Window | None] = field(default_factory=dict)
    changes: dict[Node, bool] = field(default_factory=dict)
    unknown: dict[Node, str] = field(default_factory=dict)


def _is_pure(node: Node) -> bool:
    if node.op == "call_function":
        return node.target in _PURE_FUNCTIONS
    return node.op == "call_method" and node.target in _PURE_METHODS


def _on_cpu(value: Any) -> Any:
    """Arguments as evaluation uses them: devices become the CPU; a symbolic size cannot be used."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise NotConstantError
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, str) and value.split(":")[0] in ("cuda", "cpu", "xpu", "mps"):
        return "cpu"
    if isinstance(value, slice):
        return slice(*map(_on_cpu, (value.start, value.stop, value.step)))
    if isinstance(value, list | tuple):
        return type(value)(map(_on_cpu, value))
    return value


def _seen_through(region: Region) -> Callable[[Node], Node]:
    """Tells what an operand that is handed into ``region``, or into a region around it, is outside; else itself."""
    regions: dict[Graph, Region] = {}
    around: Region | None = region
    while around is not None:
        regions[around.graph], around = around, around.parent

    def through(node: Node) -> Node:
        source, _ = origin(node, regions[node.graph])
        return source if isinstance(source, Node) else node

    return through


def evaluated(node: Node, known: Constants, through: Callable[[Node], Node] = lambda node: node) -> Any:
    """The value of a constant node; raises if it is none. ``known`` remembers values between calls; ``through`` tells
    what an operand of a body stands for."""
    values, waiting = known.values, [node]
    while waiting:
        current = waiting[-1]
        if current in values:
            waiting.pop()
            continue
        if may_change(current, known.changes):
            raise NotConstantError
        if KNOWN_VALUE in current.meta:
            values[current] = current.meta[KNOWN_VALUE]
            continue
        source = through(current)
        if source is not current:
            if source in values:
                values[current] = values[source]
            else:
                waiting.append(source)
            continue
        if not _is_pure(current):
            raise NotConstantError
        missing = [each for each in _operands_of(current) if each not in values]
        if missing:
            waiting.extend(missing)
            continue
        values[current] = _computed(waiting.pop(), values)
    return values[node]


_NEW, _LIKE = {"new_ones", "new_zeros", "new_full"}, {torch.zeros_like, torch.ones_like, torch.full_like}


def _pattern(node: Node) -> Node | None:
    """The operand of ``node`` that says of what dtype and size the result is, and whose numbers do not matter."""
    if not (node.target in _NEW if node.op == "call_method" else node.target in _LIKE) or not node.args:
        return None
    pattern, others = node.args[0], list[Node]()
    map_arg((node.args[1:], node.kwargs), others.append)
    return pattern if isinstance(pattern, Node) and pattern not in others else None


def _operands_of(node: Node) -> list[Node]:
    """The operands whose values ``node`` is computed from."""
    pattern = _pattern(node)
    return [each for each in node.all_input_nodes if each is not pattern]


def _of_its_kind(pattern: Node) -> Tensor:
    """A tensor of the dtype and size of ``pattern``, whose numbers do not matter."""
    value = value_of(pattern)
    if not isinstance(value, Tensor) or any(not isinstance(size, int) for size in value.shape):
        raise NotConstantError
    return torch.zeros((), dtype=value.dtype, device="cpu").expand(value.shape)


def _computed(node: Node, known: dict[Node, Any]) -> Any:
    example, pattern = value_of(node), _pattern(node)
    sizes = example.shape if isinstance(example, Tensor) else ()
    if any(not isinstance(size, int) for size in sizes) or math.prod(sizes) > MOST_ELEMENTS:
        raise NotConstantError

    def operand(each: Node) -> Any:
        return known[each] if each is not pattern else _of_its_kind(each)

    args, kwargs = (map_arg(_on_cpu(part), operand) for part in (node.args, node.kwargs))
    kwargs = {key: _on_cpu(value) for key, value in kwargs.items()}
    call: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
    # Outside the compiler's fake tensors, and on the CPU whatever the default device is.
    with torch.utils._python_dispatch._disable_current_modes(), torch.device("cpu"):
        try:
            return call(*(args[1:] if node.op == "call_method" else args), **kwargs)
        except (RuntimeError, TypeError) as error:  # what cannot be computed here is no constant to us
            raise NotConstantError from error


def _allowed(mask: Tensor) -> Tensor | None:
    """Where attention may look, as booleans; None for a bias that is more than a mask."""
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= most_that_swallows(mask.dtype)  # also -inf
    return ~hidden if bool(((mask == 0) | hidden).all()) else None


def meaning(mask: Tensor, queries: int, keys: int) -> str | None:
    """ "all" if ``mask`` hides nothing, "causal" if it hides exactly what comes later, None for anything else.

    ``is_causal`` counts positions from the first query and the first key, however many keys there are. A single query
    that sees one key of many is left as it is: nobody attends so but by chance, and libraries treat it apart.
    """
    allowed = _allowed(mask)
    if allowed is None:
        return None
    allowed = _each_once(allowed)
    if bool(allowed.all()):
        return "all"
    if allowed.shape[-2:] == (queries, keys) and allowed.shape[-2] > 1:
        sizes = allowed.shape[-2:]  # its own, for theirs may be symbols
        causal = torch.ones(sizes, dtype=torch.bool, device=allowed.device).tril()
        if bool((allowed == causal).all()):
            return "causal"
    return None


def _each_once(allowed: Tensor) -> Tensor:
    """One slice of the copies along expanded dimensions."""
    for dimension, stride in enumerate(allowed.stride()):
        if stride == 0 and allowed.shape[dimension] > 1:
            allowed = allowed.narrow(dimension, 0, 1)
    return allowed


def window(mask: Tensor) -> Window | None:
    """Which window ``mask`` [..., S, S] is; None for anything else."""
    allowed = _allowed(mask)
    if allowed is None:
        return None
    allowed = _each_once(allowed)
    length = allowed.shape[-1]
    if allowed.shape[-2] != length:
        return None
    first, last = (allowed.reshape(-1, length, length)[0, row] for row in (0, -1))
    left, right = int(last.sum()) - 1, int(first.sum()) - 1
    if left < 0 or right < 0:
        return None
    shown = torch.ones(length, length, dtype=torch.bool, device=allowed.device).tril(right).triu(-left)
    return (left, right) if bool((allowed == shown).all()) else None


def hides_no_row(mask: Node, changes: dict[Node, bool]) -> bool:
    """Does ``mask``, which is added to scores, provably leave every query a key to look at?

    changes: what ``may_change`` remembers. Values are not kept: each layer has a mask of its own here.
    """
    try:
        value = evaluated(mask, Constants(changes=changes))
    except NotConstantError:
        return proven_meaning(mask, changes=changes) is not None
    if not isinstance(value, Tensor):
        return False
    # Where there are no keys nothing hides any.
    return value.shape[-1] == 0 or bool((value.amax(-1) > HIDES_A_ROW).all())


def _meaning_of(mask: Node, query: Tensor, key: Tensor, region: Region, known: Constants) -> str | None:
    """What ``mask`` is proved to mean: by its value, or where sizes are symbolic, by its formula."""
    through, queries, keys = _seen_through(region), query.shape[-2], key.shape[-2]
    try:
        value = evaluated(mask, known, through)
    except NotConstantError:
        return proven_meaning(mask, (queries, keys), through, known.changes)
    if not isinstance(value, Tensor):
        return None
    if not (isinstance(queries, int) and isinstance(keys, int)):
        return meaning(value, queries, keys)
    if (mask, queries, keys) not in known.meanings:
        known.meanings[mask, queries, keys] = meaning(value, queries, keys)
    return known.meanings[mask, queries, keys]


def _window_of(mask: Node, query: Tensor, key: Tensor, region: Region, known: Constants) -> Window | None:
    """Which window ``mask``, neither causal nor empty, is proved to be."""
    queries, keys = query.shape[-2], key.shape[-2]
    if not same_sizes((queries, keys), (keys, queries)) or not same_sizes(value_of(mask).shape[-2:], (queries, keys)):
        return None
    if mask not in known.windows:
        through = _seen_through(region)
        try:
            value = evaluated(mask, known, through)
        except NotConstantError:
            known.windows[mask] = proven_window(mask, through, known.changes)
        else:
            known.windows[mask] = window(value) if isinstance(value, Tensor) else None
    return known.windows[mask]


def _inputs_behind(mask: Node, region: Region, only_numbers: bool = False) -> Iterator[Node]:
    """The inputs of the whole graph that ``mask`` is computed from, the nearest first.

    only_numbers: by way of floating-point tensors alone, as a gradient goes.
    """
    through = _seen_through(region)
    waiting, seen = [mask], {mask}
    for node in waiting:
        outside = through(node)
        if only_numbers and is_tensor(node) and not value_of(node).is_floating_point():
            continue
        if node.op == "placeholder" and outside is node and is_tensor(node):
            yield node
        new = _operands_of(node) if outside is node else [outside]
        new = [each for each in new if each not in seen]
        seen.update(new)
        waiting += new


def _is_learned(given: Node) -> bool:
    return isinstance(value_of(given), Parameter) or value_of(given).requires_grad


def _why_unknown(given: Node) -> str:
    """Why nothing is known of what the input ``given`` of a graph holds, and what to do about it."""
    name = input_name(given)
    if _is_learned(given):
        return f"it is learned, or made from {name}, which is: a bias and no mask; nothing to do: it has to be added"
    if is_held_by_the_model(given):
        made = "make the mask in forward (torch.ones(…).tril())"
        return f"it depends on the buffer or attribute {name}, which may hold anything; {made} or pass is_causal=True"
    if any("torch_dynamo_resume_in_" in (user.stack_trace or "") for user in given.users):
        return f"it depends on {name}, made before a graph break, out of sight; make the code run without that break"
    made = "call without it where it hides nothing, or have it made in the same graph"  # a layer may be one by itself
    return f"it depends on {name}, whose values are unknown when compiling; {made}"


def _why_it_stays(mask: Node, region: Region, known: Constants) -> str:
    """Why a mask that nothing was proved about is left, in words for a report."""
    try:
        value = evaluated(mask, known, _seen_through(region))
    except NotConstantError:
        # First what is learned: beside it nothing else makes a mask of a bias, as a buffer that says where each is.
        learned = next(filter(_is_learned, _inputs_behind(mask, region, only_numbers=True)), None)
        given = learned if learned is not None else next(_inputs_behind(mask, region), None)
        if given is None:
            return _UNPROVEN
        if learned is None and _is_learned(given):
            return f"what it hides is picked by numbers made with {input_name(given)}; {_PICKED}"
        if given not in known.unknown:
            known.unknown[given] = _why_unknown(given)
        return known.unknown[given]
    if isinstance(value, Tensor) and _allowed(value) is None:
        smallest = value.amin()
        if bool(((value == 0) | (value == smallest)).all()) and bool(smallest <= HIDDEN):
            what = f"it adds {smallest.item():g}, which hides a score only while no other is as far below"
            return f"{what}; use -inf or a bool mask for a fused kernel"
        return "it is a bias: it adds numbers that do more than hide; nothing to do: it has to be added"
    what = "it is a constant, but neither causal nor all true, nor a window"
    return f"{what}; use flex_attention to skip what it hides, where the model offers it"


_IS_A_WINDOW = (
    "it is a sliding window, which no kernel here skips the outside of; "
    "use bfloat16 or float16 on a GPU, and no dropout, or flex_attention where the model offers it"
)
_PICKED = "nothing to do: that is unknown when compiling"
_UNPROVEN = "the graph proves neither that it is causal nor that it is all true; pass is_causal=True where it is causal"


def without_guard(mask: Any, query: Any) -> tuple[Any, Any]:
    """(mask, query) without the care that ``recognise_attention`` takes of rows that the mask may hide entirely."""
    is_guarded = isinstance(mask, Node) and isinstance(query, Node) and GUARDS in mask.meta and GUARDS in query.meta
    return (mask.args[2], query.args[0]) if is_guarded else (mask, query)


def _fold(region: Region, node: Node, known: Constants) -> bool:
    """Replace the mask of one attention node by what it means; False if it stays."""
    mask, guarded = argument(node, 3, "attn_mask"), argument(node, 0, "query")
    query, key = value_of(guarded), value_of(argument(node, 1, "key"))
    mask, unguarded = without_guard(mask, guarded)
    if not isinstance(mask, Node) or argument(node, 5, "is_causal", False) is not False:
        return False
    if not isinstance(query, Tensor) or not isinstance(key, Tensor):
        return False
    means = _meaning_of(mask, query, key, region, known)
    scale = argument(node, 6, "scale")
    if means == "causal" and scale is not None and not (isinstance(scale, (int, float)) and scale > 0):
        node.meta[MASK_STAYS] = "it is causal, but kernels hide before they scale; give a positive scale"
        return False
    if means is None:
        shown = _window_of(mask, query, key, region, known)
        if shown is not None:
            node.meta[WINDOW] = shown
        node.meta[MASK_STAYS] = _why_it_stays(mask, region, known) if shown is None else _IS_A_WINDOW
        return False
    node.meta[FOLDED] = means
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    node.args = (unguarded, given.pop("key"), given.pop("value"))
    del given["query"]
    node.kwargs = {**given, "attn_mask": None, "is_causal": means == "causal"}
    return True


def fold_masks(regions: list[Region]) -> int:
    """Fold every provable mask of ``regions``; returns how many attention nodes lost theirs."""
    known = Constants()
    return sum(_fold(region, node, known) for region in regions for node in attention_calls(region.graph))
