"""What README says under Limits of second derivatives, hooks on saved tensors and swapped parameters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.compiling import compiled, gradients

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def graphs_are_kept() -> Iterator[None]:
    """Where PyTorch has donated buffers, it refuses that itself."""
    with torch._functorch.config.patch(donated_buffer=False):
        yield


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def test_first_derivatives_with_a_graph_of_their_own_want_current_scaling(graphs_are_kept: None) -> None:
    x, each = torch.randn(8, 32), model()
    compiled(each, recipe="current")(x).square().mean().backward()
    expected = gradients(each)
    each.zero_grad()
    run = compiled(each, recipe="current")
    run(x).square().mean().backward(create_graph=True)
    found = gradients(each)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        compiled(model())(x).square().mean().backward(create_graph=True)


def test_second_derivatives_are_refused(graphs_are_kept: None) -> None:
    x = torch.randn(8, 32, requires_grad=True)
    loss = compiled(model(), recipe="current")(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.square().sum().backward()


def test_hooks_on_saved_tensors_see_codes_and_scales_and_may_copy_them() -> None:
    each, x, seen = model(), torch.randn(8, 32), []

    def pack(saved: Tensor) -> Tensor:
        seen.append(saved.dtype)
        return saved.clone()

    run = compiled(each)
    with saved_tensors_hooks(pack, lambda saved: saved):
        run(x).square().mean().backward()
    found = gradients(each)
    assert {torch.float8_e4m3fn, torch.float32} <= set(seen)
    assert all(gradient.isfinite().all() and gradient.any() for gradient in found.values())


def test_pytorch_swaps_no_parameters_of_a_model_that_has_run() -> None:
    each, before = model(), torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        each.double().float()  # not met yet
        compiled(each)(torch.randn(8, 32)).sum().backward()
        each.zero_grad()
        with pytest.raises(RuntimeError, match=r"swap Linear\.weight"):
            each.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
