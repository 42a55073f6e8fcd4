"""The gradient of logits takes their memory where nobody can see them any more, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn

from te_compile.ops import cross_entropy
from tests.compiling import compiled, gradients

CLASSES, WIDTH = 1030, 16
pytestmark = pytest.mark.usefixtures("fresh_dynamo", "loss_kernels")


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def compiler(request: pytest.FixtureRequest) -> str:
    """Inductor writes code of its own around the operator."""
    found: str = request.param
    return found


Results = Callable[[Tensor, Tensor], Any]


class Speaker(nn.Module):
    """Embeds, projects, and returns what ``results`` makes of loss and logits."""

    def __init__(self, results: Results, bias: bool = True) -> None:
        super().__init__()
        self.results = results
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.lm_head = nn.Linear(WIDTH, CLASSES, bias=bias)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        """ids, labels: [B, S]."""
        logits = self.lm_head(self.embedding(ids).tanh())
        return self.results(F.cross_entropy(logits.float().view(-1, CLASSES), labels.view(-1)), logits)


def loss_alone(loss: Tensor, logits: Tensor) -> Any:
    return {"loss": loss}


def both(loss: Tensor, logits: Tensor) -> Any:
    return {"loss": loss, "logits": logits}


def batch() -> tuple[Tensor, Tensor]:
    return torch.randint(0, CLASSES, (2, 5)), torch.randint(0, CLASSES, (2, 5))


@pytest.fixture
def overwritten(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each backward of a loss that was permitted to overwrite the logits, whether it did."""
    noted: list[bool] = []
    place = cross_entropy._place

    def noting(logits: Tensor, overwrite: bool) -> Tensor | None:
        found = place(logits, overwrite)
        noted.extend([found is not None] * overwrite)
        return found

    monkeypatch.setattr(cross_entropy, "_place", noting)
    return noted


Step = Callable[..., object]


def trained(model: nn.Module, run: Callable[..., Any], step: Step, *inputs: Tensor) -> dict[str, Tensor]:
    """The gradients of one ``step``."""
    model.zero_grad()
    step(run, *inputs)
    return gradients(model)


def drop(run: Callable[..., Any], *inputs: Tensor) -> None:
    """As most do: what comes beside the loss is gone before the backward pass begins."""
    run(*inputs)["loss"].backward()


def keep(run: Callable[..., Any], *inputs: Tensor) -> None:
    results = run(*inputs)
    before = results["logits"].detach().clone()
    results["loss"].backward()
    assert torch.equal(results["logits"], before)


def keep_a_part(run: Callable[..., Any], *inputs: Tensor) -> None:
    results = run(*inputs)
    loss, part = results["loss"], results["logits"].detach()[:, -1]
    before = part.clone()
    del results
    loss.backward()
    assert torch.equal(part, before)


def ask_for_the_logits_gradient(run: Callable[..., Any], *inputs: Tensor) -> None:
    """By a second loss, whose own backward has let go of the logits by then."""
    results = run(*inputs)
    total = results["loss"] + results["logits"].float().square().mean()
    del results
    total.backward()


def go_twice(run: Callable[..., Any], *inputs: Tensor) -> None:
    loss = run(*inputs)["loss"]
    loss.backward(retain_graph=True)
    loss.backward()


def same_gradients(compiler: str, results: Results, step: Step, bias: bool = True, **options: Any) -> None:
    """Of three steps with permission to overwrite and one without."""
    model, inputs = Speaker(results, bias).bfloat16(), batch()
    run = compiled(model, compiler=compiler, **options)
    for _ in range(3):
        found = trained(model, run, step, *inputs)
    torch._dynamo.reset()
    expected = trained(model, compiled(model, compiler=compiler, overwrite_logits=False, **options), step, *inputs)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("results", [loss_alone, both])
def test_it_does_and_gradients_stay(results: Results, bias: bool, overwritten: list[bool], compiler: str) -> None:
    same_gradients(compiler, results, drop, bias)
    assert overwritten == [True] * 3


def test_a_second_loss_on_the_logits_is_no_obstacle(overwritten: list[bool], compiler: str) -> None:
    same_gradients(compiler, both, ask_for_the_logits_gradient)
    assert overwritten == [True] * 3


@pytest.mark.parametrize("step", [keep, keep_a_part])
def test_logits_that_somebody_holds_stay(step: Step, overwritten: list[bool], compiler: str) -> None:
    same_gradients(compiler, both, step)
    assert overwritten == [False] * 3


def test_logits_stay_as_long_as_the_graph_is_kept(overwritten: list[bool], compiler: str) -> None:
    with torch._functorch.config.patch(donated_buffer=False):  # else PyTorch lets nobody keep one
        same_gradients(compiler, both, go_twice)
    assert overwritten == [False, True] * 3


@pytest.mark.parametrize(
    ("results", "options"),
    [
        (both, {"defer_logits": False}),
        (lambda loss, logits: {"loss": loss, "logits": logits.detach()}, {}),
        (lambda loss, logits: {"loss": loss, "other": logits, "logits": logits.detach()}, {}),
        (lambda loss, logits: {"loss": loss, "logits": logits[:, -1]}, {}),
    ],
    ids=["not deferred", "detached", "detached beside deferred", "a part"],
)
def test_logits_that_are_returned_otherwise_stay(
    results: Results, options: dict[str, Any], overwritten: list[bool], compiler: str
) -> None:
    """What the caller holds may be the very tensor that was saved."""
    same_gradients(compiler, results, keep, **options)
    assert not any(overwritten)


def test_logits_that_the_caller_gave_stay(overwritten: list[bool], compiler: str) -> None:
    def function(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)

    given, labels = torch.randn(10, CLASSES, requires_grad=True), torch.randint(0, CLASSES, (10,))
    before = given.detach().clone()
    compiled(function, compiler=compiler)(given, labels).backward()
    assert torch.equal(given, before) and not overwritten
