"""Convolutions in groups with long kernels become products, forward and backward; others stay as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from te_compile.passes import JOINT_PASSES, manager
from te_compile.passes.long_convolutions import long_convolutions
from tests.compiling import compiled, joint_of, relative_error
from tests.passes.test_column_shifts import traced_with_symbols

module = sys.modules[long_convolutions.__module__]
aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
BATCH, LENGTH, GROUPS, CHANNELS, TAPS = 2, 45, 2, 16, 18
WIDTH = GROUPS * CHANNELS


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ON", {"cpu"})


def operands(dtype: torch.dtype = torch.bfloat16, taps: int = TAPS, outputs: int = CHANNELS) -> list[Tensor]:
    """x, the weight and the bias."""
    shapes = (BATCH, WIDTH, LENGTH), (GROUPS * outputs, CHANNELS, taps), (GROUPS * outputs,)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def convolved(**options: Any) -> Callable[..., Tensor]:
    """y of x, a weight and a bias."""
    given = {"padding": TAPS // 2, "groups": GROUPS, **options}
    return lambda x, weight, bias=None: F.conv1d(x, weight, bias, **given)


def gradients(convolution: Callable[..., Tensor], wanted: tuple[int, ...] = (0, 1, 2)) -> Callable[..., Any]:
    """Those of ``wanted`` of its operands, for a gradient of the result that is the first one given."""

    def function(dy: Tensor, *given: Tensor) -> Any:
        given = tuple(each.detach().requires_grad_(index in wanted) for index, each in enumerate(given))
        y = convolution(*given)
        return torch.autograd.grad(y, [given[index] for index in wanted], dy)

    return function


def traced(function: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> GraphModule:
    """As a joint graph has it; dynamic: batch and length of the first input are symbols."""
    if dynamic:
        return traced_with_symbols(function, (0, 2), *inputs)
    graph = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    assert isinstance(graph, GraphModule)
    return graph


def passed(function: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> tuple[int, GraphModule]:
    graph = traced(function, *inputs, dynamic=dynamic)
    count = long_convolutions(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return count, graph


def are_left(graph: GraphModule) -> int:
    return sum(node.target in CONVOLUTIONS for node in graph.graph.nodes)


def check(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Is it right but for the roundings, in aggregate and for each of the channels?"""
    assert got.shape == exact.shape and got.dtype == dtype
    assert relative_error(got, exact) < ROUNDING[dtype]
    for one, other in zip(got, exact, strict=True) if got.dim() > 1 else ():
        assert relative_error(one, other) < 2 * ROUNDING[dtype]


# ------------------------------------------------------------------------------------------------------------- it fires


@pytest.mark.parametrize("outputs", [CHANNELS, 24])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_convolution_becomes_products(dtype: torch.dtype, outputs: int) -> None:
    given = operands(dtype, outputs=outputs)
    count, graph = passed(convolved(), *given)
    assert count == 1 and not are_left(graph)
    check(graph(*given).movedim(1, 0), convolved()(*(each.double() for each in given)).movedim(1, 0), dtype)


def test_without_a_bias_too() -> None:
    given = operands()[:2]
    count, graph = passed(lambda x, weight: convolved()(x, weight), *given)
    assert count == 1
    check(graph(*given), convolved()(*(each.double() for each in given)), torch.bfloat16)


@pytest.mark.parametrize("wanted", [(0, 1, 2), (1, 2), (0,), (1,), (0, 2)], ids=str)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_and_so_do_its_gradients(dtype: torch.dtype, wanted: tuple[int, ...]) -> None:
    given = operands(dtype)
    dy = torch.randn_like(convolved()(*given))
    function = gradients(convolved(), wanted)
    graph = traced(function, dy, *given)
    long_convolutions(graph.graph)
    graph.recompile()
    assert not are_left(graph)
    for got, exact in zip(graph(dy, *given), function(*(each.double() for each in (dy, *given))), strict=True):
        check(got, exact, dtype)


