"""A recipe says how a tensor gets its FP8 scale: frozen data and a formula.

FP8 has 256 codes, so every tensor is multiplied by a scale before the cast and the product divided by it after. With
``amax`` the largest magnitude in the tensor and ``fp8_max`` the largest FP8 number (448 for E4M3, 57344 for E5M2)

    scale = fp8_max · 2^-margin / amax

puts the largest element at the edge of the range. The two recipes differ in where ``amax`` comes from, and bear the
names, parameters and defaults of Transformer Engine:

``DelayedScaling``          from the last ``amax_history_len`` steps: the scale is known before the data, so whoever
                            produces the tensor can write FP8 at once and note the new amax on the way.
``Float8CurrentScaling``    from the tensor itself: no state, one more pass over the data.

Nothing here knows of graphs, devices or kernels. A recipe travels on graphs as the text of :meth:`Recipe.key`, and
:func:`recipe_of` finds it again.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, fields
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from te_compile.function_keys import callable_key

FP32_MAX = torch.finfo(torch.float32).max
FP32_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
# Three more, and the largest value of a tensor is 0 in E4M3; as far the other way most of it saturates.
_MOST_MARGIN = 16
# Four bytes a step for each of three tensors of each linear: 12 MiB a linear. Beyond that memory ends, without a word.
_LONGEST_HISTORY = 1 << 20
_SIGN_AND_EXPONENT = -(1 << 23)  # int32 with the bits of 0xFF800000: what is left of an fp32 without its mantissa


class RecipeError(ValueError):
    """A recipe that does not exist or cannot be; the message names the field, the value and what is allowed."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the known name closest to ``name``, or a full stop if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."


class Format(Enum):
    """Which FP8 type each direction uses: E4M3 has the precision, E5M2 the range that gradients want."""

    E4M3 = "E4M3"
    HYBRID = "HYBRID"

    @property
    def forward(self) -> torch.dtype:
        """The type of activations and weights."""
        return torch.float8_e4m3fn

    @property
    def backward(self) -> torch.dtype:
        """The type of gradients."""
        return torch.float8_e5m2 if self is Format.HYBRID else torch.float8_e4m3fn

    @property
    def forward_max(self) -> float:
        """The largest activation or weight that is not clipped."""
        return torch.finfo(self.forward).max

    @property
    def backward_max(self) -> float:
        """The largest gradient that is not clipped."""
        return torch.finfo(self.backward).max


@dataclass(frozen=True)
class ScaleRule:
    """The formula from amax to scale; ``epsilon`` is a floor for amax, ``power_2`` rounds the scale down to 2^n."""

    margin: int = 0
    epsilon: float = 0.0
    power_2: bool = False

    def text(self) -> str:
        """The rule as operators on graphs carry it."""
        return f"margin={self.margin} epsilon={self.epsilon!r} power_2={self.power_2}"

    @staticmethod
    @functools.lru_cache
    def parse(text: str) -> ScaleRule:
        """The rule whose :meth:`text` this is."""
        try:
            given = dict(part.split("=") for part in text.split())
            rule = ScaleRule(int(given["margin"]), float(given["epsilon"]), given["power_2"] == "True")
        except (KeyError, ValueError):
            rule = None
        if rule is None or rule.text() != text:
            raise RecipeError(f"{text!r}: not a scale rule; expected a text like {ScaleRule().text()!r}")
        return rule

    def scale(self, amax: Tensor, fp8_max: float) -> Tensor:
        """fp8_max · 2^-margin / max(amax, epsilon), elementwise in fp32.

        An amax that is 0, infinite or NaN tells nothing: scale 1. A scale beyond fp32 becomes the largest fp32. It is
        never 0, which in a state means "no data yet", nor subnormal, which devices may flush to 0.
        """
        amax = amax.float().clamp(min=self.epsilon)
        # A tensor on the left: Python's number / tensor is a reciprocal and a product, and rounds twice.
        scale = torch.full_like(amax, fp8_max * 2.0**-self.margin) / amax
        scale = torch.where((amax > 0) & torch.isfinite(amax), scale, 1.0).clamp(FP32_SMALLEST_NORMAL, FP32_MAX)
        if self.power_2:
            scale = (scale.view(torch.int32) & _SIGN_AND_EXPONENT).view(torch.float32)
        return scale


