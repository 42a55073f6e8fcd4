"""addmm and F.linear with whatever is added: the product is a linear, and the sum stands beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_compile.passes import manager
from te_compile.passes.plan import Cause
from tests.capturing import only_site
from tests.compiling import compiled, error_but_for_ties, train_step
from tests.emulation import emulated_linear

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Added(nn.Module):
    """``function(added, x, weight)`` of a weight [48, 32] and an ``added`` of this shape."""

    def __init__(self, function: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight, self.added = nn.Parameter(torch.randn(48, 32) / 6), nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.added, x, self.weight)


Sum = Callable[[Tensor, Tensor], Tensor]
FORMS: dict[str, tuple[Callable[..., Tensor], Sum]] = {
    "addmm": (lambda a, x, w: torch.addmm(a, x, w.t()), lambda a, xw: a + xw),
    "a.addmm": (lambda a, x, w: a.addmm(x, w.t(), alpha=-1), lambda a, xw: a - xw),
    "by keyword": (
        lambda a, x, w: torch.addmm(input=a, mat1=x, mat2=w.t(), beta=0.5, alpha=2.0),
        lambda a, xw: 0.5 * a + 2.0 * xw,
    ),
    "linear": (lambda a, x, w: F.linear(x, w, a), lambda a, xw: a + xw),
}
"""A product and what it is expected to be, of what is added and the product."""


@pytest.mark.parametrize("shape", ((7, 48), (1, 48), (7, 1), (1,), (), (48,)), ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_product_is_a_linear_and_the_sum_is_exact(form: str, shape: tuple[int, ...]) -> None:
    function, sum_of = FORMS[form]
    model, x = Added(function, *shape), torch.randn(7, 32, requires_grad=True)
    eager = model(x)
    with manager.recording() as records:
        y, got = train_step(model, compiled(model, strict=True), x)
    (site,) = records[0].plan.sites
    assert (site.status, site.features, site.tokens) == ("fp8", (32, 48), 7)
    assert y.shape == eager.shape and y.stride() == eager.stride()
    dx, x.grad = x.grad, None
    expected = sum_of(model.added, emulated_linear(x, model.weight))
    wanted = torch.autograd.grad(expected.square().mean(), (x, model.weight, model.added))
    assert error_but_for_ties(y, expected) < 1e-4
    for found, each in zip((dx, got["weight"], got["added"]), wanted, strict=True):
        assert found.shape == each.shape and error_but_for_ties(found, each) < 1e-3


def test_a_residual_stream_may_be_what_is_added() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

    def run(x: Tensor) -> Tensor:
        for layer in model:
            x = torch.addmm(x + layer.bias, x.relu(), layer.weight.t(), alpha=0.5)
        return x

    x = torch.randn(7, 32, requires_grad=True)
    y, got = train_step(model, compiled(run, strict=True), x)
    dx, x.grad = x.grad, None
    expected = x
    for layer in model:
        expected = expected + layer.bias + 0.5 * emulated_linear(expected.relu(), layer.weight)
    wanted = torch.autograd.grad(expected.square().mean(), (x, *model.parameters()))
    assert error_but_for_ties(y, expected) < 1e-4
    for found, each in zip((dx, *got.values()), wanted, strict=True):
        assert error_but_for_ties(found, each) < 1e-3


@pytest.mark.parametrize("form", FORMS)
def test_under_autocast_the_result_has_its_dtype(form: str) -> None:
    model, x = Added(FORMS[form][0], 7, 48), torch.randn(7, 32)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    y, found = run(x), compiled(run)(x)
    assert found.dtype == y.dtype == torch.bfloat16
    assert (found - y).norm() < 0.1 * y.norm()


@pytest.mark.parametrize("form", FORMS)
def test_what_stays_in_high_precision_stays_as_it_was(form: str) -> None:
    model, x = Added(FORMS[form][0], 7, 48), torch.randn(7, 32)
    with manager.recording() as records:
        assert torch.equal(compiled(model, exclude=["*"])(x), model(x))
    assert [site.form for site in records[0].plan.sites] == ["linear" if form == "linear" else "addmm"]


def test_an_addend_that_is_not_read_stays_so() -> None:
    """Its gradient is zeros, and what it holds, a NaN for one, is nobody's business."""
    model = Added(lambda a, x, w: torch.addmm(a, x, w.t(), beta=0), 48)
    site = only_site(model, torch.randn(7, 32))
    assert site.cause is Cause.UNSUPPORTED and "addmm" in site.reason
    with torch.no_grad():
        model.added.fill_(torch.nan)
    x = torch.randn(7, 32)
    y, got = train_step(model, compiled(model), x)
    assert torch.equal(y, model(x)) and not got["added"].any()


def test_a_weight_on_the_left_is_reported() -> None:
    site = only_site(Added(lambda a, x, w: torch.addmm(a, w, x), 48, 7), torch.randn(32, 7))
    assert site.cause is Cause.UNSUPPORTED and "addmm" in site.reason


def test_a_weight_that_is_written_to_once_it_was_read_says_so() -> None:
    def written(a: Tensor, x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w, a)
        with torch.no_grad():
            w.mul_(2.0)
        return y

    site = only_site(Added(written, 1), torch.randn(7, 32))
    assert site.cause is Cause.UNSUPPORTED and "in place" in site.reason
