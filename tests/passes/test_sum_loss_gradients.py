"""The gradient of the bias of a head becomes part of the loss's backward, which writes what it sums."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_compile.ops import registry
from te_compile.ops.cross_entropy import CROSS_ENTROPY_BACKWARD, CROSS_ENTROPY_BACKWARD_DEFERRED
from te_compile.ops.deferred_gradient import GRADIENT_TICKET
from te_compile.ops.triton_implementations import HOPPER
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of
from te_compile.passes.sum_loss_gradients import sum_loss_gradients
from te_compile.passes.text import ops_text
from tests.capturing import changed, traced
from tests.compiling import compiled, gradients, joint_of, loss_backwards, te_nodes

CLASSES, ROWS = 40, 6
SHAPE = (2, 3, CLASSES)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
cast = torch.ops.prims.convert_element_type.default
aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("loss_kernels")


def inputs(dtype: torch.dtype = BF16) -> list[Tensor]:
    """Logits [N, V], targets of which one is ignored, logsumexp and gradients [N]."""
    logits, targets = torch.randn(ROWS, CLASSES).to(dtype), torch.randint(0, CLASSES, (ROWS,))
    targets[2] = -100
    return [logits, targets, logits.float().logsumexp(1), torch.randn(ROWS)]


Rest = Callable[[Tensor], Any]


def fused(rest: Rest, dtype: torch.dtype = BF16) -> tuple[int, str]:
    """What the pass counts where ``rest`` reads the gradient of a loss, and the text after it. Results stay."""

    def function(x: Tensor, t: Tensor, lse: Tensor, g: Tensor) -> Any:
        return rest(CROSS_ENTROPY_BACKWARD(x, t, lse, g, -100))

    count, graph, results = changed(sum_loss_gradients, function, *inputs(dtype))
    for got, want in results:
        assert got.shape == want.shape and got.stride() == want.stride() and got.dtype == want.dtype
        # The CPU adds up in another order.
        torch.testing.assert_close(got, want, rtol=torch.finfo(got.dtype).eps, atol=1e-6)
    return count, ops_text(graph)


def test_the_graph_after() -> None:
    count, text = fused(lambda dx: (dx.view(SHAPE), aten.view(dx.sum([0], True), [CLASSES])))
    assert count == 1
    given = "x_1, t_1, lse_1, g_1, -100, None, bfloat16"
    assert text == textwrap.dedent(f"""\
        cross_entropy_backward_with_sums = te.cross_entropy_backward_with_sums({given})
        getitem = getitem(cross_entropy_backward_with_sums, 0)
        getitem_1 = getitem(cross_entropy_backward_with_sums, 1)
        view = aten.view(getitem, [2, 3, 40])
        view_2 = aten.view(getitem_1, [1, 40])
        view_1 = aten.view(view_2, [40])
        return (view, view_1)""")


FUSED: dict[str, Rest] = {
    "a matrix": lambda dx: (dx, dx.sum(0)),
    "a matrix, and its dimension is kept": lambda dx: (dx, dx.sum(0, keepdim=True)),
    "two dimensions": lambda dx: (dx, dx.view(SHAPE).sum((0, 1))),
    "two dimensions, in another order and from the end": lambda dx: (dx, dx.view(SHAPE).sum((-2, 0))),
    "two dimensions that are kept": lambda dx: (dx, dx.view(SHAPE).sum((0, 1), keepdim=True)),
    "columns in two dimensions": lambda dx: (dx, dx.view(ROWS, 8, 5).sum(0)),
    "a view of a view": lambda dx: (dx, dx.view(SHAPE).view(1, ROWS, CLASSES).sum((0, 1))),
    "the sum alone is read": lambda dx: (dx.view(SHAPE).sum((0, 1)),),
    "in float32": lambda dx: (dx, dx.sum(0, dtype=FP32)),
    "behind a cast to float32": lambda dx: (dx, cast(dx.view(SHAPE), FP32).sum((0, 1))),
    "behind a cast that others read": lambda dx: (lambda wide: (wide, wide.sum(0)))(cast(dx, FP32)),
    "a cast of the sum": lambda dx: (dx, cast(dx.sum(0), FP32)),
    "others read the gradient": lambda dx: (dx.sin(), dx.t() @ dx, dx.sum(0)),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_it_fires(name: str, dtype: torch.dtype) -> None:
    count, text = fused(FUSED[name], dtype)
    assert count == 1 and "aten.sum" not in text and "= te.cross_entropy_backward(" not in text


def test_what_only_the_sum_read_is_gone() -> None:
    _, text = fused(lambda dx: (dx, cast(dx.view(SHAPE), FP32).sum((0, 1))))
    assert "aten.view" not in text and "convert_element_type" not in text and "None, float32)" in text


def test_sums_alike_are_one_result_and_one_in_another_dtype_stays() -> None:
    count, text = fused(lambda dx: (dx.sum(0), dx.view(SHAPE).sum((0, 1)), dx.sum(0, dtype=FP32)))
    assert count == 2 and text.count("aten.sum") == 1 and text.count("te.cross_entropy_backward_with_sums(") == 1


LEFT: dict[str, Rest] = {
    "columns of each row": lambda dx: (dx, dx.sum(1)),
    "all": lambda dx: (dx, dx.sum()),
    "some of the rows' dimensions": lambda dx: (dx, dx.view(SHAPE).sum(0)),
    "other rows": lambda dx: (dx, dx.view(2 * ROWS, CLASSES // 2).sum(0)),
    "a slice": lambda dx: (dx, dx[1:].sum(0)),
    "a sum with something else": lambda dx: (dx, (dx + dx.sin()).sum(0)),
    "a multiple": lambda dx: (dx, (dx * 2).sum(0)),
    "a mean": lambda dx: (dx, dx.mean(0)),
    "numbers that were rounded": lambda dx: (dx, cast(cast(dx, FP32) * 1, BF16).sum(0)),
    "a transpose": lambda dx: (dx, dx.t().sum(1)),
    "in float64": lambda dx: (dx, dx.sum(0, dtype=torch.float64)),
    "nothing": lambda dx: (dx, dx.view(SHAPE)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone(name: str) -> None:
    count, text = fused(LEFT[name])
    assert count == 0 and "with_sums" not in text


def test_sums_that_round_on_the_way_are_left() -> None:
    for rest in (lambda dx: (cast(dx, BF16).sum(0),), lambda dx: (dx.sum(0, dtype=BF16),)):
        assert fused(rest, FP32)[0] == 0


def test_without_a_kernel_that_sums_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry._TABLE, ("cross_entropy_backward_with_sums", "fast"))
    assert fused(FUSED["a matrix"])[0] == 0


def test_what_the_kernel_declines_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry._TABLE, ("cross_entropy_backward_with_sums", "fast"))
    monkeypatch.setattr(registry.Target, "of", staticmethod(lambda device: registry.Target("cuda", HOPPER)))
    counts = []
    for columns in (40, 41):  # of which a row of two-byte elements is no multiple of four bytes

        def function(x: Tensor, t: Tensor, lse: Tensor, g: Tensor) -> Any:
            dx = CROSS_ENTROPY_BACKWARD(x, t, lse, g, -100)
            return dx, dx.sum(0)

        gm = traced(function, torch.randn(ROWS, columns).to(BF16), *inputs()[1:])
        counts.append(sum_loss_gradients(gm.graph))
    assert counts == [1, 0]


@pytest.mark.parametrize("key", ["partitioner_tag", "recompute", "ac_graph_id"])
def test_sums_of_another_phase_or_region_are_left(key: str) -> None:
    def function(x: Tensor, t: Tensor, lse: Tensor, g: Tensor) -> Any:
        dx = CROSS_ENTROPY_BACKWARD(x, t, lse, g, -100)
        return dx, dx.sum(0)

    gm = traced(function, *inputs())
    (total,) = gm.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    total.meta[key] = "another"
    assert sum_loss_gradients(gm.graph) == 0


def test_the_other_gradient_of_the_logits_is_in_the_sum() -> None:
    def function(x: Tensor, t: Tensor, lse: Tensor, g: Tensor) -> Any:
        dx = CROSS_ENTROPY_BACKWARD(x, t, lse, g, -100, x)
        return dx, dx.sum(0)

    count, _, results = changed(sum_loss_gradients, function, *inputs())
    assert count == 1
    for got, want in results:
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)


def test_so_is_one_that_may_wait() -> None:
    def function(x: Tensor, t: Tensor, lse: Tensor, g: Tensor) -> Any:
        dx = CROSS_ENTROPY_BACKWARD_DEFERRED(x, t, lse, g, -100, GRADIENT_TICKET(lse))
        return dx, dx.sum(0)

    gm = traced(function, *inputs())
    assert sum_loss_gradients(gm.graph) == 1
    assert "te.cross_entropy_backward_deferred_with_sums(" in ops_text(gm.graph)


# --- models ---

VOCABULARY = 1032


class Head(nn.Module):
    """The head of a masked language model, as BERT has it: transform, norm, decoder with a bias; and the loss."""

    def __init__(self, returns_logits: bool) -> None:
        super().__init__()
        self.dense, self.norm, self.decoder = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, VOCABULARY)
        self.returns_logits = returns_logits

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        """x: [B, S, 32]; labels: [B, S]."""
        logits = self.decoder(self.norm(F.gelu(self.dense(x))))
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))
        return (loss, logits) if self.returns_logits else loss


def given(dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 5, 32).to(dtype), torch.where(torch.rand(2, 5) < 0.5, -100, 7)


def step(model: nn.Module, run: Any, *inputs: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    results = run(*inputs)
    (results[0] if isinstance(results, tuple) else results).backward()
    return gradients(model)


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], share: float) -> None:
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        assert (got[name] - want).double().norm() <= share * want.double().norm() + 1e-6, name


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(
    ("returns_logits", "defers"), [(False, True), (True, True), (True, False)], ids=["loss", "deferred", "added"]
)
def test_a_head_with_a_bias_trains_as_in_eager_mode(
    returns_logits: bool, defers: bool, dtype: torch.dtype, compiler: str
) -> None:
    model, inputs = Head(returns_logits).to(dtype), given(dtype)
    wanted = step(model, model, *inputs)
    with manager.recording() as records:
        got = step(model, compiled(model, compiler=compiler, exclude=["*"], defer_logits=defers), *inputs)
    (backward,) = loss_backwards(records[0], defers and returns_logits)
    assert arguments_of(backward)["sums_dtype"] == dtype and arguments_of(backward)["implementation"] == "fast"
    sums = joint_of(records[0]).find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert not any(total.meta["val"].shape[-1] == VOCABULARY for total in sums)
    (record,) = [each for each in records[0].passes if each.name == "sum_loss_gradients"]
    assert record.count == 1
    assert_close(got, wanted, 1e-5 if dtype == FP32 else 3e-2)


@pytest.mark.usefixtures("fresh_dynamo")
def test_under_autocast_the_sum_is_rounded_as_autocast_rounds_it() -> None:
    model, inputs = Head(False), given()
    with torch.autocast("cpu", BF16):
        wanted = step(model, model, *inputs)
        with manager.recording() as records:
            got = step(model, compiled(model, exclude=["*"]), *inputs)
    (backward,) = loss_backwards(records[0], defers=False)
    assert arguments_of(backward)["sums_dtype"] == BF16
    assert got["decoder.bias"].dtype == FP32
    assert_close(got, wanted, 3e-2)


@pytest.mark.usefixtures("fresh_dynamo")
def test_any_number_of_rows_keeps_its_symbol() -> None:
    model = Head(False)
    run = compiled(model, dynamic=True, exclude=["*"])
    with manager.recording() as records:
        for rows in (4, 9, 6):
            inputs = torch.randn(2, rows, 32), torch.randint(0, VOCABULARY, (2, rows))
            assert_close(step(model, run, *inputs), step(model, model, *inputs), 1e-5)
    (record,) = (each for each in records if each.joint is not None)
    assert te_nodes(record, "cross_entropy_backward_with_sums")


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_checkpointed_head_sums_what_its_own_backward_writes() -> None:
    model, inputs = Head(False), given()
    wanted = step(model, model, *inputs)
    run = compiled(lambda *inputs: checkpoint(model, *inputs, use_reentrant=False), exclude=["*"])
    with manager.recording() as records:
        got = step(model, run, *inputs)
    assert te_nodes(records[0], "cross_entropy_backward_with_sums")
    assert_close(got, wanted, 1e-5)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_bias_that_is_frozen_asks_for_no_sum() -> None:
    model, inputs = Head(False), given()
    model.decoder.bias.requires_grad_(False)
    with manager.recording() as records:
        step(model, compiled(model, exclude=["*"]), *inputs)
    assert te_nodes(records[0], "cross_entropy_backward")


@pytest.mark.usefixtures("fresh_dynamo")
def test_in_a_head_that_runs_in_fp8_the_quantize_sums_what_it_reads() -> None:
    model, inputs = Head(False).to(BF16), given(BF16)
    inputs = inputs[0].repeat(4, 4, 1), inputs[1].repeat(4, 4)
    with manager.recording() as records:
        step(model, compiled(model, lm_head=True, cost_model=False), *inputs)
    assert te_nodes(records[0], "cross_entropy_backward") and te_nodes(records[0], "fused_quantize")
