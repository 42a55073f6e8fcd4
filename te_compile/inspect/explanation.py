"""``te_compile.explain``: what te_fp8 would make of a model, without making it.

The model is captured as ``torch.compile(model, backend="te_fp8")`` captures it, and each graph goes through the backend
itself, so nothing here can disagree with a real compilation. What the backend made is then dropped: the graphs run as
they were captured, and FP8 state, which only a call of the compiled graph makes, never comes to be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from traceback import FrameSummary
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.utils import counters
from torch.fx import GraphModule, Node

from te_compile import state
from te_compile.backend import te_fp8
from te_compile.compilers import only_traced
from te_compile.flat_parameters import parameter_of
from te_compile.inspect.attention_names import attention_name
from te_compile.inspect.attentions import AttentionRow
from te_compile.inspect.compiled_options import options_of
from te_compile.inspect.fusions import Use, implementations_in, uses_in
from te_compile.inspect.report import GraphPass, Report, Row
from te_compile.inspect.target import fresh, notes_on_writes, uncompiled, undisturbed
from te_compile.inspect.untouched import has_compiled_parts
from te_compile.options import Options
from te_compile.passes import manager
from te_compile.passes.manager import Compilation
from te_compile.passes.names import KnownNames, owner
from te_compile.passes.plan import Cause, Site

_IN_PLACE = (
    "Dynamo captures no {} that is compiled in place, for its forward is torch.nn's own: nothing of it runs in FP8; "
    "this is about torch.compile(model, …)"
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

    The model runs forward once, for a captured graph may depend on the results of another. Its attributes, the lists,
    dicts, sets and tensors that they hold, its buffers, the arguments, random numbers, FP8 state and everything that is
    compiled are afterwards as they were; other objects that attributes hold are not.
    """
    options = options_of(model) if options is None else options
    Options.resolve(options)  # for its errors, before options that are no dict are merged
    given = {**(options or {}), "strict": False}
    chosen = Options.resolve(given)
    target, names = uncompiled(model)
    look = _Look(given)
    if isinstance(target, nn.Module) and has_compiled_parts(target):
        look.notes.append("parts of the model are compiled by themselves; this is about the model compiled as a whole")
    if isinstance(model, nn.Module) and model._compiled_call_impl is not None and trace_rules.check(model.forward):
        look.notes.append(_IN_PLACE.format(type(model).__name__))
    look.run(target, args, kwargs)
    return _report(look, chosen, names, getattr(target, "__qualname__", type(target).__name__))


@dataclass(frozen=True)
class _Captured:
    """One graph: what the passes recorded, and the break that ended it, if one did."""

    compilation: Compilation
    ended_by: str
    runs: list[dict[str, nn.Parameter]] = field(default_factory=list)  # the parameters of each run by placeholder

    def parameters(self) -> list[dict[str, nn.Parameter]]:
        """Each set of parameters that the graph ran with, once: equal blocks may share one graph."""
        captured = {node.name: parameter for node, parameter in self.compilation.plan.parameters.items()}
        distinct = {tuple(map(id, each.values())): each for each in [captured, *self.runs]}
        return list(distinct.values())

    def multiplied(self) -> Iterator[nn.Parameter]:
        """The parameters of all runs that a product reads, or may read where the passes do not say which it is of."""
        read = {name for site in self.compilation.plan.sites for name in _placeholders_of(site)}
        for run in self.parameters():
            yield from (parameter for name, parameter in run.items() if name in read)


