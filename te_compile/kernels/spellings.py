"""Cheaper spellings of what several steps of a spec say together: the same numbers with fewer instructions.

A producer has about 28 instructions an element before it is slower than memory, and activations come in the words of
their formulas, or as PyTorch decomposes them:

    1 + tanh(u)         2 · sigmoid(2u)              GELU and its backward; no branch for small u, and nothing cancels
    1 - tanh(u)²        4 · s · (1 - s), s = sigmoid(2u)
    1 + erf(u)          erfc(-u)                     the exact GELU and its backward; nothing cancels where it nears 0
    a / (1 + exp(-b))   a · sigmoid(b)               SiLU, as its forward is decomposed

Those of tanh and erf are taken only where no step wants tanh(u) or erf(u) itself, which would then be computed beside
them. What the reference computes differs by fp32's rounding alone. A step that nothing wants any more is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from te_compile.ops.pointwise import Operand, Spec, Step

ONE_PLUS_TANH = "one_plus_tanh"
ONE_LESS_TANH_SQUARED = "one_less_tanh_squared"
ONE_PLUS_ERF = "one_plus_erf"
TIMES_SIGMOID = "times_sigmoid"
_ONE_PLUS = {"tanh": ONE_PLUS_TANH, "erf": ONE_PLUS_ERF}


def spelled(spec: Spec) -> Iterator[tuple[str, Step]]:
    """Name and step of everything that must be computed, in order; operations may be those above besides the spec's."""
    steps = _Steps(spec)
    cheaper = {name: steps.cheaper(step) or step for name, step in steps.by_name.items()}
    wanted = set(spec.leaving)
    for name in reversed(cheaper):
        if name in wanted:
            wanted.update(operand for operand in cheaper[name].operands if isinstance(operand, str))
    return ((name, step) for name, step in cheaper.items() if name in wanted)


class _Steps:
    """A spec's steps, and how they hang together."""

    def __init__(self, spec: Spec) -> None:
        self.by_name = {f"t{i}": step for i, step in enumerate(spec.steps)}
        self._uses = Counter(operand for step in spec.steps for operand in step.operands)
        self._uses.update([*spec.roots, *(result.value for result in (*spec.emitted, *spec.sums))])
        curves = (name for name, step in self.by_name.items() if step.operation in _ONE_PLUS)
        self._curved = {name for name in curves if self._hidden(name)}

    def cheaper(self, step: Step) -> Step | None:
        """Another way to compute ``step``."""
        curve = self._one_plus_curve(step) or self._one_less_tanh_squared(step)
        if curve in self._curved:
            curved = self.by_name[curve]
            operation = _ONE_PLUS[curved.operation] if step.operation == "add" else ONE_LESS_TANH_SQUARED
            return Step(operation, curved.operands)
        if (exponent := self._logistic(step)) is not None:
            return Step(TIMES_SIGMOID, (step.operands[0], exponent))
        return None

    def _hidden(self, curve: str) -> bool:
        """Does every use of ``curve``, a tanh or erf, have a form that does without it?"""
        served = 0
        for step in self.by_name.values():
            served += self._one_plus_curve(step) == curve
            if self._one_less_tanh_squared(step) == curve and self._uses[step.operands[1]] == 1:
                served += 2  # the square has it twice
        return served == self._uses[curve]

    def _is(self, operand: Operand, operation: str) -> bool:
        return isinstance(operand, str) and operand in self.by_name and self.by_name[operand].operation == operation

    def _one_plus_curve(self, step: Step) -> str | None:
        """The tanh or erf in ``1 + tanh(u)`` or ``1 + erf(u)``."""
        others = self._one_plus(step)
        return next((name for name in others if any(self._is(name, curve) for curve in _ONE_PLUS)), None)

    def _one_less_tanh_squared(self, step: Step) -> str | None:
        """The tanh in ``1 - tanh(u)²``."""
        if step.operation != "sub" or step.operands[0] != 1 or not self._is(step.operands[1], "mul"):
            return None
        left, right = self.by_name[str(step.operands[1])].operands
        return str(left) if left == right and self._is(left, "tanh") else None

    def _logistic(self, step: Step) -> Operand | None:
        """The b in ``a / (1 + exp(-b))``."""
        if step.operation != "div" or not self._is(step.operands[1], "add"):
            return None
        for exponential in self._one_plus(self.by_name[str(step.operands[1])]):
            if self._is(exponential, "exp"):
                (exponent,) = self.by_name[exponential].operands
                if self._is(exponent, "neg"):
                    return self.by_name[str(exponent)].operands[0]
        return None

    def _one_plus(self, step: Step) -> Iterator[str]:
        """The other side of ``1 + …`` or ``… + 1``."""
        if step.operation == "add":
            for one, other in (step.operands, step.operands[::-1]):
                if one == 1 and isinstance(other, str):
                    yield other
