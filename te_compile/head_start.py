"""The first operators of a graph, launched before AOTAutograd's wrappers get to them.

A GPU that has been waited for is idle until its next step's first product is on its way, and much of that time goes by
in AOTAutograd and at the beginning of Inductor's code. Where the graph begins with a norm or a cast of its input and
the product that reads it, as that of a block compiled by itself does, the runner knows all that these need, so it has
them played first (csrc/python/start.cpp) and the generated code finds the results there. What needs no
copies of weights is played even before these are looked after. On an H200 this takes 0.09 ms off a layer's training
step of 10.3, and 0.025 off its forward of 3.15, switched on and off from call to call.

Inductor knows which calls need nothing but the graph's inputs and what such calls made, in a graph that writes into
none of them but FP8 states, which change at its end: only their places show themselves (fallbacks.py). Memory alone
would not tell: what lies where an early result lay may be another one by then. Which tensor is which is read off a call
of the graph. And a call takes only what was played with tensors at its own addresses, on its stream: whatever else
differs, it is played once more. A graph for which that happens again and again gets no more head starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from te_compile.kernels import player
from te_compile.kernels.replay import BoundCall, looking

MOST_CALLS = 4  # of the graph's first, among which the product must be: what is made early is held for longer
MOST_LOOKS = 8  # calls of the graph in which places may be bound
MOST_MISSES = 4  # calls in which what was played early was of no use
_PRODUCTS = ("gemm", "gemms")
_PLAIN = (Tensor, Parameter)

Source = tuple[int, int]
"""Where a tensor is: the number of a call made early, or -1 for the states, -2 for what the caller gave and -3 for the
copies of weights, and its place among those."""


@dataclass(frozen=True)
class _Step:
    """A call that can be played early. offsets: bytes into each source."""

    place: Any
    sources: list[Source]
    offsets: list[int]


class HeadStart:
    """Calls a compiled graph whose first operators may be played early."""

    def __init__(self, compiled: Callable[..., Any], wanted: bool) -> None:
        self.compiled = compiled
        self.looks = MOST_LOOKS if wanted else 0
        self.misses = 0
        self.start: Any = None  # plays ``steps``, as far as there is what they take: csrc/python/start.cpp
        self.steps: list[_Step] = []

    def __call__(self, states: Sequence[Any], copies_of_now: Callable[[], Sequence[Any]], args: Sequence[Any]) -> Any:
        """Run the graph, whose inputs are the FP8 ``states``, the copies of weights, which are asked for once, and
        ``args``."""
        start = self.start
        if start is not None:
            try:
                made: list[Any] = []
                start((states, args), made)
                copies = copies_of_now()
                start((states, args, copies), made)
                made.clear()  # the graph frees them when it is done with them
                return self.compiled(*states, *copies, *args)
            finally:
                if start.forget():  # nothing that was made early outlives the call
                    self._missed()
        if self.looks:
            self.looks -= 1
            return self._looked_at(states, copies_of_now(), args)
        return self.compiled(*states, *copies_of_now(), *args)

    def _missed(self) -> None:
        self.misses += 1
        if self.misses > MOST_MISSES:
            self.start, self.steps = None, []

    def _looked_at(self, states: Sequence[Any], copies: Sequence[Any], args: Sequence[Any]) -> Any:
        look = FirstSteps([states, args, copies])
        with looking(look):
            results = self.compiled(*states, *copies, *args)
        self.steps = look.steps
        plays = player.core()
        if self.steps and plays is not None:
            self.start = plays.start([(step.place, step.sources, step.offsets) for step in self.steps], _PLAIN)
        return results


class FirstSteps:
    """Looks at the calls of a graph that is called with what is ``given``, up to its first product."""

    def __init__(self, given: Sequence[Sequence[Any]]) -> None:
        self.given, self.made, self.seen = given, list[Sequence[Any]](), 0
        self.before: list[_Step] = []
        self.steps: list[_Step] = []  # with the product, once that was seen

    def __call__(self, call: BoundCall) -> bool:
        """Note a call if it needs nothing but what is given and what those noted made; are more of interest?"""
        self.seen += 1
        found = [_source_of(tensor, self.given, self.made) for tensor in call.tensors]
        known = [each for each in found if each is not None]
        if len(known) == len(found):
            self.before.append(_Step(call.place, [source for source, _ in known], [offset for _, offset in known]))
            self.made.append(_listed(call.results))
            if call.name in _PRODUCTS:
                self.steps = self.before
        if self.steps or self.seen == MOST_CALLS:
            self.given, self.made = (), []  # the graph frees them when it is done with them
            return False
        return True


def _listed(results: Any) -> Sequence[Any]:
    return [results] if isinstance(results, Tensor) else results


def _source_of(
    tensor: Tensor, given: Sequence[Sequence[Any]], made: Sequence[Sequence[Any]]
) -> tuple[Source, int] | None:
    """The one tensor that ``tensor`` lies in, and how many bytes into it; None if it is none or not for sure."""
    lists = [*((-1 - which, tensors) for which, tensors in enumerate(given)), *enumerate(made)]
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
