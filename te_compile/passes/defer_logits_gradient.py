"""Return logits beside a loss so that a gradient of theirs costs something only where there is one.

    return (loss, logits)      with  loss = te.cross_entropy(logits, …)

becomes

    return (loss, logits.detach(), ticket)      with  loss, ticket = te.cross_entropy_deferred(logits, …)

and the runtime makes the logits differentiable again (ops/deferred_gradient.py, deferred_gradients.py). It happens
where the loss reads the logits that are returned, as they are or in another shape, for it is the backward of the loss
that adds the gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from te_compile.ops.cross_entropy import CROSS_ENTROPY, CROSS_ENTROPY_DEFERRED
from te_compile.ops.deferred_gradient import TICKET_DTYPE
from te_compile.passes.captured_nodes import value_of
from te_compile.passes.lower_losses import with_these_rows


def defer_logits_gradient(graph: Graph) -> list[int]:
    """Returns which outputs are detached now; their tickets are the last outputs, in this order."""
    output = graph.output_node()
    if not isinstance(output.args[0], (tuple, list)):
        return []
    deferred: list[int] = []
    for loss in graph.find_nodes(op="call_function", target=CROSS_ENTROPY):
        results = output.args[0]
        logits = next((node for node in _shown_by(loss.args[0]) if node in results), None)
        if logits is None or results.count(logits) != 1 or not value_of(logits).requires_grad:
            continue
        place = results.index(logits)
        detached, ticket = _deferred(loss, logits)
        results = list(output.args[0])
        results[place] = detached
        output.args = ((*results, ticket),)
        deferred.append(place)
    return deferred


def _shown_by(logits: object) -> Iterator[Node]:
    """``logits`` and the tensors of its dtype that it is a view of, row by row, up to the first."""
    node = logits if isinstance(logits, Node) else None
    while node is not None:
        yield node
        source = with_these_rows(node)
        node = source if source is not None and value_of(source).dtype == value_of(node).dtype else None


def _deferred(loss: Node, logits: Node) -> tuple[Node, Node]:
    """Put the operator that gives a ticket in the place of ``loss``; returns the detached logits and the ticket."""
    graph, value = loss.graph, value_of(loss)
    with value.fake_mode:
        ticket_value = torch.empty((), dtype=TICKET_DTYPE, device="cpu", requires_grad=True)
        detached_value = value_of(logits).detach()
    with graph.inserting_before(loss):
        both = graph.call_function(CROSS_ENTROPY_DEFERRED, loss.args)
        new, ticket = (graph.call_function(operator.getitem, (both, index)) for index in range(2))
    both.meta = {**loss.meta, "example_value": (value, ticket_value)}
    new.meta, ticket.meta = dict(loss.meta), {**loss.meta, "example_value": ticket_value}
    loss.replace_all_uses_with(new)
    graph.erase_node(loss)
    with graph.inserting_before(graph.output_node()):
        detached = graph.call_method("detach", (logits,))
    detached.meta = {**logits.meta, "example_value": detached_value}
    return detached, ticket
