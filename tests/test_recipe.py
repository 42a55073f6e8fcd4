"""Recipes: the scale formula, the delayed update, and the ways to name a recipe."""

from __future__ import annotations

import itertools
import math
import os
import random
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch

from te_compile.recipe import (
    FP32_MAX,
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    RecipeError,
    ScaleRule,
    recipe_of,
    remember,
    resolve,
)

E4M3_MAX, E5M2_MAX = 448.0, 57344.0


def rounded(number: float) -> float:
    """``number`` as the nearest fp32, or infinity beyond it."""
    return struct.unpack("f", struct.pack("f", number))[0] if abs(number) <= FP32_MAX else math.inf


def any_amax() -> float:
    """A positive fp32 of any magnitude, subnormals included."""
    return struct.unpack("f", struct.pack("I", random.randrange(1, 0x7F800000)))[0]


# --- the formula ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8_max", [E4M3_MAX, E5M2_MAX])
@pytest.mark.parametrize("margin", [0, 2, -3])
def test_scale_is_the_correctly_rounded_quotient(margin: int, fp8_max: float) -> None:
    amaxes = [any_amax() for _ in range(500)]
    scales = ScaleRule(margin=margin).scale(torch.tensor(amaxes), fp8_max).tolist()
    for amax, scale in zip(amaxes, scales, strict=True):
        # A quotient of two fp32 numbers in fp64, rounded again, is the correctly rounded fp32 quotient.
        assert scale == min(rounded(fp8_max * 2.0**-margin / amax), FP32_MAX), amax


@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("power_2", [False, True])
def test_an_amax_that_tells_nothing_gives_scale_one(amax: float, power_2: bool) -> None:
    assert ScaleRule(power_2=power_2, margin=3).scale(torch.tensor(amax), E4M3_MAX).item() == 1.0


def test_a_scale_beyond_fp32_becomes_the_largest() -> None:
    smallest = torch.tensor(1e-45)
    assert ScaleRule().scale(smallest, E4M3_MAX).item() == FP32_MAX
    assert ScaleRule(power_2=True).scale(smallest, E4M3_MAX).item() == 2.0**127


def test_epsilon_is_a_floor_for_the_amax() -> None:
    floor = 2.0 ** random.randint(-20, 0)
    amax = torch.tensor([0.0, floor / 3, floor, floor * 5])
    expected = torch.tensor([floor, floor, floor, floor * 5])
    assert torch.equal(ScaleRule(epsilon=floor).scale(amax, E4M3_MAX), ScaleRule().scale(expected, E4M3_MAX))


def test_power_of_two_scales_drop_the_mantissa_of_any_scale() -> None:
    amax = torch.tensor([any_amax() for _ in range(500)])
    exact, power = ScaleRule().scale(amax, E5M2_MAX), ScaleRule(power_2=True).scale(amax, E5M2_MAX)
    mantissa, _ = torch.frexp(power.double())
    assert (mantissa == 0.5).all()
    assert ((power <= exact) & (power.double() * 2 > exact.double())).all()


@pytest.mark.parametrize("rule", [ScaleRule(margin=100), ScaleRule(margin=100, power_2=True)])
def test_no_scale_is_zero_because_zero_means_no_data_yet(rule: ScaleRule) -> None:
    assert (rule.scale(torch.tensor([FP32_MAX, 1e30]), E4M3_MAX) > 0).all()


def test_a_rule_survives_its_text() -> None:
    for _ in range(50):
        rule = ScaleRule(random.randint(-9, 9), random.random() * 10.0 ** random.randint(-30, 3), random.random() < 0.5)
        assert ScaleRule.parse(rule.text()) == rule


@pytest.mark.parametrize("text", ["", "margin=0", "margin=x epsilon=0.0 power_2=True", "margin=0 epsilon=0 power_2=1"])
def test_a_text_that_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="not a scale rule"):
        ScaleRule.parse(text)


def test_formats_have_the_types_and_ranges_of_each_direction() -> None:
    assert (Format.E4M3.forward, Format.E4M3.backward) == (torch.float8_e4m3fn, torch.float8_e4m3fn)
    assert (Format.HYBRID.forward, Format.HYBRID.backward) == (torch.float8_e4m3fn, torch.float8_e5m2)
    assert (Format.E4M3.forward_max, Format.E4M3.backward_max) == (E4M3_MAX, E4M3_MAX)
    assert (Format.HYBRID.forward_max, Format.HYBRID.backward_max) == (E4M3_MAX, E5M2_MAX)


