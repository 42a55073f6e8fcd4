"""Gradients of tables of few rows become products: where many places share a row, in 16 bits, and nowhere else."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from te_compile.backend import te_fp8
from te_compile.passes import JOINT_PASSES, manager
from te_compile.passes.pointwise_nodes import CASTS
from te_compile.passes.sum_few_rows import sum_few_rows
from te_compile.passes.text import ops_text
from tests.compiling import compiled, joint_of, relative_error, train_step
from tests.passes.test_column_shifts import traced_with_symbols

module = sys.modules[sum_few_rows.__module__]
aten = torch.ops.aten
SUMS = (aten._unsafe_masked_index_put_accumulate.default, aten.index_put.default)
ROWS, BATCH, LENGTH, WIDTH = 6, 4, 32, 16
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
Gradient = Callable[[Tensor, Tensor], Any]


@pytest.fixture(autouse=True)
def _few_places_and_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ON", {"cpu"})
    monkeypatch.setattr(module, "PLACES", BATCH * LENGTH // ROWS)


def ids(rows: int = ROWS, *shape: int, first: int = 0) -> Tensor:
    return torch.randint(first, rows, shape or (BATCH, LENGTH))


def upstream(dtype: torch.dtype = torch.bfloat16, *shape: int) -> Tensor:
    return torch.randn(shape or (BATCH, LENGTH, WIDTH)).to(dtype)


def embedded(rows: int = ROWS, dtype: torch.dtype | None = None, **options: Any) -> Gradient:
    """The gradient of an embedding's table, in the dtype of dy if no other is given."""

    def gradient(ids: Tensor, dy: Tensor) -> Tensor:
        table = torch.zeros(rows, dy.shape[-1], dtype=dtype or dy.dtype, device=dy.device).requires_grad_()
        y = F.embedding(ids, table, **options)
        return torch.autograd.grad(y, table, dy.to(y.dtype))[0]

    return gradient


def indexed(rows: int = ROWS, dtype: torch.dtype | None = None) -> Gradient:
    """That of ``table[ids]``."""

    def gradient(ids: Tensor, dy: Tensor) -> Tensor:
        table = torch.zeros(rows, dy.shape[-1], dtype=dtype or dy.dtype, device=dy.device).requires_grad_()
        y = table[ids]
        return torch.autograd.grad(y, table, dy.to(y.dtype))[0]

    return gradient


def of_two_eleven(padding: int = -1, rows: int = ROWS) -> Gradient:
    """An embedding's backward as PyTorch 2.11 takes it apart."""

    def gradient(ids: Tensor, dy: Tensor) -> Tensor:
        wide = dy.float()
        counted = torch.where((ids == padding).unsqueeze(-1), torch.scalar_tensor(0.0), wide).clone()
        return torch.zeros(rows, dy.shape[-1]).index_put([ids], counted, accumulate=True).to(dy.dtype)

    return gradient


def of_two_thirteen(padding: int = -1, rows: int = ROWS) -> Gradient:
    """And as 2.13 does."""

    def gradient(ids: Tensor, dy: Tensor) -> Tensor:
        mask = (((ids >= 0) & (ids < rows)) & (ids != padding)).unsqueeze(-1)
        zeros = torch.zeros(rows, dy.shape[-1])
        return aten._unsafe_masked_index_put_accumulate(zeros, mask, [ids], dy.float()).to(dy.dtype)

    return gradient


