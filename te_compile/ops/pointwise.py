"""The spec language: what a producer computes, as a short readable text.

A spec says how the matrix to be quantised, z [M, K], follows from tensors that exist anyway. It stands on the graph
node as a string, so a graph dump shows it, caches hash it, the reference below evaluates it with torch and
``te_compile.kernels.pointwise_source`` writes Triton code from it. One statement each for the inputs, for every
operation, and for what is wanted of the results::

    x0: bfloat16[M, K]; x1: bfloat16[K]; t0 = add(x0, x1); t1 = sigmoid(t0); t2 = mul(t0, t1); t3 = bfloat16(t2);
    quantize t3; emit t3: bfloat16; sum t3: float32

Inputs are whole matrices [M, K], rows [K], columns [M, 1] or scalars []; every operation broadcasts them. ``emit`` asks
for a value in high precision, ``sum`` for its sum over the M rows (a bias gradient). A second ``quantize`` names
another matrix of the same size, which then is all else that leaves.

A whole matrix may come in parts, which lie beside each other in it again and again: ``x0: bfloat16[M, K of 128 + 128]``
has 128 columns of the first tensor, then 128 of the second, the next 128 of the first and so on. Each part is given as
[A, S, G, D] with any strides, M = A · S rows of G · D columns: the layout of heads, so that the gradients of q, k and v
need be neither transposed nor joined before they are quantised. Columns may also be moved within a head, and some
tensors are the same for every head: te_compile.ops.pieces has the text and the meaning of that.

Numerics: a value is a number in fp32 or a truth, whatever dtype the graph gave it. It is rounded only where the spec
says so by ``float16(…)`` or ``bfloat16(…)``, which stand for the graph's explicit casts and for the final rounding of
z: what is quantised, emitted or summed has first been rounded to the dtype that it has in the graph. Between two bf16
operations nothing is rounded, as Inductor does it too.

Text is canonical: operations come in the order of a depth-first walk from z, equal ones are one, constants print
exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from te_compile.ops.partial_sums import partial_sums_of
from te_compile.ops.pieces import Piece, Span, assembled, parsed_pieces, period_of, tensors_of, wrong_pieces

Constant = float | int
Operand = str | Constant  # the name of a value, or a number
Given = TypeVar("Given")

NUMBER, TRUTH = "number", "truth"
ROUNDINGS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPES = {"bool": torch.bool, "float32": torch.float32, **ROUNDINGS}


class SpecError(ValueError):
    """A text that is no spec, or operands that an operation does not take."""


class Place(Enum):
    """Where an input varies; the value is how the text writes its shape."""

    FULL = "M, K"
    ROW = "K"
    COLUMN = "M, 1"
    SCALAR = ""
    HEAD = "M, D"
    SPAN = "columns"


@dataclass(frozen=True)
class Operation:
    """One word of the language: what it takes and gives (NUMBER or TRUTH), and its meaning in torch, on fp32."""

    takes: tuple[str, ...]
    gives: str
    torch: Callable[..., Tensor]


def _numbers(arity: int, function: Callable[..., Tensor]) -> Operation:
    return Operation((NUMBER,) * arity, NUMBER, function)


def _comparison(function: Callable[..., Tensor]) -> Operation:
    return Operation((NUMBER, NUMBER), TRUTH, function)


def _logic(arity: int, function: Callable[..., Tensor]) -> Operation:
    return Operation((TRUTH,) * arity, TRUTH, function)


def _rounding(dtype: torch.dtype) -> Operation:
    return _numbers(1, lambda x: x.to(dtype).float())


OPERATIONS: dict[str, Operation] = {
    **{name: _rounding(dtype) for name, dtype in ROUNDINGS.items()},
    "number": Operation((TRUTH,), NUMBER, lambda x: x.float()),
    "add": _numbers(2, torch.add),
    "sub": _numbers(2, torch.sub),
    "mul": _numbers(2, torch.mul),
    "div": _numbers(2, torch.div),
    "maximum": _numbers(2, torch.maximum),
    "minimum": _numbers(2, torch.minimum),
    "pow": _numbers(2, torch.pow),
    "neg": _numbers(1, torch.neg),
    "abs": _numbers(1, torch.abs),
    "sign": _numbers(1, torch.sign),
    "relu": _numbers(1, torch.relu),
    "floor": _numbers(1, torch.floor),
    "ceil": _numbers(1, torch.ceil),
    "reciprocal": _numbers(1, torch.reciprocal),
    "sqrt": _numbers(1, torch.sqrt),
    "rsqrt": _numbers(1, torch.rsqrt),
    "exp": _numbers(1, torch.exp),
    "exp2": _numbers(1, torch.exp2),
    "expm1": _numbers(1, torch.expm1),
    "log": _numbers(1, torch.log),
    "log2": _numbers(1, torch.log2),
    "log1p": _numbers(1, torch.log1p),
    "sigmoid": _numbers(1, torch.sigmoid),
    "tanh": _numbers(1, torch.tanh),
    "erf": _numbers(1, torch.erf),
    "sin": _numbers(1, torch.sin),
    "cos": _numbers(1, torch.cos),
    "lt": _comparison(torch.lt),
    "le": _comparison(torch.le),
    "gt": _comparison(torch.gt),
    "ge": _comparison(torch.ge),
    "eq": _comparison(torch.eq),
    "ne": _comparison(torch.ne),
    "and": _logic(2, torch.logical_and),
    "or": _logic(2, torch.logical_or),
    "xor": _logic(2, torch.logical_xor),
    "not": _logic(1, torch.logical_not),
    "where": Operation((TRUTH, NUMBER, NUMBER), NUMBER, torch.where),
}


@dataclass(frozen=True)
class Input:
    """What the producer reads; the i-th one is called ``x{i}``. ``parts``: the widths of its parts, if it has any.
    ``pieces``: where the columns of a head come from, if they are moved; ``span``: in which columns it is true, if it
    is about columns alone and no tensor is read."""

    dtype: torch.dtype
    place: Place
    parts: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()
    span: Span | None = None

    @property
    def own(self) -> int:
        """How many tensors it is given as, if not in pieces: their tensors are the spec's."""
        return 0 if self.span or self.pieces else max(1, len(self.parts))

    def text(self) -> str:
        """Dtype and shape."""
        if self.span:
            return f"bool[{self.span.text()}]"
        of = " + ".join([*map(str, self.parts), *(piece.text() for piece in self.pieces)])
        of = f" of {of}" if of else ""
        return f"{dtype_name(self.dtype)}[{self.place.value}{of}]"


