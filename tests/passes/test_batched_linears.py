"""Batches of experts: few become linears of their own, many stay one product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_compile.passes import batched_linears, manager
from te_compile.passes.plan import Cause
from tests.capturing import only_site, regions_and_plan
from tests.compiling import compiled, error_but_for_ties, relative_error, train_step
from tests.emulation import emulated_linear

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

EXPERTS = 3


class Experts(nn.Module):
    """``function(x, weight, bias)`` of a weight [E, K, N] or [E, N, K]."""

    def __init__(self, function: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight, self.bias = nn.Parameter(torch.randn(*shape)), nn.Parameter(torch.randn(shape[0], 1, 48))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


FORMS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "bmm": (lambda x, w, b: torch.bmm(x, w), False),
    "x.bmm": (lambda x, w, b: x.bmm(w), False),
    "matmul": (lambda x, w, b: x @ w, False),
    "bmm of the transpose": (lambda x, w, b: torch.bmm(x, w.transpose(1, 2)), True),
    "baddbmm": (lambda x, w, b: torch.baddbmm(b, x, w), False),
    "scaled baddbmm": (lambda x, w, b: torch.baddbmm(b, x, w, beta=0.5, alpha=2.0), False),
}


@pytest.mark.parametrize("around", ("in the open", "checkpointed"))
@pytest.mark.parametrize("form", FORMS)
def test_each_expert_is_a_linear(form: str, around: str) -> None:
    function, turned = FORMS[form]
    model = Experts(function, EXPERTS, *((48, 32) if turned else (32, 48)))
    x = torch.randn(EXPERTS, 7, 32, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return model(x) if around == "in the open" else checkpoint(model, x, use_reentrant=False)

    with manager.recording() as records:
        y, got = train_step(model, compiled(run, strict=True), x)
    sites = records[0].plan.sites
    assert [(site.status, site.tokens, site.features) for site in sites] == [("fp8", 7, (32, 48))] * EXPERTS
    dx, x.grad = x.grad, None
    matrices = model.weight if turned else model.weight.transpose(1, 2)
    parts = [emulated_linear(each, matrix) for each, matrix in zip(x, matrices, strict=True)]
    beta, alpha = {"baddbmm": (1.0, 1.0), "scaled baddbmm": (0.5, 2.0)}.get(form, (0.0, 1.0))
    expected = alpha * torch.stack(parts) + beta * model.bias
    expected_dx, expected_dw = torch.autograd.grad(expected.square().mean(), (x, model.weight), retain_graph=True)
    assert error_but_for_ties(y, expected) < 1e-4 and error_but_for_ties(dx, expected_dx) < 1e-3
    assert error_but_for_ties(got["weight"], expected_dw) < 1e-3
    if beta:
        (expected_db,) = torch.autograd.grad(expected.square().mean(), model.bias)
        assert error_but_for_ties(got["bias"], expected_db) < 1e-3


def test_a_gated_mixture_of_experts_trains() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up, self.down = (
                nn.Parameter(torch.randn(*shape) / 6) for shape in ((EXPERTS, 32, 64), (EXPERTS, 32, 32))
            )

        def forward(self, x: Tensor) -> Tensor:
            gate, up = torch.bmm(x, self.gate_up).chunk(2, dim=-1)
            return torch.bmm(nn.functional.silu(gate) * up, self.down)

    model, x = Gated(), torch.randn(EXPERTS, 5, 32)
    fast = compiled(model, strict=True)
    expected_y, expected = train_step(model, model, x)
    for _ in range(2):
        y, got = train_step(model, fast, x)
        assert relative_error(y, expected_y) < 0.1
        assert all(relative_error(got[name], expected[name]) < 0.2 for name in expected)


def test_one_site_stands_for_all_experts_until_it_is_written_out() -> None:
    site = only_site(Experts(FORMS["bmm"][0], EXPERTS, 32, 48), torch.randn(EXPERTS, 7, 32))
    assert (site.form, site.linears, site.tokens) == ("bmm", EXPERTS, 7)
    assert site.flops == 2 * EXPERTS * 7 * 32 * 48


def test_many_experts_stay_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_linears, "MOST_EXPERTS", EXPERTS - 1)
    site = only_site(Experts(FORMS["bmm"][0], EXPERTS, 32, 48), torch.randn(EXPERTS, 7, 32))
    assert site.cause is Cause.UNSUPPORTED and f"{EXPERTS} experts" in site.reason


def test_experts_that_stay_in_high_precision_stay_one_product() -> None:
    model, x = Experts(FORMS["bmm"][0], EXPERTS, 32, 48), torch.randn(EXPERTS, 7, 32)
    with manager.recording() as records:
        assert torch.equal(compiled(model, exclude=["*"])(x), model(x))
    assert [site.form for site in records[0].plan.sites] == ["bmm"]


@pytest.mark.parametrize(
    "function",
    (
        lambda x, w, b: torch.baddbmm(b, x, w, beta=0),
        lambda x, w, b: torch.matmul(x[0], w),
        lambda x, w, b: torch.matmul(x.unsqueeze(1), w),
    ),
    ids=("addend not read", "one matrix for all", "each x for all matrices"),
)
def test_other_batches_are_reported_and_left(function: Callable[..., Tensor]) -> None:
    site = only_site(Experts(function, EXPERTS, 32, 48), torch.randn(EXPERTS, 7, 32))
    assert site.cause is Cause.UNSUPPORTED


def test_a_batched_product_of_two_activations_is_no_linear() -> None:
    _, plan = regions_and_plan(lambda x: torch.bmm(x, x.mT), torch.randn(2, 5, 32))
    assert not plan.sites
