"""What a look at a model puts back, whatever the model holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import te_compile

LOOKS = (te_compile.explain, partial(te_compile.stats, loss=torch.sum))
looks = pytest.mark.parametrize("look", LOOKS, ids=("explain", "stats"))


@looks
def test_a_model_that_scales_its_weights_once_still_knows_that_it_has(look: Callable[..., Any]) -> None:
    class Rescaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
            self.is_rescaled, self.cache = False, list[Tensor]()

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_rescaled:
                with torch.no_grad():
                    self.fc.weight.div_(2)
                self.is_rescaled = True
            self.cache.append(x)
            return self.norm(self.fc(x))

    model, x = Rescaled(), torch.randn(8, 16)
    expected = model.fc.weight.detach() / 2
    look(model, x)
    assert not model.norm.running_mean.any() and model.cache == []
    model(x)
    assert torch.equal(model.fc.weight, expected)


def made(layout: torch.layout) -> Tensor:
    """A tensor of this layout."""
    if layout == torch.jagged:
        return torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=layout)
    return torch.eye(16).to_sparse(layout=layout)


def values_of(x: Tensor) -> Tensor:
    """Its numbers, in its own memory."""
    return x.detach()._values() if x.layout == torch.sparse_coo else x.detach().values()


@looks
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.jagged], ids=str)
def test_a_tensor_of_another_layout_is_put_back_and_keeps_no_other_from_it(
    layout: torch.layout, look: Callable[..., Any]
) -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", made(layout))
            self.fc, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

        @torch._dynamo.disable
        def double(self, x: Tensor, given: Tensor) -> Tensor:
            for each in (self.held, given):
                values_of(each).mul_(2)
            return x

        def forward(self, x: Tensor, given: Tensor) -> Tensor:
            return self.norm(self.fc(self.double(x, given)))

    model, given = Doubling(), made(layout)
    before = [values_of(each).clone() for each in (model.held, given)]
    look(model, torch.randn(8, 16), given)
    assert not model.norm.running_mean.any()
    for each, value in zip((model.held, given), before, strict=True):
        assert each.layout == layout and torch.equal(values_of(each), value)


@looks
def test_a_parametrization_is_asked_for_no_weight_beyond_the_forward(look: Callable[..., Any]) -> None:
    model = nn.Sequential(spectral_norm(nn.Linear(16, 16)), nn.Linear(16, 16))
    before = copy.deepcopy(model.state_dict())
    look(model, torch.randn(8, 16))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_a_weight_that_cannot_be_read_is_not() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(16, 16))

        @property
        def weight(self) -> Tensor:
            raise NotImplementedError

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.matrix

    (row,) = te_compile.explain(Packed(), torch.randn(8, 16)).rows
    assert row.status == "fp8"