@dataclass(frozen=True)
class Step:
    """One operation; the i-th result is called ``t{i}``."""

    operation: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class Result:
    """A value that leaves the producer in high precision, whole or summed over rows."""

    value: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Spec:
    """A producer. ``quantized`` names z, ``second`` another z if there are two; see the module for the text form."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    quantized: str
    emitted: tuple[Result, ...] = ()
    sums: tuple[Result, ...] = ()
    second: str = ""

    @property
    def roots(self) -> tuple[str, ...]:
        """What is quantised, one value or two."""
        return (self.quantized, self.second) if self.second else (self.quantized,)

    @property
    def tensors(self) -> int:
        """How many tensors its inputs are given as."""
        return sum(given.own for given in self.inputs) + len(self.tensors_in_pieces)

    @property
    def tensors_in_pieces(self) -> tuple[int, ...]:
        """The numbers of all tensors that come in pieces, in order."""
        return tuple(tensors_of([piece for given in self.inputs for piece in given.pieces]))

    @property
    def matrices(self) -> int:
        """How many whole matrices are read; one that is read at several columns of its heads is one."""
        known: set[int] = set()
        count = 0
        for given in self.inputs:
            tensors = set(tensors_of(given.pieces))
            count += given.place is Place.FULL and not (tensors and tensors <= known)
            known |= tensors
        return count

    @property
    def leaving(self) -> tuple[str, ...]:
        """What leaves the producer in any form, each value once."""
        return tuple(dict.fromkeys([*self.roots, *(result.value for result in (*self.emitted, *self.sums))]))

    def alone(self, index: int) -> Spec:
        """The producer of only the first or second value, from the same inputs."""
        builder = SpecBuilder()
        names: dict[Operand, Operand] = {}
        for i, given in enumerate(self.inputs):
            names[f"x{i}"] = builder.again(given)
        wanted = {self.roots[index]}
        for i, step in reversed(list(enumerate(self.steps))):
            if f"t{i}" in wanted:
                wanted.update(operand for operand in step.operands if isinstance(operand, str))
        for i, step in enumerate(self.steps):
            if f"t{i}" in wanted:
                names[f"t{i}"] = builder.step(step.operation, *(names.get(o, o) for o in step.operands))
        return builder.finish(str(names[self.roots[index]]), [], [])

    def lines(self) -> list[str]:
        """The statements of :meth:`text`."""
        return [
            *(f"x{i}: {given.text()}" for i, given in enumerate(self.inputs)),
            *(f"t{i} = {s.operation}({', '.join(map(str, s.operands))})" for i, s in enumerate(self.steps)),
            *(f"quantize {root}" for root in self.roots),
            *(f"emit {result.value}: {dtype_name(result.dtype)}" for result in self.emitted),
            *(f"sum {result.value}: {dtype_name(result.dtype)}" for result in self.sums),
        ]

    def text(self) -> str:
        """One line that :meth:`parse` reads back."""
        return "; ".join(self.lines())

    @cached_property
    def _hash(self) -> int:
        return hash(self.text())

    def __hash__(self) -> int:
        """Kernels are looked up by spec at every launch, so the hash is computed once."""
        return self._hash

    @staticmethod
    @cache
    def parse(text: str) -> Spec:
        """The spec whose :meth:`text` this is; SpecError names the statement that is wrong."""
        return _parsed(text)


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


_INPUT = re.compile(r"x(\d+): (\w+)\[(.*?)(?: of (.+))?\]")
_SPAN = re.compile(r"x(\d+): bool\[columns (\d+):(\d+) of (\d+)\]")
_PARTS = re.compile(r"\d+(?: \+ \d+)*")
_STEP = re.compile(r"t(\d+) = (\w+)\((.*)\)")
_QUANTIZE = re.compile(r"quantize ([xt]\d+)")
_RESULT = re.compile(r"(emit|sum) ([xt]\d+): (\w+)")
_NAME = re.compile(r"[xt]\d+")


def _parsed(text: str) -> Spec:
    builder = SpecBuilder()
    quantized: list[str] = []
    results: dict[str, list[Result]] = {"emit": [], "sum": []}
    for statement in text.split("; "):
        try:
            if match := _SPAN.fullmatch(statement):
                _must_be(builder.span(Span(*map(int, match.groups()[1:]))), f"x{match[1]}")
            elif match := _INPUT.fullmatch(statement):
                name: Operand = builder.again(_input(*match.groups()[1:]))
                _must_be(name, f"x{match[1]}")
            elif match := _STEP.fullmatch(statement):
                name = builder.step(match[2], *map(_operand, match[3].split(", ")))
                _must_be(name, f"t{match[1]}")
            elif match := _QUANTIZE.fullmatch(statement):
                quantized.append(match[1])
            elif match := _RESULT.fullmatch(statement):
                results[match[1]].append(Result(match[2], DTYPES[match[3]]))
            else:
                raise SpecError("unknown statement")
        except (KeyError, ValueError) as error:
            raise SpecError(f"{statement!r} in the spec {text!r}: {error}") from None
    if not 1 <= len(quantized) <= 2:
        many = f"{len(quantized)} values; at most two are possible" if quantized else "nothing"
        raise SpecError(f"the spec {text!r} quantises {many}")
    return builder.finish(quantized[0], results["emit"], results["sum"], *quantized[1:])


def _input(dtype: str, place: str, of: str | None) -> Input:
    if of is None:
        return Input(DTYPES[dtype], Place(place))
    if _PARTS.fullmatch(of):
        return Input(DTYPES[dtype], Place(place), tuple(map(int, of.split(" + "))))
    return Input(DTYPES[dtype], Place(place), pieces=parsed_pieces(of))


def _must_be(name: Operand, written: str) -> None:
    if name != written:
        raise SpecError(f"expected the name {name}: names count up, and equal operations are written once")


def _operand(text: str) -> Operand:
    if _NAME.fullmatch(text):
        return text
    if text in ("True", "False"):
        return text == "True"
    return float(text) if re.search(r"[.einf]", text) else int(text)


class SpecBuilder:
    """Collects inputs and steps; equal steps are one, and operands are brought to what an operation takes."""

    def __init__(self) -> None:
        self._inputs: list[Input] = []
        self._tensors = 0  # how many come in pieces
        self._steps: dict[Step, str] = {}
        self._kind: dict[str, str] = {}  # name → NUMBER or TRUTH
        self._dtype: dict[str, torch.dtype] = {}  # name → a dtype that holds the value exactly, if narrower than fp32

    def input(self, dtype: torch.dtype, place: Place, parts: tuple[int, ...] = ()) -> str:
        """A new input's name."""
        return self.again(Input(dtype, place, parts))

    def span(self, span: Span) -> str:
        """The name of what is true in the columns of ``span``; equal ones are one."""
        given = Input(torch.bool, Place.SPAN, span=span)
        return f"x{self._inputs.index(given)}" if given in self._inputs else self.again(given)

    def again(self, given: Input) -> str:
        """A new input's name, which is like ``given``."""
        if given.parts and (given.place is not Place.FULL or min(given.parts) < 1):
            raise SpecError("parts are what whole matrices have, of one column or more")
        if (given.place in (Place.HEAD, Place.SPAN)) > bool(given.pieces or given.span):
            raise SpecError("what varies within heads says how wide they are")
        wrong = wrong_pieces(given.pieces, self._tensors) if given.pieces else ""
        if wrong or (given.pieces and given.place not in (Place.FULL, Place.HEAD)):
            raise SpecError(wrong or "pieces are what whole matrices have, and what is the same for every head")
        if given.span and not 0 <= given.span.start < given.span.stop <= given.span.period:
            raise SpecError("a span begins before it ends, within its period")
        name = f"x{len(self._inputs)}"
        self._inputs.append(given)
        self._tensors = max([self._tensors, *(tensor + 1 for tensor in tensors_of(given.pieces))])
        self._kind[name] = TRUTH if given.dtype == torch.bool else NUMBER
        self._dtype[name] = given.dtype
        return name

    def step(self, operation: str, *operands: Operand) -> str:
        """The name of ``operation(*operands)``; truths become numbers and numbers truths where it wants so."""
        if operation not in OPERATIONS:
            raise SpecError(f"unknown operation {operation!r}; known: {', '.join(OPERATIONS)}")
        takes = OPERATIONS[operation].takes
        if len(operands) != len(takes) or not any(isinstance(operand, str) for operand in operands):
            raise SpecError(f"{operation} takes {len(takes)} operands, one of them a value; got {operands}")
        if any(operand != operand for operand in operands):
            raise SpecError("a NaN cannot be a constant: it would not equal itself when two specs are compared")
        step = Step(operation, tuple(self._as(kind, operand) for kind, operand in zip(takes, operands, strict=True)))
        if step not in self._steps:
            name = self._steps[step] = f"t{len(self._steps)}"
            self._kind[name] = OPERATIONS[operation].gives
            if operation in ROUNDINGS:
                self._dtype[name] = ROUNDINGS[operation]
        return self._steps[step]

    def cast(self, value: Operand, dtype: torch.dtype) -> Operand:
        """``value`` as ``dtype``: no step where that rounds nothing."""
        if not isinstance(value, str):
            return value
        if dtype == torch.bool:
            return self._as(TRUTH, value)
        if self._kind[value] == TRUTH:
            return self.step("number", value)
        narrow = dtype in ROUNDINGS.values() and self._dtype.get(value) != dtype
        return self.step(dtype_name(dtype), value) if narrow else value

    def kind(self, operand: Operand) -> str:
        """NUMBER or TRUTH."""
        if isinstance(operand, str):
            if operand not in self._kind:
                raise SpecError(f"{operand} is used before it is defined")
            return self._kind[operand]
        return TRUTH if isinstance(operand, bool) else NUMBER

    def finish(self, quantized: str, emitted: list[Result], sums: list[Result], second: str = "") -> Spec:
        """The spec that quantises the value ``quantized``, and ``second`` if one is named."""
        spec = Spec(tuple(self._inputs), tuple(self._steps), quantized, tuple(emitted), tuple(sums), second)
        for name in spec.leaving:
            if self.kind(name) == TRUTH:
                raise SpecError(f"{name} is a truth, not a number")
        if second and (emitted or second == quantized):
            raise SpecError("two values that are quantised are not the same, and neither leaves in high precision")
        return spec

    def _as(self, kind: str, operand: Operand) -> Operand:
        if self.kind(operand) == kind:
            return operand
        if not isinstance(operand, str):
            return float(operand) if kind == NUMBER else bool(operand)
        return self.step("number", operand) if kind == NUMBER else self.step("ne", operand, 0)


