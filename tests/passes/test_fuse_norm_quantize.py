"""A norm and the quantize of its result become one operator, in the joint graph, without a bit of difference."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

from te_compile.ops.linear import LinearConfig
from te_compile.ops.norm import KINDS
from te_compile.passes.fuse_norm_quantize import fuse_norm_quantize
from te_compile.passes.share_inputs import share_inputs
from te_compile.passes.text import ops_text
from te_compile.recipe import ScaleRule

RULE = ScaleRule().text()
E4M3 = torch.float8_e4m3fn
CONFIG = LinearConfig("layer", E4M3, torch.float8_e5m2, RULE).text()
EPS = 1e-5
GraphPass = Callable[[Graph], int]


class Compiled:
    """``function`` through AOTAutograd, with ``passes`` on its joint graph; keeps the graph and what they counted."""

    def __init__(self, function: Callable[..., Any], passes: Sequence[GraphPass]) -> None:
        torch._dynamo.reset()
        self.counts: list[int] = []
        self.before = self.after = ""
        self.passes = passes
        executed = aot_autograd(
            fw_compiler=lambda module, _: make_boxed_func(module.forward),
            bw_compiler=lambda module, _: make_boxed_func(module.forward),
            inference_compiler=lambda module, _: make_boxed_func(self.rewrite(module).forward),
            partition_fn=lambda module, inputs, **kw: min_cut_rematerialization_partition(
                self.rewrite(module), inputs, **kw
            ),
            decompositions=select_decomp_table(),
        )
        self.run = torch.compile(function, backend=executed, fullgraph=True)

    def rewrite(self, module: GraphModule) -> GraphModule:
        self.before = ops_text(module.graph)
        self.counts = [graph_pass(module.graph) for graph_pass in self.passes]
        module.graph.lint()
        self.after = ops_text(module.graph)
        module.recompile()
        return module


def quantized(x: Tensor, scale: Tensor | None, rowwise: bool = True, columnwise: bool = True) -> Any:
    return torch.ops.te.quantize(x, scale, E4M3, rowwise, columnwise, RULE)


def linear(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    codes, codes_transposed, _, scale_inv = quantized(weight.detach(), None)
    operands = (x, weight, None, codes, codes_transposed, scale_inv, scale, None, None, x.dtype, CONFIG)
    return torch.ops.te.linear(*operands)[0]


def tensors(*, rows: int = 6, columns: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    x, w, matrix = torch.randn(2, rows // 2, columns), torch.randn(columns), torch.randn(16, columns)
    return tuple(tensor.bfloat16().requires_grad_() for tensor in (x, w, matrix))


def test_the_graph_before_and_after() -> None:
    def function(x: Tensor, w: Tensor, scales: Tensor) -> Any:
        y = torch.ops.te.norm(x, w, None, EPS, "rms")
        q, qt, amax, scale_inv = quantized(y.view(-1, 32), scales[1])
        return q, qt, amax, scale_inv

    compiled = Compiled(function, [fuse_norm_quantize])
    compiled.run(torch.randn(2, 3, 32), torch.randn(32), torch.ones(4))
    assert compiled.counts == [1]
    assert compiled.before == textwrap.dedent(f"""\
        view = aten.view(arg0_1, [-1, 32])
        norm_forward = te.norm_forward(view, arg1_1, None, {EPS}, 'rms')
        getitem = getitem(norm_forward, 0)
        view_1 = aten.view(getitem, [2, 3, 32])
        view_2 = aten.view(view_1, [-1, 32])
        select = aten.select.int(arg2_1, 0, 1)
        quantize = te.quantize(view_2, select, float8_e4m3fn, True, True, '{RULE}')
        getitem_3 = getitem(quantize, 0)
        getitem_4 = getitem(quantize, 1)
        getitem_5 = getitem(quantize, 2)
        getitem_6 = getitem(quantize, 3)
        return (getitem_3, getitem_4, getitem_5, getitem_6)""")
    assert compiled.after == textwrap.dedent(f"""\
        view = aten.view(arg0_1, [-1, 32])
        select = aten.select.int(arg2_1, 0, 1)
        norm_quantize = te.norm_quantize(view, arg1_1, None, {EPS}, 'rms', select, float8_e4m3fn, True, True, False, \
'{RULE}')
        getitem_3 = getitem(norm_quantize, 1)
        getitem_4 = getitem(norm_quantize, 2)
        getitem_5 = getitem(norm_quantize, 3)
        getitem_6 = getitem(norm_quantize, 4)
        return (getitem_3, getitem_4, getitem_5, getitem_6)""")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", (True, False))
def test_training_gives_the_same_bits_fused_and_apart(kind: str, given: bool) -> None:
    def function(x: Tensor, w: Tensor, matrix: Tensor, scales: Tensor) -> Tensor:
        y = torch.ops.te.norm(x, w, None, EPS, kind)
        return linear(y, matrix, scales[0] if given else None)

    leaves = tensors()
    dy = torch.randn(2, 3, 16).bfloat16()
    results = []
    for passes in ([], [fuse_norm_quantize]):
        compiled = Compiled(function, passes)
        y = compiled.run(*leaves, torch.tensor([7.0]))
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
        assert compiled.counts == [1] * len(passes)
    assert "norm_forward" not in compiled.after and ", True, True, False, " in compiled.after
    for fused, apart in zip(results[1], results[0], strict=True):
        assert torch.equal(fused, apart)


def test_a_residual_on_the_norm_is_served_by_the_emitted_output() -> None:
    def function(x: Tensor, w: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
        y = torch.ops.te.norm(x, w, None, EPS, "layer")
        return linear(y, matrix, scale).sum(-1, keepdim=True) + y

    leaves = tensors()
    dy = torch.randn(2, 3, 32).bfloat16()
    results = []
    for passes in ([], [fuse_norm_quantize]):
        compiled = Compiled(function, passes)
        y = compiled.run(*leaves, torch.tensor(3.0))
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
    assert compiled.counts == [1] and ", True, True, True, " in compiled.after
    for fused, apart in zip(results[1], results[0], strict=True):
        assert torch.equal(fused, apart)


def test_quantizes_with_one_scale_are_one_and_ask_for_what_either_asked() -> None:
    def function(x: Tensor, w: Tensor, scale: Tensor) -> Any:
        y = torch.ops.te.norm(x, w, None, EPS, "rms")
        return quantized(y, scale, columnwise=False)[0], quantized(y.view(-1, 32), scale, rowwise=False)[1]

    inputs = (torch.randn(6, 32), torch.randn(32), torch.tensor(2.0))
    compiled = Compiled(function, [fuse_norm_quantize])
    for got, want in zip(compiled.run(*inputs), function(*inputs), strict=True):
        assert torch.equal(got.float(), want.float())
    assert compiled.counts == [1] and "te.quantize" not in compiled.after


def test_a_second_scale_keeps_its_own_quantize() -> None:
    def function(x: Tensor, w: Tensor, scales: Tensor) -> Any:
        y = torch.ops.te.norm(x, w, None, EPS, "rms")
        return quantized(y, scales[0])[0], quantized(y, scales[1])[0]

    inputs = (torch.randn(6, 32), torch.randn(32), torch.tensor([2.0, 8.0]))
    compiled = Compiled(function, [fuse_norm_quantize])
    for got, want in zip(compiled.run(*inputs), function(*inputs), strict=True):
        assert torch.equal(got.float(), want.float())
    assert compiled.counts == [1]
    assert compiled.after.count("te.norm_quantize(") == compiled.after.count("te.quantize(") == 1
    assert ", True, True, True, " in compiled.after


def test_sizes_that_are_symbols_are_no_obstacle() -> None:
    def function(x: Tensor, w: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
        return linear(torch.ops.te.norm(x, w, None, EPS, "rms"), matrix, scale)

    compiled = Compiled(function, [share_inputs, fuse_norm_quantize])
    x, w, matrix = tensors()
    torch._dynamo.mark_dynamic(x, 1)
    y = compiled.run(x, w, matrix, torch.tensor(2.0))
    y.sum().backward()
    assert compiled.counts[1] == 1
    want = function(x.detach(), w.detach(), matrix.detach(), torch.tensor(2.0))
    assert torch.equal(y, want)


def test_checkpointed_norms_fuse_and_are_recomputed_to_the_same_gradients() -> None:
    def block(x: Tensor, w: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
        return linear(torch.ops.te.norm(x, w, None, EPS, "rms"), matrix, scale)

    leaves, scale = tensors(), torch.tensor(2.0)
    dy = torch.randn(2, 3, 16).bfloat16()
    plain = Compiled(block, [fuse_norm_quantize])
    again = Compiled(lambda *inputs: checkpoint(block, *inputs, use_reentrant=False), [fuse_norm_quantize])
    results = []
    for compiled in (plain, again):
        y = compiled.run(*leaves, scale)
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
        assert compiled.counts == [1]
    for recomputed, saved in zip(results[1], results[0], strict=True):
        assert torch.equal(recomputed, saved)


def transposed(x: Tensor, w: Tensor, scale: Tensor) -> Any:
    return quantized(torch.ops.te.norm(x, w, None, EPS, "rms").t(), scale)[0]


def per_head(x: Tensor, w: Tensor, scale: Tensor) -> Any:
    return quantized(torch.ops.te.norm(x, w, None, EPS, "rms").view(-1, 8), scale)[0]


def scaled_first(x: Tensor, w: Tensor, scale: Tensor) -> Any:
    return quantized(torch.ops.te.norm(x, w, None, EPS, "rms") * 2, scale)[0]


def scale_from_the_norm(x: Tensor, w: Tensor, scale: Tensor) -> Any:
    y = torch.ops.te.norm(x, w, None, EPS, "rms")
    return quantized(y, scale + y.amax())[0]


@pytest.mark.parametrize("function", (transposed, per_head, scaled_first, scale_from_the_norm))
def test_anything_but_a_quantize_of_the_norm_s_rows_stays_apart(function: Callable[..., Any]) -> None:
    compiled = Compiled(function, [fuse_norm_quantize])
    compiled.run(torch.randn(6, 32), torch.randn(32), torch.tensor(2.0))
    assert compiled.counts == [0]
    assert compiled.after == compiled.before and "te.quantize(" in compiled.after
