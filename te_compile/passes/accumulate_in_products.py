"""Let weight gradients be added to those that parameters have already by the products that they are the results of.

    return …, gemm(dyᵀ, xᵀ, …)      becomes      return …, gemm_into_grad(dyᵀ, xᵀ, …, place of the parameter)

With several backward passes before an optimizer's step autograd adds up gradients: each is written, read again, and the
sum read and written. The operator does it while it computes, if there is a gradient to add to, and otherwise returns
one, as the product did (ops/gemm_into_grad.py).

In the joint graph the gradients of the inputs are the last outputs, in the order of the inputs. Only a product that is
all of a gradient is rewritten: one that is read by somebody else as well, padded, cut or joined with others stays, and
so does the sum of two uses.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.fx import Graph, Node

from te_compile.ops import registry
from te_compile.ops.gemm_into_grad import GEMM_INTO_GRAD
from te_compile.passes.arguments import arguments_of, is_te, values_of
from te_compile.passes.memory import is_tangent
from te_compile.passes.new_nodes import call_like
from te_compile.passes.pointwise_nodes import VIEWS, tensor_arguments
from te_compile.passes.sizes import all_same

_INPUT = "primals_"


def accumulate_in_products(graph: Graph) -> int:
    """Rewrite each product that is the gradient of an input; returns how many."""
    inputs = [node for node in graph.find_nodes(op="placeholder") if node.name.startswith(_INPUT)]
    tensors = [node for node in inputs if isinstance(node.meta.get("val"), Tensor)]
    found = [(tensors.index(given), gradient) for given, gradient in _gradients(graph, inputs) if given in tensors]
    rewritten = 0
    for place, gradient in found:
        product = _product_behind(gradient)
        if product is not None and _is_supported(product, gradient):
            _rewrite(product, gradient, place, len(tensors))
            rewritten += 1
    return rewritten


def _gradients(graph: Graph, inputs: list[Node]) -> Iterator[tuple[Node, Node]]:
    """Each input of the joint graph that has a gradient, and that; nothing if it is not certain which is whose."""
    others = [node for node in graph.find_nodes(op="placeholder") if node not in inputs]
    results = graph.output_node().args[0]
    is_joint = bool(others) and all(map(is_tangent, others))
    if not is_joint or not isinstance(results, (list, tuple)) or len(results) < len(inputs):
        return
    pairs = list(zip(inputs, results[len(results) - len(inputs) :], strict=True))
    if all(gradient is None or _is_like(gradient, given) for given, gradient in pairs):
        for given, gradient in pairs:
            if isinstance(gradient, Node) and results.count(gradient) == 1:
                yield given, gradient


def _is_like(gradient: object, given: Node) -> bool:
    """Can ``gradient`` be that of the input ``given``?"""
    ours = gradient.meta.get("val") if isinstance(gradient, Node) else None
    theirs = given.meta.get("val")
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor) or ours.dim() != theirs.dim():
        return False
    return ours.device == theirs.device and all_same(ours.shape, theirs.shape)


def _product_behind(gradient: Node) -> Node | None:
    """The product that ``gradient`` is, under any shape, if nothing else reads it."""
    node, reader = gradient, gradient.graph.output_node()
    while node.target in VIEWS and list(node.users) == [reader]:
        node, reader = tensor_arguments(node)[0], node
    return node if is_te(node, "gemm") and list(node.users) == [reader] else None


def _is_supported(product: Node, gradient: Node) -> bool:
    """Can what runs ``product`` add to such a gradient, and is that all that there is to do?"""
    arguments, value = arguments_of(product), gradient.meta["val"]
    if arguments["bias"] is not None or arguments["addend"] is not None:
        return False
    if not all(isinstance(length, int) and length > 0 for length in value.shape) or not value.is_contiguous():
        return False
    known = values_of(arguments)
    target = registry.Target.of(known["a"].device)
    alone, _ = registry.choose("gemm", target, known)
    adding, _ = registry.choose("gemm_into_grad", target, known)
    return value.dtype == arguments["out_dtype"] and alone == adding


def _rewrite(product: Node, gradient: Node, place: int, inputs: int) -> None:
    arguments = arguments_of(product)
    names = ("a", "b", "a_scale_inv", "b_scale_inv", "out_dtype", "accumulation", "label")
    given = tuple(arguments[name] for name in names)
    with gradient.graph.inserting_before(gradient):
        new = call_like(GEMM_INTO_GRAD, (*given, list(gradient.meta["val"].shape), place, inputs), product)
    gradient.replace_all_uses_with(new)
    node = gradient
    while node is not product:
        node, behind = tensor_arguments(node)[0], node
        gradient.graph.erase_node(behind)
    gradient.graph.erase_node(product)
