"""What the passes recorded of a graph, as rows, passes and totals of a report, by the names in the user's model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from te_compile.inspect.attention_names import attention_name
from te_compile.inspect.attentions import AttentionRow
from te_compile.inspect.fusions import Use, uses_in
from te_compile.inspect.report import GraphPass, Row
from te_compile.options import Options
from te_compile.passes.manager import Compilation
from te_compile.passes.names import KnownNames, owner
from te_compile.passes.plan import Cause, Site


def linear_rows(
    compilation: Compilation, parameters: dict[str, nn.Parameter], chosen: Options, names: KnownNames | None
) -> Iterator[Row]:
    """The linears of one graph, in one run of it, whose parameters are ``parameters``."""
    uses = uses_in(compilation.joint) if compilation.joint is not None else {}
    waiting = {name: iter(each) for name, each in uses.items()}
    for site in compilation.plan.sites:
        is_fp8 = site.status == "fp8"
        use = next(waiting.get(site.name, iter(())), None) if is_fp8 else None
        use = use or Use(site.name)
        yield Row(
            name=name_in_model(site, compilation, names, parameters),
            shape=(site.rows, *site.features),
            form=site.form,
            status=site.status,
            reason=site.reason,
            fused=use.fused,
            recipe=chosen.recipe.name if is_fp8 else "",
            implementation=use.implementation,
            padding=site.padding,
            cause=site.cause.name.lower() if site.cause is not None else "",
        )


def name_in_model(
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


def attention_rows(
    compilation: Compilation, parameters: dict[str, nn.Parameter], names: KnownNames | None
) -> Iterator[AttentionRow]:
    """The attentions of one graph, in one run of it, whose parameters are ``parameters``."""
    for each in compilation.plan.attentions:
        yield AttentionRow.of(each, attention_name(each, compilation.plan, parameters, names))


def totals_of(rows: Sequence[Row], graphs: int) -> dict[str, int]:
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


def graph_passes(compilation: Compilation) -> Iterator[GraphPass]:
    """Each pass that ran over a graph, in their order."""
    for record in compilation.passes:
        yield GraphPass(record.name, record.before, record.after, record.count, 1e3 * record.seconds)
