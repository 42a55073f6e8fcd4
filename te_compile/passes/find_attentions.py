"""Record what has become of each attention of a captured graph, for the report.

The passes before this one leave marks: on attention that they recognised or left as the model wrote it, on masks that
they folded or kept, on copies of key heads. Here the marks are read, once all of them are there, into the plan, next to
the linears. Nothing is rewritten. ``flex_attention`` is told of, too: a higher-order op of PyTorch's with a kernel of
its own, whose operands may come from FP8 linears while its body and its block mask are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node

from te_compile.passes.attention_calls import ATTENTION_CALLS, has_sinks
from te_compile.passes.captured_nodes import argument
from te_compile.passes.find_linears import STAYS_CLOSED
from te_compile.passes.fold_masks import FOLDED, MASK_STAYS
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.names import module_name, own_variable
from te_compile.passes.plan import Attention, Plan
from te_compile.passes.recognise_attention import RECOGNISED, STAYS
from te_compile.passes.regions import Left, Region
from te_compile.passes.share_one_head import BROADCAST, SHARED
from te_compile.passes.undo_repeated_heads import COPIES_STAY, UNDONE

_FLEX = "flex_attention"
_IS_FLEX = (
    f"it runs as PyTorch's {_FLEX} kernel with the scores and the mask that it was given; nothing to do: it is fused"
)


def _caller(softmax: Node) -> Node:
    """A node of the module that the attention around ``softmax`` belongs to: nn.Softmax is none of its own."""
    stack = softmax.meta.get("nn_module_stack") or {}
    innermost = next(reversed(stack.values()), None)
    scores = softmax.args[0] if innermost is not None and innermost[1] is nn.Softmax else None
    return scores if isinstance(scores, Node) else softmax


def _of_call(node: Node, name: str, left_alone: str) -> Attention:
    """An attention that is ``F.scaled_dot_product_attention``; ``left_alone``: why no pass looked at it, if so."""
    mask, mask_reason, heads = "none", "", ""
    if FOLDED in node.meta:
        mask = f"folded_{node.meta[FOLDED]}"
    elif argument(node, 3, "attn_mask") is not None:
        mask, mask_reason = "kept", node.meta.get(MASK_STAYS, left_alone)
    elif argument(node, 5, "is_causal", False) is not False:
        mask = "is_causal"
    if UNDONE in node.meta:
        heads = "undone"
    elif COPIES_STAY in node.meta:
        heads = "copied"
    elif SHARED in node.meta:
        heads = "shared"
    elif BROADCAST in node.meta:
        heads = "broadcast"
    status = "sdpa"
    if RECOGNISED in node.meta:
        status = "sinks" if has_sinks(node) else "recognised"
    heads_reason = node.meta.get(COPIES_STAY) or node.meta.get(BROADCAST, "")
    return Attention(name, status, "", mask, mask_reason, heads, heads_reason, node=node)


def _attentions_in(graph: Graph, left_alone: str = "") -> Iterator[Attention]:
    transformed, own = transforms_around(graph), own_variable(graph)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in ATTENTION_CALLS:
            yield _of_call(node, module_name(node, None, own), transformed.get(node, left_alone))
        elif isinstance(node.target, HigherOrderOperator) and node.target.name() == _FLEX:
            yield Attention(module_name(node, None, own), "stays", _IS_FLEX, node=node)
        elif STAYS in node.meta:
            place = _caller(node)
            yield Attention(module_name(place, None, own), "stays", node.meta[STAYS], node=place)
        elif STAYS_CLOSED in node.meta:
            yield Attention(module_name(node, None, own), "stays", node.meta[STAYS_CLOSED], node=node)


def find_attentions(regions: list[Region], left: list[Left], plan: Plan) -> int:
    """Fill ``plan`` with every attention of ``regions``, and of bodies that were ``left`` alone; returns how many."""
    for region in regions:
        plan.attentions.extend(_attentions_in(region.graph))
    for operator_name, body, _ in left:
        reason = f"it is inside the higher-order op {operator_name}, whose body is left alone; move it out of there"
        plan.attentions.extend(_attentions_in(body.graph, reason))
    return len(plan.attentions)
