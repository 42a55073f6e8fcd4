"""What no model should do and some do: each is a clear error or a reported fallback, and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from te_compile import state
from te_compile.passes import manager
from te_compile.passes.plan import Cause, Site
from te_compile.state_files import state_dict
from tests.compiling import (
    compiled,
    cosine,
    error_but_for_ties,
    gradients,
    relative_error,
    te_nodes,
    train_step,
)
from tests.emulation import emulated, emulated_linear

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

L = 1024  # amax_history_len of the default recipe


class Linear(nn.Module):
    """One linear of any sizes and dtype."""

    def __init__(self, k: int = 32, n: int = 48, bias: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.fc = nn.Linear(k, n, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def the_site(model: nn.Module, *inputs: Any, **options: Any) -> tuple[Site, Any]:
    """What was decided about the only linear of ``model``, and what the compiled model returned."""
    with manager.recording() as records:
        result = compiled(model, **options)(*inputs)
    (site,) = [site for record in records for site in record.plan.sites]
    return site, result


# --- what FP8 cannot do: kept as it was, with the reason -----------------------------------------------------------


@pytest.mark.parametrize(("k", "n", "what"), [(12, 48, "in_features=12"), (32, 7, "out_features=7")])
def test_a_size_that_would_be_mostly_padding_stays_in_high_precision_and_says_which(k: int, n: int, what: str) -> None:
    model = Linear(k, n)
    x = torch.randn(5, k)
    site, y = the_site(model, x)
    assert site.status == "kept" and site.cause is Cause.RULE
    assert what in site.reason and "16" in site.reason
    torch.testing.assert_close(y, model(x))


def test_float64_stays_as_it_was() -> None:
    model = Linear(dtype=torch.float64)
    x = torch.randn(5, 32, dtype=torch.float64)
    site, y = the_site(model, x)
    assert site.status == "kept" and "float64" in site.reason
    assert torch.equal(y, model(x))


def test_integers_are_multiplied_as_integers() -> None:
    class Integers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randint(-9, 9, (32, 16)), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.t())

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randint(-9, 9, (16, 32)), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    for model in (Integers(), Plain()):
        x = torch.randint(-9, 9, (5, 32))
        site, y = the_site(model, x)
        assert site.status == "kept" and site.reason
        assert torch.equal(y, model(x))


def test_integer_activations_for_a_float_weight_fail_as_they_do_without_us() -> None:
    model = Linear()
    x = torch.randint(0, 9, (5, 32))
    with pytest.raises(RuntimeError) as plain:
        model(x)
    with pytest.raises(RuntimeError, match=r"dtype|Long|Float|long|float") as compiled_error:
        compiled(model)(x)
    assert plain.value is not compiled_error.value


def test_a_device_that_is_no_gpu_and_no_cpu_is_left_alone_with_the_reason() -> None:
    model = Linear().to("meta")
    site, y = the_site(model, torch.randn(5, 32, device="meta"))
    assert site.cause is Cause.UNSUPPORTED and "'meta'" in site.reason
    assert y.is_meta and y.shape == (5, 48)


@pytest.mark.parametrize("grad", [True, False])
def test_a_whole_block_is_called_for_its_shapes_on_a_device_without_arithmetic(grad: bool) -> None:
    model = nn.Sequential(nn.LayerNorm(32), Linear(), nn.GELU(), nn.RMSNorm(48)).to("meta")
    with torch.set_grad_enabled(grad):
        y = compiled(model)(torch.randn(5, 32, device="meta"))
    assert y.is_meta and y.shape == (5, 48) and y.requires_grad == grad


@pytest.mark.parametrize("what", ["weight", "input", "what the weight is made from"])
def test_a_tensor_that_holds_others_stays_in_high_precision_with_its_class(what: str) -> None:
    class Turned(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.fc.weight * 2.0, self.fc.bias)

    model = Linear() if what in ("weight", "input") else Turned()
    x = torch.randn(5, 32)
    if what == "input":
        x = TwoTensor(x, x.clone())
    else:
        model.fc.weight = nn.Parameter(TwoTensor(model.fc.weight.detach(), model.fc.weight.detach().clone()))
    site, y = the_site(model, x)
    assert site.cause is Cause.UNSUPPORTED and "a TwoTensor" in site.reason
    expected = model(x)
    torch.testing.assert_close(y.a, expected.a)


def test_rows_of_many_lengths_in_one_tensor_stay_in_high_precision_with_its_class() -> None:
    lengths = [random.randrange(1, 9) for _ in range(3)]
    x = torch.nested.nested_tensor([torch.randn(length, 32) for length in lengths], layout=torch.jagged)
    model = Linear()
    site, y = the_site(model, x)
    assert site.cause is Cause.UNSUPPORTED and "a NestedTensor" in site.reason
    assert site.tokens == sum(lengths)
    torch.testing.assert_close(y.values(), model(x).values())


def test_a_weight_that_is_computed_from_the_input_stays_in_high_precision_with_the_reason() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(48, 32))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight + x.mean())

    model = Computed()
    x = torch.randn(5, 32)
    site, y = the_site(model, x)
    assert site.cause is Cause.UNSUPPORTED and "computed" in site.reason
    torch.testing.assert_close(y, model(x))


# --- strict --------------------------------------------------------------------------------------------------------


def test_strict_refuses_what_would_run_in_high_precision_and_names_it() -> None:
    with pytest.raises(Exception, match=r"strict=True(.|\n)*fc(.|\n)*float64") as refusal:
        compiled(Linear(dtype=torch.float64), strict=True)(torch.randn(5, 32, dtype=torch.float64))
    assert "exclude" in str(refusal.value), "the message says what to do"


def test_strict_accepts_what_the_user_excluded_and_what_a_rule_keeps() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.even, self.lm_head = nn.Linear(32, 20), nn.Linear(32, 32), nn.Linear(32, 64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.odd(x), self.lm_head(self.even(x))

    with manager.recording() as records:
        compiled(Model(), strict=True, exclude=["odd"])(torch.randn(5, 32))
    causes = {site.name: site.cause for site in records[0].plan.sites}
    assert causes == {"odd": Cause.USER, "even": None, "lm_head": Cause.RULE}


# --- wrong options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "delaied"}, r"recipe='delaied'(.|\n)*'delayed'"),
        ({"recipe": {"name": "delayed", "margin": 0.5}}, r"margin=0\.5"),
        ({"recipe": {"name": "current", "margin": 1}}, r"'current' has no parameter 'margin'"),
        ({"strickt": True}, r"strickt(.|\n)*strict"),
        ({"lm_head": "yes"}, r"lm_head='yes'"),
        ({"compiler": "gcc"}, r"compiler='gcc'(.|\n)*'inductor'"),
    ],
)
def test_a_wrong_option_raises_with_its_name_its_value_and_what_is_allowed(
    options: dict[str, Any], message: str
) -> None:
    with manager.recording() as records, pytest.raises(Exception, match=message):
        compiled(Linear(), **options)(torch.randn(5, 32))
    assert not records, "nothing was compiled"


# --- shapes and layouts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_an_empty_batch_gives_an_empty_result_and_zero_gradients(recipe: str) -> None:
    model = Linear()
    fast = compiled(model, recipe=recipe)
    y = fast(torch.randn(0, 32))
    assert y.shape == (0, 48)
    y.sum().backward()
    assert not model.fc.weight.grad.any() and not model.fc.bias.grad.any()


def test_an_empty_batch_of_any_length_gives_an_empty_result() -> None:
    class Residual(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.fc(torch.relu(x))

    model = Residual(32, 32)
    fast = compiled(model, dynamic=True)
    for length in (4, 7):
        x = torch.randn(0, length, 32, requires_grad=True)
        y = fast(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == (0, length, 32)


def test_an_empty_batch_teaches_the_state_nothing() -> None:
    model = Linear()
    fast = compiled(model)
    train_step(model, fast, torch.randn(4, 32))
    before = state_dict(model)
    fast(torch.randn(0, 32)).sum().backward()
    after = state_dict(model)
    held = state.existing_state(model.fc.weight, L)
    assert torch.equal(before["fc.weight.backward"], after["fc.weight.backward"])
    assert torch.equal(before["fc.weight.forward"][0], after["fc.weight.forward"][0])
    assert not held.skipped.any() and (held.scale > 0).all()


def test_one_vector_without_a_batch() -> None:
    model = Linear()
    x = torch.randn(32)
    y, _ = train_step(model, compiled(model), x)
    assert y.shape == (48,)
    assert error_but_for_ties(y, emulated(model, lambda name, module: True)(x)) < 1e-4


@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided"])
def test_an_input_of_any_layout(layout: str) -> None:
    rows = random.randrange(3, 20)
    x = {
        "transposed": lambda: torch.randn(32, rows).t(),
        "expanded": lambda: torch.randn(1, 1, 32).expand(3, rows, 32),
        "strided": lambda: torch.randn(rows, 64)[:, ::2],
    }[layout]()
    model = Linear()
    y, got = train_step(model, compiled(model), x)
    reference = emulated(model, lambda name, module: True)
    expected, expected_gradients = train_step(reference, reference, x)
    assert error_but_for_ties(y, expected) < 1e-4
    assert error_but_for_ties(got["fc.weight"], expected_gradients["fc.weight"]) < 1e-4


def test_a_parameter_that_is_not_contiguous() -> None:
    model = Linear()
    model.fc.weight = nn.Parameter(torch.randn(32, 48).t())
    x = torch.randn(6, 32)
    y, got = train_step(model, compiled(model), x)
    expected = emulated_linear(x, model.fc.weight, model.fc.bias)
    assert error_but_for_ties(y, expected) < 1e-4
    assert got["fc.weight"].shape == (48, 32)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_returned_matrix_that_backward_reads_may_not_be_changed_in_between(compiler: str) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.a(x)
            return self.b(F.gelu(hidden)), hidden

    y, hidden = compiled(Returns(), compiler=compiler)(torch.randn(8, 32))
    hidden.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_result_that_is_changed_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            y += 1.0
            y.mul_(2.0)
            return self.b(y)

    model = InPlace()
    x = torch.randn(6, 32)
    reference = emulated(model, lambda name, module: True)
    expected, expected_gradients = train_step(reference, reference, x)
    got, got_gradients = train_step(model, compiled(model), x)
    assert relative_error(got, expected) < 1e-2
    assert all(relative_error(got_gradients[name], g) < 5e-2 for name, g in expected_gradients.items())


RETURNED: dict[str, Callable[[nn.Module, nn.Module, Tensor], tuple[Tensor, ...]]] = {
    "a residual sum": lambda a, b, x: (x + a(x),),
    "two of them": lambda a, b, x: (x + a(x) + b(x),),
    "what a frozen linear reads": lambda a, b, x: (h := F.gelu(a(x)), b(h)),
}


@pytest.mark.parametrize("what", RETURNED)
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_was_returned_may_be_changed_in_place(what: str, compiler: str) -> None:
    a, b = nn.Linear(32, 32), nn.Linear(32, 32).requires_grad_(False)

    def step(run: Callable[..., Any]) -> list[Tensor]:
        a.zero_grad()
        results = run(a, b, x)
        results[0].mul_(2.0)
        sum(result.square().mean() for result in results).backward()
        return [*(result.detach() for result in results), a.weight.grad.clone()]

    x = torch.randn(2, 6, 32)
    expected = step(lambda a, b, x: tuple(result.clone() for result in RETURNED[what](a, b, x)))
    got = step(compiled(RETURNED[what], compiler=compiler))
    assert all(cosine(*each) > 0.99 for each in zip(got, expected, strict=True))


def test_a_region_without_gradients_inside_a_training_graph() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fixed, self.trained = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.fixed(x)
            return self.trained(x) - target

    model = Partly()
    _, got = train_step(model, compiled(model), torch.randn(6, 32))
    assert got.keys() == {"trained.weight", "trained.bias"}
    assert all(gradient.any() for gradient in got.values())


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_activation_is_counted_and_harms_no_scale(bad: float) -> None:
    model = Linear()
    fast = compiled(model)
    train_step(model, fast, torch.randn(4, 32))
    held = state.existing_state(model.fc.weight, L)
    before = held.scale.clone()
    x = torch.randn(4, 32)
    x[1, 7] = bad
    with torch.no_grad():
        hurt = model.fc.weight.clone()
    train_step(model, fast, x)
    assert torch.equal(hurt, model.fc.weight), "no optimiser ran, so the weight is what it was"
    assert torch.equal(held.scale[0], before[0]) and torch.equal(held.scale[1], before[1])
    assert held.skipped[0] == 1 and held.skipped[1] == 0
    assert state.skipped_counts(model)["fc.weight"]["x"] == 1
    assert held.history.isfinite().all()


def test_nan_spoils_its_own_row_and_no_other() -> None:
    model = Linear()
    x = torch.randn(4, 32)
    x[1, 7] = float("nan")
    fast = compiled(model)
    train_step(model, fast, torch.randn(4, 32))
    y = fast(x)
    assert y[1].isnan().all() and y[[0, 2, 3]].isfinite().all()


def test_a_first_step_on_bad_numbers_leaves_the_calibration_to_the_next_one() -> None:
    model = Linear(bias=False)
    fast = compiled(model)
    x = torch.randn(4, 32)
    train_step(model, fast, torch.full((4, 32), float("nan")))
    held = state.existing_state(model.fc.weight, L)
    assert held.scale.tolist()[0] == 0 and held.skipped.tolist() == [1, 0, 1]
    got, _ = train_step(model, fast, x)
    assert error_but_for_ties(got, emulated_linear(x, model.fc.weight)) < 1e-4
    assert (held.scale > 0).all()


def test_a_non_finite_gradient_is_counted_and_harms_no_scale() -> None:
    model = Linear()
    fast = compiled(model)
    train_step(model, fast, torch.randn(4, 32))
    held = state.existing_state(model.fc.weight, L)
    before = held.scale.clone()
    y = fast(torch.randn(4, 32))
    gradient = torch.randn_like(y)
    gradient[2, 3] = float("inf")
    y.backward(gradient)
    assert torch.equal(held.scale[2], before[2])
    assert held.skipped.tolist() == [0, 0, 1]
    assert state.skipped_counts(model)["fc.weight"] == {"x": 0, "w": 0, "gradient": 1}


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("overflow", [float("inf"), -float("inf")])
def test_a_loss_scaler_sees_the_overflow_and_training_goes_on(overflow: float, steps_before: int, recipe: str) -> None:
    """fp16 with a loss scale that overflows: the gradients say so, the step after is as if it had not been."""
    model = Linear(dtype=torch.float16)
    fast = compiled(model, recipe=recipe)
    x = torch.randn(4, 32, dtype=torch.float16, requires_grad=True)
    for _ in range(steps_before):
        train_step(model, fast, x)
    model.zero_grad()
    x.grad = None
    y = fast(x)
    gradient = torch.randn_like(y)
    gradient[2, 3] = overflow
    y.backward(gradient)
    assert model.fc.weight.grad.isfinite().all(1).logical_not().nonzero().tolist() == [[3]]
    assert x.grad.isfinite().all(1).logical_not().nonzero().tolist() == [[2]]
    model.zero_grad()
    x = x.detach()
    reference = emulated(model, lambda name, module: True)
    _, expected = train_step(reference, reference, x)
    _, got = train_step(model, fast, x)
    assert relative_error(got["fc.weight"], expected["fc.weight"]) < 1e-2


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_what_autocast_to_float16_cannot_hold_is_an_infinity(recipe: str) -> None:
    """Autocast rounds the fp32 input of a linear; a number that it would make infinite may not be clipped instead, nor
    may its amax be remembered."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    fast = compiled(model, recipe=recipe)

    def step(run: Any, x: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = run(x)
        y.float().square().mean().backward()
        return gradients(model)

    x = torch.randn(16, 32)
    step(fast, x)
    large = x.clone()
    large[3, 5] = 1e9
    found, expected = step(fast, large), step(model, large)
    for name, gradient in expected.items():
        assert not gradient.isfinite().all() and not found[name].isfinite().all(), name
    found, expected = step(fast, x), step(model, x)
    assert all(cosine(found[name], expected[name]) > 0.98 for name in expected)
    if recipe == "delayed":
        assert state.existing_state(model[0].weight, L).skipped[0] == 1


def test_linears_that_read_one_tensor_under_autocast_share_its_codes() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 48), nn.Linear(32, 48)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * self.b(x)

    with manager.recording() as records, torch.autocast("cpu", torch.float16), torch.no_grad():
        compiled(Pair())(torch.randn(8, 32))
    assert len(te_nodes(records[0], "quantize") + te_nodes(records[0], "fused_quantize")) == 1


