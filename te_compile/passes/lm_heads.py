"""Keep projections to logits in high precision: their errors reach the loss directly.

A head is known by the table that shares its weight, by its name, by the loss that reads it, or where no loss is in the
graph by what the model returns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
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
from te_compile.passes.find_linears import OF_MODULES
from te_compile.passes.fp8_support import RULES_OF_SUPPORT
from te_compile.passes.plan import Cause, Site, Verdict
from te_compile.passes.result_readers import ARITHMETIC, keeps_values, plain_name, reached
from te_compile.passes.routers import is_picked_from, picks
from te_compile.passes.side_effects import depends_on
from te_compile.passes.sizes import all_same, same

_HEAD_NAMES = {
    "lm_head", "embed_out", "score", "classifier", "qa_outputs", "logits", "head", "output_projection",
    "prediction_head", "out_proj_logits", "to_logits", "unembed", "classification_head", "mlm_head", "ctc_head",
    "logits_proj", "head_dist", "segmentation_head", "mlp_head", "linear_head", "class_embed",
}  # fmt: skip
_NAMES_OF_WIDER_HEADS = {"proj_out"}  # diffusion models call so what makes a picture's patch of their features
_NAMES_BEHIND_POOLS = {"fc", "last_linear"}  # of networks for pictures; elsewhere they may be anything
_HEAD_ENDINGS = ("_lm_head", "_mlp_head", "_classifier", "_logits", "_predictor")
_SPECIAL_WORDS = 0.02  # of a vocabulary: the share that only its table or only its head has, as for a masked word
_LOSSES = {
    F.cross_entropy, F.nll_loss, F.log_softmax, torch.log_softmax, "log_softmax", torch._C._nn.nll_loss_nd,
    torch.logsumexp, "logsumexp", CROSS_ENTROPY,
}  # fmt: skip
_LOSSES |= {torch._C._nn.cross_entropy_loss} if hasattr(torch._C._nn, "cross_entropy_loss") else set()
_ATEN_LOSSES = {"cross_entropy_loss", "nll_loss", "nll_loss_nd"}
_POOLS = {"mean", *(f"{pool}{dimensions}d" for pool in ("adaptive_avg_pool", "avg_pool") for dimensions in (1, 2, 3))}
_POOLS_ALONG_DIMENSIONS = {"sum", "max", "amax"}
_RESIZES = {"interpolate", "upsample"}
_LM_HEAD = "lm_head=True puts it in FP8"
_CHANCES = {"softmax", "log_softmax", "sigmoid"}


def by_head(
    site: Site, options: Options, tables: Collection[Node | None] = (), linears: Collection[Node] = ()
) -> Verdict:
    """The projection to logits: its errors reach the loss directly. ``tables``: the parameters that embeddings read;
    ``linears``: the nodes of all linears.

    Where no loss is in the graph, as in inference or where the user computes it, what the model returns tells: from a
    part of it that is called a head, a number for each word of the vocabulary, cosines with learned directions, or what
    an ``fc``, or the end of an ``nn.Sequential``, makes of a picture. What is returned beside such logits is told by
    ``by_heads_beside``.
    """
    if options.lm_head or site.form in OF_MODULES:
        return None
    last = site.name.rpartition(".")[2]
    weight = site.root_weight or site.weight
    if weight is not None and (weight in tables or is_table(weight)) and not is_picked_from(site):
        why = "its weight is tied to an embedding"
    elif _is_called_head(site.name) and not _is_router(site) and not _goes_on(site, linears):
        why = f"its name ends in {last!r}"
    elif _enters_loss(site):
        why = "its result goes into the loss"
    elif not _is_returned(site):
        return None
    elif (head := _head_in(site)) is not None:
        why = f"the model returns its result, from its {head!r}"
    elif any(_has_scores_of(words, site) for words in vocabularies(tables)):
        why = "the model returns its result, as wide as the vocabulary"
    elif _is_of_length_one(site.x) and _is_of_length_one(site.weight):
        why = "the model returns its result, cosines with a direction for each class"
    elif (last in _NAMES_BEHIND_POOLS or last.isdigit()) and _reads_a_pool(site):
        why = f"the model returns its result, from {last!r} behind a pool"
    else:
        return None
    stays = site.cause is not None or any(rule(site, options) for rule in RULES_OF_SUPPORT)
    return _kept_because(why, "nothing to do: lm_head=True would leave it, too" if stays else _LM_HEAD)


def by_heads_beside(site: Site, heads: Sequence[Site]) -> Verdict:
    """Logits that are returned beside others of the same classes, as those of auxiliary heads are in training;
    ``heads``: what ``by_head`` keeps."""
    classes = site.features[1]
    if not _is_returned(site) or not any(head.features[1] == classes and _is_returned(head) for head in heads):
        return None
    return _kept_because("the model returns its result beside other logits, as many")


def _kept_because(why: str, advice: str = _LM_HEAD) -> Verdict:
    return Cause.RULE, f"projection to logits ({why}); {advice}"


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


def _has_scores_of(words: int, site: Site) -> bool:
    """Does ``site`` give a number for each of so many words, or but a few more or less where its result is wider than
    what it reads?"""
    in_features, out_features = site.features
    others = abs(out_features - words)
    return others == 0 or (out_features > in_features and others <= _SPECIAL_WORDS * words)


def _is_router(site: Site) -> bool:
    """Whatever it is called, ``classifier`` say: nobody but the model sees what it gives."""
    return is_picked_from(site) and not _is_returned(site) and not _enters_loss(site)


def _is_returned(site: Site) -> bool:
    """Does the model return what ``site`` gives, or what are still the same logits?"""
    return site.region.parent is None and any(user.op == "output" for user in _readers_of_logits(site))


def _reads_a_pool(site: Site) -> bool:
    """Does ``site`` read one vector for all positions, their mean?"""
    node: Any = site.x
    while isinstance(node, Node) and node.args and (keeps_values(node) or plain_name(node) == "dropout"):
        node = node.args[0]
    return isinstance(node, Node) and _is_pool(node) and not _mixes_samples(node)


def _is_pool(node: Node) -> bool:
    """Is ``node`` a mean, or the sum or the largest of what it reads along some dimensions?"""
    name = plain_name(node)
    return name in _POOLS or (name in _POOLS_ALONG_DIMENSIONS and bool(_numbers(argument(node, 1, "dim"))))


def _numbers(dims: Any) -> list[int]:
    """The dimensions that a reduction was given, nothing unless these are numbers."""
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    return [*dims] if all(isinstance(dim, int) for dim in dims) else []


def _is_of_length_one(node: Any) -> bool:
    """Is each vector of ``node`` divided by its length?"""
    while isinstance(node, Node) and keeps_values(node) and node.args:
        node = node.args[0]
    return isinstance(node, Node) and plain_name(node) == "normalize"


def _mixes_samples(node: Node) -> bool:
    """Is ``node`` a mean over the first dimension too, as that of an ensemble's members, or over all there are?"""
    if not _reduces(node):
        return False
    dims, read = _numbers(argument(node, 1, "dim")), value_of(node.all_input_nodes[0])
    return not dims or read.dim() == 0 or any(dim % read.dim() == 0 for dim in dims)


