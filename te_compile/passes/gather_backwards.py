"""Sum the gradient of a gather whose indices many matrices share by products in place of atomic additions.

Disentangled attention, of DeBERTa and SEW-D, scores each query against all relative positions, and then gathers, for
each key, the score of the position that it has; the indices are those of the positions, whatever the head and the
sequence. Inductor adds the gradient up in float32, atomically, and rounds it in another pass: where dy is
[256, 256, 256] and there are 1024 positions its kernel, which is the softmax's backward as well, took 579 µs a layer on
an H200, more than a fifth of a step (``python -m benchmarks.survey --only deberta_v2 --kernels 12``).

    scatter_add(zeros, -1, index.expand(…), dy)    becomes    te::gather_backward(dy, index, columns)

As in sum_few_rows.py, 0 · inf is no number: an infinity in dy makes no number of others in its row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, Node

from te_compile.ops.gather_backward import GATHER_BACKWARD, NARROW
from te_compile.passes.arguments import arguments_of
from te_compile.passes.captured_nodes import size_hint
from te_compile.passes.new_nodes import call_like, reshaped
from te_compile.passes.pointwise_nodes import is_zero, value_of
from te_compile.passes.sizes import all_same, same

aten = torch.ops.aten

ON = {"cuda"}
"""The types of device on which such additions wait for each other."""
FEWEST_MATRICES = 16
"""That share the indices. The kernel computes as many as 64 at once, whether there are so many or not."""
FEWEST_PLACES = 1 << 18
"""Elements of dy: fewer are added in no time."""


def gather_backwards(graph: Graph) -> int:
    """Replace each such sum; returns how many."""
    found = graph.find_nodes(op="call_function", target=aten.scatter_add.default)
    return sum(map(_replaced, found))


def _replaced(node: Node) -> bool:
    given, value = arguments_of(node), value_of(node)
    dy, index = given["src"], _shared(given["index"])
    if value is None or index is None or not is_zero(given["self"]) or not _fits(given, index):
        return False
    rows, places = given["src"].meta["val"].shape[-2:]
    with node.graph.inserting_before(node):
        if not dy.meta["val"].is_contiguous():  # Inductor has whoever computes it write it so
            dy = call_like(aten.clone.default, (dy,), node, memory_format=torch.contiguous_format)
        dy = call_like(aten.view.default, (dy, [-1, rows, places]), node)
        index = call_like(aten.view.default, (index, [rows, places]), node)
        sums = call_like(GATHER_BACKWARD, (dy, index, value.shape[-1]), node)
        shape = [size if isinstance(size, int) else -1 for size in value.shape]
        node.replace_all_uses_with(reshaped(sums, shape, node))
    node.graph.erase_node(node)
    return True


def _shared(index: Node) -> Node | None:
    """What ``index`` [..., I, J] repeats: [1, …, I, J]; None if it says of each matrix something else."""
    if index.target is not aten.expand.default:
        return None
    source = index.all_input_nodes[0]
    value, repeated = value_of(source), value_of(index)
    if value is None or repeated is None or value.dim() < 2 or not value.is_contiguous():
        return None
    once = all(same(size, 1) for size in value.shape[:-2])
    return source if once and all_same(value.shape[-2:], repeated.shape[-2:]) else None


def _fits(given: dict[str, Any], index: Node) -> bool:
    """Are all of one size but for what is summed into, of known sizes but for one of those before the rows, and is it
    worth it?"""
    into, dy, indices = (given[name].meta["val"] for name in ("self", "src", "index"))
    if (
        dy.dtype not in NARROW
        or into.dtype != dy.dtype
        or dy.device.type not in ON
        or index.meta["val"].is_floating_point()
    ):
        return False
    if dy.dim() < 3 or given["dim"] % dy.dim() != dy.dim() - 1 or not all_same(indices.shape, dy.shape):
        return False
    if not all_same(into.shape[:-1], dy.shape[:-1]):
        return False
    before, known = dy.shape[:-2], (*dy.shape[-2:], into.shape[-1])
    symbols = sum(not isinstance(size, int) for size in before)
    if symbols > 1 or not all(isinstance(size, int) for size in known):
        return False
    matrices = math.prod(map(size_hint, before))
    return matrices >= FEWEST_MATRICES and matrices * known[0] * known[1] >= FEWEST_PLACES
