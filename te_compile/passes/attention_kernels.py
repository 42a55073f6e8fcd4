"""Choose the kernel of an attention where PyTorch's own order would take a slow one, or one that draws wrongly.

On compute capabilities 9.0 and 10.0 cuDNN computes attention 1.7 times as fast as flash, forward and backward, and
PyTorch puts it first there: but only from cuDNN 9.15.1 on. A process often has an older one, for the first cuDNN on the
library path shadows the one that PyTorch brings. What PyTorch avoids in those are reads out of bounds for lengths that
are not multiples of 128 (pytorch#169849), so attention of other lengths can have the fast kernel all the same.

cuDNN rounds the probability of a dropout to sixteenths (pytorch#174245), which PyTorch 2.11 does not mind. Attention
that a model spells out, with a dropout of its own, must not come to that by becoming SDPA: it runs on flash. Faster
than flash is an operator of ours, where it can stand for the call (dropout_attentions.py); sixteenths are cuDNN's.

Only what nobody else has decided is decided here: an order of kernels, a kernel switched off or an environment variable
that the user has set stands. Between PyTorch's kernels, so does the draw of a dropout that the model itself asks SDPA
for. Nor does a faster kernel help a step in which the GPU waits for the host: by the estimate of ``cost_model`` it
keeps PyTorch's.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes

from te_compile.ops.registry import Target
from te_compile.options import Options
from te_compile.passes.attention_calls import HEAD_STEP, has_sinks
from te_compile.passes.captured_nodes import argument, value_of
from te_compile.passes.dropout_attentions import draws_bits, with_bits
from te_compile.passes.efficient_attention import cast_for_attention
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.plan import Attention, Plan
from te_compile.passes.recognise_attention import RECOGNISED
from te_compile.passes.regions import Region
from te_compile.passes.step_cost import waits_for_host
from te_compile.passes.writing import Writer

CUDNN_ATTENTION = torch.ops.aten._scaled_dot_product_cudnn_attention.default
FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default

_FASTER_ON = ((9, 0), (10, 0))
_OLDEST = (9, 14)  # older ones were not tried
_SAFE_LENGTHS = 128
_FLASH_FIRST = (
    *(SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.OVERRIDEABLE),
)
_UNTOUCHED_ORDER = [backend.value for backend in _FLASH_FIRST]
"""PyTorch's order of kernels where nothing, a newer cuDNN included, has changed it."""
_CUDNN_FIRST = sorted(_UNTOUCHED_ORDER, key=lambda value: value != SDPBackend.CUDNN_ATTENTION.value)
"""PyTorch's order with a newer cuDNN."""


@functools.cache
def _settle_order() -> None:
    """Ask PyTorch for a kernel: at the first time it settles its order, by the cuDNN that it finds."""
    if torch.cuda.is_available():
        with _disable_current_modes():  # a fake tensor's device is none to ask on
            heads = torch.empty(1, 1, _SAFE_LENGTHS, 64, dtype=torch.bfloat16, device="cuda")
            torch._fused_sdp_choice(heads, heads, heads)


def order_of_kernels() -> list[int]:
    """The numbers of PyTorch's kernels for attention, in the order in which it asks whether they can run."""
    _settle_order()
    order: list[int] = torch._C._get_sdp_priority_order()
    return order


def takes_flash_first() -> bool:
    """Is PyTorch's order the one of a process whose cuDNN is too old, and has the user left it at that?"""
    if not torch.backends.cuda.cudnn_sdp_enabled() or os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0") != "0":
        return False
    return order_of_kernels() == _UNTOUCHED_ORDER and cudnn_version() >= _OLDEST


def takes_its_own_order() -> bool:
    """Has the user left PyTorch's choice among its kernels as it is?"""
    backends = torch.backends.cuda
    every = (backends.flash_sdp_enabled, backends.mem_efficient_sdp_enabled, backends.cudnn_sdp_enabled)
    return all(each() for each in every) and order_of_kernels() in (_UNTOUCHED_ORDER, _CUDNN_FIRST)


