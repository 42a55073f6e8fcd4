"""add_in_products: which additions a product takes over, which it does not, and that the sum is the same number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from te_compile.ops import registry
from te_compile.ops.gemm import GEMM
from te_compile.passes.add_in_products import add_in_products
from te_compile.passes.arguments import arguments_of
from tests.any_size import at_any_size, changed
from tests.backend.models import Mlp
from tests.fuzz.check import Case, check

M, N, K = 32, 48, 64
E4M3 = torch.float8_e4m3fn


def codes(rows: int) -> Tensor:
    return torch.randn(rows, K).to(E4M3)


def product(a: Tensor, b: Tensor, dtype: torch.dtype = torch.bfloat16, bias: Tensor | None = None) -> Tensor:
    one = torch.ones(())
    return GEMM(a, b, one, one, bias, dtype, "fast", "fc forward")


def merged(function: Callable[..., Any], *inputs: Tensor) -> tuple[int, GraphModule, Any]:
    """How many additions went, the graph after the pass, and what it gave before."""
    graph_module = make_fx(function, tracing_mode="fake")(*inputs)
    before = graph_module(*inputs)
    count = add_in_products(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    return count, graph_module, before


def additions(graph: Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor))


def residual() -> Tensor:
    return torch.randn(2, M // 2, N).bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
def test_a_residual_is_added_by_the_product(dtype: torch.dtype, biased: bool) -> None:
    bias = [torch.randn(N).to(dtype)] if biased else []
    a, b, x = codes(M), codes(N), residual().to(dtype)

    def function(a: Tensor, b: Tensor, x: Tensor, *bias: Tensor) -> Tensor:
        return x + product(a, b, dtype, *bias).view(x.shape)

    count, graph_module, before = merged(function, a, b, x, *bias)
    assert count == 1 and not additions(graph_module.graph)
    after = graph_module(a, b, x, *bias)
    exact = x.float() + (a.float() @ b.float().t()).view(x.shape) + sum(each.float() for each in bias)
    assert after.shape == x.shape and after.dtype == dtype
    torch.testing.assert_close(after, exact.to(dtype), rtol=1e-5 if dtype == torch.float32 else 0, atol=1e-4)
    step = torch.finfo(dtype).eps * 2 * before.float().abs().max()  # what was rounded twice is off by two steps at most
    torch.testing.assert_close(after.float(), before.float(), rtol=0, atol=float(step))


def test_order_of_the_operands_copies_and_views_do_not_matter() -> None:
    def function(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return product(a, b).view(x.shape).clone() + x

    count, graph_module, _ = merged(function, codes(M), codes(N), residual())
    assert count == 1 and not additions(graph_module.graph)
    assert not graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


def test_gradients_of_a_shared_input_are_summed_by_the_later_products() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return product(a, d).view(2, M // 2, N) + product(b, d).view(2, M // 2, N) + product(c, d).view(2, M // 2, N)

    inputs = [codes(M), codes(M), codes(M), codes(N)]
    count, graph_module, before = merged(function, *inputs)
    assert count == 2 and not additions(graph_module.graph)
    addends = [arguments_of(n)["addend"] for n in graph_module.graph.find_nodes(op="call_function", target=GEMM)]
    assert [addend is None for addend in addends] == [True, False, False]
    torch.testing.assert_close(graph_module(*inputs), before, rtol=2**-6, atol=0.5)


@pytest.mark.parametrize(
    "which",
    ["other reader", "alpha", "broadcast", "broadcast product", "dtype", "rows apart", "itself", "not a product"],
)
def test_what_must_not_be_merged_stays(which: str) -> None:
    def function(a: Tensor, b: Tensor, x: Tensor) -> Any:
        y = product(a, b)
        match which:
            case "other reader":
                return x + y, y
            case "alpha":
                return torch.add(x, y, alpha=2)
            case "broadcast":
                return x[:1] + y
            case "broadcast product":
                return x.repeat(3, 1, 1) + y
            case "dtype":
                return x.float() + y
            case "rows apart":
                return x.t().contiguous().t() + y
            case "itself":
                return y + y
        return x + y.relu()

    count, graph_module, _ = merged(function, codes(M), codes(N), torch.randn(M, N).bfloat16())
    assert count == 0 and additions(graph_module.graph) == 1


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("length", [1, 6])
def test_a_shift_that_a_linear_makes_for_each_sample_is_added_to_all_of_its_rows(length: int) -> None:
    """The modulation of a diffusion transformer."""

    class Modulated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.fc = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor, condition: Tensor) -> Tensor:
            return self.fc(x + self.shift(condition)[:, None])

    check(Case(Modulated, lambda more: (torch.randn(2, length, 64, requires_grad=True), torch.randn(2, 32))))


def test_a_product_outside_of_the_additions_checkpointed_region_stays_there() -> None:
    def function(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return x + product(a, b)

    inputs = codes(M), codes(N), torch.randn(M, N).bfloat16()
    for of_add, of_product, expected in ((1, 1, 1), (None, 1, 1), (1, None, 0), (1, 2, 0)):
        graph_module = make_fx(function, tracing_mode="fake")(*inputs)
        (add,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
        (gemm,) = graph_module.graph.find_nodes(op="call_function", target=GEMM)
        add.meta["ac_graph_id"], gemm.meta["ac_graph_id"] = of_add, of_product
        assert add_in_products(graph_module.graph) == expected
        if expected:
            (new,) = graph_module.graph.find_nodes(op="call_function", target=GEMM)
            assert new.meta["ac_graph_id"] == of_add


def test_forward_and_backward_are_not_mixed() -> None:
    graph_module = make_fx(lambda a, b, x: x + product(a, b), tracing_mode="fake")(
        codes(M), codes(N), torch.randn(M, N).bfloat16()
    )
    (add,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    add.meta["partitioner_tag"] = "is_backward"
    assert add_in_products(graph_module.graph) == 0


def test_what_lies_on_another_device_is_no_addend() -> None:
    inputs = codes(M), codes(N), torch.randn(M, N).bfloat16()
    for device, expected in (("cpu", 1), ("meta", 0)):
        graph = make_fx(lambda a, b, x: x + product(a, b), tracing_mode="fake")(*inputs).graph
        addend = graph.find_nodes(op="placeholder")[2]
        addend.meta["val"] = addend.meta["val"].to(device)
        assert add_in_products(graph) == expected


def test_what_would_run_the_product_must_add_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(operator: str, target: registry.Target, arguments: dict[str, Any]) -> tuple[str, list[str]]:
        return ("reference" if arguments["addend"] is not None else "scaled_mm"), []

    monkeypatch.setattr(registry, "choose", choose)
    count, _, _ = merged(lambda a, b, x: x + product(a, b), codes(M), codes(N), torch.randn(M, N).bfloat16())
    assert count == 0


class Residual(nn.Module):
    """Two residual blocks."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks, self.checkpointed = nn.ModuleList(Mlp() for _ in range(2)), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_batch_and_length_may_both_be_symbols(checkpointed: bool) -> None:
    sizes = ((2, 24), (5, 7), (3, 33))
    records = at_any_size(Residual(checkpointed), lambda b, t: [torch.randn(b, t, 32, requires_grad=True)], sizes)
    for_one, for_any = (changed(record)["add_in_products"] for record in records)
    assert for_any == for_one > 0
