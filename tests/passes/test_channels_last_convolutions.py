"""Convolutions along one dimension get their channels last, forward and backward; others stay as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

from te_compile.passes import JOINT_PASSES, manager
from te_compile.passes.channels_last_convolutions import channels_last_convolutions
from tests.compiling import compiled, joint_of, relative_error
from tests.passes.test_column_shifts import traced_with_symbols
from tests.passes.test_long_convolutions import CONVOLUTIONS, gradients, traced

module = sys.modules[channels_last_convolutions.__module__]
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
BATCH, LENGTH, WIDTH, OUTPUTS, TAPS = 2, 33, 16, 24, 3


@pytest.fixture(autouse=True)
def _on_the_cpu_with_few_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ON", {"cpu"})
    monkeypatch.setattr(module, "LEAST_CHANNELS", 16)


def operands(dtype: torch.dtype = torch.bfloat16, outputs: int = OUTPUTS, width: int = WIDTH) -> list[Tensor]:
    """x, the weight and the bias."""
    shapes = (BATCH, width, LENGTH), (outputs, width, TAPS), (outputs,)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def convolved(**options: Any) -> Callable[..., Tensor]:
    """y of x, a weight and a bias."""
    return lambda x, weight, bias=None: F.conv1d(x, weight, bias, **options)


def dimensions(graph: Any) -> list[int]:
    """How many each convolution's weight has."""
    found = [node for node in graph.nodes if node.target in CONVOLUTIONS]
    return [node.args[2 if "backward" in str(node.target) else 1].meta["val"].dim() for node in found]


def layouts(graph: Any) -> set[bool]:
    """Are the channels of what convolutions read last in memory?"""
    found = [node for node in graph.nodes if node.target in CONVOLUTIONS]
    read = [each.meta["val"] for node in found for each in node.args[:2]]
    return {bool(each.is_contiguous(memory_format=torch.channels_last)) for each in read}