@pytest.mark.parametrize("padding", [0, 1, TAPS - 1])
def test_with_any_padding_up_to_the_kernel(padding: int) -> None:
    given = operands()
    function = convolved(padding=padding)
    count, graph = passed(function, *given)
    assert count == 1
    check(graph(*given), function(*(each.double() for each in given)), torch.bfloat16)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_with_a_padding_by_name(padding: str) -> None:
    given = operands(taps=TAPS - 1)
    function = convolved(padding=padding)
    count, graph = passed(function, *given)
    assert count == 1
    check(graph(*given), function(*(each.double() for each in given)), torch.bfloat16)


def test_results_lie_in_memory_as_they_did() -> None:
    """Or a view behind one would not be one."""
    x, weight, bias = operands()
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    for function, given in ((convolved(), (x, weight, bias)), (gradients(convolved()), (x, x, weight, bias))):
        if len(given) == 4:
            given = (torch.randn_like(convolved()(*given[1:])), *given[1:])
        graph = traced(function, *given)
        before = [each.meta["val"].stride() for each in graph.graph.output_node().all_input_nodes]
        long_convolutions(graph.graph)
        graph.recompile()
        results = graph(*given)
        assert [each.stride() for each in (results if isinstance(results, tuple) else [results])] == before
        assert [each.meta["val"].stride() for each in graph.graph.output_node().all_input_nodes] == before


def test_lengths_and_batches_may_be_symbols() -> None:
    given = operands()
    count, graph = passed(convolved(), *given, dynamic=True)
    assert count == 1
    for batch, length in ((BATCH, LENGTH), (3, 64), (1, 17)):
        x = torch.randn(batch, WIDTH, length).bfloat16()
        check(graph(x, *given[1:]), convolved()(*(each.double() for each in (x, *given[1:]))), torch.bfloat16)


# ----------------------------------------------------------------------------------------------------- it does not fire


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"dilation": 2},
        {"padding": TAPS},
    ],
    ids=str,
)
def test_others_stay(options: dict[str, Any]) -> None:
    count, graph = passed(convolved(**options), *operands())
    assert count == 0 and are_left(graph) == 1


def test_without_groups_it_stays() -> None:
    x, _, bias = operands()
    count, _ = passed(convolved(groups=1), x, torch.randn(WIDTH, WIDTH, TAPS).bfloat16(), bias)
    assert count == 0


def test_a_depthwise_one_stays() -> None:
    x, _, bias = operands()
    count, _ = passed(convolved(groups=WIDTH), x, torch.randn(WIDTH, 1, TAPS).bfloat16(), bias)
    assert count == 0


def test_a_few_taps_stay() -> None:
    assert passed(convolved(), *operands(taps=15))[0] == 0


def test_few_channels_stay() -> None:
    assert passed(convolved(), *operands(outputs=8))[0] == 0


def test_float32_stays() -> None:
    assert passed(convolved(), *operands(torch.float32))[0] == 0


def test_on_a_cpu_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert passed(convolved(), *operands())[0] == 0


def test_two_dimensions_stay() -> None:
    x, weight = torch.randn(1, WIDTH, 20, 20).bfloat16(), torch.randn(WIDTH, CHANNELS, 17, 17).bfloat16()
    assert passed(lambda x, weight: F.conv2d(x, weight, groups=GROUPS), x, weight)[0] == 0


def test_a_transposed_one_stays() -> None:
    x, weight = operands()[0], torch.randn(WIDTH, CHANNELS, TAPS).bfloat16()
    assert passed(lambda x, weight: F.conv_transpose1d(x, weight, groups=GROUPS), x, weight)[0] == 0


def test_a_weight_of_symbolic_size_stays() -> None:
    x, weight, _ = operands()
    graph = traced_with_symbols(lambda weight, x: convolved()(x, weight), (2,), weight, x)
    assert long_convolutions(graph.graph) == 0


# ------------------------------------------------------------------------------------------------------------ in models


