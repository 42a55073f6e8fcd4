"""Finding linears: each form by its sizes and operands, and no product with a parameter goes unreported."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import te_compile
from te_compile.passes.plan import Cause
from tests.capturing import only_site, regions_and_plan
from tests.compiling import compiled, cosine, relative_error, train_step
from tests.passes.test_regions import Own

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class With(nn.Module):
    """A module that applies ``function(x, weight, bias)``."""

    def __init__(self, function: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(*shape))
        self.bias = nn.Parameter(torch.randn(shape[0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


def test_a_linear_knows_its_sizes_operands_and_name() -> None:
    tokens, batch = random.randrange(2, 9), random.randrange(2, 5)
    model = nn.Sequential()
    model.add_module("proj", nn.Linear(32, 48))
    site = only_site(model, torch.randn(batch, tokens, 32))
    assert (site.form, site.name, site.transposed) == ("linear", "proj", False)
    assert (site.tokens, site.features) == (batch * tokens, (32, 48))
    assert site.flops == 2 * batch * tokens * 32 * 48
    assert site.root_weight is site.weight and site.bias is not None
    assert site.status == "fp8"


def test_arguments_by_keyword_are_the_same_linear() -> None:
    site = only_site(With(lambda x, w, b: F.linear(input=x, weight=w, bias=b), 48, 32), torch.randn(5, 32))
    assert (site.form, site.features, site.status) == ("linear", (32, 48), "fp8")
    assert site.bias is not None and site.x is not None


def test_a_linear_without_bias() -> None:
    site = only_site(With(lambda x, w, b: F.linear(x, w), 48, 32), torch.randn(5, 32))
    assert site.bias is None and site.status == "fp8"


def test_addmm_with_the_weight_on_the_right_is_a_conv1d() -> None:
    bias = nn.Parameter(torch.randn(48))
    site = only_site(With(lambda x, w, b: torch.addmm(bias, x, w), 32, 48), torch.randn(5, 32))
    assert (site.form, site.features, site.transposed, site.status) == ("conv1d", (32, 48), True, "fp8")


@pytest.mark.parametrize("factors", [{"beta": 0.5}, {"alpha": 2.0}])
def test_addmm_with_factors_is_written_out(factors: dict[str, float]) -> None:
    bias = nn.Parameter(torch.randn(48))
    site = only_site(With(lambda x, w, b: torch.addmm(bias, x, w, **factors), 32, 48), torch.randn(5, 32))
    assert (site.form, site.features, site.status) == ("conv1d", (32, 48), "fp8") and site.spell is not None


TURNED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x @ w.T": lambda x, w: x @ w.T,
    "x @ w.mT": lambda x, w: x @ w.mT,
    "matmul(x, w.t())": lambda x, w: torch.matmul(x, w.t()),
    "matmul(x, other=w.t())": lambda x, w: torch.matmul(x, other=w.t()),
    "x.matmul(w.transpose(0, 1))": lambda x, w: x.matmul(w.transpose(0, 1)),
    "x.matmul(transpose(w, -1, -2))": lambda x, w: x.matmul(torch.transpose(w, -1, -2)),
    "x @ w.transpose(dim0=0, dim1=1)": lambda x, w: x @ w.transpose(dim0=0, dim1=1),
    "x @ w.permute(1, 0)": lambda x, w: x @ w.permute(1, 0),
    "x @ permute(w, (-1, 0))": lambda x, w: x @ torch.permute(w, (-1, 0)),
    "x @ w.swapaxes(0, 1)": lambda x, w: x @ w.swapaxes(0, 1),
    "linalg.matmul(x, t(w))": lambda x, w: torch.linalg.matmul(x, torch.t(w)),
}
"""A product with the transpose of a weight stored [N, K], as models write it."""

STRAIGHT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x @ w": lambda x, w: x @ w,
    "matmul(x, w)": torch.matmul,
    "x.matmul(w)": lambda x, w: x.matmul(w),
    "linear(x, w.T)": lambda x, w: F.linear(x, w.T),
}
"""A product with a weight stored [K, N]."""

MATRICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm(x, w.t())": lambda x, w: torch.mm(x, w.t()),
    "mm(x, mat2=w.T)": lambda x, w: torch.mm(x, mat2=w.T),
    "x.mm(w.T)": lambda x, w: x.mm(w.T),
}
"""What takes matrices alone."""


def _sizes(leading: int) -> list[int]:
    return [random.randrange(2, 6) for _ in range(leading)]


@pytest.mark.parametrize("leading", (0, 1, 2, 3))
@pytest.mark.parametrize("form", TURNED)
def test_a_product_with_a_transposed_weight_is_a_linear(form: str, leading: int) -> None:
    sizes = _sizes(leading)
    site = only_site(With(lambda x, w, b: TURNED[form](x, w), 48, 32), torch.randn(*sizes, 32))
    assert (site.form, site.status, site.transposed) == ("matmul", "fp8", False)
    assert (site.tokens, site.features) == (math.prod(sizes), (32, 48))
    assert site.weight is site.root_weight and site.weight.op == "placeholder"


@pytest.mark.parametrize("form", MATRICES)
def test_a_product_of_matrices_with_a_transposed_weight_is_a_linear(form: str) -> None:
    site = only_site(With(lambda x, w, b: MATRICES[form](x, w), 48, 32), torch.randn(5, 32))
    assert (site.form, site.status, site.transposed, site.features) == ("matmul", "fp8", False, (32, 48))


@pytest.mark.parametrize("leading", (0, 1, 2))
@pytest.mark.parametrize("form", STRAIGHT)
def test_a_product_with_a_weight_stored_by_its_inputs_is_a_linear(form: str, leading: int) -> None:
    sizes = _sizes(leading)
    site = only_site(With(lambda x, w, b: STRAIGHT[form](x, w), 32, 48), torch.randn(*sizes, 32))
    assert (site.status, site.transposed, site.features) == ("fp8", True, (32, 48))
    assert site.weight is site.root_weight and site.tokens == math.prod(sizes)


@pytest.mark.parametrize(
    "function",
    (
        lambda b, x, w: torch.addmm(b, x, w.t()),
        lambda b, x, w: b.addmm(x, w.T),
        lambda b, x, w: torch.addmm(b, mat1=x, mat2=w.transpose(1, 0)),
    ),
)
def test_addmm_with_a_transposed_weight_is_a_linear_with_bias(function: Callable[..., Tensor]) -> None:
    site = only_site(With(lambda x, w, b: function(b, x, w), 48, 32), torch.randn(5, 32))
    assert (site.form, site.transposed, site.features, site.status) == ("addmm", False, (32, 48), "fp8")
    assert site.bias is not None and site.bias.op == "placeholder"


@pytest.mark.parametrize(
    ("form", "function"),
    (
        ("matmul", lambda x, w, b: w @ x[0]),
        ("inner", lambda x, w, b: torch.inner(x, w[0])),
        ("tensordot", lambda x, w, b: torch.tensordot(x, w[:5], 2)),
        ("addmm_", lambda x, w, b: torch.zeros(5, 48).addmm_(x, w.T)),
        ("addbmm", lambda x, w, b: torch.addbmm(b, x[None], w.T[None])),
        ("mv", lambda x, w, b: torch.mv(w, x[0])),
        ("mv", lambda x, w, b: w.mv(x[0])),
        ("addmv", lambda x, w, b: torch.addmv(b, w, x[0])),
        ("addmv_", lambda x, w, b: torch.zeros(48).addmv_(w, x[0])),
        ("multi_dot", lambda x, w, b: torch.linalg.multi_dot([x, w.T, w])),
        ("matmul", lambda x, w, b: torch.matmul(x, w.view(4, 12, 32).transpose(1, 2))),
        ("einsum", lambda x, w, b: torch.einsum("mk,nk->m", x, w)),
        ("addmm", lambda x, w, b: torch.addmm(x @ w.detach().T, x, w.T, beta=0)),
    ),
)
def test_other_products_with_a_parameter_are_kept_with_their_form(form: str, function: Callable[..., Tensor]) -> None:
    _, plan = regions_and_plan(With(function, 48, 32), torch.randn(5, 32))
    site = plan.sites[-1]
    assert site.form == form and site.cause is Cause.UNSUPPORTED and form in site.reason


def test_a_square_weight_read_both_ways_tells_them_apart() -> None:
    _, plan = regions_and_plan(With(lambda x, w, b: (x @ w) @ w.T @ w.T.t(), 32, 32), torch.randn(5, 32))
    assert [(site.status, site.transposed) for site in plan.sites] == [("fp8", True), ("fp8", False), ("fp8", True)]
    assert len({site.weight for site in plan.sites}) == 1


@pytest.mark.parametrize("form", TURNED)
def test_a_transposed_weight_is_found_inside_and_in_front_of_a_checkpointed_body(form: str) -> None:
    model = With(lambda x, w, b: TURNED[form](x, w).relu(), 16, 16)
    regions, plan = regions_and_plan(lambda x: checkpoint(model, x, use_reentrant=False), torch.randn(5, 16))
    (site,) = plan.sites
    assert site.region is regions[1] and (site.status, site.transposed) == ("fp8", False)
    assert site.root_weight in plan.parameters
    # Up to PyTorch 2.13 Dynamo takes the attributes T and mT in front of the body.
    in_front = torch.__version__ < "2.14" and ("w.T" in form or "w.mT" in form)
    assert site.weight.graph is regions[not in_front].graph


def _same_data(model: With, function: Callable[[Tensor, Tensor], Tensor], turn: bool) -> With:
    """``model`` written as ``function``, its weight stored the other way where ``turn``."""
    other = With(lambda x, w, b: function(x, w) + b, *model.weight.shape)
    other.weight = nn.Parameter((model.weight.T if turn else model.weight).detach().clone().contiguous())
    other.bias = nn.Parameter(model.bias.detach().clone())
    return other


@pytest.mark.parametrize("form", ("x @ w.T", "matmul(x, w.t())", "x @ w.permute(1, 0)", "mm(x, w.t())", "x @ w"))
def test_a_product_computes_what_the_linear_does_bit_for_bit(form: str) -> None:
    linear = With(lambda x, w, b: F.linear(x, w) + b, 48, 32)
    function = {**TURNED, **STRAIGHT, **MATRICES}[form]
    product = _same_data(linear, function, turn=form in STRAIGHT)
    runs = [(model, compiled(model)) for model in (linear, product)]
    sizes = [16] if form in MATRICES else [4, 8]
    for _ in range(2):  # the second step runs with the scales that the first one left
        x = torch.randn(*sizes, 32)
        (y, grads), (other_y, other_grads) = (train_step(model, run, x) for model, run in runs)
        expected = other_grads["weight"].T if form in STRAIGHT else other_grads["weight"]
        assert torch.equal(y, other_y) and torch.equal(grads["weight"], expected)
        assert torch.equal(grads["bias"], other_grads["bias"])
        exact_y, exact = train_step(linear, linear, x)
        assert cosine(y, exact_y) > 0.99 and cosine(grads["weight"], exact["weight"]) > 0.95


def test_products_in_a_row_train_like_high_precision_inside_a_checkpoint() -> None:
    first, second = With(lambda x, w, b: (x @ w.T + b).relu(), 48, 32), With(lambda x, w, b: x.matmul(w.t()), 32, 48)
    third = With(lambda x, w, b: x @ w, 32, 64)
    model = nn.Sequential(first, second, third)

    def run(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False)

    x = torch.randn(3, 5, 32, requires_grad=True)
    y, grads = train_step(model, compiled(run, strict=True), x)
    dx, x.grad = x.grad, None
    exact_y, exact = train_step(model, model, x)
    assert cosine(y, exact_y) > 0.99 and cosine(dx, x.grad) > 0.97
    assert all(cosine(grads[name], exact[name]) > 0.97 for name in exact)


def test_a_product_of_two_activations_is_no_linear() -> None:
    _, plan = regions_and_plan(lambda x: x @ x.T, torch.randn(5, 32))
    assert not plan.sites


@pytest.mark.parametrize("kdim", [None, 48])
def test_an_attention_with_keys_of_its_own_is_reported_by_its_projections(kdim: int | None) -> None:
    """And not by the one row of keys, which would be too narrow."""
    model = nn.MultiheadAttention(32, 2, add_bias_kv=True, kdim=kdim)
    keys = torch.randn(5, 3, kdim or 32)
    site = only_site(lambda q, k, v: model(q, k, v)[0], torch.randn(5, 3, 32), keys, torch.randn(5, 3, 32))
    assert min(site.features) >= 32


def test_an_opaque_attention_is_reported() -> None:
    model = nn.MultiheadAttention(32, 2, batch_first=True)
    _, plan = regions_and_plan(lambda x: model(x, x, x)[0], torch.randn(2, 5, 32))
    assert {site.form for site in plan.sites} == {"multi_head_attention"}


def test_a_weight_that_is_no_parameter_has_no_state_and_is_kept() -> None:
    weight = torch.randn(48, 32)
    site = only_site(lambda x: F.linear(x, weight), torch.randn(5, 32))
    assert site.status == "kept" and "not a parameter" in site.reason


def test_linears_inside_checkpointed_bodies_are_found_with_their_weight_at_the_root() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    regions, plan = regions_and_plan(lambda x: checkpoint(model, x, use_reentrant=False), torch.randn(5, 16))
    (site,) = plan.sites
    assert site.region is regions[1] and site.status == "fp8"
    assert site.root_weight.graph is regions[0].graph and site.weight.graph is regions[1].graph


def test_linears_in_bodies_that_are_left_alone_are_reported_as_such() -> None:
    fc = nn.Linear(16, 16)

    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: fc(t), lambda t: t.sin(), (x,))

    with torch.no_grad():
        _, plan = regions_and_plan(branch, torch.randn(4, 16))
    (site,) = plan.sites
    assert site.status == "kept" and "cond" in site.reason
    assert site.root_weight is not None and plan.parameters[site.root_weight] is fc.weight


def test_products_of_every_form_in_bodies_that_are_not_entered_are_kept_with_the_operators_name() -> None:
    weight = nn.Parameter(torch.randn(32, 32))

    def outer(x: Tensor) -> Tensor:
        def branch(t: Tensor) -> Tensor:
            return torch.cond(t.sum() > 1, lambda t: t @ weight, lambda t: torch.einsum("ni,oi->no", t, weight), (t,))

        return torch.cond(x.sum() > 0, branch, lambda t: t * 2, (x,))

    with torch.no_grad():
        _, plan = regions_and_plan(outer, torch.randn(4, 32))
    assert sorted(site.form for site in plan.sites) == ["einsum", "matmul"]
    assert all(site.status == "kept" and "higher-order op cond" in site.reason for site in plan.sites)


def test_one_weight_used_twice_is_two_sites_of_one_root_weight() -> None:
    model = With(lambda x, w, b: F.linear(F.linear(x, w), w), 32, 32)
    _, plan = regions_and_plan(model, torch.randn(5, 32))
    first, second = plan.sites
    assert first.root_weight is second.root_weight and first.node is not second.node


class Inside(nn.Module):
    """A linear whose product is in a torch.autograd.Function, beside one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"own": nn.Linear(32, 32, bias=False)})
        self.plain = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(Own.apply(x, self.block["own"].weight))


