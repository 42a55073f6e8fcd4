"""Gradients of logits that are returned beside a loss: made only for who asks, and the same as in eager mode."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import te_compile
from te_compile.deferred_gradients import LostGradientError
from te_compile.ops import deferred_gradient
from te_compile.passes import manager
from tests.compiling import compiled, gradients, loss_backwards

CLASSES, WIDTH = 1030, 16
pytestmark = pytest.mark.usefixtures("fresh_dynamo", "loss_kernels")
COMPILERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


class Speaker(nn.Module):
    """Embeds, projects, and returns loss and logits as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.lm_head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """ids, labels: [B, S]."""
        logits = self.lm_head(self.embedding(ids).tanh())
        loss = F.cross_entropy(logits.float().view(-1, CLASSES), labels.view(-1))
        return {"loss": loss, "logits": logits}


@pytest.fixture
def speaker() -> Speaker:
    return Speaker().bfloat16()


@pytest.fixture
def ids() -> tuple[Tensor, Tensor]:
    return torch.randint(0, CLASSES, (2, 5)), torch.randint(0, CLASSES, (2, 5))


Way = Callable[[Callable[..., Any], tuple[Tensor, Tensor], Tensor], None]


def loss_alone(run: Callable[..., Any], ids: tuple[Tensor, Tensor], dy: Tensor) -> None:
    run(*ids)["loss"].backward()


def both(run: Callable[..., Any], ids: tuple[Tensor, Tensor], dy: Tensor) -> None:
    results = run(*ids)
    (results["loss"] + (results["logits"] * dy).sum()).backward()


def logits_alone(run: Callable[..., Any], ids: tuple[Tensor, Tensor], dy: Tensor) -> None:
    run(*ids)["logits"].backward(dy)


def logits_twice(run: Callable[..., Any], ids: tuple[Tensor, Tensor], dy: Tensor) -> None:
    results = run(*ids)
    torch.autograd.backward([results["logits"], results["logits"], results["loss"]], [dy, dy, torch.tensor(1.0)])


def one_after_the_other(run: Callable[..., Any], ids: tuple[Tensor, Tensor], dy: Tensor) -> None:
    results = run(*ids)
    results["loss"].backward(retain_graph=True)
    results["logits"].backward(dy)


def interleaved(run: Callable[..., Any], ids: tuple[Tensor, Tensor], dy: Tensor) -> None:
    first, second = run(*ids), run(*reversed(ids))
    second["logits"].backward(dy)
    first["loss"].backward()


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("way", [loss_alone, both, logits_alone, logits_twice, one_after_the_other, interleaved])
def test_gradients_are_those_of_eager_mode(
    way: Way, compiler: str, speaker: Speaker, ids: tuple[Tensor, Tensor]
) -> None:
    dy = torch.randn(2, 5, CLASSES, dtype=torch.bfloat16) / 100
    run = compiled(speaker, compiler=compiler)
    kept = torch._functorch.config.patch(donated_buffer=False)  # a graph may be walked back twice
    with kept, manager.recording() as records:
        way(run, ids, dy)
    found = gradients(speaker)
    speaker.zero_grad()
    way(speaker, ids, dy)
    expected = gradients(speaker)
    assert any(loss_backwards(record, defers=True) for record in records)
    for name, each in expected.items():  # both round the gradient of the logits, eager mode each of two and their sum
        assert (found[name] - each).float().norm() <= 2**-7 * each.float().norm(), name
    assert not any(waiting.gradient is not None for waiting in deferred_gradient._waiting.values())


def test_nothing_as_large_as_the_logits_is_made_for_nobody(speaker: Speaker, ids: tuple[Tensor, Tensor]) -> None:
    class Zeros(TorchDispatchMode):
        """Notes how many numbers are filled with zeros at once."""

        def __init__(self) -> None:
            super().__init__()
            self.sizes: list[int] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if "zeros" in str(func) or "zero_" in str(func) or "fill" in str(func):
                self.sizes.append(result.numel())
            return result

    def filled(run: Callable[..., Any]) -> int:
        run(*ids)["loss"].backward()
        results = run(*ids)
        with Zeros() as zeros:
            results["loss"].backward()
        return max(zeros.sizes, default=0)

    logits = 10 * CLASSES
    assert filled(compiled(speaker, defer_logits=False)) >= logits
    assert filled(compiled(speaker)) < logits


