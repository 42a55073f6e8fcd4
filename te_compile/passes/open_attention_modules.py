"""Open ``F.multi_head_attention_forward``: the linears inside nn.MultiheadAttention become linears of the graph.

Dynamo keeps the attention of all torch.nn attention and Transformer modules as one opaque call, projections included, a
third of such a model's work. Written out it is a packed projection, scaled dot product attention and an output
projection, which the rest of the pipeline knows.

Two liberties are taken with the layout, none with the values. A module with ``batch_first`` transposes its input for
the call and the result back; the projections run on what lies behind the transposition, so that a norm before them
stays next to them, and so does the last one where nobody sees how its result lies in memory. And masks keep the size
that they were given with, since attention broadcasts them.

Inputs of one sequence are a batch of one. Keys and values that the module has itself (``add_bias_kv``,
``add_zero_attn``) go behind those of its inputs.

Self-attention multiplies by the whole packed weight. Where query, key and value differ, each multiplies by its rows of
it; keys and values of one source, as in every decoder's cross-attention, by theirs together.
"""

from __future__ import annotations

import inspect
import math
import operator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node

from te_compile.passes.attention_module_masks import by_hint, is_mask, mask_of
from te_compile.passes.captured_nodes import argument, called, is_tensor, value_of
from te_compile.passes.find_linears import STAYS_CLOSED
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.memory_order import order_shows
from te_compile.passes.weight_expressions import AUTOCAST_OUTSIDE
from te_compile.passes.writing import Writer

_PARAMETERS = inspect.signature(F.multi_head_attention_forward)
_NUMBERS = (int, float, torch.SymFloat)


def _arguments(attention: Node) -> SimpleNamespace:
    """The call's arguments by name, defaults included."""
    bound = _PARAMETERS.bind(*attention.args, **attention.kwargs)
    bound.apply_defaults()
    return SimpleNamespace(**bound.arguments)


def _number(option: Any) -> Any:
    """The value of a number that stands in the graph where everything is dynamic."""
    return value_of(option) if isinstance(option, Node) else option


def _is_one_sequence(a: SimpleNamespace) -> bool:
    """Are the inputs [L, E], without a batch?"""
    return is_tensor(a.query) and value_of(a.query).dim() == 2


def _behind_batch_first(operand: Node) -> tuple[Node, bool]:
    """[N, L, E] and True where ``operand`` [L, N, E] is made from it, else ``operand`` and False."""
    if operand.op == "call_method" and operand.target == "transpose":
        dimensions = argument(operand, 1, "dim0"), argument(operand, 2, "dim1")
        if dimensions in ((0, 1), (1, 0)):
            source = operand.args[0]
            assert isinstance(source, Node)
            return source, True
    return operand, False


def _why_closed(attention: Node, a: SimpleNamespace) -> str | None:
    """What keeps this call from being opened, None if nothing does."""
    flags = (a.training, a.need_weights, a.is_causal, a.average_attn_weights, a.add_zero_attn)
    operands = (a.query, a.key, a.value)
    masks = ((a.key_padding_mask, (1 if _is_one_sequence(a) else 2,)), (a.attn_mask, (2, 3)))
    results = {user.args[1] if user.target is operator.getitem else None for user in attention.users}
    known = all(isinstance(flag, bool) for flag in flags) and isinstance(_number(a.dropout_p), _NUMBERS)
    if not known or not isinstance(a.num_heads, int) or not isinstance(a.embed_dim_to_check, int):
        return "an attention whose options are computed in the graph; give them as Python values for FP8"
    if a.static_k is not None or a.static_v is not None:
        return "an attention with keys and values of its own (static_k, static_v); leave these out for FP8"
    dimensions = {value_of(x).dim() if is_tensor(x) else None for x in operands}
    if len(dimensions) > 1 or not dimensions <= {2, 3}:
        return "an attention of unusual inputs; give it tensors of two dimensions, or of three with a batch, for FP8"
    if any(mask is not None and not is_mask(mask, dimensions) for mask, dimensions in masks):
        return "an attention with an unusual mask; give a bool or floating one, [L, S] or [N · heads, L, S], for FP8"
    if not isinstance(value_of(attention), tuple) or not results <= ({0, 1} if a.need_weights else {0}):
        return "an attention whose results are used as a tuple; unpack them for FP8: out, weights = …"
    return None


