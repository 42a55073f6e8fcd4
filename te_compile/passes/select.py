"""Decide which linears run in FP8, and for every other one, why not.

Nothing is rewritten here. Each rule is a function from a site to the reason it must stay in high precision; the first
that speaks decides. Three kinds of reason are kept apart, because strict mode objects to one of them alone: the user
asked for it, a rule protects the model's quality or speed, or te_fp8 lacks support. A reason says what the matter
is and, behind its last semicolon, what to change, or that there is nothing to do and why.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.utils.weak import WeakIdKeyDictionary

from te_compile.ops.cross_entropy import CROSS_ENTROPY
from te_compile.ops.quantize import ALIGNMENT
from te_compile.ops.registry import Target
from te_compile.options import Options
from te_compile.passes.captured_nodes import argument, name_called, size_hint, value_of, wrapped_kind
from te_compile.passes.input_readers import price_of_input, readers_of_inputs, saved_by, weights_of
from te_compile.passes.plan import Cause, Plan, Site
from te_compile.passes.regions import Region
from te_compile.passes.sizes import all_same
from te_compile.passes.speed import fp8_microseconds, high_precision_microseconds
from te_compile.passes.step_cost import too_dear_to_launch
from te_compile.passes.weight_expressions import DTYPES, in_plain_tensors, is_given

Verdict = tuple[Cause, str] | None

_HEAD_NAMES = {
    "lm_head", "embed_out", "score", "classifier", "qa_outputs", "logits", "head", "output_projection",
    "prediction_head", "out_proj_logits", "to_logits", "unembed", "classification_head", "mlm_head", "ctc_head",
    "logits_proj",
}  # fmt: skip
_NAMES_OF_WHAT_IS_RETURNED = {"proj_out"}  # of diffusion models' blocks as well, where the model goes on
_HEAD_ENDINGS = ("_lm_head", "_classifier", "_logits")
_LOSSES = {
    F.cross_entropy, F.nll_loss, F.log_softmax, torch.log_softmax, "log_softmax", torch._C._nn.nll_loss_nd,
    torch.logsumexp, "logsumexp", CROSS_ENTROPY,
}  # fmt: skip
_LOSSES |= {torch._C._nn.cross_entropy_loss} if hasattr(torch._C._nn, "cross_entropy_loss") else set()
_ATEN_LOSSES = {"cross_entropy_loss", "nll_loss", "nll_loss_nd"}
_SAME_VALUES = {
    "view", "reshape", "float", "to", "type", "contiguous", "flatten", "transpose", "squeeze", "unsqueeze", "permute",
    "getitem", "bfloat16", "half", "double", "movedim", "unflatten", "t", "T", "mT", "detach", "clone", "stack",
    "swapaxes", "swapdims", "chunk", "split", "tensor_split", "unbind", "narrow", "select", "index_select", "gather",
    "take_along_dim", "masked_select", "cat", "concat", "concatenate", "reshape_as", "view_as", "type_as", "ravel",
}  # fmt: skip
_ARITHMETIC = {
    "add", "sub", "mul", "div", "truediv", "neg", "clamp", "tanh", "masked_fill", "where", "iadd", "isub", "imul",
    "itruediv",
}  # fmt: skip
_ROUTING = {
    "topk",
    "sigmoid",
    "softmax",
    "log_softmax",
    "one_hot",
    "scatter",
    "sort",
    "argmax",
    "logsigmoid",
    "log_sigmoid",
    "softplus",
    "exp",
    "log",
    "sqrt",
    "square",
    "pow",
    "normalize",
    "layer_norm",
    "rms_norm",
}
_CHANCES = {"softmax", "log_softmax", "sigmoid"}
_PICKS = {"topk", "kthvalue", "argmax", "argmin", "argsort", "multinomial"}
_PICKS_WITH_VALUES = {"max", "min", "sort"}  # if somebody reads the places, and not only the values


def _reached(node: Node, through: Callable[[Node], bool], limit: int = 64) -> Iterator[Node]:
    """Every user of ``node``, and of the values for which ``through`` holds on the way."""
    waiting, seen = [node], {node}
    while waiting and len(seen) < limit:
        for user in waiting.pop().users:
            if user not in seen:
                seen.add(user)
                yield user
                if through(user):
                    waiting.append(user)


def _name(node: Node) -> str:
    """What ``node`` calls, by one name for it in place and not."""
    return name_called(node).removesuffix("_")


def _keeps_values(node: Node) -> bool:
    return _name(node) in _SAME_VALUES


def _are_still_logits(node: Node) -> bool:
    """Are logits still logits after ``node``? So they are with a cap, a temperature or a bias; but the sum of two
    tensors alike is a residual stream."""
    if _name(node) not in _ARITHMETIC:
        return _keeps_values(node)
    result = value_of(node)
    if not isinstance(result, Tensor):
        return False
    values = [value_of(each) for each in node.all_input_nodes]
    numbers = [each for each in values if isinstance(each, Tensor) and each.is_floating_point()]
    return sum(each.dim() == result.dim() and all_same(each.shape, result.shape) for each in numbers) < 2


def _is_loss(node: Node) -> bool:
    return node.target in _LOSSES or _name(node) in _ATEN_LOSSES


def _enters_loss(node: Node) -> bool:
    """Are the logits ``node`` read by a loss, or by a softmax whose logarithm is taken?"""
    reached = list(_reached(node, _are_still_logits))
    chances = [each for each in reached if _name(each) == "softmax"]
    logarithms = (_name(user) == "log" for each in chances for user in _reached(each, _keeps_values))
    return any(map(_is_loss, reached)) or any(logarithms)


def _picks(node: Node) -> bool:
    """Does ``node`` say where the largest or smallest are?"""
    if _name(node) in _PICKS_WITH_VALUES:
        places = [user for user in node.users if user.target is operator.getitem and user.args[1] == 1]
        return any(user.users for user in places) or any(name_called(user) == "indices" for user in node.users)
    if _name(node) == "gumbel_softmax":
        return bool(argument(node, 2, "hard", False))
    return _name(node) in _PICKS


def _is_table(weight: Node) -> bool:
    return any(user.target in (F.embedding, torch.embedding) for user in weight.users)


def by_user(site: Site, options: Options) -> Verdict:
    """``include`` and ``exclude``."""
    reason = options.why_excluded(site.name, site, site.local_name)
    return (Cause.USER, reason) if reason else None


def _is_returned(site: Site) -> bool:
    """Does the model return what ``site`` gives, or what are still the same logits?"""
    return site.region.parent is None and any(user.op == "output" for user in _reached(site.node, _are_still_logits))


def _head_in(name: str) -> str | None:
    """The innermost part of a module's name that says what heads are called; a list of them is called so, too."""
    for part in reversed(name.split(".")):
        if {part, part.removesuffix("s")} & (_HEAD_NAMES | _NAMES_OF_WHAT_IS_RETURNED) or part.endswith(_HEAD_ENDINGS):
            return part
    return None