class Encoder(nn.Module):
    """Positions as wav2vec 2.0 has them, before a linear."""

    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Conv1d(WIDTH, WIDTH, TAPS, padding=TAPS // 2, groups=GROUPS)
        self.positions, self.up = weight_norm(convolution, dim=2), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions(x.transpose(1, 2))[..., :-1]
        y: Tensor = self.up(x + F.gelu(positions).transpose(1, 2))
        return y


class Checkpointed(Encoder):
    """The same, computed again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


def frames(length: int = LENGTH) -> Tensor:
    return torch.randn(BATCH, length, WIDTH).bfloat16()


def a_step(run: Callable[..., Tensor], model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The result, and the gradients of x and all parameters."""
    x = x.detach().requires_grad_()
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)]


def counts(record: Any) -> list[int]:
    return [each.count for each in record.passes if each.name == "long_convolutions"]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", [Encoder, Checkpointed])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_model_trains_and_infers(compiler: str, kind: type[nn.Module]) -> None:
    model, x = kind().bfloat16(), frames()
    dy = torch.randn(BATCH, LENGTH, 2 * WIDTH).bfloat16()
    exact = deepcopy(model).double()
    wanted = a_step(exact, exact, x.double(), dy.double())
    with manager.recording() as records:
        fast = compiled(model, compiler=compiler, exclude=["*"], cost_model=False)
        got = a_step(fast, model, x, dy)
        with torch.no_grad():
            result = fast(x)
    assert counts(records[0]) == [2]
    assert counts(records[-1]) == [1]
    for one, other in zip((*got, result), (*wanted, wanted[0]), strict=True):
        assert relative_error(one, other) < 2e-2


@pytest.mark.usefixtures("fresh_dynamo")
def test_linears_around_are_in_fp8() -> None:
    model, x = Encoder().bfloat16(), frames()
    dy = torch.randn(BATCH, LENGTH, 2 * WIDTH).bfloat16()
    with manager.recording() as records:
        got = a_step(compiled(model, strict=True), model, x, dy)
    joint = joint_of(records[0])
    assert not any(node.target in CONVOLUTIONS for node in joint.nodes)
    for one, other in zip(got, a_step(model, model, x, dy), strict=True):
        assert relative_error(one, other) < 0.2


@pytest.mark.usefixtures("fresh_dynamo")
def test_windows_and_matrices_are_not_saved() -> None:
    model, saved = Encoder().bfloat16(), list[int]()

    def keep(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    x = frames(400).requires_grad_()
    fast = compiled(model, compiler="inductor", exclude=["*"])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = fast(x)
    y.float().sum().backward()
    assert saved and max(saved) <= max(2 * x.numel(), *(each.numel() for each in model.parameters()))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_sequences_of_other_lengths_share_the_code(compiler: str) -> None:
    model, compilations = Encoder().bfloat16(), list[int]()
    exact = deepcopy(model).double()
    with manager.recording() as records:
        fast = compiled(model, dynamic=True, exclude=["*"], compiler=compiler)
        for length in (LENGTH, LENGTH + 3, 2 * LENGTH):
            x, dy = frames(length), torch.randn(BATCH, length, 2 * WIDTH).bfloat16()
            wanted = a_step(exact, exact, x.double(), dy.double())
            for one, other in zip(a_step(fast, model, x, dy), wanted, strict=True):
                assert relative_error(one, other) < 2e-2
            compilations.append(len(records))
    assert len(set(compilations)) == 1 and counts(records[-1]) == [2]


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_may_leave_it_out() -> None:
    with manager.recording() as records:
        compiled(Encoder().bfloat16(), skip_passes=["long_convolutions"])(frames())
    assert any(node.target in CONVOLUTIONS for node in joint_of(records[0]).nodes)


def test_it_runs_before_the_producers_are_made() -> None:
    names = [each.__name__ for each in JOINT_PASSES]
    assert names.index("long_convolutions") < names.index("fuse_producers")
