"""Einsums with an expert's letter: those that are batches of linears run as such, all others stay as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.passes import manager
from te_compile.passes.plan import Cause
from tests.capturing import only_site
from tests.compiling import compiled, error_but_for_ties, train_step
from tests.emulation import emulated_linear
from tests.passes.test_linear_einsums import Einsum

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E, C, K, N = 3, 5, 32, 48
BATCHES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "ecd,edf->ecf": ((E, C, K), (E, K, N)),
    "ecd,efd->ecf": ((E, C, K), (E, N, K)),
    "becd,edf->becf": ((2, E, C, K), (E, K, N)),
    "bki,kij->bkj": ((C, E, K), (E, K, N)),
    "bki,jki->jbk": ((C, E, K), (N, E, K)),
    "bsed,edhk->bsehk": ((2, C, E, K), (E, K, 3, 16)),
    "bsehk,ehkd->bsed": ((2, C, E, 2, 16), (E, 2, 16, N)),
}
"""Equation → shapes of x and weight."""


def expected_of(equation: str, x: Tensor, weight: Tensor) -> Tensor:
    """By textbook FP8 for each expert."""
    terms, result = equation.split("->")
    first, second = terms.split(",")
    (expert,) = set(first) & set(second) & set(result)
    parts = []
    for index in range(E):
        one, other = (t.select(term.index(expert), index) for t, term in ((x, first), (weight, second)))
        a, b, c = (term.replace(expert, "") for term in (first, second, result))
        summed, new = [each for each in b if each in a], [each for each in b if each not in a]
        rows = [each for each in a if each not in b]
        xs = one.permute([a.index(each) for each in rows + summed]).flatten(len(rows))
        ws = other.permute([b.index(each) for each in new + summed]).flatten(len(new)).flatten(0, len(new) - 1)
        y = emulated_linear(xs, ws).unflatten(-1, [other.shape[b.index(each)] for each in new])
        parts.append(y.permute([(rows + new).index(each) for each in c]))
    return torch.stack(parts, result.index(expert))


@pytest.mark.parametrize("equation", BATCHES)
@pytest.mark.parametrize("first", [False, True])
def test_a_batch_of_linears_is_one_for_each_expert(equation: str, first: bool) -> None:
    x_shape, shape = BATCHES[equation]
    model, x = Einsum(equation, *shape), torch.randn(x_shape, requires_grad=True)
    if first:
        terms, result = equation.split("->")
        model = Einsum(f"{','.join(reversed(terms.split(',')))}->{result}", *shape, first=True)
    with manager.recording() as records:
        y, got = train_step(model, compiled(model, strict=True), x)
    assert [(site.form, site.status, site.features) for site in records[0].plan.sites] == [
        ("einsum", "fp8", (K, N))
    ] * E
    dx, x.grad = x.grad, None
    expected = expected_of(equation, x, model.weight)
    assert y.stride() == model(x).stride()
    dx_expected, dw_expected = torch.autograd.grad(expected.square().mean(), (x, model.weight))
    assert error_but_for_ties(y, expected) < 1e-4
    assert error_but_for_ties(dx, dx_expected) < 1e-3 and error_but_for_ties(got["weight"], dw_expected) < 1e-3


def test_any_number_of_tokens() -> None:
    model = Einsum("becd,edf->becf", E, K, N)
    run = compiled(model, dynamic=True, strict=True, recipe="current")
    for tokens in (4, 7, 9):
        x = torch.randn(2, E, tokens, K)
        assert error_but_for_ties(run(x), expected_of("becd,edf->becf", x, model.weight)) < 1e-4


@pytest.mark.parametrize(
    ("equation", "x_shape", "shape"),
    (
        ("ecd,edf->cf", (E, C, K), (E, K, N)),  # a sum over experts
        ("ecd,edf->ec", (E, C, K), (E, K, N)),  # a sum over new features
        ("ed,edf->ef", (E, K), (E, K, N)),  # one row an expert
        ("eed,edf->ef", (E, E, K), (E, K, N)),  # a diagonal
        ("ecd,edf->ecf", (E, C, K), (1, K, N)),  # a weight of one expert for all
    ),
)
def test_what_is_no_batch_of_linears_is_left_and_computed_as_it_is(
    equation: str, x_shape: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    model, x = Einsum(equation, *shape), torch.randn(x_shape)
    site = only_site(model, x)
    torch._dynamo.reset()
    if site.status == "kept":
        assert site.cause is Cause.UNSUPPORTED and "einsum" in site.reason
        assert torch.allclose(compiled(model)(x), model(x), atol=1e-4)
    else:
        assert error_but_for_ties(compiled(model)(x), model(x)) < 0.1


def test_more_experts_than_are_written_out_are_kept() -> None:
    site = only_site(Einsum("ecd,edf->ecf", 65, 16, 16), torch.randn(65, 4, 16))
    assert site.cause is Cause.UNSUPPORTED and "65 experts" in site.reason
