"""``te_compile.stats``: the figures of every tensor that is quantised, with or without a step to measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_compile import state
from te_compile.flat_parameters import has_flat_parameters
from te_compile.inspect.compiled_options import options_of
from te_compile.inspect.measurement import Measuring, measure
from te_compile.inspect.statistics import Statistics, TensorStatistics, figures, statistics_of, summed
from te_compile.inspect.target import notes_on_writes
from te_compile.options import Options
from te_compile.parameter_names import unwrapped
from te_compile.passes.names import KnownNames, owner
from te_compile.recipe import Recipe
from te_compile.runtime import history_length


def stats(
    model: nn.Module | Callable[..., Any],
    *args: Any,
    options: dict[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    **kwargs: Any,
) -> Statistics:
    """How well FP8 holds the numbers of ``model``: amax, scale, headroom and skipped amaxes of every x, w and gradient.

    model: what ``torch.compile`` made or was given.
    args, kwargs: an example call, if every tensor is to be measured: how much of it underflows and saturates, and the
        error of quantising it. One step then runs beside the real ones, operator by operator, with the scales of this
        moment. The model, its gradients, FP8 state and random numbers are afterwards as they were. Without a call the
        figures come from the FP8 state, and only weights are measured.
    options: as for ``torch.compile(model, backend="te_fp8", options=…)``: the recipe says what the state means. None
        for those that ``model`` was compiled with, if it was.
    loss: makes the number to take gradients of from what the model returns; by default its ``loss``, or itself. Under
        ``torch.no_grad()`` the forward alone is measured.

    Raises ValueError where there is no such number or parameters are sharded over ranks, and TypeError for a model that
    is neither module nor function.
    """
    chosen = Options.resolve(options_of(model) if options is None else options)
    names = KnownNames(unwrapped(model)) if isinstance(model, nn.Module) else None
    if args or kwargs:
        if loss is not None and not callable(loss):
            raise TypeError(f"loss={loss!r}: must be a function of what the model returns, which gives one number")
        seen = measure(model, chosen, loss, args, kwargs)
        rows = _measured(seen, names, chosen.recipe)
        notes = [] if rows else ["no linear of this call runs in FP8; te_compile.explain says why"]
        notes += notes_on_writes(seen.changed, names)
        return Statistics(tuple(rows), chosen.recipe.name, measured=True, notes=tuple(notes))
    if names is None:
        raise TypeError(f"stats without an example call takes a module, not {type(model).__name__}")
    if loss is not None:
        raise TypeError("loss is what a measured step takes gradients of: give an example call with it")
    rows = _remembered(names, chosen.recipe)
    return Statistics(tuple(rows), chosen.recipe.name, notes=() if rows else (_why_nothing(chosen.recipe),))


def _why_nothing(recipe: Recipe) -> str:
    if not recipe.stateful:
        return f"recipe {recipe.name} keeps no state; give an example call to measure a step"
    return (
        f"no parameter has FP8 state for amax_history_len={history_length(recipe)}: call the compiled model first, "
        "name the recipe it was compiled with in options, or give an example call to measure a step"
    )


def _remembered(names: KnownNames, recipe: Recipe) -> list[TensorStatistics]:
    """From the state of each parameter; weights are measured, where they are whole and at hand."""
    rows: list[TensorStatistics] = []
    sharded = has_flat_parameters(names.model)
    for parameter in names.model.parameters():
        kept = state.existing_state(parameter, history_length(recipe)) if recipe.stateful else None
        if kept is None:
            continue
        name = names.aliases[id(parameter)][0]
        amaxes = kept.history[:, 0]
        table = torch.stack([kept.scale, kept.skipped, amaxes]).T.tolist()
        for role, (scale, skipped, amax) in zip(state.ROLES, table, strict=True):
            found = None
            if role == "w" and scale > 0 and not (sharded or parameter.is_meta):
                found = figures(parameter, kept.scale[1], recipe.fp8_format.forward)
            fp8_max = kept.gradient_max if role == "gradient" else recipe.fp8_format.forward_max
            rows.append(statistics_of(name, role, scale, fp8_max, int(skipped), amax or None, found))
    return rows


def _measured(seen: Measuring, names: KnownNames | None, recipe: Recipe) -> list[TensorStatistics]:
    rows = []
    several = _linears_by_weight(seen)
    for (key, linear, role), found in seen.found.items():
        parameter = seen.parameters[key]
        kept = state.existing_state(parameter, history_length(recipe)) if recipe.stateful else None
        skipped = int(kept.skipped[state.ROLES.index(role)]) if kept is not None else 0
        aliases = names.aliases.get(key) if names is not None else None
        name = aliases[0] if aliases else linear
        if aliases and len(several[key]) > 1 and linear != owner(name):  # one weight, several linears
            name = f"{name} in {linear}"
        scale = float(seen.scales[key, linear, role])
        rows.append(statistics_of(name, role, scale, _fp8_max(recipe, role), skipped, None, summed(found)))
    order = {name: index for index, name in enumerate(dict.fromkeys(row.name for row in rows))}
    return sorted(rows, key=lambda row: (order[row.name], state.ROLES.index(row.role)))


def _linears_by_weight(seen: Measuring) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for key, linear, _ in seen.found:
        found.setdefault(key, set()).add(linear)
    return found


def _fp8_max(recipe: Recipe, role: str) -> float:
    return recipe.fp8_format.backward_max if role == "gradient" else recipe.fp8_format.forward_max