def _takes_cudnn_first() -> bool:
    """Does PyTorch ask cuDNN before flash, whoever has said so?"""
    order = order_of_kernels()
    cudnn, flash = SDPBackend.CUDNN_ATTENTION.value, SDPBackend.FLASH_ATTENTION.value
    return torch.backends.cuda.cudnn_sdp_enabled() and order.index(cudnn) < order.index(flash)


def cudnn_version() -> tuple[int, ...]:
    """Of the library that is loaded, (major, minor, patch); () for none.

    ``torch.backends.cudnn.version`` raises an error if that is older than the one PyTorch was built with.
    """
    cudnn = getattr(torch._C, "_cudnn", None)
    return tuple(cudnn.getRuntimeVersion()) if cudnn is not None else ()


def chooses_itself(graph: Graph) -> bool:
    """Does the model say somewhere which kernels attention may run on?"""
    return any(node.target is torch.nn.attention._sdpa_kernel for node in graph.nodes)


def can_run(kernel: str, node: Node) -> bool:
    """Does PyTorch hold the kernel "cudnn" or "flash" able to run this attention here, under the present settings?"""
    if not torch.cuda.is_available():  # a PyTorch built for CUDA would ask a driver that is not there
        return False
    operands = (value_of(argument(node, place, name)) for place, name in enumerate(("query", "key", "value")))
    query, key, value = (each.to(value_of(node).dtype) for each in operands)  # an autocast may be at work
    dropout, causal = argument(node, 4, "dropout_p", 0.0), argument(node, 5, "is_causal", False)
    shares_heads = argument(node, 7, "enable_gqa", False)
    asked = torch.backends.cuda.SDPAParams(query, key, value, None, dropout, causal, shares_heads)
    if kernel == "cudnn":
        return torch.backends.cuda.can_use_cudnn_attention(asked)
    return (
        torch.backends.cuda.can_use_flash_attention(asked) and query.shape[-1] % HEAD_STEP == 0
    )  # for others SDPA pads first


def is_cast(node: Node) -> bool:
    """Does an autocast that is at work here, and would be none around a direct call, cast the operands?"""
    operands = (value_of(argument(node, place, name)) for place, name in enumerate(("query", "key", "value")))
    return any(each.dtype != value_of(node).dtype for each in operands)


def is_plain(node: Node, masked: bool = False) -> bool:
    """Are all arguments such that a direct call of a kernel on operands of the result's dtype means the same?

    masked: but for a mask that is there.
    """
    operands = [value_of(argument(node, place, name)) for place, name in enumerate(("query", "key", "value"))]
    if not all(isinstance(each, Tensor) and each.dim() == 4 for each in operands):
        return False
    dropout, scale = argument(node, 4, "dropout_p", 0.0), argument(node, 6, "scale")
    return (
        isinstance(dropout, (int, float))
        and (argument(node, 3, "attn_mask") is not None) == masked
        and isinstance(argument(node, 5, "is_causal", False), bool)
        and (scale is None or isinstance(scale, (int, float)))
    )


def _is_safe_on_older(node: Node) -> bool:
    """Does an older cuDNN read within bounds, and is there no draw that it would change?"""
    lengths = [value_of(argument(node, place, name)).shape[2] for place, name in enumerate(("query", "key", "value"))]
    if not all(isinstance(length, int) and length and length % _SAFE_LENGTHS == 0 for length in lengths):
        return False
    return argument(node, 4, "dropout_p", 0.0) == 0 or (RECOGNISED in node.meta and not is_rounded(node))


def is_rounded(node: Node) -> bool:
    """Would cuDNN drop out with another probability than the one asked for?"""
    sixteenths = argument(node, 4, "dropout_p", 0.0) * 16
    return sixteenths != int(sixteenths)


def is_faster_on(device: torch.device) -> bool:
    """Is cuDNN's kernel known to be the fastest there?"""
    return Target.of(device).capability in _FASTER_ON