def _reduces(node: Node) -> bool:
    """Does ``node`` leave out dimensions, wherever they are, as a pool does not?"""
    return plain_name(node) == "mean" or plain_name(node) in _POOLS_ALONG_DIMENSIONS


def _goes_on(site: Site, linears: Collection[Node]) -> bool:
    """Does another linear read what ``site`` gives? Then these are no logits, but where they become chances first."""

    def leads_on(node: Node) -> bool:
        return node not in linears and plain_name(node) not in _CHANCES and not picks(node)

    return any(user in linears for user in reached(site.node, leads_on, limit=256))


def _readers_of_logits(site: Site) -> Iterator[Node]:
    """Who reads what ``site`` gives, or what are still the same logits."""
    return reached(site.node, partial(_are_still_logits, site))


def _enters_loss(site: Site) -> bool:
    """Are the logits of ``site`` read by a loss, or by a softmax whose logarithm is taken or that a loss reads?"""
    readers = list(_readers_of_logits(site))
    chances = [each for each in readers if plain_name(each) == "softmax"]
    readers_of_chances = (user for each in chances for user in reached(each, keeps_values))
    return any(map(_is_loss, readers)) or any(map(_reads_chances, readers_of_chances))


def _reads_chances(node: Node) -> bool:
    """Is ``node`` the logarithm of chances, or a loss that may have them for targets, as a teacher's are?"""
    return plain_name(node) in ("log", "kl_div") or _is_loss(node)


def _is_loss(node: Node) -> bool:
    return node.target in _LOSSES or plain_name(node) in _ATEN_LOSSES


def _keeps_features(site: Site, node: Node) -> bool:
    """Does the pool ``node``, as of several heads or of all places, have the features of what it reads?

    They come last, but behind the batch where a convolution has made them, until they are moved, and for pools."""
    before, after = (value_of(each) for each in (node.all_input_nodes[0], node))
    after = after[0] if isinstance(after, tuple) else after  # the largest come with their places
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or min(before.dim(), after.dim()) == 0:
        return False
    if _reduces(node) and site.form != "convolution":
        return all_same(before.shape[-1:], after.shape[-1:])
    places = (1, -1) if _reduces(node) else (1,)
    return after.dim() > 1 and any(same(after.shape[place], site.features[1]) for place in places)


def _are_still_logits(site: Site, node: Node) -> bool:
    """Are the logits of ``site`` still logits after ``node``? So they are with a cap, a temperature or a bias, as a
    mean, a sum or the largest of several, in a picture of another size, or with what an adapter of low rank adds; but
    what is added to something that it was computed from is part of a residual stream."""
    if _is_pool(node):
        return _keeps_features(site, node)
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
