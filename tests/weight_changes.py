"""What changes the weights of a model, and how often they are quantised for that."""

from __future__ import annotations

import dataclasses
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_compile import weight_cache
from te_compile.ops import registry


class Launches:
    """Counts the launches that quantise weights, and knows what they made as long as somebody keeps it."""

    def __init__(self) -> None:
        self.count = 0
        self.made: list[weakref.ref[Tensor]] = []

    def since(self) -> int:
        """How many there were since this was asked last."""
        count, self.count = self.count, 0
        return count

    def alive(self) -> int:
        """How many of the tensors that were made are kept by anybody."""
        gc.collect()
        return sum(made() is not None for made in self.made)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    counted = Launches()
    key = ("quantize_weights", registry.REFERENCE)
    original = registry._TABLE[key]

    def quantize(*args: Any) -> Any:
        counted.count += 1
        outputs = original.function(*args)
        counted.made += map(weakref.ref, outputs)
        return outputs

    monkeypatch.setitem(registry._TABLE, key, dataclasses.replace(original, function=quantize))
    return counted


def addresses_of_copies(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Where the FP8 copies lie that each call from now on reads."""
    addresses = []
    original = weight_cache.CopiesOfGroup.inputs

    def watched(*args: Any) -> Any:
        inputs = original(*args)
        addresses.append([each.data_ptr() for each in inputs])
        return inputs

    monkeypatch.setattr(weight_cache.CopiesOfGroup, "inputs", watched)
    return addresses


def data() -> Tensor:
    return torch.randn(random.randrange(3, 20), 32)


def backward(y: Tensor) -> None:
    y.square().mean().backward()


def step_of(model: nn.Module, kind: str) -> None:
    """One step of an optimizer on random gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    settings: dict[str, dict[str, Any]] = {
        "SGD": {},
        "Adam": {"foreach": False},
        "Adam, foreach": {"foreach": True},
        "Adam, fused": {"fused": True},
    }
    kind_of = torch.optim.SGD if kind == "SGD" else torch.optim.Adam
    kind_of(model.parameters(), lr=0.1, **settings[kind]).step()
    model.zero_grad()


def edit_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.b.weight.mul_(-2)


def load(model: nn.Module, **options: Any) -> None:
    model.load_state_dict({name: torch.randn_like(entry) for name, entry in model.state_dict().items()}, **options)


def edit_data(model: nn.Module) -> None:
    version = model.b.weight._version
    model.b.weight.data.add_(torch.randn_like(model.b.weight), alpha=0.02)  # not so much that it outgrows its scale
    assert model.b.weight._version == version, "autograd sees this change: the test is about nothing"


def new_data(model: nn.Module) -> None:
    model.b.weight.data = torch.randn_like(model.b.weight)


def new_parameter(model: nn.Module) -> None:
    model.b.weight = nn.Parameter(torch.randn_like(model.b.weight))


def optimizer_behind_autograds_back(model: nn.Module) -> None:
    """As those do that keep parameters in one flat buffer."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data - 0.01 * torch.randn_like(parameter))


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    **{kind: lambda model, kind=kind: step_of(model, kind) for kind in ("SGD", "Adam", "Adam, foreach", "Adam, fused")},
    "an edit in place": edit_in_place,
    "load_state_dict": load,
    "load_state_dict(assign=True)": lambda model: load(model, assign=True),
    "an edit of .data": edit_data,
    "a new .data": new_data,
    "a new parameter": new_parameter,
    "every parameter by .data": optimizer_behind_autograds_back,
}


class Packed(nn.Module):
    """Weights that are parts of one parameter, an expression of one, and odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randn(96, 32) / 6)
        self.around_one = nn.Parameter(torch.randn(32, 32) / 6)
        self.odd = nn.Linear(32, 37)
        self.odd_again = nn.Linear(37, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, part) for part in self.packed.chunk(3))
        return self.odd_again(self.odd(F.linear(q.sin() * k.cos() + v, 1 + self.around_one))) @ self.packed[:32]
