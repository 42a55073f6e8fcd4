"""What a checkpointed region hands to the next one is saved, whatever shape it is read in, and nothing else is."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from te_compile.passes.save_between_regions import save_between_regions
from tests.capturing import traced
from tests.compiling import compiled, gradients

BLOCKS, BATCH, TOKENS, WIDTH = 3, 4, 8, 32
SHAPES = {(BATCH, TOKENS, WIDTH), (BATCH * TOKENS, WIDTH)}


class Residual(nn.Module):
    """Its last node is the sum that the product adds to, in the shape of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class EndsWithALinear(Residual):
    """Its last node gives the product's matrix the shape of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class HandsHeadsOver(Residual):
    """Its last node shows another order."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Model(nn.Module):
    """Blocks, each of them checkpointed or not."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(BLOCKS)])
        self.recompute = True

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def saved_by(model: nn.Module, batch: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
    """What a training step saves of high precision in the shape of what is handed on, and what the step gives."""
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) in SHAPES and tensor.is_floating_point() and tensor.itemsize > 1:
            saved.append(tensor)
        return tensor

    x = batch.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = compiled(model)(x)
    output.square().mean().backward()
    return saved, [output.detach(), x.grad, *gradients(model).values()]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("block", [Residual, EndsWithALinear, HandsHeadsOver])
def test_the_input_of_each_region_is_saved_and_nothing_else(block: type[nn.Module]) -> None:
    model, batch = Model(block), torch.randn(BATCH, TOKENS, WIDTH)
    without = copy.deepcopy(model)
    without.recompute = False
    saved, got = saved_by(model, batch)
    assert len({tensor.data_ptr() for tensor in saved}) == BLOCKS
    torch._dynamo.reset()
    _, expected = saved_by(without, batch)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def regions(*numbers: int | None) -> tuple[torch.fx.Graph, list[torch.fx.Node]]:
    """A sine, two views of it and a cosine of those, each in the region of the number given, or in none."""
    gm = traced(lambda x: x.sin().view(32, 8).t().cos(), torch.randn(16, 16))
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    for node, number in zip(nodes, numbers, strict=True):
        if number is not None:
            node.meta |= {"ac_graph_id": number, "recompute": CheckpointPolicy.PREFER_RECOMPUTE}
    return gm.graph, nodes


def marked(nodes: list[torch.fx.Node]) -> list[bool]:
    return [node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE for node in nodes]


@pytest.mark.parametrize("numbers", [(1, 1, 1, 2), (1, 1, 2, 2), (1, 2, 3, 4)])
def test_what_is_shown_is_marked_in_place_of_its_views(numbers: tuple[int, ...]) -> None:
    graph, nodes = regions(*numbers)
    assert save_between_regions(graph) == 1
    assert marked(nodes) == [True, False, False, False]


@pytest.mark.parametrize(
    "numbers",
    [
        (1, 1, 1, 1),  # read by its own region alone
        (1, 1, 1, None),  # by no region: whether to compute it again is the partitioner's to weigh
        (None, None, None, 2),  # not of a region
        (None, 1, 1, 2),  # what is shown is not of a region
        (1, 2, 2, 2),  # read as it is: the partitioner marks it
        (None, None, None, None),
    ],
)
def test_nothing_is_marked_where_nothing_is_handed_over_through_views(numbers: tuple[int | None, ...]) -> None:
    graph, nodes = regions(*numbers)
    assert save_between_regions(graph) == 0
    assert not any(marked(nodes))


def test_what_the_user_has_saved_already_is_left_alone() -> None:
    graph, nodes = regions(1, 1, 1, 2)
    nodes[0].meta["recompute"] = CheckpointPolicy.MUST_SAVE
    assert save_between_regions(graph) == 0
