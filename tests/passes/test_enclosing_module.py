"""Names behind graph breaks: patterns and the rule about heads know a linear as the user's model does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_compile
from te_compile.passes import manager
from te_compile.passes.enclosing_module import enclosing_module
from tests.compiling import compiled, know_the_backend


@pytest.fixture(autouse=True)
def _a_fresh_dynamo() -> None:
    torch._dynamo.reset()
    know_the_backend()


class OnTheStack(nn.Module):
    """``lm_head`` is loaded before the call that breaks the graph, so the graph behind it has it as a variable of its
    own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.lm_head = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 96)

    @torch._dynamo.disable
    def opaque(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.opaque(self.body(x))).relu()


class WithAClosure(nn.Module):
    """Dynamo makes the closure anew behind the break, in code whose constants have no hash."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        def activation(t: Tensor) -> Tensor:
            return t.relu()

        x = self.first(x)
        torch._dynamo.graph_break()
        return activation(self.second(x))


def test_a_closure_may_live_across_a_break() -> None:
    model, x = WithAClosure(), torch.randn(8, 64)
    with manager.recording() as records:
        y = compiled(model)(x)
    assert [site.name for record in records for site in record.plan.sites] == ["first", "second"]
    assert (y - model(x)).norm() < 0.1 * model(x).norm()
    assert [row.name for row in te_compile.explain(model, x).rows] == ["first", "second"]


class Block(nn.Module):
    """Its end depends on data, so each block is compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if y.sum().item() > 1e9:
            y = y * 2
        return y.relu()


class Blocks(nn.Module):
    """Two of them in a loop, which Dynamo then leaves to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def verdicts(call: Any, x: Tensor) -> dict[str, str]:
    """Of each linear of one call its status."""
    with manager.recording() as records:
        call(x)
    return {site.name: site.status for record in records for site in record.plan.sites}


@pytest.mark.parametrize(
    "exclude", ["body", "*bod?", lambda name, info: name == "body"], ids=["name", "glob", "function"]
)
def test_a_module_on_the_stack_has_its_name(exclude: Any) -> None:
    x = torch.randn(8, 64)
    assert verdicts(compiled(OnTheStack(), exclude=exclude, lm_head=True), x) == {"body": "kept", "lm_head": "fp8"}
    assert verdicts(compiled(OnTheStack(), exclude="lm_head", lm_head=True), x) == {"body": "fp8", "lm_head": "kept"}
    assert verdicts(compiled(OnTheStack()), x) == {"body": "fp8", "lm_head": "kept"}, "a head, by its name"


def test_blocks_that_are_compiled_by_themselves_have_names_in_the_model() -> None:
    x = torch.randn(8, 64)
    for options in ({"exclude": "layers.0.*"}, {"include": "layers.1"}):
        assert verdicts(compiled(Blocks(), **options), x) == {"layers.0.fc": "kept", "layers.1.fc": "fp8"}
    # What a block calls its own linear fits too.
    assert verdicts(compiled(Blocks(), exclude="fc"), x) == {"layers.0.fc": "kept", "layers.1.fc": "kept"}
    assert verdicts(compiled(Blocks(), include="fc"), x) == {"layers.0.fc": "fp8", "layers.1.fc": "fp8"}


class Outer(nn.Module):
    """A module around another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="te_fp8", options={"compiler": "aot_eager"})
    return model


@pytest.mark.parametrize(
    ("make", "start"),
    [
        (lambda: Outer(compiled(Blocks())), ""),
        (lambda: Outer(compiled_in_place(Blocks())), ""),
        (lambda: compiled(Outer(Blocks())), "inner."),
        (lambda: compiled_in_place(Outer(Blocks())), "inner."),
    ],
    ids=["inside", "inside, in place", "outside", "outside, in place"],
)
def test_names_start_at_what_is_compiled_and_not_at_what_calls_it(make: Callable[[], nn.Module], start: str) -> None:
    expected = {f"{start}layers.0.fc": "fp8", f"{start}layers.1.fc": "fp8"}
    assert verdicts(make(), torch.randn(8, 64)) == expected


def test_a_function_has_no_module_and_keeps_dynamos_names() -> None:
    encoder, decoder = nn.Linear(64, 64), nn.Linear(64, 64)
    assert verdicts(compiled(lambda x: decoder(encoder(x))), torch.randn(8, 64)) == {"encoder": "fp8", "decoder": "fp8"}


def test_outside_of_a_compilation_there_is_none() -> None:
    seen: list[nn.Module | None] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(enclosing_module())
            return x

    assert enclosing_module() is None
    Looks()(torch.zeros(1))
    assert seen == [None]


class Wrapped(nn.Module):
    """Its call goes to a method that the module holds, as accelerate's hooks have it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(64, 64), nn.Linear(64, 64)
        self.forward = self.forward  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.fc(x).relu())


def test_a_method_that_the_module_holds_gives_no_prefix() -> None:
    model, x = nn.Sequential(Wrapped(), Wrapped()), torch.randn(8, 64)
    options: dict[str, Any] = {"exclude": ["0.fc", "1.out"], "compiler": "aot_eager"}
    for each, names in ((model, ("0.fc", "0.out", "1.fc", "1.out")), (model[0], ("fc", "out"))):
        report = te_compile.explain(each, x, options=options)
        assert [row.name for row in report.rows] == list(names)
        with manager.recording() as records:
            compiled(each, **options)(x)
        sites = [(site.name, site.status) for record in records for site in record.plan.sites]
        assert sites == [(row.name, row.status) for row in report.rows]
        assert not any("graph break" in note for note in report.notes)