def grouped(spec: Spec, tensors: Sequence[Given]) -> list[tuple[Input, list[Given]]]:
    """Each input with the tensors, or nodes, that it is given as."""
    if len(tensors) != spec.tensors:
        raise SpecError(f"{len(tensors)} tensors for the inputs of {spec.text()!r}")
    found, rest = [], iter(tensors)
    named: dict[int, Given] = {}
    for given in spec.inputs:
        of_pieces = tensors_of(given.pieces)
        named.update({tensor: next(rest) for tensor in of_pieces if tensor not in named})
        own = [next(rest) for _ in range(given.own)]
        found.append((given, [named[tensor] for tensor in of_pieces] if given.pieces else own))
    return found


def extent(spec: Spec, inputs: list[Tensor]) -> tuple[Any, Any]:
    """M and K (ints, or symbols while tracing), from whichever inputs carry them."""
    rows = columns = None
    for given, tensors in grouped(spec, inputs):
        if not tensors or given.place is Place.HEAD:
            continue
        shape = tensors[0].shape
        if given.pieces:
            return shape[0] * shape[1], shape[2] * period_of(given.pieces)
        if given.parts:
            return shape[0] * shape[1], sum(part.shape[2] * part.shape[3] for part in tensors)
        if given.place is Place.FULL:
            return shape[0], shape[1]
        if given.place is Place.ROW:
            columns = shape[0]
        if given.place is Place.COLUMN:
            rows = shape[0]
    if rows is None or columns is None:
        raise SpecError(f"no input of {spec.text()!r} says how large z is")
    return rows, columns


