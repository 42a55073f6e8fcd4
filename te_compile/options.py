"""What ``options=`` accepts, checked before anything is compiled.

An option may be given in three places; the earlier one wins:

    torch.compile(model, backend="te_fp8", options={"recipe": "current"})       this model
    te_compile.configure(recipe="current")                                      this process
    TE_COMPILE_RECIPE=current python train.py                                   this run, when the code is not yours

==========================  ==========  ================================================================================
option                      default     meaning
==========================  ==========  ================================================================================
``recipe``                  "delayed"   a name, a dict, a recipe object: see ``te_compile.recipe``
``include``                 everything  which linears may go to FP8, by module name
``exclude``                 nothing     which may not
``lm_head``                 False       may the projection to logits go to FP8?
``strict``                  False       is an eligible linear that stays in high precision an error?
``compiler``                "inductor"  "aot_eager" runs the rewritten graph as it is: debugging, fast tests
``cost_model``              True        on a GPU, leave linears alone that are too small to gain, and attention that is
                                        spelled out where no fused kernel is faster
``cache_weights``           True        keep FP8 copies of weights from call to call while the weights stay the same;
                                        else each product quantises its weight for itself, and no copy outlives it
``save_memory``             False       the smallest peak in training: transposed FP8 copies of activations are made in
                                        the backward pass where it can make them, and those of weights are not kept
                                        (``cache_weights`` is False)
``defer_logits``            True        gradients of logits that are returned beside a loss are made only for who asks
``accumulate_in_products``  True        weight gradients are added by their products where ``.grad`` holds one already
``overwrite_logits``        True        the gradient of logits takes their memory where nothing else holds it any more
``skip_passes``             none        passes that are left out, by the names in docs/passes.md: to find the one that a
                                        fault comes from, or for a model that one of them cannot take
``mode``                    None        torch.compile's modes, here too because torch allows either mode or options
any Inductor option                     passed through, as by the Inductor backend: ``triton.cudagraphs``, say
==========================  ==========  ================================================================================

``include`` and ``exclude`` take a glob pattern ("*.proj"), several ("*.proj,*lm_head*" or a list), or a function
``(name, info) -> bool``, where ``name`` is the linear's module name and ``info`` what the caller knows about it. A
pattern that fits a module fits everything inside it. Where the recipe puts attention in FP8 (``fp8_dpa=True``) patterns
decide about it too, by the module that it runs in. ``None`` always means "not given here".
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, cast, get_origin

from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch.utils._config_module import ConfigModule

from te_compile.function_keys import callable_key
from te_compile.optional_passes import OPTIONAL_PASSES
from te_compile.recipe import DelayedScaling, Recipe, RecipeError, did_you_mean, resolve

ENVIRONMENT_PREFIX = "TE_COMPILE_"
# Variables with our prefix that are no options: where to dump graphs, how to build csrc/, how to time GEMMs.
OTHER_VARIABLES = (
    "TE_COMPILE_DEBUG",
    "TE_COMPILE_NATIVE",
    "TE_COMPILE_CUDA_ARCHS",
    "TE_COMPILE_GEMM_CANDIDATES",
    "TE_COMPILE_GEMM_CACHE",
    "TE_COMPILE_PYTHON",
)
COMPILERS = ("inductor", "aot_eager")

Selector: TypeAlias = tuple[str, ...] | Callable[[str, Any], bool]


class OptionError(ValueError):
    """An option that does not exist or has no such value; the message names it, the value and what is allowed."""


@dataclass(frozen=True)
class Options:
    """All options of one compilation, validated and with every default filled in; the module says what each means."""

    recipe: Recipe = field(default_factory=DelayedScaling)
    include: Selector | None = None
    exclude: Selector = ()
    lm_head: bool = False
    strict: bool = False
    compiler: str = "inductor"
    cost_model: bool = True
    cache_weights: bool = True
    save_memory: bool = False
    defer_logits: bool = True
    accumulate_in_products: bool = True
    overwrite_logits: bool = True
    skip_passes: tuple[str, ...] = ()
    mode: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)  # Inductor's own options by their full names

    def __post_init__(self) -> None:
        own = {name: getattr(self, name) for name in _CHECKS}
        for name, value in (_defaults() | _checked(own)).items():
            object.__setattr__(self, name, value)
        if self.save_memory:
            object.__setattr__(self, "cache_weights", False)

    @staticmethod
    def resolve(call_options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
        """The options of a ``torch.compile`` call: its own, then :func:`configure`'s, then the environment's."""
        call = _checked({} if call_options is None else call_options)
        if mode is not None and call.setdefault("mode", asked := _as_mode("mode", mode)) != asked:
            raise OptionError(
                f"mode={mode!r} and options['mode']={(call_options or {})['mode']!r}: give one, or both the same"
            )
        given: dict[str, Any] = {}
        for layer in (_from_environment(os.environ), _configured, call):
            given = _over(given, layer)
        own = {name: given.pop(name) for name in _CHECKS if name in given}
        return Options(**own, inductor=given)

    def why_excluded(self, name: str, info: Any = None, local_name: str = "") -> str | None:
        """Why ``include`` or ``exclude`` keep the linear of module ``name`` in high precision; None if they do not.

        local_name: what it is called where it was captured, if that is something else; patterns may fit either.
        """
        pattern = _selected_by(self.exclude, name, info, local_name)
        if pattern is not None:
            return f"exclude {pattern}; take that out to allow FP8"
        if self.include is not None and _selected_by(self.include, name, info, local_name) is None:
            return "not matched by include; add its name there to allow FP8"
        return None

    def why_attention_excluded(self, name: str) -> str | None:
        """The same for the attention of module ``name``. Functions are not asked: they judge linears."""
        include = self.include if isinstance(self.include, tuple) else None
        exclude = self.exclude if isinstance(self.exclude, tuple) else ()
        return Options(include=include, exclude=exclude).why_excluded(name)

    def idle_patterns(self, names: Collection[str]) -> list[str]:
        """The patterns that fit none of the linears ``names``, most likely misspelt: ``exclude pattern '*.porj'``."""
        given = {"include": self.include, "exclude": self.exclude}
        patterns = [(field, each) for field, value in given.items() if isinstance(value, tuple) for each in value]
        return [
            f"{field} pattern {pattern!r}"
            for field, pattern in patterns
            if not any(_selected_by((pattern,), name, None) for name in names)
        ]

    def key(self) -> str:
        """All options in one line, for cache keys: equal exactly for options that compile alike."""
        values = [f"{each.name}={_key_of(getattr(self, each.name))}" for each in fields(self)]
        return "; ".join(values)


def _defaults() -> dict[str, Any]:
    """What each option is where it is not given, or given as None."""
    own = [each for each in fields(Options) if each.name in _CHECKS]
    return {each.name: each.default if each.default_factory is MISSING else each.default_factory() for each in own}


def _modules_around(name: str) -> list[str]:
    """The module of this name last, those that it is in before."""
    parts = name.split(".") if name else []
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _selected_by(selector: Selector, name: str, info: Any, local_name: str = "") -> str | None:
    """What in ``selector`` fits the module ``name`` or a module around it, as reports show it; None if nothing does."""
    if not isinstance(selector, tuple):
        return _chosen_by(selector, name, info)
    around = [*_modules_around(name), *_modules_around(local_name)]
    for pattern in selector:
        if any(fnmatchcase(each, pattern) for each in around):
            return f"pattern {pattern!r}"
    return None


def _chosen_by(function: Callable[[str, Any], bool], name: str, info: Any) -> str | None:
    called = f"function {getattr(function, '__name__', function)!r}"
    try:
        return called if function(name, info) else None
    except Exception as error:
        raise OptionError(f"{called} of include or exclude raised {error!r} for the linear {name!r}") from error


def _key_of(value: Any) -> str:
    """One value of :meth:`Options.key`."""
    if isinstance(value, Recipe):
        return value.key()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_key_of(value[name])}" for name in sorted(value)) + "}"
    return callable_key(value) if callable(value) else repr(value)


# --- process-wide defaults -----------------------------------------------------------------------------------------

_configured: dict[str, Any] = {}
_changes: list[Configuration] = []
"""All that make up ``_configured``, the oldest first. Each is taken back by itself: blocks of threads may overlap."""


class Configuration:
    """What :func:`configure` returns; as a context manager it takes the change back at the end of the block."""

    def __init__(self, forgotten: Collection[str], own: Mapping[str, Any]) -> None:
        self._forgotten, self._own = forgotten, own

    def __enter__(self) -> Configuration:
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Take this change back, and no other: what was configured before or since stays. A second time nothing is."""
        if self in _changes:
            _changes.remove(self)
            _configure_anew()

    def _over(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration ``given`` with this change."""
        return _over({name: value for name, value in given.items() if name not in self._forgotten}, self._own)


def configure(**options: Any) -> Configuration:
    """Set options for every later compilation of this process; a call's own options win over them.

    ``configure(recipe="current")`` lasts, ``with configure(recipe="current"):`` lasts for a block, and
    ``configure(recipe=None)`` forgets what was set for that one option. Inductor options with a dot in the name go in
    as ``configure(**{"triton.cudagraphs": True})``.
    """
    forgotten = {_own_or_inductor_name(name) for name, value in options.items() if value is None}
    change = Configuration(forgotten, _checked(options))
    change._over({})  # raises where two options exclude each other
    _changes.append(change)
    _configure_anew()
    return change


def _configure_anew() -> None:
    now: dict[str, Any] = {}
    for change in list(_changes):
        now = change._over(now)
    _configured.clear()
    _configured.update(now)


_EXCLUDE_EACH_OTHER = ("save_memory", "cache_weights")


def _over(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with ``own`` over it, which win: also over what they exclude. Raises if they exclude each other."""
    asked = [name for name in _EXCLUDE_EACH_OTHER if own.get(name)]
    if len(asked) > 1:
        raise OptionError("save_memory=True and cache_weights=True: copies that are kept are memory; give one of them")
    return {name: value for name, value in given.items() if not (asked and name in _EXCLUDE_EACH_OTHER)} | dict(own)


def configured() -> dict[str, Any]:
    """A copy of what :func:`configure` has set."""
    return dict(_configured)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The options that ``TE_COMPILE_*`` variables give; an empty variable gives none."""
    variables = {ENVIRONMENT_PREFIX + name.upper(): name for name in _CHECKS}
    known = [*variables, *OTHER_VARIABLES]
    given: dict[str, Any] = {}
    for variable, text in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in known:
            suggestion = did_you_mean(variable, known)
            raise OptionError(f"{variable}={text!r}: no such variable{suggestion} There are {', '.join(known)}")
        if variable in variables and text.strip():
            name = variables[variable]
            check = _truth_of if _CHECKS[name] is _as_bool else _CHECKS[name]
            given[name] = check(variable, text.strip())
    return given


# --- validation: each check takes the option's name, for its error, and the value ----------------------------------


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` validated, each value in its final form; those that are None are left out."""
    if not isinstance(options, Mapping):
        raise OptionError(f"options={options!r}: must be a dict of option names and values")
    checked = {}
    for given_name, value in options.items():
        name = _own_or_inductor_name(given_name)
        if value is not None:
            check = _CHECKS.get(name, _as_inductor_value)
            checked[name] = check(name, value)
    return checked


def _own_or_inductor_name(name: Any) -> str:
    """The full name of the option that a user calls ``name``; Inductor's may be written with dashes."""
    if name in _CHECKS:
        return name
    theirs = inductor_config.get_config_copy()
    if isinstance(name, str) and name.replace("-", "_") in theirs:
        return name.replace("-", "_")
    suggestion = did_you_mean(str(name), [*_CHECKS, *theirs])
    raise OptionError(
        f"options[{name!r}]: no such option{suggestion} There are {', '.join(_CHECKS)} and those of "
        "torch._inductor.list_options()"
    )


def _as_recipe(name: str, value: Any) -> Recipe:
    try:
        return resolve(value)
    except RecipeError as error:
        raise OptionError(f"{name}={value!r}: {error}" if name != "recipe" else str(error)) from None


def _as_selector(name: str, value: Any) -> Selector:
    """Patterns as a tuple, or the function."""
    if callable(value):
        _require_two_arguments(name, value)
        return value
    patterns = value.split(",") if isinstance(value, str) else value
    if isinstance(patterns, Sequence) and all(isinstance(pattern, str) and pattern.strip() for pattern in patterns):
        return tuple(pattern.strip() for pattern in patterns)
    raise OptionError(
        f"{name}={value!r}: must be a glob pattern on module names such as '*lm_head*', a list of them, "
        "or a function (name, info) -> bool"
    )


def _require_two_arguments(name: str, function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind("module.name", None)
    except TypeError as error:
        raise OptionError(f"{name}={function!r}: must take (name, info) and return a bool, but {error}") from None
    except ValueError:  # some builtins have no signature
        pass


def _as_bool(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise OptionError(f"{name}={value!r}: must be True or False")


def _truth_of(variable: str, text: str) -> bool:
    """The boolean that an environment variable spells."""
    truths = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() in truths:
        return truths[text.lower()]
    raise OptionError(f"{variable}={text!r}: must be 1 or 0 (or true/false, yes/no, on/off)")


def _as_passes(name: str, value: Any) -> tuple[str, ...]:
    """Names of passes that a graph can do without, each once."""
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, (list, tuple, set, frozenset)) or not all(isinstance(each, str) for each in given):
        raise OptionError(f"{name}={value!r}: must be the name of a pass such as 'fuse_producers', or a list of them")
    names = sorted({each.strip() for each in given if each.strip()})
    for each in names:
        if each not in OPTIONAL_PASSES:
            suggestion = did_you_mean(each, OPTIONAL_PASSES)
            allowed = ", ".join(OPTIONAL_PASSES)
            raise OptionError(f"{name}={value!r}: {each!r} cannot be left out{suggestion} These can: {allowed}")
    return tuple(names)


def _as_compiler(name: str, value: Any) -> str:
    return _one_of(name, value, COMPILERS)


def _as_mode(name: str, value: Any) -> str | None:
    chosen = _one_of(name, value, tuple(list_mode_options()))
    return None if chosen == "default" else chosen


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in allowed:
        return allowed[allowed.index(value)]  # not a subclass of str, whose text may be another
    raise OptionError(f"{name}={value!r}: choose one of {', '.join(map(repr, allowed))}")


def _as_inductor_value(name: str, value: Any) -> Any:
    """A value that Inductor's option ``name`` can hold, as far as its declared type tells."""
    declared = cast(ConfigModule, inductor_config).get_type(name)
    if isinstance(declared, type) and get_origin(declared) is None and not isinstance(value, declared):
        raise OptionError(f"{name}={value!r}: an Inductor option of type {declared.__name__}")
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "recipe": _as_recipe,
    "include": _as_selector,
    "exclude": _as_selector,
    "lm_head": _as_bool,
    "strict": _as_bool,
    "compiler": _as_compiler,
    "cost_model": _as_bool,
    "cache_weights": _as_bool,
    "save_memory": _as_bool,
    "defer_logits": _as_bool,
    "accumulate_in_products": _as_bool,
    "overwrite_logits": _as_bool,
    "skip_passes": _as_passes,
    "mode": _as_mode,
}
