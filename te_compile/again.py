"""A call with the weights of the last one, of which nothing is new: that alone is asked before its first kernels.

A GPU that has been waited for is idle until a call's first product is on its way, and the host's caches are cold by
then: what :mod:`te_compile.runtime` and :mod:`te_compile.weight_cache` look up in 30 µs takes it 120. All of it follows
from the weights' identities, addresses and versions and a few counters. So a call whose copies of weights were kept is
remembered with these, the C++ core asks if they are the same (csrc/python/unchanged.cpp), and then the states and
copies are those of that call. What is launched stays the same: the copies are checked on the device as before.

It is remembered where the copies are known (``home``), and forgotten with them: it must not keep alive what others have
given up. Whoever looks for it holds no reference.

A model that never trained has no scales and measures at each call. Such a call is remembered as well, with the states
that lack one (``lacking``): as long as they do, its kernels are to be ready for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from te_compile import state
from te_compile.kernels import player

MOST_TRIES = 16  # calls remembered in a row of which none was met again, after which a graph remembers none


class Again:
    """What a call found: its states, and what checks the copies of its weights and hands them out."""

    __slots__ = ("__weakref__", "copies", "lacking", "states", "unchanged")

    def __init__(
        self,
        unchanged: Callable[[Any], bool],
        states: Sequence[Tensor],
        copies: Callable[[], Sequence[Tensor]],
        lacking: Sequence[int] = (),
    ) -> None:
        self.unchanged, self.states, self.copies, self.lacking = unchanged, tuple(states), copies, tuple(lacking)


class Memory:
    """The last calls of one compiled graph, by the first of their weights."""

    def __init__(self, positions: Sequence[int]) -> None:
        """positions: of all the weights that a call depends on among its arguments."""
        self.positions = list(positions)
        self.known: dict[int, weakref.ref[Again]] = {}
        self.tries = 0

    def of(self, args: tuple[Any, ...]) -> Again | None:
        """What is remembered of a call like this one, if all that it depended on is the same."""
        first = id(args[self.positions[0]])
        reference = self.known.get(first)
        if reference is None:
            return None
        again = reference()
        if again is None:
            self.known.pop(first, None)
            return None
        if not again.unchanged(args):
            return None
        self.tries = 0
        return again

    def remember(
        self,
        args: tuple[Any, ...],
        states: Sequence[Tensor],
        copies: Callable[[], Sequence[Tensor]],
        home: dict[int, Again],
        counter: dict[str, int],
        is_still_so: Callable[[], bool],
        lacking: Sequence[int] = (),
    ) -> None:
        """Remember this call, whose copies ``copies`` checks and returns.

        home: where, by the identity of the memory. counter: the entry "steps" of it is a number that must stay the
        same. is_still_so: are ``states`` and ``copies`` those of such a call? Asked once it is known what must not
        change from then on, for another thread may have changed it. lacking: numbers of states, one of which has no
        scale yet (te_compile/state.py).
        """
        home.pop(id(self), None)  # what the last one held is free
        plays = player.core()
        weights = [args[position] for position in self.positions]
        if plays is None or self.tries == MOST_TRIES or not all(map(_has_a_version, weights)):
            return
        self.tries += 1
        numbers = [(state._version, "now"), (counter, "steps")]
        questions = player.questions(makes_memory=False)
        unchanged = plays.unchanged(questions, args, self.positions, numbers, weights[0].get_device())
        if is_still_so():
            again = home[id(self)] = Again(unchanged, states, copies, lacking)
            self.known[id(weights[0])] = weakref.ref(again)


def _has_a_version(weight: Any) -> bool:
    return type(weight) in (Tensor, Parameter) and not weight.is_inference()
