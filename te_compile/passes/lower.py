"""Turn the selected linears into ``te::`` operators with FP8 state.

The root graph gains, in front: the states and the FP8 copies of weights as placeholders, one snapshot of all scales,
one quantize of the weights whose copies cannot come from outside (cached_weights.py), and the slots through which
gradient amaxes return. Where no copies are kept (``cache_weights=False``) neither is there: each linear quantises its
weight itself, and hands out that amax too. Each linear becomes one ``te::linear``, and each product of grouped experts
one ``te::grouped_linear``. At the end stands the one update of all forward states; the backward states' update comes
with the slots' gradient. Scales are read from the snapshot, an opaque operator's fresh output: reading the state itself
would let the compiler save a view of what the update then overwrites, and the backward pass would use the wrong scale
without a word.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from te_compile.ops.gradient_slots import GRADIENT_SLOTS
from te_compile.ops.grouped_linear import GROUPED_LINEAR, OWNED_ROWS
from te_compile.ops.linear import LINEAR, LinearConfig
from te_compile.ops.norm import NORM
from te_compile.ops.quantize import padded
from te_compile.ops.scaling import SNAPSHOT, UPDATE_SCALES
from te_compile.ops.weight_refresh import Layout
from te_compile.ops.weights import QUANTIZE_WEIGHTS
from te_compile.passes.cached_weights import (
    OUTPUTS,
    WeightGroup,
    implementations_for,
    offset_in_parameter,
    stored_shape,
)
from te_compile.passes.captured_nodes import value_of
from te_compile.passes.plan import Plan, Site
from te_compile.passes.side_effects import memory_of
from te_compile.passes.weight_expressions import Matrix
from te_compile.recipe import Recipe


@dataclass
class Signature:
    """The placeholders that lowering put in front of the graph's own, in order: what the runtime must hand in.

    ``weights``: the root placeholders whose parameters own the states, one forward state each and, when ``training``,
    one backward state each; ``slots``: the length of the token that follows them, 0 if there is none; ``groups``: the
    weights whose copies come last.
    """

    weights: list[Node] = field(default_factory=list)
    training: bool = False
    slots: int = 0
    stateful: bool = True
    groups: list[WeightGroup] = field(default_factory=list)

    @property
    def states(self) -> int:
        """How many placeholders stand for FP8 state."""
        if not self.weights or not self.stateful:
            return 0
        return len(self.weights) * (1 + self.training) + self.training

    @property
    def added(self) -> int:
        """How many placeholders there are in all."""
        return self.states + sum(len(group.inputs) for group in self.groups)


@dataclass
class _Weight:
    """A quantised matrix on the root graph; all None but ``scale``, if there is one, where linears quantise it."""

    codes: Node | None = None
    codes_transposed: Node | None = None
    scale_inv: Node | None = None
    amax: Node | None = None
    scale: Node | None = None


def _new_placeholder(graph: Graph, name: str) -> Node:
    node = graph.placeholder(name)
    # No source: Dynamo does not know it. Static address: CUDA graphs must not copy it into a private buffer.
    node._dynamo_source = None
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    return node


class _Lowering:
    """The root graph's side of lowering; one instance a graph."""

    def __init__(self, graph: Graph, plan: Plan, recipe: Recipe, training: bool, cache_weights: bool) -> None:
        self.graph, self.recipe, self.sites, self.parameters = graph, recipe, plan.selected, plan.parameters
        self.training, self.cache_weights = training, cache_weights
        self.first = next(iter(graph.nodes))
        self.weights = list(dict.fromkeys(site.root_weight for site in self.sites if site.root_weight is not None))
        self.rows = {weight: row for row, weight in enumerate(self.weights)}
        # One parameter can have several: its slices, or itself and a masked copy. They share its state.
        matrices = {site.matrix.value: site.matrix for site in self.sites if site.matrix is not None}
        self.matrices = list(matrices.values())
        self.uses: dict[Node, list[Site]] = {}  # by the value of their matrix
        for site in self.sites:
            if site.matrix is not None:
                self.uses.setdefault(site.matrix.value, []).append(site)
        self.signature = Signature(self.weights, training and recipe.stateful, 0, recipe.stateful)
        self.format, self.rule = recipe.fp8_format, recipe.rule().text()
        self.forward_states: list[Node] = []
        self.backward_states: list[Node] = []
        self.scales: Node | None = None
        self.slots: Node | None = None
        self.body = next(n for n in graph.nodes if n.op != "placeholder")

    def call(self, target: Callable[..., Any], *args: Any) -> Node:
        return self.graph.call_function(target, args)

    def scale(self, row: int) -> Node | None:
        """Row ``row`` of the snapshot: x and w of each weight in turn, then every weight's gradient."""
        return None if self.scales is None else self.call(torch.select, self.scales, 0, row)

    def add_states(self) -> None:
        if not self.recipe.stateful:
            return
        with self.graph.inserting_before(self.first):
            self.forward_states = [_new_placeholder(self.graph, f"te_forward_{i}") for i in range(len(self.weights))]
            if self.signature.training:
                self.backward_states = [
                    _new_placeholder(self.graph, f"te_backward_{i}") for i in range(len(self.weights))
                ]
                self.signature.slots = len(self.sites)
                token = _new_placeholder(self.graph, "te_token")
        self.scales = self.call(SNAPSHOT, self.forward_states + self.backward_states)
        if self.signature.training:
            owners = [self.rows[site.root_weight] for site in self.sites if site.root_weight is not None]
            slots = self.call(GRADIENT_SLOTS, token, self.backward_states, owners, self.recipe.key())
            # Together: a gradient of each alone would be as long as all slots, and there would be as many to add up.
            self.slots = self.call(torch.unbind, slots)

    def quantize_weights(self) -> dict[Node, _Weight]:
        """One quantize for all matrices of one dtype and device, and each one's slices of what it gives.

        Where copies can be kept from call to call, they are slices of inputs, and the quantize is not on the graph.
        Where none are wanted, or a matrix cannot be computed in front of the graph, there is neither.
        """
        in_place = [matrix for matrix in self.matrices if matrix.in_place or not self.cache_weights]
        scales = {matrix.owner: self.scale(2 * self.rows[matrix.owner] + 1) for matrix in in_place}
        quantized = {matrix.value: _Weight(scale=scales[matrix.owner]) for matrix in in_place}
        kept: dict[object, list[tuple[Matrix, int]]] = {}
        groups: dict[object, list[Matrix]] = {}
        for matrix in self.matrices:
            if matrix.value in quantized:
                continue
            value, offset = value_of(matrix.value), self._offset(matrix)
            if offset is None:
                groups.setdefault((value.dtype, value.device), []).append(matrix)
            else:
                trains = value_of(matrix.owner).requires_grad
                kept.setdefault((value.dtype, value.device, trains), []).append((matrix, offset))
        copies: dict[Node, Node] = {}
        for members in kept.values():
            quantized.update(self._take_in(*map(list, zip(*members, strict=True))))
        for matrices in groups.values():
            quantized.update(self._quantize_group(matrices, copies))
        return quantized

    def _offset(self, matrix: Matrix) -> int | None:
        """Where the matrix begins in its parameter, if its copies can be kept from call to call."""
        *experts, rows, columns = value_of(matrix.value).shape
        # A padded batch of experts is no padded matrix.
        is_padded_batch = bool(experts) and (rows, columns) != (padded(rows), padded(columns))
        if is_padded_batch or implementations_for([matrix], self.format.forward) is None:
            return None
        return offset_in_parameter(matrix, self.parameters.get(matrix.owner))

    def _take_in(self, members: list[Matrix], offsets: list[int]) -> dict[Node, _Weight]:
        """Placeholders for what te::quantize_weights gives for ``members``, as far as the graph reads it."""
        group = self._group(members, offsets)
        self.signature.groups.append(group)
        unread = {
            "codes": not any(group.layout.rowwise),
            "transposed": not any(group.layout.columnwise),
            "amax": not self.signature.training,
        }
        group.inputs = [i for i, output in enumerate(OUTPUTS) if not unread.get(output)]
        name = f"te_weights_{len(self.signature.groups) - 1}"
        inputs: list[Node | None] = [None] * len(OUTPUTS)
        with self.graph.inserting_before(self.first):
            for i in group.inputs:
                inputs[i] = _new_placeholder(self.graph, f"{name}_{OUTPUTS[i]}")
        return self._slices(members, group.layout, *inputs)

    def _group(self, members: list[Matrix], offsets: list[int]) -> WeightGroup:
        sources: dict[Node, int] = {}
        for matrix in members:
            sources.setdefault(matrix.owner, len(sources))
        rowwise, columnwise = zip(*map(self._layouts, members), strict=True)
        layout = Layout(
            tuple(sources[matrix.owner] for matrix in members),
            tuple(offsets),
            tuple(map(stored_shape, members)),
            tuple(map(self._padded_shape, members)),
            rowwise,
            columnwise,
            self.format.forward,
            self.recipe.rule(),
            lasting=not (self.training and value_of(members[0].owner).requires_grad),
        )
        value = value_of(members[0].value)
        chosen = implementations_for(members, self.format.forward)
        assert chosen is not None, "such matrices are quantised in the graph"
        owners = [self.rows[matrix.owner] for matrix in members]
        return WeightGroup(list(sources), owners, layout, value.dtype, value.device, *chosen)

    def _quantize_group(self, members: list[Matrix], copies: dict[Node, Node]) -> dict[Node, _Weight]:
        detached = [self.call(torch.detach, matrix.copied(self.graph, copies)) for matrix in members]
        shapes = [self._padded_shape(matrix) for matrix in members]
        aligned = [self._pad(*each) for each in zip(detached, members, shapes, strict=True)]
        scales = None
        if self.scales is not None:
            rows = [2 * self.rows[matrix.owner] + 1 for matrix in members]
            whole = rows == list(range(1, 2 * len(self.weights), 2))
            picked = (slice(1, 2 * len(rows), 2),) if whole else (rows,)
            scales = self.call(torch.ops.aten.contiguous.default, self.call(operator.getitem, self.scales, picked))
        rowwise, columnwise = (tuple(flags) for flags in zip(*map(self._layouts, members), strict=True))
        flags = list(rowwise), list(columnwise)
        out = self.call(QUANTIZE_WEIGHTS, aligned, scales, self.format.forward, *flags, self.rule)
        outputs = (self.call(operator.getitem, out, i) for i in range(len(OUTPUTS)))
        layout = Layout((), (), (), tuple(shapes), rowwise, columnwise, self.format.forward, self.recipe.rule())
        return self._slices(members, layout, *outputs)

    def _slices(
        self,
        members: list[Matrix],
        layout: Layout,
        codes: Node | None,
        transposed: Node | None,
        amax: Node | None,
        scale_inv: Node | None,
    ) -> dict[Node, _Weight]:
        """The part of each matrix in what te::quantize_weights gives for all."""
        quantized = {}
        for i, (matrix, (height, width)) in enumerate(zip(members, layout.copies, strict=True)):
            quantized[matrix.value] = _Weight(
                self._slice(codes, layout.row_starts[i], height, width),
                self._slice(transposed, layout.column_starts[i], width, height),
                self.call(torch.select, self.call(torch.select, scale_inv, 0, i), 0, 0),
                None if amax is None else self.call(torch.select, amax, 0, i),
            )
        return quantized

    def _padded_shape(self, matrix: Matrix) -> tuple[int, int]:
        *experts, rows, columns = value_of(matrix.value).shape
        return math.prod(experts) * padded(rows), padded(columns)

    def _pad(self, weight: Node, matrix: Matrix, shape: tuple[int, int]) -> Node:
        """``weight`` with zeros up to the sizes that FP8 products take, itself where it has them.

        A batch of experts becomes one matrix, the experts on top of each other.
        """
        *experts, rows, columns = value_of(matrix.value).shape
        more_rows, more_columns = padded(rows) - rows, padded(columns) - columns
        if more_rows or more_columns:
            weight = self.call(F.pad, weight, (0, more_columns, 0, more_rows))
        return self.call(torch.reshape, weight, shape) if experts else weight

    def _layouts(self, matrix: Matrix) -> tuple[bool, bool]:
        """Which copies of a matrix its products read: (as stored, transposed). dgrad alone reads the second one."""
        uses = self.uses[matrix.value]
        forward = {site.transposed for site in uses}
        # Inside a checkpointed body the example values do not say what will require a gradient.
        dgrad = {
            not site.transposed
            for site in uses
            if torch.is_grad_enabled() and (site.region.parent is not None or value_of(site.x).requires_grad)
        }
        return False in forward | dgrad, True in forward | dgrad

    def _slice(self, flat: Node | None, start: int | None, rows: int, columns: int) -> Node | None:
        if flat is None or start is None:
            return None
        part = self.call(torch.ops.aten.slice.Tensor, flat, 0, start, start + rows * columns)
        return self.call(torch.ops.aten.view.default, part, [rows, columns])

    def update(self, amaxes: dict[Node, list[Node]], quantized: dict[Node, _Weight]) -> None:
        """The one update of all forward states, last in the graph."""
        of_matrices: dict[Node, list[Node]] = {}
        for matrix in self.matrices:
            amax = quantized[matrix.value].amax
            assert amax is not None, "training asks for the amaxes of weights"
            of_matrices.setdefault(matrix.owner, []).append(amax)
        values = []
        for weight in self.weights:
            values += [self._largest(amaxes[weight]), self._largest(of_matrices[weight])]
        self.call(UPDATE_SCALES, self.forward_states, values, "forward", self.recipe.key())

    def _largest(self, amaxes: list[Node]) -> Node:
        largest, *others = amaxes
        for other in others:
            largest = self.call(torch.maximum, largest, other)
        return largest