def traced(function: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> GraphModule:
    """As Inductor has it on a joint graph; dynamic: batch and length are symbols."""
    if dynamic:
        return traced_with_symbols(function, (0, 1), *inputs)
    graph = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    assert isinstance(graph, GraphModule)
    return graph


def passed(function: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> tuple[int, GraphModule]:
    graph = traced(function, *inputs, dynamic=dynamic)
    count = sum_few_rows(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return count, graph


def targets(graph: Graph) -> set[Any]:
    return {node.target for node in graph.nodes}


def exact(ids: Tensor, dy: Tensor, padding: int | None = None, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """The sums in float64, and those of the absolute values, of which roundings are parts."""
    places, values = ids.flatten() % rows, dy.double().flatten(0, ids.dim() - 1)
    values = values if padding is None else values * (ids.flatten() != padding)[:, None]
    return tuple(torch.zeros(rows, dy.shape[-1]).double().index_add(0, places, each) for each in (values, values.abs()))  # type: ignore[return-value]


def check(got: Tensor, ids: Tensor, dy: Tensor, padding: int | None = None) -> None:
    """Is each element the sum but for its rounding, and that of fp32 on the way? In aggregate and row by row."""
    wanted, size = exact(ids, dy, padding, got.shape[0])
    rounding = ROUNDING[dy.dtype]
    assert ((got.double() - wanted).abs() <= rounding * wanted.abs() + 1e-5 * size).all()
    assert relative_error(got, wanted) < rounding
    for row, expected in zip(got, wanted, strict=True):
        if float(expected.norm()):
            assert relative_error(row, expected) < 2 * rounding
        else:
            assert not row.any()


# ------------------------------------------------------------------------------------------------------------- it fires


FORMS: dict[str, Gradient] = {
    "an embedding": embedded(),
    "by index": indexed(),
    "2.11": of_two_eleven(),
    "2.13": of_two_thirteen(),
}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_is_a_product(form: str, dtype: torch.dtype) -> None:
    count, graph = passed(FORMS[form], ids(), upstream(dtype))
    assert count == 1 and not targets(graph.graph) & set(SUMS)
    (product,) = graph.graph.find_nodes(op="call_function", target=aten.mm.default)
    one_hot, x = product.args
    assert one_hot.meta["val"].shape == (ROWS, BATCH * LENGTH) and one_hot.meta["val"].dtype == dtype
    assert x.meta["val"].shape == (BATCH * LENGTH, WIDTH) and x.meta["val"].dtype == dtype
    given = ids(), upstream(dtype)
    check(graph(*given), *given)


def test_nothing_is_left_of_the_sum_around_it() -> None:
    _, graph = passed(of_two_thirteen(), ids(), upstream())
    assert ops_text(graph.graph) == textwrap.dedent("""\
        view = aten.view(dy_1, [-1, 16])
        view_1 = aten.view(ids_1, [1, -1])
        iota = prims.iota(6, start=0, step=1, dtype=int64, device=device(type='cpu'), requires_grad=False)
        unsqueeze_1 = aten.unsqueeze(iota, 1)
        eq = aten.eq.Tensor(view_1, unsqueeze_1)
        convert_element_type_2 = prims.convert_element_type(eq, bfloat16)
        mm = aten.mm(convert_element_type_2, view)
        return mm""")


@pytest.mark.parametrize("form", [embedded, indexed], ids=["an embedding", "by index"])
@pytest.mark.parametrize("shape", [(BATCH * LENGTH,), (2, BATCH // 2, LENGTH)], ids=["flat", "of three dimensions"])
def test_places_of_any_shape_are_counted(form: Callable[..., Gradient], shape: tuple[int, ...]) -> None:
    given = ids(ROWS, *shape), upstream(torch.bfloat16, *shape, WIDTH)
    count, graph = passed(form(), *given)
    assert count == 1
    check(graph(*given), *given)


def test_ids_of_32_bits_are_counted() -> None:
    given = ids().int(), upstream()
    count, graph = passed(embedded(), *given)
    assert count == 1
    check(graph(*given), *given)


@pytest.mark.parametrize("form", [embedded, indexed], ids=["an embedding", "by index"])
def test_the_gradient_of_a_bias_by_heads_is_read_where_it_lies(form: Callable[..., Gradient]) -> None:
    """T5's: looked up as [queries, keys, heads], added to scores as [heads, queries, keys]."""

    def gradient(ids: Tensor, dy: Tensor) -> Tensor:
        return form()(ids, dy.permute(1, 2, 0))

    given = ids(ROWS, 12, 16), upstream(torch.bfloat16, 8, 12, 16)
    count, graph = passed(gradient, *given)
    assert count == 1 and aten.clone.default not in targets(graph.graph)
    check(graph(*given), given[0], given[1].permute(1, 2, 0))


@pytest.mark.parametrize("what", ["ids", "the gradient"])
def test_what_does_not_lie_place_by_place_is_copied(what: str) -> None:
    def gradient(ids: Tensor, dy: Tensor) -> Tensor:
        return embedded()(ids.t() if what == "ids" else ids, dy.transpose(0, 1) if what != "ids" else dy)

    shape = (LENGTH, BATCH)
    given = (ids(ROWS, *shape[::-1]), upstream(torch.bfloat16, *shape, WIDTH)) if what == "ids" else (
        ids(ROWS, *shape), upstream())  # fmt: skip
    count, graph = passed(gradient, *given)
    assert count == 1 and aten.clone.default in targets(graph.graph)
    places, dy = (given[0].t(), given[1]) if what == "ids" else (given[0], given[1].transpose(0, 1))
    check(graph(*given), places, dy)


@pytest.mark.parametrize("form", [embedded, indexed], ids=["an embedding", "by index"])
def test_symbolic_batches_and_lengths_are_counted_without_a_guard(form: Callable[..., Gradient]) -> None:
    graph = traced(form(), ids(), upstream(), dynamic=True)
    environment = next(n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder").fake_mode.shape_env
    before = len(environment.guards), len(environment.replacements)
    assert sum_few_rows(graph.graph) == 1
    assert (len(environment.guards), len(environment.replacements)) == before
    graph.graph.lint()
    graph.recompile()
    given = ids(ROWS, 3, 50), upstream(torch.bfloat16, 3, 50, WIDTH)
    check(graph(*given), *given)


@pytest.mark.parametrize("form", [embedded, indexed], ids=["an embedding", "by index"])
def test_who_reads_float32_gets_what_was_rounded_once(form: Callable[..., Gradient]) -> None:
    """As under autocast, whose tables are wider than the gradients."""
    given = ids(), upstream()
    count, graph = passed(form(dtype=torch.float32), *given)
    got = graph(*given)
    assert count == 1 and got.dtype == torch.float32 and torch.equal(got, got.bfloat16().float())
    check(got, *given)


def test_readers_in_16_bits_and_in_32_get_the_same_numbers() -> None:
    def both(ids: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        wide = embedded(dtype=torch.float32)(ids, dy)
        return wide * 2, wide.to(dy.dtype)

    given = ids(), upstream()
    count, graph = passed(both, *given)
    assert count == 1 and len([n for n in graph.graph.nodes if n.target in CASTS]) == 2  # the comparison and one sum
    doubled, narrow = graph(*given)
    assert torch.equal(doubled, 2 * narrow.float())
    check(narrow, *given)


def test_zeros_that_others_read_as_well_stay_zero() -> None:
    def both(ids: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(ROWS, WIDTH, dtype=dy.dtype)
        return aten.index_put(zeros, [ids], dy, True), zeros

    given = ids(), upstream()
    count, graph = passed(both, *given)
    got, zeros = graph(*given)
    assert count == 1 and not zeros.any()
    check(got, *given)


# ------------------------------------------------------------------------------------------------ padding, negative ids


@pytest.mark.parametrize("form", [of_two_eleven, of_two_thirteen, lambda p: embedded(padding_idx=p)])
@pytest.mark.parametrize("padding", [0, ROWS - 1])
def test_the_row_of_padding_gets_no_gradient(form: Callable[..., Gradient], padding: int) -> None:
    given = ids(), upstream()
    given[0][0] = padding
    count, graph = passed(form(padding), *given)
    got = graph(*given)
    assert count == 1 and not got[padding].any() and got[2].any()
    check(got, *given, padding)


def test_negative_ids_count_from_the_end() -> None:
    given = ids(first=-ROWS), upstream()
    count, graph = passed(indexed(), *given)
    assert count == 1
    check(graph(*given), *given)


def test_padding_of_a_negative_id_is_no_row() -> None:
    """Of ids that no embedding of the graph looks up: they may be negative, and -1 is the last row elsewhere."""
    given = ids(first=-ROWS), upstream()
    given[0][0, :2] = torch.tensor([-1, ROWS - 1])
    count, graph = passed(of_two_eleven(-1), *given)
    assert count == 1
    check(graph(*given), *given, -1)


def test_ids_that_an_embedding_looks_up_are_not_asked_for_their_sign() -> None:
    def looked_up(ids: Tensor, dy: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return aten.embedding(table, ids), of_two_eleven()(ids, dy)

    given = ids(), upstream(), torch.randn(ROWS, WIDTH)
    count, graph = passed(looked_up, *given)
    assert count == 1 and not targets(graph.graph) & {aten.where.self, aten.lt.Scalar, aten.ne.Scalar}
    check(graph(*given)[1], *given[:2])


def test_an_infinity_makes_no_number_of_its_column_and_of_no_other() -> None:
    given = ids(), upstream()
    given[0][0, 0], given[1][0, 0, 3] = 2, float("inf")
    _, graph = passed(embedded(), *given)
    got = graph(*given)
    assert got[2, 3] == float("inf") and got[:, 3].isfinite().sum() == 0
    assert got[:, torch.arange(WIDTH) != 3].isfinite().all()


# ------------------------------------------------------------------------------------------- it does not fire elsewhere


def _put(
    *sizes: int, indices: Callable[[Tensor], list[Tensor | None]] = lambda ids: [ids], add: bool = True, fill: float = 0
) -> Callable[[Callable[[Tensor], Tensor]], Gradient]:
    """The sum of what is made of the gradient, into a tensor of these sizes."""

    def of(values: Callable[[Tensor], Tensor]) -> Gradient:
        def gradient(ids: Tensor, dy: Tensor) -> Any:
            return aten.index_put(torch.full(sizes, fill, dtype=dy.dtype), indices(ids), values(dy), add)

        return gradient

    return of


def _mask_of(condition: Callable[[Tensor], Tensor]) -> Gradient:
    def gradient(ids: Tensor, dy: Tensor) -> Tensor:
        mask = condition(ids).unsqueeze(-1)
        return aten._unsafe_masked_index_put_accumulate(torch.zeros(ROWS, WIDTH), mask, [ids], dy.float()).to(dy.dtype)

    return gradient


LEFT: dict[str, Gradient] = {
    "scaled by how often": embedded(scale_grad_by_freq=True),
    "computed in float32": lambda ids, dy: embedded(dtype=torch.float32)(ids, dy.float() * 2),
    "not from zero": _put(ROWS, WIDTH, fill=1)(lambda dy: dy),
    "written over": _put(ROWS, WIDTH, add=False)(lambda dy: dy),
    "by columns": _put(WIDTH, ROWS, indices=lambda ids: [None, ids])(lambda dy: dy.permute(2, 0, 1)),
    "by two indices": _put(ROWS, ROWS, indices=lambda ids: [ids, ids])(lambda dy: dy[..., 0]),
    "of numbers": _put(ROWS)(lambda dy: dy[..., 0]),
    "of three dimensions": _put(ROWS, 2, WIDTH // 2)(lambda dy: dy.unflatten(2, (2, -1))),
    "one row for all": _put(ROWS, WIDTH)(lambda dy: dy[0, 0]),
    "picked by truths": _put(BATCH, LENGTH, indices=lambda ids: [ids < 0])(lambda dy: dy[0, 0, 0]),
    "a mask without bounds": _mask_of(lambda ids: (ids >= 0) & (ids != -1)),
    "a mask of other bounds": _mask_of(lambda ids: ((ids >= 0) & (ids < ROWS - 1)) & (ids != -1)),
    "a mask of something else": _mask_of(lambda ids: ((ids >= 0) & (ids < ROWS)) & (ids.roll(1) != 2)),
    "a mask of bounds alone": _mask_of(lambda ids: (ids >= 0) & (ids < ROWS)),
    "a mask of one bound": _mask_of(lambda ids: ids > -1),
}


@pytest.mark.parametrize("case", LEFT)
def test_other_sums_stay(case: str) -> None:
    graph = traced(LEFT[case], ids(), upstream())
    before = ops_text(graph.graph)
    assert sum_few_rows(graph.graph) == 0 and ops_text(graph.graph) == before


@pytest.mark.parametrize("form", [embedded, indexed], ids=["an embedding", "by index"])
def test_gradients_in_float32_stay(form: Callable[..., Gradient]) -> None:
    assert passed(form(), ids(), upstream(torch.float32))[0] == 0


@pytest.mark.parametrize("form", [embedded, indexed], ids=["an embedding", "by index"])
def test_float16_that_is_summed_in_float32_for_a_reader_stays(form: Callable[..., Gradient]) -> None:
    assert passed(form(dtype=torch.float32), ids(), upstream(torch.float16))[0] == 0


@pytest.mark.parametrize("form", [embedded, indexed], ids=["an embedding", "by index"])
def test_few_places_for_each_row_stay(monkeypatch: pytest.MonkeyPatch, form: Callable[..., Gradient]) -> None:
    monkeypatch.setattr(module, "PLACES", BATCH * LENGTH // ROWS + 1)
    for dynamic in (False, True):
        assert passed(form(), ids(), upstream(), dynamic=dynamic)[0] == 0


@pytest.mark.parametrize("form", [embedded, indexed], ids=["an embedding", "by index"])
def test_many_rows_and_large_comparisons_stay(monkeypatch: pytest.MonkeyPatch, form: Callable[..., Gradient]) -> None:
    monkeypatch.setattr(module, "PLACES", 1)
    counts = [passed(form(rows), ids(rows), upstream())[0] for rows in (module.MOST_ROWS, module.MOST_ROWS + 1)]
    assert counts == [1, 0]
    counts = []
    for size in (2 * ROWS * BATCH * LENGTH, 2 * ROWS * BATCH * LENGTH - 1):
        monkeypatch.setattr(module, "MOST_BYTES", size)
        counts.append(passed(form(), ids(), upstream())[0])
    assert counts == [1, 0]


def test_nothing_changes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ON", {"cuda"})
    assert passed(embedded(), ids(), upstream())[0] == 0


# ------------------------------------------------------------------------------------------------------ the whole road


class Encoder(nn.Module):
    """Words and their types are looked up, with a bias of relative positions beside the scores, before a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.types, self.places = nn.Embedding(2, WIDTH, padding_idx=1), nn.Embedding(LENGTH, WIDTH)
        self.bias, self.up = nn.Embedding(ROWS, 2), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, types: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        x = x + self.types(types) + self.places(places)
        bias = self.bias((places[:, None] - places).abs().clamp(max=ROWS - 1)).permute(2, 0, 1)
        return F.gelu(self.up((x[:, None] * 0.5 + bias.softmax(-1) @ x[:, None]).sum(1)))


def a_step(run: Callable[..., Any], model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    return train_step(model, run, *inputs)[1]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_model_trains_beside_linears_in_fp8(compiler: str) -> None:
    model, x = Encoder().bfloat16(), upstream()
    types = ids(2)
    wanted = a_step(model, model, x, types)
    with manager.recording() as records:
        got = a_step(compiled(model, compiler=compiler, strict=True), model, x, types)
    (record,) = [each for each in records[0].passes if each.name == "sum_few_rows"]
    assert record.count == 2
    # The places of the third table are one for each row.
    assert len([n for n in joint_of(records[0]).nodes if n.target in SUMS]) == 1
    assert not got["types.weight"][1].any() and got["types.weight"].dtype == torch.bfloat16
    for name, each in wanted.items():
        assert relative_error(got[name], each) < 0.2, name


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_gradients_are_those_of_the_graph_without_the_pass(compiler: str) -> None:
    model, given = Encoder().bfloat16(), (upstream(), ids(2))
    steps = []
    for skipped in ((), ("sum_few_rows",)):
        torch._dynamo.reset()
        run = compiled(model, compiler=compiler, recipe="current", skip_passes=skipped)
        steps.append(a_step(run, model, *given))
    # A sum that was rounded once may have its other neighbour for what float32 leaves of it. Inductor adds up what it
    # computes in float32; what a product reads was rounded to 16 bits.
    step = ROUNDING[torch.bfloat16]
    for name, wanted in steps[1].items():
        near = (1e-5 if compiler == "aot_eager" else 2 * step) * float(wanted.abs().max())
        torch.testing.assert_close(steps[0][name], wanted, rtol=2 * step, atol=near)
        assert relative_error(steps[0][name], wanted) < step


@pytest.mark.usefixtures("fresh_dynamo")
def test_batches_of_other_lengths_share_the_code() -> None:
    model, compilations = Encoder().bfloat16(), []
    with manager.recording() as records:
        fast = compiled(model, dynamic=True)
        for length in (LENGTH, LENGTH - 3, LENGTH - 9):
            types, x = ids(2, BATCH, length), upstream(torch.bfloat16, BATCH, length, WIDTH)
            got, wanted = a_step(fast, model, x, types), a_step(model, model, x, types)
            assert relative_error(got["types.weight"], wanted["types.weight"]) < 0.2
            compilations.append(len(records))
    assert len(set(compilations)) == 1
    assert [each.count for each in records[-1].passes if each.name == "sum_few_rows"] == [2]


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_comparison_is_made_in_the_backward_pass() -> None:
    """Of 2 rows it has fewer bytes than ids of 64 bits, and the partitioner saves what has the fewest."""
    model, given = Encoder().bfloat16(), (upstream(), ids(2))
    saved: list[tuple[int, ...]] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(tuple(x.shape))
        return x

    fast = compiled(model, compiler="inductor")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = fast(*given)
    y.float().sum().backward()
    assert saved and (2, BATCH * LENGTH) not in saved and (ROWS, LENGTH * LENGTH) not in saved


@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_makes_a_comparison_and_a_product_and_adds_nothing_up() -> None:
    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.types, self.fc = nn.Embedding(2, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, types: Tensor) -> Tensor:
            return self.fc(x + self.types(types)).float().sum()

    fast = torch.compile(Typed().bfloat16(), backend=te_fp8, options={"cost_model": False})
    given = upstream(), ids(2)
    _, codes = run_and_get_code(lambda: fast(*given).backward())
    assert codes and "atomic_add" not in "".join(codes) and "extern_kernels.mm(" in codes[-1]


def test_it_runs_before_the_producers_are_made() -> None:
    names = [each.__name__ for each in JOINT_PASSES]
    assert names.index("sum_few_rows") < names.index("fuse_producers")
