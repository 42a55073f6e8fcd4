"""Who reads what a quantize reads: its producer gives it to those as well."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from te_compile.passes.index_space import IndexSpace, behind_views
from te_compile.passes.new_nodes import same_phase
from te_compile.passes.pointwise_nodes import CASTS, VIEWS, tensor_arguments, value_of
from te_compile.passes.row_sums import is_row_sum

aten = torch.ops.aten


@dataclass(frozen=True)
class Readers:
    """Who reads z beside the quantize: ``root`` computes it, ``views`` show it, ``sums`` add up its rows."""

    root: Node
    views: tuple[Node, ...]
    sums: tuple[Node, ...]
    others: tuple[Node, ...]


def readers_of(quantize: Node, space: IndexSpace) -> Readers:
    """Everyone who reads what ``quantize`` reads, as far as its producer may serve them."""
    root = behind_views(quantize.args[0])
    family, sums, others = [root], [], []
    for member in family:
        for user in member.users:
            if user.target in VIEWS and tensor_arguments(user) == [member]:
                family.append(user)
            elif is_row_sum(user, space) and same_phase(user, quantize):
                sums.append(_as_wanted(user))
            elif user is not quantize and user.target is not aten.sym_size.int:  # who asks for a size reads no number
                others.append(user)
    scale = quantize.args[1]
    late = isinstance(scale, Node) and any(not scale < reader for reader in (*family[1:], *sums, *others))
    if late or not same_phase(root, quantize):
        sums, others = [], []
    return Readers(root, tuple(family[1:]), tuple(sorted(sums)), tuple(others))


def _as_wanted(total: Node) -> Node:
    """The sum, or its cast to the dtype of a bias if that is all that is wanted of it."""
    users = list(total.users)
    if len(users) == 1 and users[0].target in CASTS and value_of(users[0]) is not None and same_phase(users[0], total):
        wanted = users[0].meta["val"].dtype
        return users[0] if wanted in (torch.bfloat16, torch.float16) else total
    return total