@dataclass(frozen=True)
class Recipe:
    """What all recipes share. A concrete recipe gives the class attributes and has fields for the properties."""

    name: ClassVar[str]  # how options spell it
    te_name: ClassVar[str]  # Transformer Engine's class name
    stateful: ClassVar[bool]  # does it need an amax history and a scale that outlive the step?

    @property
    def fp8_format(self) -> Format:
        """Which FP8 type each direction uses."""
        raise NotImplementedError  # a field of every concrete recipe

    @property
    def fp8_dpa(self) -> bool:
        """Does attention run in FP8 too?"""
        raise NotImplementedError  # likewise

    def rule(self) -> ScaleRule:
        """How this recipe turns an amax into a scale."""
        raise NotImplementedError  # the formula is what a concrete recipe is

    def key(self) -> str:
        """The recipe in one line, complete: recipes that compute different numbers have different keys."""
        values = (f"{field.name}={_value_text(getattr(self, field.name))}" for field in _parameters(type(self)))
        return " ".join([self.name, *values])


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Scale from the amaxes of earlier steps.

    margin: the scale is 2^margin smaller than what would just fit; from -16 to 16.
    fp8_format: ``Format.HYBRID`` (gradients in E5M2) or ``Format.E4M3``; its name does too.
    amax_history_len: how many steps the window holds, the newest included; a million at most.
    amax_compute_algo: "max" of the window, "most_recent", or a function of the history [L, n] of n tensors, newest
        first, that returns an amax for each [n].
    scaling_factor_compute_algo: None for the formula of this module, or a function (amax [n], scale [n], fp8_max,
        recipe) that returns the new scale [n]. It sees scale 1 where there is none yet.
    reduce_amax: data-parallel ranks agree on the amax.
    fp8_dpa: the two products of attention run in FP8 too, forward; what goes in and out stays in high precision.
        Attention has no parameter to keep a state under, so its operands are scaled by their own amax.
    fp8_mha: False. Transformer Engine's True also hands FP8 tensors into and out of attention.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    scaling_factor_compute_algo: Callable[[Tensor, Tensor, float, DelayedScaling], Tensor] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    name: ClassVar[str] = "delayed"
    te_name: ClassVar[str] = "DelayedScaling"
    stateful: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "margin", _as_integer("margin", self.margin, -_MOST_MARGIN, _MOST_MARGIN))
        object.__setattr__(self, "fp8_format", _as_format(self.fp8_format))
        length = _as_integer("amax_history_len", self.amax_history_len, 1, _LONGEST_HISTORY)
        object.__setattr__(self, "amax_history_len", length)
        named = isinstance(self.amax_compute_algo, str) and self.amax_compute_algo in ("max", "most_recent")
        if not named and not callable(self.amax_compute_algo):
            raise RecipeError(
                f"amax_compute_algo={self.amax_compute_algo!r}: choose 'max', 'most_recent' or pass a function "
                "of the history [L, n] that returns an amax [n]"
            )
        _require_arguments("amax_compute_algo", self.amax_compute_algo, "history")
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise RecipeError(
                f"scaling_factor_compute_algo={self.scaling_factor_compute_algo!r}: must be None or a function "
                "(amax, scale, fp8_max, recipe) that returns a scale"
            )
        _require_arguments(
            "scaling_factor_compute_algo", self.scaling_factor_compute_algo, "amax, scale, fp8_max, recipe"
        )
        _require_bool("reduce_amax", self.reduce_amax)
        _require_attention_fields(self.fp8_dpa, self.fp8_mha)

    def rule(self) -> ScaleRule:
        """The scale of a first step, which has no history, comes from the same formula."""
        return ScaleRule(margin=self.margin)

    def updated(self, history: Tensor, scale: Tensor, amax: Tensor, fp8_max: float) -> tuple[Tensor, Tensor, Tensor]:
        """One step of the state: history [n, L] newest first, scale [n] (0: none yet) and this step's amax [n].

        Returns the new history, the new scale, and for each row whether its amax was skipped because it is not
        finite. One overflow must not freeze or poison L steps, so such an amax leaves its row as it was. So does an
        amax of 0: a tensor of zeros, such as an untouched gradient, says nothing about the next one. All of it stays
        on the device of the tensors.
        """
        finite = torch.isfinite(amax)
        counts = finite & (amax > 0)
        rolled = torch.cat([amax.unsqueeze(1), history[:, :-1]], dim=1)
        history = torch.where(counts.unsqueeze(1), rolled, history)
        chosen = self._amax_of(history)
        proposed = self._scale_of(chosen, scale, fp8_max)
        counts = counts & torch.isfinite(chosen) & (chosen > 0) & (proposed > 0)
        return history, torch.where(counts, proposed.clamp(max=FP32_MAX), scale), ~finite

    def _amax_of(self, history: Tensor) -> Tensor:
        """The amax [n] that stands for a history [n, L]."""
        if self.amax_compute_algo == "max":
            return history.amax(dim=1)
        if not callable(self.amax_compute_algo):
            return history[:, 0]
        amax = self.amax_compute_algo(history.t())
        return _checked_result("amax_compute_algo", amax, history[:, 0])

    def _scale_of(self, amax: Tensor, scale: Tensor, fp8_max: float) -> Tensor:
        """The scale [n] for an amax [n]; what it says of an amax that is 0 or not finite is not used."""
        if self.scaling_factor_compute_algo is None:
            return self.rule().scale(amax, fp8_max)
        before = torch.where(scale > 0, scale, 1.0)
        proposed = self.scaling_factor_compute_algo(amax, before, fp8_max, self)
        return _checked_result("scaling_factor_compute_algo", proposed, scale)


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """Scale from the tensor itself.

    fp8_format: ``Format.HYBRID`` (gradients in E5M2) or ``Format.E4M3``; its name does too.
    use_power_2_scales: round each scale down to a power of two, so that scaling itself rounds nothing.
    amax_epsilon: a floor for the amax.
    fp8_dpa: the two products of attention run in FP8 too, forward; what goes in and out stays in high precision.
    fp8_mha: False. Transformer Engine's True also hands FP8 tensors into and out of attention.
    """

    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False
    amax_epsilon: float = 0.0
    fp8_dpa: bool = False
    fp8_mha: bool = False

    name: ClassVar[str] = "current"
    te_name: ClassVar[str] = "Float8CurrentScaling"
    stateful: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "fp8_format", _as_format(self.fp8_format))
        _require_bool("use_power_2_scales", self.use_power_2_scales)
        epsilon = self.amax_epsilon
        if isinstance(epsilon, bool) or not isinstance(epsilon, numbers.Real) or not 0 <= epsilon <= FP32_MAX:
            raise RecipeError(f"amax_epsilon={epsilon!r}: must be a finite number, at least 0 and not beyond fp32")
        object.__setattr__(self, "amax_epsilon", float(epsilon))
        _require_attention_fields(self.fp8_dpa, self.fp8_mha)

    def rule(self) -> ScaleRule:
        """The whole recipe: there is no other moment at which a scale is made."""
        return ScaleRule(epsilon=self.amax_epsilon, power_2=self.use_power_2_scales)


