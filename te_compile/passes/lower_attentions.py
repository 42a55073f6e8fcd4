"""Put attention itself in FP8, where the recipe asks for it (``fp8_dpa=True``).

Each ``F.scaled_dot_product_attention`` that FP8 attention can stand for becomes one ``te::attention``, which tracing
opens up into its quantizes and products. All others stay, and the plan says why: with what the passes before could not
fold (a mask) or with what an FP8 kernel does not do (dropout, other head sizes), the ordinary call is the right one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_compile.ops.attention import ATTENTION
from te_compile.ops.quantize import ALIGNMENT
from te_compile.ops.registry import Target, Unsupported
from te_compile.ops.triton_implementations import WIDEST_HEAD, check_target
from te_compile.options import Options
from te_compile.passes.attention_calls import has_sinks
from te_compile.passes.captured_nodes import argument, size_hint, value_of, wrapped_kind
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.plan import Attention, Plan
from te_compile.passes.regions import Region
from te_compile.passes.side_effects import may_change
from te_compile.passes.weight_expressions import DTYPES, in_plain_tensors

NARROWEST_HEAD = 64
FEWEST_QUERIES = 128
"""Below it attention reads keys and values, and computes little with them: quantising them first costs more reading."""


def _operands(node: Node) -> list[Any]:
    return [argument(node, position, name) for position, name in enumerate(("query", "key", "value"))]


def _why_not_this_call(node: Node) -> str:
    """What in the call's other arguments FP8 attention does not do; "" for nothing."""
    if has_sinks(node):
        return "FP8 attention has no sinks; nothing to do: it stays in high precision"
    if argument(node, 3, "attn_mask") is not None:
        return "FP8 attention takes no mask but a causal one; pass is_causal=True, or none, where that is what it means"
    dropout = argument(node, 4, "dropout_p", 0.0)
    if not isinstance(dropout, (int, float)):
        return "its dropout is not known when the graph is compiled; give it as a number for FP8"
    if dropout != 0:
        return f"FP8 attention has no dropout, and its own is {dropout}; set it to 0 for FP8"
    if not isinstance(argument(node, 5, "is_causal", False), bool):
        return "whether it is causal is not known when the graph is compiled; give True or False for FP8"
    scale = argument(node, 6, "scale")
    if not (scale is None or isinstance(scale, (int, float))) or isinstance(scale, bool):
        return "its scale is not known when the graph is compiled; give it as a number for FP8"
    return ""


def _why_not_these_kinds(node: Node) -> str:
    for what, operand in zip(("query", "key", "value", "result"), (*_operands(node), node), strict=True):
        value, kind = value_of(operand), wrapped_kind(operand)
        if kind:
            return f"its {what} is a {kind}; {in_plain_tensors(kind)}"
        if not isinstance(value, Tensor):
            return f"its {what} has no dtype and shape on record; nothing to do: it cannot be judged"
        if value.dtype not in DTYPES:
            return f"its {what} is {value.dtype}; cast it to bfloat16, float16 or float32 for FP8"
        if value.dim() != 4:
            return f"its {what} has {value.dim()} dimensions; give it batch, head, position and feature for FP8"
    return ""


def _why_not_these_shapes(node: Node) -> str:
    query, key, value = (value_of(operand).shape for operand in _operands(node))
    width = query[3]
    if not all(isinstance(size, int) for size in (*query[1::2], *key[1::2], *value[1::2])):
        return "its heads are not a fixed number of fixed size; compile with dynamic=False for FP8"
    if not width == key[3] == value[3]:
        why = f"its values have {value[3]} features a head, its queries {width}"
        return f"{why}; nothing to do: FP8 attention has one size for both"
    if width % ALIGNMENT or not NARROWEST_HEAD <= width <= WIDEST_HEAD:
        allowed = f"a multiple of {ALIGNMENT} from {NARROWEST_HEAD} to {WIDEST_HEAD}"
        return f"its heads have {width} features; make them {allowed} for FP8 attention"
    if key[1] != value[1] or key[1] == 0 or query[1] % key[1]:
        why = f"{query[1]} heads of queries cannot share {key[1]} of keys and {value[1]} of values evenly"
        return f"{why}; make the one a multiple of the other for FP8"
    # Whether heads are shared by enable_gqa, or a single one by broadcasting, means the same.
    pairs = ((query[0], key[0]), (key[0], value[0]), (key[2], value[2]))
    if not all(statically_known_true(one == other) for one, other in pairs):
        return "its queries, keys and values are broadcast, or not known to agree in their sizes; expand them for FP8"
    return ""


