"""Which nodes of Dynamo's graph are attention as PyTorch names it, ``F.scaled_dot_product_attention``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from te_compile.passes.function_transforms import transforms_around

ATTENTION_CALLS = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)
"""What such a node calls: the function, or what it stands for."""


def attention_calls(graph: Graph) -> list[Node]:
    """Those that a pass may change, in order: none inside of a function transform."""
    left = transforms_around(graph)
    return [node for node in graph.nodes if node.target in ATTENTION_CALLS and node not in left]