RECIPES: dict[str, type[Recipe]] = {"delayed": DelayedScaling, "current": Float8CurrentScaling}
_NOT_YET = {
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
    "custom": "CustomRecipe",
}
_CHOICES = f"choose one of {', '.join(map(repr, RECIPES))} or pass a Recipe"


# --- from what a user writes to a recipe, and from a graph back to it ---------------------------------------------

_remembered: dict[str, Recipe] = {}


def remember(recipe: Recipe) -> str:
    """Make ``recipe`` findable by its key in this process; returns the key."""
    key = recipe.key()
    _remembered[key] = recipe
    return key


def recipe_of(key: str) -> Recipe:
    """The recipe with this key. One with functions of the user's in it must have been resolved in this process."""
    if key not in _remembered:
        try:
            recipe = _from_text(key)
        except RecipeError as reason:
            raise RecipeError(f"recipe {key!r} is not known to this process ({reason}); pass it in options=") from None
        remember(recipe)
    return _remembered[key]


def resolve(value: object) -> Recipe:
    """The recipe that ``value`` means, remembered by its key.

    value: a name ("delayed", "current"), optionally with parameters ("delayed margin=1 amax_history_len=16"); a dict
    ({"name": "delayed", "margin": 1}); a recipe; or one of Transformer Engine's own recipe objects.
    """
    if isinstance(value, Recipe):
        recipe = value
    elif isinstance(value, str):
        recipe = _from_text(value)
    elif isinstance(value, Mapping):
        recipe = _from_parameters(dict(value), value)
    elif type(value).__module__.split(".")[0] == "transformer_engine":
        recipe = _from_transformer_engine(value)
    else:
        raise RecipeError(f"recipe={value!r}: type {type(value).__name__} is not a recipe; {_CHOICES}")
    remember(recipe)
    return recipe


def _from_text(text: str) -> Recipe:
    """A name and, after spaces, parameters: what :meth:`Recipe.key` writes; parameters left out have their default."""
    name, *parts = text.split() or [""]
    parameters: dict[str, Any] = {}
    for part in parts:
        parameter, equals, value = part.partition("=")
        if not equals:
            raise RecipeError(f"recipe={text!r}: {part!r} is not of the form parameter=value")
        if parameter in parameters:
            raise RecipeError(f"recipe={text!r}: {parameter!r} is given twice")
        parameters[parameter] = _literal(value)
    return _from_parameters({"name": name, **parameters}, text)


def _literal(text: str) -> Any:
    """The Python constant that ``text`` spells, ``true``, ``false`` and ``none`` in any case, or ``text`` itself."""
    constant = text.capitalize()
    try:
        return ast.literal_eval(constant if constant in ("True", "False", "None") else text)
    except (ValueError, SyntaxError):
        return text


