"""Turn attention that a model spells out into ``F.scaled_dot_product_attention``.

In high precision softmax(q @ k.mT) @ v reads and writes [B, H, S, S] half a dozen times and is the slowest part of a
model whose linears run in FP8; the fused kernels never store it. The rewrite is for attention that is *exactly* this
one (``softmax_attention``). Scores that go through a tanh, weights that somebody else reads, a factor for each head
after softmax: all of it stays, with the reason as ``meta[STAYS]`` on the softmax.

Its operands are read as fused kernels take them (``attention_operands``), and masks and biases become one bias
(``score_bias``). Where a fused kernel would be the slower one it stays as well (``fused_attention_gains``). Sinks
(ops/sink_attention.py) are what queries look at where no key is for them; with them ``te::sink_attention`` takes the
place. A row that a mask hides entirely has weights of zero then, and needs no care.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from te_compile.ops.sink_attention import SINK_ATTENTION
from te_compile.options import Options
from te_compile.passes.attention_operands import AttentionOperands
from te_compile.passes.attention_scores import NotAttentionError, Sinks, same_sizes
from te_compile.passes.captured_nodes import called, value_of, wrapped_kind
from te_compile.passes.contractions import Operand
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.fused_attention_gains import check_that_kernels_are_faster
from te_compile.passes.score_bias import ScoreBias
from te_compile.passes.softmax_attention import SoftmaxAttention, attention_around, is_softmax, keeps_rows
from te_compile.passes.writing import Writer, refusals_are_expected
from te_compile.passes.written_tensors import writes

RECOGNISED = "te_recognised_attention"
"""Meta key of an attention that a model had spelled out."""

STAYS = "te_attention_stays"
"""Meta key of a softmax: why the attention around it was left as the model wrote it."""

_ANY_LAYOUT = ("contiguous", "reshape", "flatten", "linear", "matmul", "clone")  # what takes any strides


def recognise_attention(graph: Graph, options: Options | None = None) -> int:
    """Replace attention that is spelled out by ``F.scaled_dot_product_attention``; returns how many times."""
    options = Options() if options is None else options
    count, changes = 0, dict[Node, bool]()
    left = transforms_around(graph)
    for softmax in list(graph.nodes):
        if not is_softmax(softmax) or softmax in left or wrapped_kind(softmax):
            continue
        try:
            found = attention_around(softmax, changes)
            if found is not None:
                _rewrite(found, changes, options)
                count += 1
        except NotAttentionError as why:
            softmax.meta[STAYS] = str(why)
    return count


def _rewrite(found: SoftmaxAttention, changes: dict[Node, bool], options: Options) -> None:
    """Put the new attention where the model's result stood; raises, and changes nothing, where it would be another."""
    old, write = found.output, Writer(found.output)
    new, result = _written(found, write, changes, options)
    new.meta[RECOGNISED] = True
    for user in list(old.users):
        in_order = found.product.result == tuple(range(len(found.product.result)))
        if in_order and keeps_rows(user, old) and same_sizes(value_of(user).shape, value_of(new).shape):
            _replace(write, user, new)
            old.graph.erase_node(user)
    _replace(write, old, result)
    for node in [*reversed(write.written), *reversed(found.nodes)]:
        if not node.users:
            old.graph.erase_node(node)
    for operand in (found.scores.product.left, found.scores.product.right, found.product.right):
        _erase_unused(operand.node)


def _written(found: SoftmaxAttention, write: Writer, changes: dict[Node, bool], options: Options) -> tuple[Node, Node]:
    """The new attention, and what it gives as the model's result; raises, and leaves nothing, where it is another."""
    old = found.output
    try:
        with refusals_are_expected():
            new = _attention(AttentionOperands(found, write, changes), options)
            joined = write.method("flatten", new, 0, 1) if value_of(old).dim() == 3 else new
            result = Operand(joined, found.product.result).written(write)
        # Autocast that begins inside the graph is not in force here; what it casts would come out in another dtype.
        if value_of(result).dtype != value_of(old).dtype or not same_sizes(value_of(result).shape, value_of(old).shape):
            raise NotAttentionError(
                "its operands are of several dtypes or shapes; cast them to one dtype for a fused kernel"
            )
    except NotAttentionError:
        write.take_back()
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        write.take_back()
        why = str(error).partition("\n")[0]
        raise NotAttentionError(f"PyTorch refuses it as a fused call ({why}); nothing to do: it stays right") from error
    return new, result


def _attention(operands: AttentionOperands, options: Options) -> Node:
    """The new attention, [B, H, Q, V]."""
    query, key, value, scale = operands.written()
    told = ScoreBias(operands, query, scale)
    for step in operands.found.scores.steps:
        told.take(step)
    told.finish(key)
    sinks = operands.found.scores.sinks
    if sinks is not None:
        return _beside_sinks(operands, told, key, value, sinks)
    check_that_kernels_are_faster(operands.found, told.query, key, told.bias, options)
    return operands.write.call(
        F.scaled_dot_product_attention, told.query, key, value,
        attn_mask=told.bias, dropout_p=operands.found.dropout, scale=told.scale,
    )  # fmt: skip


def _beside_sinks(operands: AttentionOperands, told: ScoreBias, key: Node, value: Node, sinks: Sinks) -> Node:
    """The call of our operator, to which no autocast casts operands."""
    write, dtype = operands.write, operands.dtype
    if dtype == torch.float64:
        why = "its weights beside sinks are float64, and fused kernels compute them in float32"
        raise NotAttentionError(f"{why}; nothing to do: it stays right")
    cast = [
        each if value_of(each).dtype == dtype else write.method("to", each, dtype) for each in (told.query, key, value)
    ]
    tensor = sinks.tensor if sinks.is_column else write.method("unsqueeze", sinks.tensor, -1)
    column = operands.beside_scores(tensor, sinks.dimensions)
    is_wide = value_of(operands.found.scores.nodes[0]).dtype == torch.float32
    return write.call(SINK_ATTENTION, *cast, attn_mask=told.bias, scale=told.scale, sinks=column, wide=is_wide)


def _takes_any_layout(node: Node) -> bool:
    """Is every use of ``node`` one that does not care about strides?"""
    return all(
        (called(user) in ("transpose", "permute", "swapaxes") and _takes_any_layout(user))
        or called(user) in _ANY_LAYOUT
        for user in node.users
    )


def _replace(write: Writer, old: Node, new: Node) -> None:
    """``new`` for ``old``, in the order in memory that ``old`` had where that may show, as in a view of it."""
    if old.users:
        old.replace_all_uses_with(new if _takes_any_layout(old) else write.in_order_of(new, old))


def _erase_unused(node: Node) -> None:
    """Erase ``node`` and what it alone was made from, as far as that is a view, a scale or a cast."""
    while node.op in ("call_function", "call_method") and not node.users and not writes(node):
        source = node.args[0]
        node.graph.erase_node(node)
        if not isinstance(source, Node):
            return
        node = source
