"""Inductor knows our operators beforehand, and what it notes of others stays short however deep the graph."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config, exc, graph
from torch._inductor.lowering import lowerings, make_fallback
from torch._inductor.utils import run_and_get_code

from te_compile import fallbacks
from te_compile.backend import te_fp8
from te_compile.fallbacks import short_texts, te_operators, tell_inductor

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LAYERS = 6
CHECKOUT = Path(__file__).parents[1]


def test_whoever_is_imported_first() -> None:
    """Inductor takes operators that tracing opens up for decompositions, if they are there when it is imported."""
    program = (
        "import te_compile, te_compile.ops, torch\n"
        "assert 'torch._inductor.decomposition' not in __import__('sys').modules\n"
        "from tests.compiling import know_the_backend\n"
        "know_the_backend()\n"
        "torch.compile(torch.nn.Linear(16, 16), backend='te_fp8')(torch.randn(32, 16))"
    )
    subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, check=True, timeout=300)


@torch.library.custom_op("te_compile_tests::users_own", mutates_args=())
def users_own(x: Tensor) -> Tensor:
    """An operator that Inductor has not heard of."""
    return x + 1


@users_own.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Deep(nn.Module):
    """A residual stream that each layer reads twice, its sums in the products: one operator of ours after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return users_own(x)


def test_no_operator_of_ours_is_met_unprepared() -> None:
    tell_inductor()
    names = {operator._schema.name for operator in te_operators()}
    assert {"te::gemm", "te::quantize", "te::fused_quantize", "te::snapshot"} <= names
    assert all(operator in lowerings for operator in te_operators())
    model = Deep().layers[0]
    with config.patch(implicit_fallbacks=False):
        torch.compile(model, backend=te_fp8)(torch.randn(32, 16)).sum().backward()


@pytest.mark.parametrize("directly", [False, True])
def test_generated_code_calls_operators_directly_where_it_is_to(
    monkeypatch: pytest.MonkeyPatch, directly: bool
) -> None:
    monkeypatch.setattr(fallbacks, "DIRECT_ON", {"cpu"} if directly else {"cuda"})
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), torch.randn(32, 16)

    def gradients(model: nn.Module, backend: Any, options: dict[str, Any]) -> list[Tensor]:
        compiled = torch.compile(model, backend=backend, options=options)
        compiled(x).square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    found, codes = run_and_get_code(lambda: gradients(copy.deepcopy(model), te_fp8, {}))
    called = "\n".join(codes)
    assert ("te_calls.gemm.site(early=True)" in called) == directly
    assert ("torch.ops.te.gemm.default(" in called) != directly
    assert ("'torch.ops.te.gemm.default')" in called) != directly  # what is asked of each result
    expected = gradients(copy.deepcopy(model), te_fp8, {"compiler": "aot_eager"})
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_where_cuda_graphs_are_captured_the_dispatcher_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallbacks, "DIRECT_ON", {"cpu"})
    with torch.no_grad():
        fast = torch.compile(nn.Linear(16, 32), backend=te_fp8, options={"mode": "reduce-overhead"})
        _, codes = run_and_get_code(fast, torch.randn(32, 16))
    assert "torch.ops.te.gemm.default(" in "\n".join(codes)


@pytest.mark.slow
def test_only_where_shapes_are_constant_a_call_is_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallbacks, "DIRECT_ON", {"cpu"})
    model = nn.Linear(16, 32)
    compiled = torch.compile(model, backend=te_fp8, dynamic=True)
    with torch.no_grad():
        _, codes = run_and_get_code(compiled, torch.randn(32, 16))
        assert "te_calls.gemm(" in "\n".join(codes)
        for rows in (32, 48):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(compiled(x), model(x), rtol=0.1, atol=0.1)


class Drops(nn.Module):
    """A linear, and a dropout whose mask has the size of its input and reads a seed of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x), 0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("mask_kernels")
def test_a_call_that_is_given_a_size_beside_its_tensors_is_no_site_if_that_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fallbacks, "DIRECT_ON", {"cpu"})
    for dynamic in (False, True):
        torch._dynamo.reset()
        fast = torch.compile(Drops(), backend=te_fp8, dynamic=dynamic, options={"cost_model": False})
        with torch.no_grad():
            _, codes = run_and_get_code(fast, torch.randn(32, 16))
            code = "\n".join(codes)
            assert ("te_calls.dropout_mask(" in code) == dynamic
            assert ("te_calls.dropout_mask.site(" in code) != dynamic
            for rows in (32, 48):
                kept = fast(torch.randn(rows, 16)) != 0
                assert 0.3 < kept.double().mean() < 0.7


class Nested(nn.Module):
    """A region that is compiled once and called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    @torch.compiler.nested_compile_region
    def block(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


@pytest.mark.slow
def test_calls_in_a_graph_within_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallbacks, "DIRECT_ON", {"cpu"})
    model, x = Nested(), torch.randn(32, 16)
    with torch.no_grad():
        got = torch.compile(model, backend=te_fp8)(x)
        torch.testing.assert_close(got, model(x), rtol=0.1, atol=0.2)