def _on(kernel: str, node: Node) -> Node:
    """Put a direct call of the kernel in the place of ``node``; returns the call."""
    if kernel == "te":
        return with_bits(node)
    if kernel == "flash":
        return put_flash(node)
    write = Writer(node)
    operands = [argument(node, place, name) for place, name in enumerate(("query", "key", "value"))]
    dropout, causal = float(argument(node, 4, "dropout_p", 0.0)), argument(node, 5, "is_causal", False)
    # Without a mask; it saves something for a backward only if there can be one.
    given = (*operands, None, torch.is_grad_enabled(), dropout, causal, False)
    outputs = write.call(CUDNN_ATTENTION, *given, scale=argument(node, 6, "scale"))
    write.put_in_place(write.call(operator.getitem, outputs, 0))
    return outputs


def put_flash(node: Node) -> Node:
    """Put a direct call of the flash kernel in the place of ``node``, a call of SDPA without a mask; returns it."""
    write, dtype = Writer(node), value_of(node).dtype
    operands = [argument(node, place, name) for place, name in enumerate(("query", "key", "value"))]
    cast = [cast_for_attention(write, each, dtype) for each in operands]  # an autocast may be at work
    dropout, causal = float(argument(node, 4, "dropout_p", 0.0)), argument(node, 5, "is_causal", False)
    outputs = write.call(FLASH_ATTENTION, *cast, dropout, causal, False, scale=argument(node, 6, "scale"))
    write.put_in_place(write.call(operator.getitem, outputs, 0))
    return outputs


def choose_attention_kernels(
    regions: list[Region], plan: Plan, options: Options, able: Callable[[str, Node], bool] = can_run
) -> int:
    """Call another kernel than PyTorch would, where it is faster or draws as asked; returns for how many attentions.

    The plan's linears must have been selected.
    """
    if any(chooses_itself(region.graph) for region in regions):
        return 0
    graphs = {id(region.graph): transforms_around(region.graph) for region in regions}
    changeable = [index for index, attention in enumerate(plan.attentions) if _may_change(attention, graphs)]
    if not changeable:
        return 0
    speed_counts = not waits_for_host(plan, options, torch.is_grad_enabled())
    chosen = 0
    for index in changeable:
        attention = plan.attentions[index]
        kernel = _kernel_for(attention.node, options, speed_counts, able)
        if kernel:
            plan.attentions[index] = replace(attention, node=_on(kernel, attention.node), kernel=kernel)
            chosen += 1
    return chosen


def _is_ordinary(attention: Attention, graphs: dict[int, dict[Node, str]]) -> bool:
    """Is it a call of SDPA in high precision, in a graph that is rewritten and in no function transform, for which no
    kernel has been chosen?

    graphs: those that are rewritten, by identity, with the nodes of each that function transforms are around.
    """
    node: Any = attention.node
    if attention.status == "stays" or attention.precision == "fp8" or attention.kernel or has_sinks(node):
        return False
    return id(node.graph) in graphs and node not in graphs[id(node.graph)]


def ordinary_attentions(regions: list[Region], plan: Plan) -> list[int]:
    """Which attentions of ``plan``, by index, are ordinary; none where somebody else has chosen among the kernels."""
    if any(chooses_itself(region.graph) for region in regions) or not takes_its_own_order():
        return []
    graphs = {id(region.graph): transforms_around(region.graph) for region in regions}
    return [index for index, attention in enumerate(plan.attentions) if _is_ordinary(attention, graphs)]


def _may_change(attention: Attention, graphs: dict[int, dict[Node, str]]) -> bool:
    """Is it an ordinary one, whose arguments a direct call of a kernel could have?"""
    node: Any = attention.node
    if not _is_ordinary(attention, graphs) or not is_plain(node) or is_cast(node):
        return False
    return is_faster_on(value_of(node).device)


def _kernel_for(node: Node, options: Options, speed_counts: bool, able: Callable[[str, Node], bool]) -> str:
    """The kernel to call instead of the one that PyTorch would; "" for none."""
    if speed_counts and is_rounded(node) and takes_its_own_order() and draws_bits(node, options):
        return "te"
    if speed_counts and takes_flash_first() and _is_safe_on_older(node) and able("cudnn", node):
        return "cudnn"
    rounds = RECOGNISED in node.meta and is_rounded(node)
    if rounds and _takes_cudnn_first() and able("cudnn", node) and able("flash", node):
        return "flash"
    return ""
