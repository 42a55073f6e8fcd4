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
from te_compile.ops.pointwise import Input, Operand, Place, Spec, SpecBuilder, grouped
from te_compile.passes.arguments import arguments_of
from te_compile.passes.index_space import behind_views
from te_compile.passes.new_nodes import call_like, same_phase
from te_compile.passes.sizes import same

MOST_MATRICES = 5
"""Two results are held as codes beside what is read: more matrices than these would run out of registers."""

Read = tuple[Input, tuple[Node, ...]]
"""One input of a spec, and the nodes that hold its tensor or its parts."""


@dataclass(frozen=True)
class Producer:
    """A producer's node, what its spec says, and what each input of that is read from."""

    node: Node
    spec: Spec
    reads: tuple[Read, ...]

    @property
    def scale(self) -> Any:
        """Its scale's node, or None."""
        return self.node.args[1]

    @property
    def operands(self) -> set[Node]:
        """Every node that it reads."""
        return set(self.node.all_input_nodes)

    def known_as(self, read: Read) -> tuple[Any, ...]:
        """Equal for inputs that are the same tensor, read in the same way."""
        given, nodes = read
        if given.parts:
            return given, tuple((behind_views(node), str(node.meta["val"].shape)) for node in nodes)
        return given, tuple(map(behind_views, nodes))


def pair_producers(graph: Graph) -> int:
    """Merge producers two by two where they share what they read; returns how many pairs there are."""
    pairs = 0
    waiting: dict[Any, list[Producer]] = {}  # by each matrix that they read: to ask all others is a matter of depth
    paired: set[Node] = set()
    for node in graph.find_nodes(op="call_function", target=FUSED_QUANTIZE):
        producer = _producer(node)
        if producer is None:
            continue
        matrices = {producer.known_as(read): None for read in producer.reads if read[0].place is Place.FULL}
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
    return Producer(node, spec, tuple((given, tuple(nodes)) for given, nodes in grouped(spec, inputs)))


def _belong_together(one: Producer, other: Producer) -> bool:
    """Are both quantised alike, of one size, and of tensors that they have in common, at a place that suits both?"""
    ours, theirs = arguments_of(one.node), arguments_of(other.node)
    if any(ours[name] != theirs[name] for name in ("dtype", "rule")) or (one.scale is None) != (other.scale is None):
        return False
    if not same_phase(one.node, other.node) or not _of_one_size(one.node, other.node):
        return False
    matrices = [{p.known_as(read) for read in p.reads if read[0].place is Place.FULL} for p in (one, other)]
    if not matrices[0] & matrices[1] or len(matrices[0] | matrices[1]) > MOST_MATRICES:
        return False
    return _place_for(one, other) is not None and _merged(one, other) is not None


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
    merged = _merged(one, other)
    assert merged is not None
    spec, reads = merged
    inputs = [node for _, nodes in reads for node in nodes]
    flags = [arguments_of(each.node)[name] for each in (one, other) for name in ("rowwise", "columnwise")]
    alike = arguments_of(one.node)
    with place.graph.inserting_before(place):
        arguments = (inputs, one.scale, other.scale, spec.text(), alike["dtype"], *flags, alike["rule"])
        pair = call_like(FUSED_QUANTIZE_PAIR, arguments, one.node)
        for turn, producer in enumerate((one, other)):
            for result in list(_results(producer.node)):
                index: Any = result.args[1]
                new = call_like(operator.getitem, (pair, RESULTS_OF_ONE * turn + index), result)
                result.replace_all_uses_with(new)
                place.graph.erase_node(result)
    for producer in (one, other):
        place.graph.erase_node(producer.node)


def _merged(one: Producer, other: Producer) -> tuple[Spec, list[Read]] | None:
    """One spec that quantises what both do, and what its inputs are read from; None if both do the same."""
    builder = SpecBuilder()
    reads: list[Read] = []
    inputs: dict[tuple[Any, ...], str] = {}
    roots: list[str] = []
    for producer in (one, other):
        names: dict[Operand, Operand] = {}
        for index, read in enumerate(producer.reads):
            key = producer.known_as(read)
            if key not in inputs:
                inputs[key] = builder.again(read[0])
                reads.append(read)
            names[f"x{index}"] = inputs[key]
        for index, step in enumerate(producer.spec.steps):
            operands = (names[operand] if isinstance(operand, str) else operand for operand in step.operands)
            names[f"t{index}"] = builder.step(step.operation, *operands)
        roots.append(str(names[producer.spec.quantized]))
    return None if roots[0] == roots[1] else (builder.finish(roots[0], [], [], roots[1]), reads)
