"""What one ATen node means in the spec language.

AOTAutograd has decomposed activations, gates, dropouts and their backwards into a small core of pointwise operators;
the table below has one line for each of those that the language knows. Beside them stand nodes that only rename
elements (views keep their order, so they mean nothing in the flat [M, K] space), casts, and constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from te_compile.ops.pointwise import DTYPES, Operand, SpecBuilder, SpecError

aten, prims = torch.ops.aten, torch.ops.prims

# The elements of the first argument in their order, under another shape.
VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
# The first argument itself, or a broadcast of it.
COPIES = {aten.clone.default, aten.alias.default, aten.detach.default, aten.expand.default}
CASTS = {prims.convert_element_type.default, aten._to_copy.default}
CONSTANTS = {aten.full.default, aten.full_like.default, aten.scalar_tensor.default}

Translation = Callable[..., Operand]
LARGEST_POWER = 16  # integer powers beyond it are not spelled out as products


def _plain(operation: str) -> Translation:
    return lambda builder, *operands: builder.step(operation, *operands)


def _scaled(operation: str) -> Translation:
    """add and sub: ``x ± alpha · y``."""

    def translate(builder: SpecBuilder, x: Operand, y: Operand, *, alpha: float = 1) -> Operand:
        if alpha != 1:
            y = builder.step("mul", y, alpha) if isinstance(y, str) else y * alpha
        return builder.step(operation, x, y)

    return translate


def _power(builder: SpecBuilder, x: Operand, exponent: Operand) -> Operand:
    """Products for integer powers, roots for halves, as torch computes them; ``pow`` for the rest."""
    if isinstance(exponent, str):
        raise SpecError("a power that is a tensor")
    if exponent in (0.5, -0.5):
        return builder.step("sqrt" if exponent > 0 else "rsqrt", x)
    if not float(exponent).is_integer():
        return builder.step("pow", x, exponent)
    if not 0 < abs(exponent) <= LARGEST_POWER:
        raise SpecError(f"a power of {exponent}")
    product = x
    for _ in range(int(abs(exponent)) - 1):
        product = builder.step("mul", product, x)
    return product if exponent > 0 else builder.step("reciprocal", product)


def _clamp(builder: SpecBuilder, x: Operand, low: Operand | None = None, high: Operand | None = None) -> Operand:
    x = x if low is None else builder.step("maximum", x, low)
    return x if high is None else builder.step("minimum", x, high)


def _add_product(operation: str) -> Translation:
    """addcmul and addcdiv: ``x + value · (a ∘ b)``."""

    def translate(builder: SpecBuilder, x: Operand, a: Operand, b: Operand, *, value: float = 1) -> Operand:
        product = builder.step(operation, a, b)
        return builder.step("add", x, product if value == 1 else builder.step("mul", product, value))

    return translate


def _is_infinite(builder: SpecBuilder, x: Operand) -> Operand:
    return builder.step("eq", builder.step("abs", x), float("inf"))


SAME_NAME = (
    *("neg", "abs", "sign", "relu", "floor", "ceil", "reciprocal", "sqrt", "rsqrt"),
    *("exp", "exp2", "expm1", "log", "log2", "log1p", "sigmoid", "tanh", "erf", "sin", "cos"),
)  # fmt: skip

COMPARISONS = {getattr(aten, name).Tensor for name in ("lt", "le", "gt", "ge", "eq", "ne")}
"""Of two tensors."""

TRANSLATIONS: dict[Any, Translation] = {
    aten.add.Tensor: _scaled("add"),
    aten.add.Scalar: _scaled("add"),
    aten.sub.Tensor: _scaled("sub"),
    aten.sub.Scalar: _scaled("sub"),
    aten.mul.Tensor: _plain("mul"),
    aten.mul.Scalar: _plain("mul"),
    aten.div.Tensor: _plain("div"),
    aten.div.Scalar: _plain("div"),
    aten.addcmul.default: _add_product("mul"),
    aten.addcdiv.default: _add_product("div"),
    aten.pow.Tensor_Scalar: _power,
    aten.maximum.default: _plain("maximum"),
    aten.minimum.default: _plain("minimum"),
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.clamp_min.default: _plain("maximum"),
    aten.clamp_min.Tensor: _plain("maximum"),
    aten.clamp_max.default: _plain("minimum"),
    aten.clamp_max.Tensor: _plain("minimum"),
    aten.where.self: _plain("where"),
    aten.lt.Scalar: _plain("lt"),
    aten.lt.Tensor: _plain("lt"),
    aten.le.Scalar: _plain("le"),
    aten.le.Tensor: _plain("le"),
    aten.gt.Scalar: _plain("gt"),
    aten.gt.Tensor: _plain("gt"),
    aten.ge.Scalar: _plain("ge"),
    aten.ge.Tensor: _plain("ge"),
    aten.eq.Scalar: _plain("eq"),
    aten.eq.Tensor: _plain("eq"),
    aten.ne.Scalar: _plain("ne"),
    aten.ne.Tensor: _plain("ne"),
    # The bitwise forms reach us on truths only: integers are no values of the language.
    aten.bitwise_and.Tensor: _plain("and"),
    aten.bitwise_or.Tensor: _plain("or"),
    aten.bitwise_xor.Tensor: _plain("xor"),
    aten.bitwise_not.default: _plain("not"),
    aten.logical_and.default: _plain("and"),
    aten.logical_or.default: _plain("or"),
    aten.logical_xor.default: _plain("xor"),
    aten.logical_not.default: _plain("not"),
    aten.isinf.default: _is_infinite,
    aten.isnan.default: lambda builder, x: builder.step("ne", x, x),
    **{getattr(aten, name).default: _plain(name) for name in SAME_NAME},
}


def value_of(node: Any) -> Tensor | None:
    """The (fake) tensor that ``node`` produces; None if it produces something else or is no node."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def tensor_arguments(node: Node) -> list[Node]:
    """The nodes whose elements ``node`` computes with; shapes given by nodes are none of them."""
    if node.target in CONSTANTS:
        return []
    if node.target in TRANSLATIONS:
        return list(dict.fromkeys(node.all_input_nodes))
    first = node.args[0]
    return [first] if isinstance(first, Node) else []


