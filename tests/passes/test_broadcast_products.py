"""Batches of weights that other batches stand beside, or that stand on the left: a linear for each matrix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from te_compile.passes import manager
from tests.capturing import only_site
from tests.compiling import compiled, error_but_for_ties, train_step
from tests.emulation import emulated_linear

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HEADS, BATCH, POSITIONS = 3, 2, 7


class Heads(nn.Module):
    """``function(weight, x)`` of a weight [H, K, N] or, on the left, [H, N, K]."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], on_the_left: bool) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(HEADS, *((48, 32) if on_the_left else (32, 48))) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weight, x)


# Whether the weight is on the left, where the heads are in x, and the product.
FORMS: dict[str, tuple[bool, int, Callable[[Tensor, Tensor], Tensor]]] = {
    "w[:, None] @ x": (True, 0, lambda w, x: w[:, None] @ x),
    "w @ x": (True, 1, lambda w, x: w @ x),
    "matmul(w.unsqueeze(0), x)": (True, 1, lambda w, x: torch.matmul(w.unsqueeze(0), x)),
    "bmm(w, x)": (True, 0, lambda w, x: torch.bmm(w, x.movedim(1, 2).flatten(2))),
    "x @ w": (False, 1, lambda w, x: x @ w),
    "x.matmul(w[:, None])": (False, 0, lambda w, x: x.matmul(w[:, None])),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_matrix_is_a_linear(form: str) -> None:
    on_the_left, place, function = FORMS[form]
    model = Heads(function, on_the_left)
    shape = [BATCH, *((32, POSITIONS) if on_the_left else (POSITIONS, 32))]
    shape.insert(place, HEADS)
    x = torch.randn(*shape, requires_grad=True)
    eager = model(x)
    with manager.recording() as records:
        y, got = train_step(model, compiled(model, strict=True), x)
    sites = records[0].plan.sites
    assert [(s.status, s.tokens, s.features) for s in sites] == [("fp8", BATCH * POSITIONS, (32, 48))] * HEADS
    assert y.shape == eager.shape and y.stride() == eager.stride()
    dx, x.grad = x.grad, None
    pairs = zip(x.unbind(place), model.weight, strict=True)
    parts = [emulated_linear(e.mT, m).mT if on_the_left else emulated_linear(e, m.t()) for e, m in pairs]
    expected = torch.stack(parts, place)
    expected = expected.movedim(1, 2).flatten(2) if "bmm" in form else expected
    expected_dx, expected_dw = torch.autograd.grad(expected.square().mean(), (x, model.weight))
    assert error_but_for_ties(y, expected) < 1e-4 and error_but_for_ties(dx, expected_dx) < 1e-3
    assert error_but_for_ties(got["weight"], expected_dw) < 1e-3


def test_what_stays_in_high_precision_stays_as_it_was() -> None:
    model, x = Heads(FORMS["w[:, None] @ x"][2], True), torch.randn(HEADS, BATCH, 32, POSITIONS)
    assert torch.equal(compiled(model, exclude=["*"])(x), model(x))


def test_the_form_is_the_models_and_all_matrices_count() -> None:
    site = only_site(Heads(lambda w, x: x @ w, False), torch.randn(BATCH, HEADS, POSITIONS, 32))
    assert (site.form, site.linears, site.tokens, site.features) == ("matmul", HEADS, BATCH * POSITIONS, (32, 48))


@pytest.mark.parametrize(
    "function",
    (lambda w, x: w[:, None, None] @ x, lambda w, x: w.view(3, 1, 2, 24, 32) @ x[:, :, None]),
    ids=("each matrix meets all of x", "two dimensions of matrices"),
)
def test_other_batches_stay_and_say_so(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    site = only_site(Heads(function, True), torch.randn(HEADS, BATCH, 32, POSITIONS))
    assert site.status == "kept" and "no product that has an FP8 form" in site.reason
