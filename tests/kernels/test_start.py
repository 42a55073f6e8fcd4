"""Several places of the C++ core played in a row before their calls: as far as there is what they take, and no further.

tests/test_head_start.py has what for.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from te_compile.kernels import native
from tests.kernels.test_player import Around, bound, tensors
from tests.kernels.test_player import around as around
from tests.kernels.test_player import core as core

pytestmark = pytest.mark.skipif(bool(native.missing()), reason="the C++ core is not built")

PLAIN = (Tensor, Parameter)


class Twice:
    """Two places, of which the second one takes what the first one makes, and from the third list of what is given."""

    def __init__(self, core: Any, around: Around) -> None:
        (self.first, self.seen), (self.second, self.seen_later) = bound(core, around), bound(core, around)
        self.start = core.start(
            [
                (self.first, [(-1, 0), (-2, 1), (-2, 0)], [0, 0, 0]),
                (self.second, [(0, 0), (-3, 0), (-1, 0)], [0, 0, 4]),
            ],
            PLAIN,
        )  # fmt: skip


def test_steps_are_played_once_each_as_soon_as_there_is_what_they_take(core: Any, around: Around) -> None:
    both, made = Twice(core, around), list[Any]()
    x, y, z = tensors()
    w = Parameter(torch.zeros(8))
    assert both.start(([x], (z, y)), made) is None
    assert both.seen == [each.data_ptr() for each in (x, y, z)] and len(made) == 1 and not both.seen_later
    both.start(([x], (z, y), [w]), made)
    assert both.seen_later == [made[0].data_ptr(), w.data_ptr(), x.data_ptr() + 4] and len(both.seen) == 3
    assert both.first(x, 3, [y], last=z) is made[0]
    assert both.second(made[0], 3, [w], last=x[1:]) is made[1]
    assert both.start.forget() is False and not around.given_up


@pytest.mark.parametrize("missing", ["a list", "a tensor", "its type", "its alignment"])
def test_what_is_not_there_ends_it(core: Any, around: Around, missing: str) -> None:
    both, made = Twice(core, around), list[Any]()
    x, y, z = tensors()
    given = {
        "a list": ([x],),
        "a tensor": ([x], [z]),
        "its type": ([x], [z, y.as_subclass(type("Other", (Tensor,), {}))]),
        "its alignment": ([x], [y, y]),
    }[missing]
    both.start(given, made)
    assert not made and not both.seen and not both.start.forget()


def test_what_nobody_takes_is_dropped_and_said(core: Any, around: Around) -> None:
    both = Twice(core, around)
    x, y, z = tensors()
    both.start(([x], (z, y)), [])
    assert both.start.forget() is True and both.start.forget() is False
    assert both.first(x, 3, [y], last=z) is not None and len(both.seen) == 6


def test_wrong_calls_are_refused_by_name(core: Any, around: Around) -> None:
    both = Twice(core, around)
    for arguments in ((), ([], []), ((), ()), ((), [], 1)):
        with pytest.raises(TypeError, match="a start takes"):
            both.start(*arguments)
    with pytest.raises(TypeError, match="of places"):
        core.start([(3, [], [])], PLAIN)
    with pytest.raises(ValueError, match="as many"):
        core.start([(both.first, [(-1, 0)], [])], PLAIN)
    with pytest.raises((TypeError, RuntimeError)):
        core.start([(both.first, [(-1, 0)], ["4"])], PLAIN)
    with pytest.raises(ValueError, match="from 0"):
        core.start([(both.first, [(-1, -1)], [0])], PLAIN)
    with pytest.raises(TypeError):
        type(both.start)()


def test_an_error_of_a_step_is_the_callers_and_nothing_leaks(core: Any, around: Around) -> None:
    both = Twice(core, around)
    x, y, z = tensors()
    counts = []
    for _ in range(3):
        for _ in range(300):
            both.start(([x], (z, y), [y]), [])
            both.start.forget()
        gc.collect()
        counts.append((len(gc.get_objects()), sys.getrefcount(x), sys.getrefcount(y)))
    assert counts[1][1:] == counts[2][1:] and abs(counts[1][0] - counts[2][0]) < 20

    def fails(device: int) -> int:
        raise RuntimeError("no stream")

    around.questions["stream_of"] = fails
    place, _ = bound(core, around)
    start = core.start([(place, [(-1, 0), (-1, 1), (-1, 2)], [0, 0, 0])], PLAIN)
    with pytest.raises(RuntimeError, match="no stream"):
        start(((x, y, z),), [])
