"""Attention with a bias: laid out as fused kernels read it and, where the bias learns, on the one that lets it.

A bias of relative positions, as T5 and its kin have it, is looked up by position and head, so that its elements lie
``heads`` apart. PyTorch's fused kernels read none whose keys do not lie side by side; attention then runs on the kernel
that stores all scores, in float32, products included. So the bias is copied first, once for all rows of a batch that
share it.

Of the fused kernels the memory-efficient one alone has a gradient for a bias. PyTorch does not ask for that: it takes
the first that can read one, on Hopper cuDNN's. A bias that learns therefore goes to the memory-efficient one by name.
README has what that gives to T5-large.

In 16 bits, on a GPU; an order of kernels that the user has set stands, and so does the draw of a dropout where eager
mode's draws are asked for (``fallback_random``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from te_compile.options import Options
from te_compile.passes.attention_calls import has_sinks
from te_compile.passes.attention_kernels import chooses_itself, is_plain, takes_its_own_order
from te_compile.passes.attention_scores import same_sizes
from te_compile.passes.captured_nodes import argument, value_of, wrapped_kind
from te_compile.passes.dropout_attentions import wants_eager_draws
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.plan import Attention, Plan
from te_compile.passes.regions import Region
from te_compile.passes.side_effects import may_change
from te_compile.passes.writing import Writer

EFFICIENT_ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention.default

_HALVES = (torch.bfloat16, torch.float16)
_ALIGNED_KEYS = 8  # rows of a bias start at multiples of so many elements
_OPERANDS = (*enumerate(("query", "key", "value", "attn_mask")),)


def reads_biases(node: Node) -> bool:
    """Is attention's result on a device whose memory-efficient kernel takes heads like these?"""
    query, key, value, _ = map(value_of, _operands(node))
    if query.device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    dtype = value_of(node).dtype
    asked = torch.backends.cuda.SDPAParams(query.to(dtype), key.to(dtype), value.to(dtype), None, 0.0, False, False)
    return torch.backends.cuda.can_use_efficient_attention(asked)


def biased_attentions(
    regions: list[Region], plan: Plan, options: Options, reads: Callable[[Node], bool] = reads_biases
) -> int:
    """Lay out biases for fused kernels and choose one for those that learn; returns for how many attentions.

    ``plan`` must know them (find_attentions). reads: can a fused kernel read a bias of this call?
    """
    if any(chooses_itself(region.graph) for region in regions) or not takes_its_own_order():
        return 0
    graphs = {id(region.graph): transforms_around(region.graph) for region in regions}
    changed, changes = 0, dict[Node, bool]()
    for index, attention in enumerate(plan.attentions):
        if not _has_a_mask(attention, graphs) or not reads(attention.node):
            continue
        if torch.is_grad_enabled() and may_change(attention.node, changes):
            continue  # a fused kernel's gradients read the result as it was
        if argument(attention.node, 4, "dropout_p", 0.0) != 0 and wants_eager_draws(options):
            continue
        if _learns(attention.node) and _fits_the_efficient_kernel(attention.node):
            plan.attentions[index] = _on_the_efficient_kernel(attention)
            changed += 1
        elif not _learns(attention.node):
            changed += _laid_out(attention.node)
    return changed


def _operands(node: Node) -> list[Any]:
    return [argument(node, place, name) for place, name in _OPERANDS]


def _has_a_mask(attention: Attention, graphs: dict[int, dict[Node, str]]) -> bool:
    """Is it an ordinary call of SDPA with a mask, in 16 bits, in a graph that is rewritten?"""
    node: Any = attention.node
    if attention.status == "stays" or attention.precision == "fp8" or attention.kernel or id(node.graph) not in graphs:
        return False
    if has_sinks(node):  # that lays out its own
        return False
    if node in graphs[id(node.graph)] or not is_plain(node, masked=True) or any(map(wrapped_kind, _operands(node))):
        return False
    return value_of(node).dtype in _HALVES and argument(node, 5, "is_causal", False) is False


def _learns(node: Node) -> bool:
    """Does a gradient go to the mask?"""
    mask: Tensor = value_of(argument(node, 3, "attn_mask"))
    return torch.is_grad_enabled() and mask.requires_grad


def _fits_the_efficient_kernel(node: Node) -> bool:
    """Is a direct call of the kernel the same as SDPA's, which would broadcast operands and share heads?"""
    query, key, value, mask = map(value_of, _operands(node))
    alike = same_sizes(query.shape[:2], key.shape[:2]) and same_sizes(key.shape[:3], value.shape[:3])
    return (
        alike
        and argument(node, 7, "enable_gqa", False) is False
        and isinstance(key.shape[2], int)
        and key.shape[2] % _ALIGNED_KEYS == 0  # Inductor knows no layout for others that the backward pass reads
        and 1 <= mask.dim() <= 4
        and not torch.are_deterministic_algorithms_enabled()  # its sums of gradients are not
    )


def _laid_out(node: Node) -> bool:
    """Have the keys of a mask that learns nothing lie side by side; returns whether they did not."""
    mask = argument(node, 3, "attn_mask")
    value, write = value_of(mask), Writer(node)
    if value.dim() == 0 or not isinstance(value.stride(-1), int) or value.stride(-1) == 1:
        return False  # a symbolic stride is no layout that a bias is known to have
    shared = [isinstance(stride, int) and stride == 0 for stride in value.stride()[:-1]]
    if any(shared):
        first = (*(slice(None, 1) if all_alike else slice(None) for all_alike in shared), slice(None))
        own = write.method("contiguous", write.call(operator.getitem, mask, first))
        copied = write.method("expand", own, *(_size(write, mask, place) for place in range(value.dim())))
    else:
        copied = write.method("contiguous", mask)
    if len(node.args) > 3:
        node.update_arg(3, copied)
    else:
        node.update_kwarg("attn_mask", copied)
    return True


def _size(write: Writer, x: Node, place: int) -> Any:
    """How long ``x`` is there: a number, or a node where that is a symbol."""
    size = value_of(x).shape[place]
    return size if isinstance(size, int) else write.method("size", x, place)


def _on_the_efficient_kernel(attention: Attention) -> Attention:
    """The attention with a direct call of the memory-efficient kernel in the place of its own."""
    node = attention.node
    write, dtype = Writer(node), value_of(node).dtype
    cast = [each if value_of(each).dtype == dtype else write.method("to", each, dtype) for each in _operands(node)]
    query, key, value, mask = cast  # an autocast is at work if their dtypes were others
    bias = _for_the_efficient_kernel(write, mask, query, value_of(key).shape[2])
    dropout, scale = float(argument(node, 4, "dropout_p", 0.0)), argument(node, 6, "scale")
    outputs = write.call(EFFICIENT_ATTENTION, query, key, value, bias, True, dropout, False, scale=scale)
    result = write.laid_out_like(write.call(operator.getitem, outputs, 0), node)  # views of it may follow
    for new in write.written:
        new.meta.update({key: value for key, value in node.meta.items() if key not in new.meta})
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    return replace(attention, node=outputs, kernel="efficient")


def _for_the_efficient_kernel(write: Writer, mask: Node, query: Node, keys: int) -> Node:
    """``mask`` as [B, H, S, keys] with its keys side by side; what all of a batch share is written once."""
    value = value_of(mask)
    if value.shape[-1] != keys:  # one for all keys
        mask = write.method("expand", mask, *(_size(write, mask, place) for place in range(value.dim() - 1)), keys)
    if not value_of(mask).is_contiguous():
        mask = write.method("contiguous", mask)
    return write.method("expand", mask, *(_size(write, query, place) for place in range(3)), keys)
