"""Open ``torch._transformer_encoder_layer_fwd``, which is all of an nn.TransformerEncoderLayer in inference.

Without gradients torch.nn takes a whole layer as one operator: projections, norms, feed-forward. Written out
it is what the layer does in training: linears that can run in FP8, norms that quantise for them, attention.

The operator reads any mask as "hidden where it is not zero", also one of floating point, and so does what is written
here.
"""

from __future__ import annotations

import operator
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from te_compile.passes.captured_nodes import value_of
from te_compile.passes.find_linears import STAYS_CLOSED
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.weight_expressions import AUTOCAST_OUTSIDE
from te_compile.passes.writing import Writer

_NAMES = [argument.name for argument in torch.ops.aten._transformer_encoder_layer_fwd.default._schema.arguments]
_BY_SEQUENCE_PAIR, _BY_KEY, _BY_HEAD = 0, 1, 2  # the operator's mask types


def _arguments(layer: Node) -> SimpleNamespace:
    given = dict(zip(_NAMES, layer.args, strict=False)) | dict(layer.kwargs)
    return SimpleNamespace(**({"mask": None, "mask_type": None} | given))


def _why_closed(a: SimpleNamespace) -> str | None:
    """What keeps this layer from being opened, None if nothing does."""
    x = value_of(a.src)
    if not isinstance(x, Tensor) or x.is_nested or x.dim() != 3:
        return "a Transformer layer whose input is nested or has no batch dimension; give it [N, L, E] for FP8"
    numbers = (a.embed_dim, a.num_heads, a.use_gelu, a.norm_first)  # eps only goes on, to the norms
    if any(isinstance(number, Node) for number in numbers):
        return "a Transformer layer whose options are computed in the graph; give them as Python values for FP8"
    if a.mask is not None and a.mask_type not in (_BY_SEQUENCE_PAIR, _BY_KEY, _BY_HEAD):
        return "a Transformer layer with a mask of unknown type; give a bool mask for FP8"
    return None


def _shown(write: Writer, a: SimpleNamespace) -> Node | None:
    """Where attention may look, as booleans that broadcast to [N, H, L, S]."""
    if a.mask is None:
        return None
    hidden = write.method("to", a.mask, torch.bool)
    if a.mask_type == _BY_KEY:
        for _ in range(2):
            hidden = write.method("unsqueeze", hidden, 1)
    return write.call(operator.invert, hidden)


def _attention(write: Writer, a: SimpleNamespace, x: Node) -> Node:
    packed = write.call(F.linear, x, a.qkv_weight, a.qkv_bias)
    chunks = write.method("chunk", packed, 3, -1)
    heads = []
    for i in range(3):
        part = write.method("unflatten", write.call(operator.getitem, chunks, i), -1, (a.num_heads, -1))
        heads.append(write.method("transpose", part, 1, 2))
    result = write.call(F.scaled_dot_product_attention, *heads, attn_mask=_shown(write, a))
    joined = write.method("flatten", write.method("transpose", result, 1, 2), -2)
    return write.call(F.linear, joined, a.proj_weight, a.proj_bias)


def _feed_forward(write: Writer, a: SimpleNamespace, x: Node) -> Node:
    inner = write.call(F.linear, x, a.ffn_weight_1, a.ffn_bias_1)
    inner = write.call(F.gelu if a.use_gelu else F.relu, inner)
    return write.call(F.linear, inner, a.ffn_weight_2, a.ffn_bias_2)


def _opened(write: Writer, a: SimpleNamespace) -> Node:
    """The layer written out: [N, L, E]."""
    x = a.src
    for block, weight, bias in (
        (_attention, a.norm_weight_1, a.norm_bias_1),
        (_feed_forward, a.norm_weight_2, a.norm_bias_2),
    ):
        if a.norm_first:
            normal = write.call(F.layer_norm, x, (a.embed_dim,), weight, bias, a.eps)
            x = write.call(operator.add, x, block(write, a, normal))
        else:
            total = write.call(operator.add, x, block(write, a, x))
            x = write.call(F.layer_norm, total, (a.embed_dim,), weight, bias, a.eps)
    return x


def open_encoder_layers(graph: Graph) -> int:
    """Replace each fused Transformer layer by what it computes; returns how many.

    A layer that stays closed is marked with the reason, for the report.
    """
    opened, left = 0, transforms_around(graph)
    for layer in graph.find_nodes(op="call_function", target=torch._transformer_encoder_layer_fwd):
        a = _arguments(layer)
        reason = left.get(layer) or _why_closed(a)
        if reason is None:
            write = Writer(layer)
            result = _opened(write, a)
            if value_of(result).dtype == value_of(layer).dtype:
                layer.replace_all_uses_with(result)
                graph.erase_node(layer)
                opened += 1
                continue
            write.take_back()
            reason = f"a Transformer layer under an autocast that begins inside the graph; {AUTOCAST_OUTSIDE}"
        layer.meta[STAYS_CLOSED] = reason
    return opened
