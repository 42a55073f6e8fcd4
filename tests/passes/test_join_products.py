"""join_products: which products are made in one launch, which are not, and that each stays what it was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import te_compile
from te_compile.ops.gemm import GEMM
from te_compile.ops.gemms import AT_ONCE, GEMMS
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of
from te_compile.passes.join_products import join_products
from te_compile.passes.set_names_aside import label_of
from tests.compiling import compiled, relative_error, te_nodes, train_step

module = sys.modules[join_products.__module__]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")
E4M3, WIDTH = torch.float8_e4m3fn, 32
_REST = ("bias", "out_dtype", "accumulation", "label", "addend")


@pytest.fixture(autouse=True)
def _the_reference_makes_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KERNELS", {"reference"})


def codes(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH).to(E4M3)


def product(a: Tensor, b: Tensor, label: str, scale: Tensor, **changes: Any) -> Any:
    given = {
        "bias": None,
        "out_dtype": torch.bfloat16,
        "accumulation": "fast",
        "label": label,
        "addend": None,
        **changes,
    }
    return GEMM(a, b, scale, scale, *(given[name] for name in _REST))


def joined(function: Callable[..., Any], *inputs: Tensor) -> tuple[int, GraphModule]:
    """How many products were joined, and the graph after it, whose results are those of before."""
    graph_module = make_fx(function, tracing_mode="fake")(*inputs)
    before = graph_module(*inputs)
    count = join_products(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    for one, other in zip(graph_module(*inputs), before, strict=True):
        assert torch.equal(one, other)
    return count, graph_module


def calls(graph_module: GraphModule, target: Any) -> list[Any]:
    return list(graph_module.graph.find_nodes(op="call_function", target=target))


def test_products_of_one_input_are_one_call_with_what_each_had(seed: int) -> None:
    def function(a: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        first = product(a, q, "q forward", scale, bias=bias)
        return first.sin(), product(a, k, "k forward", scale), product(a, v, "v forward", scale, bias=bias)

    bias = torch.randn(WIDTH)
    count, after = joined(function, codes(4), codes(WIDTH), codes(16), codes(WIDTH), bias, torch.rand(()))
    assert count == 3 and not calls(after, GEMM)
    (node,) = calls(after, GEMMS)
    assert label_of(node) == "q forward | k forward | v forward"
    assert [bias is not None for bias in arguments_of(node)["bias"]] == [True, False, True]


def test_more_than_one_launch_makes_are_several_launches() -> None:
    def function(a: Tensor, one: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(product(a, each, f"{place} forward", one) for place, each in enumerate(weights))

    for count, calls_of in ((AT_ONCE, (1, 0)), (AT_ONCE + 1, (1, 1)), (2 * AT_ONCE - 1, (2, 0))):
        made, after = joined(function, codes(4), torch.rand(()), *(codes(16) for _ in range(count)))
        assert (len(calls(after, GEMMS)), len(calls(after, GEMM))) == calls_of
        assert made == count - calls_of[1]


def other_input(a: Tensor, q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return product(a, q, "q forward", x), product(a.clone(), k, "k forward", x)


def other_scale(a: Tensor, q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return product(a, q, "q forward", x), product(a, k, "k forward", x + 1)


def other_result(a: Tensor, q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return product(a, q, "q forward", x), product(a, k, "k forward", x, out_dtype=torch.float32)


def other_accumulation(a: Tensor, q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return product(a, q, "q forward", x), product(a, k, "k forward", x, accumulation="split")


def one_adds(a: Tensor, q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    first = product(a, q, "q forward", x)
    return first, product(a, k, "k forward", x, addend=first)


def one_is_made_of_the_other(a: Tensor, q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    first = product(a, q, "q forward", x)
    return first, product(a, k, "k forward", x, bias=first[0])


def one_weight_is_late(a: Tensor, q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return product(a, q, "q forward", x), product(a, k.clone(), "k forward", x)


def alone(a: Tensor, q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return (product(a, q, "q forward", x),)


@pytest.mark.parametrize(
    "function",
    [
        other_input, other_scale, other_result, other_accumulation, one_adds, one_is_made_of_the_other,
        one_weight_is_late, alone,
    ],
)  # fmt: skip
def test_what_has_not_all_in_common_or_is_not_there_yet_stays(function: Callable[..., Any]) -> None:
    count, after = joined(function, codes(4), codes(16), codes(16), torch.rand(()))
    assert count == 0 and not calls(after, GEMMS)


def test_without_a_kernel_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(a: Tensor, q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return product(a, q, "q forward", x), product(a, k, "k forward", x)

    monkeypatch.setattr(module, "KERNELS", {"cuda"})
    assert joined(function, codes(4), codes(16), codes(16), torch.rand(()))[0] == 0


class Gated(nn.Module):
    """A gated feed-forward of few rows behind a norm, in a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64, bias=False)
        self.down = nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_model_without_gradients_computes_the_same(
    recipe: str, compiler: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Gated(), torch.randn(4, WIDTH)

    def results() -> tuple[int, list[Tensor]]:
        torch._dynamo.reset()
        te_compile.reset_state(model)
        with manager.recording() as records, torch.no_grad():
            fast = compiled(model, recipe=recipe, compiler=compiler)
            return len([fast(x) for _ in range(2)]) and len(te_nodes(records[0], "gemms")), [fast(x)]

    together, (got,) = results()
    monkeypatch.setattr(module, "KERNELS", set())
    apart, (wanted,) = results()
    assert (together, apart) == (1, 0)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_training_joins_forward_products_alone(compiler: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Gated(), torch.randn(4, WIDTH, requires_grad=True)
    found = []
    for kernels in ({"reference"}, set()):
        monkeypatch.setattr(module, "KERNELS", kernels)
        torch._dynamo.reset()
        te_compile.reset_state(model)
        with manager.recording() as records:
            found.append(train_step(model, compiled(model, compiler=compiler), x))
        labels = [label_of(node) for node in te_nodes(records[0], "gemms")]
        assert all(label.count("forward") == 2 and "grad" not in label for label in labels)
    (got, gradients), (wanted, expected) = found
    assert relative_error(got, wanted) < 1e-6
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[name]) < 1e-5, name


def test_the_report_says_what_is_launched_together() -> None:
    with torch.no_grad():
        report = te_compile.explain(Gated(), torch.randn(4, WIDTH))
    fused = {row.name: " ".join(row.fused) for row in report.rows}
    assert all("in one launch with 1 more" in fused[name] and "shared by 2" in fused[name] for name in ("gate", "up"))
    assert "launch" not in fused["down"] and all(row.status == "fp8" for row in report.rows)
