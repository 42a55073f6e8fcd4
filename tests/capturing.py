"""Graphs as the passes receive them: Dynamo's, with its regions found, and small ATen graphs built by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from te_compile.passes.find_linears import find_linears
from te_compile.passes.plain_operators import plain_operators
from te_compile.passes.plan import Plan, Site
from te_compile.passes.regions import Region, regions_of


def captured(run: Callable[..., Any], *inputs: Any) -> tuple[GraphModule, list[Any]]:
    """The one graph that Dynamo hands to a backend, and its example inputs."""
    graphs: list[tuple[GraphModule, list[Any]]] = []

    def keep(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append((gm, example_inputs))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(run, backend=keep)(*inputs)
    (only,) = graphs
    return only


def rewritten(
    change: Callable[[Graph], int], run: Callable[..., Tensor], *inputs: Tensor, tolerance: float = 1e-5
) -> tuple[int, Graph]:
    """What a pass counts on the captured graph of ``run``, and that graph then, without what nobody reads. The result
    and all gradients are checked to be finite and, to ``tolerance``, those of before."""
    gm, examples = captured(run, *inputs)
    count = change(gm.graph)
    gm.graph.lint()
    gm.recompile()
    leaves = [x for x in inputs if x.requires_grad]
    results = []
    for y in (gm(*examples)[0], run(*inputs)):
        weights = torch.linspace(-1, 2, y.numel()).view(y.shape)
        results.append([y.detach(), *torch.autograd.grad((y.float() * weights).sum(), leaves)])
    for got, wanted in zip(*results, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    gm.graph.eliminate_dead_code()
    return count, gm.graph


def regions_and_plan(run: Callable[..., Any], *inputs: Any) -> tuple[list[Region], Plan]:
    """The regions of the captured graph, and a plan with every linear found and none selected or refused by rule."""
    gm, examples = captured(run, *inputs)
    regions, left = regions_of(gm)
    for region in regions:
        plain_operators(region.graph)  # as in the pipeline
    plan = Plan()
    find_linears(regions, left, examples, plan)
    return regions, plan


def only_site(run: Callable[..., Any], *inputs: Any) -> Site:
    """The one linear of ``run``."""
    _, plan = regions_and_plan(run, *inputs)
    (site,) = plan.sites
    return site


def traced(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """An ATen graph with fake values on its nodes, like the joint graph."""
    return make_fx(function, tracing_mode="fake")(*inputs)


def changed(
    change: Callable[[Graph], int], function: Callable[..., Any], *given: Tensor
) -> tuple[int, Graph, list[tuple[Tensor, Tensor]]]:
    """What a pass counts on the ATen graph of ``function``, that graph then, and each result after and before it."""
    gm = traced(function, *given)
    before = gm(*given)
    count = change(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return count, gm.graph, list(zip(gm(*given), before, strict=True))