def _shows_what_was_given(node: Any) -> bool:
    """Is ``node`` what the caller gave, seen in whatever way?"""
    while isinstance(node, Node) and _keeps_values(node) and node.args:
        node = node.args[0]
    return isinstance(node, Node) and is_given(node)


def _is_of_words(table: Node) -> bool:
    """Does the caller say which rows of ``table`` are read? Of positions the model counts them itself."""
    places: dict[Any, tuple[int, str]] = {F.embedding: (0, "input"), torch.embedding: (1, "indices")}
    readers = (user for user in table.users if user.target in places)
    return any(_shows_what_was_given(argument(user, *places[user.target])) for user in readers)


def _vocabularies(tables: Collection[Node | None]) -> set[int]:
    """How many words there are in each embedding of words."""
    return {size_hint(value_of(table).shape[0]) for table in tables if table is not None and _is_of_words(table)}


def by_head(
    site: Site, options: Options, tables: Collection[Node | None] = (), linears: Collection[Node] = ()
) -> Verdict:
    """The projection to logits: its errors reach the loss directly. ``tables``: the parameters that embeddings read;
    ``linears``: the nodes of all linears.

    Where no loss is in the graph, as in inference or where the user computes it, what the model returns tells: from a
    part of it that is called a head, or a number for each word of the vocabulary.
    """
    if options.lm_head:
        return None
    last = site.name.rpartition(".")[2]
    weight = site.root_weight or site.weight
    if weight is not None and (weight in tables or _is_table(weight)) and not _is_picked_from(site):
        why = "its weight is tied to an embedding"
    elif _is_called_head(site.name) and not _is_router(site) and not _goes_on(site, linears):
        why = f"its name ends in {last!r}"
    elif _enters_loss(site.node):
        why = "its result goes into the loss"
    elif not _is_returned(site):
        return None
    elif (head := _head_in(site.name)) is not None:
        why = f"the model returns its result, from its {head!r}"
    elif site.features[1] in _vocabularies(tables):
        why = "the model returns its result, as wide as the vocabulary"
    else:
        return None
    return Cause.RULE, f"projection to logits ({why}); lm_head=True puts it in FP8"


