"""Weights that are made from a parameter: which are taken, what is quantised, where the gradient goes."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import te_compile
from te_compile import state
from te_compile.options import Options
from te_compile.passes.plan import Cause
from te_compile.passes.select import select_linears
from tests.capturing import only_site, regions_and_plan
from tests.compiling import compiled, error_but_for_ties, train_step
from tests.emulation import emulated_linear, rounded

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Linear = Callable[..., Tensor]


class Made(nn.Module):
    """Applies ``function(linear, x, weight, mask)``; ``linear`` is F.linear or the emulation."""

    def __init__(self, function: Callable[..., Tensor], *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function, self.linear = function, F.linear
        self.weight = nn.Parameter(torch.randn(*shape, dtype=dtype))
        self.register_buffer("mask", (torch.rand(*shape) > 0.3).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear, x, self.weight, self.mask)


EXPRESSIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "1 + w": (lambda linear, x, w, m: linear(x, 1 + w), (48, 32)),
    "cast": (lambda linear, x, w, m: linear(x, w.to(torch.bfloat16).to(torch.float32)), (48, 32)),
    "transposed and laid out": (lambda linear, x, w, m: linear(x, w.t().contiguous()), (32, 48)),
    "masked": (lambda linear, x, w, m: linear(x, w * m), (48, 32)),
    "a slice": (lambda linear, x, w, m: linear(x, w[32:80]), (96, 32)),
    "a view": (lambda linear, x, w, m: linear(x, w.view(48, 32)), (4, 12, 32)),
    "one expert": (lambda linear, x, w, m: linear(x, w[2]), (4, 48, 32)),
    "an unbound expert": (lambda linear, x, w, m: linear(x, w.unbind(0)[1]), (4, 48, 32)),
    "a chunk": (lambda linear, x, w, m: linear(x, w.chunk(2)[1]), (96, 32)),
    "normalised": (lambda linear, x, w, m: linear(x, F.normalize(w, dim=1)), (48, 32)),
    "a constant of the graph": (lambda linear, x, w, m: linear(x, w * torch.tril(torch.ones(48, 32))), (48, 32)),
}

BY_PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "with two low-rank factors": (lambda linear, x, w, m: linear(x, w[:48] + 0.5 * (m[:48, :16] @ w[48:])), (64, 32)),
    "rotated": (lambda linear, x, w, m: linear(x, torch.mm(m @ m.mT, w)), (48, 32)),
    "one product after the other": (lambda linear, x, w, m: linear(x, (w @ w.mT / 32) @ w + w), (48, 32)),
    "by a linear": (lambda linear, x, w, m: linear(x, F.linear(m, w)[:, :32] / 4), (48, 48)),
    "by an einsum": (lambda linear, x, w, m: linear(x, torch.einsum("ab,cb->ca", w[:32], w) / 4), (48, 32)),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_matrix_made_from_a_parameter_is_a_weight_with_the_parameters_state(name: str) -> None:
    function, shape = EXPRESSIONS[name]
    site = only_site(Made(function, *shape), torch.randn(5, 32))
    assert (site.status, site.features) == ("fp8", (32, 48))
    assert site.root_weight is not None and site.root_weight.op == "placeholder"
    assert site.matrix is not None and site.matrix.owner is site.root_weight


@pytest.mark.parametrize("around", ("in the open", "checkpointed"))
@pytest.mark.parametrize("name", EXPRESSIONS | BY_PRODUCTS)
def test_values_and_gradients_are_the_textbooks(name: str, around: str) -> None:
    function, shape = (EXPRESSIONS | BY_PRODUCTS)[name]
    model, x = Made(function, *shape), torch.randn(random.randrange(3, 20), 32, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return model(x) if around == "in the open" else checkpoint(model, x, use_reentrant=False)

    y, got = train_step(model, compiled(run, strict=True), x)
    dx, x.grad = x.grad, None
    model.linear = emulated_linear
    expected_y, expected = train_step(model, model, x)
    assert error_but_for_ties(y, expected_y) < 1e-4 and error_but_for_ties(dx, x.grad) < 1e-3
    assert error_but_for_ties(got["weight"], expected["weight"]) < 1e-3


@pytest.mark.parametrize("name", BY_PRODUCTS)
def test_a_product_that_makes_a_weight_is_kept_and_what_multiplies_by_that_is_not(name: str) -> None:
    function, shape = BY_PRODUCTS[name]
    _, plan = regions_and_plan(Made(function, *shape), torch.randn(5, 32))
    *making, site = plan.sites
    assert (site.form, site.status, site.features) == ("linear", "fp8", (32, 48))
    assert making and all(each.cause is Cause.RULE and "makes a weight" in each.reason for each in making)


def test_what_a_product_of_parameters_gave_is_no_weight_of_a_matmul() -> None:
    latents = nn.Parameter(torch.randn(32, 32))

    def run(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
        return x @ (latents @ w.mT)  # scores with learned keys, say

    site = only_site(Made(run, 32, 32), torch.randn(5, 32))
    assert (site.form, site.tokens, site.status) == ("matmul", 32, "fp8")


def test_slices_of_one_parameter_share_its_state_and_the_larger_amax_enters_it() -> None:
    model = Made(lambda linear, x, w, m: linear(x, w[:16]) * linear(2 * x, w[16:]), 32, 32)
    x = torch.randn(8, 32)
    train_step(model, compiled(model), x)
    found = state.existing_state(model.weight, 1024)
    assert found is not None
    assert torch.equal(found.history[0, 0], 2 * x.abs().max())
    assert torch.equal(found.history[1, 0], model.weight.abs().max())


def test_a_parameter_and_a_matrix_made_from_it_are_both_quantised() -> None:
    """The first step has scales for each tensor; the second one those of the parameter's state, which both share."""
    model = Made(lambda linear, x, w, m: linear(linear(x, w).relu(), 0.5 * w), 32, 32)
    runs, x, w = compiled(model), torch.randn(8, 32), model.weight.detach()
    y, got = train_step(model, runs, x)
    model.linear = emulated_linear
    expected_y, expected = train_step(model, model, x)
    assert error_but_for_ties(y, expected_y) < 1e-4 and error_but_for_ties(got["weight"], expected["weight"]) < 1e-3

    _, _, hidden, dy, dhidden = two_products(x, w, {})
    shared = {
        "x": FORWARD_MAX / torch.maximum(x.abs().max(), hidden.abs().max()),
        "w": FORWARD_MAX / w.abs().max(),
        "dy": BACKWARD_MAX / torch.maximum(dy.abs().max(), dhidden.abs().max()),
    }
    model.linear = F.linear
    y, got = train_step(model, runs, x)
    expected_y, expected_dw, *_ = two_products(x, w, shared)
    assert error_but_for_ties(y, expected_y) < 1e-4 and error_but_for_ties(got["weight"], expected_dw) < 1e-3


