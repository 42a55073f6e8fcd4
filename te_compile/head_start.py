"""The first operators of a graph, launched before AOTAutograd's wrappers get to them.

A GPU that has been waited for is idle until its next step's first product is on its way. On an H200's host that takes
half a millisecond, of which what AOTAutograd and Inductor's code do before their first kernel is a quarter. Where the
graph begins with a norm or a cast of its input and the product that reads it, as that of a block compiled by itself
does, the runner knows all that these need, so it has them played first (``early`` in csrc/python/place.cpp) and the
generated code finds the results there.

Which calls these are is read off a call of the graph: those whose tensors lie in the graph's inputs, or in what such
calls made. Inputs are what they were until the code gets there, for only the places of graphs that write into none of
them show themselves (fallbacks.py); FP8 states change at the end. And a call takes only what was played with tensors at
its own addresses, on its stream: whatever else differs, it is played once more. A graph for which that happens again
and again gets no more head starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from te_compile.kernels.replay import BoundCall, looking

MOST_CALLS = 4  # of the graph's first, among which the product must be: what is made early is held for longer
MOST_LOOKS = 8  # calls of the graph in which places may be bound
MOST_MISSES = 4  # calls in which what was played early was of no use
_PRODUCT = "gemm"
_PLAIN = (Tensor, Parameter)

Source = tuple[int, int]
"""Where a tensor is: the number of a call made early, or -1 for the graph's inputs, and its place among the results."""


@dataclass(frozen=True)
class _Step:
    """A call that can be played early. offsets: bytes into each source."""

    place: Any
    sources: list[Source]
    offsets: list[int]


class HeadStart:
    """Calls a compiled graph whose first operators may be played early; inputs: all that it takes."""

    def __init__(self, compiled: Callable[..., Any], wanted: bool) -> None:
        self.compiled = compiled
        self.looks = MOST_LOOKS if wanted else 0
        self.misses = 0
        self.steps: list[_Step] = []

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run the graph."""
        if self.steps:
            try:
                self._start(inputs)
                return self.compiled(*inputs)
            finally:
                self._end()
        if self.looks:
            self.looks -= 1
            return self._looked_at(inputs)
        return self.compiled(*inputs)

    def _start(self, inputs: Sequence[Any]) -> None:
        made: list[Sequence[Any]] = []
        for step in self.steps:
            found = [(inputs if call < 0 else made[call])[at] for call, at in step.sources]
            if any(type(each) not in _PLAIN for each in found):  # a fake one has no address
                return
            results = step.place.early(found, step.offsets)
            if results is None:
                return
            made.append(_listed(results))

    def _end(self) -> None:
        """Nothing that was made early outlives the call."""
        missed = [step.place.forget() for step in self.steps]
        self.misses += any(missed)
        if self.misses > MOST_MISSES:
            self.steps = []

    def _looked_at(self, inputs: Sequence[Any]) -> Any:
        with looking() as calls:
            results = self.compiled(*inputs)
        self.steps = first_steps(calls, inputs)
        return results


def first_steps(calls: Sequence[BoundCall], inputs: Sequence[Any]) -> list[_Step]:
    """Those of the first calls that need nothing but inputs, up to a product; none without one."""
    steps: list[_Step] = []
    made: list[Sequence[Any]] = []
    for call in calls[:MOST_CALLS]:
        found = [_source_of(tensor, inputs, made) for tensor in call.tensors]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            continue
        steps.append(_Step(call.place, [source for source, _ in known], [offset for _, offset in known]))
        made.append(_listed(call.results))
        if call.name == _PRODUCT:
            return steps
    return []


def _listed(results: Any) -> Sequence[Any]:
    return [results] if isinstance(results, Tensor) else results


def _source_of(tensor: Tensor, inputs: Sequence[Any], made: Sequence[Sequence[Any]]) -> tuple[Source, int] | None:
    """The one tensor that ``tensor`` lies in, and how many bytes into it; None if it is none or not for sure."""
    lists = [(-1, inputs), *enumerate(made)]
    storage = tensor.untyped_storage()._cdata
    within = [
        ((call, at), tensor.data_ptr() - each.data_ptr())
        for call, tensors in lists
        for at, each in enumerate(tensors)
        if type(each) in _PLAIN and each.untyped_storage()._cdata == storage
    ]
    if len(within) > 1:  # views of one memory: that which begins where it does
        within = [(source, offset) for source, offset in within if offset == 0]
    return within[0] if len(within) == 1 else None
