"""Where somebody could tell, gradients go to ``.grad`` by autograd: hooks, ``autograd.grad``, graphs that are kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.test_accumulated_gradients import backward, both_ways

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_a_hook_on_the_parameter_sees_and_changes_its_gradient(added: list[Tensor]) -> None:
    seen: list[Tensor] = []

    def hooked(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        handle = model.a.weight.register_hook(lambda gradient: seen.append(gradient.clone()) or 2 * gradient)
        backward(model, run, x)
        handle.remove()

    model, _ = both_ways(hooked)
    assert len(seen) == 2 and torch.equal(*seen)
    assert [gradient.shape for gradient in added] == [model.b.weight.shape]


def test_a_hook_that_is_gone_is_none(added: list[Tensor]) -> None:
    def hooked(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        model.a.weight.register_hook(lambda gradient: 2 * gradient).remove()
        model.a.weight.register_post_accumulate_grad_hook(print).remove()
        backward(model, run, x)

    both_ways(hooked)
    assert len(added) == 2


def test_a_hook_after_accumulation_runs_once_the_sum_is_there(added: list[Tensor]) -> None:
    seen: list[Tensor] = []

    def hooked(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        model.a.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
        backward(model, run, x)

    model, _ = both_ways(hooked)
    assert len(seen) == 2 and torch.equal(*seen) and torch.equal(seen[0], model.a.weight.grad)
    assert [gradient.shape for gradient in added] == [model.b.weight.shape]


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_a_hook_on_autograds_node_of_the_parameter_gets_the_gradient(register: str, added: list[Tensor]) -> None:
    seen: list[Any] = []

    def hooked(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        node = model.a.weight.view_as(model.a.weight).grad_fn.next_functions[0][0]
        getattr(node, register)(lambda *given: seen.append(given[-1][0].clone()))
        backward(model, run, x)

    model, _ = both_ways(hooked)
    assert len(seen) == 2 and torch.equal(*seen)
    assert [gradient.shape for gradient in added] == [model.b.weight.shape]


def test_a_hook_on_the_graphs_node_gets_all_gradients(added: list[Tensor]) -> None:
    seen: list[Any] = []

    def hooked(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        y = run(x)
        y.grad_fn.register_hook(lambda given, _: seen.append([each for each in given if each is not None]))
        y.square().mean().backward()

    both_ways(hooked)
    assert len(seen) == 2 and len(seen[0]) == len(seen[1]) >= 2
    assert not added


def test_autograd_grad_returns_gradients_and_adds_to_none(added: list[Tensor]) -> None:
    def asked(model: nn.Module, run: Callable[..., Any], x: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(run(x).square().mean(), list(model.parameters())))

    _, (got, expected) = both_ways(asked)
    assert all(map(torch.equal, got, expected)) and not added


def test_autograd_grad_of_the_input_leaves_weights_alone(added: list[Tensor]) -> None:
    def asked(model: nn.Module, run: Callable[..., Any], x: Tensor) -> Tensor:
        return torch.autograd.grad(run(x.requires_grad_()).square().mean(), x)[0]

    _, (got, expected) = both_ways(asked)
    assert torch.equal(got, expected) and not added


def test_a_backward_for_some_inputs_adds_to_no_others(added: list[Tensor]) -> None:
    def asked(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        run(x).square().mean().backward(inputs=[model.b.weight])

    model, _ = both_ways(asked)
    assert [gradient.shape for gradient in added] == [model.b.weight.shape]


@pytest.mark.parametrize("options", [{"create_graph": True}, {"create_graph": True, "retain_graph": False}])
def test_a_backward_that_is_differentiated_makes_new_sums(options: dict[str, bool], added: list[Tensor]) -> None:
    def asked(model: nn.Module, run: Callable[..., Any], x: Tensor) -> bool:
        before = model.a.weight.grad
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the cycle between a parameter and its gradient
            run(x.requires_grad_()).square().mean().backward(**options)
        return model.a.weight.grad is before

    with torch._functorch.config.patch(donated_buffer=False):
        # Delayed scaling updates states in the backward, of which AOTAutograd makes no graph.
        _, (got, expected) = both_ways(asked, recipe="current")
    assert not got and not expected and not added


def test_a_graph_that_is_kept_gives_its_gradients_twice(added: list[Tensor]) -> None:
    def twice(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        loss, before = run(x).square().mean(), len(added)
        loss.backward(retain_graph=True)
        assert len(added) == before
        loss.backward()

    with torch._functorch.config.patch(donated_buffer=False):
        both_ways(twice)
    assert len(added) == 2, "the second one keeps no graph"


def test_anomaly_mode_looks_at_gradients(added: list[Tensor]) -> None:
    def watched(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
            warnings.simplefilter("ignore")
            backward(model, run, x)

    both_ways(watched)
    assert not added


def test_beside_other_processes_gradients_go_through_autograd(added: list[Tensor]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        both_ways(backward)
    finally:
        dist.destroy_process_group()
    assert not added


@pytest.mark.slow
def test_compiled_autograd_adds_up_gradients_itself(added: list[Tensor]) -> None:
    def traced(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            backward(model, run, x)

    # Of states that backwards update it knows nothing where it is turned on so late, with or without products that add.
    both_ways(traced, recipe="current")
    assert not added
