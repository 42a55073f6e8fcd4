"""Options: what is accepted, where it comes from, and what errors say."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from te_compile.options import OptionError, Options, configure, configured
from te_compile.recipe import DelayedScaling, Float8CurrentScaling, Format

NOT_INCLUDED = "not matched by include; add its name there to allow FP8"


@pytest.fixture(autouse=True)
def no_defaults_but_ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts with nothing configured and no variable of ours, and leaves it so."""
    for variable in [name for name in os.environ if name.startswith("TE_COMPILE_")]:
        monkeypatch.delenv(variable)
    before = configure(**dict.fromkeys(configured()))
    yield
    configure(**dict.fromkeys(configured()))
    before.restore()


def test_defaults_need_nothing() -> None:
    options = Options.resolve()
    assert options == Options()
    assert options.recipe == DelayedScaling()
    assert (options.lm_head, options.strict, options.compiler, options.cost_model) == (False, False, "inductor", True)
    assert options.cache_weights is True and options.defer_logits is True and options.save_memory is False
    assert options.accumulate_in_products is True and options.overwrite_logits is True
    assert options.skip_passes == ()
    assert (options.include, options.exclude, options.mode, dict(options.inductor)) == (None, (), None, {})


# --- one value --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["current", {"name": "current"}, Float8CurrentScaling()])
def test_a_recipe_is_a_name_a_dict_or_an_object(recipe: object) -> None:
    assert Options.resolve({"recipe": recipe}).recipe == Float8CurrentScaling()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("recipe", "delaied", "recipe='delaied': unknown; choose one of 'delayed', 'current' or pass a Recipe"),
        ("recipe", {"name": "delayed", "margin": "big"}, "margin='big': must be an integer"),
        ("include", 3, "include=3: must be a glob pattern"),
        ("exclude", ["*.proj", 3], "must be a glob pattern"),
        ("exclude", "*.proj,,*.fc", "must be a glob pattern"),
        ("lm_head", 1, "lm_head=1: must be True or False"),
        ("strict", "yes", "strict='yes': must be True or False"),
        ("compiler", "gcc", "compiler='gcc': choose one of 'inductor', 'aot_eager'"),
        ("cost_model", 0, "cost_model=0: must be True or False"),
        ("cache_weights", "no", "cache_weights='no': must be True or False"),
        ("save_memory", "most", "save_memory='most': must be True or False"),
        ("defer_logits", 2, "defer_logits=2: must be True or False"),
        ("overwrite_logits", "no", "overwrite_logits='no': must be True or False"),
        ("skip_passes", 3, "skip_passes=3: must be the name of a pass such as 'fuse_producers', or a list of them"),
        ("skip_passes", ["fold_masks", None], "must be the name of a pass"),
        (
            "skip_passes",
            "fuse_producer",
            "'fuse_producer' cannot be left out; did you mean 'fuse_producers'? These can:",
        ),
        ("skip_passes", "lower_linears", "'lower_linears' cannot be left out"),
        ("mode", "fast", "mode='fast': choose one of 'default'"),
        ("mode", True, "mode=True: choose one of 'default'"),
        ("max_autotune", "yes", "max_autotune='yes': an Inductor option of type bool"),
    ],
)
def test_a_bad_value_is_refused_with_field_value_and_what_is_allowed(name: str, value: object, message: str) -> None:
    with pytest.raises(OptionError) as error:
        Options.resolve({name: value})
    assert message in str(error.value)
    with pytest.raises(OptionError):
        configure(**{name: value})
    assert configured() == {}


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("stric", "strict"), ("excludes", "exclude"), ("max_autotun", "max_autotune"), ("recipes", "recipe")],
)
def test_a_misspelt_option_is_refused_with_the_closest_name(name: str, suggestion: str) -> None:
    for given in (lambda: Options.resolve({name: True}), lambda: configure(**{name: True})):
        with pytest.raises(OptionError, match=f"no such option; did you mean '{suggestion}'"):
            given()


