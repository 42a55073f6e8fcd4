"""Attention in training leaves cuDNN where that may compute weights for keys that are not there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from te_compile import backend
from te_compile.inspect.attentions import AttentionRow
from te_compile.ops.window_attention import WINDOW_ATTENTION
from te_compile.options import Options
from te_compile.passes import manager
from te_compile.passes.attention_calls import ATTENTION_CALLS
from te_compile.passes.attention_kernels import FLASH_ATTENTION
from te_compile.passes.efficient_attention import EFFICIENT_ATTENTION
from te_compile.passes.find_attentions import find_attentions
from te_compile.passes.finite_gradients import Kernels, finite_gradients
from te_compile.passes.leave_cudnn import PRODUCTS
from te_compile.passes.plan import Plan
from te_compile.passes.recognise_attention import recognise_attention
from te_compile.passes.regions import regions_of
from tests.capturing import captured
from tests.compiling import compiled, relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "an_order_of_kernels_that_nobody_has_changed")

BATCH, HEADS, WIDTH = 2, 4, 16
Run = Callable[..., Tensor]


def heads(length: int = 64, dtype: torch.dtype = torch.bfloat16, shared: int = HEADS) -> Tensor:
    return torch.randn(BATCH, length, shared, WIDTH, dtype=dtype).transpose(1, 2).requires_grad_()


def operands(queries: int = 64, keys: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [heads(queries, dtype), heads(keys, dtype), heads(keys, dtype)]


def bias(queries: int = 64, keys: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(1, HEADS, queries, keys, dtype=dtype)


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


def spelled_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.mT / WIDTH**0.5
    return torch.softmax(scores if mask is None else scores + mask, dim=-1) @ v


def kernels(cudnn: bool = True, core: bool = False, flash: bool = False, efficient: bool = False) -> Kernels:
    """As on a device that has these."""
    return Kernels(lambda _: cudnn, lambda *_: core, lambda _: flash, lambda _: efficient)


def change(gm: GraphModule, there: Kernels, options: Options | None = None) -> tuple[int, Plan]:
    regions, left = regions_of(gm)
    for region in regions:
        recognise_attention(region.graph)
    plan = Plan()
    find_attentions(regions, left, plan)
    count = finite_gradients(regions, plan, options or Options(), there)
    gm.graph.lint()
    gm.recompile()
    return count, plan


def targets(gm: GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes]


def has_sdpa(gm: GraphModule) -> bool:
    return any(target in ATTENTION_CALLS for target in targets(gm))


KERNELS: dict[str, tuple[Run, Kernels, Any]] = {
    "the core's, of a call of SDPA": (by_sdpa, kernels(core=True, flash=True, efficient=True), WINDOW_ATTENTION),
    "the core's, of what is spelled out": (spelled_out, kernels(core=True), WINDOW_ATTENTION),
    "flash": (by_sdpa, kernels(flash=True, efficient=True), FLASH_ATTENTION),
    "the memory-efficient one": (by_sdpa, kernels(efficient=True), EFFICIENT_ATTENTION),
    "products": (spelled_out, kernels(), PRODUCTS),
}


@pytest.mark.parametrize("case", KERNELS)
def test_without_a_mask_the_fastest_other_kernel_runs(case: str) -> None:
    run, there, target = KERNELS[case]
    inputs = operands()
    gm, examples = captured(run, *inputs)
    count, plan = change(gm, there)
    assert count == 1 and [each.kernel for each in plan.attentions] == ["finite"]
    assert target in targets(gm) and not has_sdpa(gm)
    if target in (WINDOW_ATTENTION, PRODUCTS):  # the others have no kernel on a CPU
        assert relative_error(gm(*examples)[0], spelled_out(*(x.double() for x in inputs))) < 1e-2


def test_flash_reads_what_an_autocast_would_cast() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return by_sdpa(q, k, v)

    gm, _ = captured(run, *operands(dtype=torch.float32))
    assert change(gm, kernels(flash=True))[0] == 1
    (call,) = gm.graph.find_nodes(op="call_function", target=FLASH_ATTENTION)
    assert {each.meta["example_value"].dtype for each in call.args[:3]} == {torch.bfloat16}


@pytest.mark.parametrize("run", [by_sdpa, spelled_out])
def test_a_bias_that_learns_is_the_memory_efficient_ones(run: Run) -> None:
    gm, _ = captured(run, *operands(), bias().requires_grad_())
    count, _ = change(gm, kernels(core=True, flash=True, efficient=True))
    assert count == 1 and EFFICIENT_ATTENTION in targets(gm)


MASKS: dict[str, Callable[[], Tensor]] = {
    "a bias": bias,
    "one of booleans": lambda: torch.rand(BATCH, HEADS, 64, 64) > 0.5,
    "one for all keys": lambda: torch.randn(BATCH, 1, 64, 1, dtype=torch.bfloat16),
    "repeated for heads": lambda: torch.randn(BATCH, 1, 64, 64, dtype=torch.bfloat16).expand(-1, HEADS, -1, -1),
    "repeated for queries": lambda: (torch.rand(BATCH, 1, 1, 64) > 0.5).expand(-1, HEADS, 64, -1),
    "of two dimensions": lambda: torch.randn(64, 64, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", MASKS)
def test_under_another_mask_tiles_are_filled_up(kind: str) -> None:
    inputs = [*operands(), MASKS[kind]()]
    gm, examples = captured(by_sdpa, *inputs)
    count, plan = change(gm, kernels(core=True, flash=True, efficient=True))
    assert count == 1 and [each.kernel for each in plan.attentions] == ["finite"]
    (call,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert call.args[1].meta["example_value"].shape[2] == 128
    wide = [x if x.dtype == torch.bool else x.detach().double().requires_grad_() for x in inputs]
    results = gm(*examples)[0], by_sdpa(*wide)
    assert relative_error(*results) < 1e-2
    grad = torch.randn_like(results[0])
    got, wanted = (
        torch.autograd.grad(y, x[:3], grad.to(y.dtype)) for y, x in zip(results, (inputs, wide), strict=True)
    )
    assert all(relative_error(one, other) < 2e-2 for one, other in zip(got, wanted, strict=True))


def test_what_a_mask_repeats_is_not_copied() -> None:
    def run(x: Tensor, seen: Tensor) -> Tensor:
        return by_sdpa(x, x, x, seen[:, None, None, :].expand(-1, HEADS, 64, -1))

    gm, _ = captured(run, heads(), torch.rand(BATCH, 64) > 0.5)
    assert change(gm, kernels())[0] == 1
    (call,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert call.kwargs["attn_mask"].meta["example_value"].shape == (BATCH, 1, 1, 128)


@pytest.mark.parametrize("run", [by_sdpa, spelled_out])
def test_so_are_those_of_any_length(run: Run) -> None:
    def call(x: Tensor, mask: Tensor) -> Tensor:
        return run(x, x, x, mask)

    inputs = [heads(40, shared=HEADS), bias(40, 40)]
    torch._dynamo.mark_dynamic(inputs[0], 2)
    for dim in (2, 3):
        torch._dynamo.mark_dynamic(inputs[1], dim)
    gm, _ = captured(call, *inputs)
    assert change(gm, kernels(core=True, flash=True))[0] == 1
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    for length in (40, 64, 128, 200):
        x, mask = heads(length), bias(length, length)
        given = {name: length if name.startswith("s") else mask if "mask" in name else x for name in names}
        assert relative_error(gm(*given.values())[0], call(x.double(), mask.double())) < 1e-2


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_tiles_are_filled_up_whatever_length_comes(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "finite_gradients", partial(finite_gradients, kernels=kernels()))
    fast = compiled(spelled_out, dynamic=True, compiler=compiler)
    for length in (40, 64, 192):
        inputs = [*operands(length, length), bias(length, length)]
        wide = [x.detach().double().requires_grad_() for x in inputs]
        results = fast(*inputs), spelled_out(*wide)
        grad, both = torch.randn_like(results[0]), zip(results, (inputs, wide), strict=True)
        got, wanted = (torch.autograd.grad(y, given[:3], grad.to(y.dtype)) for y, given in both)
        assert relative_error(*results) < 1e-2
        assert all(relative_error(one, other) < 2e-2 for one, other in zip(got, wanted, strict=True))


def test_a_single_query_under_a_mask_is_products() -> None:
    inputs = [*operands(1, 128), bias(1, 128)]
    gm, examples = captured(spelled_out, *inputs)
    assert change(gm, kernels())[0] == 1 and PRODUCTS in targets(gm)
    assert relative_error(gm(*examples)[0], spelled_out(*(x.double() for x in inputs))) < 1e-2


def test_gradients_are_what_they_were() -> None:
    inputs = operands()
    gm, examples = captured(by_sdpa, *inputs)
    change(gm, kernels(core=True))
    got, wanted = gm(*examples)[0], spelled_out(*(x.double() for x in inputs))
    grad = torch.randn_like(wanted)
    pairs = zip(
        torch.autograd.grad(got, inputs, grad.bfloat16()), torch.autograd.grad(wanted, inputs, grad), strict=True
    )
    assert all(relative_error(one, other.double()) < 2e-2 for one, other in pairs)


MOVED: dict[str, tuple[Run, list[Tensor]]] = {
    "a multiple of 128, and 64": (by_sdpa, operands(192, 192)),
    "keys of its own number": (by_sdpa, operands(128, 64)),
    "causal queries behind the last key": (partial(by_sdpa, is_causal=True), operands(128, 64)),
    "a single query": (by_sdpa, operands(1, 128)),
    "a dropout": (partial(by_sdpa, dropout_p=0.1), operands()),
}


@pytest.mark.parametrize("case", MOVED)
def test_these_may_have_no_numbers(case: str) -> None:
    run, inputs = MOVED[case]
    gm, _ = captured(run, *inputs)
    assert change(gm, kernels(flash=True))[0] == 1


def test_so_may_a_length_that_is_a_symbol() -> None:
    def run(x: Tensor) -> Tensor:
        return spelled_out(x, x, x)

    x = heads(40)
    torch._dynamo.mark_dynamic(x, 2)
    gm, _ = captured(run, x)
    assert change(gm, kernels(core=True))[0] == 1 and WINDOW_ATTENTION in targets(gm)


LEFT: dict[str, tuple[Run, list[Tensor], Kernels]] = {
    "whole tiles": (by_sdpa, operands(128, 128), kernels(core=True)),
    "another rest": (by_sdpa, operands(72, 72), kernels(core=True)),
    "causal": (partial(by_sdpa, is_causal=True), operands(), kernels(core=True)),
    "another kernel's": (by_sdpa, operands(), kernels(cudnn=False, core=True, flash=True, efficient=True)),
    "SDPA's, which no other kernel runs": (by_sdpa, operands(), kernels()),
}


@pytest.mark.parametrize("case", LEFT)
def test_others_are_left_alone(case: str) -> None:
    run, inputs, there = LEFT[case]
    gm, _ = captured(run, *inputs)
    count, plan = change(gm, there)
    assert count == 0 and [each.kernel for each in plan.attentions] == [""]


def test_without_gradients_nothing_changes() -> None:
    with torch.no_grad():
        gm, _ = captured(by_sdpa, *operands())
        assert change(gm, kernels(core=True, flash=True, efficient=True))[0] == 0


def test_a_draw_that_eager_mode_makes_stays_sdpas() -> None:
    gm, _ = captured(partial(by_sdpa, dropout_p=0.125), *operands())
    eager = Options(inductor={"fallback_random": True})
    assert change(gm, kernels(flash=True), eager)[0] == 0


def test_nor_does_another_kernel_run_where_its_result_is_written() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = by_sdpa(q, k, v)
        y += 1
        return y

    gm, _ = captured(run, *operands())
    assert change(gm, kernels(core=True, flash=True, efficient=True))[0] == 0


def test_the_result_lies_as_it_did() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_sdpa(q, k, v).transpose(1, 2).view(BATCH, 64, HEADS * WIDTH)

    gm, _ = captured(run, *operands())
    change(gm, kernels(core=True))
    assert gm(*operands())[0].shape == (BATCH, 64, HEADS * WIDTH)


def test_on_a_cpu_nothing_changes() -> None:
    with manager.recording() as records:
        fast = torch.compile(by_sdpa, backend="te_fp8", options={"compiler": "aot_eager"})
        fast(*operands())
    (record,) = records
    assert {each.name: each.count for each in record.passes}["finite_gradients"] == 0


def test_the_report_says_why() -> None:
    gm, _ = captured(by_sdpa, *operands())
    _, plan = change(gm, kernels(core=True))
    assert "fault of cuDNN" in AttentionRow.of(plan.attentions[0], "attention").detail