@dataclass
class _Look:
    """One run of the model with a backend of its own that keeps the passes' records."""

    options: dict[str, Any]
    captured: list[_Captured] = field(default_factory=list)
    breaks: dict[str, None] = field(default_factory=dict)
    changed: list[nn.Parameter] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _pending: list[_Captured] = field(default_factory=list)
    _counted: Counter[str] = field(default_factory=Counter)

    def backend(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Take the graph through te_fp8, remember what happened and run it as it is."""
        with manager.recording() as compilations, only_traced():
            te_fp8(gm, example_inputs, options=self.options)
        inputs = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        captured = _Captured(compilations[-1], self._ended_by(gm))
        self._pending.append(captured)

        def run(*args: Any) -> Any:
            named = zip(inputs, args, strict=True)
            parameters = ((name, parameter_of(each)) for name, each in named if isinstance(each, Tensor))
            captured.runs.append({name: each for name, each in parameters if each is not None})
            return gm.forward(*args)

        return run

    def run(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        backend = self.backend  # bound once: its identity marks our cache entries
        with ExitStack() as stack:
            args, kwargs = stack.enter_context(undisturbed(target, backend, args, kwargs, self.changed))
            counters["graph_break"].clear()
            stack.callback(self._keep_reasons)
            hook = register_bytecode_hook(self._accept)
            stack.callback(hook.remove)
            torch.compile(fresh(target), backend=backend)(*args, **kwargs)

    def _accept(self, code: CodeType, new_code: CodeType) -> None:
        """A frame is compiled. Dynamo may have begun it more than once; the last graph is the one that runs."""
        self.captured += self._pending[-1:]
        self._pending.clear()

    def _ended_by(self, gm: GraphModule) -> str:
        """Why the graph ends where it does, and where that is in the user's source; "" at the end of a function."""
        new = counters["graph_break"] - self._counted
        self._counted = Counter(counters["graph_break"])
        reason = getattr(gm, "compile_subgraph_reason", None)
        if reason is None or not reason.graph_break:
            return ""
        text = reason.reason
        if text.startswith("step_unsupported") and new:  # Dynamo's word for "see what was counted"
            text = next(iter(new))
        return _gist(text) + (f", at {_place(reason.user_stack[-1])}" if reason.user_stack else "")

    def _keep_reasons(self) -> None:
        located = [each.ended_by for each in self.captured if each.ended_by]
        self.breaks.update(dict.fromkeys(located))
        for gist in map(_gist, counters["graph_break"]):
            if not any(each.startswith(gist) for each in located):
                self.breaks[gist] = None


def _gist(reason: str) -> str:
    """The explanation in a reason of Dynamo's; the rest is a headline that says less, and advice."""
    first, *others = (line.strip() for line in reason.splitlines())
    if first.startswith("generic_jump"):
        return "a branch on the value of a tensor"
    explained = next((line.removeprefix("Explanation:") for line in others if line.startswith("Explanation:")), "")
    return (explained.strip() or first).rstrip(".")


def _place(frame: FrameSummary) -> str:
    """``transformers/models/gpt2/modeling_gpt2.py:700 in forward``."""
    file = frame.filename.rpartition("site-packages/")[2]
    file = str(Path(file).relative_to(Path.cwd())) if Path(file).is_relative_to(Path.cwd()) else file
    return f"{file}:{frame.lineno} in {frame.name}"


# --- what was found ------------------------------------------------------------------------------------------------


def _report(look: _Look, chosen: Options, names: KnownNames | None, model: str) -> Report:
    compilations = [each.compilation for each in look.captured]
    chosen_implementations: Counter[tuple[str, str]] = Counter()
    declined: set[str] = set()
    rows: list[Row] = []
    attentions: list[AttentionRow] = []
    notes = list(look.notes)
    for captured in look.captured:
        for parameters in captured.parameters():
            rows += _rows(captured.compilation, parameters, chosen, names)
            attentions += _attentions(captured.compilation, parameters, names)
    for compilation in compilations:
        if compilation.joint is not None:
            counts, reasons = implementations_in(compilation.joint)
            chosen_implementations += counts
            declined |= reasons
        for group in compilation.plan.groups:  # quantised outside of the graph
            chosen_implementations["te::quantize_weights", group.implementations["quantize_weights"]] += 1
            declined.update(group.declined)
    by_operator: dict[str, dict[str, int]] = {}
    for (operator, name), count in chosen_implementations.items():
        by_operator.setdefault(operator, {})[name] = count
    if not compilations:
        notes.append("torch.compile captured no graph, so nothing was looked at")
    notes += notes_on_writes(look.changed, names)
    notes += _names_that_differ(compilations, names)
    selectable = [site.name for compilation in compilations for site in compilation.plan.sites]
    if chosen.recipe.fp8_dpa:
        selectable += [each.name for compilation in compilations for each in compilation.plan.attentions]
    what = "linear or attention" if chosen.recipe.fp8_dpa else "linear"
    notes += [f"{pattern} fits no {what} of this call" for pattern in chosen.idle_patterns(selectable) if compilations]
    notes += _never_captured(look.captured, names)
    return Report(
        rows=tuple(rows),
        recipe=chosen.recipe.name,
        training=torch.is_grad_enabled(),
        totals=_totals(rows, len(compilations)),
        graphs=tuple(tuple(_passes(compilation)) for compilation in compilations),
        breaks=tuple(look.breaks),
        implementations=by_operator,
        declined=tuple(sorted(declined)),
        skipped=_skipped(names),
        notes=tuple(notes),
        model=model,
        attentions=tuple(attentions),
    )


def _skipped(names: KnownNames | None) -> dict[str, dict[str, int]]:
    counts = state.skipped_counts(names.model) if names is not None else {}
    return {name: by_role for name, by_role in counts.items() if any(by_role.values())}


def _rows(
    compilation: Compilation, parameters: dict[str, nn.Parameter], chosen: Options, names: KnownNames | None
) -> Iterator[Row]:
    uses = uses_in(compilation.joint) if compilation.joint is not None else {}
    waiting = {name: iter(each) for name, each in uses.items()}
    for site in compilation.plan.sites:
        is_fp8 = site.status == "fp8"
        use = next(waiting.get(site.name, iter(())), None) if is_fp8 else None
        use = use or Use(site.name)
        yield Row(
            name=_name(site, compilation, names, parameters),
            shape=(site.tokens, *site.features),
            form=site.form,
            status=site.status,
            reason=site.reason,
            fused=use.fused,
            recipe=chosen.recipe.name if is_fp8 else "",
            implementation=use.implementation,
            padding=site.padding,
            cause=site.cause.name.lower() if site.cause is not None else "",
        )


def _name(
    site: Site, compilation: Compilation, names: KnownNames | None, parameters: dict[str, nn.Parameter] | None = None
) -> str:
    """The name in the model at hand; what the backend, which has no model, calls it where there is none.

    parameters: those of one run. Where they are not the captured ones, the graph is another block's, and only they
    tell which.
    """
    if names is None:
        return site.name
    placeholder = site.root_weight or site.weight
    captured = compilation.plan.parameters.get(placeholder) if placeholder is not None else None
    run = parameters.get(placeholder.name) if parameters and placeholder is not None else None
    if run is not None and run is not captured and id(run) in names.aliases:
        return owner(names.aliases[id(run)][0])
    return names.name(site.node, captured) or site.name


def _attentions(
    compilation: Compilation, parameters: dict[str, nn.Parameter], names: KnownNames | None
) -> Iterator[AttentionRow]:
    for each in compilation.plan.attentions:
        yield AttentionRow(
            name=attention_name(each, compilation.plan, parameters, names),
            status=each.status,
            reason=each.reason,
            mask=each.mask,
            mask_reason=each.mask_reason,
            heads=each.heads,
            heads_reason=each.heads_reason,
            precision=each.precision,
            precision_reason=each.precision_reason,
            kernel=each.kernel,
        )


def _placeholders_of(site: Site) -> set[str]:
    """The inputs of the graph that the weight of a product is, or is made from."""
    if site.root_weight is not None:
        return {site.root_weight.name}
    waiting, seen = [(site.weight or site.node, site.region)], set[Node]()
    while waiting:
        node, region = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder" and region.parent is not None and region.call is not None:
            waiting.append((region.call, region.parent))
        waiting += [(each, region) for each in node.all_input_nodes]
    return {node.name for node in seen if node.op == "placeholder"}


def _never_captured(looked_at: Sequence[_Captured], names: KnownNames | None) -> Iterator[str]:
    """Linear modules whose weight no graph multiplies anything by, though it may have it: a break may have left them to
    Python, or this call needs them not."""
    if names is None:
        return
    seen = {id(each) for captured in looked_at for each in captured.multiplied()}
    missing = [
        names.modules[id(module)]
        for module in names.model.modules()
        if (weight := dict(module.named_parameters(recurse=False)).get("weight")) is not None
        and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        and id(weight) not in seen
    ]
    if missing:
        some = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        yield f"in no captured graph, so in high precision if this call runs them at all: {some}"


def _names_that_differ(compilations: Sequence[Compilation], names: KnownNames | None) -> Iterator[str]:
    """Patterns of ``include`` and ``exclude`` are matched by the backend, which sees less after a graph break."""
    for compilation in compilations:
        for site in compilation.plan.sites:
            name = _name(site, compilation, names)
            if name != site.name:
                yield f"include and exclude know {name} as {site.name}, for it follows a graph break"
                break  # one a graph tells enough


def _totals(rows: Sequence[Row], graphs: int) -> dict[str, int]:
    """Counts of linears, and forward FLOPs of all, of those that FP8 is meant for, and of those that run in it."""
    causes = [each.name.lower() for each in Cause]
    count = {cause: sum(row.cause == cause for row in rows) for cause in ("", *causes)}
    flops = {cause: sum(row.flops for row in rows if row.cause == cause) for cause in ("", *causes)}
    return {
        "linears": len(rows),
        "fp8": count[""],
        "kept": len(rows) - count[""],
        **{f"kept_{'by_' if cause != 'unsupported' else ''}{cause}": count[cause] for cause in causes},
        "graphs": graphs,
        "linear_flops": sum(flops.values()),
        "eligible_flops": flops[""] + flops["unsupported"],
        "fp8_flops": flops[""],
    }


def _passes(compilation: Compilation) -> Iterator[GraphPass]:
    for record in compilation.passes:
        yield GraphPass(record.name, record.before, record.after, record.count, 1e3 * record.seconds)