def _packed_projections(write: Writer, a: SimpleNamespace, operands: list[Node]) -> list[Node]:
    """query, key and value by their rows of the packed weight [3 E, E]; neighbours of one source in one go."""
    width, projected = a.embed_dim_to_check, list[Node]()
    while len(projected) < 3:
        first = len(projected)
        shared = next((i for i in range(first, 3) if operands[i] is not operands[first]), 3) - first
        weight, bias = a.in_proj_weight, a.in_proj_bias
        if shared < 3:
            rows = slice(first * width, (first + shared) * width)
            weight = write.call(operator.getitem, weight, rows)
            bias = None if bias is None else write.call(operator.getitem, bias, rows)
        product = write.call(F.linear, operands[first], weight, bias)
        if shared == 1:
            projected.append(product)
        else:
            chunks = write.method("chunk", product, shared, -1)
            projected += [write.call(operator.getitem, chunks, i) for i in range(shared)]
    return projected


def _projections(write: Writer, a: SimpleNamespace) -> list[Node]:
    """query, key and value as heads: [N, H, L, D] each."""
    biases: list[Node | None] = [None] * 3
    sources = [_behind_batch_first(operand) for operand in (a.query, a.key, a.value)]
    if a.use_separate_proj_weight:
        if a.in_proj_bias is not None:
            chunks = write.method("chunk", a.in_proj_bias, 3)
            biases = [write.call(operator.getitem, chunks, i) for i in range(3)]
        weights = (a.q_proj_weight, a.k_proj_weight, a.v_proj_weight)
        projected = [
            write.call(F.linear, x, weight, bias) for (x, _), weight, bias in zip(sources, weights, biases, strict=True)
        ]
    else:
        projected = _packed_projections(write, a, [x for x, _ in sources])
    shape = (a.num_heads, a.embed_dim_to_check // a.num_heads)
    heads = [write.method("unflatten", part, -1, shape) for part in projected]
    return [
        write.method("permute", part, 0, 2, 1, 3) if batch_first else write.method("permute", part, 1, 2, 0, 3)
        for part, (_, batch_first) in zip(heads, sources, strict=True)
    ]


def _with_own_keys(write: Writer, heads: Node, row: Node | None, zero: bool) -> Node:
    """Keys or values [N, H, S, D] and behind them those that the module has itself: a learned ``row`` [1, 1, E], and
    zeros."""
    like_one = write.method("narrow", heads, 2, 0, 1)
    parts = [heads]
    if row is not None:
        learned = write.method("unflatten", row, -1, (value_of(heads).shape[1], -1))
        parts.append(write.method("expand_as", write.method("permute", learned, 0, 2, 1, 3), like_one))
    if zero:
        parts.append(write.call(torch.zeros_like, like_one))
    return write.call(torch.cat, parts, 2)


def _with_weights(
    write: Writer, a: SimpleNamespace, q: Node, k: Node, v: Node, mask: Node | None, dropout: Any
) -> tuple[Node, Node | None]:
    """Attention spelled out, for a caller who wants to see its weights: the result [N, H, L, D], and the weights, None
    where he does not read them."""
    scaled = write.call(operator.mul, q, math.sqrt(a.num_heads / a.embed_dim_to_check))
    queries, keys, values = (write.method("flatten", part, 0, 1) for part in (scaled, k, v))
    keys = write.method("transpose", keys, -2, -1)
    if mask is None:
        scores = write.call(torch.bmm, queries, keys)
    else:
        if a.key_padding_mask is not None:  # it differs by sequence, so that the heads cannot be broadcast over
            mask = write.method("expand", mask, -1, a.num_heads, -1, -1)
        scores = write.call(torch.baddbmm, write.method("flatten", mask, 0, 1), queries, keys)
    weights = write.call(F.softmax, scores, dim=-1)
    if _number(dropout) > 0.0:
        weights = write.call(F.dropout, weights, p=dropout)
    result = write.method("unflatten", write.call(torch.bmm, weights, values), 0, (-1, a.num_heads))
    if not _shows_weights(write.place):
        return result, None
    shown = write.method("unflatten", weights, 0, (-1, a.num_heads))
    return result, write.method("mean", shown, dim=1) if a.average_attn_weights else shown


def _shows_weights(attention: Node) -> bool:
    """Does anybody read the weights? A module returns them unless asked not to, and most callers leave them."""
    return any(user.args[1] == 1 and user.users for user in attention.users)


def _is_dropped(attention: Node) -> bool:
    """Does dropout come next? It draws in the order in which numbers lie in memory, so that has to be the original."""
    readers = [reader for result in attention.users for reader in result.users]
    readers += [reader for view in readers if called(view) == "transpose" for reader in view.users]
    return any(
        called(reader) in ("dropout", "dropout_") and argument(reader, 2, "training", True) for reader in readers
    )


def _order_shows(attention: Node) -> bool:
    """Would it show if the result, [L, N, E], lay in memory as [N, L, E]?"""
    result = value_of(attention)[0]
    with result.fake_mode, enable_python_dispatcher():
        otherwise = result.transpose(0, 1).contiguous().transpose(0, 1)
    return any(order_shows(user, otherwise) for user in attention.users if user.args[1] == 0)


def _opened(write: Writer, a: SimpleNamespace) -> tuple[Node, Node | None]:
    """The call written out: its result [L, N, E] and the attention weights, if they are wanted."""
    q, k, v = _projections(write, a)
    own_keys = (a.bias_k is not None) + a.add_zero_attn
    if own_keys:
        k, v = (_with_own_keys(write, *each, a.add_zero_attn) for each in ((k, a.bias_k), (v, a.bias_v)))
    mask, weights = mask_of(write, a, own_keys), None
    dropout = a.dropout_p if a.training else 0.0
    if a.need_weights:
        result, weights = _with_weights(write, a, q, k, v, mask, dropout)
    else:
        result = write.call(
            F.scaled_dot_product_attention, q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=by_hint(a)
        )
    _, batch_first = _behind_batch_first(a.query)
    batch_first = batch_first and not _is_dropped(write.place) and not _order_shows(write.place)
    order = (0, 2, 1, 3) if batch_first else (2, 0, 1, 3)
    joined = write.method("flatten", write.method("permute", result, *order), -2)
    out = write.call(F.linear, joined, a.out_proj_weight, a.out_proj_bias)
    return write.method("transpose", out, 0, 1) if batch_first else out, weights


def _opened_for_one(write: Writer, a: SimpleNamespace) -> tuple[Node, Node | None]:
    """:func:`_opened` for inputs [L, E], as a batch of one; the results without it."""
    if not _is_one_sequence(a):
        return _opened(write, a)
    batches = {each: write.method("unsqueeze", each, 1) for each in dict.fromkeys((a.query, a.key, a.value))}
    padding = None if a.key_padding_mask is None else write.method("unsqueeze", a.key_padding_mask, 0)
    of_batch = {name: batches[getattr(a, name)] for name in ("query", "key", "value")}
    result, weights = _opened(write, SimpleNamespace(**{**vars(a), **of_batch, "key_padding_mask": padding}))
    return write.method("squeeze", result, 1), None if weights is None else write.method("squeeze", weights, 0)


def open_attention_modules(graph: Graph) -> int:
    """Replace each opaque attention of torch.nn by its projections and its attention; returns how many.

    A call that stays closed is marked with the reason, for the report.
    """
    opened, left = 0, transforms_around(graph)
    for attention in graph.find_nodes(op="call_function", target=F.multi_head_attention_forward):
        a = _arguments(attention)
        reason = left.get(attention) or _why_closed(attention, a)
        if reason is None:
            write = Writer(attention)
            results = _opened_for_one(write, a)
            # Autocast that begins inside the graph is not in force here, and the examples would lie about dtypes.
            if value_of(results[0]).dtype == value_of(attention)[0].dtype:
                for user in list(attention.users):
                    if user.users:
                        user.replace_all_uses_with(results[user.args[1]])
                    graph.erase_node(user)
                graph.erase_node(attention)
                opened += 1
                continue
            write.take_back()
            reason = f"an attention under an autocast that begins inside the graph; {AUTOCAST_OUTSIDE}"
        attention.meta[STAYS_CLOSED] = reason
    return opened