def check(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Is it right but for the roundings, in aggregate and for each of the channels? On a CPU sums may be rounded."""
    assert got.shape == exact.shape and got.dtype == dtype
    assert relative_error(got, exact) < 2 * ROUNDING[dtype]
    for one, other in zip(got, exact, strict=True) if got.dim() > 1 else ():
        assert relative_error(one, other) < 4 * ROUNDING[dtype]


OPTIONS = [{}, {"stride": 2}, {"padding": 1}, {"dilation": 2, "padding": 2}, {"padding": "same"}, {"stride": 3}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_convolution_gets_its_channels_last(dtype: torch.dtype, options: dict[str, Any]) -> None:
    given, function = operands(dtype), convolved(**options)
    graph = traced(function, *given)
    assert channels_last_convolutions(graph.graph) == 1
    graph.graph.lint()
    graph.recompile()
    assert dimensions(graph.graph) == [4] and layouts(graph.graph) == {True}
    check(graph(*given).movedim(1, 0), function(*(each.double() for each in given)).movedim(1, 0), dtype)


def test_with_one_tap_the_weight_is_not_copied() -> None:
    given = operands()[0], torch.randn(OUTPUTS, WIDTH, 1).bfloat16(), operands()[2]
    dy = torch.randn_like(convolved()(*given))
    for function, inputs in ((convolved(), given), (gradients(convolved()), (dy, *given))):
        graph = traced(function, *inputs)
        channels_last_convolutions(graph.graph)
        graph.recompile()
        assert dimensions(graph.graph)[-1] == 4 and layouts(graph.graph) == {True}
        copies = [node for node in graph.graph.nodes if node.target is torch.ops.aten.clone.default]
        assert not any(node.meta["val"].shape == (OUTPUTS, WIDTH, 1, 1) for node in copies)
        wanted = function(*(each.double() for each in inputs))
        got = graph(*inputs)
        for one, other in zip(got, wanted, strict=True) if isinstance(got, tuple) else ((got, wanted),):
            check(one, other, torch.bfloat16)


def test_without_a_bias_too() -> None:
    given = operands()[:2]
    graph = traced(lambda x, weight: convolved()(x, weight), *given)
    assert channels_last_convolutions(graph.graph) == 1
    graph.recompile()
    check(graph(*given), convolved()(*(each.double() for each in given)), torch.bfloat16)


@pytest.mark.parametrize("wanted", [(0, 1, 2), (0, 1), (1, 2), (0,), (1,), (2,)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_and_so_do_its_gradients(options: dict[str, Any], wanted: tuple[int, ...]) -> None:
    given = operands()
    dy = torch.randn_like(convolved(**options)(*given))
    function = gradients(convolved(**options), wanted)
    graph = traced(function, dy, *given)
    channels_last_convolutions(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert set(dimensions(graph.graph)) <= {4}
    for got, exact in zip(graph(dy, *given), function(*(each.double() for each in (dy, *given))), strict=True):
        check(got, exact, torch.bfloat16)


@pytest.mark.parametrize("last", [False, True])
def test_results_lie_in_memory_as_they_did(last: bool) -> None:
    """Or a view behind one would not be one."""
    x, weight, bias = operands()
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if last else x
    dy = torch.randn_like(convolved()(x, weight, bias))
    for function, given in ((convolved(), (x, weight, bias)), (gradients(convolved()), (dy, x, weight, bias))):
        graph = traced(function, *given)
        before = [each.meta["val"].stride() for each in graph.graph.output_node().all_input_nodes]
        channels_last_convolutions(graph.graph)
        graph.recompile()
        results = graph(*given)
        assert [each.stride() for each in (results if isinstance(results, tuple) else [results])] == before


# ---------------------------------------------------------------------------------------------------- it does not fire


@pytest.mark.parametrize("sizes", [{"outputs": 8}, {"width": 8}, {"outputs": 20}, {"width": 20}], ids=str)
def test_few_channels_stay_and_odd_ones(sizes: dict[str, int]) -> None:
    assert channels_last_convolutions(traced(convolved(), *operands(**sizes)).graph) == 0


def test_symbolic_lengths_stay() -> None:
    graph = traced_with_symbols(convolved(), (2,), *operands())
    assert channels_last_convolutions(graph.graph) == 0


def test_groups_stay() -> None:
    x, _, bias = operands()
    weight = torch.randn(OUTPUTS, WIDTH // 2, TAPS).bfloat16()
    assert channels_last_convolutions(traced(convolved(groups=2), x, weight, bias).graph) == 0


def test_float32_stays() -> None:
    assert channels_last_convolutions(traced(convolved(), *operands(torch.float32)).graph) == 0


def test_on_a_cpu_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(module, "LEAST_CHANNELS", 16)
    assert channels_last_convolutions(traced(convolved(), *operands()).graph) == 0


def test_two_dimensions_stay() -> None:
    x, weight = torch.randn(1, WIDTH, 9, 9).bfloat16(), torch.randn(OUTPUTS, WIDTH, 3, 3).bfloat16()
    assert channels_last_convolutions(traced(lambda x, weight: F.conv2d(x, weight), x, weight).graph) == 0


def test_a_transposed_one_stays() -> None:
    x, weight = operands()[0], torch.randn(WIDTH, OUTPUTS, TAPS).bfloat16()
    assert channels_last_convolutions(traced(lambda x, weight: F.conv_transpose1d(x, weight), x, weight).graph) == 0


class Normed(nn.Module):
    """Convolutions with norms of each channel along the length, or of all channels at each place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Conv1d(WIDTH, OUTPUTS, TAPS, bias=False)  # norms take it away
        self.second, self.third = (nn.Conv1d(OUTPUTS, OUTPUTS, TAPS) for _ in range(2))
        norms = {
            "group": nn.GroupNorm(8, OUTPUTS),
            "instance": nn.InstanceNorm1d(OUTPUTS, affine=True),
            "layer": nn.LayerNorm(OUTPUTS),
        }
        self.norm = norms[kind]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) if isinstance(self.norm, nn.LayerNorm) else self.norm(x)
        y: Tensor = self.third(F.gelu(self.second(F.gelu(x))))
        return y


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("kind", "expected"), [("group", 2), ("instance", 2), ("layer", 6)])
def test_beside_a_norm_along_the_length_they_stay(kind: str, expected: int) -> None:
    """Of three the first and the second, each with its backward; without one they do not."""
    model, x = Normed(kind).bfloat16(), torch.randn(BATCH, WIDTH, LENGTH).bfloat16()
    exact = deepcopy(model).double()
    with manager.recording() as records:
        fast = compiled(model, exclude=["*"])
        got = a_step(fast, model, x)
        with torch.no_grad():
            fast(x)
    assert counts(records[0]) == [expected] and counts(records[-1]) == [3]
    for one, other in zip(got, a_step(exact, exact, x.double()), strict=True):
        assert relative_error(one, other) < 6e-2


