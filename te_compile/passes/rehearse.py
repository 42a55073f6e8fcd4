"""Find out which Triton kernels a graph will launch, without launching any.

Each operator's own code, for the implementation that was chosen, runs on the graph's fake tensors as it will on real
ones, while memory is fake and launches are only noted (kernels/recording.py). So there is no second list of which
kernel goes with what. What the code would ask of real tensors it asks of the device, or not at all.

An FP8 state that has seen no data has no scale, and what a step launches then differs from what all later ones do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from te_compile.kernels.ahead import Launch, Notes
from te_compile.kernels.recording import rehearsing
from te_compile.ops import registry
from te_compile.ops.library import implementations
from te_compile.ops.triton_implementations import TRITON
from te_compile.passes.arguments import arguments_of, operator_of, values_of
from te_compile.passes.cached_weights import OUTPUTS, WeightGroup

LOG = logging.getLogger("te_compile")
STATE = (2, 2)  # as much of one as tells where its rows are


def rehearse(graph: Graph, missing: bool) -> list[Launch]:
    """The launches of all te:: nodes that Triton kernels run, while scales are ``missing`` or after. Nodes whose shapes
    are not known yet are left out, and so are those whose code asks more of tensors than a fake one can say."""
    notes = Notes(missing)
    for call in calls_of(graph):
        rehearse_call(notes, call)
    return notes.launches


class Call(NamedTuple):
    """What a node calls: the operator's name, its code, and the arguments, whose tensors are fake."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]


def calls_of(graph: Graph) -> Iterator[Call]:
    """The calls of the te:: nodes that Triton kernels run, one of each kind."""
    met = set()
    for node in graph.nodes:
        values = _runnable(node)
        if values is not None and (kind := _kind(node, values)) not in met:
            met.add(kind)
            yield Call(str(node.target), _function(node), values)


def rehearse_call(notes: Notes, call: Call) -> None:
    """Have ``notes`` told of what ``call`` launches, as far as that is known."""
    _rehearse(notes, call.name, partial(call.function, **call.arguments), call.arguments)


def _kind(node: Node, values: dict[str, Any]) -> tuple[Any, ...]:
    """Nodes of one kind launch the same, as the layers of a model do."""
    leaves = pytree.tree_leaves(values)
    return operator_of(node), *(
        (leaf.dtype, leaf.shape, leaf.stride(), leaf.storage_offset() * leaf.element_size() & 15 == 0, leaf.device)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    )


def _function(node: Node) -> Callable[..., Any]:
    op = operator_of(node)
    assert op is not None, f"{node} calls no operator"
    return implementations[op._schema.name.removeprefix("te::")]


def _runnable(node: Node) -> dict[str, Any] | None:
    """The arguments of a node that a Triton kernel runs on a GPU, tensors fake; None for any other."""
    op = operator_of(node) if node.op == "call_function" else None
    if op is None or op.namespace != "te":
        return None
    arguments = arguments_of(node)
    if arguments.get("implementation") != TRITON:
        return None
    bases = arguments.get("_all_bases", [])  # functionalization passes what is changed in place under this name
    given = {argument.name: arguments.get(argument.name, bases) for argument in op._schema.arguments}
    values: dict[str, Any] = values_of(given)
    leaves = pytree.tree_leaves(values)
    return values if all(map(_is_constant, leaves)) and any(isinstance(leaf, FakeTensor) for leaf in leaves) else None


def _is_constant(leaf: Any) -> bool:
    """Is this no symbol, and no tensor that has one among its sizes?"""
    if isinstance(leaf, Tensor):
        numbers = (*leaf.shape, *leaf.stride(), leaf.storage_offset())
        return isinstance(leaf, FakeTensor) and all(isinstance(number, int) for number in numbers)
    return not isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _rehearse(notes: Notes, name: str, call: Callable[[], Any], values: Any) -> None:
    fake = next(leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, FakeTensor))
    try:
        with _stage(fake.fake_mode, notes):
            call()
    except Exception as error:  # its kernels are compiled when they are launched
        LOG.info("the kernels of %s are not known ahead: %r", name, error)


@contextmanager
def _stage(fake_mode: FakeTensorMode, notes: Notes) -> Iterator[None]:
    with _disable_current_modes(), fake_mode, torch.no_grad(), rehearsing(notes):
        yield


def rehearse_copies(groups: Iterable[WeightGroup], stateful: bool, missing: bool) -> list[Launch]:
    """The launches that make the FP8 copies of ``groups`` (weight_cache.py): those that make them from nothing, and,
    once scales are there, those that check them and make them anew. ``stateful``: are scales those of states?"""
    notes = Notes(missing)
    for group in groups:
        if set(group.implementations.values()) == {TRITON}:
            weights = [node.meta["example_value"] for node in group.weights]
            if all(map(_is_constant, weights)):
                call = partial(_copy, group, weights, stateful, missing)
                _rehearse(notes, "copies of weights", call, weights)
    return notes.launches


def _copy(group: WeightGroup, weights: list[Tensor], stateful: bool, missing: bool) -> None:
    """What weight_cache.py does with a group, for its launches."""
    layout = group.layout
    weights = [torch.empty_like(weight) for weight in weights]
    rows = scales = None
    if stateful:
        rows = [torch.empty(STATE, dtype=torch.float32, device=group.device).narrow(0, 1, 1) for _ in group.owners]
        scales = implementations["snapshot"](rows, TRITON)
    flags = list(layout.rowwise), list(layout.columnwise)
    quantize = implementations["quantize_weights"]
    outputs = quantize(layout.padded(weights), scales, layout.dtype, *flags, layout.rule.text(), TRITON)
    if not missing:
        refresher = registry.function_of("refresh_weights", TRITON)(layout, outputs, rows, weights)
        refresher(weights, OUTPUTS.index("amax") in group.inputs, missing)
