"""What the C++ core is asked instead of looking everything up again: each thing that may have changed is noticed.

tests/test_again.py has who asks.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from te_compile.kernels import native
from tests.kernels.test_player import Around
from tests.kernels.test_player import around as around
from tests.kernels.test_player import core as core

pytestmark = pytest.mark.skipif(bool(native.missing()), reason="the C++ core is not built")


class Call:
    """Arguments of which the first and the last are weights, and a number that must stay the same."""

    def __init__(self, core: Any, around: Around) -> None:
        self.around = around
        self.first, self.x, self.last = Parameter(torch.randn(3)), torch.randn(3), Parameter(torch.randn(3))
        self.numbers: dict[str, Any] = {"steps": 4}
        self.unchanged = core.unchanged(around.questions, self.arguments, [0, 2], [(self.numbers, "steps")], 0)

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return self.first, self.x, self.last


@pytest.fixture
def call(core: Any, around: Around) -> Call:
    return Call(core, around)


def test_a_call_of_the_same_weights_is_the_same_whatever_its_other_arguments(call: Call) -> None:
    assert call.unchanged(call.arguments) is True
    call.x = torch.randn(5)
    assert call.unchanged(call.arguments) and call.unchanged((*call.arguments, 3))


def edited(call: Call) -> None:
    with torch.no_grad():
        call.last.add_(1)


def new_data(call: Call) -> None:
    call.first.data = call.first.data.clone()


def another_object(call: Call) -> None:
    call.last = Parameter(call.last.data)


CHANGES: dict[str, Callable[[Call], Any]] = {
    "an edit in place": edited,
    "new data": new_data,
    "another parameter of the same memory": another_object,
    "a number": lambda call: call.numbers.update(steps=5),
    "a scale is missing": lambda call: call.around.pending["waiting"].add(1),
    "a flag": lambda call: call.around.flags.update(stopped=True),
    "a captured stream": lambda call: setattr(call.around, "capturing", True),
    "another device": lambda call: setattr(call.around, "current", 1),
    "another stream": lambda call: setattr(call.around, "offset", 16),
    "deterministic algorithms": lambda call: setattr(call.around, "deterministic", True),
    "somebody watches launches": lambda call: call.around.runtime.enter.calls.append(print),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_noticed(call: Call, change: str) -> None:
    assert call.unchanged(call.arguments)
    CHANGES[change](call)
    assert call.unchanged(call.arguments) is False


def test_fewer_arguments_are_another_call(call: Call) -> None:
    assert call.unchanged(call.arguments[:2]) is False and call.unchanged(()) is False


def test_wrong_calls_are_refused_by_name(call: Call, core: Any, around: Around) -> None:
    with pytest.raises(TypeError, match="unchanged takes"):
        call.unchanged(list(call.arguments))
    with pytest.raises(TypeError, match="unchanged takes"):
        call.unchanged(call.arguments, 1)
    with pytest.raises(IndexError, match="no such argument"):
        core.unchanged(around.questions, (call.x,), [1], [], 0)
    with pytest.raises(KeyError, match="steps"):
        core.unchanged(around.questions, (call.x,), [0], [({}, "steps")], 0)
    with pytest.raises(AttributeError):
        core.unchanged(around.questions, (3,), [0], [], 0)
    with torch.inference_mode():
        made = torch.randn(3)
    with pytest.raises(RuntimeError, match="version"):
        core.unchanged(around.questions, (made,), [0], [], 0)


def test_an_error_of_a_question_is_the_callers(call: Call) -> None:
    del call.numbers["steps"]
    with pytest.raises(KeyError, match="steps"):
        call.unchanged(call.arguments)


def test_it_keeps_no_weight_alive_and_leaks_nothing(core: Any, around: Around) -> None:
    call = Call(core, around)
    weight = call.first
    assert sys.getrefcount(weight) == 3  # the call's, ours and the argument's
    counts = []
    for _ in range(3):
        for _ in range(300):
            Call(core, around).unchanged(call.arguments)
            call.unchanged(call.arguments)
        gc.collect()
        counts.append((len(gc.get_objects()), sys.getrefcount(None), sys.getrefcount(around.questions["stream_of"])))
    assert counts[1][0] - counts[2][0] in range(-20, 20) and counts[1][2] == counts[2][2]
    assert abs(counts[1][1] - counts[2][1]) < 100