# --- the delayed update --------------------------------------------------------------------------------------------


class PlainHistory:
    """One row of delayed scaling in Python floats, from the definition: a window of the last L good amaxes."""

    def __init__(self, recipe: DelayedScaling) -> None:
        self.recipe, self.window, self.scale, self.skipped = recipe, [0.0] * recipe.amax_history_len, 0.0, 0

    def step(self, amax: float, fp8_max: float) -> None:
        if not math.isfinite(amax):
            self.skipped += 1
        elif amax > 0:
            self.window = [amax, *self.window][: self.recipe.amax_history_len]
            chosen = max(self.window) if self.recipe.amax_compute_algo == "max" else amax
            self.scale = min(rounded(fp8_max * 2.0**-self.recipe.margin / chosen), FP32_MAX)


@pytest.mark.parametrize("length", [1, 16, 31, 1024])
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("fp8_max", [E4M3_MAX, E5M2_MAX])
def test_history_and_scale_are_exact_over_many_steps(length: int, margin: int, algorithm: str, fp8_max: float) -> None:
    recipe = DelayedScaling(margin=margin, amax_history_len=length, amax_compute_algo=algorithm)
    rows = [PlainHistory(recipe) for _ in range(4)]
    history, scale, skipped = torch.zeros(4, length), torch.zeros(4), torch.zeros(4)
    for _ in range(70):
        amaxes = [random.choice([any_amax(), random.random(), 0.0, math.inf, math.nan]) for _ in rows]
        amaxes = [rounded(amax) for amax in amaxes]
        history, scale, bad = recipe.updated(history, scale, torch.tensor(amaxes), fp8_max)
        skipped += bad
        for row, amax in zip(rows, amaxes, strict=True):
            row.step(amax, fp8_max)
        assert history.tolist() == [row.window for row in rows]
        assert scale.tolist() == [row.scale for row in rows]
    assert skipped.tolist() == [row.skipped for row in rows]


@pytest.mark.parametrize("margin", [0, 2])
def test_constant_fills_move_the_scale_in_the_step_they_arrive_and_leave_it_L_steps_later(margin: int) -> None:
    recipe = DelayedScaling(margin=margin, amax_history_len=3)
    history, scale = torch.zeros(1, 3), torch.zeros(1)
    small, large = random.uniform(0.5, 1), random.uniform(10, 20)
    scales = []
    for fill in [small, large, small, small, small]:
        history, scale, _ = recipe.updated(history, scale, torch.tensor([fill]), E4M3_MAX)
        scales.append(scale.item())
    expected = [torch.tensor(E4M3_MAX / 2**margin) / torch.tensor(fill) for fill in [small, large, large, large, small]]
    assert scales == [each.item() for each in expected]
    assert torch.equal(history, torch.tensor([[small] * 3]))


def test_the_first_amax_alone_gives_the_scale_that_the_calibrated_first_step_used() -> None:
    recipe = DelayedScaling(margin=1)
    amax = torch.rand(5) * 100
    _, scale, _ = recipe.updated(torch.zeros(5, 1024), torch.zeros(5), amax, E4M3_MAX)
    assert torch.equal(scale, recipe.rule().scale(amax, E4M3_MAX))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_non_finite_amax_changes_nothing_and_is_reported(bad: float) -> None:
    recipe = DelayedScaling(amax_history_len=4)
    history, scale = torch.rand(3, 4) + 0.1, torch.rand(3) + 0.1
    new_history, new_scale, skipped = recipe.updated(history, scale, torch.tensor([0.5, bad, bad]), E4M3_MAX)
    assert skipped.tolist() == [False, True, True]
    assert torch.equal(new_history[1:], history[1:]) and torch.equal(new_scale[1:], scale[1:])
    assert new_history[0, 0] == 0.5 and torch.equal(new_history[0, 1:], history[0, :-1])


def test_a_first_step_that_overflows_leaves_the_state_uncalibrated() -> None:
    _, scale, _ = DelayedScaling().updated(torch.zeros(1, 8), torch.zeros(1), torch.tensor([math.inf]), E4M3_MAX)
    assert scale.item() == 0.0


