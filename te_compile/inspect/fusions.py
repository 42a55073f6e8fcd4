"""What the quantizes of each linear were merged with, read off the finished joint graph.

Each FP8 product (``te::gemm`` and its grouped forms) bears the name of its linear and which of the three products it
is. Its first operand is the FP8 copy of x (forward) or of dy (dgrad; wgrad where the input wants no gradient), and the
node that made the copy tells the story: a plain quantize, one merged with a norm, or a producer whose spec lists its
operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from te_compile.ops.fused_quantize_pair import RESULTS_OF_ONE
from te_compile.ops.gemms import labels_in
from te_compile.ops.grouped_gemm import PRODUCTS
from te_compile.ops.pointwise import ROUNDINGS, Place, Spec
from te_compile.passes.arguments import arguments_of, is_te, operator_of
from te_compile.passes.prune_outputs import PRODUCERS
from te_compile.passes.set_names_aside import label_of

_PRODUCTS = ("forward", "dgrad", "wgrad")
_MOST_OPERATIONS = 5  # in one description
_ADDED = (("forward", "y", "residual added"), ("dgrad", "dx", "another gradient added"))

# How AOTAutograd spells what people call by one word. For reading alone: nothing is decided by these.
_WORDS = (
    (("number", "mul", "mul"), "dropout"),
    (("neg", "exp", "add", "div"), "silu"),
    (("sigmoid", "mul", "sub", "mul", "add", "mul"), "silu backward"),
    (("mul", "erf", "add", "mul", "mul", "mul", "exp", "mul", "mul", "add", "mul"), "gelu backward"),
    (("mul", "mul", "mul", "mul", "add", "mul", "tanh", "add", "mul"), "gelu (tanh)"),
    (("mul", "mul", "erf", "add", "mul"), "gelu"),
    (("mul", "neg", "where", "mul", "add"), "rotation"),
    (("mul", "neg", "where", "where", "add", "mul", "add"), "rotation backward"),
)


@dataclass
class Use:
    """One linear in the joint graph: its name there, and its products (``_PRODUCTS``) as far as they are computed."""

    name: str
    gemms: dict[str, Node] = field(default_factory=dict)

    @property
    def fused(self) -> tuple[str, ...]:
        """What x and dy were quantised with, nothing for one that was quantised alone, and what the products add."""
        forward, backward = self.gemms.get("forward"), self.gemms.get("dgrad") or self.gemms.get("wgrad")
        found = (("x", forward), ("dy", backward))
        texts = [(which, producer_text(gemm, which)) for which, gemm in found if gemm is not None]
        texts += [(which, text) for product, which, text in _ADDED if _adds(self.gemms.get(product))]
        texts += [("y", f"in one launch with {others} more")] if (others := _launched_with(forward)) else []
        texts += [("x", "quantised again in backward")] if self._quantises_again() else []
        texts += [("dw", "adds to .grad")] if _adds_to_gradient(self.gemms.get("wgrad")) else []
        return tuple(f"{which}: {text}" for which, text in texts if text)

    def _quantises_again(self) -> bool:
        """Does the gradient of the weight read another copy of x than the one that the forward pass made?"""
        forward, wgrad = self.gemms.get("forward"), self.gemms.get("wgrad")
        if forward is None or wgrad is None:
            return False
        return producer_of(forward) not in (producer_of(wgrad), producer_of(wgrad, "b"))

    @property
    def implementation(self) -> str:
        """What runs its GEMMs and its quantizes: ``gemm cublaslt, quantize triton``."""
        producers = [producer for gemm in self.gemms.values() if (producer := producer_of(gemm)) is not None]
        parts = (("gemm", self.gemms.values()), ("quantize", producers))
        return ", ".join(f"{what} {names}" for what, nodes in parts if (names := _implementations(nodes)))


def _launched_with(gemm: Node | None) -> int:
    """With how many other products ``gemm`` is made at once."""
    return 0 if gemm is None else len(labels_in(label_of(gemm))) - 1


def _adds(gemm: Node | None) -> bool:
    return gemm is not None and arguments_of(gemm).get("addend") is not None


def _adds_to_gradient(gemm: Node | None) -> bool:
    return gemm is not None and is_te(gemm, "gemm_into_grad")


def _implementations(nodes: Iterable[Node]) -> str:
    return "/".join(dict.fromkeys(str(arguments_of(node)["implementation"]) for node in nodes))


def is_product(node: Node) -> bool:
    """Is ``node`` an FP8 product, or several in one launch?"""
    return any(is_te(node, name) for name in (*PRODUCTS, "gemms"))


def producer_of(gemm: Node, operand: str = "a") -> Node | None:
    """The node that quantised the first operand of ``gemm``, or the second, "b"; None for copies from outside."""
    node = arguments_of(gemm)[operand]
    while isinstance(node, Node) and not any(is_te(node, name) for name in PRODUCERS):
        node = node.args[0] if node.args else None
    return node if isinstance(node, Node) else None


def producer_text(gemm: Node, which: str) -> str:
    """What computes "x" or "dy" of ``gemm`` where it is quantised; "" for a quantize that stands alone."""
    producer = producer_of(gemm)
    if producer is None:
        return ""
    readers = {user for item in producer.users for user in item.users if is_product(user)}
    labels = [label for user in readers for label in labels_in(label_of(user)) if label.endswith(" forward")]
    shared = f"shared by {len(labels)}" if which == "x" and len(labels) > 1 else ""
    parts = [shared]
    if is_te(producer, "norm_quantize"):
        parts = [f"norm ({arguments_of(producer)['kind']})", shared]
    elif is_te(producer, "fused_quantize"):
        spec = Spec.parse(arguments_of(producer)["spec"])
        parts = [operations_text(spec, which), "bias gradient" if spec.sums else "", shared]
    elif is_te(producer, "fused_quantize_cat"):
        spec = Spec.parse(arguments_of(producer)["spec"])
        halves = " beside ".join(operations_text(spec.alone(index), which) for index in range(2))
        parts = [halves, "bias gradient" if spec.sums else "", shared]
    elif is_te(producer, "fused_quantize_pair"):
        index = arguments_of(gemm)["a"].args[1] // RESULTS_OF_ONE
        spec = Spec.parse(arguments_of(producer)["spec"]).alone(index)
        parts = [operations_text(spec, which), "in one pass with another gradient" if which == "dy" else "", shared]
    return ", ".join(part for part in parts if part)


def operations_text(spec: Spec, which: str) -> str:
    """The operations of ``spec``, which makes "x" or "dy", in order and each once: ``silu·mul``; no roundings."""
    columns = {f"x{i}": given.dtype for i, given in enumerate(spec.inputs) if given.place is Place.COLUMN}
    masks = {name for name, dtype in columns.items() if dtype == torch.bool}
    # Which rows an expert owns is a matter of te::grouped_linear, and none of the model's.
    own = [step for step in spec.steps if not (step.operation == "where" and step.operands[0] in masks)]
    operations = [step.operation for step in own if step.operation not in ROUNDINGS]
    if which == "dy" and len(columns) - len(masks) > 1:  # only norms have several row statistics
        return "norm backward" + (" + residual" if operations[-1:] == ["add"] else "")
    for sequence, word in _WORDS:
        for start in range(len(operations) - len(sequence), -1, -1):
            if tuple(operations[start : start + len(sequence)]) == sequence:
                operations[start : start + len(sequence)] = [word]
    distinct = list(dict.fromkeys(operations))
    return "·".join([*distinct[:_MOST_OPERATIONS], *["…"][: len(distinct) > _MOST_OPERATIONS]])


def uses_in(joint: Graph) -> dict[str, list[Use]]:
    """Every linear in FP8 of a joint graph by its name there; a weight used several times has that many, in order."""
    found: dict[str, dict[str, list[Node]]] = {}
    for node in joint.nodes:
        if node.op == "call_function" and is_product(node):
            for label in labels_in(label_of(node)):
                name, _, product = label.rpartition(" ")
                found.setdefault(name, {}).setdefault(product, []).append(node)
    return {name: _paired(name, gemms) for name, gemms in found.items()}


def _paired(name: str, gemms: dict[str, list[Node]]) -> list[Use]:
    """One use for each forward product: backward runs through them in reverse."""
    uses = [Use(name) for _ in gemms.get("forward", [])]
    for product in _PRODUCTS:
        nodes = gemms.get(product, [])
        ordered = nodes if product == "forward" else reversed(nodes)
        if len(nodes) == len(uses):
            for use, node in zip(uses, ordered, strict=True):
                use.gemms[product] = node
    return uses


def implementations_in(joint: Graph) -> tuple[Counter[tuple[str, str]], set[str]]:
    """How often each (operator, implementation) stands in the graph, and why better ones were not taken."""
    chosen: Counter[tuple[str, str]] = Counter()
    declined: set[str] = set()
    for node in joint.nodes:
        op = operator_of(node) if node.op == "call_function" else None
        if op is not None and op.namespace == "te" and "implementation" in (arguments := arguments_of(node)):
            operator = op._schema.name
            chosen[operator, str(arguments["implementation"])] += 1
            declined.update(f"{operator} {reason}" for reason in node.meta.get("te_declined", ()))
    return chosen, declined
