"""Weights that a model makes from its parameters before it multiplies by them.

A weight need not be a parameter as it is stored: it may be transposed, cast, sliced from a packed projection, picked
from the experts of one tensor, masked, or have one added to it. What decides is whether it belongs to a parameter: its
nodes lead back to one, and otherwise to nothing but buffers and constants. Its FP8 state is that parameter's.

It may also come from products of such matrices, as the sum of a weight and two low-rank factors does, or a rotated one.
But what a product gave is a weight only where the model says so, by ``F.linear``: the keys of learned latents, which
queries are multiplied by, are activations. A product that makes a weight keeps its precision: the weight is rounded
when it is quantised, and once is enough.

All weights of a graph are quantised together in front of it, so such a matrix is computed there a second time, from
copies of its nodes, and the originals stay for its gradient, which flows on to the parameter by autograd. (What is then
computed twice and read once, the compiler drops.) A copy gives the same value if the nodes are deterministic, nobody
writes to what they read, and no autocast begins around them. A matrix of which that cannot be seen, as one with noise
or of a model that writes to its weights, is quantised where it is read, by each linear that reads it.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Graph, Node
from torch.nn import Parameter

from te_compile.passes.captured_nodes import (
    argument,
    called,
    guards_of,
    is_of_a_library,
    name_called,
    storage_of,
    value_of,
    wrapped_kind,
)
from te_compile.passes.einsum_letters import adds_nothing_up
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.regions import Region
from te_compile.passes.written_tensors import written_by

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes of parameters and of linears that FP8 copies are made of."""


def in_plain_tensors(kind: str) -> str:
    """What to do about an operand of this class, which is sharded or otherwise wrapped."""
    how = ", as FSDP around compiled blocks does" if kind == "DTensor" else ""
    return f"give it plain tensors for FP8{how}"


TRANSPOSITIONS = {"T", "mT", "t", "transpose", "swapaxes", "swapdims", "permute"}
_MOST_NODES = 64  # that are copied for one weight
_HELD = re.compile(r"\._buffers\[|^G\[|\.[A-Za-z_]\w*$")  # sources of tensors that somebody holds
_MATRIX_PRODUCTS = {"linear", "matmul", "mm", "bmm", "baddbmm", "addmm", "einsum"}
_PRODUCTS = _MATRIX_PRODUCTS | {
    "bilinear", "conv1d", "conv2d", "conv3d", "multi_head_attention_forward", "scaled_dot_product_attention",
}  # fmt: skip
_RANDOM = re.compile(r"rand|dropout|bernoulli|multinomial|poisson|rrelu|gumbel|^normal_?$|empty")


@dataclass(frozen=True)
class Matrix:
    """A matrix that one or more linears multiply by: the node that has its value, and where that stands.

    ``owner`` is the root placeholder of the parameter that has its FP8 state; ``nodes``, with their regions, lead from
    placeholders of the root to the value, in order, and are empty where the value is the parameter itself.
    ``in_place``: it cannot be computed a second time, so each linear that reads it quantises it there.
    """

    value: Node
    owner: Node
    nodes: tuple[tuple[Node, Region], ...] = ()
    in_place: bool = False

    def copied(self, graph: Graph, copies: dict[Node, Node]) -> Node:
        """The value at the insertion point of the root's ``graph``; ``copies`` are those made for other matrices."""
        for node, region in self.nodes:
            if node not in copies:
                sources = {each: origin(each, region)[0] for each in node.all_input_nodes}
                known = {each: copies.get(source, source) for each, source in sources.items()}
                copies[node] = graph.node_copy(node, known.__getitem__)
        return copies.get(self.value, self.value)


@dataclass(frozen=True)
class Weight:
    """The second operand of a linear. ``operand`` is what te::linear reads for its gradient: a node of the linear's
    region or of the root. ``transposed``: the matrix is [K, N] and not [N, K]."""

    operand: Node
    transposed: bool
    matrix: Matrix


_NO_PARAMETER = (
    "its weight is not a parameter of the model, which FP8 scales belong to; make it an nn.Parameter for FP8"
)
_OF_CODES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
_UNQUANTISED = "load the model unquantised, in bfloat16 say, for FP8"
_FROM_THE_CALL = (
    "its weight is computed in the graph from inputs of the call; nothing to do: FP8 is for lasting weights"
)
_FROM_A_NUMBER = (
    "its weight is computed in the graph with a number that is not fixed; compile with dynamic=False for FP8"
)
AUTOCAST_OUTSIDE = "begin it around the compiled model for FP8"
"""What to do about an autocast whose effect on new nodes cannot be seen."""


class NotAWeightError(Exception):
    """Why a matrix belongs to no parameter, or cannot be quantised in front of the graph."""


class NotInFrontError(NotAWeightError):
    """Why a matrix that belongs to a parameter cannot be computed in front of the graph: there it would be another."""