def _owned_rows(x: Node, ends: Node, before: Node) -> Node:
    """``te::owned_rows`` of x: the one that another product of the same groups reads, or a new one."""
    known = (user for user in x.users if user.target is OWNED_ROWS and user.args == (x, ends) and user < before)
    return next(known, None) or before.graph.call_function(OWNED_ROWS, (x, ends))


def _as_autocast_reads(x: Node, site: Site) -> Node:
    """``x`` in float16 where autocast would cast it there, for what float16 cannot hold has to become an infinity.

    A loss scaler skips the step then, and no amax enters a history. The quantize would clip such a number instead, and
    its amax would have all others vanish for as long as it is remembered. No norm's result is that large.
    """
    if value_of(site.node).dtype != torch.float16 or value_of(x).dtype == torch.float16 or memory_of(x).target is NORM:
        return x
    known = (user for user in x.users if user.target == "to" and user.args == (x, torch.float16) and user < site.node)
    cast = next(known, None) or site.region.graph.call_method("to", (x, torch.float16))
    if "example_value" not in cast.meta:
        cast.meta.update({**x.meta, "example_value": value_of(x).to(torch.float16)})
    return cast


def _lower_site(
    site: Site,
    weight: _Weight,
    scales: tuple[Node | None, Node | None, Node | None],
    config: str,
    became: dict[Node, Node],
) -> Node:
    """Replace the site's node by its ``te::`` operator in its own region; returns the root's node of the amax of x.

    ``became`` maps linears lowered before to their results: one linear may read another's. A weight that is quantised
    there gets its amax from the first linear that reads it.
    """
    region, node = site.region, site.node
    x, bias = (became.get(operand, operand) if operand is not None else None for operand in (site.x, site.bias))
    assert site.weight is not None
    # The weight that a body reads as ``weight.T`` may have been transposed before the body.
    stored = site.weight if site.weight.graph is region.graph else region.bring_in(site.weight)
    operands = [weight.codes, weight.codes_transposed, weight.scale_inv, *scales]
    brought = [None if operand is None else region.bring_in(operand) for operand in operands]
    target, beside = (LINEAR, bias) if site.ends is None else (GROUPED_LINEAR, site.ends)
    last = () if weight.scale is None else (region.bring_in(weight.scale),)
    with region.graph.inserting_before(node):
        x = None if x is None else _as_autocast_reads(x, site)
        if site.ends is not None and x is not None:
            x = _owned_rows(x, site.ends, node)
        out = region.graph.call_function(target, (x, stored, beside, *brought, value_of(node).dtype, config, *last))
        y, amax = (region.graph.call_function(operator.getitem, (out, i)) for i in range(2))
        weight_amax = region.graph.call_function(operator.getitem, (out, 2)) if weight.amax is None else None
    for new in (out, y):
        new.meta.update({k: v for k, v in node.meta.items() if k != "example_value"})
    y.meta["example_value"] = node.meta["example_value"]
    node.replace_all_uses_with(y)
    region.graph.erase_node(node)
    became[node], site.node = y, out
    if weight_amax is not None and weight.scale_inv is None:
        weight.amax = region.send_out(weight_amax)
    return region.send_out(amax)


