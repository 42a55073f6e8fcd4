"""Take away what is computed and read by nobody.

A model may keep a copy of its attention scores for a caller who does not ask for them; Dynamo captures the copy, and
the compiler drops it in the end. Until then it is a user of the scores. Later passes ask who reads a tensor: attention
that a model spells out would look like one whose scores somebody wants to see.

Only what computes a tensor and does nothing else goes. Products stay for the report, which leaves no linear out; what
draws random numbers stays, for all that is drawn behind it would be other numbers.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from te_compile.passes.captured_nodes import argument, called, value_of, wrapped_kind
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.weight_expressions import draws, is_product
from te_compile.passes.written_tensors import writes


def _only_computes(node: Node) -> bool:
    """Does ``node`` compute a tensor, or several, by an operator of PyTorch's own, and nothing else?"""
    if node.op not in ("call_function", "call_method") or not called(node):
        return False
    results = pytree.tree_leaves(value_of(node))
    if not results or not all(isinstance(each, Tensor) for each in results) or wrapped_kind(node):
        return False
    # A size that the data decides is known by the node that found it, to whoever reads the size.
    if any(free_unbacked_symbols(each) for each in results):
        return False
    return not ((draws(node) and _may_drop(node)) or writes(node) or node.is_impure())


def _may_drop(node: Node) -> bool:
    """Is ``node``, which draws by its name, no dropout that is off, nor attention without one?"""
    if node.target is F.scaled_dot_product_attention:
        return argument(node, 4, "dropout_p", 0.0) != 0
    if called(node) == "dropout":
        return argument(node, 1, "p", 0.5) != 0 and argument(node, 2, "training", True) is not False
    return True


def unread_values(graph: Graph) -> set[Node]:
    """What is computed and read by nobody, or by such nodes alone: a whole head whose result the model does not use."""
    transformed, unread = transforms_around(graph), set[Node]()
    for node in reversed(graph.nodes):
        if unread.issuperset(node.users) and node not in transformed and _only_computes(node):
            unread.add(node)
    return unread


def drop_unread_values(graph: Graph) -> int:
    """Erase the tensors that nobody reads, and what is then read by nobody; returns how many nodes."""
    transformed, count = transforms_around(graph), 0
    for node in reversed(graph.nodes):
        if not node.users and node not in transformed and _only_computes(node) and not is_product(node):
            graph.erase_node(node)
            count += 1
    return count