def origin(node: Any, region: Region) -> tuple[Any, Region]:
    """What ``node`` stands for, and the region that has it, if it is an operand handed into a body; else itself."""
    while isinstance(node, Node) and node.op == "placeholder" and region.parent is not None and region.call is not None:
        node, region = region.operand_of(node), region.parent
    return node, region


def swaps_two_dimensions(node: Node) -> bool:
    """Is ``node`` the transposition of a matrix, or of each matrix of a batch?"""
    name, value = called(node), value_of(node)
    if name not in TRANSPOSITIONS or not isinstance(value, Tensor) or value.dim() not in (2, 3):
        return False
    if name in ("T", "t"):
        return value.dim() == 2
    if name == "mT":
        return True
    given: list[Any] = [*node.args[1:], *(value for key, value in node.kwargs.items() if key != "input")]
    order = [d % value.dim() for d in (given[0] if isinstance(given[0], (tuple, list)) else given)]
    last_two = [value.dim() - 2, value.dim() - 1]
    return order == [*range(value.dim() - 2), *reversed(last_two)] if name == "permute" else sorted(order) == last_two


def _shows_the_same_matrix(node: Node) -> bool:
    """May te::linear, which reads both layouts, look at what lies behind ``node``?"""
    return swaps_two_dimensions(node) or called(node) == "contiguous"


def is_product(node: Node) -> bool:
    """Does ``node`` multiply matrices, or what is more than that?"""
    return (called(node) in _PRODUCTS and not adds_nothing_up(node)) or node.target is F.linear


def is_given(node: Node) -> bool:
    """Is ``node`` what the model was called with?"""
    return node.op == "placeholder" and not is_held_by_the_model(node)