def _why_not_its_gradients(node: Node) -> str:
    """Flash backward kernels count causal positions from the end, ``is_causal`` from the start; and read the result."""
    if not torch.is_grad_enabled():
        return ""
    if may_change(node):
        return "its result is changed in place, and its gradients need it as it was; write to a copy for FP8"
    query, key = (value_of(operand).shape[2] for operand in _operands(node)[:2])
    if argument(node, 5, "is_causal", False) and not statically_known_true(query == key):
        why = "no fused kernel has the gradients of causal attention with more or fewer keys than queries"
        return f"{why}; nothing to do: in training it stays"
    return ""


def _is_in_rows(value: Tensor) -> bool:
    """Does [B, H, S, D] lie in memory as [B, S, H, D]?"""
    return value.transpose(1, 2).is_contiguous()


def _why_not_its_place(node: Node) -> str:
    value, devices = value_of(node), {value_of(each).device for each in (*_operands(node), node)}
    if len(devices) > 1:
        return f"its operands are on different devices, {sorted(map(str, devices))}; move them to one for FP8"
    if not (_is_in_rows(value) or value.is_contiguous()):
        why = f"its result lies in memory with strides {tuple(value.stride())}, which FP8 attention does not write"
        return f"{why}; make q, k and v contiguous for FP8"
    target = Target.of(value.device)
    if target.device == "cpu":
        return ""
    try:
        check_target(target)
    except Unsupported as reason:
        return f"{reason}; use a GPU of compute capability 8.9 or newer, with Triton, for FP8"
    return ""


def _why_not_fast(node: Node) -> str:
    """On a GPU alone: elsewhere FP8 is about meaning and never about speed."""
    queries = size_hint(value_of(node).shape[2])
    if value_of(node).device.type != "cuda" or queries >= FEWEST_QUERIES:
        return ""
    few = f"{queries} queries are too few to gain from keys and values that are quantised for them"
    return f"{few}; cost_model=False forces it"


def why_kept(attention: Attention, options: Options) -> str:
    """Why ``attention``, a call of ``F.scaled_dot_product_attention``, stays in high precision; "" if it need not."""
    node = attention.node
    excluded = options.why_attention_excluded(attention.name)
    if excluded:
        return excluded
    for rule in (_why_not_this_call, _why_not_these_kinds, _why_not_these_shapes, _why_not_its_gradients):
        reason = rule(node)
        if reason:
            return reason
    return _why_not_its_place(node) or (_why_not_fast(node) if options.cost_model else "")


def _lowered(node: Node, options: Options, name: str) -> Node:
    """Put ``te::attention`` in the place of ``node``; returns it."""
    value, graph = value_of(node), node.graph
    width = value_of(argument(node, 0, "query")).shape[3]
    scale = argument(node, 6, "scale")
    constants = (
        argument(node, 5, "is_causal", False),
        1 / math.sqrt(width) if scale is None else float(scale),
        value.dtype,
        options.recipe.rule().text(),
        name,
    )
    with graph.inserting_before(node):
        call = result = graph.call_function(ATTENTION, (*_operands(node), *constants))
        if not _is_in_rows(value):  # the model may take views that only the layout it had allows
            result = graph.call_method("contiguous", (call,))
    for new in (call, result):
        new.meta.update(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return call


def lower_attentions(regions: list[Region], plan: Plan, options: Options) -> int:
    """Lower every attention of ``plan`` that can be, and note in the plan which and why not; returns how many."""
    graphs = {id(region.graph): transforms_around(region.graph) for region in regions}
    lowered = 0
    for index, attention in enumerate(plan.attentions):
        if attention.status == "stays":
            continue
        node = attention.node
        if id(node.graph) not in graphs:
            reason = "it is inside a higher-order op, whose body is left alone; move it out of there for FP8"
        else:
            reason = graphs[id(node.graph)].get(node) or why_kept(attention, options)
        if reason:
            plan.attentions[index] = replace(attention, precision="kept", precision_reason=reason)
            continue
        plan.attentions[index] = replace(attention, node=_lowered(node, options, attention.name), precision="fp8")
        lowered += 1
    return lowered
