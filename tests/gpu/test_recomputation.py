"""Checkpointing around compiled blocks on a GPU: Inductor's code, kernels, replays and kept copies of weights."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_compile.state_files import state_dict
from tests.compiling import BACKEND
from tests.needs import FP8_GPU

pytestmark = [*FP8_GPU, pytest.mark.usefixtures("fresh_dynamo")]


class Block(nn.Module):
    """Two halves of a residual stream: a norm, a linear, an activation, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def trained(blocks: nn.ModuleList, recomputed: bool, delayed: bool, **options: Any) -> list[Tensor]:
    """Outputs, gradients and states of six steps: later ones are replayed. delayed: both micro-batches' backward passes
    come after both forwards, the first step's, which knows no scales, among them."""
    blocks = copy.deepcopy(blocks)
    for block in blocks:
        block.compile(backend=BACKEND, options={"cost_model": False, **options})
    around = partial(checkpoint, use_reentrant=False) if recomputed else lambda block, x: block(x)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.01)
    draw = torch.Generator("cuda").manual_seed(1)
    seen: list[Tensor] = []
    for step in range(6):
        losses = []
        for _ in range(2):
            x = 2.0**step * torch.randn(64, 256, generator=draw, device="cuda", dtype=torch.bfloat16)
            for block in blocks:
                x = around(block, x)
            losses.append(x.float().square().mean())
            if not delayed:
                losses[-1].backward()
        if delayed:
            for loss in losses:
                loss.backward()
        seen += [loss.detach() for loss in losses]
        seen += [weight.grad.clone() for weight in blocks.parameters()]
        seen += [each.clone() for each in state_dict(blocks).values()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.fixture
def blocks() -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(2)).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("options", [{}, {"cache_weights": False}, {"save_memory": True}], ids=str)
def test_a_checkpoint_around_a_compiled_block_changes_no_bit(
    options: dict[str, Any], delayed: bool, blocks: nn.ModuleList
) -> None:
    expected = trained(blocks, False, delayed, **options)
    found = trained(blocks, True, delayed, **options)
    assert all(bool(each.isfinite().all()) for each in expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_backward_passes_of_a_first_step_that_come_late_are_measured(blocks: nn.ModuleList) -> None:
    """Of its forwards the second one knows scales, and so do all states when the first one's backward begins."""
    late, soon = (trained(blocks, False, delayed) for delayed in (True, False))
    first = 2 + len(list(blocks.parameters()))
    for one, other in zip(late[2:first], soon[2:first], strict=True):
        similar = F.cosine_similarity(one.float().flatten(), other.float().flatten(), dim=0)
        assert similar > 0.99
