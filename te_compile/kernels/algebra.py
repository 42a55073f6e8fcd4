"""The same polynomials and logistic functions with fewer multiplications.

Formulas as models write them carry constants along: GELU halves its input, doubles a logistic function, and multiplies
a cubic by a constant that the exponential then multiplies again. Here steps are built up once more by rules that hold
for real numbers, and in fp32 but for rounding:

    constants of factors      (c·a)·(d·b) = (c·d)·(a·b)
    into a sum of a constant  c·(d·a + e) = (c·d)·a + c·e         one fused multiply-add
    a common factor           a + c·(a·b) = a·(c·b + 1)
    one logistic function     1 + tanh u = 2·s, 1 - tanh² u = 4·s·(1 - s), sigmoid(2u) = s: each of 1 / (1 + 2^v)
    one choice                (0 where c, else a) + (b where c, else 0) = (b where c, else a) + 0
    one bell curve            e^-u² is in 1 + erf u, and exp(-x² / 2) is the same where u = x / √2

Besides its logistic function tanh-GELU takes 5 multiplications and additions instead of 9, its backward 12 instead of
20; the backward of the exact GELU has one exponential instead of two. Steps are kept as they were where that saves
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from te_compile.kernels.pointwise_functions import ERFC_RATE
from te_compile.kernels.spellings import ONE_LESS_TANH_SQUARED, ONE_PLUS_ERF, ONE_PLUS_TANH, TIMES_SIGMOID
from te_compile.ops.pointwise import Operand, Step

LOGISTIC = "logistic"
"""1 / (1 + 2^v)."""
LOGISTIC_SLOPE = "logistic_slope"
"""v · (1 - v), of what a logistic function gives."""
BELL = "bell"
"""2^v of a v that is never positive."""
NORMAL_CDF = "normal_cdf"
"""(1 + erf(u)) / 2 from (x, ERFC_RATE · u / x, e^-u²), where x has the sign of u."""

_LOG2_E = 1.4426950408889634  # 1 / ln 2
_PER_SIGMOID = -_LOG2_E  # sigmoid(u) = 1 / (1 + 2^(u · this))
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100  # constants beyond are left apart: fp32 might not hold what they make
# Instructions, roughly: a logistic function is an exponential, an addition and a reciprocal.
_WORK = {
    "number": 0, LOGISTIC: 5, "sigmoid": 6, TIMES_SIGMOID: 7, ONE_PLUS_TANH: 7, ONE_LESS_TANH_SQUARED: 9, "exp": 7,
    BELL: 3, ONE_PLUS_ERF: 21, NORMAL_CDF: 15,
}  # fmt: skip

Named = list[tuple[str, Step]]


def simplified(named: Iterable[tuple[str, Step]], wanted: Iterable[str]) -> tuple[Named, dict[str, str]]:
    """``named`` steps in order, written anew as far as ``wanted`` values need them, and what those are called now."""
    before = list(named)
    built = _Builder()
    new: dict[Operand, Operand] = {}
    for name, step in before:
        new[name] = built.step(step.operation, *(new.get(operand, operand) for operand in step.operands))
    found = {name: new.get(name, name) for name in wanted}
    after = built.needed_for(found.values())
    if not all(isinstance(value, str) for value in found.values()) or _work(after) >= _work(before):
        return before, {name: name for name in found}
    return after, {name: str(value) for name, value in found.items()}


def _work(named: Named) -> int:
    return sum(_WORK.get(step.operation, 1) for _, step in named)


def _fits(constant: float) -> bool:
    return constant == 0 or _SMALLEST < abs(constant) < _LARGEST


def _is_constant(operand: Operand) -> bool:
    return not isinstance(operand, str)


class _Builder:
    """Steps by what they compute: equal ones are one."""

    def __init__(self) -> None:
        self._names: dict[Step, str] = {}
        self._steps: dict[str, Step] = {}

    def step(self, operation: str, *operands: Operand) -> Operand:
        """``operation`` of ``operands``, in the cheapest form known."""
        a, b = (*operands, 0, 0)[:2]
        if operation == "mul":
            return self._product(a, b)
        if operation == "add":
            return self._sum(a, b)
        if operation == "sigmoid":
            return self._logistic(a, 1.0)
        if operation == TIMES_SIGMOID:
            return self._product(a, self._logistic(b, 1.0))
        if operation == ONE_PLUS_TANH:
            return self._times(self._logistic(a, 2.0), 2.0)
        if operation == ONE_LESS_TANH_SQUARED:
            half = self._logistic(a, 2.0)
            return self._times(self._new(LOGISTIC_SLOPE, half), 4.0)
        if operation == ONE_PLUS_ERF:
            return self._one_plus_erf(a)
        if operation == "exp":
            return self._exponential(a)
        return self._new(operation, *operands)

    def needed_for(self, wanted: Iterable[Operand]) -> Named:
        """The steps that lead to ``wanted``, in order."""
        needed = {name for name in wanted if isinstance(name, str)}
        for name, step in reversed(self._steps.items()):
            if name in needed:
                needed.update(operand for operand in step.operands if isinstance(operand, str))
        return [(name, step) for name, step in self._steps.items() if name in needed]

    def _new(self, operation: str, *operands: Operand) -> str:
        step = Step(operation, operands)
        if step not in self._names:
            name = self._names[step] = f"v{len(self._names)}"
            self._steps[name] = step
        return self._names[step]

    def _operands(self, name: Operand, operation: str) -> tuple[Operand, Operand] | None:
        """Those of ``name`` if it is such a step of two."""
        step = self._steps.get(name) if isinstance(name, str) else None
        return (step.operands[0], step.operands[1]) if step is not None and step.operation == operation else None

    def _parted(self, value: Operand) -> tuple[Operand, float]:
        """``value`` as something times a constant."""
        operands = self._operands(value, "mul")
        if operands is not None and _is_constant(operands[1]):
            return operands[0], float(operands[1])
        return value, 1.0

    def _product(self, a: Operand, b: Operand) -> Operand:
        if _is_constant(a):
            a, b = b, a
        if _is_constant(b):
            return float(a) * float(b) if _is_constant(a) else self._times(a, float(b))
        (bare_a, c), (bare_b, d) = self._parted(a), self._parted(b)
        if not _fits(c * d):
            return self._new("mul", a, b)
        return self._times(self._new("mul", bare_a, bare_b), c * d)

    def _times(self, value: Operand, constant: float) -> Operand:
        """``constant`` · ``value``, by changing constants that ``value`` has already where there are some."""
        bare, inner = self._parted(value)
        if not _fits(constant * inner):
            return self._new("mul", value, constant)
        value, constant = bare, constant * inner
        if constant == 1.0:
            return value
        affine = self._times_affine(value, constant)
        if affine is not None:
            return affine
        factors = self._operands(value, "mul")
        if factors is not None:
            for factor, other in (factors, factors[::-1]):
                affine = self._times_affine(factor, constant)
                if affine is not None:
                    return self._new("mul", other, affine)
        return self._new("mul", value, constant)

    def _times_affine(self, value: Operand, constant: float) -> Operand | None:
        """``constant`` · (d·a + e), if ``value`` is such a sum."""
        terms = self._operands(value, "add")
        if terms is None or not _is_constant(terms[1]):
            return None
        a, d = self._parted(terms[0])
        if not (_fits(d * constant) and _fits(float(terms[1]) * constant)):
            return None
        return self._new("add", self._new("mul", a, d * constant), float(terms[1]) * constant)

    def _sum(self, a: Operand, b: Operand) -> Operand:
        if _is_constant(a):
            a, b = b, a
        chosen = self._sum_of_choices(a, b) or self._sum_of_choices(b, a)
        if chosen is not None:
            return chosen
        for one, other in ((a, b), (b, a)):
            product, constant = self._parted(other)
            factors = self._operands(product, "mul")
            if factors is not None and one in factors and isinstance(one, str):
                rest = factors[1] if factors[0] == one else factors[0]
                return self._new("mul", one, self._new("add", self._times(rest, constant), 1.0))
        return self._new("add", a, b)

    def _sum_of_choices(self, one: Operand, other: Operand) -> Operand | None:
        """The halves of heads that a rotation has brought to their places, as one. + 0 makes +0 of -0, as before."""
        first, second = (self._steps.get(each) if isinstance(each, str) else None for each in (one, other))
        if first is None or second is None or (first.operation, second.operation) != ("where", "where"):
            return None
        (condition, nothing, a), (same, b, too) = first.operands, second.operands
        if condition != same or _is_constant(a) or _is_constant(b) or (nothing, too) != (0, 0):
            return None
        return self._new("add", self._new("where", condition, b, a), 0.0)

    def _logistic(self, u: Operand, factor: float) -> Operand:
        """sigmoid(``factor`` · u)."""
        return self._new(LOGISTIC, self._product(u, factor * _PER_SIGMOID))

    def _one_plus_erf(self, u: Operand) -> Operand:
        x, factor = self._parted(u)
        if not (factor > 0 and _fits(factor * factor)):
            x, factor = u, 1.0
        bell = self._bell(self._new("mul", x, x), -factor * factor)
        return self._times(self._new(NORMAL_CDF, x, ERFC_RATE * factor, bell), 2.0)

    def _exponential(self, exponent: Operand) -> Operand:
        square, factor = self._parted(exponent)
        factors = self._operands(square, "mul")
        if factors is not None and factors[0] == factors[1] and factor < 0:
            return self._bell(square, factor)
        return self._new("exp", exponent)

    def _bell(self, square: Operand, factor: float) -> Operand:
        """e^(``factor`` · ``square``); equal ones must be written equal, so the last digits of their factors go."""
        return self._new(BELL, self._times(square, float(f"{factor * _LOG2_E:.12g}")))