class Weights:
    """What the captured model holds, and which matrices are made of it."""

    def __init__(self, regions: list[Region], parameters: Mapping[Node, Parameter]) -> None:
        self.parameters = parameters
        self.writers: dict[int | None, list[Node]] = {}  # by the memory that they write to
        for region in regions:
            for node in region.graph.nodes:
                for changed in written_by(node):
                    self.writers.setdefault(storage_of(origin(changed, region)[0]), []).append(node)
        self.written = self.writers.keys() - {None} | set(_written_by_somebody(regions[0].graph))
        self.regions = regions
        self.under_autocast = {node for region in regions for node in _under_autocast(region.graph)}
        self.transformed = {node for region in regions for node in transforms_around(region.graph)}

    def weight(
        self, node: Any, region: Region, transposed: bool, dimensions: int = 2, by_products: bool = False
    ) -> Weight:
        """``node``, used in ``region``, as a weight: a matrix, or a batch of them where ``dimensions`` is 3.

        transposed: it is used as [K, N]. by_products: it may be what a product of matrices gave. Raises
        NotAWeightError.
        """
        if not isinstance(node, Node) or not isinstance(value_of(node), Tensor) or value_of(node).dim() != dimensions:
            raise NotAWeightError("its weight is no matrix; give it two dimensions for FP8")
        try:
            return self._in_front(node, region, transposed, by_products)
        except NotInFrontError as why:
            if dimensions != 2:
                raise
            return Weight(node, transposed, Matrix(node, self._owner_where_read(node, region, why), in_place=True))

    def parameter(self, node: Node, region: Region) -> Node:
        """The parameter that has the FP8 state of ``node``, of any dimensions, whose parts are to be weights in
        ``region``. Raises NotAWeightError."""
        try:
            return self.matrix(node, region).owner
        except NotInFrontError as why:
            return self._owner_where_read(node, region, why)

    def _owner_where_read(self, node: Node, region: Region, why: NotInFrontError) -> Node:
        """The parameter of what is quantised where it is read; raises ``why`` if that would not do either."""
        owner = self.owner(node, region)
        if owner is None or wrapped_kind(owner) or value_of(owner).dtype not in DTYPES:
            raise why
        if not self._is_written_before_it_is_read(node, region):
            raise why
        return owner

    def _in_front(self, node: Node, region: Region, transposed: bool, by_products: bool) -> Weight:
        """:meth:`weight`, as a matrix that is computed in front of the graph. Raises NotAWeightError."""
        found: tuple[Node, bool, Node, Region] | None = None
        inner, place = node, region
        while True:
            source, above = origin(inner, place)
            self._require_unwritten((inner, source))
            if not isinstance(source, Node) or not isinstance(value_of(source), Tensor):
                break
            # A body can be handed what the root has; it sees nothing of a body around it but its own operands.
            operand = inner if place is region else source if above.parent is None else None
            if operand is not None:
                found = operand, transposed, source, above
            if not _shows_the_same_matrix(source):
                break
            transposed ^= swaps_two_dimensions(source)
            inner, place = argument(source, 0, "input"), above
        assert found is not None
        operand, transposed, source, above = found
        return Weight(operand, transposed, self.matrix(source, above, by_products))

    def matrix(self, node: Node, region: Region, by_products: bool = False) -> Matrix:
        """The value of ``node`` as something to quantise in front of the graph. Raises NotAWeightError."""
        nodes: dict[Node, Region] = {}
        leaves: dict[Node, None] = {}
        self._collect(node, region, nodes, leaves, set(), by_products)
        self._require_unwritten((*leaves, *nodes))
        owned = [leaf for leaf in leaves if leaf in self.parameters]
        if not owned:
            raise NotAWeightError(_no_parameter(leaves))
        for leaf in owned:
            if nodes and wrapped_kind(leaf):
                kind = wrapped_kind(leaf)
                raise NotAWeightError(f"its weight is made from a {kind}; {in_plain_tensors(kind)}")
            if nodes and value_of(leaf).dtype not in DTYPES:
                raise NotAWeightError(f"its weight is made from a parameter of {value_of(leaf).dtype}; {_UNQUANTISED}")
        return Matrix(node, max(owned, key=lambda leaf: value_of(leaf).numel()), tuple(nodes.items()))

    def owner(self, node: Any, region: Region) -> Node | None:
        """The parameter that ``node`` is made from, if it is made from what the model holds alone, without a product.

        That does not say that it can be quantised: a report names a linear after its parameter in any case. What a
        product gave, as projected relative positions, is an activation whatever its operands were.
        """
        waiting, owned, begun = [(node, region)], [], set()
        while waiting:
            source, place = origin(*waiting.pop())
            if not isinstance(source, Node) or source in begun:
                continue
            begun.add(source)
            if source in self.parameters:
                owned.append(source)
            elif is_given(source) or is_product(source) or len(begun) > _MOST_NODES:
                return None
            # What the model holds is its own, whatever is written there; what the graph makes is made by writes too.
            writers = self.writers.get(storage_of(source), ()) if source.op != "placeholder" else ()
            makers = [source, *(each for each in writers if each.graph is place.graph)]
            waiting += [(each, place) for maker in makers for each in maker.all_input_nodes]
        return max(owned, key=lambda leaf: value_of(leaf).numel()) if owned else None

    @functools.cached_property
    def from_the_call(self) -> set[Node]:
        """All that is computed from what the model was called with."""
        return {node for node, parameters in self._made_of.items() if parameters is None}

    def are_of_one_parameter(self, x: Node, weight: Node) -> bool:
        """Is ``x`` made of parameters that ``weight`` is made of as well, and of nothing from the call?"""
        of_x, of_weight = self._made_of.get(x), self._made_of.get(weight)
        return bool(of_x and of_weight and of_x <= of_weight)

    @functools.cached_property
    def _made_of(self) -> dict[Node, frozenset[Node] | None]:
        """The parameters that each node is computed from; None for what something of the call goes into as well."""
        found: dict[Node, frozenset[Node] | None] = {}
        for region in self.regions:  # a body comes after what calls it
            for node in region.graph.nodes:
                source = origin(node, region)[0]
                if isinstance(source, Node) and source in self.parameters:
                    found[node] = frozenset((source,))
                elif isinstance(source, Node) and is_given(source):
                    found[node] = None
                else:
                    operands = [each for each in (source, *node.all_input_nodes) if isinstance(each, Node)]
                    found[node] = _united(found.get(each, frozenset()) for each in operands)
                for changed in written_by(node):
                    found[changed] = found[node]
        return found

    def _is_written_before_it_is_read(self, node: Node, region: Region) -> bool:
        """Do all writes to ``node``, and to what it is made from, come before whatever else reads it?

        A linear may keep its weight for backward, and autograd forbids to change what is kept.
        """
        waiting, sources = [(node, region)], dict[Node, None]()
        while waiting:
            source, place = origin(*waiting.pop())
            if isinstance(source, Node) and source not in sources:
                sources[source] = None
                waiting += [(each, place) for each in source.all_input_nodes]
        writers = {each for source in sources for each in self.writers.get(storage_of(source), ())}
        readers = node.users.keys() - writers
        return all(each.graph is region.graph and each < reader for each in writers for reader in readers)

    def _require_unwritten(self, nodes: Iterable[Any]) -> None:
        if any(storage_of(node) in self.written for node in nodes if isinstance(node, Node)):
            why = "the model writes to its weight in place, or to what that is made from"
            raise NotInFrontError(f"{why}; write outside of the compiled function for FP8")

    def _collect(
        self,
        node: Node,
        region: Region,
        nodes: dict[Node, Region],
        leaves: dict[Node, None],
        begun: set[Node],
        by_products: bool,
    ) -> None:
        """Add what ``node`` is computed by, in order, to ``nodes`` and ``leaves``."""
        source, place = origin(node, region)
        if not isinstance(source, Node):
            raise NotAWeightError(_NO_PARAMETER)
        if source in begun:
            return
        if source.op == "placeholder":
            if source not in self.parameters and not is_held_by_the_model(source):
                if isinstance(value_of(source), (torch.SymInt, torch.SymFloat)):
                    raise NotAWeightError(_FROM_A_NUMBER)
                raise NotAWeightError(_FROM_THE_CALL if begun else _NO_PARAMETER)
            leaves[source] = None
            return
        begun.add(source)
        if len(begun) > _MOST_NODES:
            why = f"its weight is computed in the graph by more than {_MOST_NODES} operations"
            raise NotInFrontError(f"{why}; make it in fewer for FP8")
        self._require_repeatable(source, place, by_products)
        for each in source.all_input_nodes:
            self._collect(each, place, nodes, leaves, begun, by_products)
        nodes[source] = place

    def _require_repeatable(self, node: Node, region: Region, by_products: bool) -> None:
        """Would a copy of ``node`` in front of the graph give the same value?"""
        name, prefix = name_called(node), "its weight is computed in the graph"
        if node.op == "get_attr" and region.parent is None:
            return
        if node.op not in ("call_function", "call_method") or isinstance(node.target, HigherOrderOperator):
            raise NotAWeightError(f"{prefix} by {name or node.op}; multiply by a parameter itself for FP8")
        if is_product(node) and not (by_products and name in _MATRIX_PRODUCTS):
            advice = "multiply by one factor after the other for FP8"
            raise NotAWeightError(f"{prefix} by another product ({name}); {advice}")
        if draws(node):
            why = f"{prefix} by {name}, which gives another result each time"
            raise NotInFrontError(f"{why}; nothing to do: its FP8 copy would not be the weight")
        is_a_users = inspect.isfunction(node.target) and not node.target.__module__.startswith("torch.")
        if is_a_users or is_of_a_library(node.target):
            why = f"{prefix} by {name}, into which torch.compile does not look"
            raise NotInFrontError(f"{why}; make it of PyTorch's own operators for FP8")
        if node in self.under_autocast:
            raise NotInFrontError(f"{prefix} under an autocast that begins there; {AUTOCAST_OUTSIDE}")
        if node in self.transformed:
            raise NotAWeightError(f"{prefix} inside a function transform of torch.func; move it out of there for FP8")


