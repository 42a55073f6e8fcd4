"""Run attention on cuDNN's kernel where PyTorch's own order of kernels would not take it.

On compute capabilities 9.0 and 10.0 cuDNN computes attention 1.7 times as fast as flash, forward and backward, and
PyTorch puts it first there: but only from cuDNN 9.15.1 on. A process often has an older one, for the first cuDNN on the
library path shadows the one that PyTorch brings. What PyTorch avoids in those are reads out of bounds for lengths that
are not multiples of 128 (pytorch#169849), so attention of other lengths can have the fast kernel all the same.

Only what nobody else has decided is decided here: an order of kernels, a kernel switched off or an environment variable
that the user has set stands, as does the draw of a dropout that the model itself asks a kernel for.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn.attention import SDPBackend

from te_compile.passes.captured_nodes import argument, value_of
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.plan import Attention, Plan
from te_compile.passes.recognise_attention import RECOGNISED
from te_compile.passes.regions import Region
from te_compile.passes.writing import Writer

CUDNN_ATTENTION = torch.ops.aten._scaled_dot_product_cudnn_attention.default

_FASTER_ON = ((9, 0), (10, 0))
_OLDEST = (9, 14)  # older ones were not tried
_SAFE_LENGTHS = 128
_FLASH_FIRST = (
    *(SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.OVERRIDEABLE),
)
_UNTOUCHED_ORDER = [backend.value for backend in _FLASH_FIRST]
"""PyTorch's order of kernels where nothing, a newer cuDNN included, has changed it."""


def _is_free_to_choose() -> bool:
    """Has the user left the choice of kernels to PyTorch, and is cuDNN known to be right and fast here?"""
    if not torch.backends.cuda.cudnn_sdp_enabled() or os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0") != "0":
        return False
    order: list[int] = torch._C._get_sdp_priority_order()
    if order != _UNTOUCHED_ORDER:
        return False
    return cudnn_version() >= _OLDEST


def cudnn_version() -> tuple[int, ...]:
    """Of the library that is loaded, (major, minor, patch); () for none.

    ``torch.backends.cudnn.version`` raises an error if that is older than the one PyTorch was built with.
    """
    cudnn = getattr(torch._C, "_cudnn", None)
    return tuple(cudnn.getRuntimeVersion()) if cudnn is not None else ()


def _chooses_itself(graph: Graph) -> bool:
    """Does the model say somewhere which kernels attention may run on?"""
    return any(node.target is torch.nn.attention._sdpa_kernel for node in graph.nodes)


def cudnn_can_run(node: Node) -> bool:
    """Does PyTorch hold cuDNN's kernel able to run this attention here, under the present settings?"""
    query, key, value = (value_of(argument(node, place, name)) for place, name in enumerate(("query", "key", "value")))
    dropout, causal = argument(node, 4, "dropout_p", 0.0), argument(node, 5, "is_causal", False)
    shares_heads = argument(node, 7, "enable_gqa", False)
    asked = torch.backends.cuda.SDPAParams(query, key, value, None, dropout, causal, shares_heads)
    return torch.backends.cuda.can_use_cudnn_attention(asked)


def _is_plain(node: Node) -> bool:
    """Are all arguments such that a direct call of the kernel means the same?"""
    operands = [value_of(argument(node, place, name)) for place, name in enumerate(("query", "key", "value"))]
    if not all(isinstance(each, Tensor) and each.dim() == 4 for each in operands):
        return False
    if any(each.dtype != value_of(node).dtype for each in operands):
        return False  # an autocast that is at work here is none around a direct call
    lengths = [each.shape[2] for each in operands]
    if not all(isinstance(length, int) and length and length % _SAFE_LENGTHS == 0 for length in lengths):
        return False
    dropout, scale = argument(node, 4, "dropout_p", 0.0), argument(node, 6, "scale")
    draws_as_it_likes = dropout == 0 or RECOGNISED in node.meta
    return (
        isinstance(dropout, (int, float))
        and draws_as_it_likes
        and argument(node, 3, "attn_mask") is None
        and isinstance(argument(node, 5, "is_causal", False), bool)
        and (scale is None or isinstance(scale, (int, float)))
    )


def is_faster_on(device: torch.device) -> bool:
    """Is cuDNN's kernel known to be the fastest there?"""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in _FASTER_ON


def _on_cudnn(node: Node) -> Node:
    """Put cuDNN's kernel in the place of ``node``; returns its call."""
    write = Writer(node)
    operands = [argument(node, place, name) for place, name in enumerate(("query", "key", "value"))]
    saves_for_backward = torch.is_grad_enabled()
    dropout, causal = argument(node, 4, "dropout_p", 0.0), argument(node, 5, "is_causal", False)
    scale = argument(node, 6, "scale")
    outputs = write.call(
        CUDNN_ATTENTION, *operands, None, saves_for_backward, float(dropout), causal, False, scale=scale
    )
    result = write.laid_out_like(write.call(operator.getitem, outputs, 0), node)  # views of it may follow
    for new in write.written:
        new.meta.update({key: value for key, value in node.meta.items() if key not in new.meta})
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    return outputs


def prefer_cudnn(regions: list[Region], plan: Plan, can_run: Callable[[Node], bool] = cudnn_can_run) -> int:
    """Put cuDNN's kernel where another one would run though it is faster; returns for how many attentions."""
    if not _is_free_to_choose() or any(_chooses_itself(region.graph) for region in regions):
        return 0
    graphs = {id(region.graph): transforms_around(region.graph) for region in regions}
    chosen = 0
    for index, attention in enumerate(plan.attentions):
        if _may_change(attention, graphs) and can_run(attention.node):
            plan.attentions[index] = replace(attention, node=_on_cudnn(attention.node), kernel="cudnn")
            chosen += 1
    return chosen


def _may_change(attention: Attention, graphs: dict[int, dict[Node, str]]) -> bool:
    """Is it an ordinary call of SDPA, in a graph that is rewritten?"""
    node: Any = attention.node
    if attention.status == "stays" or attention.precision == "fp8" or id(node.graph) not in graphs:
        return False
    return node not in graphs[id(node.graph)] and _is_plain(node) and is_faster_on(value_of(node).device)
