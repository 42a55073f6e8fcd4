"""Keep projections to logits in high precision: their errors reach the loss directly.

A head is known by the table that shares its weight, by its name, by the loss that reads it, or where no loss is in the
graph by what the model returns.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from te_compile.ops.cross_entropy import CROSS_ENTROPY
from te_compile.options import Options
from te_compile.passes.captured_nodes import argument, is_tensor, value_of
from te_compile.passes.embedding_tables import is_table, vocabularies
from te_compile.passes.plan import Cause, Site, Verdict
from te_compile.passes.result_readers import ARITHMETIC, keeps_values, plain_name, reached
from te_compile.passes.routers import is_picked_from, picks
from te_compile.passes.side_effects import depends_on
from te_compile.passes.sizes import all_same

_HEAD_NAMES = {
    "lm_head", "embed_out", "score", "classifier", "qa_outputs", "logits", "head", "output_projection",
    "prediction_head", "out_proj_logits", "to_logits", "unembed", "classification_head", "mlm_head", "ctc_head",
    "logits_proj", "head_dist", "segmentation_head", "mlp_head", "linear_head",
}  # fmt: skip
_NAMES_OF_WIDER_HEADS = {"proj_out"}  # diffusion models call so what makes a picture's patch of their features
_NAMES_BEHIND_POOLS = {"fc", "last_linear"}  # of networks for pictures; elsewhere they may be anything
_HEAD_ENDINGS = ("_lm_head", "_mlp_head", "_classifier", "_logits")
_LOSSES = {
    F.cross_entropy, F.nll_loss, F.log_softmax, torch.log_softmax, "log_softmax", torch._C._nn.nll_loss_nd,
    torch.logsumexp, "logsumexp", CROSS_ENTROPY,
}  # fmt: skip
_LOSSES |= {torch._C._nn.cross_entropy_loss} if hasattr(torch._C._nn, "cross_entropy_loss") else set()
_ATEN_LOSSES = {"cross_entropy_loss", "nll_loss", "nll_loss_nd"}
_POOLS = {"mean", *(f"{pool}{dimensions}d" for pool in ("adaptive_avg_pool", "avg_pool") for dimensions in (1, 2, 3))}
_RESIZES = {"interpolate", "upsample"}
_CHANCES = {"softmax", "log_softmax", "sigmoid"}


def by_head(
    site: Site, options: Options, tables: Collection[Node | None] = (), linears: Collection[Node] = ()
) -> Verdict:
    """The projection to logits: its errors reach the loss directly. ``tables``: the parameters that embeddings read;
    ``linears``: the nodes of all linears.

    Where no loss is in the graph, as in inference or where the user computes it, what the model returns tells: from a
    part of it that is called a head, a number for each word of the vocabulary, or what an ``fc``, or the end of an
    ``nn.Sequential``, makes of a picture.
    """
    if options.lm_head:
        return None
    last = site.name.rpartition(".")[2]
    weight = site.root_weight or site.weight
    if weight is not None and (weight in tables or is_table(weight)) and not is_picked_from(site):
        why = "its weight is tied to an embedding"
    elif _is_called_head(site.name) and not _is_router(site) and not _goes_on(site, linears):
        why = f"its name ends in {last!r}"
    elif _enters_loss(site.node):
        why = "its result goes into the loss"
    elif not _is_returned(site):
        return None
    elif (head := _head_in(site)) is not None:
        why = f"the model returns its result, from its {head!r}"
    elif site.features[1] in vocabularies(tables):
        why = "the model returns its result, as wide as the vocabulary"
    elif (last in _NAMES_BEHIND_POOLS or last.isdigit()) and _reads_a_pool(site):
        why = f"the model returns its result, from {last!r} behind a pool"
    else:
        return None
    return Cause.RULE, f"projection to logits ({why}); lm_head=True puts it in FP8"


def _is_called_head(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last in _HEAD_NAMES or name == "output" or name.endswith("predictions.decoder")


def _head_in(site: Site) -> str | None:
    """The innermost part of its module's name that says what heads are called; a list of them is called so, too."""
    in_features, out_features = site.features
    # A vocabulary has more words than a token has features, and a patch fewer numbers.
    names = _HEAD_NAMES | _NAMES_OF_WIDER_HEADS if out_features > in_features else _HEAD_NAMES
    for part in reversed(site.name.split(".")):
        if {part, part.removesuffix("s")} & names or part.endswith(_HEAD_ENDINGS):
            return part
    return None


