"""Convolutions over patches that the cost model keeps in 16 bits become products; all others stay convolutions."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from te_compile import backend
from te_compile.options import Options
from te_compile.passes import select, step_cost
from te_compile.passes.find_linears import find_linears
from te_compile.passes.linear_cost import by_cost
from te_compile.passes.patches_as_products import is_on_a_gpu, patches_as_products
from te_compile.passes.plan import Cause, Plan, Site
from te_compile.passes.regions import regions_of
from te_compile.passes.text import ops_text
from tests.capturing import captured
from tests.compiling import compiled, relative_error, train_step
from tests.inspect.test_reasons import faults
from tests.selecting import fake_site

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

TOO_SMALL = "too small to gain: 16×32×48 would take about 9 µs in FP8 against 5 µs; cost_model=False forces it"
ROUNDING = 1e-2  # of bf16, whose numbers are 2^-8 apart


class Embedding(nn.Module):
    """Cuts an image into patches and adds a position to each, as vision transformers do."""

    def __init__(self, convolution: nn.Module, after: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.proj, self.after = convolution, after

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x)
        return self.after(y) if self.after else y


def tokens(y: Tensor) -> Tensor:
    return y.flatten(2).transpose(1, 2) * 0.5


def patches_of_two(**options: Any) -> nn.Conv2d:
    return nn.Conv2d(2, 48, 4, stride=4, **options).bfloat16()


def image(*shape: int) -> Tensor:
    return torch.randn(shape or (2, 2, 8, 12)).bfloat16()


def changed(
    gm: GraphModule,
    examples: list[Any],
    reason: str = TOO_SMALL,
    cause: Cause = Cause.RULE,
    gains: Callable[[Tensor], bool] = lambda x: True,
) -> tuple[int, Plan]:
    """What the pass counts on a captured graph whose linears are all kept for ``reason``."""
    regions, left = regions_of(gm)
    plan = Plan()
    find_linears(regions, left, examples, plan)
    for site in plan.sites:
        site.keep(cause, reason)
    count = patches_as_products(plan, gains)
    for region in reversed(regions):
        region.graph.lint()
        region.module.recompile()
    return count, plan


def passed(run: Callable[..., Any], *inputs: Any, **given: Any) -> tuple[int, GraphModule, Plan]:
    gm, examples = captured(run, *inputs)
    count, plan = changed(gm, examples, **given)
    return count, gm, plan


def by_a_product(gm: GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """A backend that runs what the pass makes of a graph, and fails where it leaves a convolution."""
    changed(gm, examples)
    assert not convolutions(gm)
    return gm.forward


def convolutions(gm: GraphModule) -> int:
    return len([node for node in gm.graph.nodes if node.target in (torch.conv1d, torch.conv2d, torch.conv3d)])


def seen_strides(x: Tensor) -> list[int]:
    """Of the dimensions that have more than one place: no other says where an element lies."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


# ---------------------------------------------------------------------------------------------------------------- fires


def test_patches_are_cut_out_multiplied_and_put_back() -> None:
    count, gm, _ = passed(Embedding(patches_of_two(), tokens), image())
    assert count == 1
    assert ops_text(gm.graph) == textwrap.dedent("""\
        unflatten = .unflatten(l_x_, 2, (2, 4))
        unflatten_1 = .unflatten(unflatten, 4, (3, 4))
        permute = .permute(unflatten_1, 0, 2, 4, 1, 3, 5)
        flatten_1 = .flatten(permute, 3)
        flatten_2 = .flatten(l_self_modules_proj_parameters_weight_, 1)
        linear = linear(flatten_1, flatten_2, l_self_modules_proj_parameters_bias_)
        movedim = .movedim(linear, -1, 1)
        contiguous = .contiguous(movedim)
        flatten = .flatten(contiguous, 2)
        transpose = .transpose(flatten, 1, 2)
        mul = mul(transpose, 0.5)
        return (mul,)""")


FORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(8, 48, 4, 4), (2, 8, 12)),
    "2d": (lambda: nn.Conv2d(2, 48, 4, 4), (2, 2, 8, 12)),
    "2d without bias": (lambda: nn.Conv2d(2, 48, 4, 4, bias=False), (2, 2, 8, 12)),
    "2d padded by name": (lambda: nn.Conv2d(2, 48, 4, 4, padding="valid"), (2, 2, 8, 12)),
    "2d, not square": (lambda: nn.Conv2d(2, 48, (2, 8), (2, 8)), (2, 2, 4, 24)),
    "2d, of one row": (lambda: nn.Conv2d(4, 48, (1, 8), (1, 8)), (2, 4, 3, 24)),
    "2d, one patch": (lambda: nn.Conv2d(2, 48, 4, 4), (3, 2, 4, 4)),
    "3d": (lambda: nn.Conv3d(1, 48, (2, 4, 4), (2, 4, 4)), (2, 1, 4, 8, 8)),
}
READERS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "returned": None,
    "tokens": tokens,
    "viewed": lambda y: y.view(y.shape[0], -1) * 2,
    "written to": lambda y: y.mul_(2).view(-1),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_the_numbers_and_their_order_in_memory_are_the_convolutions(form: str, dtype: torch.dtype, reader: str) -> None:
    build, shape = FORMS[form]
    model, x = Embedding(build().to(dtype), READERS[reader]), torch.randn(shape, dtype=dtype, requires_grad=True)
    y, got = train_step(model, torch.compile(model, backend=by_a_product), x)
    dx, x.grad = x.grad, None
    wanted_y, wanted = train_step(model, model, x)
    assert (y.shape, y.dtype, seen_strides(y)) == (wanted_y.shape, dtype, seen_strides(wanted_y))
    assert relative_error(y, wanted_y) < ROUNDING and relative_error(dx, x.grad) < ROUNDING
    assert got.keys() == wanted.keys()
    assert all(relative_error(got[name], wanted[name]) < ROUNDING for name in wanted)


def test_channels_last_stay_last_without_a_copy() -> None:
    model, x = Embedding(patches_of_two()), image().to(memory_format=torch.channels_last)
    model.to(memory_format=torch.channels_last)
    _, gm, _ = passed(model, x)
    y = torch.compile(model, backend=by_a_product)(x)
    assert y.is_contiguous(memory_format=torch.channels_last) and relative_error(y, model(x)) < ROUNDING
    assert "contiguous" not in ops_text(gm.graph)


def test_under_autocast_the_operands_may_be_wide() -> None:
    model, x = Embedding(nn.Conv2d(2, 48, 4, 4), tokens), torch.randn(2, 2, 8, 12)
    fast = torch.compile(model, backend=by_a_product)
    with torch.autocast("cpu", torch.bfloat16):
        (y, got), (wanted_y, wanted) = train_step(model, fast, x), train_step(model, model, x)
    assert y.dtype == wanted_y.dtype == torch.bfloat16 and relative_error(y, wanted_y) < ROUNDING
    assert all(relative_error(got[name], wanted[name]) < ROUNDING for name in wanted)


def test_the_number_of_images_may_be_a_symbol() -> None:
    model, x = Embedding(patches_of_two(), tokens), image()
    torch._dynamo.mark_dynamic(x, 0)
    fast = torch.compile(model, backend=by_a_product)
    for batch in (x, image(5, 2, 8, 12)):
        assert relative_error(fast(batch), model(batch)) < ROUNDING


def test_a_checkpointed_embedding() -> None:
    model, x = Embedding(patches_of_two(), tokens), image()
    count, gm, _ = passed(lambda x: checkpoint(model, x, use_reentrant=False), x)
    bodies = [each for each in gm.modules() if isinstance(each, GraphModule)]
    assert count == 1 and len(bodies) == 2 and not any(map(convolutions, bodies))


def test_a_linear_that_reads_the_patches_reads_the_product() -> None:
    model, x = nn.Sequential(patches_of_two(), nn.Conv2d(48, 32, 2, 2).bfloat16()), image(2, 2, 8, 16)
    count, _, plan = passed(model, x)
    assert count == 2 and all(site.x in site.node.graph.nodes for site in plan.sites)
    assert relative_error(torch.compile(model, backend=by_a_product)(x), model(x)) < ROUNDING


