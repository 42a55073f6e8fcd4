"""How many kernels a captured graph is taken to launch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_compile.passes import speed
from te_compile.passes.launches import Launches, launches_of
from tests.capturing import captured, regions_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def launches(model: nn.Module | Callable[..., object], *inputs: Tensor) -> Launches:
    regions, _ = regions_of(captured(model, *inputs)[0])
    return launches_of(region.graph for region in regions)


class Layer(nn.Module):
    """The layer by which a linear's price was measured, small."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.fc1, self.fc2 = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 16)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def test_a_layer_of_four_linears_is_eight() -> None:
    assert speed.LAUNCHES_OF_A_LINEAR * 4 == 8
    assert launches(Layer(), torch.randn(2, 8, 32)) == Launches(8, 0)
    with torch.no_grad():
        assert launches(Layer(), torch.randn(2, 8, 32)) == Launches(0, 8)


def test_routing_has_no_gradient_but_for_the_weights_of_experts() -> None:
    def route(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores, chosen = torch.softmax(x @ gate, dim=-1).topk(2)
        order = chosen.flatten().argsort()
        return scores, order, torch.histc(chosen.float(), 8, 0, 7).cumsum(0)

    x, gate = torch.randn(16, 32), torch.randn(32, 8, requires_grad=True)
    assert launches(route, x, gate) == Launches(3, 3)


def test_pointwise_operators_and_views_are_none() -> None:
    def run(x: Tensor) -> Tensor:
        return (x * 2 + 1).exp().view(4, -1).transpose(0, 1)[1:].clamp(0, 1)

    assert launches(run, torch.randn(8, 8, requires_grad=True)) == Launches(0, 0)


def test_what_is_written_in_place_is_one_though_nobody_reads_it() -> None:
    def run(x: Tensor, index: Tensor, y: Tensor) -> Tensor:
        x.index_add_(0, index, y)
        x.cumsum(0)
        return x

    given = torch.zeros(8, 4), torch.tensor([1, 2]), torch.randn(2, 4)
    assert launches(run, *given) == Launches(0, 1)
