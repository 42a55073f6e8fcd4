"""Sinks that a model applies to the result of attention, as a share of what is left of it.

    result · sigmoid(logsumexp(scores) - sinks)

is attention with sinks (ops/sink_attention.py), for the sigmoid is e^logsumexp / (e^logsumexp + e^sink). Granite writes
it so. The scores are read by softmax and by logsumexp then, and by nobody else.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from te_compile.passes.attention_scores import Sinks, same_sizes
from te_compile.passes.captured_nodes import argument, called, is_tensor, value_of
from te_compile.passes.drop_noop_casts import is_cast
from te_compile.passes.written_tensors import writes

_PRODUCTS = (operator.mul, torch.mul, "mul", "multiply")
_DIFFERENCES = (operator.sub, torch.sub, "sub", "subtract")


@dataclass(frozen=True)
class Scaled:
    """The result once it is scaled, the sinks that say how, and the nodes in between."""

    result: Node
    sinks: Sinks
    nodes: tuple[Node, ...]


def scaled_by_sinks(softmax: Node, result: Node) -> Scaled | None:
    """How ``result``, of attention whose weights are ``softmax``, is scaled by sinks; None where that is not all that
    is done with it and with the scores."""
    scores: Any = softmax.args[0]
    others = [user for user in scores.users if user is not softmax]
    if len(others) != 1 or len(result.users) != 1 or not _sums_up(others[0], scores):
        return None
    logarithm, scaled = others[0], next(iter(result.users))
    nodes, share, sinks = [logarithm], logarithm, None
    dimensions, is_column = value_of(scores).dim(), False
    while len(share.users) == 1:
        user = next(iter(share.users))
        if user is scaled:
            break
        if user.target in _DIFFERENCES and user.kwargs:
            return None  # torch.sub(logsumexp, sinks, alpha=2)
        if sinks is None and user.target in _DIFFERENCES and len(user.args) == 2 and user.args[0] is share:
            sinks, is_column = user.args[1], value_of(user).dim() == dimensions
        elif not (_is_cast_or_column(user, logarithm) or (sinks is not None and called(user) == "sigmoid")):
            return None
        nodes.append(user)
        share = user
    if len(share.users) != 1 or not is_tensor(sinks) or [called(node) for node in nodes].count("sigmoid") != 1:
        return None
    if scaled.target not in _PRODUCTS or set(scaled.args) != {result, share} or scaled.kwargs or writes(scaled):
        return None
    if not _lies_along(share, result, scaled) or value_of(sinks).dim() > dimensions - (not is_column):
        return None
    return Scaled(scaled, Sinks(sinks, False, dimensions, is_column), (*nodes, scaled))


def _sums_up(node: Node, scores: Node) -> bool:
    """Is ``node`` the logarithm of each row's sum?"""
    last = value_of(scores).dim() - 1
    return (
        called(node) == "logsumexp"
        and node.args[:1] == (scores,)
        and argument(node, 1, "dim") in (-1, last, (-1,), [-1])
    )


def _is_cast_or_column(node: Node, logarithm: Node) -> bool:
    """Does ``node`` change the dtype alone, or make a column of one number for each row?"""
    if is_cast(node):
        return bool(value_of(node).dtype.is_floating_point)
    return called(node) == "unsqueeze" and argument(node, 1, "dim") in (-1, value_of(logarithm).dim())


def _lies_along(share: Node, result: Node, scaled: Node) -> bool:
    """Is ``share`` one number for each row of ``result``, and is the product one of its shape and dtype?"""
    one, whole, product = value_of(share), value_of(result), value_of(scaled)
    rows = same_sizes(one.shape, (*whole.shape[:-1], 1))
    return rows and same_sizes(product.shape, whole.shape) and product.dtype == whole.dtype
