"""Products with the weight on the left: linears of tokens that lie behind their features."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_compile.passes import manager
from te_compile.passes.plan import Cause
from tests.capturing import only_site, regions_and_plan
from tests.compiling import compiled, error_but_for_ties, train_step
from tests.emulation import emulated_linear

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Left(nn.Module):
    """``function(weight, x, bias)`` of a weight [48, 32], or [32, 48]."""

    def __init__(self, function: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight, self.bias = nn.Parameter(torch.randn(*shape) / 6), nn.Parameter(torch.randn(48, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weight, x, self.bias)


FORMS: dict[str, Callable[..., Tensor]] = {
    "w @ x": lambda w, x, b: w @ x,
    "matmul(w, x)": lambda w, x, b: torch.matmul(w, x),
    "w.matmul(x) + b": lambda w, x, b: w.matmul(x) + b,
    "w.t() @ x": lambda w, x, b: w.t() @ x,
    "mm(w, x) in another shape": lambda w, x, b: torch.mm(w, x.movedim(-2, 0).flatten(1)).view(48, *x.shape[:-2], -1),
}


@pytest.mark.parametrize("leading", ((), (2,), (2, 3)))
@pytest.mark.parametrize("form", FORMS)
def test_a_weight_on_the_left_multiplies_as_a_linear(form: str, leading: tuple[int, ...]) -> None:
    turned = "t()" in form
    model = Left(FORMS[form], *((32, 48) if turned else (48, 32)))
    x = torch.randn(*leading, 32, 7, requires_grad=True)
    eager = model(x)
    with manager.recording() as records:
        y, got = train_step(model, compiled(model, strict=True), x)
    (site,) = records[0].plan.sites
    assert (site.status, site.features, site.tokens) == ("fp8", (32, 48), x.numel() // 32)
    assert y.shape == eager.shape and y.stride() == eager.stride()
    dx, x.grad = x.grad, None
    expected = emulated_linear(x.mT, model.weight.t() if turned else model.weight).mT
    expected = expected + model.bias if "+ b" in form else expected
    expected = expected.movedim(-2, 0) if "shape" in form else expected
    expected_dx, expected_dw = torch.autograd.grad(expected.square().mean(), (x, model.weight))
    assert error_but_for_ties(y, expected) < 1e-4 and error_but_for_ties(dx, expected_dx) < 1e-3
    assert error_but_for_ties(got["weight"], expected_dw) < 1e-3


def test_the_form_is_the_models_until_it_is_written_out() -> None:
    site = only_site(Left(FORMS["w @ x"], 48, 32), torch.randn(2, 32, 7))
    assert (site.form, site.tokens, site.features) == ("matmul", 14, (32, 48))


def test_what_stays_in_high_precision_stays_as_it_was() -> None:
    model, x = Left(FORMS["w @ x"], 48, 32), torch.randn(2, 32, 7)
    assert torch.equal(compiled(model, exclude=["*"])(x), model(x))


def test_a_weight_on_the_left_that_is_written_to_once_it_was_read_says_so() -> None:
    def written(w: Tensor, x: Tensor, b: Tensor) -> Tensor:
        y = w @ x
        with torch.no_grad():
            w.mul_(2.0)
        return y

    site = only_site(Left(written, 48, 32), torch.randn(32, 7))
    assert site.cause is Cause.UNSUPPORTED and "in place" in site.reason


def test_under_autocast_the_result_has_its_dtype() -> None:
    model, x = Left(FORMS["w @ x"], 48, 32), torch.randn(2, 32, 7)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    assert compiled(run, strict=True)(x).dtype == run(x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "function",
    (lambda w, x, b: x.mT @ x, lambda w, x, b: x.mT @ (x * 2.0)),
    ids=("itself", "two activations"),
)
def test_products_of_activations_are_none(function: Callable[..., Tensor]) -> None:
    _, plan = regions_and_plan(Left(function, 48, 32), torch.randn(2, 32, 7))
    assert not plan.sites


def test_a_product_of_two_weights_is_one_linear() -> None:
    """With the second as its weight, as before."""
    site = only_site(Left(lambda w, x, b: (w @ w.t()) * x.sum(), 48, 32), torch.randn(32, 7))
    assert site.form == "matmul" and site.features == (32, 48)


def test_a_state_space_block_runs_its_projections_in_fp8() -> None:
    """As Mamba writes its first one."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_proj, self.out_proj = nn.Linear(32, 96, bias=False), nn.Linear(48, 32)

        def forward(self, x: Tensor) -> Tensor:
            batch, length, size = x.shape
            xz = (self.in_proj.weight @ x.permute(2, 0, 1).reshape(size, -1)).view(96, batch, length).permute(1, 0, 2)
            x, z = xz.chunk(2, dim=1)
            return self.out_proj((F.silu(x) * F.silu(z)).mT)

    _, plan = regions_and_plan(Block(), torch.randn(2, 5, 32))
    assert [(site.name, site.status, site.features) for site in plan.sites] == [
        ("in_proj", "fp8", (32, 96)),
        ("out_proj", "fp8", (48, 32)),
    ]