def test_the_row_keeps_its_reason_with_a_note() -> None:
    _, _, plan = passed(Embedding(patches_of_two()), image())
    (site,) = plan.sites
    assert (site.name, site.form, site.status) == ("proj", "convolution", "kept")
    assert (site.features, site.tokens) == ((32, 48), 12)
    assert site.reason == TOO_SMALL.replace("; ", " (now a product); ") and not faults(site.reason)


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_what_the_cost_model_says_is_known_and_has_room_for_the_note(scale: float) -> None:
    ((_, reason),) = by_cost([fake_site("cuda", tokens=16)], Options())
    steps = [(scale * 234.0, scale * 345.0), (scale * 345.0, scale * 234.0)]
    reasons = [reason, *(step_cost._reason(step_cost.Step(*each), step_cost.Step(50.0, 60.0)) for each in steps)]
    for reason in reasons:
        count, _, plan = passed(Embedding(patches_of_two()), image(), reason=reason)
        assert count == 1 and not faults(plan.sites[0].reason)


# -------------------------------------------------------------------------------------------------------- does not fire


@pytest.mark.parametrize(
    ("cause", "reason"),
    (
        (Cause.USER, "it matches the exclude pattern 'proj'; take it out of exclude for FP8"),
        (Cause.RULE, "too narrow for FP8: in_features=8; make it 16 or more for FP8"),
        (Cause.RULE, "a router: its result picks experts; nothing to do: FP8 would lose accuracy"),
        (Cause.UNSUPPORTED, "it is on 'xpu'; move the model to a CUDA GPU for FP8"),
    ),
    ids=("excluded", "narrow", "router", "unsupported"),
)
def test_what_is_kept_for_another_reason_stays_a_convolution(cause: Cause, reason: str) -> None:
    count, gm, plan = passed(Embedding(patches_of_two()), image(), cause=cause, reason=reason)
    assert count == 0 and convolutions(gm) == 1 and plan.sites[0].reason == reason


@pytest.mark.parametrize(
    ("build", "x"),
    (
        (lambda: nn.Conv2d(2, 48, 4, 4), torch.randn(2, 2, 8, 12)),
        (lambda: nn.Conv2d(32, 48, 1).bfloat16(), image(2, 32, 3, 5)),
        (lambda: nn.Conv2d(2, 48, 4, 4, padding=4).bfloat16(), image()),
        (lambda: nn.Conv2d(2, 48, 4, 4, dilation=2).bfloat16(), image()),
        (lambda: nn.Conv2d(2, 48, 4, 4, groups=2).bfloat16(), image()),
        (lambda: nn.Conv2d(2, 48, 4, 2).bfloat16(), image()),
    ),
    ids=("float32", "kernel of one", "padding", "dilation", "groups", "overlap"),
)
def test_other_convolutions_stay(build: Callable[[], nn.Module], x: Tensor) -> None:
    count, gm, _ = passed(Embedding(build()), x)
    assert count == 0 and convolutions(gm) == 1


def test_other_linears_that_are_too_small_stay() -> None:
    weight = nn.Parameter(torch.randn(32, 2, 24).bfloat16())
    model = Embedding(nn.Linear(32, 32).bfloat16(), lambda y: torch.einsum("bsd,dhk->bshk", y, weight))
    before = ops_text(captured(model, image(2, 3, 32))[0].graph)
    count, gm, plan = passed(model, image(2, 3, 32))
    assert count == 0 and len(plan.sites) == 2 and ops_text(gm.graph) == before


def test_nothing_changes_on_a_cpu() -> None:
    count, gm, _ = passed(Embedding(patches_of_two()), image(), gains=is_on_a_gpu)
    assert count == 0 and convolutions(gm) == 1
    assert is_on_a_gpu(cast(Tensor, SimpleNamespace(device=torch.device("cuda", 0))))


# ------------------------------------------------------------------------------------------------------ the whole road


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_trains_beside_linears_in_fp8(monkeypatch: pytest.MonkeyPatch, checkpointed: bool) -> None:
    def too_small(site: Site, options: Any) -> Any:
        return (Cause.RULE, TOO_SMALL) if site.form == "convolution" else None

    monkeypatch.setattr(select, "RULES", (*select.RULES, too_small))
    monkeypatch.setattr(backend, "patches_as_products", partial(patches_as_products, gains=lambda x: True))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.fc = Embedding(patches_of_two(), tokens), nn.Linear(48, 64).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.embed, x, use_reentrant=False) if checkpointed else self.embed(x)
            return F.gelu(self.fc(y))

    model, x = Model(), image()
    y, got = train_step(model, compiled(model, strict=True), x)
    wanted_y, wanted = train_step(model, model, x)
    assert relative_error(y, wanted_y) < 0.1
    assert all(relative_error(got[name], wanted[name]) < 0.15 for name in wanted)
