"""Write the selected linears that hide in other operations as plain products.

An einsum, a convolution or a batch of experts becomes what lowering knows: views, a product with a matrix for each
linear, views back. What goes to FP8 is rewritten, and convolutions that are slow as they are
(patches_as_products.py); everything else stays as the model wrote it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from te_compile.passes.plan import Plan, Site


def spell_out_linears(plan: Plan) -> int:
    """Rewrite each operation that goes to FP8 and is no plain product; returns how many."""
    return spell_out(plan, lambda site: site.status == "fp8")


def spell_out(plan: Plan, chosen: Callable[[Site], bool]) -> int:
    """Rewrite each operation that is ``chosen`` and no plain product, and put the sites of its products in its place in
    ``plan``; returns how many operations were rewritten."""
    became: dict[Node, Node] = {}
    sites: list[Site] = []
    for site in plan.sites:
        # What a linear reads may have been rewritten before it.
        site.x, site.bias = (became.get(each, each) if each is not None else None for each in (site.x, site.bias))
        if site.spell is None or not chosen(site):
            sites.append(site)
            continue
        result, spelled = site.spell(site)
        site.node.replace_all_uses_with(result)
        site.node.graph.erase_node(site.node)
        became[site.node] = result
        sites += spelled
    plan.sites[:] = sites
    return len(became)
