"""The gradient of the residual stream becomes part of a norm's backward, without a bit of difference."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_compile.ops.norm_backward import NORM_BACKWARD
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of
from te_compile.passes.fuse_norm_backward import fuse_norm_backward
from te_compile.passes.text import ops_text
from tests.capturing import changed, traced
from tests.compiling import compiled, te_nodes, train_step

COLUMNS = 32
SHAPE = (2, 3, COLUMNS)


def backward(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An RMS norm's backward from matrices; its rstd is that of x up to a constant, which is of no matter here."""
    rstd = x.float().square().mean(-1, keepdim=True).rsqrt()
    return NORM_BACKWARD(dy, x, w, x.new_empty(0, dtype=torch.float32), rstd, None, "rms", True, True, None)


def inputs(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """dy and x as matrices, w, and the residual's gradient in its own shape."""
    return [*(torch.randn(6, COLUMNS).to(dtype) for _ in range(2)), torch.randn(COLUMNS), torch.randn(SHAPE).to(dtype)]


def fused(function: Callable[..., Any], *given: Tensor) -> tuple[int, str]:
    """What the pass counts on the graph of ``function``, and the text after it. The results stay as they are."""
    count, graph, results = changed(fuse_norm_backward, function, *given)
    for got, want in results:
        assert torch.equal(got, want) and got.stride() == want.stride()
    for node in graph.find_nodes(op="call_function", target=NORM_BACKWARD):
        assert node.meta["val"][0].shape == (6, COLUMNS)
    return count, ops_text(graph)


def test_the_graph_after() -> None:
    def function(dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, residual: Tensor) -> Any:
        dx, dw, _ = NORM_BACKWARD(dy, x, w, rstd[:0, 0], rstd, None, "rms", True, True, None)
        return residual + dx.view(SHAPE), dw

    dy, x, w, residual = inputs()
    count, text = fused(function, dy, x, w, torch.rand(6, 1), residual)
    assert count == 1
    assert text == textwrap.dedent("""\
        slice_1 = aten.slice.Tensor(rstd_1, 0, 0, 0)
        select = aten.select.int(slice_1, 1, 0)
        view_1 = aten.view(residual_1, [-1, 32])
        norm_backward = te.norm_backward(dy_1, x_1, w_1, select, rstd_1, view_1, 'rms', True, True, None)
        getitem = getitem(norm_backward, 0)
        getitem_1 = getitem(norm_backward, 1)
        getitem_2 = getitem(norm_backward, 2)
        view = aten.view(getitem, [2, 3, 32])
        return (view, getitem_1)""")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dx_first", [True, False])
def test_either_order_and_every_dtype(dtype: torch.dtype, dx_first: bool) -> None:
    def function(dy: Tensor, x: Tensor, w: Tensor, residual: Tensor) -> Any:
        dx, dw, _ = backward(dy, x, w)
        dx = dx.view(SHAPE)
        return (dx + residual if dx_first else residual + dx), dw

    assert fused(function, *inputs(dtype))[0] == 1


def test_matrices_need_no_view() -> None:
    def function(dy: Tensor, x: Tensor, w: Tensor, residual: Tensor) -> Any:
        return (backward(dy, x, w)[0] + residual,)

    dy, x, w, residual = inputs()
    count, text = fused(function, dy, x, w, residual.view(6, COLUMNS))
    assert count == 1 and "aten.view" not in text and "aten.add" not in text


def test_a_residual_that_comes_later_moves_the_norm_down() -> None:
    def function(dy: Tensor, x: Tensor, w: Tensor, residual: Tensor) -> Any:
        dx, dw, _ = backward(dy, x, w)
        dx = dx.view(SHAPE)
        return dx + residual.sin().cos(), dw * 2

    assert fused(function, *inputs())[0] == 1


def test_norms_one_after_the_other_each_take_a_sum() -> None:
    def function(dy: Tensor, x: Tensor, w: Tensor, residual: Tensor) -> Any:
        first = residual + backward(dy, x, w)[0].view(SHAPE)
        second = first + backward(first.sin().view(-1, COLUMNS), x, w)[0].view(SHAPE)
        return (second,)

    assert fused(function, *inputs())[0] == 2


def test_of_several_sums_the_first_is_taken() -> None:
    def function(dy: Tensor, x: Tensor, w: Tensor, residual: Tensor) -> Any:
        return (residual + backward(dy, x, w)[0].view(SHAPE) + residual.sin(),)

    count, text = fused(function, *inputs())
    assert count == 1 and text.count("aten.add") == 1


Rest = Callable[[Tensor, Tensor, Tensor], Any]
LEFT: dict[str, Rest] = {
    "another reader of dx": lambda dx, dw, r: (dx.view(SHAPE) + r, dx.sin()),
    "another reader of its view": lambda dx, dw, r: (lambda v: (v + r, v.sin()))(dx.view(SHAPE)),
    "dx is an output": lambda dx, dw, r: (dx.view(SHAPE) + r, dx),
    "alpha": lambda dx, dw, r: (torch.add(dx.view(SHAPE), r, alpha=2),),
    "a wider dtype": lambda dx, dw, r: (dx.view(SHAPE) + r.double(),),
    "a narrower dtype": lambda dx, dw, r: (dx.view(SHAPE) + r.half(),),
    "a broadcast row": lambda dx, dw, r: (dx.view(SHAPE) + r[0, 0],),
    "a broadcast of dx": lambda dx, dw, r: (dx.view(1, *SHAPE) + torch.stack([r, r]),),
    "a number": lambda dx, dw, r: (dx.view(SHAPE) + 1.0,),
    "twice itself": lambda dx, dw, r: (lambda v: (v + v,))(dx.view(SHAPE)),
    "a difference": lambda dx, dw, r: (dx.view(SHAPE) - r,),
    "a step between": lambda dx, dw, r: (dx.view(SHAPE) * 2 + r,),
    "columns that run first": lambda dx, dw, r: (dx + r.reshape(6, COLUMNS).t().contiguous().t(),),
    "no matrix in memory": lambda dx, dw, r: (dx.view(SHAPE) + r.repeat(1, 1, 2)[..., ::2],),
    "what dw is needed for": lambda dx, dw, r: (dx.view(SHAPE) + r * dw,),
    "no sum": lambda dx, dw, r: (dx, r.sin()),
}


@pytest.mark.parametrize("what", LEFT)
def test_left_alone(what: str) -> None:
    def function(dy: Tensor, x: Tensor, w: Tensor, residual: Tensor) -> Any:
        dx, dw, _ = backward(dy, x, w)
        return LEFT[what](dx, dw, residual)

    assert fused(function, *inputs(torch.float32))[0] == 0


def test_a_sum_of_the_other_direction_is_left_alone() -> None:
    def function(dy: Tensor, x: Tensor, w: Tensor, residual: Tensor) -> Any:
        return (residual + backward(dy, x, w)[0].view(SHAPE),)

    for key in ("partitioner_tag", "recompute", "ac_graph_id"):
        gm = traced(function, *inputs())
        (total,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
        total.meta[key] = "another"
        assert fuse_norm_backward(gm.graph) == 0


class Block(nn.Module):
    """Two norms with residuals around them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.mix, self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """Blocks, each recomputed in backward or not."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("recompute", [False, True])
def test_a_training_step_has_the_same_bits_with_the_operator_and_without(recompute: bool, request: Any) -> None:
    model = Model(recompute).bfloat16()
    x = torch.randn(2, 8, 64).bfloat16().requires_grad_()
    opened, whole = [], []
    for results in (opened, whole):
        torch._dynamo.reset()
        x.grad = None
        with manager.recording() as records:
            results.append(train_step(model, compiled(model, recipe="current"), x)[1] | {"x": x.grad})
        results.append(records[0])
        if results is opened:
            request.getfixturevalue("norm_backward_kernel")
    assert not te_nodes(opened[1], "norm_backward")
    nodes = te_nodes(whole[1], "norm_backward")
    assert len(nodes) == 4 and all(arguments_of(node)["residual"] is not None for node in nodes)
    assert {arguments_of(node)["implementation"] for node in nodes} == {"fast"}
    assert opened[0].keys() == whole[0].keys()
    assert all(torch.equal(opened[0][name], gradient) for name, gradient in whole[0].items())


@pytest.mark.usefixtures("fresh_dynamo", "norm_backward_kernel")
def test_what_is_frozen_is_not_computed() -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32))
    x = torch.randn(8, 64)
    for trained in ({"0.weight"}, {"0.bias", "1.weight"}, {"1.weight"}, {"0.weight", "0.bias", "x"}, {"x"}):
        torch._dynamo.reset()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        with manager.recording() as records:
            _, gradients = train_step(model, compiled(model), x.clone().requires_grad_("x" in trained))
        assert set(gradients) == trained - {"x"}
        asked = [arguments_of(node) for node in te_nodes(records[0], "norm_backward")]
        found = [(a["wants_dx"], a["wants_dw"], a["bias_dtype"] is not None) for a in asked]
        wanted = ("x" in trained, "0.weight" in trained, "0.bias" in trained)
        assert found == ([wanted] if any(wanted) else [])


@pytest.mark.usefixtures("fresh_dynamo", "norm_backward_kernel")
def test_rows_of_any_number_keep_their_symbol() -> None:
    model = Block()
    run = compiled(model, dynamic=True, recipe="current")
    graphs = []
    for rows in (4, 9, 6):
        x = torch.randn(2, rows, 64, requires_grad=True)
        with manager.recording() as records:
            train_step(model, run, x)
        graphs += [record for record in records if record.joint is not None]
        assert x.grad is not None and x.grad.shape == x.shape
    (only,) = graphs
    residuals = [arguments_of(node)["residual"] for node in te_nodes(only, "norm_backward")]
    assert len(residuals) == 2 and None not in residuals