def constant_of(node: Node) -> Operand:
    """The number a node of CONSTANTS is full of, as its dtype holds it."""
    value = node.args[0] if node.target is aten.scalar_tensor.default else node.args[1]
    tensor = value_of(node)
    if not isinstance(value, (bool, int, float)) or tensor is None:
        raise SpecError(f"{node.name} is full of {value}")
    return torch.tensor(value, dtype=tensor.dtype, device="cpu").item()


def _compared(builder: SpecBuilder, argument: Node, operand: Operand, node: Node) -> Operand:
    """An operand, rounded if two tensors are compared: one may have been made of the other, as a maximum is, which is
    in memory as its dtype has it."""
    tensor = value_of(argument)
    return builder.cast(operand, tensor.dtype) if node.target in COMPARISONS and tensor is not None else operand


def translate(builder: SpecBuilder, node: Node, operands: dict[Node, Operand]) -> Operand:
    """Add the meaning of ``node`` to ``builder``; SpecError says what has none."""
    if node.target in CONSTANTS:
        return constant_of(node)
    if node.target in TRANSLATIONS:
        arguments = [
            _compared(builder, argument, operands[argument], node) if isinstance(argument, Node) else argument
            for argument in node.args
        ]
        meaning, result = TRANSLATIONS[node.target](builder, *arguments, **node.kwargs), value_of(node)
        # A sum of two truths is one, and not the number 2.
        return builder.cast(meaning, torch.bool) if result is not None and result.dtype == torch.bool else meaning
    operand = operands[tensor_arguments(node)[0]]
    tensor = value_of(node)
    assert tensor is not None
    return builder.cast(operand, tensor.dtype) if node.target in CASTS else operand


def is_zero(node: Any) -> bool:
    """Is ``node`` a tensor that is 0 everywhere, as one that something is added to is?"""
    if not isinstance(node, Node) or node.target not in CONSTANTS:
        return False
    return bool((node.args[0] if node.target is aten.scalar_tensor.default else node.args[1]) == 0)


def is_pointwise(node: Node) -> bool:
    """Does ``node`` stand in the tables, with tensors of dtypes that the language knows?"""
    if node.op != "call_function" or not any(
        node.target in table for table in (TRANSLATIONS, VIEWS, COPIES, CASTS, CONSTANTS)
    ):
        return False
    tensor, tensors = value_of(node), [value_of(argument) for argument in tensor_arguments(node)]
    if tensor is None or tensor.dtype not in DTYPES.values():
        return False
    # A tensor on another device would be a copy between devices.
    return all(each is not None and each.dtype in DTYPES.values() and each.device == tensor.device for each in tensors)
