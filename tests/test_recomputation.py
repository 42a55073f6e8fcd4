"""Checkpointing around blocks that are compiled by themselves: what is run anew repeats the first time, to the bit."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from te_compile import recomputation, state
from te_compile.ops.scaling import SCALE
from te_compile.recomputation import FirstPass, checkpoints
from te_compile.state_files import state_dict
from tests.compiling import BACKEND

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Around = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """An MLP beside a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.1, self.training))


class Stack(nn.Module):
    """Three blocks, or one that runs three times, each inside of ``around``."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(1 if shared else 3))
        self.around: Around = plain

    def forward(self, x: Tensor) -> Tensor:
        for i in range(3):
            x = self.around(self.blocks[i % len(self.blocks)], x)
        return x


# --- what stands around a block ---------------------------------------------------------------------------------------


def plain(block: nn.Module, x: Tensor) -> Tensor:
    """No checkpoint."""
    return block(x)


def checkpointed(block: Callable[..., Tensor], x: Tensor) -> Tensor:
    result: Tensor = checkpoint(block, x, use_reentrant=False)
    return result


def to_the_end(block: nn.Module, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return checkpointed(block, x)


def nested(block: nn.Module, x: Tensor) -> Tensor:
    return checkpointed(partial(checkpointed, block), x)


def thrice_nested(block: nn.Module, x: Tensor) -> Tensor:
    return checkpointed(partial(nested, block), x)


def among_other_hooks(block: nn.Module, x: Tensor) -> Tensor:
    def on_cpu(x: Tensor) -> Tensor:
        with save_on_cpu():
            return block(x)

    with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        return checkpointed(on_cpu, x)


AROUND = (checkpointed, to_the_end, nested, thrice_nested, among_other_hooks)

# --- when a backward pass runs ----------------------------------------------------------------------------------------

Schedule = Callable[[Callable[[Tensor], Tensor], list[Tensor]], list[Tensor]]


def loss_of(result: Tensor) -> Tensor:
    return result.square().mean()


def one_by_one(run: Callable[[Tensor], Tensor], batches: list[Tensor]) -> list[Tensor]:
    results = []
    for batch in batches:
        results.append(run(batch))
        loss_of(results[-1]).backward()
    return results


def last_first(run: Callable[[Tensor], Tensor], batches: list[Tensor]) -> list[Tensor]:
    results = [run(batch) for batch in batches]
    for result in reversed(results):
        loss_of(result).backward()
    return results


def first_first(run: Callable[[Tensor], Tensor], batches: list[Tensor]) -> list[Tensor]:
    results = [run(batch) for batch in batches]
    for result in results:
        loss_of(result).backward()
    return results


def at_once(run: Callable[[Tensor], Tensor], batches: list[Tensor]) -> list[Tensor]:
    results = [run(batch) for batch in batches]
    sum(map(loss_of, results), torch.zeros(())).backward()
    return results


def twice(run: Callable[[Tensor], Tensor], batches: list[Tensor]) -> list[Tensor]:
    results = [run(batch) for batch in batches]
    for result in results:
        loss = loss_of(result)
        loss.backward(retain_graph=True)
        loss.backward()
    return results


def beside_others(run: Callable[[Tensor], Tensor], batches: list[Tensor]) -> list[Tensor]:
    """Calls without a gradient and forwards whose backward never runs in between."""
    results = []
    for batch in batches:
        results.append(run(batch))
        with torch.no_grad():
            results.append(run(3 * batch))
        run(5 * batch)
        loss_of(results[-2]).backward()
    return results


SCHEDULES = (one_by_one, last_first, first_first, at_once, twice, beside_others)


def trained(model: Stack, around: Around, schedule: Schedule, **options: Any) -> list[Tensor]:
    """All that three steps of two growing micro-batches give."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.compile(backend=BACKEND, options={"compiler": "aot_eager", **options})
    model.around = around
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    seen: list[Tensor] = []
    for step in range(3):
        batches = [4.0**step * 2.0**i * torch.randn(16, 32, generator=draw) for i in range(2)]
        batches = [batch.requires_grad_() for batch in batches]
        optimizer.zero_grad()
        seen += schedule(model, batches)
        gradients = [tensor.grad for tensor in (*batches, *model.parameters())]
        seen += [gradient.clone() for gradient in gradients if gradient is not None]
        seen += [each.clone() for each in state_dict(model).values()]
        optimizer.step()
    return seen


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_checkpoint_around_a_block_changes_no_bit_whatever_the_order_of_backward_passes(schedule: Schedule) -> None:
    model = Stack()
    assert same(trained(model, checkpointed, schedule), trained(model, plain, schedule))


@pytest.mark.parametrize("schedule", [one_by_one, first_first, twice])
def test_a_block_that_runs_several_times_repeats_each_of_them(schedule: Schedule) -> None:
    model = Stack(shared=True)
    assert same(trained(model, checkpointed, schedule), trained(model, plain, schedule))