@pytest.mark.parametrize("compiler", COMPILERS)
def test_logits_are_the_models_and_differentiable(compiler: str, speaker: Speaker, ids: tuple[Tensor, Tensor]) -> None:
    run, expected = compiled(speaker, compiler=compiler), speaker(*ids)["logits"].detach()
    results = run(*ids)
    assert results["logits"].requires_grad
    before = results["logits"].detach().clone()
    torch.testing.assert_close(before, expected, rtol=2**-7, atol=2**-7)
    results["loss"].backward()
    assert torch.equal(results["logits"], before)  # the backward pass owns what was saved, but not this
    with torch.no_grad():
        assert not run(*ids)["logits"].requires_grad


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_graph_that_data_parallelism_cuts_is_compiled_once(
    compiler: str, speaker: Speaker, ids: tuple[Tensor, Tensor], one_rank: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo calls the code of a piece with fake tensors, to learn the layouts that the next piece is given. A ticket
    has no number then. A piece that fails there has the whole graph compiled anew, broken where it returns."""
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1)
    dy = torch.randn(2, 5, CLASSES, dtype=torch.bfloat16) / 100
    run = compiled(nn.parallel.DistributedDataParallel(speaker, bucket_cap_mb=0.02), compiler=compiler)
    torch._dynamo.utils.counters.clear()
    with manager.recording() as records:
        both(run, ids, dy)
    found = gradients(speaker)
    speaker.zero_grad()
    both(speaker, ids, dy)
    assert len(records) == 2 and any(loss_backwards(record, defers=True) for record in records)
    assert not any("ackend compiler" in reason for reason in torch._dynamo.utils.counters["graph_break"])
    for name, each in gradients(speaker).items():
        assert (found[name] - each).float().norm() <= 2**-7 * each.float().norm(), name


def test_a_forward_that_is_run_anew_says_that_the_gradient_is_lost(
    speaker: Speaker, ids: tuple[Tensor, Tensor]
) -> None:
    def around(run: Callable[..., Any]) -> dict[str, Tensor]:
        results: dict[str, Tensor] = checkpoint(run, *ids, use_reentrant=False)
        return results

    run = compiled(speaker)
    around(run)["loss"].backward()
    with pytest.raises(LostGradientError, match="defer_logits=False"):
        around(run)["logits"].sum().backward()
    around(compiled(speaker, defer_logits=False))["logits"].sum().backward()


@pytest.mark.parametrize("compiler", COMPILERS)
def test_where_anything_may_be_made_anew_the_backward_pass_has_the_ticket_that_was_returned(
    compiler: str, speaker: Speaker, ids: tuple[Tensor, Tensor]
) -> None:
    """A ticket that was made anew would have another number. As partitioners go by default, no operator is that they
    do not know."""
    bans = ("not_in_allowlist", "used_far_apart", "long_fusible_chains", "materialized_backward", "reductions")
    none = torch._functorch.config.patch({f"ban_recompute_{each}": False for each in bans})
    dy = torch.randn(2, 5, CLASSES, dtype=torch.bfloat16) / 100
    with none, manager.recording() as records:
        both(compiled(speaker, compiler=compiler), ids, dy)
    found = gradients(speaker)
    speaker.zero_grad()
    both(speaker, ids, dy)
    assert any(loss_backwards(record, defers=True) for record in records)
    for name, each in gradients(speaker).items():
        assert (found[name] - each).float().norm() <= 2**-7 * each.float().norm(), name


def test_tickets_lie_on_the_host_whatever_the_default_device_is() -> None:
    """Nobody waits for a device to read one. On a GPU the operators are called past the dispatcher, as here."""
    with torch.device("meta"):
        ticket = deferred_gradient._ticket(torch.randn(3, device="cpu"))
    assert ticket.device.type == "cpu"


def test_what_nobody_took_dies_with_its_graph(speaker: Speaker, ids: tuple[Tensor, Tensor]) -> None:
    def stop(_: Tensor) -> None:
        raise ZeroDivisionError

    results = compiled(speaker)(*ids)
    results["loss"].register_hook(stop)
    dy = torch.randn_like(results["logits"])
    alive = weakref.ref(dy)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.backward([results["logits"], results["loss"]], [dy, torch.tensor(1.0)])
    del results, dy
    gc.collect()
    assert alive() is None


def test_the_option_is_there_for_all_places(speaker: Speaker, ids: tuple[Tensor, Tensor]) -> None:
    with te_compile.configure(defer_logits=False), manager.recording() as records:
        compiled(speaker)(*ids)
    assert not any(loss_backwards(record, defers=True) for record in records)