def _from_parameters(parameters: dict[str, Any], given: object) -> Recipe:
    """The recipe ``parameters["name"]`` with the other parameters; ``given`` is what errors quote."""
    name = parameters.pop("name", None)
    if isinstance(name, str) and name in {*_NOT_YET, *_NOT_YET.values()}:
        raise RecipeError(f"recipe={given!r}: {_NOT_YET.get(name, name)} is not available yet; {_CHOICES}")
    by_class = {kind.te_name: kind for kind in RECIPES.values()}
    kind = {**by_class, **RECIPES}.get(name) if isinstance(name, str) else None
    if kind is None:
        unknown = "has no 'name'" if name is None else "unknown"
        raise RecipeError(f"recipe={given!r}: {unknown}; {_CHOICES}")
    allowed = [field.name for field in _parameters(kind)]
    for parameter in parameters:
        if parameter not in allowed:
            raise RecipeError(
                f"recipe={given!r}: {name!r} has no parameter {parameter!r}"
                f"{did_you_mean(str(parameter), allowed)} It has {', '.join(allowed)}"
            )
    return kind(**parameters)


def _from_transformer_engine(value: object) -> Recipe:
    """The same recipe as one of Transformer Engine's objects, known by class name; its package is not imported."""
    te_name = type(value).__name__
    if te_name in _NOT_YET.values():
        raise RecipeError(f"recipe={value!r}: {te_name} is not available yet; {_CHOICES}")
    for kind in RECIPES.values():
        if kind.te_name == te_name:
            names = [field.name for field in _parameters(kind) if hasattr(value, field.name)]
            parameters = {name: getattr(value, name) for name in names}
            if hasattr(value, "fp8_quant_fwd_inp") and "amax_epsilon" in {field.name for field in _parameters(kind)}:
                parameters["amax_epsilon"] = value.fp8_quant_fwd_inp.amax_epsilon
            return kind(**parameters)
    raise RecipeError(f"recipe={value!r}: unknown; {_CHOICES}")


# --- validation: every message names the field, the value and what is allowed --------------------------------------


def _parameters(kind: type[Recipe]) -> tuple[Field[Any], ...]:
    """The dataclass fields of a concrete recipe."""
    return fields(kind)


def _as_format(value: object) -> Format:
    """A Format, its name with or without ``Format.``, or Transformer Engine's format of the same name."""
    name = value.removeprefix("Format.") if isinstance(value, str) else getattr(value, "name", None)
    for each in Format:
        if each.name == name:
            return each
    allowed = ", ".join(f"Format.{each}" for each in Format.__members__)
    raise RecipeError(f"fp8_format={value!r}: choose one of {allowed}")


def _as_integer(field: str, value: Any, smallest: int, largest: int) -> int:
    """An integer of Python's, for one of any kind, NumPy's among them."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or not smallest <= value <= largest:
        raise RecipeError(f"{field}={value!r}: must be an integer from {smallest} to {largest}")
    return int(value)


def _require_arguments(field: str, function: object, names: str) -> None:
    """A function of the user's must take ``names``, in their order; a name of ours stands for one that does."""
    if not callable(function):
        return
    try:
        inspect.signature(function).bind(*names.split(", "))
    except TypeError as error:
        raise RecipeError(f"{field}={function!r}: must take ({names}), but {error}") from None
    except ValueError:  # some builtins have no signature
        pass


def _require_bool(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RecipeError(f"{field}={value!r}: must be True or False")


def _require_attention_fields(fp8_dpa: object, fp8_mha: object) -> None:
    _require_bool("fp8_dpa", fp8_dpa)
    _require_bool("fp8_mha", fp8_mha)
    if fp8_mha:
        raise RecipeError(
            "fp8_mha=True: FP8 tensors into and out of attention are not available; only False is allowed. "
            "fp8_dpa=True computes attention itself in FP8"
        )


def _checked_result(field: str, result: object, like: Tensor) -> Tensor:
    """What a user's function returned, which must be one fp32-able number per tensor on the same device."""
    if not isinstance(result, Tensor) or result.shape != like.shape or result.device != like.device:
        got = f"{list(result.shape)} on {result.device}" if isinstance(result, Tensor) else type(result).__name__
        raise RecipeError(f"{field} returned {got}: must return a tensor {list(like.shape)} on {like.device}")
    return result.to(like.dtype)


def _value_text(value: object) -> str:
    """A parameter's value as :meth:`Recipe.key` writes it."""
    if isinstance(value, Format):
        return value.name
    return callable_key(value) if callable(value) else str(value)