def test_an_amax_of_zero_changes_nothing() -> None:
    history, scale = torch.rand(2, 4), torch.rand(2)
    new_history, new_scale, skipped = DelayedScaling(amax_history_len=4).updated(history, scale, torch.zeros(2), 448.0)
    assert torch.equal(new_history, history) and torch.equal(new_scale, scale) and not skipped.any()


def test_an_amax_function_sees_the_history_newest_first_with_the_new_amax_in_front() -> None:
    seen = []

    def second_newest(history: torch.Tensor) -> torch.Tensor:
        seen.append(history.clone())
        return history[1]

    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=second_newest)
    history, amax = torch.rand(2, 3) + 0.1, torch.rand(2) + 0.1
    _, scale, _ = recipe.updated(history, torch.ones(2), amax, E4M3_MAX)
    assert torch.equal(seen[0], torch.stack([amax, history[:, 0], history[:, 1]]))
    assert torch.equal(scale, torch.tensor(E4M3_MAX) / history[:, 0])


def test_a_scale_function_gets_amax_scale_range_and_recipe() -> None:
    seen = []

    def halve(amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: DelayedScaling) -> torch.Tensor:
        seen.append((amax.clone(), scale.clone(), fp8_max, recipe))
        return fp8_max / amax / 2

    recipe = DelayedScaling(amax_history_len=2, scaling_factor_compute_algo=halve)
    amax = torch.tensor([2.0, 4.0])
    _, scale, _ = recipe.updated(torch.zeros(2, 2), torch.tensor([0.0, 3.0]), amax, E5M2_MAX)
    assert scale.tolist() == [E5M2_MAX / 4, E5M2_MAX / 8]
    assert torch.equal(seen[0][0], amax) and seen[0][2:] == (E5M2_MAX, recipe)
    assert seen[0][1].tolist() == [1.0, 3.0], "a state without a scale shows the function 1, as Transformer Engine does"


@pytest.mark.parametrize(("proposed", "expected"), [(math.nan, 7.0), (0.0, 7.0), (-2.0, 7.0), (math.inf, FP32_MAX)])
def test_a_scale_function_cannot_poison_the_state(proposed: float, expected: float) -> None:
    recipe = DelayedScaling(
        amax_history_len=2, scaling_factor_compute_algo=lambda amax, *_: torch.full_like(amax, proposed)
    )
    _, scale, _ = recipe.updated(torch.zeros(1, 2), torch.tensor([7.0]), torch.ones(1), E4M3_MAX)
    assert scale.item() == expected


@pytest.mark.parametrize("result", [1.0, torch.ones(3), torch.ones(2, 2)])
def test_a_function_that_returns_the_wrong_thing_is_named(result: object) -> None:
    recipe = DelayedScaling(amax_compute_algo=lambda history: result)
    with pytest.raises(RecipeError, match=r"amax_compute_algo returned .* must return a tensor \[2\]"):
        recipe.updated(torch.zeros(2, 4), torch.zeros(2), torch.ones(2), E4M3_MAX)


# --- validation ----------------------------------------------------------------------------------------------------


def no_arguments() -> int:
    return 0