def _united(sets: Iterable[frozenset[Node] | None]) -> frozenset[Node] | None:
    """All that is in one of ``sets``; None if one of them is None."""
    united: frozenset[Node] = frozenset()
    for each in sets:
        if each is None:
            return None
        united = each if united <= each else united | each
    return united


def _no_parameter(leaves: Iterable[Node]) -> str:
    """Why a weight that is made of ``leaves``, none of which is a parameter, has no FP8 form."""
    values = [value_of(leaf) for leaf in leaves]
    largest = max((each for each in values if isinstance(each, Tensor)), key=Tensor.numel, default=None)
    if largest is None or largest.dtype not in _OF_CODES:
        return _NO_PARAMETER
    return f"its weight is made from codes of {largest.dtype}; {_UNQUANTISED}"


def draws(node: Node) -> bool:
    """Does an operator of this name draw random numbers, or give what happens to lie in memory?"""
    if _RANDOM.search(name_called(node)):
        return True
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    packet = getattr(torch.ops.aten, name_called(node), None)
    overloads = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, each).tags for each in overloads)


def _written_by_somebody(graph: Graph) -> Iterator[int | None]:
    """The memory of inputs that changed while Dynamo ran the graph, whatever in it did that."""
    for placeholder in graph.find_nodes(op="placeholder"):
        value = value_of(placeholder)
        if isinstance(value, Tensor) and not value.is_inference() and value._version > 0:
            yield storage_of(placeholder)


def is_held_by_the_model(placeholder: Node) -> bool:
    """Does the root's ``placeholder`` stand for a buffer or another tensor of the model, not for one of the call?"""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None or not isinstance(value_of(placeholder), Tensor):
        return False
    name = source.name() if callable(source.name) else source.name
    if _HELD.search(name) is None:
        return False
    guards = guards_of(placeholder)
    # An attribute may be that of a dataclass or of a cache that the model is called with.
    return name.startswith("G[") or guards is None or guards.is_fsdp_module() or "NN_MODULE" in guards.name


def _under_autocast(graph: Graph) -> Iterator[Node]:
    """The nodes between the beginning and the end of an autocast in the graph."""
    depth = 0
    for node in graph.nodes:
        name = name_called(node)
        if name == "_exit_autocast":
            depth -= 1
        if depth > 0:
            yield node
        if name == "_enter_autocast":
            depth += 1
