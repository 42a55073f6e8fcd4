"""Open ``F.multi_head_attention_forward``: the linears inside nn.MultiheadAttention become linears of the graph.

Dynamo keeps the attention of all torch.nn attention and Transformer modules as one opaque call, projections included, a
third of such a model's work. Written out it is a packed projection, scaled dot product attention and an output
projection, which the rest of the pipeline knows.

Two liberties are taken with the layout, none with the values. A module with ``batch_first`` transposes its input for
the call and the result back; the projections run on what lies behind the transposition, so that a norm before them
stays next to them, and so does the last one where nobody sees how its result lies in memory. And masks keep the size
that they were given with, since attention broadcasts them.

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
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node

from te_compile.passes.captured_nodes import argument, called, value_of
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


def _is_mask(node: Any, dimensions: tuple[int, ...]) -> bool:
    value = value_of(node) if isinstance(node, Node) else None
    if not isinstance(value, Tensor):
        return False
    return value.dim() in dimensions and (value.dtype == torch.bool or value.is_floating_point())


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
    masks = ((a.key_padding_mask, (2,)), (a.attn_mask, (2, 3)))
    results = {user.args[1] if user.target is operator.getitem else None for user in attention.users}
    known = all(isinstance(flag, bool) for flag in flags) and isinstance(_number(a.dropout_p), _NUMBERS)
    if not known or not isinstance(a.num_heads, int) or not isinstance(a.embed_dim_to_check, int):
        return "an attention whose options are computed in the graph; give them as Python values for FP8"
    if any(option is not None for option in (a.bias_k, a.bias_v, a.static_k, a.static_v)) or a.add_zero_attn:
        own = "add_bias_kv, add_zero_attn, static_k, static_v"
        return f"an attention with keys and values of its own ({own}); leave these out for FP8"
    if any(not isinstance(x, Node) or not isinstance(value_of(x), Tensor) or value_of(x).dim() != 3 for x in operands):
        return "an attention without a batch dimension; give its inputs one for FP8"
    if any(mask is not None and not _is_mask(mask, dimensions) for mask, dimensions in masks):
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


def _added(write: Writer, mask: Node, dtype: torch.dtype) -> Node:
    """A mask as what is added to the scores: -inf where a bool mask is true."""
    if value_of(mask).dtype != torch.bool:
        return mask
    zeros = write.call(torch.zeros_like, mask, dtype=dtype)
    return write.method("masked_fill", zeros, mask, -math.inf)


def _mask(write: Writer, a: SimpleNamespace) -> Node | None:
    """Both masks as one that broadcasts to [N, H, L, S]; None if there is nothing to add."""
    dtype = value_of(a.query).dtype
    padding = mask = None
    if a.key_padding_mask is not None:
        padding = _added(write, a.key_padding_mask, dtype)
        for _ in range(2):
            padding = write.method("unsqueeze", padding, 1)
    if a.attn_mask is not None and not _by_hint(a):
        mask = _added(write, a.attn_mask, dtype)
        if value_of(mask).dim() == 2:
            for _ in range(2):
                mask = write.method("unsqueeze", mask, 0)
        else:
            mask = write.method("unflatten", mask, 0, (-1, a.num_heads))
    if mask is None or padding is None:
        return padding if mask is None else mask
    return write.call(operator.add, mask, padding)


def _by_hint(a: SimpleNamespace) -> bool:
    """Is the mask known to be causal, and left out for the hint that says so?"""
    return a.is_causal and a.key_padding_mask is None and not a.need_weights


def _with_weights(
    write: Writer, a: SimpleNamespace, q: Node, k: Node, v: Node, mask: Node | None, dropout: Any
) -> tuple[Node, Node]:
    """Attention spelled out, for a caller who wants to see its weights: the result [N, H, L, D], and the weights."""
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
    shown = write.method("unflatten", weights, 0, (-1, a.num_heads))
    return result, write.method("mean", shown, dim=1) if a.average_attn_weights else shown


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
    mask, weights = _mask(write, a), None
    dropout = a.dropout_p if a.training else 0.0
    if a.need_weights:
        result, weights = _with_weights(write, a, q, k, v, mask, dropout)
    else:
        result = write.call(
            F.scaled_dot_product_attention, q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=_by_hint(a)
        )
    _, batch_first = _behind_batch_first(a.query)
    batch_first = batch_first and not _is_dropped(write.place) and not _order_shows(write.place)
    order = (0, 2, 1, 3) if batch_first else (2, 0, 1, 3)
    joined = write.method("flatten", write.method("permute", result, *order), -2)
    out = write.call(F.linear, joined, a.out_proj_weight, a.out_proj_bias)
    return write.method("transpose", out, 0, 1) if batch_first else out, weights


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
            results = _opened(write, a)
            # Autocast that begins inside the graph is not in force here, and the examples would lie about dtypes.
            if value_of(results[0]).dtype == value_of(attention)[0].dtype:
                for user in list(attention.users):
                    user.replace_all_uses_with(results[user.args[1]])
                    graph.erase_node(user)
                graph.erase_node(attention)
                opened += 1
                continue
            write.take_back()
            reason = f"an attention under an autocast that begins inside the graph; {AUTOCAST_OUTSIDE}"
        attention.meta[STAYS_CLOSED] = reason
    return opened
