"""Einsums: those that are linears run as linears, all others stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import te_compile
from te_compile.passes import manager
from te_compile.passes.plan import Cause
from tests.capturing import only_site, regions_and_plan
from tests.compiling import compiled, error_but_for_ties, relative_error, train_step
from tests.emulation import emulated_linear

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Einsum(nn.Module):
    """``torch.einsum(equation, x, weight)``, or with the weight first."""

    def __init__(self, equation: str, *shape: int, first: bool = False) -> None:
        super().__init__()
        self.equation, self.first = equation, first
        self.weight = nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        operands = (self.weight, x) if self.first else (x, self.weight)
        return torch.einsum(self.equation, *operands)


LINEARS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "bsd,dn->bsn": ((2, 5, 32), (32, 48), lambda w: w.t()),
    "bsd,nd->bsn": ((2, 5, 32), (48, 32), lambda w: w),
    "bsd,dhk->bshk": ((2, 5, 32), (32, 3, 16), lambda w: w.flatten(1).t()),
    "bsd,hkd->bshk": ((2, 5, 32), (3, 16, 32), lambda w: w.flatten(0, 1)),
    "bsd,hdk->bshk": ((2, 5, 32), (3, 32, 16), lambda w: w.transpose(1, 2).flatten(0, 1)),
    "bshk,hkd->bsd": ((2, 5, 4, 8), (4, 8, 48), lambda w: w.flatten(0, 1).t()),
    "bshk,khd->bsd": ((2, 5, 4, 8), (8, 4, 48), lambda w: w.transpose(0, 1).flatten(0, 1).t()),
    "...d,dn->...n": ((2, 3, 5, 32), (32, 48), lambda w: w.t()),
    "i j, j k -> i k": ((5, 32), (32, 48), lambda w: w.t()),
}
"""Equation → shapes of x and weight, and the weight as F.linear would have it; rows and features in their order."""


@pytest.mark.parametrize("equation", LINEARS)
def test_an_einsum_that_is_a_linear_is_one(equation: str) -> None:
    x_shape, shape, matrix = LINEARS[equation]
    model, x = Einsum(equation, *shape), torch.randn(x_shape, requires_grad=True)
    site = only_site(model, x)
    assert (site.form, site.status, site.features) == ("einsum", "fp8", (32, 48))
    y, got = train_step(model, compiled(model, strict=True), x)
    dx, x.grad = x.grad, None
    assert torch.allclose(F.linear(_features_last(x), matrix(model.weight)).reshape(y.shape), model(x), atol=1e-4)
    expected = emulated_linear(_features_last(x), matrix(model.weight)).reshape(y.shape)
    (dx_expected, dw_expected) = torch.autograd.grad(expected.square().mean(), (x, model.weight))
    assert error_but_for_ties(y, expected) < 1e-4 and error_but_for_ties(dx, dx_expected) < 1e-3
    assert error_but_for_ties(got["weight"], dw_expected) < 1e-3


NAMES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str, tuple[int, ...], tuple[int, ...]]] = {
    "inner": (torch.inner, "bsd,nd->bsn", (2, 5, 32), (48, 32)),
    "x.inner": (lambda x, w: x.inner(w), "bsd,hkd->bshk", (2, 5, 32), (3, 16, 32)),
    "inner, the weight first": (lambda x, w: torch.inner(w, x), "bsd,nd->nbs", (2, 5, 32), (48, 32)),
    "dims=1": (lambda x, w: torch.tensordot(x, w, dims=1), "bsd,dn->bsn", (2, 5, 32), (32, 48)),
    "two by default": (torch.tensordot, "bshk,hkn->bsn", (2, 5, 4, 8), (4, 8, 48)),
    "lists": (lambda x, w: torch.tensordot(x, w, ([2], [1])), "bsd,nd->bsn", (2, 5, 32), (48, 32)),
    "in another order": (
        lambda x, w: torch.tensordot(x, w, dims=[[-1, 1], [0, 2]]), "bhsk,knh->bsn", (2, 4, 5, 8), (8, 48, 4),
    ),
    "tensordot, the weight first": (
        lambda x, w: torch.tensordot(w, x, ([1], [2])), "bsd,nd->nbs", (2, 5, 32), (48, 32),
    ),
}  # fmt: skip
"""By other names: the call, as which einsum, shapes of x and weight."""


@pytest.mark.parametrize("name", NAMES)
def test_tensordot_and_inner_are_einsums(name: str) -> None:
    call, equation, x_shape, shape = NAMES[name]
    model, x = Einsum(equation, *shape), torch.randn(x_shape, requires_grad=True)
    expected_y, expected = train_step(model, compiled(model, strict=True), x)
    expected_dx, x.grad = x.grad, None

    def run(x: Tensor) -> Tensor:
        return call(x, model.weight)

    assert torch.allclose(run(x), model(x), atol=1e-4)
    te_compile.reset_state(model)
    with manager.recording() as records:
        y, got = train_step(model, compiled(run, strict=True), x)
    (site,) = records[0].plan.sites
    assert (site.form in ("inner", "tensordot"), site.status, site.features) == (True, "fp8", (32, 48))
    assert y.shape == expected_y.shape and y.stride() == run(x).stride()
    for found, wanted in ((y, expected_y), (x.grad, expected_dx), (got["weight"], expected["weight"])):
        assert error_but_for_ties(found, wanted) < 1e-3


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: torch.tensordot(x, w, dims=0),
        lambda x, w: torch.tensordot(x, w[:5], dims=([0, 1], [0, 1])),
        lambda x, w: torch.inner(x[:, :1], w[:, :1]),
    ],
    ids=("outer", "no new feature", "one number a row"),
)
def test_tensordots_that_are_no_linears_stay(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    weight, x = nn.Parameter(torch.randn(48, 32)), torch.randn(5, 32)
    torch.testing.assert_close(compiled(lambda x: call(x, weight))(x), call(x, weight))


def _features_last(x: Tensor) -> Tensor:
    return x if x.shape[-1] == 32 else x.flatten(-2)


@pytest.mark.parametrize("equation", ("bsd,dn->bns", "bsd,dhk->bhsk", "bsd,dhk->khsb", "...d,dhk->h...k"))
def test_a_result_with_dimensions_in_another_order_has_the_values_and_the_layout_of_the_einsums(equation: str) -> None:
    model, x = Einsum(equation, 32, *((48,) if "n" in equation else (3, 16))), torch.randn(2, 5, 32)
    expected_y, expected = train_step(model, model, x)
    y, got = train_step(model, compiled(model, strict=True), x)
    assert y.shape == expected_y.shape and y.stride() == expected_y.stride()
    assert relative_error(y, expected_y) < 0.1 and relative_error(got["weight"], expected["weight"]) < 0.1


def test_a_single_row() -> None:
    model, x = Einsum("d,dn->n", 32, 48), torch.randn(32)
    assert only_site(model, x).tokens == 1
    assert relative_error(compiled(model, strict=True)(x), model(x)) < 0.1


def test_the_weight_may_come_first_and_the_operands_in_a_list() -> None:
    x = torch.randn(2, 5, 32)
    assert only_site(Einsum("dn,bsd->bsn", 32, 48, first=True), x).features == (32, 48)
    weight = nn.Parameter(torch.randn(32, 48))
    site = only_site(lambda x: torch.einsum("bsd,dn->bsn", [x, weight]), x)
    assert (site.status, site.features) == ("fp8", (32, 48))


def test_heads_of_an_attention_written_with_einsums_train_inside_a_checkpoint() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Parameter(torch.randn(32, 2, 16) / 6) for _ in range(3))
            self.out = nn.Parameter(torch.randn(2, 16, 32) / 6)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (torch.einsum("bsd,dhk->bhsk", x, each) for each in (self.q, self.k, self.v))
            return torch.einsum("bhsk,hkd->bsd", F.scaled_dot_product_attention(q, k, v), self.out)

    model, x = Attention(), torch.randn(2, 8, 32)
    with manager.recording() as records:
        y, got = train_step(model, compiled(lambda x: checkpoint(model, x, use_reentrant=False), strict=True), x)
    assert [site.status for site in records[0].plan.sites] == ["fp8"] * 4
    expected_y, expected = train_step(model, model, x)
    assert relative_error(y, expected_y) < 0.1
    assert all(relative_error(got[name], expected[name]) < 0.2 for name in expected)


@pytest.mark.parametrize(
    ("equation", "x_shape", "shape"),
    (
        ("bmnd,mndk->bmnk", (5, 2, 2, 32), (2, 2, 32, 48)),  # batches of two letters
        ("bsd,dn->bn", (2, 5, 32), (32, 48)),  # a sum over rows
        ("bsd,dn->bs", (2, 5, 32), (32, 48)),  # a sum over new features
        ("bsd,n->bsdn", (2, 5, 32), (48,)),  # an outer product
        ("bdd,dn->bn", (2, 32, 32), (32, 48)),  # a diagonal
        ("bsd,dn", (2, 5, 32), (32, 48)),  # a result whose order is not said
    ),
)
def test_an_einsum_that_is_no_linear_is_left_and_reported(
    equation: str, x_shape: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    _, plan = regions_and_plan(Einsum(equation, *shape), torch.randn(x_shape))
    assert all(site.cause is Cause.UNSUPPORTED and "einsum" in site.reason for site in plan.sites)
    assert len(plan.sites) == (len(shape) > 1)


def test_an_einsum_of_two_activations_is_no_linear() -> None:
    _, plan = regions_and_plan(lambda x: torch.einsum("bqd,bkd->bqk", x, x.sin()), torch.randn(2, 5, 32))
    assert not plan.sites


@pytest.mark.parametrize(
    ("equation", "shape"),
    [("bsd,dn->bsdn", (32, 16)), ("bsd,dn->nbds", (32, 16)), ("...d,dn->...dn", (32, 16)), ("bsd,bd->bsd", (2, 32))],
)
@pytest.mark.parametrize("first", [True, False])
def test_an_einsum_that_adds_nothing_up_is_no_product(equation: str, shape: tuple[int, ...], first: bool) -> None:
    """A state space model's decay, an outer product, is not reported, and strict has nothing to say of it."""
    if first:
        x, _, rest = equation.partition(",")
        weight, _, result = rest.partition("->")
        equation = f"{weight},{x}->{result}"
    model, x = Einsum(equation, *shape, first=first), torch.randn(2, 5, 32)
    assert regions_and_plan(model, x)[1].sites == []
    assert torch.equal(compiled(model, strict=True)(x), model(x))


def test_a_weight_may_come_from_an_einsum_that_adds_nothing_up() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.rows = nn.Parameter(torch.randn(32, 48)), nn.Parameter(torch.rand(32))

        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.einsum("kn,k->kn", self.weight, self.rows)

    model, x = Scaled(), torch.randn(5, 32)
    assert only_site(model, x).status == "fp8"
    assert relative_error(compiled(model, strict=True)(x), model(x)) < 0.1