@pytest.mark.parametrize(
    ("kind", "field", "value", "allowed"),
    [
        (DelayedScaling, "margin", 1.5, "an integer from -16 to 16"),
        (DelayedScaling, "margin", True, "an integer"),
        (DelayedScaling, "margin", 17, "from -16 to 16"),
        (DelayedScaling, "margin", -17, "from -16 to 16"),
        (DelayedScaling, "fp8_format", "E5M2", "Format.E4M3, Format.HYBRID"),
        (DelayedScaling, "amax_history_len", 0, "from 1 to 1048576"),
        (DelayedScaling, "amax_history_len", "16", "an integer"),
        (DelayedScaling, "amax_history_len", 10**12, "from 1 to 1048576"),
        (DelayedScaling, "amax_compute_algo", np.array(["max", "most_recent"]), "'max', 'most_recent'"),
        (DelayedScaling, "amax_compute_algo", "maximum", "'max', 'most_recent'"),
        (DelayedScaling, "amax_compute_algo", None, "'max', 'most_recent'"),
        (DelayedScaling, "amax_compute_algo", no_arguments, "must take (history)"),
        (DelayedScaling, "scaling_factor_compute_algo", "max", "must be None or a function"),
        (DelayedScaling, "scaling_factor_compute_algo", no_arguments, "must take (amax, scale, fp8_max, recipe)"),
        (DelayedScaling, "reduce_amax", 1, "True or False"),
        (DelayedScaling, "fp8_dpa", 1, "True or False"),
        (DelayedScaling, "fp8_mha", True, "only False is allowed. fp8_dpa=True computes attention itself in FP8"),
        (Float8CurrentScaling, "fp8_format", 3, "Format.E4M3, Format.HYBRID"),
        (Float8CurrentScaling, "use_power_2_scales", "yes", "True or False"),
        (Float8CurrentScaling, "fp8_dpa", "yes", "True or False"),
        (Float8CurrentScaling, "fp8_mha", True, "only False is allowed"),
        (Float8CurrentScaling, "amax_epsilon", -1e-9, "at least 0"),
        (Float8CurrentScaling, "amax_epsilon", math.nan, "at least 0"),
        (Float8CurrentScaling, "amax_epsilon", math.inf, "finite"),
        (Float8CurrentScaling, "amax_epsilon", 1e39, "not beyond fp32"),
    ],
)
def test_a_bad_value_is_refused_with_field_value_and_what_is_allowed(
    kind: type, field: str, value: object, allowed: str
) -> None:
    with pytest.raises(RecipeError) as error:
        kind(**{field: value})
    assert f"{field}={value!r}" in str(error.value) and allowed in str(error.value)


def test_numbers_of_numpys_are_numbers() -> None:
    recipe = DelayedScaling(margin=np.int8(1), amax_history_len=np.int64(16))
    assert recipe.key() == DelayedScaling(margin=1, amax_history_len=16).key()
    assert Float8CurrentScaling(amax_epsilon=np.float32(0.5)).key() == Float8CurrentScaling(amax_epsilon=0.5).key()


def test_defaults_are_transformer_engines() -> None:
    recipe = DelayedScaling()
    assert (recipe.margin, recipe.fp8_format, recipe.amax_history_len) == (0, Format.HYBRID, 1024)
    assert (recipe.amax_compute_algo, recipe.scaling_factor_compute_algo, recipe.reduce_amax) == ("max", None, True)
    current = Float8CurrentScaling()
    assert (current.fp8_format, current.use_power_2_scales, current.amax_epsilon) == (Format.HYBRID, False, 0.0)
    assert recipe.stateful and not current.stateful
    assert not any([recipe.fp8_dpa, recipe.fp8_mha, current.fp8_dpa, current.fp8_mha])


