"""Attention that a checkpointed region computes again: as an operator that draws nothing, with the numbers it had."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.partitioners import has_recomputable_rng_ops
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from te_compile.ops.recomputed_attention import RECOMPUTED
from te_compile.passes import manager
from te_compile.passes.manager import Compilation
from te_compile.passes.recomputed_attentions import recomputed_attentions
from tests.capturing import traced
from tests.compiling import compiled, joint_of, train_step

ATEN = torch.ops.aten
ON_CPU = ATEN._scaled_dot_product_flash_attention_for_cpu.default
EFFICIENT = ATEN._scaled_dot_product_efficient_attention.default


class Block(nn.Module):
    """Causal attention with four heads and its projections, checkpointed or not."""

    def __init__(self, recomputed: bool, reentrant: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.around: Any = partial(checkpoint, use_reentrant=reentrant) if recomputed else lambda call, x: call(x)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(2, 16, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.around(self.attend, x)


def stepped(model: nn.Module, x: Tensor, **options: Any) -> tuple[Compilation, list[Tensor]]:
    """The record of a compilation, and results and gradients of two steps."""
    with manager.recording() as records:
        fast = compiled(model, **options)
        steps = [train_step(model, fast, x) for _ in range(2)]
    (record,) = records
    return record, [tensor for output, found in steps for tensor in (output, *found.values())]


def attentions(graph: Graph) -> list[Node]:
    ours = {operator for both in RECOMPUTED.values() for operator in both}
    return [node for node in graph.nodes if node.target in ours or node.target in RECOMPUTED]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_what_is_computed_again_sets_no_generator_and_has_the_same_numbers(compiler: str, reentrant: bool) -> None:
    plain = Block(recomputed=False)
    again = Block(recomputed=True, reentrant=reentrant)
    again.load_state_dict(plain.state_dict())
    x = torch.randn(2, 16, 64)
    record, found = stepped(again, x, compiler=compiler)
    assert [node.target for node in attentions(joint_of(record))] == [RECOMPUTED[ON_CPU][0]]
    assert not has_recomputable_rng_ops(joint_of(record).owning_module)
    _, expected = stepped(plain, x, compiler=compiler)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if compiler == "aot_eager" else 1e-5)


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_is_kept_is_left_alone() -> None:
    record, _ = stepped(Block(recomputed=False), torch.randn(2, 16, 64))
    assert [node.target for node in attentions(joint_of(record))] == [ON_CPU]
    assert {each.count for each in record.passes if each.name == "recomputed_attentions"} == {0}


def graph_of(kernel: Any, *arguments: Any, policy: CheckpointPolicy | None) -> Graph:
    graph = traced(lambda q, k, v: kernel(q, k, v, *arguments)[0], *(torch.randn(1, 2, 8, 16) for _ in range(3))).graph
    for node in graph.nodes:
        if node.target is kernel and policy is not None:
            node.meta["recompute"] = policy
    return graph


def test_one_that_must_be_saved_is_left_alone() -> None:
    graph = graph_of(ON_CPU, policy=CheckpointPolicy.MUST_SAVE)
    assert recomputed_attentions(graph) == 0
    assert [node.target for node in attentions(graph)] == [ON_CPU]


@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE], ids=str)
def test_one_with_a_dropout_still_draws(policy: CheckpointPolicy, p: float) -> None:
    """Its numbers must be drawn again: the partitioner sees to it where an operator says that it draws."""
    graph = graph_of(ON_CPU, policy=policy)
    (node,) = attentions(graph)
    node.target, node.args = EFFICIENT, (*node.args[:3], None, True, p)  # on a CPU no kernel has a dropout
    assert recomputed_attentions(graph) == 1
    assert node.target is RECOMPUTED[EFFICIENT][p > 0]
    assert (torch.Tag.nondeterministic_seeded in node.target.tags) is (p > 0)
