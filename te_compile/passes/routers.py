"""Keep routers and codebooks in high precision: linears whose largest or smallest results decide what is computed next.

They are known by that pick alone, behind whatever scores become on the way: chances, groups, noise. Where a router has
several layers, those before its last are kept with it. An indexer, which scores keys by queries and weights of its own
to say which of them attention reads, is known by its results, of which nothing but a pick is left. A detector picks its
queries in the same way, from the places whose likeliest class is the likeliest of all, and a map of scores is reduced
to its peaks, which equal the largest around them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from itertools import permutations

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import Node
from torch.utils import _pytree as pytree

from te_compile.options import Options
from te_compile.passes.captured_nodes import argument, name_called, value_of
from te_compile.passes.embedding_tables import is_measured, is_read_by_ones, is_table
from te_compile.passes.plan import Cause, Site, Verdict
from te_compile.passes.result_readers import ARITHMETIC, SAME_VALUES, all_reached, plain_name, reached
from te_compile.passes.written_tensors import written_by

_ROUTING = {
    "topk", "sigmoid", "softmax", "log_softmax", "one_hot", "scatter", "sort", "argmax", "logsigmoid", "log_sigmoid",
    "softplus", "exp", "log", "sqrt", "square", "pow", "normalize", "layer_norm", "rms_norm",
}  # fmt: skip
_LARGEST = {"max", "min", "amax", "amin", "values"}
_LARGEST_AROUND = {"max_pool1d", "max_pool2d", "max_pool3d", *_LARGEST}
_COMPARISONS = {"eq", "ge", "le"}
_SAYS_CODEBOOK = (is_table, is_read_by_ones, is_measured)
_PICKS = {"topk", "kthvalue", "argmax", "argmin", "argsort", "multinomial"}
_KNOWN = SAME_VALUES | ARITHMETIC | _ROUTING
_PICKS_WITH_VALUES = {"max", "min", "sort"}  # if somebody reads the places, and not only the values
_WIDEST = 1024  # features of what is kept for a pick: there FP8 would gain little


def by_router(site: Site, options: Options) -> Verdict:
    """Routers pick experts, and codebooks entries: a small error flips a discrete choice."""
    if is_picked_from(site):
        weight = site.root_weight or site.weight
        is_codebook = weight is not None and any(say(weight) for say in _SAYS_CODEBOOK)
        if is_codebook:
            what, picked = "a codebook", "entries of a table"
        elif _decides(site, _KNOWN, _gives_places):
            what, picked = "a router", "experts"
        else:
            what, picked = "scores of places", "those that are read on"
        why = f"its result picks {picked}, and FP8 rounding would change the pick"
        return Cause.RULE, f"{what}: {why}; nothing to do: FP8 would lose accuracy"
    return None


def by_router_behind(site: Site, routers: Collection[str], linears: AbstractSet[Node], for_picks: set[Node]) -> Verdict:
    """The layers before a router's last, in its module or in the one around it, which nothing but routers reads: what
    they round moves the pick as well. ``routers``: the modules of all routers; ``linears``: the nodes of all linears;
    ``for_picks``: the nodes known to end in picks alone, to which this adds. The search stops at them, for where each
    router takes up what the one before it made, the readers of the first would be all routers of the model."""
    if not any(_is_around(module_around(site), router) for router in routers):
        return None
    readers = all_reached(site.node, lambda node: node not in for_picks and not _is_a_size(node))
    if readers is None or for_picks.isdisjoint(readers) or not for_picks.issuperset(linears & {*readers}):
        return None
    for_picks.update((site.node, *(node for node in readers if not _is_a_size(node))))
    why = "only what picks experts or entries reads its result, and FP8 rounding would change the pick"
    return Cause.RULE, f"{why}; nothing to do: FP8 would lose accuracy"


def _is_around(module: str, router: str) -> bool:
    """Is ``module`` that of ``router``, or the one that holds it?"""
    return module in (router, router.rpartition(".")[0]) and bool(module)


def by_pick_alone(site: Site, options: Options, linears: Collection[Node] = ()) -> Verdict:
    """Nothing but places of the largest is left of its result, whatever it is multiplied by on the way, as of what an
    indexer makes to find the keys that attention reads. ``linears``: the nodes of all linears, which end the way."""
    if site.features[1] > _WIDEST or not _is_left_to_a_pick(site.node, linears):
        return None
    why = "nothing but what is picked by it is left of its result, and FP8 rounding would change the pick"
    return Cause.RULE, f"{why}; nothing to do: FP8 would lose accuracy"


def _is_left_to_a_pick(node: Node, linears: Collection[Node], limit: int = 128) -> bool:
    """Does a pick read ``node``, and does each way of its numbers on end in places, signs or sizes?"""
    known, found = {node}, False
    for reader in reached(node, _has_numbers, limit):
        known.add(reader)
        if reader.op == "output" or reader in linears or isinstance(reader.target, HigherOrderOperator):
            return False
        if len(known) >= limit or not known.issuperset(written_by(reader)):
            return False
        found |= _gives_places(reader)
    return found


def _has_numbers(node: Node) -> bool:
    """Are floating-point numbers among what ``node`` gives?"""
    values = pytree.tree_leaves(value_of(node))
    return any(isinstance(value, Tensor) and value.dtype.is_floating_point for value in values)


def module_around(site: Site) -> str:
    """The name of the module that holds ``site``, "" for none."""
    return site.name.rpartition(".")[0]


def _is_a_size(node: Node) -> bool:
    return isinstance(value_of(node), (int, torch.SymInt))


def is_picked_from(site: Site) -> bool:
    """Does the largest or smallest of what ``site`` gives decide what is computed next?"""
    return _decides(site, _KNOWN | _LARGEST, picks)


def _decides(site: Site, known: Collection[str], is_pick: Callable[[Node], bool]) -> bool:
    """Does a pick read what ``site`` gives, behind nothing that is not ``known``?"""
    return site.features[1] <= _WIDEST and any(map(is_pick, reached(site.node, lambda node: plain_name(node) in known)))


def picks(node: Node) -> bool:
    """Does ``node`` say where the largest or smallest are?"""
    return _gives_places(node) or _compares_with_the_largest(node)


def _compares_with_the_largest(node: Node) -> bool:
    """Does ``node`` ask which scores are the largest of them, or of those around, as the peaks of a map are?"""
    if plain_name(node) not in _COMPARISONS:
        return False
    return any(_is_the_largest_of(one, other) for one, other in permutations(node.all_input_nodes, 2))


def _is_the_largest_of(node: Node, scores: Node) -> bool:
    is_largest = False
    while node is not scores and node.all_input_nodes and plain_name(node) in SAME_VALUES | _LARGEST_AROUND:
        is_largest |= plain_name(node) in _LARGEST_AROUND
        node = node.all_input_nodes[0]
    return node is scores and is_largest


def _gives_places(node: Node) -> bool:
    """Is the result of ``node`` the indices of the largest or smallest?"""
    if plain_name(node) in _PICKS_WITH_VALUES:
        places = [user for user in node.users if user.target is operator.getitem and user.args[1] == 1]
        return any(user.users for user in places) or any(name_called(user) == "indices" for user in node.users)
    if plain_name(node) == "gumbel_softmax":
        return bool(argument(node, 2, "hard", False))
    return plain_name(node) in _PICKS