@pytest.mark.parametrize("pattern", ["block.own", "block.*"])
def test_a_linear_in_a_function_of_the_users_is_one_and_goes_by_the_name_of_its_weight(pattern: str) -> None:
    model, x = Inside(), torch.randn(4, 32, requires_grad=True)
    report = te_compile.explain(model, x, options={"compiler": "aot_eager", "cost_model": False})
    rows = {row.name: row for row in report.rows}
    assert {name: row.status for name, row in rows.items()} == {"block.own": "kept", "plain": "fp8"}
    assert len(report.rows) == 2 and "autograd_function_apply" in rows["block.own"].reason
    torch._dynamo.reset()
    train_step(model, compiled(model, strict=True, exclude=[pattern]), x)


@pytest.mark.parametrize("training", [True, False])
def test_what_only_the_model_takes_part_in_is_kept_by_rule(training: bool) -> None:
    """Spectral norm multiplies each weight by vectors of its own."""
    model, x = nn.Sequential(spectral_norm(nn.Linear(64, 64)), nn.Linear(64, 64)).train(training), torch.randn(8, 64)
    report = te_compile.explain(model, x)
    inside = [row for row in report.rows if row.form == "mv"]
    assert inside and all(row.status == "kept" and "belongs to the model" in row.reason for row in inside)
    assert report.totals["kept_by_rule"] == len(inside)
    if not training:
        torch._dynamo.reset()
        y = model(x)
        assert relative_error(compiled(model, strict=True)(x), y) < 0.1