FORWARD_MAX, BACKWARD_MAX = torch.finfo(torch.float8_e4m3fn).max, torch.finfo(torch.float8_e5m2).max


def two_products(x: Tensor, w: Tensor, scales: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """A train step of relu(x wᵀ) (0.5 w)ᵀ by hand, each tensor rounded with the scale given for its kind, else its own.

    Returns y, dw, and what else was quantised: relu(x wᵀ), dy and the gradient of x wᵀ.
    """
    forward, backward = torch.float8_e4m3fn, torch.float8_e5m2
    first, second = (rounded(t, forward, scales.get("w")) for t in (w, 0.5 * w))
    qx = rounded(x, forward, scales.get("x"))
    inner = qx @ first.T
    hidden = inner.relu()
    qhidden = rounded(hidden, forward, scales.get("x"))
    y = qhidden @ second.T
    dy = 2 * y / y.numel()  # of the mean of squares
    qdy = rounded(dy, backward, scales.get("dy"))
    dinner = (qdy @ second) * (inner > 0)
    dw = 0.5 * (qdy.T @ qhidden) + rounded(dinner, backward, scales.get("dy")).T @ qx
    return y, dw, hidden, dy, dinner


def test_a_body_that_reads_a_parameter_and_its_transpose_gets_it_once() -> None:
    model, x = Made(lambda linear, x, w, m: (linear(x, 1 + w)).relu() @ w.T, 32, 32), torch.randn(8, 32)
    y, got = train_step(model, compiled(lambda x: checkpoint(model, x, use_reentrant=False), strict=True), x)
    model.function, model.linear = lambda linear, x, w, m: linear(linear(x, 1 + w).relu(), w), emulated_linear
    expected_y, expected = train_step(model, model, x)
    assert error_but_for_ties(y, expected_y) < 1e-4 and error_but_for_ties(got["weight"], expected["weight"]) < 1e-3


def test_a_weight_of_several_parameters_has_the_state_of_the_largest() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(32, 48))
    x = torch.randn(8, 32)
    train_step(model, compiled(model, strict=True), x)
    direction = model.parametrizations.weight.original1
    assert direction.numel() == 48 * 32 and state.existing_state(direction, 1024) is not None


