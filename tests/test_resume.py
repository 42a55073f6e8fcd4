"""A training that is stopped, saved and taken up again elsewhere goes on as if nothing had happened."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import te_compile
from tests.compiling import compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def model() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[Tensor]:
    """The loss of each step."""
    fast = compiled(net, recipe="delayed amax_history_len=4")
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = (fast(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("with_state", [True, False])
def test_a_saved_training_goes_on_bit_for_bit_and_only_with_its_state(tmp_path: Path, with_state: bool) -> None:
    # Ever smaller batches: the history, not the data at hand, decides the scale.
    batches = [torch.randn(8, 32) * 2.0 ** -(3 * step) for step in range(6)]
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    trained(net, optimizer, batches[:3])
    te_compile.save_state(net, tmp_path / "fp8.safetensors")
    other = copy.deepcopy(net)
    other_optimizer = torch.optim.AdamW(other.parameters(), 1e-2)
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected = trained(net, optimizer, batches[3:])

    torch._dynamo.reset()
    if with_state:
        te_compile.load_state(other, tmp_path / "fp8.safetensors")
    got = trained(other, other_optimizer, batches[3:])
    same = all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    same &= all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))
    assert same is with_state