def _is_router(site: Site) -> bool:
    """Whatever it is called, ``classifier`` say: nobody but the model sees what it gives."""
    return is_picked_from(site) and not _is_returned(site) and not _enters_loss(site.node)


def _is_returned(site: Site) -> bool:
    """Does the model return what ``site`` gives, or what are still the same logits?"""
    return site.region.parent is None and any(user.op == "output" for user in reached(site.node, _are_still_logits))


def _reads_a_pool(site: Site) -> bool:
    """Does ``site`` read one vector for all positions, their mean?"""
    node: Any = site.x
    while isinstance(node, Node) and node.args and (keeps_values(node) or plain_name(node) == "dropout"):
        node = node.args[0]
    return isinstance(node, Node) and plain_name(node) in _POOLS and not _mixes_samples(node)


def _mixes_samples(node: Node) -> bool:
    """Is ``node`` a mean over the first dimension too, as that of an ensemble's members, or over all?"""
    if plain_name(node) != "mean":
        return False
    dims, read = argument(node, 1, "dim"), value_of(node.all_input_nodes[0])
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, (list, tuple)) or not all(isinstance(dim, int) for dim in dims):
        return True
    return any(dim % read.dim() == 0 for dim in dims)


def _goes_on(site: Site, linears: Collection[Node]) -> bool:
    """Does another linear read what ``site`` gives? Then these are no logits, but where they become chances first."""

    def leads_on(node: Node) -> bool:
        return node not in linears and plain_name(node) not in _CHANCES and not picks(node)

    return any(user in linears for user in reached(site.node, leads_on, limit=256))


def _enters_loss(node: Node) -> bool:
    """Are the logits ``node`` read by a loss, or by a softmax whose logarithm is taken or that a loss reads?"""
    readers = list(reached(node, _are_still_logits))
    chances = [each for each in readers if plain_name(each) == "softmax"]
    readers_of_chances = (user for each in chances for user in reached(each, keeps_values))
    return any(map(_is_loss, readers)) or any(map(_reads_chances, readers_of_chances))


def _reads_chances(node: Node) -> bool:
    """Is ``node`` the logarithm of chances, or a loss that may have them for targets, as a teacher's are?"""
    return plain_name(node) in ("log", "kl_div") or _is_loss(node)


def _is_loss(node: Node) -> bool:
    return node.target in _LOSSES or plain_name(node) in _ATEN_LOSSES


def _keeps_features(node: Node) -> bool:
    """Does the mean ``node``, as of several heads or of all positions, have the features of what it reads?"""
    before, after = (value_of(each) for each in (node.all_input_nodes[0], node))
    is_of_tensors = isinstance(before, Tensor) and isinstance(after, Tensor) and min(before.dim(), after.dim()) > 0
    return is_of_tensors and all_same(before.shape[-1:], after.shape[-1:])


def _are_still_logits(node: Node) -> bool:
    """Are logits still logits after ``node``? So they are with a cap, a temperature or a bias, as a mean or a sum of
    several, in a picture of another size, or with what an adapter of low rank adds; but what is added to something that
    it was computed from is part of a residual stream."""
    if plain_name(node) == "mean":
        return _keeps_features(node)
    if plain_name(node) in _RESIZES:
        return True
    if plain_name(node) not in ARITHMETIC:
        return keeps_values(node)
    result = value_of(node)
    if not isinstance(result, Tensor):
        return False
    alike = [each for each in node.all_input_nodes if is_tensor(each) and _are_numbers_like(result, value_of(each))]
    return not any(depends_on(one, other) for one, other in permutations(alike, 2))


def _are_numbers_like(result: Tensor, value: Tensor) -> bool:
    return value.is_floating_point() and value.dim() == result.dim() and all_same(value.shape, result.shape)
