"""A model compiled with te_fp8 as the tests want it: without Inductor where that tells as much, and with its record.

``aot_eager`` runs the same passes and the same joint graph as Inductor and starts in a fraction of the time. The record
of a compilation holds the plan and the joint graph, in which the tests count operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from te_compile.backend import te_fp8
from te_compile.passes.arguments import arguments_of, operator_of
from te_compile.passes.manager import Compilation
from te_compile.passes.set_names_aside import label_of
from te_compile.state_files import state_dict

BACKEND = "te_fp8"
PRODUCERS = ("quantize", "fused_quantize", "norm_quantize")


def know_the_backend() -> None:
    """Register the name, as the entry point of an installed package does, where the package is not installed."""
    if BACKEND not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(te_fp8, name=BACKEND)


def compiled(model: Callable[..., Any], *, dynamic: bool | None = None, **options: Any) -> Any:
    """``model`` under te_fp8, executed operator by operator unless the options say otherwise."""
    return torch.compile(model, backend=BACKEND, dynamic=dynamic, options={"compiler": "aot_eager", **options})


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients there are."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def train_step(model: nn.Module, run: Callable[..., Any], *inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward, mean of squares, backward; what came out and the gradients of ``model`` from this step alone."""
    model.zero_grad(set_to_none=True)
    output = run(*inputs)
    output.float().square().mean().backward()
    return output.detach(), gradients(model)


def trained(model: nn.Module, batches: list[Tensor], **options: Any) -> list[Tensor]:
    """Results, gradients and weights of a few steps of SGD, evaluations in between, and the FP8 state at the end."""
    fast = compiled(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: list[Tensor] = []
    for batch in batches:
        batch = batch.clone().requires_grad_()
        result, found = train_step(model, fast, batch)
        seen += [result, batch.grad.clone(), *found.values()]
        optimizer.step()
        with torch.no_grad():
            seen.append(fast(batch))
    return [*seen, *model.state_dict().values(), *state_dict(model).values()]


def step_from(
    model: nn.Module, run: Callable[..., Any], dy: Tensor, *inputs: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward, backward from ``dy``, the gradient of the result; the result and the gradients of ``model`` alone.

    For two ways to run a linear that are compared to the last bits: a gradient that each makes from its own result now
    and then has a number on the other side of the middle between two codes.
    """
    model.zero_grad(set_to_none=True)
    output = run(*inputs)
    output.backward(dy)
    return output.detach(), gradients(model)


def cosine(a: Tensor, b: Tensor) -> float:
    """Of the angle between two tensors taken as vectors; 1 for two that are all zero."""
    a, b = a.detach().double().flatten(), b.detach().double().flatten()
    lengths = a.norm() * b.norm()
    return float(a @ b / lengths) if lengths > 0 else float(torch.equal(a, b))


def relative_error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|."""
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())


def error_but_for_ties(got: Tensor, expected: Tensor) -> float:
    """The relative error against a textbook's result, but for codes that fell to the other side of a tie.

    Two ways to compute a number differ in its last bits. About once in a million numbers that are quantised, the middle
    between two codes lies just there, and a row or a column of the result moves by a part of a code's step. So the
    tenth of the elements that is farthest off is left out; not so
    where there are few, or where the whole is off by more than FP8 rounds.
    """
    whole = relative_error(got, expected)
    if not whole <= 4e-2 or got.numel() < 20:  # NaN is no tie either
        return whole
    distances = (got.detach().double() - expected.detach().double()).abs().flatten().sort().values
    return float(distances[: len(distances) * 9 // 10].norm() / expected.detach().double().norm())


def joint_of(compilation: Compilation) -> Graph:
    """The joint graph of forward and backward after all passes."""
    assert compilation.joint is not None, "the graph was never traced"
    return compilation.joint


def te_nodes(compilation: Compilation, name: str) -> list[Node]:
    """The nodes of ``te::name`` in the joint graph."""
    operators = {node: operator_of(node) for node in joint_of(compilation).nodes if node.op == "call_function"}
    return [node for node, op in operators.items() if op is not None and op._schema.name == f"te::{name}"]


def loss_backwards(compilation: Compilation, defers: bool) -> list[Node]:
    """The nodes that write the gradient of a loss, with its sums or without."""
    name = "cross_entropy_backward_deferred" if defers else "cross_entropy_backward"
    return [node for sums in ("", "_with_sums") for node in te_nodes(compilation, name + sums)]


def producers(compilation: Compilation, dtype: torch.dtype = torch.float8_e4m3fn) -> list[Node]:
    """Every node that quantises an activation or a gradient to ``dtype``, fused with other work or not."""
    found = [node for name in PRODUCERS for node in te_nodes(compilation, name)]
    return [node for node in found if arguments_of(node)["dtype"] == dtype]


def products(compilation: Compilation) -> list[Node]:
    """The FP8 products of linears, those that may add to a gradient among them."""
    return [*te_nodes(compilation, "gemm"), *te_nodes(compilation, "gemm_into_grad")]


def gemm_labels(*compilations: Compilation) -> Counter[str]:
    """How often each FP8 product stands in the joint graphs, e.g. {"fc forward": 1, "fc wgrad": 1}."""
    nodes = [node for compilation in compilations for node in products(compilation)]
    return Counter(label_of(node) for node in nodes)
