"""gather_backwards: which sums of gathers' gradients become products, which stay, and that models train by them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from te_compile.ops.gather_backward import GATHER_BACKWARD
from te_compile.passes import JOINT_PASSES, manager
from te_compile.passes.gather_backwards import gather_backwards
from tests.compiling import compiled, relative_error, train_step

module = sys.modules[gather_backwards.__module__]
SCATTER_ADD = torch.ops.aten.scatter_add.default
ROWS, PLACES, COLUMNS = 5, 9, 7


@pytest.fixture(autouse=True)
def _small_ones_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ON", {"cpu"})
    monkeypatch.setattr(module, "FEWEST_PLACES", 1)
    monkeypatch.setattr(module, "FEWEST_MATRICES", 4)


def shared(*before: int) -> Tensor:
    return torch.randint(0, COLUMNS, (*(1 for _ in before), ROWS, PLACES))


def of_gather(dy: Tensor, index: Tensor) -> Tensor:
    zeros = torch.zeros(*dy.shape[:-1], COLUMNS, dtype=dy.dtype)
    return zeros.scatter_add(-1, index.expand(dy.shape), dy)


def after(function: Callable[..., Tensor], *inputs: Tensor, expected: int) -> GraphModule:
    """The graph after the pass, which computes what it did before."""
    graph: GraphModule = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    assert gather_backwards(graph.graph) == expected
    graph.graph.lint()
    graph.graph.eliminate_dead_code()
    graph.recompile()
    assert len(graph.graph.find_nodes(op="call_function", target=GATHER_BACKWARD)) == expected
    got, right = graph(*inputs), function(*(x.double() if x.is_floating_point() else x for x in inputs))
    assert got.shape == right.shape and got.is_contiguous()
    if expected:
        torch.testing.assert_close(got, right.to(got.dtype), rtol=2.0**-7, atol=1e-6)
    return graph


# ---------------------------------------------------------------------------------------------------------------- fires


@pytest.mark.parametrize("before", [(6,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_many_matrices_share_is_a_product(dtype: torch.dtype, before: tuple[int, ...]) -> None:
    graph = after(of_gather, torch.randn(*before, ROWS, PLACES).to(dtype), shared(*before), expected=1)
    assert not graph.graph.find_nodes(op="call_function", target=SCATTER_ADD)


def test_what_is_permuted_is_written_in_order() -> None:
    dy = torch.randn(6, PLACES, ROWS).bfloat16()
    graph = after(lambda dy, index: of_gather(dy.mT, index), dy, shared(6), expected=1)
    assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)) == 1


# -------------------------------------------------------------------------------------------------------- does not fire


def test_indices_of_each_matrix_stay() -> None:
    dy = torch.randn(6, ROWS, PLACES).bfloat16()
    after(of_gather, dy, torch.randint(0, COLUMNS, (6, ROWS, PLACES)), expected=0)
    after(of_gather, dy, torch.randint(0, COLUMNS, (6, ROWS, 1)), expected=0)
    after(of_gather, dy, torch.randint(0, COLUMNS, (1, ROWS, 1)), expected=0)


def test_indices_of_each_matrix_stay_also_where_there_are_as_many_as_shared_ones_would_be() -> None:
    for size in ((PLACES, ROWS, 1), (ROWS * PLACES, 1, 1), (ROWS, 1, PLACES)):
        after(of_gather, torch.randn(size[0], ROWS, PLACES).bfloat16(), torch.randint(0, COLUMNS, size), expected=0)


def test_float32_stays() -> None:
    after(of_gather, torch.randn(6, ROWS, PLACES), shared(6), expected=0)


def test_what_is_added_to_numbers_stays() -> None:
    def function(dy: Tensor, index: Tensor) -> Tensor:
        ones = torch.ones(*dy.shape[:-1], COLUMNS, dtype=dy.dtype)
        return ones.scatter_add(-1, index.expand(dy.shape), dy)

    after(function, torch.randn(6, ROWS, PLACES).bfloat16(), shared(6), expected=0)


def test_sums_over_another_dimension_stay() -> None:
    def function(dy: Tensor, index: Tensor) -> Tensor:
        zeros = torch.zeros(len(dy), COLUMNS, PLACES, dtype=dy.dtype)
        return zeros.scatter_add(1, index.expand(dy.shape), dy)

    after(function, torch.randn(6, ROWS, PLACES).bfloat16(), shared(6), expected=0)


def test_only_some_of_dy_stays() -> None:
    def function(dy: Tensor, index: Tensor) -> Tensor:
        zeros = torch.zeros(*dy.shape[:-1], COLUMNS, dtype=dy.dtype)
        return zeros.scatter_add(-1, index.expand(dy.shape)[..., :4], dy)

    after(function, torch.randn(6, ROWS, PLACES).bfloat16(), shared(6), expected=0)


@pytest.mark.parametrize("limit", ["FEWEST_MATRICES", "FEWEST_PLACES"])
def test_few_stay(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, limit, 1 << 12)
    after(of_gather, torch.randn(6, ROWS, PLACES).bfloat16(), shared(6), expected=0)


def test_on_a_cpu_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ON", {"cuda"})
    after(of_gather, torch.randn(6, ROWS, PLACES).bfloat16(), shared(6), expected=0)


# ----------------------------------------------------------------------------------------------------------- in models


class Disentangled(nn.Module):
    """Scores of content and of relative positions, to and from, as DeBERTa has them."""

    def __init__(self, width: int = 32, span: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.positions, self.span = nn.Parameter(torch.randn(2 * span, 8)), span

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (each.view(batch, length, -1, 8).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        places = torch.arange(length, device=x.device)
        index = (places[:, None] - places[None, :] + self.span).clamp(0, 2 * self.span - 1)
        index = index.expand(batch, q.shape[1], length, length)
        scores = q @ k.mT + (q @ self.positions.t()).gather(-1, index) + (k @ self.positions.t()).gather(-1, index).mT
        y: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))
        return y


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_disentangled_attention_trains(compiler: str) -> None:
    model, x = Disentangled().bfloat16(), torch.randn(2, 24, 32).bfloat16()
    with manager.recording() as records:
        y, found = train_step(model, compiled(model, exclude=["*"], compiler=compiler), x)
    assert {each.name: each.count for each in records[0].passes}["gather_backwards"] == 2
    exact = Disentangled().double()
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    right, wanted = train_step(exact, exact, x.double())
    assert relative_error(y, right) < 2e-2
    for name, gradient in found.items():
        assert relative_error(gradient, wanted[name]) < 4e-2, name


@pytest.mark.usefixtures("fresh_dynamo")
def test_batches_may_vary() -> None:
    model = Disentangled().bfloat16()
    run = compiled(model, exclude=["*"])
    for batch in (2, 3, 5):
        x = torch.randn(batch, 24, 32).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        y, found = train_step(model, run, x)
        right, wanted = train_step(model, model, x)
        for one, other in zip((y, *found.values()), (right, *wanted.values()), strict=True):
            assert relative_error(one, other) < 4e-2


def test_it_runs_before_the_producers() -> None:
    names = [each.__name__ for each in JOINT_PASSES]
    assert names.index("gather_backwards") < names.index("fuse_producers")