@pytest.mark.parametrize("field", ["include", "exclude"])
def test_a_function_that_cannot_be_called_with_name_and_info_is_refused(field: str) -> None:
    with pytest.raises(OptionError, match=rf"{field}=.*must take \(name, info\)"):
        Options.resolve({field: lambda name: True})
    assert callable(getattr(Options.resolve({field: lambda name, *more: True}), field))


def test_patterns_that_fit_no_linear_are_known() -> None:
    options = Options(include="h.*", exclude=["*.attn", "*.porj", "h.0.mlp"])
    assert options.idle_patterns(["h.0.attn.qkv", "h.0.mlp", "lm_head"]) == ["exclude pattern '*.porj'"]
    assert not Options(exclude=lambda name, info: False).idle_patterns([])


@pytest.mark.parametrize("options", [["strict"], "strict", 3])
def test_options_that_are_no_dict_are_refused(options: object) -> None:
    with pytest.raises(OptionError, match="must be a dict"):
        Options.resolve(options)


def test_an_option_whose_name_is_no_text_is_refused() -> None:
    with pytest.raises(OptionError, match=r"options\[3\]: no such option"):
        Options.resolve({3: True})


def test_a_direct_construction_is_checked_too() -> None:
    assert Options(recipe="current", exclude="*.a,*.b").exclude == ("*.a", "*.b")
    with pytest.raises(OptionError, match="strict=2"):
        Options(strict=2)


def test_none_is_not_given_in_a_direct_construction_too() -> None:
    assert Options(**dict.fromkeys(("recipe", "exclude", "lm_head", "compiler", "skip_passes", "mode"))) == Options()


# --- mode and Inductor's options --------------------------------------------------------------------------------


def test_mode_may_come_beside_options_or_within() -> None:
    assert Options.resolve({}, "reduce-overhead").mode == "reduce-overhead"
    assert Options.resolve({"mode": "reduce-overhead"}).mode == "reduce-overhead"
    assert Options.resolve({"mode": "reduce-overhead"}, "reduce-overhead").mode == "reduce-overhead"
    with pytest.raises(OptionError, match=r"mode='reduce-overhead' and options\['mode'\]='default': give one"):
        Options.resolve({"mode": "default"}, "reduce-overhead")


def test_two_different_modes_are_refused() -> None:
    with pytest.raises(OptionError, match=r"mode='max-autotune' and options\['mode'\]='reduce-overhead'"):
        Options.resolve({"mode": "reduce-overhead"}, "max-autotune")


def test_mode_default_of_the_call_wins_over_a_configured_mode() -> None:
    with configure(mode="max-autotune"):
        assert Options.resolve().mode == "max-autotune"
        assert Options.resolve({"mode": "default"}).mode is None


def test_inductor_options_pass_through_under_their_full_names() -> None:
    options = Options.resolve({"max-autotune": True, "triton.cudagraphs": True, "strict": True})
    assert dict(options.inductor) == {"max_autotune": True, "triton.cudagraphs": True}
    assert options.strict


def test_inductor_options_of_all_places_add_up() -> None:
    with configure(**{"max_autotune": False, "epilogue_fusion": False}):
        options = Options.resolve({"max_autotune": True})
    assert dict(options.inductor) == {"max_autotune": True, "epilogue_fusion": False}


def test_no_option_of_ours_hides_one_of_inductors() -> None:
    assert not set(vars(Options())) & set(torch._inductor.config.get_config_copy())


# --- where options come from ------------------------------------------------------------------------------------


def test_the_call_wins_over_configure_and_configure_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_COMPILE_EXCLUDE", "environment")
    assert Options.resolve().exclude == ("environment",)
    configure(exclude="process")
    assert Options.resolve().exclude == ("process",)
    assert Options.resolve({"exclude": "call"}).exclude == ("call",)
    assert Options.resolve({"exclude": None}).exclude == ("process",)
    configure(exclude=None)
    assert Options.resolve().exclude == ("environment",)