WITH_ITSELF: dict[str, Callable[[Tensor], Tensor]] = {
    "w @ w.T": lambda w: w @ w.T,
    "w.T @ w": lambda w: torch.mm(w.t(), w),
    "F.linear(w, w)": lambda w: F.linear(w, w),
    "addmm": lambda w: torch.addmm(torch.zeros(48), w, w.T),
    "einsum": lambda w: torch.einsum("ik,jk->ij", w, w),
    "a batch": lambda w: torch.bmm(w.view(3, 16, 48), w.view(3, 16, 48).mT),
}


@pytest.mark.parametrize("around", ("in the open", "checkpointed"))
@pytest.mark.parametrize("form", WITH_ITSELF)
def test_a_parameter_times_itself_keeps_its_precision(form: str, around: str) -> None:
    """As where a loss holds a weight orthogonal, which it is here but for the last bits."""

    def strayed(w: Tensor) -> Tensor:
        gram = WITH_ITSELF[form](w)
        return (gram - torch.eye(gram.shape[-1])).square().sum()

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        extra = strayed(w) if around == "in the open" else checkpoint(strayed, w, use_reentrant=False)
        return F.linear(x, w).square().mean() + extra * 1e6

    model, x = With(run, 48, 48), torch.randn(8, 48)
    nn.init.orthogonal_(model.weight)
    report = te_compile.explain(model, x)
    product, *others = [row for row in report.rows if "with itself" in row.reason]
    assert [row.status for row in report.rows].count("fp8") == 1 and not others
    assert report.totals["kept_by_rule"] == 1 and product.status == "kept"
    torch._dynamo.reset()
    assert relative_error(compiled(model, strict=True)(x), model(x)) < 0.1


