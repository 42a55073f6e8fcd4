"""The backward of a weight norm becomes plain operators, which compute what PyTorch's kernel does."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.parametrizations import weight_norm

from te_compile.passes import manager
from te_compile.passes.open_weight_norms import open_weight_norms
from tests.compiling import compiled, joint_of, relative_error

BACKWARD = torch.ops.aten._weight_norm_interface_backward.default
SHAPE = (12, 6, 20)


def traced(dtype: torch.dtype, kept: int) -> tuple[GraphModule, tuple[Tensor, Tensor, Tensor]]:
    """The graph of a weight norm's gradients, and what it takes: v, g and the gradient of the weight."""
    given = (
        torch.randn(SHAPE, dtype=dtype),
        torch.randn([size if index == kept else 1 for index, size in enumerate(SHAPE)], dtype=dtype),
        torch.randn(SHAPE, dtype=dtype),
    )

    def function(v: Tensor, g: Tensor, dw: Tensor) -> Any:
        v, g = v.detach().requires_grad_(), g.detach().requires_grad_()
        return torch.autograd.grad(torch._weight_norm(v, g, kept), (v, g), dw)

    graph = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*given)
    assert isinstance(graph, GraphModule)
    return graph, given


def are_left(graph: Any) -> int:
    return len(graph.find_nodes(op="call_function", target=BACKWARD))


def exact(v: Tensor, g: Tensor, dw: Tensor, kept: int) -> tuple[Tensor, ...]:
    v, g = v.double().requires_grad_(), g.double().requires_grad_()
    w = g * v / v.norm(2, [dimension for dimension in range(3) if dimension != kept], keepdim=True)
    return torch.autograd.grad(w, (v, g), dw.double())


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_it_computes_the_gradients(dtype: torch.dtype, kept: int) -> None:
    graph, given = traced(dtype, kept)
    assert open_weight_norms(graph.graph) == 1 and not are_left(graph.graph)
    graph.graph.lint()
    graph.recompile()
    bound = 1e-4 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for got, wanted in zip(graph(*given), exact(*given, kept), strict=True):
        assert got.dtype == dtype and relative_error(got, wanted) < bound
        for one, other in zip(got.unbind(kept), wanted.unbind(kept), strict=True):
            assert relative_error(one, other) < 2 * bound


def test_in_float32_they_are_those_of_pytorchs_kernel() -> None:
    graph, given = traced(torch.float32, 2)
    wanted = graph(*given)
    open_weight_norms(graph.graph)
    graph.recompile()
    for one, other in zip(graph(*given), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_along_another_dimension_pytorch_opens_it_itself() -> None:
    graph, _ = traced(torch.bfloat16, 1)
    assert not are_left(graph.graph) and open_weight_norms(graph.graph) == 0


class Normed(nn.Module):
    """A convolution and a linear, both of normed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(16, 32, 5, padding=2), dim=2)
        self.up = weight_norm(nn.Linear(32, 48))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.conv(x).tanh().transpose(1, 2))
        return y


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_model_trains(compiler: str, dtype: torch.dtype) -> None:
    model, x = Normed().to(dtype), torch.randn(2, 16, 40, dtype=dtype)
    reference = deepcopy(model).double()
    dy = torch.randn(2, 40, 48, dtype=dtype)
    wanted = torch.autograd.grad(reference(x.double()), [*reference.parameters()], dy.double())
    with manager.recording() as records:
        fast = compiled(model, compiler=compiler, exclude=["*"])
        got = torch.autograd.grad(fast(x), [*model.parameters()], dy)
    assert [each.count for each in records[0].passes if each.name == "open_weight_norms"] == [2]
    assert not are_left(joint_of(records[0]))
    for one, other in zip(got, wanted, strict=True):
        assert relative_error(one, other) < 4 * torch.finfo(dtype).eps


@pytest.mark.usefixtures("fresh_dynamo")
def test_in_fp8_too() -> None:
    model, x = Normed().bfloat16(), torch.randn(2, 16, 40).bfloat16()
    dy = torch.randn(2, 40, 48).bfloat16()
    wanted = torch.autograd.grad(model(x), [*model.parameters()], dy)
    got = torch.autograd.grad(compiled(model, strict=True)(x), [*model.parameters()], dy)
    for one, other in zip(got, wanted, strict=True):
        assert relative_error(one, other) < 0.2