@pytest.mark.parametrize("around", AROUND)
def test_any_checkpoint_does(around: Around) -> None:
    model = Stack(shared=True)
    assert same(trained(model, around, last_first), trained(model, plain, last_first))


@pytest.mark.parametrize(
    "options", [{"cache_weights": False}, {"save_memory": True}, {"compiler": "inductor"}], ids=str
)
def test_under_any_option(options: dict[str, Any]) -> None:
    model = Stack()
    assert same(trained(model, checkpointed, last_first, **options), trained(model, plain, last_first, **options))


def test_a_checkpoint_that_saves_the_results_of_some_operators() -> None:
    """It counts the operators of both passes, ours among them."""

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = any(part in str(operator) for part in ("mm", "cat", "copy", "clone", "amax"))
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    def selective(block: nn.Module, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        result: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return result

    model = Stack()
    options = {"compiler": "inductor"}  # the mode of such a checkpoint takes none of aot_eager's operators
    assert same(trained(model, selective, last_first, **options), trained(model, plain, last_first, **options))


def test_several_blocks_in_one_checkpoint() -> None:
    model = Stack()

    class Whole(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return checkpointed(super().forward, x)

    whole = Whole()
    whole.load_state_dict(model.state_dict())
    assert same(trained(whole, plain, last_first), trained(model, plain, last_first))


def test_the_history_has_one_amax_for_each_batch() -> None:
    block = Block().eval()
    block.compile(backend=BACKEND, options={"compiler": "aot_eager"})
    batches = [5.0**step * torch.randn(16, 32) for step in range(3)]
    for batch in batches:
        loss_of(checkpointed(block, batch)).backward()
    history = state.existing_state(block.up.weight, 1024).history
    assert [int(row.count_nonzero()) for row in history] == [3, 3, 3]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_hugging_faces_checkpointing_of_compiled_layers(use_reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="checkpoints Hugging Face's layers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    model, ids = transformers.LlamaForCausalLM(config), torch.randint(64, (2, 16))

    def losses_and_states(recomputed: bool) -> list[Tensor]:
        twin = copy.deepcopy(model).train()
        if recomputed:
            twin.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        for layer in twin.model.layers:
            layer.compile(backend=BACKEND, options={"compiler": "aot_eager"})
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
        seen = []
        for _ in range(3):
            loss = twin(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            seen += [loss.detach(), *(weight.grad.clone() for weight in twin.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, *state_dict(twin).values()]

    assert same(losses_and_states(True), losses_and_states(False))


# --- what is kept, and for how long -----------------------------------------------------------------------------------


def test_what_a_first_pass_leaves_goes_with_its_graph() -> None:
    """At once, for the FP8 copies of weights are among it."""
    model = Stack()
    for block in model.blocks:
        block.compile(backend=BACKEND, options={"compiler": "aot_eager"})
    model.around = nested
    gc.collect()
    gc.disable()
    try:
        known = len(recomputation._regions)
        result = model(torch.randn(16, 32))
        regions = list(recomputation._regions.values())[known:]
        copies = [weakref.ref(copy) for region in regions for call in region.calls for copy in call.copies]
        assert len(regions) == 6 and copies and all(copy() is not None for copy in copies)
        del regions
        loss_of(result).backward()
        assert len(recomputation._regions) == known and all(copy() is None for copy in copies)
        result = model(torch.randn(16, 32))
        assert len(recomputation._regions) == known + 6
        del result
        assert len(recomputation._regions) == known
    finally:
        gc.enable()


def test_looking_for_checkpoints_leaves_all_hooks_in_place() -> None:
    calls: list[str] = []

    def hook(name: str) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda saved: calls.append(name) or saved, lambda saved: saved)

    x = torch.randn(3, requires_grad=True)
    with hook("outer"):
        with hook("inner"):
            assert checkpoints() is None
            x.square()
        x.square()
    assert calls == ["inner", "outer"] and checkpoints() is None


def test_a_call_with_other_weights_repeats_nothing() -> None:
    one, other = torch.randn(4), torch.randn(4)
    states = [torch.rand(2, 5), torch.rand(1, 5)]
    first = FirstPass.of([one], states, None, [])
    assert first.is_of([one])
    assert not first.is_of([other]) and not first.is_of([one, other]) and not first.is_of([one.clone()])


def test_while_a_call_is_repeated_its_states_have_the_scales_of_then() -> None:
    states = [torch.rand(2, 5), torch.rand(1, 5)]
    first = FirstPass.of([], states, None, [])
    later = [torch.rand_like(each) for each in states]
    for each, now in zip(states, later, strict=True):
        each.copy_(now)
    with pytest.raises(ZeroDivisionError), first.repeated(states):
        assert torch.equal(torch.cat([each[:, SCALE] for each in states]), first.scales)
        assert all(torch.equal(each[:, 1:], now[:, 1:]) for each, now in zip(states, later, strict=True))
        states[0].zero_()
        raise ZeroDivisionError
    assert same(states, later)