def test_powers_of_what_a_parameter_is_written_into_keep_their_precision() -> None:
    """A rotation from the angles of a parameter, by a series."""

    def rotated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        made = torch.zeros(4, 16, 16)
        made[:, torch.arange(16), :] = w
        skew = made - made.mT
        square = torch.bmm(skew, skew)
        series = torch.eye(16) + skew + square / 2 + torch.bmm(square, skew) / 6
        return torch.einsum("tbk,bkn->tbn", x, series)

    _, plan = regions_and_plan(With(rotated, 4, 16, 16), torch.randn(5, 4, 16))
    assert [site.form for site in plan.sites] == ["bmm", "bmm"]
    assert all(site.cause is Cause.RULE and "with itself" in site.reason for site in plan.sites)


def test_what_a_weight_multiplies_of_another_parameter_or_of_the_call_is_in_fp8() -> None:
    latents = nn.Parameter(torch.randn(6, 32))

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(latents, w) + F.linear(latents + w[:6] + x, w) + F.linear(latents * w[:6], w)

    _, plan = regions_and_plan(With(run, 32, 32), torch.randn(6, 32))
    assert [site.status for site in plan.sites] == ["fp8"] * 3


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, partial(nn.RNNCell, nonlinearity="relu"), nn.RNNCell])
def test_cells_of_recurrent_networks_are_reported(cell: Callable[..., nn.Module]) -> None:
    module = cell(64, 48)
    (row,) = te_compile.explain(module, torch.randn(32, 64)).rows
    assert row.status == "kept" and row.form.endswith("_cell") and row.reason
    assert row.shape == (32, 64 + 48, module.weight_ih.shape[0])


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, partial(nn.RNN, nonlinearity="relu"), nn.RNN])
def test_recurrent_layers_that_dynamo_captures_are_reported(layer: Callable[..., nn.Module]) -> None:
    module = layer(32, 16, num_layers=2, bidirectional=True, batch_first=True)
    with torch._dynamo.config.patch(allow_rnn=True):
        (row,) = te_compile.explain(module, torch.randn(4, 8, 32)).rows
    assert row.status == "kept" and row.form == module.mode.lower() and row.reason
    features = sum(weight.shape[1] for weight in module.parameters() if weight.dim() == 2)
    assert row.shape == (4 * 8, features, module.weight_ih_l0.shape[0])


def test_a_bilinear_is_reported_by_its_features() -> None:
    x = torch.randn(20, 32)
    site = only_site(nn.Bilinear(32, 16, 48), x, x[:, :16])
    assert (site.form, site.rows, site.features) == ("bilinear", 20, (32 * 16, 48))


@pytest.mark.parametrize("product", [torch.matmul, torch.bmm, lambda q, x: q @ x])
@pytest.mark.parametrize("copied", [lambda q, n: q.expand(n, -1, -1), lambda q, n: q.repeat(n, 1, 1)])
def test_what_is_learned_on_the_left_has_tokens_behind_its_features(
    product: Callable[[Tensor, Tensor], Tensor], copied: Callable[[Tensor, int], Tensor]
) -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(1, 20, 64))

        def forward(self, x: Tensor) -> Tensor:
            return product(copied(self.queries, x.shape[0]), x.mT)

    site = only_site(Asks(), torch.randn(2, 16, 64))
    assert (site.tokens, site.features) == (2 * 16, (64, 20)) and site.flops == 2 * 2 * 16 * 64 * 20
