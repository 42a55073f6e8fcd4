"""What a place of the C++ core plays before its call comes: that call alone takes it, and nothing is leaked.

tests/test_head_start.py has who plays early, and tests/kernels/test_player.py what else places do.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from te_compile.kernels import native
from tests.kernels.test_player import Around, Driver, bound, launch_step, tensors
from tests.kernels.test_player import around as around
from tests.kernels.test_player import core as core
from tests.kernels.test_player import driver as driver

pytestmark = pytest.mark.skipif(bool(native.missing()), reason="the C++ core is not built")


def early(core: Any, place: Any, given: list[Any], offsets: list[int] | None = None) -> Any:
    """The results of the call of these that the place is to expect, each so many bytes further; None if not played."""
    sources = [(-1, at) for at in range(len(given))]
    made: list[Any] = []
    core.start([(place, sources, offsets or [0] * len(given))], (Tensor,))((given,), made)
    return made[0] if made else None


def test_what_is_played_early_is_the_result_of_the_call_with_the_same_tensors(core: Any, around: Around) -> None:
    place, seen = bound(core, around)
    x, y, z = tensors()
    results = early(core, place, [x, y, z[1:]], [0, 0, -4])  # in the order of the paths, and bytes into each
    assert seen == [x.data_ptr(), y.data_ptr(), z.data_ptr()] and len(seen) == 3
    assert place(x, 3, [y], last=z) is results and len(seen) == 3
    assert place(x, 3, [y], last=z) is not results and len(seen) == 6  # once
    assert not place.forget() and not around.given_up


def other_tensor(place: Any, around: Around, x: Tensor, y: Tensor, z: Tensor) -> Any:
    return place(x, 3, [torch.zeros(8)], last=z)


def other_stream(place: Any, around: Around, x: Tensor, y: Tensor, z: Tensor) -> Any:
    around.offset = 16
    return place(x, 3, [y], last=z)


def other_alignment(place: Any, around: Around, x: Tensor, y: Tensor, z: Tensor) -> Any:
    return place(x[1:], 3, [y], last=z)


def fewer(place: Any, around: Around, x: Tensor, y: Tensor, z: Tensor) -> Any:
    return place(x, 3, [y])


@pytest.mark.parametrize("call", [other_tensor, other_stream, other_alignment, fewer])
def test_another_call_takes_nothing_of_what_was_played_early(core: Any, around: Around, call: Any) -> None:
    place, _ = bound(core, around)
    x, y, z = tensors()
    results = early(core, place, [x, y, z])
    watched = weakref.ref(results)
    assert call(place, around, x, y, z) is not results
    del results
    gc.collect()
    assert watched() is None and place.forget() and not place.forget()


def test_what_is_played_early_and_not_called_is_dropped(core: Any, around: Around) -> None:
    place, seen = bound(core, around)
    x, y, z = tensors()
    early(core, place, [x, y, z])
    second = early(core, place, [x, y, z])  # in its place
    assert place(x, 3, [y], last=z) is second and place.forget()
    watched = weakref.ref(early(core, place, [x, y, z]))
    assert place.forget()
    assert watched() is None
    assert len(seen) == 9


def test_what_cannot_be_played_is_not_played_early(core: Any, around: Around) -> None:
    place, seen = bound(core, around)
    x, y, z = tensors()
    assert early(core, place, [x, y]) is None
    assert early(core, place, [x, y, z], [0, 0, 4]) is None  # lies otherwise
    assert early(core, place, [x, y, 3]) is None
    around.capturing = True
    assert early(core, place, [x, y, z]) is None
    around.capturing = False
    core.unbind(place)
    assert early(core, place, [x, y, z]) is None and not seen and not place.forget()


def test_what_is_played_early_leaks_nothing(core: Any, around: Around, driver: Driver) -> None:
    place, seen = bound(core, around, [launch_step()])
    x, y, z = tensors()
    counts = []
    for _ in range(3):
        for _ in range(300):
            early(core, place, [x, y, z])
            place(x, 3, [y], last=z)
            early(core, place, [x, y, z])
            place(y, 3, [y], last=z)
            early(core, place, [x, y, z])
            place.forget()
        seen.clear()
        driver.launches.clear()
        gc.collect()
        counts.append([sys.getrefcount(each) for each in (x, y, z, place, around.unbound, None)])
    assert counts[1][:-1] == counts[2][:-1] and abs(counts[1][-1] - counts[2][-1]) < 100