# --- names and keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "recipe"),
    [
        ("delayed", DelayedScaling()),
        ("current", Float8CurrentScaling()),
        ("delayed margin=2 fp8_format=E4M3", DelayedScaling(margin=2, fp8_format=Format.E4M3)),
        ({"name": "delayed", "amax_history_len": 16}, DelayedScaling(amax_history_len=16)),
        ({"name": "current", "fp8_format": "E4M3"}, Float8CurrentScaling(fp8_format=Format.E4M3)),
        (DelayedScaling(margin=1), DelayedScaling(margin=1)),
        ("delayed fp8_dpa=True", DelayedScaling(fp8_dpa=True)),
        ("delayed fp8_dpa=true reduce_amax=FALSE", DelayedScaling(fp8_dpa=True, reduce_amax=False)),
        ("delayed fp8_format=Format.E4M3", DelayedScaling(fp8_format=Format.E4M3)),
        ("DelayedScaling margin=1", DelayedScaling(margin=1)),
        ({"name": "Float8CurrentScaling"}, Float8CurrentScaling()),
        ({"name": "current", "fp8_dpa": True}, Float8CurrentScaling(fp8_dpa=True)),
    ],
)
def test_names_texts_dicts_and_objects_all_mean_a_recipe(value: object, recipe: object) -> None:
    assert resolve(value) == recipe


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("delaied", "recipe='delaied': unknown; choose one of 'delayed', 'current' or pass a Recipe"),
        ("", "unknown; choose one of"),
        (3, "type int is not a recipe"),
        (None, "is not a recipe"),
        ({"margin": 1}, "has no 'name'"),
        ({"name": ["delayed"]}, "unknown"),
        ({"name": "delayed", "magin": 1}, "no parameter 'magin'; did you mean 'margin'?"),
        ({"name": "current", "margin": 1}, "'current' has no parameter 'margin'"),
        ("delayed margin", "'margin' is not of the form parameter=value"),
        ("delayed margin=1 margin=2", "'margin' is given twice"),
        ("block", "Float8BlockScaling is not available yet"),
        ("mxfp8", "MXFP8BlockScaling is not available yet"),
        ("MXFP8BlockScaling", "MXFP8BlockScaling is not available yet"),
        ({"name": "nvfp4"}, "NVFP4BlockScaling is not available yet"),
    ],
)
def test_what_means_no_recipe_is_refused_with_the_choices(value: object, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        resolve(value)
    assert message in str(error.value)


def transformer_engine_object(class_name: str, **attributes: object) -> object:
    """An object that looks like one of Transformer Engine's recipes."""
    return type(class_name, (), {"__module__": "transformer_engine.common.recipe", **attributes})()


def test_transformer_engines_own_recipe_objects_are_understood() -> None:
    hybrid = type("TheirFormat", (), {"name": "E4M3"})()
    theirs = transformer_engine_object("DelayedScaling", margin=2, fp8_format=hybrid, amax_history_len=7, other=1)
    assert resolve(theirs) == DelayedScaling(margin=2, fp8_format=Format.E4M3, amax_history_len=7)
    parameters = type("QParams", (), {"amax_epsilon": 0.25})()
    theirs = transformer_engine_object("Float8CurrentScaling", use_power_2_scales=True, fp8_quant_fwd_inp=parameters)
    assert resolve(theirs) == Float8CurrentScaling(use_power_2_scales=True, amax_epsilon=0.25)
    theirs = transformer_engine_object("DelayedScaling", fp8_dpa=True, fp8_mha=False)
    assert resolve(theirs) == DelayedScaling(fp8_dpa=True)
    theirs = transformer_engine_object("Float8CurrentScaling", fp8_dpa=True)
    assert resolve(theirs) == Float8CurrentScaling(fp8_dpa=True)
    with pytest.raises(RecipeError, match="fp8_mha=True"):
        resolve(transformer_engine_object("DelayedScaling", fp8_dpa=True, fp8_mha=True))
    with pytest.raises(RecipeError, match="MXFP8BlockScaling is not available yet"):
        resolve(transformer_engine_object("MXFP8BlockScaling"))


def test_each_parameter_has_its_place_in_the_key() -> None:
    variants = [
        DelayedScaling(),
        DelayedScaling(margin=1),
        DelayedScaling(fp8_format=Format.E4M3),
        DelayedScaling(amax_history_len=16),
        DelayedScaling(amax_compute_algo="most_recent"),
        DelayedScaling(amax_compute_algo=torch.amax),
        DelayedScaling(scaling_factor_compute_algo=torch.div),
        DelayedScaling(reduce_amax=False),
        DelayedScaling(fp8_dpa=True),
        Float8CurrentScaling(),
        Float8CurrentScaling(fp8_dpa=True),
        Float8CurrentScaling(use_power_2_scales=True),
        Float8CurrentScaling(amax_epsilon=1e-7),
        Float8CurrentScaling(fp8_format=Format.E4M3),
    ]
    for one, other in itertools.combinations(variants, 2):
        assert one.key() != other.key()


def test_a_fresh_process_finds_a_standard_recipe_by_its_key() -> None:
    recipe = DelayedScaling(margin=random.randint(-9, 9), amax_history_len=random.randint(1, 99))
    current = Float8CurrentScaling(use_power_2_scales=True, amax_epsilon=random.random())
    program = "import sys; from te_compile.recipe import recipe_of; [print(recipe_of(key)) for key in sys.argv[1:]]"
    command = [sys.executable, "-c", program, recipe.key(), current.key()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [str(recipe), str(current)]


def test_a_recipe_with_functions_is_found_once_it_was_resolved() -> None:
    offset = random.random()
    recipe = DelayedScaling(amax_compute_algo=lambda history: history.amax(0) + offset)
    with pytest.raises(RecipeError, match="not known to this process"):
        recipe_of(recipe.key())
    resolve(recipe)
    assert recipe_of(recipe.key()) is recipe


def test_remember_returns_the_key_it_can_be_found_by() -> None:
    recipe = DelayedScaling(margin=random.randint(-16, 16))
    assert recipe_of(remember(recipe)) == recipe
