"""Which parameters are tables that embeddings read, and which of those have a row for each word.

A head often shares its weight with such a table, or is as wide as the vocabulary; a codebook is one that is searched.
Rows that were looked up are neither, and no weight. A product may look rows up, too, by zeros and a one for each, or
mix them by the chances of the words, as where a model reads its own guess. The small ones of those are most of what FP8
would round to zero.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.utils.weak import WeakIdKeyDictionary

from te_compile.options import Options
from te_compile.passes.captured_nodes import argument, is_tensor, size_hint, value_of
from te_compile.passes.enclosing_module import enclosing_module
from te_compile.passes.plan import Cause, Plan, Site, Verdict
from te_compile.passes.regions import Region
from te_compile.passes.result_readers import keeps_values, plain_name, reached
from te_compile.passes.side_effects import depends_on
from te_compile.passes.sizes import all_same, same
from te_compile.passes.weight_expressions import is_given, origin

_TABLES = WeakIdKeyDictionary()
"""The parameters that an embedding reads in a graph captured so far, and whether they are of words: a graph break may
part it from the head."""

_LOOKUPS: dict[Any, dict[str, tuple[int, str]]] = {
    F.embedding: {"rows": (0, "input"), "table": (1, "weight")},
    torch.embedding: {"rows": (1, "indices"), "table": (0, "weight")},
}
"""What looks rows up, and its arguments: where each stands, and its name."""

_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8)  # bytes pick as booleans do
_ZEROS = {"zeros", "zeros_like", "new_zeros"}
_MOST_NODES = 64  # between a table and a product that are looked at


def is_table(weight: Node) -> bool:
    """Does an embedding read ``weight``, in this graph?"""
    return any(user.target in _LOOKUPS for user in weight.users)


def is_read_by_ones(weight: Node) -> bool:
    """Does a product pick rows of ``weight``, in this graph, by zeros and a one for each?"""
    readers = reached(weight, keeps_values)
    return any(_is_one_hot(each) for reader in readers for each in reader.all_input_nodes)


def is_measured(weight: Node) -> bool:
    """Are rows of ``weight`` squared, in this graph, as for their distances to what is multiplied by them?"""
    return any(_squares(reader) for reader in reached(weight, keeps_values))


def _squares(node: Node) -> bool:
    if plain_name(node) == "pow":
        return argument(node, 1, "exponent") == 2
    factors = [each for each in node.args if isinstance(each, Node)]
    return plain_name(node) == "square" or (
        plain_name(node) == "mul" and len(factors) == 2 and factors[0] is factors[1]
    )


def by_lookup(site: Site, options: Options, tables: Collection[Node | None] = ()) -> Verdict:
    """What is multiplied by rows that were looked up in a table, as attention scores are by relative positions, what
    looks rows up that were found by the table itself, as entries of a codebook are, and what mixes the rows of one that
    embeddings read; these are ``tables``."""
    if site.root_weight is None:
        return None
    if _is_looked_up(site):
        why = "it multiplies by rows that were looked up in a table, as relative positions are, and by no weight"
        return Cause.RULE, f"{why}; nothing to do: FP8 is for lasting weights"
    if _looks_up_what_was_found(site):
        why = "a codebook: it picks entries of a table by zeros and ones, and FP8 would round them"
        return Cause.RULE, f"{why}; nothing to do: FP8 would lose accuracy"
    if (site.root_weight in tables or is_table(site.root_weight)) and _adds_rows_up(site, site.root_weight):
        why = "it mixes the rows of an embedding, and FP8 would round small shares to zero"
        return Cause.RULE, f"{why}; nothing to do: FP8 would lose accuracy"
    return None


def _adds_rows_up(site: Site, table: Node) -> bool:
    """Does ``site`` add the rows of ``table`` up, each with a factor, where a head multiplies each by all of x?"""
    rows, *features = value_of(table).shape
    if len(features) != 1 or not all_same(site.features, (rows, *features)):
        return False
    # Where it has as many rows as features, only the way in which it is read tells.
    is_stored_so = site.transposed and site.matrix is not None and site.matrix.value is table
    return is_stored_so or not same(rows, features[0])


def _looks_up_what_was_found(site: Site) -> bool:
    """Are the rows of ``site`` zeros and a one, placed by what was computed with the very weight that they pick of?"""
    x, table = site.x, site.root_weight
    if x is None or table is None or x.graph is not table.graph:
        return False
    return _is_one_hot(x) and depends_on(x, table)


def _is_one_hot(node: Any) -> bool:
    """Is ``node`` made of rows of zeros with a one in each?"""
    while isinstance(node, Node) and keeps_values(node) and node.args:
        node = node.args[0]
    if not isinstance(node, Node):
        return False
    if plain_name(node) == "scatter":
        base, one = node.args[0], argument(node, 3, "value", node.kwargs.get("src"))
        return isinstance(base, Node) and plain_name(base) in _ZEROS and one == 1
    return plain_name(node) == "one_hot"


def _is_looked_up(site: Site) -> bool:
    """Is what ``site`` multiplies by made of rows of its table?"""
    return any(_is_of_table(table, region, site.root_weight) for table, region in _tables_behind(site))


def _tables_behind(site: Site) -> Iterator[tuple[Any, Region]]:
    """What rows are looked up in on the way to what ``site`` multiplies by."""
    waiting, seen = [(site.weight, _region_of(site.weight, site.region))], set[Node]()
    while waiting and len(seen) < _MOST_NODES:
        node, region = origin(*waiting.pop())
        if not isinstance(node, Node) or node in seen:
            continue
        seen.add(node)
        if node.target in _LOOKUPS:
            yield argument(node, *_LOOKUPS[node.target]["table"]), region
        elif _picks_rows(node):
            yield node.args[0], region
        waiting += [(each, region) for each in node.all_input_nodes]


def _region_of(node: Node | None, region: Region) -> Region:
    """The region that has ``node``: this one, or one around it, as of a matrix that is quantised in front of a body."""
    while node is not None and region.parent is not None and region.graph is not node.graph:
        region = region.parent
    return region


def _picks_rows(node: Node) -> bool:
    """Is it ``table[numbers]`` with a matrix of row numbers, as for all pairs of places?

    Numbers in a row only put the rows of a weight into another order, or leave some out.
    """
    if node.target is not operator.getitem or not all(map(is_tensor, node.args)):
        return False
    table, numbers = map(value_of, node.args)
    return table.dim() == 2 and numbers.dim() >= 2 and numbers.dtype in _NUMBERS


def _is_of_table(node: Any, region: Region, table: Node | None) -> bool:
    """Is ``node`` the parameter ``table``, in whatever shape or dtype, or stretched to another number of rows?"""
    node, region = origin(node, region)
    while isinstance(node, Node) and node is not table and (keeps_values(node) or _stretches(node)) and node.args:
        node, region = origin(node.args[0], region)
    return node is table


def _stretches(node: Node) -> bool:
    """Does it make more rows, or fewer, of a table for another size of picture?"""
    return node.target is F.interpolate


def embedding_tables(plan: Plan) -> set[Node | None]:
    """The parameters of ``plan`` that embeddings read, in this graph or in one before it."""
    for node, parameter in plan.parameters.items():
        if is_table(node):
            _TABLES[parameter] = _is_of_words(node) or _TABLES.get(parameter, False)
    return {node for node, parameter in plan.parameters.items() if parameter in _TABLES}


def vocabularies(tables: Collection[Node | None]) -> set[int]:
    """How many words there are in each embedding of words, in this graph or in one of the same model before it."""
    here = {size_hint(value_of(table).shape[0]) for table in tables if table is not None and _is_of_words(table)}
    module = enclosing_module()
    return here | {each.shape[0] for each in (module.parameters() if module is not None else ()) if _TABLES.get(each)}


def _is_of_words(table: Node) -> bool:
    """Does the caller say which rows of ``table`` are read? Of positions the model counts them itself."""
    readers = (user for user in table.users if user.target in _LOOKUPS)
    return any(_shows_what_was_given(argument(user, *_LOOKUPS[user.target]["rows"])) for user in readers)


def _shows_what_was_given(node: Any) -> bool:
    """Is ``node`` what the caller gave, seen in whatever way?"""
    while isinstance(node, Node) and keeps_values(node) and node.args:
        node = node.args[0]
    return isinstance(node, Node) and is_given(node)