def test_zeros_give_the_bias_and_leave_the_state_uncalibrated() -> None:
    model = Linear()
    fast = compiled(model)
    y, got = train_step(model, fast, torch.zeros(4, 32))
    torch.testing.assert_close(y, model.fc.bias.detach().expand(4, 48))
    assert not got["fc.weight"].any()
    held = state.existing_state(model.fc.weight, L)
    assert held.scale[0] == 0 and held.skipped[0] == 0


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_very_small_and_very_large_numbers_are_scaled_into_range(magnitude: float) -> None:
    model = Linear(bias=False)
    x = magnitude * torch.randn(4, 32)
    with torch.no_grad():
        y = compiled(model)(x)
    assert relative_error(y / magnitude, model(x / magnitude)) < 0.08


def test_data_that_outgrows_its_scale_saturates_and_is_in_range_again_a_step_later() -> None:
    model = Linear(bias=False)
    fast = compiled(model)
    x, larger = torch.randn(4, 32), 1000 * torch.randn(4, 32)
    train_step(model, fast, x)
    saturated, _ = train_step(model, fast, larger)
    assert saturated.isfinite().all() and relative_error(saturated, model(larger)) > 0.5
    recovered, _ = train_step(model, fast, larger)
    assert relative_error(recovered, model(larger)) < 0.08