# --- what cannot be computed in front of the graph ----------------------------------------------------------------


def _written_before(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    with torch.no_grad():
        w.clamp_(-0.5, 0.5)
    return linear(x, w)


def _written_copy(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    copied = w.t().contiguous().t()
    copied.mul_(2.0)
    return linear(x, copied)


def _mask_written(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    m.fill_(0.5)
    return linear(x, w * m)


def _written_into_zeros(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """Which alone lead back to no parameter."""
    spread = torch.zeros(48, 64)
    spread[:, ::2] = w
    return linear(x, spread[:, 1:33] + spread[:, 16:48])


def _dropped(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return linear(x, F.dropout(w, 0.5))


def _with_noise(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return linear(x, w + m * torch.rand_like(w))


def _under_autocast(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        made = torch.exp(w * m)
    return linear(x, made)


def _shortened(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """By an embedding, whose name does not say so."""
    rows = F.embedding(torch.arange(48), w, max_norm=3.0)
    return linear(x, w) + rows.mean()


def _with_statistics(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """Which a norm has just renewed."""
    y = F.batch_norm(x, m[0], m[1], training=True)
    return linear(y, w + m)


def _counted(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return linear(x, w * torch.binomial(torch.full_like(m, 3.0), torch.full_like(m, 0.5)))


@torch.compiler.allow_in_graph
def _some_of(w: Tensor) -> Tensor:
    return torch.where(torch.rand(w.shape) > 0.5, w, 0.0)


def _not_looked_into(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return linear(x, _some_of(w))


@torch.library.custom_op("te_compile_tests::round_at_random", mutates_args=())
def _round_at_random(w: Tensor) -> Tensor:
    return torch.floor(w * 2 + torch.rand_like(w)) / 2


@_round_at_random.register_fake
def _(w: Tensor) -> Tensor:
    return torch.empty_like(w)


def _by_a_library(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return linear(x, w + _round_at_random(m))


@torch.compiler.allow_in_graph
def _halve(w: Tensor) -> Tensor:
    with torch.no_grad():
        w.mul_(0.5)
    return w.mean()  # beside a sum the rows of x would be alike, and meet the same ties


def _written_by_somebody(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return linear(x + _halve(m), w + m)


RANDOM = (_dropped, _with_noise, _counted, _not_looked_into, _by_a_library)
WRITTEN_AROUND = (_written_before, _mask_written, _shortened, _with_statistics, _written_by_somebody)
IN_PLACE = (*RANDOM, *WRITTEN_AROUND, _written_copy, _written_into_zeros, _under_autocast)


@pytest.mark.parametrize("recipe", ("delayed", "current"))
@pytest.mark.parametrize(
    ("function", "around"),
    [
        *((function, "in the open") for function in IN_PLACE),
        # What a checkpointed body writes to is seen around it, and a weight of that stays in high precision.
        *((function, "checkpointed") for function in IN_PLACE if function not in WRITTEN_AROUND),
    ],
)
def test_a_weight_that_is_another_each_time_is_quantised_where_it_is_read(
    function: Callable[..., Tensor], recipe: str, around: str
) -> None:
    """Over steps: a scale that belongs to another value of it would show. With noise, and where statistics may move
    what is largest, scales of earlier steps do."""
    model, x = Made(function, 48, 32), torch.randn(5, 32, requires_grad=True)
    steps = 1 if recipe == "delayed" and function in (*RANDOM, _written_by_somebody, _with_statistics) else 3

    def run(x: Tensor) -> Tensor:
        return model(x) if around == "in the open" else checkpoint(model, x, use_reentrant=False)

    fast = compiled(run, strict=True, recipe=recipe, lm_head=True)  # which a table that is looked up in is taken for
    for step in range(steps):
        stored = {name: each.clone() for name, each in model.state_dict().items()}
        results = []
        for linear, call in ((F.linear, fast), (emulated_linear, model)):
            model.load_state_dict(stored)
            model.linear, x.grad = linear, None
            torch.manual_seed(step)
            y, got = train_step(model, call, x)
            results.append((y, x.grad, got["weight"], model.mask.clone(), model.weight.detach().clone()))
        for found, wanted in zip(*results, strict=True):
            assert error_but_for_ties(found, wanted) < 2e-3


def _written_between(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    x = x.detach()  # for whose gradient the first linear would want its weight as it was
    y = linear(x, w)
    with torch.no_grad():
        w.mul_(4.0)
    return y + linear(x.flip(0), w)


def _written_after(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    y = linear(x.detach(), w)
    with torch.no_grad():
        w.mul_(4.0)
    return y


@pytest.mark.parametrize("function", (_written_between, _written_after))
def test_a_weight_that_is_written_to_once_it_was_read_is_left_alone_and_right(
    function: Callable[..., Tensor],
) -> None:
    """A linear keeps its weight for backward, and autograd would not have that changed."""
    _, plan = regions_and_plan(Made(function, 48, 32), torch.randn(5, 32))
    assert all(site.cause is Cause.UNSUPPORTED and "in place" in site.reason for site in plan.sites)
    model, x = Made(function, 48, 32), torch.randn(5, 32)
    stored = {name: each.clone() for name, each in model.state_dict().items()}
    y, _ = train_step(model, compiled(model), x)
    model.load_state_dict(stored)
    assert torch.equal(y, train_step(model, model, x)[0])


WRITTEN_OUT: dict[str, Linear] = {
    "einsum": lambda x, w: torch.einsum("bk,nk->bn", x, w),
    "batched einsum": lambda x, w: torch.einsum("ebk,enk->ebn", x[None], w[None])[0],
    "bmm": lambda x, w: torch.bmm(x[None], w.T[None])[0],
    "convolution": lambda x, w: F.conv1d(x[..., None], w[..., None])[..., 0],
}


@pytest.mark.parametrize("recipe", ("delayed", "current"))
@pytest.mark.parametrize("change", (_written_before, _written_copy, _dropped))
@pytest.mark.parametrize("form", WRITTEN_OUT)
def test_products_that_are_written_out_as_linears_take_such_weights_as_these_do(
    form: str, change: Callable[..., Tensor], recipe: str
) -> None:
    model, x = Made(change, 48, 32), torch.randn(5, 32, requires_grad=True)
    stored = model.weight.detach().clone()
    results = []
    for product in (F.linear, WRITTEN_OUT[form]):
        with torch.no_grad():
            model.weight.copy_(stored)
        model.linear, x.grad = product, None
        torch.manual_seed(0)
        torch._dynamo.reset()
        te_compile.reset_state(model)
        y, got = train_step(model, compiled(model, strict=True, recipe=recipe), x)
        results.append((y, x.grad, got["weight"]))
    for expected, found in zip(*results, strict=True):
        assert error_but_for_ties(found, expected) < 2e-3


def test_what_an_activation_is_written_into_is_no_weight() -> None:
    def run(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
        made = w.clone()
        made[:5] = x
        return linear(x, made)

    assert only_site(Made(run, 48, 32), torch.randn(5, 32)).cause is Cause.UNSUPPORTED


@pytest.mark.parametrize("form", WRITTEN_OUT)
def test_where_they_cannot_the_report_says_why(form: str) -> None:
    """And not that a product of this kind has no FP8 form."""

    def run(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
        return _written_after(WRITTEN_OUT[form], x, w, m)

    site = only_site(Made(run, 48, 32), torch.randn(5, 32))
    assert site.cause is Cause.UNSUPPORTED and "writes to its weight in place" in site.reason


def test_without_gradients_it_is_another_in_each_call_too() -> None:
    model, x = Made(_dropped, 48, 32), torch.randn(64, 32)
    fast = compiled(model, strict=True)
    with torch.no_grad():
        first, second = fast(x), fast(x)
    assert not torch.allclose(first, second)


# --- what is no weight ---------------------------------------------------------------------------------------------


def test_a_write_to_something_else_changes_nothing() -> None:
    def run(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
        m.fill_(0.5)
        return linear(x, w).relu_()

    assert only_site(Made(run, 48, 32), torch.randn(5, 32)).status == "fp8"


@pytest.mark.parametrize(
    ("function", "reason"),
    (
        (lambda linear, x, w, m: linear(x, w * x.mean()), "inputs of the call"),
        (lambda linear, x, w, m: linear(x, F.bilinear(w, w, m[:32, :, None].expand(32, 32, 32))), "another product"),
        (lambda linear, x, w, m: linear(x, m), "not a parameter"),
    ),
    ids=("activations", "product", "buffer"),
)
def test_a_matrix_that_is_no_lasting_function_of_a_parameter_is_kept(
    function: Callable[..., Tensor], reason: str
) -> None:
    _, plan = regions_and_plan(Made(function, 48, 32), torch.randn(5, 32))
    site = plan.sites[-1]
    assert site.cause is Cause.UNSUPPORTED and reason in site.reason


@pytest.mark.parametrize("as_it_comes", [lambda w: {"w": w}, lambda w: SimpleNamespace(w=w)], ids=["dict", "object"])
def test_what_an_object_of_the_call_adds_to_a_parameter_makes_no_weight_of_it(
    as_it_comes: Callable[[Tensor], Any],
) -> None:
    """A tensor behind an attribute is the model's only if the model has the attribute."""

    class Similar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.held = nn.Parameter(torch.randn(48, 32)), torch.randn(48, 32)

        def forward(self, x: Tensor, batch: Any) -> Tensor:
            given = batch["w"] if isinstance(batch, dict) else batch.w
            return x @ (given + self.places).T + x @ (self.held + self.places).T

    _, plan = regions_and_plan(Similar(), torch.randn(8, 32), as_it_comes(torch.randn(48, 32)))
    select_linears(plan, Options())
    assert [site.status for site in plan.sites if site.matrix is not None] == ["fp8"]


def test_a_weight_unpacked_from_quantised_storage_is_kept() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            codes = torch.randint(0, 255, (48, 32), dtype=torch.uint8)
            self.codes = nn.Parameter(codes, requires_grad=False)
            self.scale = nn.Parameter(torch.rand(48, 1))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.codes.float() * self.scale)

    site = only_site(Packed(), torch.randn(5, 32))
    assert site.cause is Cause.UNSUPPORTED and "uint8" in site.reason


def test_a_router_that_casts_its_weight_keeps_its_precision() -> None:
    def route(linear: Linear, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
        scores = linear(x.type(torch.float32), w.type(torch.float32)).softmax(-1)
        return torch.topk(scores, 2).values

    _, plan = regions_and_plan(Made(route, 16, 32, dtype=torch.bfloat16), torch.randn(5, 32, dtype=torch.bfloat16))
    select_linears(plan, Options())
    (site,) = plan.sites
    assert site.cause is Cause.RULE and "router" in site.reason


def test_a_head_that_casts_a_tied_embedding_is_a_head() -> None:
    embedding = nn.Embedding(64, 32, dtype=torch.bfloat16)

    def run(ids: Tensor) -> Tensor:
        return F.linear(embedding(ids).float().tanh(), embedding.weight.float())

    _, plan = regions_and_plan(run, torch.randint(0, 64, (2, 5)))
    select_linears(plan, Options())
    assert [site.cause for site in plan.sites] == [Cause.RULE] and "embedding" in plan.sites[0].reason


@pytest.mark.parametrize("training", [True, False])
def test_a_recipe_without_state_takes_them_too(training: bool) -> None:
    model, x = Made(lambda linear, x, w, m: linear(x, w * m), 48, 32), torch.randn(5, 32)
    fast: Any = compiled(model, recipe="current", strict=True)
    with torch.set_grad_enabled(training):
        y = fast(x)
        model.linear = emulated_linear
        assert error_but_for_ties(y, model(x)) < 1e-4
