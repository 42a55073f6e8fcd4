"""Scales read from the states themselves: where the number is still the right one, and nowhere else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

from te_compile import compilers
from te_compile.backend import te_fp8
from te_compile.passes.arguments import is_te
from te_compile.passes.read_scales_in_place import read_scales_in_place

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Layer(nn.Module):
    """A norm and an MLP in a residual stream."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.checkpointed = checkpointed

    def block(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.block, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.block(x)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Graph, int]]:
    """A copy of each direction's graph after the pass, and what the pass returned."""
    graphs: list[tuple[Graph, int]] = []

    def kept(graph: Graph) -> int:
        changed = read_scales_in_place(graph)
        graph.lint()
        graphs.append((copy.deepcopy(graph), changed))
        return changed

    monkeypatch.setattr(compilers, "DIRECTION_PASSES", (kept,))
    return graphs


def te_nodes(graph: Graph, name: str) -> list[Any]:
    return [node for node in graph.nodes if is_te(node, name)]


def train(model: nn.Module, batches: list[Tensor], **options: Any) -> list[Tensor]:
    """The losses and last gradients of a few steps."""
    compiled = torch.compile(model, backend=te_fp8, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = compiled(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_takes_the_same_steps(seen: list[tuple[Graph, int]], checkpointed: bool) -> None:
    """Batches that grow, so that the next step's scales are others."""
    model, batches = Layer(checkpointed), [torch.randn(32, 32) * 2.0**step for step in range(4)]
    got = train(copy.deepcopy(model), batches)
    wanted = train(copy.deepcopy(model), batches, compiler="aot_eager")
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert seen


def test_a_forward_that_trains_keeps_a_copy_for_its_backward_only(seen: list[tuple[Graph, int]]) -> None:
    model = Layer()
    torch.compile(model, backend=te_fp8)(torch.randn(32, 32)).sum().backward()
    (forward, changed), (backward, unchanged) = seen
    assert changed == 2 and unchanged == 0
    (snapshot,), (update,) = te_nodes(forward, "snapshot"), te_nodes(forward, "update_scales_")
    order = list(forward.nodes)
    readers = te_nodes(forward, "norm_quantize") + te_nodes(forward, "fused_quantize")
    assert len(readers) == 2
    assert max(map(order.index, readers)) < order.index(snapshot) < order.index(update)
    assert all(user.op == "output" for scale in snapshot.users for user in scale.users)
    assert not te_nodes(backward, "snapshot")


def test_a_forward_that_trains_nothing_needs_no_copy(seen: list[tuple[Graph, int]]) -> None:
    model = Layer()
    with torch.no_grad():
        torch.compile(model, backend=te_fp8)(torch.randn(32, 32))
    ((graph, changed),) = seen
    assert changed == 2 and not te_nodes(graph, "snapshot")


def test_what_a_checkpoint_computes_again_reads_the_copy(seen: list[tuple[Graph, int]]) -> None:
    model = Layer(checkpointed=True)
    torch.compile(model, backend=te_fp8)(torch.randn(32, 32)).sum().backward()
    (forward, _), (backward, unchanged) = seen
    assert te_nodes(backward, "fused_quantize") and unchanged == 0
    (snapshot,) = te_nodes(forward, "snapshot")
    returned = set(forward.output_node().args[0])  # type: ignore[union-attr]
    assert snapshot in returned or any(scale in returned for scale in snapshot.users)


def captured(read_first: bool) -> GraphModule:
    """A state that is read by its copy before or after something else may have written to it."""
    graph = Graph()
    x, state = graph.placeholder("x"), graph.placeholder("state")
    x.meta["val"], state.meta["val"] = torch.zeros(16, 16, device="meta"), torch.zeros(2, 18, device="meta")
    snapshot = graph.call_function(torch.ops.te.snapshot.default, ([state],))
    snapshot.meta["val"] = torch.zeros(2, device="meta")
    scale = graph.call_function(torch.ops.aten.select.int, (snapshot, 0, 1))
    scale.meta["val"] = torch.zeros((), device="meta")
    rule = "margin=0 epsilon=0.0 power_2=False"
    arguments = (x, scale, torch.float8_e4m3fn, True, True, rule)
    if read_first:
        result = graph.call_function(torch.ops.te.quantize.default, arguments)
        graph.call_function(torch.ops.aten.fill_.Scalar, (state, 1.0))
    else:
        graph.call_function(torch.ops.aten.fill_.Scalar, (state, 1.0))
        result = graph.call_function(torch.ops.te.quantize.default, arguments)
    graph.output((result,))
    return GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("read_first", [True, False])
def test_what_reads_after_a_write_reads_the_copy(read_first: bool) -> None:
    module = captured(read_first)
    x, state = torch.randn(16, 16), torch.rand(2, 18) + 1
    wanted = module(x, state.clone())[0]
    assert read_scales_in_place(module.graph) == int(read_first)
    module.graph.lint()
    module.recompile()
    got = module(x, state.clone())[0]
    assert torch.equal(got[0].view(torch.uint8), wanted[0].view(torch.uint8)) and got[3] == wanted[3]


def test_a_copy_that_is_returned_as_a_whole_stays_and_so_does_the_graphs_output() -> None:
    """Nothing reads an output, and it must not be taken for a scale that nothing reads."""
    module = captured(read_first=True)
    (snapshot,) = te_nodes(module.graph, "snapshot")
    output = module.graph.output_node()
    output.args = ((*output.args[0], snapshot),)  # type: ignore[misc]
    module.recompile()
    x, state = torch.randn(16, 16), torch.rand(2, 18) + 1
    wanted = module(x, state.clone())
    assert read_scales_in_place(module.graph) == 1
    module.graph.lint()
    assert list(module.graph.nodes)[-1].op == "output"
    module.recompile()
    got = module(x, state.clone())
    assert torch.equal(got[0][0].view(torch.uint8), wanted[0][0].view(torch.uint8)) and torch.equal(got[1], wanted[1])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"cache_weights": False}, {"save_memory": True}], ids=["uncached", "save_memory"])
def test_attention_in_a_checkpoint_trains_without_kept_copies(options: dict[str, bool]) -> None:
    """Its draw is recomputed, and the partitioner saves the copy of all scales as a whole."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda t: self.attention(t, t, t, need_weights=False)[0], x, use_reentrant=False)  # type: ignore[no-any-return]

    model, batches = Attention(), [torch.randn(2, 16, 64) for _ in range(2)]
    got = train(copy.deepcopy(model), batches, **options)
    for one, other in zip(got, train(copy.deepcopy(model), batches), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
