"""Ways in which gradients go wrong in silence, each with the protection on and, to know that the test sees it, off.

1. A scale read from the state itself: the compiler saves a view of what the update overwrites.
2. A recomputed forward that reads the scale after its update.
3. A cached graph of an older formula: tests/test_cache.py.
4. A partitioner that saves what it likes: the high-precision input beside, or instead of, its FP8 codes.

And two that are loud: autograd's version check on a state that is meant to change, and states made during dry runs.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from te_compile import compilers, state
from te_compile.ops.scaling import HISTORY
from te_compile.passes import lower, manager
from te_compile.passes.arguments import is_te
from te_compile.passes.memory import tag_memory
from te_compile.passes.set_names_aside import label_of
from tests.compiling import compiled, error_but_for_ties, gradients, products, relative_error, te_nodes, train_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Model(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class Recomputed(nn.Module):
    """The same, recomputed in the backward pass."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.model, x, use_reentrant=False)


def growing(steps: int = 3) -> list[Tensor]:
    """Batches of ever larger numbers, so that each step's update changes every scale."""
    return [5.0**step * torch.randn(16, 32) for step in range(steps)]


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


# --- 1: the scale of a step is that of its forward -----------------------------------------------------------------


def scale_read_from_the_state(self: Any, row: int) -> Any:
    """What lowering must not do: each scale as a copy of an element of the state that the update changes."""
    if self.scales is None:
        return None
    weights = len(self.weights)
    if row < 2 * weights:
        held, place = self.forward_states[row // 2], row % 2
    else:
        held, place = self.backward_states[row - 2 * weights], 0
    return self.call(torch.clone, self.call(operator.getitem, held, (place, 0)))


def second_of_two_open_steps(model: Model, batches: list[Tensor], last: Tensor, compiler: str) -> dict[str, Tensor]:
    """Train on ``batches``; then two forwards on ``last``, of which the first one's large gradient runs back first."""
    torch._dynamo.reset()
    fast = compiled(model, compiler=compiler)
    for batch in batches:
        train_step(model, fast, batch)
    first, second = fast(last), fast(last)
    (1000 * first.square().mean()).backward()
    model.zero_grad(set_to_none=True)
    second.square().mean().backward()
    return gradients(model)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("protected", [True, False])
def test_a_backward_reads_the_scale_that_its_forward_saw(
    protected: bool, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another step did to the state between this step's forward and backward makes no difference, to the bit."""
    if not protected:
        monkeypatch.setattr(lower._Lowering, "scale", scale_read_from_the_state)
    model, batches = Model(), growing(2)
    alone = copy.deepcopy(model)
    fast = compiled(alone, compiler=compiler)
    for batch in batches:
        train_step(alone, fast, batch)
    fast(batches[-1])
    _, expected = train_step(alone, fast, batches[-1])
    got = second_of_two_open_steps(model, batches, batches[-1], compiler)
    assert same(got, expected) is protected


def test_inductor_and_aot_eager_train_alike_while_scales_move() -> None:
    model, batches = Model(), growing(4)
    twin = copy.deepcopy(model)
    fast = compiled(model)
    expected = [train_step(model, fast, batch)[1] for batch in batches]
    torch._dynamo.reset()
    fast = compiled(twin, compiler="inductor")
    for batch, gradient in zip(batches, expected, strict=True):
        _, got = train_step(twin, fast, batch)
        assert all(error_but_for_ties(got[name], gradient[name]) < 1e-3 for name in gradient)


def test_every_scale_on_the_graph_is_the_snapshots() -> None:
    with manager.recording() as records:
        model = Model()
        train_step(model, compiled(model), torch.randn(16, 32))
    states = [node for node in records[0].joint.find_nodes(op="placeholder") if node.meta["val"].shape[-1:] == (1026,)]
    assert len(states) == 4
    readers = {user for node in states for user in node.users}
    allowed = {*te_nodes(records[0], "snapshot"), *te_nodes(records[0], "update_scales_")}
    written_back = {node for node in readers if str(node.target) == "aten.copy_.default"}
    outputs = {node for node in readers if node.op == "output"}
    assert readers - allowed - written_back - outputs == set()


# --- 2: recomputation ----------------------------------------------------------------------------------------------


def tag_for_recomputation(graph: Graph) -> int:
    """The opposite of what tag_memory says of snapshots."""
    for node in graph.nodes:
        if is_te(node, "snapshot"):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return 0


@pytest.mark.parametrize("protected", [True, False])
def test_a_recomputed_forward_reads_the_scales_of_the_first(protected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = Model(), growing()
    twin = copy.deepcopy(model)
    fast = compiled(model)
    expected = [train_step(model, fast, batch)[1] for batch in batches]
    if not protected:
        monkeypatch.setattr(compilers, "JOINT_PASSES", (*compilers.JOINT_PASSES, tag_for_recomputation))
    torch._dynamo.reset()
    fast = compiled(Recomputed(twin))
    got = [train_step(twin, fast, batch)[1] for batch in batches]
    assert all(same(one, other) for one, other in zip(got, expected, strict=True)) is protected


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_memory_budget_of_nothing_saves_the_scales(compiler: str) -> None:
    """The partitioner then saves what the graph got and looks at no tag; scales of after the update would be read."""
    steps = []
    model = Model()
    for budget in (1.0, 0.0):
        torch._dynamo.reset()
        torch.manual_seed(1)
        twin = copy.deepcopy(model)
        with functorch_config.patch(activation_memory_budget=budget):
            fast = compiled(twin, compiler=compiler)
            steps.append([train_step(twin, fast, batch)[1] for batch in growing()])
            assert functorch_config.activation_memory_budget == budget
    assert all(same(one, other) for one, other in zip(*steps, strict=True))


def test_recomputation_does_not_update_the_state_twice() -> None:
    model = Model()
    fast = compiled(Recomputed(model))
    batches = growing()
    for batch in batches:
        train_step(model, fast, batch)
    history = state.existing_state(model.a.weight, 1024).history[0]
    expected = torch.stack([batch.abs().max() for batch in reversed(batches)])
    assert torch.equal(history[:3], expected) and not history[3:].any()


# --- 4: what is kept between forward and backward ------------------------------------------------------------------


def kept_for_backward(result: Tensor) -> list[Tensor]:
    """The tensors that the compiled backward of ``result`` holds on to."""
    node = result.grad_fn
    while not hasattr(node, "saved_tensors") or "Compiled" not in type(node).__name__:
        node = node.next_functions[0][0]
    return list(node.saved_tensors)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_of_activations_only_fp8_codes_are_kept(recipe: str, compiler: str) -> None:
    """One transposed copy each: not the input of the step, not what the ReLU gave, not both layouts."""
    model = Model().bfloat16()
    rows = 112
    kept = kept_for_backward(compiled(model, recipe=recipe, compiler=compiler)(torch.randn(rows, 32).bfloat16()))
    activations = [t for t in kept if rows in t.shape]
    codes = [t for t in activations if t.dtype == torch.float8_e4m3fn]
    assert sorted(tuple(t.shape) for t in codes) == [(32, rows), (64, rows)]
    others = sum(t.numel() * t.element_size() for t in activations if t.dtype != torch.float8_e4m3fn)
    # The ReLU needs where its input was positive: at most its own result, once.
    assert others <= rows * 64 * 2


def test_what_forward_and_backward_need_of_one_tensor_is_quantised_once() -> None:
    """Both layouts come from one operator; a recomputed second quantize could see another scale."""
    with manager.recording() as records:
        model = Model()
        train_step(model, compiled(model), torch.randn(16, 32))
    gemms = {label_of(node): node for node in products(records[0])}

    def producer(node: Any) -> Any:
        while not str(node.target).startswith("te."):
            node = node.all_input_nodes[0]
        return node

    for name in "ab":
        forward, wgrad = gemms[f"{name} forward"], gemms[f"{name} wgrad"]
        assert producer(forward.args[0]) is producer(wgrad.args[1])


# --- the loud ones -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_backward_state_may_change_between_two_open_steps(compiler: str) -> None:
    model = Model()
    fast = compiled(model, compiler=compiler)
    sum(fast(batch).square().mean() for batch in growing(2)).backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_without_its_tag_a_changed_backward_state_stops_training(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = tuple(joint_pass for joint_pass in compilers.JOINT_PASSES if joint_pass is not tag_memory)
    monkeypatch.setattr(compilers, "JOINT_PASSES", passes)
    fast = compiled(Model())
    loss = sum(fast(batch).square().mean() for batch in growing(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_compiling_with_fake_parameters_makes_no_state() -> None:
    """As some wrappers do before the real call."""
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.zeros(48, 32))
    known = len(state._states)
    held = state.state_of(fake, 16)
    assert held.forward.shape == (2, 18) and len(state._states) == known


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16], ids=str)
def test_amaxes_are_fp32_whatever_the_default_dtype_is(default: torch.dtype) -> None:
    """An amax of a gradient beyond fp16 would arrive infinite and not enter the history: no scale follows it."""
    model, x, up = nn.Linear(32, 48), torch.randn(8, 32), torch.randn(8, 48)
    fast = compiled(model)
    torch.set_default_dtype(default)
    try:
        for _ in range(3):
            model.zero_grad()
            (fast(x) * (up * 1e6)).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    held = state.existing_state(model.weight, 1024)
    assert not held.skipped.any()
    assert torch.equal(held.backward[0, HISTORY], (up * 1e6).abs().max())
    assert relative_error(model.weight.grad, (up * 1e6).T @ x) < 0.1
