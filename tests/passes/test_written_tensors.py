"""What a node writes to is found by its name, its arguments, its schema, and where none of them tells."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from te_compile.passes.written_tensors import written_by
from tests.capturing import captured

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Run = Callable[[Tensor, Tensor, Tensor], object]


def placeholders(gm: GraphModule) -> list[Node]:
    return gm.graph.find_nodes(op="placeholder")


WRITERS: dict[str, tuple[set[str], Run]] = {
    "table": ({"x"}, lambda x, m, v: F.embedding(torch.arange(3), x, max_norm=1.0)),
    "table, by position": ({"x"}, lambda x, m, v: F.embedding(torch.arange(3), x, None, 1.0)),
    "table of bags": ({"x"}, lambda x, m, v: F.embedding_bag(torch.arange(6).view(2, 3), x, max_norm=1.0)),
    "batch norm": ({"m", "v"}, lambda x, m, v: F.batch_norm(x, m, v, training=True)),
    "batch norm in C++": ({"m", "v"}, lambda x, m, v: torch.batch_norm(x, None, None, m, v, True, 0.1, 1e-5, False)),
    "native batch norm": ({"m", "v"}, lambda x, m, v: torch.native_batch_norm(x, None, None, m, v, True, 0.1, 1e-5)),
    "operator": ({"m", "v"}, lambda x, m, v: torch.ops.aten.native_batch_norm(x, None, None, m, v, True, 0.1, 1e-5)),
    "instance norm": ({"m", "v"}, lambda x, m, v: F.instance_norm(x[None].mT, m, v)),
    "fake quantization": (
        {"m", "v"},
        lambda x, m, v: torch.fused_moving_avg_obs_fake_quant(
            x, torch.ones(1), torch.ones(1), m[:1], m[1:2], v[:1], torch.zeros(1, dtype=torch.int32), 0.1, 0, 255, -1
        ),
    ),
    "inplace, by position": ({"x"}, lambda x, m, v: F.relu(x, True)),
    "inplace": ({"x"}, lambda x, m, v: F.dropout(x, 0.5, inplace=True)),
    "a method": ({"x"}, lambda x, m, v: x.add_(1)),
    "out": ({"x"}, lambda x, m, v: torch.add(m, v, out=x[0])),
    "an item": ({"x"}, lambda x, m, v: x.__setitem__(0, m)),
}


@pytest.mark.parametrize("case", WRITERS)
def test_what_writes_is_found(case: str) -> None:
    names, run = WRITERS[case]
    gm, _ = captured(run, torch.randn(8, 4), torch.randn(4), torch.rand(4))
    memories = {node.meta["example_value"].untyped_storage()._cdata: str(node.target)[2:3] for node in placeholders(gm)}
    found = [each.meta["example_value"] for node in gm.graph.nodes for each in written_by(node)]
    assert {memories.get(each.untyped_storage()._cdata, "") for each in found} - {""} == names


@pytest.mark.parametrize("run", [
    lambda x, m, v: F.embedding(torch.arange(3), x),
    lambda x, m, v: F.batch_norm(x, m, v),
    lambda x, m, v: torch.batch_norm(x, None, None, m, v, False, 0.1, 1e-5, False),
    lambda x, m, v: F.instance_norm(x[None].mT, m, v, use_input_stats=False),
    lambda x, m, v: F.relu(x, False) + F.dropout(x, 0.5),
    lambda x, m, v: (x.topk(2)[0].sum(), x.sort(-1)[0], x.max(-1)[0], torch.add(m, v)),
])  # fmt: skip
def test_what_only_reads_writes_nothing(run: Run) -> None:
    gm, _ = captured(run, torch.randn(8, 4), torch.randn(4), torch.rand(4))
    assert not [each for node in gm.graph.nodes for each in written_by(node)]