# ----------------------------------------------------------------------------------------------------------- in models


class Listening(nn.Module):
    """Convolutions of a long signal as wav2vec 2.0 has them, before a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(WIDTH, OUTPUTS, TAPS, stride=2), nn.Conv1d(OUTPUTS, WIDTH, TAPS, stride=2)
        self.norm, self.up = nn.LayerNorm(OUTPUTS), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2))
        y: Tensor = self.up(F.gelu(self.second(x)).transpose(1, 2))
        return y


class Checkpointed(Listening):
    """The same, computed again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


def a_step(run: Callable[..., Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, and the gradients of x and all parameters for one of the result that follows from its shape."""
    x = x.detach().requires_grad_()
    y = run(x)
    dy = (1 + torch.arange(y.numel()).mul(0.37).sin()).to(y.dtype).reshape(y.shape)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)]


def counts(record: Any) -> list[int]:
    return [each.count for each in record.passes if each.name == "channels_last_convolutions"]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", [Listening, Checkpointed])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_model_trains_and_infers(compiler: str, kind: type[nn.Module]) -> None:
    model, x = kind().bfloat16(), torch.randn(BATCH, WIDTH, LENGTH).bfloat16()
    exact = deepcopy(model).double()
    wanted = a_step(exact, exact, x.double())
    with manager.recording() as records:
        fast = compiled(model, compiler=compiler, exclude=["*"], cost_model=False)
        got = a_step(fast, model, x)
        with torch.no_grad():
            result = fast(x)
    assert counts(records[0]) == [4] and counts(records[-1]) == [2]
    for one, other in zip((*got, result), (*wanted, wanted[0]), strict=True):
        assert relative_error(one, other) < 4e-2


@pytest.mark.usefixtures("fresh_dynamo")
def test_linears_around_are_in_fp8() -> None:
    model, x = Listening().bfloat16(), torch.randn(BATCH, WIDTH, LENGTH).bfloat16()
    with manager.recording() as records:
        got = a_step(compiled(model, strict=True), model, x)
    assert dimensions(joint_of(records[0])) == [4] * 4
    for one, other in zip(got, a_step(model, model, x), strict=True):
        assert relative_error(one, other) < 0.3


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_signals_of_other_lengths_are_compiled(compiler: str) -> None:
    """With the channels last Inductor would fail to compile them."""
    model = Listening().bfloat16()
    exact = deepcopy(model).double()
    with manager.recording() as records:
        fast = compiled(model, dynamic=True, exclude=["*"], compiler=compiler)
        for length in (LENGTH, LENGTH + 4, 3 * LENGTH):
            x = torch.randn(BATCH, WIDTH, length).bfloat16()
            for one, other in zip(a_step(fast, model, x), a_step(exact, exact, x.double()), strict=True):
                assert relative_error(one, other) < 4e-2
    assert {count for record in records for count in counts(record)} == {0}


@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_hands_over_what_it_has_written_so() -> None:
    """The second convolution reads a buffer of four dimensions that the kernel of the norm has written, and no copy."""
    model = Listening().bfloat16().requires_grad_(False)
    fast = compiled(model, compiler="inductor", exclude=["*"])
    _, codes = run_and_get_code(fast, torch.randn(BATCH, WIDTH, LENGTH).bfloat16())
    [code] = codes
    length = (LENGTH - TAPS) // 2 + 1
    assert f"({OUTPUTS * length}, 1, {OUTPUTS * length}, {OUTPUTS})" in code.replace("L", "")


def test_it_runs_before_the_producers_are_made() -> None:
    names = [each.__name__ for each in JOINT_PASSES]
    assert names.index("long_convolutions") < names.index("channels_last_convolutions") < names.index("fuse_producers")
