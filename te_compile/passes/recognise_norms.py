"""Turn every norm that feeds a linear into one ``te::norm``.

Half of all models call ``F.layer_norm`` or ``F.rms_norm``; the others spell their norm out, each in its own dialect:

    x32 = x.to(float32)                                   or .float(), or nothing in a float32 model
    r = rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)    or x32 * x32, square, pow(…, -0.5)
    n = x32 * r                                           T5 multiplies x itself
    y = w * n.to(x.dtype)                                 Llama: round, then multiply by the weight
    y = (w * n).to(x.dtype)                               OLMo 2: multiply, then round; Gemma's weight is 1 + w

and Cohere a LayerNorm, which is the same of x less its mean.

Matching starts at r, the one node that no dialect leaves out, walks back to x and forward to y. Where y is rounded and
what it is multiplied with decide the kind (ops/norm.py); a sequence that fits no kind to the bit (but for the order in
which a row's sums are added up) is left alone.

A norm that feeds no linear (per-head norms of queries and keys, a norm before a residual add) would gain nothing, so it
stays as Inductor knows it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from te_compile.ops.norm import LAYER, NORM, RMS, RMS_FLOAT, RMS_MIXED, RMS_OFFSET, output_dtype
from te_compile.passes.captured_nodes import argument, settled_number, value_of, wrapped_kind
from te_compile.passes.drop_noop_casts import is_cast
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.side_effects import is_border
from te_compile.passes.written_tensors import writes, written_by

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PRODUCTS = {
    F.linear, torch._C._nn.linear, torch.addmm, torch.matmul, torch.mm, operator.matmul, "addmm", "matmul", "mm",
}  # fmt: skip
_VIEWS = {"view", "reshape", "contiguous", "flatten", "unflatten", "squeeze", "unsqueeze", torch.reshape, torch.flatten}


@dataclass(frozen=True)
class Norm:
    """A norm found: what ``te::norm`` will be given, and the nodes it stands for in graph order, its result last."""

    x: Node
    weight: Node | None
    bias: Node | None
    eps: float
    kind: str
    nodes: tuple[Node, ...]
    # Autocast widens the input of F.layer_norm and F.rms_norm without a node to show for it.
    widened: bool = False

    @property
    def result(self) -> Node:
        """The node that holds y."""
        return self.nodes[-1]


def _is_call(node: Any, *targets: Any) -> bool:
    """Is ``node`` a call of one of these functions, or of a method of one of these names?"""
    return isinstance(node, Node) and node.op in ("call_function", "call_method") and node.target in targets


def _is_float(node: Any) -> bool:
    value = value_of(node) if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.dtype in _DTYPES


def _dtype(node: Node) -> torch.dtype:
    return value_of(node).dtype


def _is_parameter_like(node: Any, x: Node) -> bool:
    """Can ``node`` be a weight for the last dimension of ``x``?"""
    return _is_float(node) and tuple(value_of(node).shape) == tuple(value_of(x).shape[-1:])


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _mul_operands(node: Any) -> tuple[Any, Any] | None:
    if _is_call(node, operator.mul, torch.mul, "mul") and len(node.args) == 2:
        return node.args[0], node.args[1]
    return None


def _other_operand(node: Any, operand: Node) -> Any:
    """What ``node`` multiplies ``operand`` with; None if it is no such product."""
    operands = _mul_operands(node)
    if operands is None or operand not in operands or operands[0] is operands[1]:
        return None
    return operands[1] if operands[0] is operand else operands[0]


def _plus_number(node: Any) -> tuple[Node, float | torch.SymFloat] | None:
    """(tensor, number) if ``node`` adds the one to the other."""
    if not _is_call(node, operator.add, torch.add, "add") or len(node.args) != 2 or node.kwargs:
        return None
    for tensor, number in (node.args, node.args[::-1]):
        if isinstance(tensor, Node) and isinstance(number, (int, float)):
            return tensor, float(number)
        symbolic = value_of(number) if isinstance(number, Node) else None
        if isinstance(symbolic, torch.SymFloat) and not free_unbacked_symbols(symbolic) and _is_float(tensor):
            return tensor, symbolic
    return None


def _squared(node: Any) -> Node | None:
    """The tensor of which ``node`` is the square."""
    if _is_call(node, operator.pow, torch.pow, "pow") and argument(node, 1, "exponent") == 2:
        return node.args[0]
    if _is_call(node, torch.square, "square"):
        return node.args[0]
    operands = _mul_operands(node)
    return operands[0] if operands is not None and operands[0] is operands[1] else None


def _row_mean(node: Any) -> Node | None:
    """The tensor of which ``node`` is the mean over the last dimension, kept as a dimension of 1."""
    if not _is_call(node, torch.mean, "mean") or argument(node, 2, "keepdim") is not True:
        return None
    source, dim = node.args[0], argument(node, 1, "dim")
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    if not _is_float(source) or dim not in (-1, value_of(source).dim() - 1):
        return None
    return source if argument(node, 3, "dtype") in (None, torch.float32) else None


def _inverse_root(node: Any) -> Node | None:
    """The tensor of which ``node`` is the inverse square root."""
    if _is_call(node, torch.rsqrt, "rsqrt"):
        return node.args[0]
    if _is_call(node, operator.pow, torch.pow, "pow") and argument(node, 1, "exponent") == -0.5:
        return node.args[0]
    return None


def _before_cast(node: Node) -> Node:
    """``node``, or the narrower tensor that it is a float32 copy of."""
    source = node.all_input_nodes[0] if is_cast(node) else node
    return source if _dtype(node) == torch.float32 and _is_float(source) else node


def _statistics(root: Node) -> tuple[Node, float, list[Node]] | None:
    """(x in float32, eps, the nodes between) if ``root`` is ``1 / sqrt(mean(x²) + eps)`` over the last dimension."""
    shifted = _inverse_root(root)
    if shifted is None or (sum_ := _plus_number(shifted)) is None:
        return None
    mean, eps = sum_
    if (square := _row_mean(mean)) is None or (x := _squared(square)) is None:
        return None
    chain = [square, mean, shifted]
    # Each step must be float32 and belong to this norm alone; x · x lists one user, its product.
    if not _is_float(x) or any(_dtype(node) != torch.float32 for node in (x, *chain, root)):
        return None
    if any(_only_user(node) is None for node in chain):
        return None
    return x, float(eps), chain  # a guard, where a module's eps is symbolic because all is dynamic


@dataclass(frozen=True)
class _Tail:
    """What happens to the normalised values: (round to ``inner``), times ``weight`` (plus one if ``offset``), round to
    ``outer``. ``nodes`` do it, ``aside`` prepare the weight."""

    inner: torch.dtype
    outer: torch.dtype
    weight: Node | None = None
    offset: bool = False
    nodes: tuple[Node, ...] = ()
    aside: tuple[Node, ...] = ()


def _weighted(tail: _Tail, product: Node, factor: Node) -> _Tail:
    """``tail``, times the weight behind ``factor``: w, w in float32, or 1 + w in float32."""
    aside: list[Node] = []
    one_plus = _plus_number(factor)
    is_one = one_plus is not None and isinstance(one_plus[1], float) and one_plus[1] == 1.0
    offset = is_one and _dtype(factor) == torch.float32
    weight = one_plus[0] if one_plus is not None and offset else factor
    if offset:
        aside.append(factor)
    if tail.inner == torch.float32 and _before_cast(weight) is not weight:
        aside.append(weight)
        weight = _before_cast(weight)
    nodes = (*tail.nodes, product)
    return replace(tail, outer=_dtype(product), weight=weight, offset=offset, nodes=nodes, aside=tuple(aside))


def _tails(normal: Node) -> list[_Tail]:
    """Every way to read what follows ``normal``, the longest last."""
    tails = [_Tail(torch.float32, torch.float32)]
    node = normal
    while (user := _only_user(node)) is not None:
        last = tails[-1]
        factor = _other_operand(user, node)
        if is_cast(user) and user.args[0] is node and _is_float(user):
            inner = _dtype(user) if last.weight is None else last.inner
            tails.append(replace(last, inner=inner, outer=_dtype(user), nodes=(*last.nodes, user)))
        elif last.weight is None and _is_parameter_like(factor, normal):
            tails.append(_weighted(last, user, factor))
        else:
            break
        if last.nodes and is_cast(last.nodes[-1]) and is_cast(user):
            break  # two casts in a row round twice
        node = user
    return tails


def _kind_for(x: torch.dtype, tail: _Tail) -> str | None:
    """The kind whose arithmetic for an input of dtype ``x`` is that of ``tail``."""
    if tail.weight is None:
        return RMS if tail.inner == tail.outer == x else None
    weight = _dtype(tail.weight)
    meets_weight_as = {RMS: x, RMS_MIXED: weight, RMS_FLOAT: torch.float32, RMS_OFFSET: torch.float32}
    for kind, inner in meets_weight_as.items():
        if (kind == RMS_OFFSET) == tail.offset and inner == tail.inner and output_dtype(x, weight, kind) == tail.outer:
            return kind
    return None


def _centred(node: Any) -> tuple[Node, Node, Node] | None:
    """(x in float32, x of which the mean is taken, its mean over rows) if ``node`` is x less its mean."""
    if not _is_call(node, operator.sub, torch.sub, "sub") or len(node.args) != 2 or node.kwargs:
        return None
    x, mean = node.args
    averaged = _row_mean(mean)
    if not _is_float(x) or averaged is None or _before_cast(averaged) is not _before_cast(x):
        return None
    return (x, averaged, mean) if _dtype(x) == _dtype(averaged) == _dtype(mean) == torch.float32 else None


def _layer_norm(root: Node) -> Norm | None:
    """The LayerNorm without a bias whose inverse standard deviation is ``root``."""
    if (statistics := _statistics(root)) is None or (normal := _only_user(root)) is None:
        return None
    deviation, eps, chain = statistics
    multiplied = _other_operand(normal, root)  # some compute x - mean twice
    centred = _centred(deviation)
    if centred is None or _centred(multiplied) != centred or _dtype(normal) != torch.float32:
        return None
    wide, averaged, mean = centred
    for tail in reversed(_tails(normal)):
        for x in dict.fromkeys((_before_cast(wide), wide)):
            # As F.layer_norm does, it meets its weight in float32 and rounds once, to the dtype of x.
            if tail.inner == torch.float32 and not tail.offset and tail.outer == _dtype(x):
                casts = [node for node in (wide, averaged) if node is not x]
                nodes = {*casts, mean, deviation, multiplied, *chain, root, *tail.aside, normal, *tail.nodes}
                return Norm(x, tail.weight, None, eps, LAYER, tuple(sorted(nodes)))
    return None


def _spelled_out(root: Node) -> Norm | None:
    """The RMSNorm whose inverse root mean square is ``root``."""
    if (statistics := _statistics(root)) is None or (normal := _only_user(root)) is None:
        return None
    wide, eps, chain = statistics
    multiplied = _other_operand(normal, root)
    if not _is_float(multiplied) or _before_cast(multiplied) is not _before_cast(wide):
        return None
    if _dtype(normal) != torch.float32:
        return None
    for tail in reversed(_tails(normal)):
        for x in dict.fromkeys((_before_cast(wide), wide)):
            if (kind := _kind_for(_dtype(x), tail)) is not None:
                casts = [node for node in (wide, multiplied) if node is not x]
                nodes = dict.fromkeys((*casts, *chain, root, *tail.aside, normal, *tail.nodes))
                return Norm(x, tail.weight, None, eps, kind, tuple(sorted(nodes)))
    return None


def _called(node: Node) -> Norm | None:
    """The norm that ``node`` is a call of, ``F.layer_norm`` or ``F.rms_norm``."""
    layer = _is_call(node, F.layer_norm, torch.layer_norm)
    if not layer and not _is_call(node, F.rms_norm, torch.rms_norm):
        return None
    x, shape, weight = argument(node, 0, "input"), argument(node, 1, "normalized_shape"), argument(node, 2, "weight")
    bias = argument(node, 3, "bias") if layer else None
    eps = argument(node, 4, "eps", 1e-5) if layer else argument(node, 3, "eps")
    eps = torch.finfo(torch.float32).eps if eps is None else settled_number(eps)
    if not _is_float(x) or eps is None or isinstance(shape, Node) or len(shape) != 1:
        return None
    if any(parameter is not None and not _is_parameter_like(parameter, x) for parameter in (weight, bias)):
        return None
    widened = _dtype(node) == torch.float32 != _dtype(x)
    return Norm(x, weight, bias, eps, LAYER if layer else RMS_FLOAT, (node,), widened)


def _written(tensor: Node) -> bool:
    """Is ``tensor`` itself changed in place by anyone?"""
    return any(tensor in written_by(user) for user in tensor.users)


def _stays_in_place(norm: Norm) -> bool:
    """Can all of ``norm`` happen where its last node stands?

    Not if between its first and its last node something is changed in place, or gradients or autocast are switched; nor
    if x is changed afterwards: what was spelled out may have saved a copy of it for backward, the operator saves x.
    """
    node, last = norm.nodes[0], norm.result
    while node is not last:
        if is_border(node) or writes(node):
            return False
        node = node.next
    return not _written(norm.x)


def _is_plain(norm: Norm) -> bool:
    """Is every operand an ordinary tensor, and none sharded over ranks?"""
    return not any(map(wrapped_kind, (norm.x, norm.weight, norm.bias)))


def _same_dtype(norm: Norm) -> bool:
    """Does ``te::norm`` return the dtype that the model got?"""
    weight = None if norm.weight is None else _dtype(norm.weight)
    x = torch.float32 if norm.widened else _dtype(norm.x)
    return output_dtype(x, weight, norm.kind) == _dtype(norm.result)


def _passes_on(user: Node, node: Node) -> bool:
    """Is ``user`` the same values as ``node``, in another shape or dtype?"""
    if user.args[:1] != (node,):
        return False
    if _is_call(user, operator.getitem):  # logits_to_keep = 0 leaves x[:, slice(0, None), :] before the LM head
        return isinstance(value_of(user), Tensor) and value_of(user).shape == value_of(node).shape
    return _is_call(user, *_VIEWS) or is_cast(user)


def feeds_linear(node: Node) -> bool:
    """Does the value of ``node`` reach a matrix product through nothing but views and casts?"""
    waiting = [node]
    for source in waiting:
        if any(_is_call(user, *_PRODUCTS) for user in source.users):
            return True
        waiting.extend(user for user in source.users if _passes_on(user, source))
    return False


def _rewrite(graph: Graph, norm: Norm) -> None:
    """Put ``te::norm`` where the result of ``norm`` stood, and take away what nobody else needs."""
    result = norm.result
    with graph.inserting_before(result):
        x = norm.x
        if norm.widened:
            x = graph.call_method("to", (x, torch.float32))
            x.meta = {**result.meta, "example_value": value_of(norm.x).to(torch.float32)}
        args = (x, norm.weight, norm.bias, norm.eps, norm.kind)
        new = graph.create_node("call_function", NORM, args, name="norm")
    new.meta = dict(result.meta)
    result.replace_all_uses_with(new)
    for node in reversed(norm.nodes):
        if not node.users:
            graph.erase_node(node)


_FORMS: tuple[Callable[[Node], Norm | None], ...] = (_called, _layer_norm, _spelled_out)


def _norms(graph: Graph) -> Iterator[Norm]:
    left = transforms_around(graph)
    for node in [node for node in graph.nodes if node not in left]:
        for form in _FORMS:
            norm = form(node)
            if norm is not None:
                yield norm
                break


def recognise_norms(graph: Graph) -> int:
    """Replace each norm over the last dimension whose result feeds a linear by ``te::norm``; returns how many."""
    count = 0
    for norm in _norms(graph):
        if _is_plain(norm) and feeds_linear(norm.result) and _same_dtype(norm) and _stays_in_place(norm):
            _rewrite(graph, norm)
            count += 1
    return count
