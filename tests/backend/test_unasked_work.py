"""No work that nobody asked for: gradients of data, of frozen weights, of anything in inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of
from te_compile.passes.set_names_aside import label_of
from tests.backend.models import Chain, Mlp, all_fp8, any_length, record_of_one_step
from tests.compiling import compiled, gemm_labels, gradients, producers, products, relative_error, te_nodes
from tests.emulation import emulated

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def operand_of_gemm(record: manager.Compilation, label: str, operand: str) -> Any:
    """The node that gives the GEMM ``label`` its ``operand``, behind views and getitems."""
    (gemm,) = [node for node in products(record) if label_of(node) == label]
    node = arguments_of(gemm)[operand]
    while not (node.op == "placeholder" or str(node.target).startswith("te.")):
        node = node.all_input_nodes[0]
    return node


def test_the_first_linear_computes_no_gradient_for_data() -> None:
    record = record_of_one_step(Chain(), torch.randn(any_length(), 32))
    assert gemm_labels(record) == {
        **{f"{name} {product}": 1 for name in "bc" for product in ("forward", "dgrad", "wgrad")},
        "a forward": 1,
        "a wgrad": 1,
    }
    gradient = operand_of_gemm(record, "a wgrad", "a")
    assert arguments_of(gradient)["rowwise"] is False, "the row-major copy of this gradient is for dgrad alone"


def test_a_frozen_linear_in_the_middle_has_no_wgrad_and_keeps_no_transposed_input() -> None:
    model = Chain()
    model.b.requires_grad_(False)
    record = record_of_one_step(model, torch.randn(any_length(), 32))
    labels = gemm_labels(record)
    assert "b wgrad" not in labels and labels["b dgrad"] == 1 and labels["a wgrad"] == 1
    assert arguments_of(operand_of_gemm(record, "b forward", "a"))["columnwise"] is False
    assert arguments_of(operand_of_gemm(record, "b dgrad", "a"))["columnwise"] is False
    assert model.b.weight.grad is None


def test_frozen_linears_in_front_do_no_backward_work() -> None:
    model = Chain()
    model.a.requires_grad_(False)
    model.b.requires_grad_(False)
    record = record_of_one_step(model, torch.randn(any_length(), 32))
    assert gemm_labels(record) == {"a forward": 1, "b forward": 1, "c forward": 1, "c wgrad": 1}
    assert len(producers(record, torch.float8_e5m2)) == 1


class Lora(nn.Module):
    """A frozen linear with a trained low-rank path beside it."""

    def __init__(self, d: int = 32, rank: int = 16) -> None:
        super().__init__()
        self.base = nn.Linear(d, d).requires_grad_(False)
        self.down, self.up = nn.Linear(d, rank, bias=False), nn.Linear(rank, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


def test_lora_trains_its_adapters_and_spends_nothing_on_the_base() -> None:
    model = nn.Sequential(Lora(), Lora())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    record = record_of_one_step(model, torch.randn(any_length(), 32))
    labels = gemm_labels(record)
    assert not any(label.endswith("base wgrad") for label in labels)
    assert labels["0.base forward"] == labels["1.base forward"] == labels["1.base dgrad"] == 1
    assert "0.base dgrad" not in labels and labels["0.down wgrad"] == labels["1.up wgrad"] == 1
    assert set(gradients(model)) == {f"{i}.{name}.weight" for i in (0, 1) for name in ("down", "up")}
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_inference_runs_the_forward_products_and_keeps_nothing_for_a_backward() -> None:
    model = Chain()
    fast = compiled(model)
    with torch.no_grad(), manager.recording() as records:
        fast(torch.randn(any_length(), 32))
    (record,) = records
    assert gemm_labels(record) == {"a forward": 1, "b forward": 1, "c forward": 1}
    assert not te_nodes(record, "update_scales_")
    assert all(arguments_of(node)["columnwise"] is False for node in producers(record))


def test_inference_quantises_weights_in_the_one_layout_that_it_reads() -> None:
    for cache_weights in (False, True):
        torch._dynamo.reset()
        fast = compiled(Chain(), cache_weights=cache_weights)
        with torch.no_grad(), manager.recording() as records:
            fast(torch.randn(any_length(), 32))
        if cache_weights:
            (group,) = records[0].plan.groups
            assert group.layout.rowwise == (True,) * 3 and group.layout.columnwise == (False,) * 3
        else:
            assert not records[0].plan.groups and not te_nodes(records[0], "quantize_weights")
            of_weights = [node for node in te_nodes(records[0], "quantize") if node.args[0].op == "placeholder"]
            flags = [(arguments_of(node)["rowwise"], arguments_of(node)["columnwise"]) for node in of_weights]
            assert flags.count((True, False)) == len(flags) >= 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_inference_computes_what_the_textbook_says(mode: Callable[[], Any], recipe: str) -> None:
    """Also on the first call, where no state has seen data."""
    model = Mlp()
    x = torch.randn(2, any_length(), 32)
    with mode():
        got, expected = compiled(model, recipe=recipe)(x), emulated(model, all_fp8)(x)
    assert relative_error(got, expected) < 1e-2