def test_a_false_of_the_call_wins_over_a_true_of_the_process() -> None:
    with configure(strict=True):
        assert Options.resolve({"strict": False}).strict is False


def test_every_option_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "RECIPE": "delayed margin=1 fp8_format=E4M3",
        "INCLUDE": "*.mlp.*",
        "EXCLUDE": "*lm_head*, *.proj",
        "LM_HEAD": "1",
        "STRICT": "true",
        "COMPILER": "aot_eager",
        "COST_MODEL": "off",
        "CACHE_WEIGHTS": "0",
        "SAVE_MEMORY": "1",
        "DEFER_LOGITS": "0",
        "MODE": "reduce-overhead",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"TE_COMPILE_{name}", value)
    assert Options.resolve() == Options(
        recipe=DelayedScaling(margin=1, fp8_format=Format.E4M3),
        include=("*.mlp.*",),
        exclude=("*lm_head*", "*.proj"),
        lm_head=True,
        strict=True,
        compiler="aot_eager",
        cost_model=False,
        cache_weights=False,
        save_memory=True,
        defer_logits=False,
        mode="reduce-overhead",
    )


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("TE_COMPILE_RECIPE", "curent", "recipe='curent': unknown; choose one of 'delayed', 'current'"),
        ("TE_COMPILE_STRICT", "maybe", "must be 1 or 0"),
        ("TE_COMPILE_COMPILER", "gcc", "choose one of 'inductor', 'aot_eager'"),
        ("TE_COMPILE_EXCLUDE", "a,,b", "must be a glob pattern"),
        ("TE_COMPILE_MODE", "fast", "choose one of 'default'"),
        ("TE_COMPILE_STRICTT", "1", "no such variable; did you mean 'TE_COMPILE_STRICT'?"),
    ],
)
def test_a_bad_variable_is_named(variable: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(OptionError) as error:
        Options.resolve()
    assert f"{variable}={text!r}: " in str(error.value) and message in str(error.value)


@pytest.mark.parametrize("variable", ["TE_COMPILE_DEBUG", "TE_COMPILE_NATIVE"])
def test_variables_that_are_no_options_are_left_to_their_readers(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "/some/where")
    assert Options.resolve() == Options()


def test_an_empty_variable_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_COMPILE_STRICT", "")
    monkeypatch.setenv("TE_COMPILE_EXCLUDE", " ")
    assert Options.resolve() == Options()


def test_configure_as_a_block_takes_only_its_own_change_back() -> None:
    configure(strict=True)
    with configure(recipe="current", strict=False):
        assert configured() == {"recipe": Float8CurrentScaling(), "strict": False}
    assert configured() == {"strict": True}


def test_changes_that_overlap_are_taken_back_each_by_itself() -> None:
    """As two threads' blocks do, which know nothing of each other."""
    first = configure(recipe="current")
    second = configure(strict=True)
    first.restore()
    assert configured() == {"strict": True}
    second.restore()
    assert configured() == {}
    first, second = configure(recipe="current"), configure(recipe="delayed")
    first.restore()
    assert configured() == {"recipe": DelayedScaling()}
    first.restore()  # again: nothing is left to take back
    second.restore()
    assert configured() == {}


def test_a_local_name_fits_patterns_too_and_functions_judge_the_whole_one() -> None:
    assert Options(exclude="fc").why_excluded("layers.0.fc", local_name="fc") is not None
    assert Options(exclude="layers.0").why_excluded("layers.0.fc", local_name="fc") is not None
    assert Options(include="layers.*").why_excluded("layers.0.fc", local_name="fc") is None
    assert Options(exclude=lambda name, info: name == "fc").why_excluded("layers.0.fc", local_name="fc") is None


@pytest.mark.parametrize("field", ["include", "exclude"])
def test_a_function_that_raises_is_named_with_the_linear(field: str) -> None:
    def picky(name: str, info: object) -> bool:
        return info.no_such_attribute  # type: ignore[attr-defined]

    with pytest.raises(OptionError, match=r"'picky' of include or exclude raised AttributeError.*'layers.0.fc'"):
        Options(**{field: picky}).why_excluded("layers.0.fc")


def test_options_must_be_a_dict_even_if_there_are_none() -> None:
    with pytest.raises(OptionError, match="must be a dict"):
        Options.resolve([])  # type: ignore[arg-type]


def test_configure_is_all_or_nothing() -> None:
    configure(lm_head=True)
    with pytest.raises(OptionError):
        configure(lm_head=None, strict=True, compiler="gcc")
    assert configured() == {"lm_head": True}


# --- include and exclude ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "excluded"),
    [
        ("*lm_head*", "lm_head", True),
        ("*lm_head*", "model.lm_head", True),
        ("*.proj", "block.0.proj", True),
        ("*.proj", "block.0.projection", False),
        ("model.layers.0", "model.layers.0.mlp.up", True),
        ("model.layers.0", "model.layers.01.mlp.up", False),
        ("model.layers.[01]", "model.layers.1.mlp.up", True),
        ("Proj", "proj", False),
        ("up", "model.up", False),
    ],
)
def test_a_pattern_fits_whole_names_and_what_is_inside(pattern: str, name: str, excluded: bool) -> None:
    reason = f"exclude pattern {pattern!r}; take that out to allow FP8" if excluded else None
    assert Options(exclude=pattern).why_excluded(name) == reason
    assert Options(include=pattern).why_excluded(name) == (None if excluded else NOT_INCLUDED)


