"""What a weight's gradient waits for, and what is made again for it then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F

from te_compile.passes import manager
from te_compile.passes.manager import Compilation
from te_compile.passes.set_names_aside import label_of
from tests.compiling import compiled, products, te_nodes, train_step
from tests.test_save_memory import Gated, Layer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def record_of(model: nn.Module, x: Tensor, **options: bool) -> Compilation:
    with manager.recording() as records:
        train_step(model, compiled(model, **options), x)
    (record,) = records
    return record


def product(record: Compilation, label: str) -> Node:
    (found,) = [node for node in products(record) if label_of(node) == label]
    return found


def delayed(record: Compilation) -> int:
    return next((each.count for each in record.passes if each.name == "delay_weight_gradients"), 0)


@pytest.mark.parametrize("save_memory", [True, False])
def test_the_second_linear_of_an_mlp_waits_for_the_backward_of_the_activation(save_memory: bool) -> None:
    record = record_of(Layer(), torch.randn(2, 24, 64), save_memory=save_memory)
    gradients = [node for node in te_nodes(record, "fused_quantize") if node.args[3] == torch.float8_e5m2]
    (activation,) = [node for node in gradients if len(node.args[0]) == 2]
    assert (product(record, "down wgrad") > activation) is save_memory
    assert product(record, "down dgrad") < activation
    assert delayed(record) == save_memory
    # The residual's gradient is read by the norm's backward, and so its codes need not wait.
    residual = product(record, "down dgrad").args[0].args[0].args[0]
    of_residual = [node for node in gradients if node.args[0] == residual]
    assert [(node.args[4], node.args[5]) for node in of_residual] == (
        [(True, False), (False, True)] if save_memory else [(True, True)]
    )


def test_a_gated_mlp_waits_for_both_gradients() -> None:
    record = record_of(Gated(), torch.randn(2, 24, 64), save_memory=True)
    (pair,) = te_nodes(record, "fused_quantize_pair")
    assert product(record, "down dgrad") < pair < product(record, "down wgrad") and delayed(record) == 1


def test_codes_of_a_gradient_that_nobody_reads_later_wait() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(x)))

    record = record_of(Last(), torch.randn(24, 64, requires_grad=True), save_memory=True)
    assert delayed(record) == 1
    gradients = [node for node in te_nodes(record, "fused_quantize") if node.args[3] == torch.float8_e5m2]
    assert [(node.args[4], node.args[5]) for node in gradients] == [(True, True), (True, False)]


def test_where_no_activation_stands_before_it_a_gradient_is_not_delayed() -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    assert delayed(record_of(model, torch.randn(24, 64), save_memory=True)) == 0