class Writes(nn.Module):
    """What it is given: an input that is left alone, one that is changed, and a buffer that may be."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(16))

    def forward(self, x: Tensor, changed: str) -> Tensor:
        if changed == "buffer":
            self.calls += 1
        if changed == "input":
            x.mul_(2)
        return self.fc(x) + self.calls


@pytest.mark.parametrize("changed", ["", "buffer", "input"])
def test_places_may_be_played_early_where_a_graph_writes_into_no_input(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But into the FP8 states, which change at its end."""
    monkeypatch.setattr(fallbacks, "DIRECT_ON", {"cpu"})
    compiled = torch.compile(Writes(), backend="te_fp8")
    _, codes = run_and_get_code(lambda: compiled(torch.randn(32, 16), changed).sum().backward())
    forward = next(code for code in codes if "update_scales_" in code and "'wgrad'" not in code)
    assert ("site(early=True)" in forward) == (not changed) and ("site()" in forward) == bool(changed)


def test_only_what_needs_inputs_and_early_results_alone_may_be_played_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else a call reads may lie where an early result lay."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).cumsum(0))

    monkeypatch.setattr(fallbacks, "DIRECT_ON", {"cpu"})
    with torch.no_grad():
        _, codes = run_and_get_code(torch.compile(Sums(), backend=te_fp8), torch.randn(32, 16))
    called = "\n".join(codes)
    early, late = (re.findall(rf"te_calls\.(\w+)\.site\({given}\)", called) for given in ("early=True", ""))
    assert early.count("gemm") == late.count("gemm") == 1
    assert early.count("quantize") == late.count("quantize") == 1


def test_an_operator_that_inductor_met_before_is_called_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes do with what it has, and would stay with that."""
    operator = torch.ops.te.gemm.default
    monkeypatch.setattr(fallbacks, "DIRECT_ON", {"cpu"})
    monkeypatch.setattr(fallbacks, "_told", fallbacks._told - {operator})
    monkeypatch.delitem(lowerings, operator, raising=False)
    make_fallback(operator, warn=False)
    with torch.no_grad():
        _, codes = run_and_get_code(torch.compile(nn.Linear(16, 32), backend=te_fp8), torch.randn(32, 16))
    assert "te_calls.gemm.site(early=True)" in "\n".join(codes)


def test_results_count_as_aligned_whatever_their_operands_are() -> None:
    """One scale of many begins anywhere; Inductor's kernels would read all that depends on it by elements."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Softplus())
    with torch.no_grad():
        _, codes = run_and_get_code(torch.compile(model, backend=te_fp8), torch.randn(32, 16))
    called = "\n".join(codes)
    assert "te.gemm" in called and "assumed to be not aligned" not in called


def test_what_is_noted_of_others_does_not_double_with_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As up to PyTorch 2.12: the text of an operator without a lowering is written whether anyone reads it or not."""
    texts: list[str] = []

    def note(message: str, *values: Any) -> None:
        texts.extend(map(str, values))

    monkeypatch.setattr(graph.log, "info", note)
    with torch.no_grad():
        torch.compile(Deep(), backend=te_fp8)(torch.randn(32, 16))
    noted = [text for text in texts if "target: te_compile_tests" in text]
    assert noted and all(len(text) < 1000 for text in noted)


def test_a_text_names_the_operator_and_what_it_was_given() -> None:
    text: Callable[..., str] = exc.OperatorIssue.operator_str
    with short_texts():
        told = exc.OperatorIssue.operator_str(torch.ops.aten.add.Tensor, [object(), [1, None]], {"alpha": 2.0})
    assert told.splitlines() == [
        "  target: aten.add.Tensor",
        "  args[0]: object",
        "  args[1]: [1, None]",
        "  alpha: 2.0",
    ]
    assert exc.OperatorIssue.operator_str is text