def lower_linears(graph: Graph, plan: Plan, recipe: Recipe, training: bool, cache_weights: bool = True) -> Signature:
    """Rewrite every selected site of ``plan``; returns the inputs that the graph now wants.

    cache_weights: FP8 copies of weights are such inputs where they can be.
    """
    if not plan.selected:
        return Signature(stateful=recipe.stateful)
    work = _Lowering(graph, plan, recipe, training, cache_weights)
    # Linears that read one value share its scale, so that it is quantised once.
    first_reader: dict[Node, int] = {}
    with graph.inserting_before(work.body):
        work.add_states()
        quantized = work.quantize_weights()
        scales = []
        for use, site in enumerate(work.sites):
            assert site.root_weight is not None and site.x is not None
            own = work.rows[site.root_weight]
            shared = first_reader.setdefault(site.x, own)
            gradient = work.scale(2 * len(work.weights) + own) if work.signature.training else None
            slot = None if work.slots is None else work.call(operator.getitem, work.slots, use)
            scales.append((work.scale(2 * shared), gradient, slot))
    amaxes: dict[Node, list[Node]] = {}
    became: dict[Node, Node] = {}
    for site, operands in zip(work.sites, scales, strict=True):
        assert site.root_weight is not None and site.matrix is not None
        config = LinearConfig(site.name, work.format.forward, work.format.backward, work.rule, site.transposed)
        amax = _lower_site(site, quantized[site.matrix.value], operands, config.text(), became)
        amaxes.setdefault(site.root_weight, []).append(amax)
    if work.signature.training:
        with graph.inserting_before(graph.output_node()):
            work.update(amaxes, quantized)
    plan.groups = work.signature.groups
    return work.signature
