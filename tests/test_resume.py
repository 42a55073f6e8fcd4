"""A training that is stopped, saved and taken up again elsewhere goes on as if nothing had happened."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import te_compile
from tests.compiling import compiled, train_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def model() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def trained(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Tensor],
    fp8_format: str = "HYBRID",
    micro_batches: int = 1,
) -> list[Tensor]:
    """The loss of each step, of all its micro-batches."""
    fast = compiled(net, recipe=f"delayed amax_history_len=4 fp8_format={fp8_format}")
    losses = []
    for x in batches:
        optimizer.zero_grad()
        of_step = torch.zeros(())
        for part in x.chunk(micro_batches):
            loss = (fast(part) - part).square().mean()
            loss.backward()
            of_step += loss.detach()
        optimizer.step()
        losses.append(of_step)
    return losses


@pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_saved_training_goes_on_bit_for_bit_and_only_with_its_state(
    tmp_path: Path, micro_batches: int, with_state: bool, fp8_format: str
) -> None:
    # Ever smaller batches: the history, not the data at hand, decides the scale.
    batches = [torch.randn(8, 32) * 2.0 ** -(3 * step) for step in range(6)]
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    trained(net, optimizer, batches[:3], fp8_format, micro_batches)
    te_compile.save_state(net, tmp_path / "fp8.safetensors")
    other = copy.deepcopy(net)
    other_optimizer = torch.optim.AdamW(other.parameters(), 1e-2)
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected = trained(net, optimizer, batches[3:], fp8_format, micro_batches)

    torch._dynamo.reset()
    if with_state:
        te_compile.load_state(other, tmp_path / "fp8.safetensors")
    got = trained(other, other_optimizer, batches[3:], fp8_format, micro_batches)
    same = all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    same &= all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))
    assert same is with_state


@pytest.mark.parametrize(("before", "after"), [("HYBRID", "E4M3"), ("E4M3", "HYBRID")])
@pytest.mark.parametrize("in_a_file", [True, False])
def test_a_training_goes_on_with_another_format(tmp_path: Path, before: str, after: str, in_a_file: bool) -> None:
    """Its first step is that of a run which had this format all the time, and not one of clipped gradients."""
    net, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(16, 32)
    twin = copy.deepcopy(net)

    def gradient(of: nn.Module, fp8_format: str) -> Tensor:
        torch._dynamo.reset()
        return train_step(of, compiled(of, recipe=f"delayed fp8_format={fp8_format}"), x)[1]["0.weight"]

    gradient(net, before)
    if in_a_file:
        te_compile.save_state(net, tmp_path / "fp8.safetensors")
        net = copy.deepcopy(net)
        te_compile.load_state(net, tmp_path / "fp8.safetensors")
    gradient(twin, after)
    assert torch.equal(gradient(net, after), gradient(twin, after))
