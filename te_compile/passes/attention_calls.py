"""Which nodes of Dynamo's graph are attention, as PyTorch names it, ``F.scaled_dot_product_attention``, or with sinks.

``te::sink_attention`` has the arguments of SDPA in the same places, so that what passes find out about masks and heads
holds for both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from te_compile.ops.sink_attention import SINK_ATTENTION
from te_compile.passes.function_transforms import transforms_around

ATTENTION_CALLS = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention, SINK_ATTENTION)
"""What such a node calls: the function, what it stands for, or our operator."""

WIDEST_HEAD = 256
"""The features of a head up to which PyTorch's flash and cuDNN kernels take it."""

HEAD_STEP = 8
"""Of so many features, or a multiple, is a head that PyTorch's fused kernels read as it is."""


def attention_calls(graph: Graph) -> list[Node]:
    """Those that a pass may change, in order: none inside of a function transform."""
    left = transforms_around(graph)
    return [node for node in graph.nodes if node.target in ATTENTION_CALLS and node not in left]


def has_sinks(node: Node) -> bool:
    """Is ``node`` a call of our operator for attention with sinks?"""
    return node.target is SINK_ATTENTION
