"""What an attention is called in the model at hand.

A linear has its weight to tell which module it is. Attention has none: it goes by the module that it ran in, which
Dynamo knows below the captured function alone, and for the block that was captured alone, while its graph may run for
equal blocks as well. Parameters of the same graph close both gaps.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from te_compile.passes.names import KnownNames, input_name, own_variable
from te_compile.passes.plan import Attention, Plan


def attention_name(
    attention: Attention, plan: Plan, parameters: Mapping[str, nn.Parameter], names: KnownNames | None
) -> str:
    """The name of ``attention`` in one run of its graph, whose parameters are ``parameters``."""
    if names is None:
        return attention.name
    name = names.name(attention.node, None)
    if not name and not attention.node.meta.get("nn_module_stack"):
        name = _captured_module(plan, names)
    return _moved(name, plan, parameters, names) if name else attention.name


def _captured_module(plan: Plan, names: KnownNames) -> str:
    """The module whose forward was captured: what the model's names of parameters have before the graph's own."""
    own = {graph: own_variable(graph) for graph in {placeholder.graph for placeholder in plan.parameters}}
    for placeholder, parameter in plan.parameters.items():
        inside = f".{input_name(placeholder, own[placeholder.graph])}"
        for alias in names.aliases.get(id(parameter), ()):
            if alias.endswith(inside):
                return alias.removesuffix(inside)
    return ""


def _moved(name: str, plan: Plan, parameters: Mapping[str, nn.Parameter], names: KnownNames) -> str:
    """``blocks.2.attn`` for ``blocks.0.attn``, where the parameters are those of block 2."""
    for placeholder, captured in plan.parameters.items():
        run = parameters.get(placeholder.name, captured)
        if run is captured or not {id(run), id(captured)} <= names.aliases.keys():
            continue
        old, new = _difference(names.aliases[id(captured)][0], names.aliases[id(run)][0])
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


def _difference(old: str, new: str) -> tuple[str, str]:
    """Two dotted names without the components in which they end alike."""
    olds, news = old.split("."), new.split(".")
    while olds and news and olds[-1] == news[-1]:
        olds, news = olds[:-1], news[:-1]
    return ".".join(olds), ".".join(news)
