"""Decide which linears run in FP8, and for every other one, why not.

Nothing is rewritten here. Each rule is a function from a site to the reason it must stay in high precision; the first
that speaks decides. Three kinds of reason are kept apart, because strict mode objects to one of them alone: the user
asked for it, a rule protects the model's quality or speed, or te_fp8 lacks support. A reason says what the matter
is and, behind its last semicolon, what to change, or that there is nothing to do and why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

import torch
from torch.fx import Node

from te_compile.options import Options
from te_compile.passes.captured_nodes import value_of
from te_compile.passes.drop_unread_values import unread_values
from te_compile.passes.embedding_tables import by_lookup, embedding_tables
from te_compile.passes.fp8_support import RULES_OF_SUPPORT, by_size
from te_compile.passes.linear_cost import by_cost
from te_compile.passes.lm_heads import by_head, by_heads_beside
from te_compile.passes.plan import Cause, Plan, Site, Verdict
from te_compile.passes.routers import by_pick_alone, by_router, by_router_behind, module_around
from te_compile.passes.step_cost import too_dear_to_launch
from te_compile.passes.written_tensors import writes


def by_user(site: Site, options: Options) -> Verdict:
    """``include`` and ``exclude``."""
    reason = options.why_excluded(site.name, site, site.local_name)
    return (Cause.USER, reason) if reason else None


def by_readers(site: Site, options: Options, unread: Collection[Node] = ()) -> Verdict:
    """A result that nobody reads is not computed in high precision; in FP8 its scales would have it computed. Nor is
    what goes into such results alone, the other layers of a head that the model does not use. ``unread``: all those."""
    if site.node not in unread and (site.node.users or writes(site.node)):
        return None
    what = "what is made of its result" if site.node.users else "its result"
    return Cause.RULE, f"nobody reads {what}; nothing to do: it is not computed"


Rule: TypeAlias = Callable[..., Verdict]

RULES: tuple[Rule, ...] = (by_user, by_readers, by_lookup, by_head, by_router, by_pick_alone, *RULES_OF_SUPPORT)
"""Asked in this order, before what each would gain: what the user said first, support before speed."""

_WHATEVER_THE_SUPPORT = (by_user, by_readers, by_lookup, by_head, by_router, by_pick_alone, by_size)
"""Rules that would keep a linear in high precision even if te_fp8 supported it."""


def _may_speak(rule: Rule, site: Site) -> bool:
    """Is the verdict that ``site`` came with, if it has one, weaker than one of ``rule``?"""
    if site.cause is None:
        return True
    return rule in _WHATEVER_THE_SUPPORT and not (rule is by_size and site.cause is Cause.RULE)


def select_linears(plan: Plan, options: Options) -> int:
    """Give every site of ``plan`` its verdict; returns how many go to FP8."""
    tables, linears = embedding_tables(plan), {site.node for site in plan.sites}
    unread = {node for graph in {node.graph for node in linears} for node in unread_values(graph)}
    known: dict[Rule, tuple[Collection[Node | None], ...]] = {
        by_readers: (unread,), by_lookup: (tables,), by_head: (tables, linears), by_pick_alone: (linears,),
    }  # fmt: skip
    heads: list[Site] = []
    routers: list[Site] = []
    for site in plan.sites:
        for rule in RULES:
            if not _may_speak(rule, site):
                continue
            verdict = rule(site, options, *known.get(rule, ()))
            if verdict is not None:
                site.cause, site.reason = verdict
                heads += [site] if rule is by_head else []
                routers += [site] if rule is by_router else []
                break
    _by_others(plan, heads, routers, linears)
    for site, reason in by_cost(plan.selected, options):
        site.keep(Cause.RULE, reason)
    _one_device(plan)
    if options.cost_model and any(value_of(site.x).device.type == "cuda" for site in plan.selected):
        _only_what_the_step_gains_from(plan, options)
    return len(plan.selected)


def _by_others(plan: Plan, heads: list[Site], routers: list[Site], linears: set[Node]) -> None:
    """Keep what goes with ``heads`` or with ``routers``: that can be told once these are known."""
    for site in plan.selected:
        verdict = by_heads_beside(site, heads)
        if verdict is not None:
            site.cause, site.reason = verdict
    for_picks, modules = {site.node for site in routers}, {module_around(site) for site in routers}
    for site in reversed(plan.selected):
        verdict = by_router_behind(site, modules, linears, for_picks)
        if verdict is not None:
            site.cause, site.reason = verdict


def _only_what_the_step_gains_from(plan: Plan, options: Options) -> None:
    """Keep the linears whose launches cost the whole step more than FP8 saves on the device."""
    kept, reason = too_dear_to_launch(plan, options, torch.is_grad_enabled())
    for site in kept:
        site.keep(Cause.RULE, reason)


def _one_device(plan: Plan) -> None:
    """Keep what is not on the first linear's device: a graph's states are updated together, by one kernel."""
    devices = [value_of(site.weight).device for site in plan.selected]
    for site in plan.selected:
        device = value_of(site.weight).device
        if device != devices[0]:
            why = f"on {device}, while this graph's first FP8 linear is on {devices[0]}"
            site.keep(Cause.UNSUPPORTED, f"{why}; compile what is on each device by itself for FP8")
