"""FP8 for unmodified PyTorch models: ``torch.compile(model, backend="te_fp8")``.

That call needs no import of this package. What is here is for looking in and for steering:

    te_compile.explain(model, *args)                    what would run in FP8, what not, and why
    te_compile.diff(before, after)                      what changed between two such reports
    te_compile.stats(model)                             is the scaling healthy: headroom, underflow, error
    te_compile.configure(recipe="current")              defaults for every later compilation
    te_compile.save_state(model, path), load_state      the FP8 state, to resume a training
    te_compile.reset_state(model)                       forget it, for weights of another training
    te_compile.refresh_weights(model)                   after weights were changed behind autograd's back

Everything is loaded when first used, so importing the package costs nothing and cannot fail.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from te_compile import accelerate_name

if TYPE_CHECKING:
    from te_compile.backend import te_fp8
    from te_compile.deferred_gradients import LostGradientError
    from te_compile.inspect import Difference, Report, Row, Statistics, diff, explain, stats
    from te_compile.options import OptionError, Options, configure
    from te_compile.passes.manager import PassError
    from te_compile.passes.plan import StrictError
    from te_compile.recipe import DelayedScaling, Float8CurrentScaling, Format, RecipeError
    from te_compile.state import StateError
    from te_compile.state_files import load_state, load_state_dict, save_state, state_dict
    from te_compile.state_reset import reset_state
    from te_compile.weight_cache import refresh_weights

    __version__: str

_HOME = {
    "te_fp8": "backend",
    "LostGradientError": "deferred_gradients",
    "explain": "inspect",
    "diff": "inspect",
    "stats": "inspect",
    "Difference": "inspect",
    "Statistics": "inspect",
    "Report": "inspect",
    "Row": "inspect",
    "configure": "options",
    "Options": "options",
    "OptionError": "options",
    "PassError": "passes.manager",
    "StrictError": "passes.plan",
    "Format": "recipe",
    "DelayedScaling": "recipe",
    "Float8CurrentScaling": "recipe",
    "RecipeError": "recipe",
    "save_state": "state_files",
    "load_state": "state_files",
    "state_dict": "state_files",
    "load_state_dict": "state_files",
    "reset_state": "state_reset",
    "refresh_weights": "weight_cache",
    "StateError": "state",
}

__all__ = [
    "DelayedScaling",
    "Difference",
    "Float8CurrentScaling",
    "Format",
    "LostGradientError",
    "OptionError",
    "Options",
    "PassError",
    "RecipeError",
    "Report",
    "Row",
    "StateError",
    "Statistics",
    "StrictError",
    "configure",
    "diff",
    "explain",
    "load_state",
    "load_state_dict",
    "refresh_weights",
    "reset_state",
    "save_state",
    "state_dict",
    "stats",
    "te_fp8",
]


accelerate_name.teach()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _version()
    elif name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("te-compile")
    except metadata.PackageNotFoundError:
        return "unknown"