def _is_picked_from(site: Site) -> bool:
    """Does the largest or smallest of what ``site`` gives decide what is computed next?"""
    known = _SAME_VALUES | _ARITHMETIC | _ROUTING
    return site.features[1] <= 1024 and any(map(_picks, _reached(site.node, lambda node: _name(node) in known)))


def _is_called_head(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last in _HEAD_NAMES or name == "output" or name.endswith("predictions.decoder")


def _goes_on(site: Site, linears: Collection[Node]) -> bool:
    """Does another linear read what ``site`` gives? Then these are no logits, but where they become chances first."""

    def leads_on(node: Node) -> bool:
        return node not in linears and _name(node) not in _CHANCES and not _picks(node)

    return any(user in linears for user in _reached(site.node, leads_on, limit=256))


def _is_router(site: Site) -> bool:
    """Whatever it is called, ``classifier`` say: nobody but the model sees what it gives."""
    return _is_picked_from(site) and not _is_returned(site) and not _enters_loss(site.node)


def by_router(site: Site, options: Options) -> Verdict:
    """Routers pick experts, and codebooks entries: a small error flips a discrete choice."""
    if _is_picked_from(site):
        weight = site.root_weight or site.weight
        is_table = weight is not None and _is_table(weight)
        what, picked = ("a codebook", "entries of a table") if is_table else ("a router", "experts")
        why = f"its result picks {picked}, and FP8 rounding would change the pick"
        return Cause.RULE, f"{what}: {why}; nothing to do: FP8 would lose accuracy"
    return None


def by_kind(site: Site, options: Options) -> Verdict:
    """Sharded and otherwise wrapped tensors have rules for the operators that they know."""
    for what, node in (("input", site.x), ("weight", site.weight), ("result", site.node)):
        kind = wrapped_kind(node)
        if kind:
            return Cause.UNSUPPORTED, f"its {what} is a {kind}; {in_plain_tensors(kind)}"
    return None


def by_dtype(site: Site, options: Options) -> Verdict:
    """FP8 copies are made of the three floating dtypes that models compute in."""
    for what, node in (("input", site.x), ("weight", site.weight), ("result", site.node)):
        value = value_of(node)
        if not isinstance(value, Tensor):
            return Cause.UNSUPPORTED, f"its {what} has no dtype and shape on record; nothing to do: it cannot be judged"
        if value.dtype not in DTYPES:
            return Cause.UNSUPPORTED, f"its {what} is {value.dtype}; cast it to bfloat16, float16 or float32 for FP8"
    of_input, of_weight = value_of(site.x).dtype, value_of(site.weight).dtype
    if of_input != of_weight and not _may_be_under_autocast(site):  # Dynamo's fake tensors are not so strict
        return Cause.UNSUPPORTED, f"its input is {of_input}, its weight {of_weight}, which PyTorch refuses; cast either"
    return None


def _may_be_under_autocast(site: Site) -> bool:
    """Is an autocast at work around the graph, or does one begin in it, or around the body that the site is in?"""
    if torch.is_autocast_enabled(value_of(site.node).device.type):
        return True
    region: Region | None = site.region
    while region is not None:
        if any(node.target is torch.amp.autocast_mode._enter_autocast for node in region.graph.nodes):
            return True
        region = region.parent
    return False


def by_size(site: Site, options: Options) -> Verdict:
    """A feature length below 16, the least that FP8 products take, would be mostly padding."""
    for what, size in zip(("in_features", "out_features"), site.features, strict=True):
        if size < ALIGNMENT:
            what_would_do = f"make it {ALIGNMENT} or more for FP8, or leave it: padding would cost more than it gains"
            return Cause.RULE, f"too narrow for FP8: {what}={size}; {what_would_do}"
    return None


def by_shape(site: Site, options: Options) -> Verdict:
    """Features must be known when the graph is compiled; the number of rows is free."""
    if value_of(site.x).dim() == 0 or any(not isinstance(size, int) for size in value_of(site.weight).shape):
        return Cause.UNSUPPORTED, "its features are not a fixed number; compile with dynamic=False for FP8"
    return None


def by_device(site: Site, options: Options) -> Verdict:
    """A GPU with FP8 tensor cores, or the CPU, which computes the same through reference operators."""
    devices = {value_of(node).device for node in (site.x, site.weight)}
    if len(devices) > 1:
        both = " and ".join(sorted(map(str, devices)))
        return Cause.UNSUPPORTED, f"its input and weight are on different devices, {both}; move them to one for FP8"
    target = Target.of(devices.pop())
    if target.device == "cpu":
        return None
    if target.device != "cuda":
        return (
            Cause.UNSUPPORTED,
            f"it is on {target.device!r}; move the model to a CUDA GPU for FP8 (a CPU runs the reference)",
        )
    if target.capability is not None and target.capability < (8, 9):
        have = ".".join(map(str, target.capability))
        return (
            Cause.UNSUPPORTED,
            f"this GPU has compute capability {have}; use one of 8.9 or newer for FP8 tensor cores",
        )
    return None


def by_cost(sites: Sequence[Site], options: Options) -> Iterator[tuple[Site, str]]:
    """On a GPU, those of ``sites`` that FP8 would make slower, and why; off on a CPU, where FP8 is about meaning and
    never about speed.

    Linears that read one input share its FP8 copy: together they gain if what they save is more than that takes.
    """
    if not options.cost_model:
        return
    training = torch.is_grad_enabled()
    for readers in readers_of_inputs(site for site in sites if value_of(site.x).device.type == "cuda"):
        saved = [saved_by(site, training) for site in readers]
        together = sum(each for each in saved if each > 0) >= price_of_input(readers[0], training)
        for site, each in zip(readers, saved, strict=True):
            if not together or each <= 0:
                yield site, _too_small(site, training, shares_input=together)


def _too_small(site: Site, training: bool, *, shares_input: bool) -> str:
    in_fp8 = fp8_microseconds(
        site.tokens, *site.features,
        padding=site.padding, training=training, weights=weights_of(site), shares_input=shares_input,
    )  # fmt: skip
    as_it_is = high_precision_microseconds(site.tokens, *site.features, training=training)
    shape = f"{site.tokens}×{site.features[0]}×{site.features[1]}"
    times = f"{shape} would take about {in_fp8:.0f} µs in FP8 against {as_it_is:.0f} µs"
    return f"too small to gain: {times}; cost_model=False forces it"


_TABLES = WeakIdKeyDictionary()
"""The parameters that an embedding reads in a graph captured so far: a graph break may part it from the head."""


def embedding_tables(plan: Plan) -> set[Node | None]:
    """The parameters of ``plan`` that embeddings read, in this graph or in one before it."""
    for node, parameter in plan.parameters.items():
        if _is_table(node):
            _TABLES[parameter] = True
    return {node for node, parameter in plan.parameters.items() if parameter in _TABLES}


RULES = (by_user, by_head, by_router, by_size, by_kind, by_dtype, by_shape, by_device)
"""Asked in this order, before what each would gain: what the user said first, support before speed."""

_WHATEVER_THE_SUPPORT = (by_user, by_head, by_router, by_size)
"""Rules that would keep a linear in high precision even if te_fp8 supported it."""


def select_linears(plan: Plan, options: Options) -> int:
    """Give every site of ``plan`` its verdict; returns how many go to FP8."""
    tables, linears = embedding_tables(plan), {site.node for site in plan.sites}
    for site in plan.sites:
        for rule in RULES:
            if site.cause is not None and rule not in _WHATEVER_THE_SUPPORT:
                break
            verdict = by_head(site, options, tables, linears) if rule is by_head else rule(site, options)
            if verdict is not None:
                site.cause, site.reason = verdict
                break
    for site, reason in by_cost(plan.selected, options):
        site.keep(Cause.RULE, reason)
    _one_device(plan)
    if options.cost_model and any(value_of(site.x).device.type == "cuda" for site in plan.selected):
        _only_what_the_step_gains_from(plan, options)
    return len(plan.selected)


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
