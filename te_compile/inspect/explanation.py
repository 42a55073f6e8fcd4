"""``te_compile.explain``: what te_fp8 would make of a model, without making it.

The model is captured as ``torch.compile(model, backend="te_fp8")`` captures it, and each graph goes through the backend
itself, so nothing here can disagree with a real compilation. What the backend made is then dropped: the graphs run as
they were captured, and FP8 state, which only a call of the compiled graph makes, never comes to be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from torch._dynamo import trace_rules

from te_compile import state
from te_compile.inspect.attentions import AttentionRow
from te_compile.inspect.captured_graphs import Look
from te_compile.inspect.compiled_options import options_of
from te_compile.inspect.fusions import implementations_in
from te_compile.inspect.report import Report, Row
from te_compile.inspect.report_rows import attention_rows, graph_passes, linear_rows, name_in_model, totals_of
from te_compile.inspect.target import notes_on_writes, uncompiled
from te_compile.inspect.untouched import has_compiled_parts
from te_compile.options import Options
from te_compile.passes.manager import Compilation
from te_compile.passes.names import KnownNames, owner

_IN_PLACE = (
    "Dynamo captures no {} that is compiled in place, for its forward is torch.nn's own, which leaves in high "
    "precision: {}; this is about torch.compile(model, …)"
)


def explain(
    model: nn.Module | Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any
) -> Report:
    """Report which linears of ``model`` te_fp8 puts in FP8 when called like this, which not, and why.

    model: a module or function, compiled already or not, in the mode (train or eval) to be looked at.
    args, kwargs: an example call. Whether gradients are enabled decides between training and inference, as in a real
        call; the backward pass is part of the report and is not run.
    options: as for ``torch.compile(model, backend="te_fp8", options=…)``; None for those that ``model`` was compiled
        with, if it was. ``strict`` raises nothing here.

    The model runs forward once, for a captured graph may depend on the results of another; one of a class of torch.nn's
    that is compiled in place runs once more, for less of it may be captured then. Its attributes, the lists, dicts,
    sets and tensors that they hold, its buffers and hooks, the arguments, random numbers, FP8 state and everything that
    is compiled are afterwards as they were; other objects that attributes hold are not.
    """
    options = options_of(model) if options is None else options
    Options.resolve(options)  # for its errors, before options that are no dict are merged
    given = {**(options or {}), "strict": False}
    chosen = Options.resolve(given)
    target, names = uncompiled(model)
    look = Look(given)
    if isinstance(target, nn.Module) and has_compiled_parts(target):
        look.notes.append("parts of the model are compiled by themselves; this is about the model compiled as a whole")
    look.run(target, args, kwargs)
    if target is model and _is_torchs_in_place(target):
        look.notes += _left_in_place(look, target, args, kwargs)
    return _report(look, chosen, names, getattr(target, "__qualname__", type(target).__name__))


def _is_torchs_in_place(target: nn.Module | Callable[..., Any]) -> TypeGuard[nn.Module]:
    """Is it a module that is compiled in place, with a forward whose frames Dynamo passes over?"""
    if not isinstance(target, nn.Module):
        return False
    return target._compiled_call_impl is not None and trace_rules.check(target.forward)


def _left_in_place(look: Look, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    """What no graph holds where ``model`` runs as ``model.compile(…)`` made it, though a graph in ``look`` does.

    It has to be tried: Dynamo passes over frames of torch.nn's own, but not in newer versions over one that is compiled
    itself, and in none over those with hooks, or over modules of the user's own further in.
    """
    in_place = Look(look.options)
    in_place.run(model._call_impl, args, kwargs)
    left = _multiplied(look) - _multiplied(in_place)
    names = [owner(name) for name, each in model.named_parameters() if id(each) in left]
    if names:
        yield _IN_PLACE.format(type(model).__name__, _some(names))


def _multiplied(look: Look) -> set[int]:
    """The ids of the parameters that products read."""
    return {id(each) for captured in look.captured for each in captured.multiplied()}


def _report(look: Look, chosen: Options, names: KnownNames | None, model: str) -> Report:
    """What was seen in ``look`` as a report; ``model``: what was looked at."""
    compilations = [each.compilation for each in look.captured]
    rows: list[Row] = []
    attentions: list[AttentionRow] = []
    for captured in look.captured:
        for parameters in captured.parameters():
            rows += linear_rows(captured.compilation, parameters, chosen, names)
            attentions += attention_rows(captured.compilation, parameters, names)
    implementations, declined = _implementations(compilations)
    return Report(
        rows=tuple(rows),
        recipe=chosen.recipe.name,
        training=torch.is_grad_enabled(),
        totals=totals_of(rows, len(compilations)),
        graphs=tuple(tuple(graph_passes(compilation)) for compilation in compilations),
        breaks=tuple(look.breaks),
        implementations=implementations,
        declined=tuple(sorted(declined)),
        skipped=_skipped(names),
        notes=tuple(_notes(look, chosen, names)),
        model=model,
        attentions=tuple(attentions),
    )


def _implementations(compilations: Sequence[Compilation]) -> tuple[dict[str, dict[str, int]], set[str]]:
    """How often each implementation of each operator was chosen, and why others were declined."""
    chosen: Counter[tuple[str, str]] = Counter()
    declined: set[str] = set()
    for compilation in compilations:
        if compilation.joint is not None:
            counts, reasons = implementations_in(compilation.joint)
            chosen += counts
            declined |= reasons
        for group in compilation.plan.groups:  # quantised outside of the graph
            chosen["te::quantize_weights", group.implementations["quantize_weights"]] += 1
            declined.update(group.declined)
    by_operator: dict[str, dict[str, int]] = {}
    for (operator, name), count in chosen.items():
        by_operator.setdefault(operator, {})[name] = count
    return by_operator, declined


def _notes(look: Look, chosen: Options, names: KnownNames | None) -> Iterator[str]:
    """What else a reader should know."""
    compilations = [each.compilation for each in look.captured]
    yield from look.notes
    if not compilations:
        yield "torch.compile captured no graph, so nothing was looked at"
    if chosen.skip_passes:
        yield f"passes left out, as asked: {', '.join(chosen.skip_passes)}"
    yield from notes_on_writes(look.changed, names)
    yield from _names_that_differ(compilations, names)
    selectable = [site.name for compilation in compilations for site in compilation.plan.sites]
    if chosen.recipe.fp8_dpa:
        selectable += [each.name for compilation in compilations for each in compilation.plan.attentions]
    what = "linear or attention" if chosen.recipe.fp8_dpa else "linear"
    yield from (
        f"{pattern} fits no {what} of this call" for pattern in chosen.idle_patterns(selectable) if compilations
    )
    yield from _never_captured(look, names)


def _skipped(names: KnownNames | None) -> dict[str, dict[str, int]]:
    counts = state.skipped_counts(names.model) if names is not None else {}
    return {name: by_role for name, by_role in counts.items() if any(by_role.values())}


def _never_captured(look: Look, names: KnownNames | None) -> Iterator[str]:
    """What multiplies in no graph: a break may have left it to Python, or this call needs it not. Those are linear
    modules whose weight no graph multiplies anything by, though it may have it, and matrices of modules of the user's
    own, as experts are, that none has."""
    if names is None:
        return
    multiplied, read = _multiplied(look), {id(each) for captured in look.captured for each in captured.read()}
    missing = []
    for module in names.model.modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            if "weight" in own and id(own["weight"]) not in multiplied:
                missing.append(names.modules[id(module)])
        elif not _is_torchs(module):
            missing += [names.aliases[id(each)][0] for each in own.values() if _is_wide(each) and id(each) not in read]
    if missing:
        yield f"in no captured graph, so in high precision if this call runs them at all: {_some(missing)}"


_LEAST_WIDTH = 16
"""Of a matrix that a linear may multiply by: tokens that a model learns, and biases of scores, are narrower."""


def _is_wide(parameter: nn.Parameter) -> bool:
    """May it be a matrix, or a batch of them, that activations are multiplied by?"""
    return parameter.dim() >= 2 and parameter.is_floating_point() and min(parameter.shape[-2:]) >= _LEAST_WIDTH


def _is_torchs(module: nn.Module) -> bool:
    """Is it, or is it made from, a module of torch.nn's that is no container: an embedding, say, or an LSTM?"""
    kinds = (kind.__module__ for kind in type(module).__mro__ if kind is not nn.Module)
    return any(kind.startswith("torch.nn.") and kind != nn.ModuleList.__module__ for kind in kinds)


def _some(names: Sequence[str]) -> str:
    """The first of ``names``, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _names_that_differ(compilations: Sequence[Compilation], names: KnownNames | None) -> Iterator[str]:
    """Patterns of ``include`` and ``exclude`` are matched by the backend, which sees less after a graph break."""
    for compilation in compilations:
        for site in compilation.plan.sites:
            name = name_in_model(site, compilation, names)
            if name != site.name:
                yield f"include and exclude know {name} as {site.name}, for it follows a graph break"
                break  # one a graph tells enough
