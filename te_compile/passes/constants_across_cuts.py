"""Tell a piece of a graph that was cut which of its inputs are constants that an earlier piece made.

DistributedDataParallel has a model's graph cut at its buckets of gradients. The first piece makes the attention mask,
and the pieces of all layers are given it as an input, of which nothing can be proved (fold_masks.py).

Dynamo compiles the pieces in their order, and calls what was compiled of each with fake tensors: what it returns is
what the next ones are compiled for. So a fake tensor that stands for a constant is remembered with its value, until
all pieces are compiled. One Dynamo graph calls them all, one after the other under the same guards, so a later piece
gets that constant in every call. Unless a piece writes into a tensor that another one made: what is known of all of
them is forgotten then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.utils.weak import WeakIdKeyDictionary

from te_compile.passes.captured_nodes import is_tensor, value_of
from te_compile.passes.fold_masks import KNOWN_VALUE, Constants, NotConstantError, evaluated
from te_compile.passes.side_effects import may_change
from te_compile.passes.weight_expressions import is_held_by_the_model

# Compilation → fake tensors between its pieces → their values, on the CPU.
_known: WeakKeyDictionary[TracingContext, WeakIdKeyDictionary] = WeakKeyDictionary()


def _known_here() -> WeakIdKeyDictionary | None:
    """What is known in this compilation; None where it is that of a graph that is whole."""
    context = TracingContext.try_get()
    if context is None or not context.fakify_first_call:
        return None
    return _known.setdefault(context, WeakIdKeyDictionary())


def note_constant_inputs(graph: Graph, example_inputs: Sequence[Any]) -> int:
    """Write on the placeholders of a piece what is known of them; returns of how many something is."""
    known = _known_here()
    if not known:
        return 0
    given = list(zip(graph.find_nodes(op="placeholder"), example_inputs, strict=True))
    changes: dict[Node, bool] = {}
    if any(is_tensor(node) and not is_held_by_the_model(node) and may_change(node, changes) for node, _ in given):
        known.clear()  # it may be a view of what is known
        return 0
    found = [(node, known[value]) for node, value in given if isinstance(value, FakeTensor) and value in known]
    for node, value in found:
        node.meta[KNOWN_VALUE] = value
    return len(found)


def constant_outputs(graph: Graph) -> dict[int, Tensor]:
    """The values of those outputs of a piece that may be masks and are constants, by their places; none of a graph that
    is whole. Of a piece that is rewritten, for what stands for an operator is one by then; what is known of its inputs
    is not needed any more."""
    outputs, constants = graph.output_node().args[0], Constants()
    if _known_here() is None or not isinstance(outputs, (tuple, list)):
        return {}
    values = {place: _constant(node, constants) for place, node in enumerate(outputs) if _may_be_mask(node)}
    for node in graph.find_nodes(op="placeholder"):
        node.meta.pop(KNOWN_VALUE, None)  # AOTAutograd keeps the graph, and would keep masks
    return {place: value for place, value in values.items() if isinstance(value, Tensor)}


def _may_be_mask(node: Any) -> bool:
    value = value_of(node) if is_tensor(node) else None
    is_of_type = isinstance(value, Tensor) and (value.dtype == torch.bool or value.is_floating_point())
    return value is not None and is_of_type and value.dim() > 1 and not value.requires_grad


def _constant(node: Node, constants: Constants) -> Any:
    try:
        return evaluated(node, constants)
    except NotConstantError:
        return None


def telling(compiled: Callable[..., Any], constants: dict[int, Tensor]) -> Callable[..., Any]:
    """``compiled``, whose outputs at these places, some, are remembered with these values when they are fake tensors:
    once. The first call with others forgets all that is known, for all pieces are compiled then."""
    waiting: list[WeakIdKeyDictionary] = []
    first = next(iter(constants))

    def run(*args: Any) -> Any:
        results = compiled(*args)
        if isinstance(results[first], FakeTensor) and (known := _known_here()) is not None:
            known.update({results[place]: value for place, value in constants.items()})
            waiting[:] = [known]
        elif waiting:
            waiting.pop().clear()
            constants.clear()
        return results

    return run
