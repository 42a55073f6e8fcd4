"""Products that a report must not pass over: those that no captured graph holds, and several that are one node."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import get_compilation_metrics

import te_compile

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

QUICK: dict[str, Any] = {"compiler": "aot_eager", "cost_model": False}


class Groups(nn.Module):
    """Four products at once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32, 64) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight)


@pytest.mark.parametrize("options", [QUICK, QUICK | {"exclude": "*"}], ids=["fp8", "kept"])
def test_a_batch_of_products_counts_with_all_its_rows(options: dict[str, Any]) -> None:
    report = te_compile.explain(Groups(), torch.randn(4, 48, 32), options=options)
    flops = 2 * 4 * 48 * 32 * 64
    assert sum(row.flops for row in report.rows) == report.totals["linear_flops"] == flops
    assert report.totals["fp8_flops"] in (0, flops) and bool(report.totals["fp8_flops"]) == ("exclude" not in options)


class Recurrent(nn.Module):
    """Dynamo captures no LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.lstm(x)[0])
        return y


class Disabled(Recurrent):
    """Dynamo captures nothing at all."""

    @torch._dynamo.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_what_stands_in_no_captured_graph_is_named_even_if_there_is_none() -> None:
    report = te_compile.explain(Disabled(), torch.randn(16, 16), options={"exclude": "*porj*"})
    assert not report.graphs and "te_fp8: no linear in what torch.compile captured\n" in str(report)
    assert any(note.endswith("if this call runs them at all: fc") for note in report.notes)
    assert not any("porj" in note for note in report.notes), "nothing was looked at"
    assert any("disable" in reason for reason in report.breaks)


class Dilated(nn.Module):
    """A layer of a time-delay network: a linear over frames that lie apart, run as the convolution that it is."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Linear(3 * 16, 32)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.kernel.weight.view(32, 3, 16).transpose(1, 2)
        return F.conv1d(x, weight, self.kernel.bias, dilation=2)


def test_a_linear_that_the_model_convolves_with_is_captured() -> None:
    report = te_compile.explain(Dilated(), torch.randn(2, 16, 48), options=QUICK)
    assert not report.rows and not report.breaks and not report.notes


class Known(nn.Linear):
    """With a forward that is not torch.nn's, which Dynamo captures for itself."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class Shunned(nn.Module):
    """It raises where it is traced, so that Dynamo gives up on it and begins anew with what it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Known(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        if torch.compiler.is_compiling():
            raise AttributeError("shape")
        return y


def test_a_function_that_dynamo_gave_up_on_as_a_whole_is_a_break_with_a_place() -> None:
    tried = get_compilation_metrics()
    report = te_compile.explain(Shunned(), torch.randn(16, 16), options=QUICK)
    assert [row.name for row in report.rows] == ["first"]
    (reason,) = report.breaks
    # PyTorch 2.11 spells the exception's argument as Dynamo sees it.
    assert re.search(r"AttributeError\(.*'shape'.*\), at .*test_passed_over\.py:\d", reason)
    assert get_compilation_metrics() == tried, "what Dynamo remembers of others' compilations stays"


class Experts(nn.Module):
    """As many models write them: a loop over the experts that were picked, which Dynamo captures nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.bias = nn.Linear(32, 4), nn.Parameter(torch.zeros(4, 32))
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 6) for shape in ((64, 32), (32, 64)))

    def forward(self, x: Tensor) -> Tensor:
        picked, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for expert in picked.unique().tolist():
            (rows,) = torch.where(picked == expert)
            hidden = F.linear(x[rows] + self.bias[expert], self.up[expert]).relu()
            out.index_add_(0, rows, F.linear(hidden, self.down[expert]))
        return out


class Mixture(nn.Module):
    """Behind an embedding and a linear."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.table, self.fc, self.experts = nn.Embedding(64, 32), nn.Linear(32, 32), experts

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.experts(self.fc(self.table(ids)))
        return y


class ListedExperts(Experts, nn.ModuleList):
    """Experts that are a container as well, of nothing."""


@pytest.mark.parametrize("kind", [Experts, ListedExperts])
def test_matrices_of_experts_that_are_in_no_captured_graph_are_named(kind: type[nn.Module]) -> None:
    report = te_compile.explain(Mixture(kind()), torch.arange(48), options=QUICK)
    (note,) = (each for each in report.notes if "in no captured graph" in each)
    assert report.breaks and note.endswith("if this call runs them at all: experts.up, experts.down")
    batched = te_compile.explain(Mixture(Groups()), torch.arange(64).view(4, 16), options=QUICK)
    assert not any("in no captured graph" in each for each in batched.notes)


def test_the_linear_behind_an_lstm_is_a_row_if_dynamo_captures_it_and_named_if_not() -> None:
    model, x = Recurrent(), torch.randn(16, 16)
    counter = CompileCounterWithBackend("eager")
    torch.compile(model, backend=counter)(x)
    torch._dynamo.reset()
    report = te_compile.explain(model, x)
    # Up to PyTorch 2.13 Dynamo gives up on the whole of a forward with an LSTM in it, 2.15 goes on behind it.
    assert len(report.graphs) == counter.frame_count == (0 if torch.__version__ < "2.14" else report.totals["graphs"])
    assert [row.name for row in report.rows] == ["fc"] * counter.frame_count
    assert any(note.endswith("if this call runs them at all: fc") for note in report.notes) == (not report.graphs)
    assert any("LSTM" in reason for reason in report.breaks)