def test_exclude_wins_over_include() -> None:
    options = Options(include="*.mlp.*", exclude=["*.down", "*.gate"])
    assert options.why_excluded("0.mlp.up") is None
    assert options.why_excluded("0.mlp.down") == "exclude pattern '*.down'; take that out to allow FP8"
    assert options.why_excluded("0.attention.q") == NOT_INCLUDED


def test_a_function_sees_name_and_info() -> None:
    def small(name: str, info: dict[str, int]) -> bool:
        return info["features"] < 64

    options = Options(exclude=small)
    assert options.why_excluded("fc", {"features": 32}) == "exclude function 'small'; take that out to allow FP8"
    assert options.why_excluded("fc", {"features": 64}) is None
    assert Options(include=small).why_excluded("fc", {"features": 64}) == NOT_INCLUDED


def test_an_empty_include_takes_nothing() -> None:
    assert Options(include=[]).why_excluded("fc") == NOT_INCLUDED


# --- key --------------------------------------------------------------------------------------------------------


def test_options_that_compile_differently_have_different_keys() -> None:
    threshold = 3
    variants = [
        {},
        {"recipe": "current"},
        {"recipe": "delayed margin=1"},
        {"include": "*.a"},
        {"exclude": "*.a"},
        {"exclude": lambda name, info: len(name) > threshold},
        {"lm_head": True},
        {"strict": True},
        {"compiler": "aot_eager"},
        {"cost_model": False},
        {"cache_weights": False},
        {"save_memory": True},
        {"defer_logits": False},
        {"overwrite_logits": False},
        {"skip_passes": "fold_masks"},
        {"skip_passes": "fold_masks,fuse_producers"},
        {"mode": "max-autotune"},
        {"max_autotune": True},
        {"max_autotune": False},
    ]
    keys = [Options.resolve(each).key() for each in variants]
    assert len(set(keys)) == len(keys)


def test_the_order_of_options_does_not_change_the_key() -> None:
    given = {"max_autotune": True, "epilogue_fusion": False, "strict": True}
    backwards = dict(reversed(given.items()))
    assert Options.resolve(given).key() == Options.resolve(backwards).key()


def test_saving_memory_keeps_no_copies_of_weights() -> None:
    assert Options.resolve({"save_memory": True}).cache_weights is False
    assert Options(save_memory=True).cache_weights is False
    with pytest.raises(OptionError, match="save_memory=True and cache_weights=True"):
        Options.resolve({"save_memory": True, "cache_weights": True})
