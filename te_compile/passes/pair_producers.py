"""Quantise two matrices that are computed from the same tensors in one pass over those.

In the backward of a gated MLP, down(act(gate) · up), the gradients of gate and up each have a producer, and both read
the gradient of the product and gate: 5 matrices read where 3 hold all that there is to know. Two producers of one size
become a ``te::fused_quantize_pair`` if they have a matrix in common and either can be computed where the other is: when
everything that both read is there, and nobody waits for a result yet.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from te_compile.ops.fused_quantize import FUSED_QUANTIZE
from te_compile.ops.fused_quantize_pair import FUSED_QUANTIZE_PAIR, RESULTS_OF_ONE
from te_compile.ops.pointwise import Spec
from te_compile.passes.arguments import arguments_of
from te_compile.passes.merged_specs import Reading, merged, share_matrices
from te_compile.passes.new_nodes import call_like, same_phase
from te_compile.passes.sizes import same


@dataclass(frozen=True)
class Producer:
    """A producer's node, and what it reads for which spec."""

    node: Node
    reading: Reading

    @property
    def scale(self) -> Any:
        """Its scale's node, or None."""
        return self.node.args[1]

    @property
    def operands(self) -> set[Node]:
        """Every node that it reads."""
        return set(self.node.all_input_nodes)


def pair_producers(graph: Graph) -> int:
    """Merge producers two by two where they share what they read; returns how many pairs there are."""
    pairs = 0
    waiting: dict[Any, list[Producer]] = {}  # by each matrix that they read: to ask all others is a matter of depth
    paired: set[Node] = set()
    for node in graph.find_nodes(op="call_function", target=FUSED_QUANTIZE):
        producer = _producer(node)
        if producer is None:
            continue
        matrices = producer.reading.matrices
        found = (each for matrix in matrices for each in waiting.get(matrix, ()) if each.node not in paired)
        partner = next((each for each in found if _belong_together(each, producer)), None)
        if partner is None:
            for matrix in matrices:
                waiting.setdefault(matrix, []).append(producer)
        else:
            paired.add(partner.node)
            _merge(partner, producer)
            pairs += 1
    return pairs


def _producer(node: Node) -> Producer | None:
    """``node`` as one that may have a partner: nothing leaves it but codes, and it reads nothing in pieces."""
    spec = Spec.parse(arguments_of(node)["spec"])
    if spec.emitted or spec.sums or spec.tensors_in_pieces:
        return None
    inputs: Any = node.args[0]
    return Producer(node, Reading.of(spec, inputs))


def _belong_together(one: Producer, other: Producer) -> bool:
    """Are both quantised alike, of one size, and of tensors that they have in common, at a place that suits both?"""
    ours, theirs = arguments_of(one.node), arguments_of(other.node)
    if any(ours[name] != theirs[name] for name in ("dtype", "rule")) or (one.scale is None) != (other.scale is None):
        return False
    if not same_phase(one.node, other.node) or not _of_one_size(one.node, other.node):
        return False
    if not share_matrices(one.reading, other.reading):
        return False
    return _place_for(one, other) is not None and merged(one.reading, other.reading) is not None


def _of_one_size(one: Node, other: Node) -> bool:
    """Are the matrices that both quantise equally large? Before unread layouts are dropped, q has their shape."""
    sizes = [_shape_of(node) for node in (one, other)]
    return all(size is not None for size in sizes) and all(map(same, *sizes))


def _shape_of(node: Node) -> Any:
    return node.meta["val"][0].shape if arguments_of(node)["rowwise"] else None


def _results(node: Node) -> Iterator[Node]:
    yield from (user for user in node.users if user.target is operator.getitem)


def _place_for(one: Producer, other: Producer) -> Node | None:
    """The node before which both can be computed: the first that reads a result, if all that both read is there."""
    results = [result for producer in (one, other) for result in _results(producer.node)]
    if len(results) != len(one.node.users) + len(other.node.users):
        return None
    readers = [reader for result in results for reader in result.users]
    place = min([one.node, other.node, *readers])
    latest = max(one.operands | other.operands)
    if latest < place:
        return place
    first = min(readers, default=None)
    return first if first is not None and latest < first else None


def _merge(one: Producer, other: Producer) -> None:
    """Put the pair in the place of both."""
    place = _place_for(one, other)
    assert place is not None
    both = merged(one.reading, other.reading)
    assert both is not None
    flags = [arguments_of(each.node)[name] for each in (one, other) for name in ("rowwise", "columnwise")]
    alike = arguments_of(one.node)
    with place.graph.inserting_before(place):
        arguments = (both.inputs, one.scale, other.scale, both.spec.text(), alike["dtype"], *flags, alike["rule"])
        pair = call_like(FUSED_QUANTIZE_PAIR, arguments, one.node)
        for turn, producer in enumerate((one, other)):
            for result in list(_results(producer.node)):
                index: Any = result.args[1]
                new = call_like(operator.getitem, (pair, RESULTS_OF_ONE * turn + index), result)
                result.replace_all_uses_with(new)
                place.graph.erase_node(result)
    for producer in (one, other):
        place.graph.erase_node(producer.node)