def joined(given: Input, tensors: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    """An input as the spec sees it: the tensor itself, or the matrix [rows, columns] that its parts or pieces make.

    A span is none of tensors, and has no place here.
    """
    if given.pieces:
        return assembled(given.pieces, tensors, rows, columns)
    if not given.parts:
        return tensors[0]
    parts = (part.reshape(rows, -1, width) for part, width in zip(tensors, given.parts, strict=True))
    return torch.cat(tuple(parts), -1).reshape(rows, -1)


def _true_in(span: Span, columns: int, device: torch.device) -> Tensor:
    within = torch.arange(columns, device=device) % span.period
    return (within >= span.start) & (within < span.stop)


def _value(operand: Operand, values: dict[str, Tensor], device: torch.device) -> Tensor:
    if isinstance(operand, str):
        return values[operand]
    return torch.full((), operand, dtype=torch.bool if isinstance(operand, bool) else torch.float32, device=device)


def evaluate(spec: Spec, inputs: list[Tensor], partial_sums: bool = False) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The meaning of a spec: z as fp32 [M, K], what is emitted [M, K] and what is summed [K], in their own dtypes.
    ``partial_sums``: of sums the partial rows, fp32."""
    shape = extent(spec, inputs)
    device = inputs[0].device
    values: dict[str, Tensor] = {}
    for i, (given, tensors) in enumerate(grouped(spec, inputs)):
        x = _true_in(given.span, shape[1], device) if given.span else joined(given, tensors, *shape)
        values[f"x{i}"] = x if x.dtype == torch.bool else x.float()
    for i, step in enumerate(spec.steps):
        operands = (_value(operand, values, device) for operand in step.operands)
        values[f"t{i}"] = OPERATIONS[step.operation].torch(*operands)

    def whole(name: str) -> Tensor:
        return values[name].broadcast_to(shape)

    emitted = [whole(result.value).to(result.dtype, copy=True).contiguous() for result in spec.emitted]
    if partial_sums:
        return whole(spec.quantized), emitted, [partial_sums_of(whole(result.value)) for result in spec.sums]
    sums = [whole(result.value).sum(0).to(result.dtype) for result in spec.sums]
    return whole(spec.quantized), emitted, sums
