"""A weight is quantised right before the product that reads it, and nothing else moves."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Node

from te_compile.passes import manager
from te_compile.passes.set_names_aside import label_of
from tests.compiling import compiled, te_nodes, train_step
from tests.test_save_memory import Gated, Layer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def next_call(node: Node) -> Node:
    """The next node that computes something."""
    node = node.next
    while node.target is operator.getitem:
        node = node.next
    return node


@pytest.mark.parametrize("make", [Layer, Gated])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_follows_the_quantize_of_its_weight(make: type[Layer] | type[Gated], dtype: torch.dtype) -> None:
    model = make()
    with manager.recording() as records, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        train_step(model, compiled(model, cache_weights=False), torch.randn(2, 24, 64, requires_grad=True))
    (record,) = records
    nodes = [*te_nodes(record, "quantize"), *te_nodes(record, "fused_quantize")]
    of_weights = [node for node in nodes if all(source.op == "placeholder" for source in read(node))]
    of_weights = [node for node in of_weights if is_weight(node)]
    assert len(of_weights) == 2 * len(record.plan.sites)
    assert all(label_of(next_call(node)).endswith(("forward", "dgrad")) for node in of_weights)


def read(node: Node) -> list[Node]:
    first = node.args[0]
    return [first] if isinstance(first, Node) else list(first)


def is_weight(node: Node) -> bool:
    return all(str(source.target).startswith("primals") and source.meta["val"].dim() == 2 for source in read(node))


def test_where_copies_come_from_outside_nothing_moves() -> None:
    model = Layer()
    with manager.recording() as records:
        train_step(model, compiled(model), torch.randn(2, 24, 64))
    assert next(each.count for each in records[0].passes if each.name == "quantize_late") == 0
