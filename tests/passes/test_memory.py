"""Memory tags: on snapshots and on the states that an update changes, and on nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import partitioners
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from te_compile.ops.quantize import QUANTIZE
from te_compile.ops.scaling import SNAPSHOT, UPDATE_SCALES
from te_compile.passes import manager
from te_compile.passes.arguments import is_te
from te_compile.passes.memory import tag_memory, tags_count
from te_compile.recipe import DelayedScaling, ScaleRule, remember
from tests.capturing import traced
from tests.compiling import compiled, joint_of, te_nodes, train_step

RECIPE = remember(DelayedScaling(amax_history_len=4))


def step(state: Tensor, other: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """One quantize with a scale of ``state``, which it updates; ``other`` is only read."""
    scales = SNAPSHOT([state, other])
    q, _, amax, _ = QUANTIZE(x, scales.select(0, 0), torch.float8_e4m3fn, True, False, ScaleRule().text())
    UPDATE_SCALES([state], [amax], "forward", RECIPE)
    return q, scales


def test_snapshots_must_be_saved_and_updated_states_may_change() -> None:
    gm = traced(step, torch.ones(1, 6), torch.ones(1, 6), torch.randn(8, 32))
    assert tag_memory(gm.graph) == 2
    state, other, x = gm.graph.find_nodes(op="placeholder")
    assert state.meta["saved_tensor_with_no_vc_check"] is True
    assert not any("saved_tensor_with_no_vc_check" in node.meta for node in (other, x))
    tagged = [node for node in gm.graph.nodes if "recompute" in node.meta]
    assert [is_te(node, "snapshot") for node in tagged] == [True]
    assert tagged[0].meta["recompute"] is CheckpointPolicy.MUST_SAVE


@pytest.mark.usefixtures("fresh_dynamo")
def test_in_a_real_joint_graph_both_states_of_every_weight_are_tagged() -> None:
    """There the updates are wrapped by functionalization."""
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    with manager.recording() as records:
        train_step(model, compiled(model), torch.randn(5, 32))
    wrapped = te_nodes(records[0], "update_scales_")
    assert len(wrapped) == 2 and any(node.target is not UPDATE_SCALES for node in wrapped)
    tagged = [node for node in joint_of(records[0]).nodes if "saved_tensor_with_no_vc_check" in node.meta]
    assert sorted(tuple(node.meta["val"].shape) for node in tagged) == [(1, 1026)] * 2 + [(2, 1026)] * 2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("cache_weights", [True, False])
def test_what_backward_quantises_of_no_gradient_stays_there(cache_weights: bool) -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    with manager.recording() as records:
        train_step(model, compiled(model, cache_weights=cache_weights), torch.randn(5, 32))
    nodes = joint_of(records[0]).nodes
    kept = [node for node in nodes if node.meta.get("partitioner_tag") == "must_be_in_backward"]
    quantized = [node for node in kept if node.target is QUANTIZE]
    assert [node.args[0].op for node in quantized] == ["placeholder"] * (not cache_weights)


class Dropped(nn.Module):
    """Dropout in a checkpoint, whose backward pass draws the mask again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 16)

    def block(self, x: Tensor) -> Tensor:
        return F.dropout(self.up(x), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(checkpoint(self.block, x, use_reentrant=False))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_states_may_change_between_two_backwards_where_a_checkpoint_saves_the_generators_state(compiler: str) -> None:
    """PyTorch saves that behind the states, and took it for what may change."""
    run, x = compiled(Dropped(), compiler=compiler, cost_model=False), torch.randn(8, 32, requires_grad=True)
    first, second = run(x), run(x)
    for result in (second, first):
        (gradient,) = torch.autograd.grad(result.square().sum(), x)
        assert gradient.isfinite().all() and gradient.any()


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_is_there_for_generators_states_is_put_back() -> None:
    before = partitioners.functionalize_rng_ops
    with pytest.raises(ZeroDivisionError), tags_count():
        assert partitioners.functionalize_rng_ops is not before
        _ = 1 / 0
    assert partitioners.functionalize_rng_ops is before


def test_a_partitioner_without_that_function_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(partitioners, "functionalize_rng_ops")
    with tags_count():
        assert not hasattr(partitioners, "functionalize_rng_ops")
    assert not hasattr(partitioners, "functionalize_rng_ops")


def test_a_graph_without_state_is_left_alone() -> None:
    gm = traced(lambda x: x.sin(), torch.randn(3))
    assert tag_memory(gm.graph) == 0
