"""What a look at a model puts back, whatever the model holds."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import te_compile

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOOKS = (te_compile.explain, functools.partial(te_compile.stats, loss=torch.sum))
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


@looks
@pytest.mark.parametrize("hook", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_hooks_that_a_first_forward_registers_are_registered_once(look: Callable[..., Any], hook: str) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.calls, self.is_hooked = nn.Linear(16, 16), 0, False

        def count(self, *_: Any) -> None:
            self.calls += 1

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_hooked:
                torch._dynamo.graph_break()
                getattr(self.fc, f"register_{hook}")(self.count)
                self.is_hooked = True
            y: Tensor = self.fc(x)
            return y

    model, x = Counting(), torch.randn(8, 16, requires_grad=True)
    look(model, x)
    assert not model.is_hooked and not any(each for name, each in vars(model.fc).items() if name.endswith("hooks"))
    model(x).sum().backward()
    assert model.calls == 1


@looks
def test_hooks_that_were_there_stay_if_a_forward_takes_them_away(look: Callable[..., Any]) -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.seen = nn.Linear(16, 16), list[int]()
            self.handle = self.fc.register_forward_hook(lambda *_: self.seen.append(1))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(x)
            torch._dynamo.graph_break()
            self.handle.remove()
            return y

    model, x = Once(), torch.randn(8, 16)
    look(model, x)
    model(x)
    model(x)
    assert model.seen == [1]


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


@pytest.mark.parametrize(
    "made", [torch.arange(18).view(2, 9)[:, :1], torch.arange(9)[::3], torch.randn(3, 4).cfloat().T]
)
def test_an_argument_may_lie_in_memory_as_it_likes(made: Tensor) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.table = nn.Linear(32, 32), nn.Buffer(torch.randn(32, 9)[:, 4:5])

        def forward(self, x: Tensor, given: Tensor) -> Tensor:
            self.table += 1
            return self.proj(x) * self.table.mT + given.abs().sum()

    model, before = Reads(), made.clone()
    table = model.table.clone()
    assert len(te_compile.explain(model, torch.randn(4, 32), made).rows) == 1
    assert torch.equal(made, before) and torch.equal(model.table, table)


def test_arguments_stay_as_they_were() -> None:
    def write(x: Tensor, seen: list[int], cache: transformers.DynamicCache) -> Tensor:
        x[0] = torch.nan
        seen.append(len(seen))
        cache.update(x[None, None], x[None, None], 0)
        return x

    x, seen, cache = torch.randn(8, 16), [0], transformers.DynamicCache()
    expected = x.clone()
    te_compile.explain(write, x, seen, cache)
    assert torch.equal(x, expected) and seen == [0] and cache.get_seq_length() == 0


class Counting(nn.Module):
    """It notes its calls in whatever its attributes hold."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.calls = nn.Linear(16, 16), nn.Buffer(torch.zeros(()))
        self.seen: list[int] = []
        self.by_name: dict[str, Any] = {"again": self.seen, "widths": {1}, "sums": [torch.zeros(16)]}
        self.last = torch.zeros(16)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(self.seen))
        self.by_name["widths"].add(x.shape[1])
        self.by_name["sums"][0] += x.sum(0)
        self.last.copy_(x[0])
        return self.proj(x)

    def notes(self) -> tuple[Any, ...]:
        assert self.by_name["again"] is self.seen
        tensors = (self.calls, self.last, self.by_name["sums"][0])
        return (*(float(each.abs().sum()) for each in tensors), list(self.seen), set(self.by_name["widths"]))


class Holder:
    """A callable object that has a model, in a list."""

    def __init__(self, model: nn.Module) -> None:
        self.models = [model]

    def __call__(self, x: Tensor) -> Tensor:
        return self.models[0](x)

    def run(self, x: Tensor) -> Tensor:
        return self(x)


@pytest.mark.parametrize(
    "way",
    [
        lambda model: model,
        lambda model: functools.partial(model),
        lambda model: functools.partial(lambda m, x: m(x), model),
        lambda model: Holder(model),
        lambda model: Holder(model).run,
        lambda model: lambda x, models={"one": model}: models["one"](x),
    ],
    ids=["module", "partial", "partial of a function", "object", "its method", "default"],
)
def test_what_a_model_notes_in_its_attributes_stays_as_it_was(way: Callable[[nn.Module], Callable[..., Any]]) -> None:
    model = Counting()
    model(torch.randn(8, 16))
    before = model.notes()
    assert len(te_compile.explain(way(model), torch.randn(8, 16)).rows) == 1
    assert model.notes() == before
    model(torch.randn(8, 16))
    assert model.notes() != before


def test_an_inference_tensor_that_is_written_to_stays_as_it_was() -> None:
    def write(x: Tensor) -> Tensor:
        return x.add_(1).relu()

    with torch.inference_mode():
        x = torch.randn(8, 16)
        expected = x.clone()
        te_compile.explain(write, x)
    assert torch.equal(x, expected)


def test_a_forward_that_writes_to_a_parameter_is_owned_up_to() -> None:
    class Clipped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.5, 0.5)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(16, 16), Clipped(16, 16))
    (note,) = te_compile.explain(model, torch.randn(8, 16)).notes
    assert "writes to the parameter 1.weight" in note
    (note,) = te_compile.stats(model, torch.randn(8, 16), loss=torch.mean).notes
    assert "writes to the parameter 1.weight" in note
