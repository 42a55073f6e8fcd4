"""The first operators of a graph played before it is called: which these are, and that only their own call takes them.

A stand-in for the GPU, as in tests/kernels/test_replay.py: memory from the CPU and a core whose functions write to
addresses. tests/gpu/test_head_start.py has the real one.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from te_compile import head_start
from te_compile.head_start import FirstSteps, HeadStart
from te_compile.kernels import native
from te_compile.kernels.recording import STREAM
from te_compile.kernels.replay import BoundCall, Replayed
from tests.kernels.test_replay import Core, Operator, expected, fresh
from tests.kernels.test_replay import core as core

pytestmark = pytest.mark.skipif(bool(native.missing()), reason="the C++ core is not built")

LENGTH = 5


class Product:
    """A product as the operator is known by its name: the sum of its first and its second, doubled."""

    def __init__(self, core: Core) -> None:
        self.core, self.ran = core, 0

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.ran += 1
        made = fresh(LENGTH)
        native.call(self.core.axpy, 0, x, y, made, 2.0, LENGTH, STREAM)
        return made


class Graph:
    """Generated code: ``norm`` of an input and a product of it, then one that reads what was computed in between."""

    def __init__(self, core: Core, early: bool = True) -> None:
        self.core = core
        self.norm = Replayed("norm_quantize", Operator(core)).site(early)
        self.product, self.last = (Replayed("gemm", Product(core)).site(early) for _ in range(2))
        self.launched_before = 0
        self.between: Callable[[Sequence[Any]], Any] = lambda inputs: None

    def __call__(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        self.launched_before = len(self.core.calls)
        self.between((x, y, w))
        normed, _ = self.norm(x[1 : LENGTH + 1], y, 3.0)
        product = self.product(normed, w)
        return self.last(product * 1, w)  # it is nobody's result


def inputs() -> list[Tensor]:
    return [torch.randn(LENGTH + 3), torch.randn(LENGTH), Parameter(torch.randn(LENGTH))]


def wanted(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    product = 2 * expected(x[1 : LENGTH + 1], y, 3.0) + w
    return 2 * product + w


def called(started: HeadStart, times: int = 6) -> None:
    for _ in range(times):
        given = inputs()
        torch.testing.assert_close(started([], list, given), wanted(*given).detach())


@pytest.fixture(autouse=True)
def _by_cpp(core: Core) -> None:
    from te_compile.kernels import player

    if player.core() is None:
        pytest.skip("what Python plays is not played early")


def test_what_needs_inputs_alone_is_launched_before_the_graph_is_called(core: Core) -> None:
    graph = Graph(core)
    started = HeadStart(graph, wanted=True)
    called(started)
    before = len(core.calls)
    called(started, 1)
    assert [len(step.sources) for step in started.steps] == [2, 2]
    assert graph.launched_before - before == 3  # two of the norm and one of the product
    assert len(core.calls) - before == 4 and started.misses == 0


def test_what_needs_no_copies_of_weights_is_launched_before_these_are_looked_after(core: Core) -> None:
    """The product reads a copy, the norm does not."""
    graph = Graph(core)
    started = HeadStart(lambda w, x, y: graph(x, y, w), wanted=True)
    launched: list[int] = []

    def called_with_copies() -> list[Tensor]:
        launched.append(len(core.calls))
        return [w]

    for _ in range(6):
        x, y, w = inputs()
        before = len(core.calls)
        torch.testing.assert_close(started([], called_with_copies, [x, y]), wanted(x, y, w).detach())
    assert launched[-1] - before == 2 and graph.launched_before - before == 3
    assert len(core.calls) - before == 4 and started.misses == 0 and len(launched) == 6


def test_what_was_made_early_is_gone_once_the_graph_is_done_with_it(core: Core) -> None:
    graph = Graph(core)
    gone: list[bool] = []

    def code(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        normed, other = graph.norm(x[1 : LENGTH + 1], y, 3.0)
        product, reference = graph.product(normed, w), weakref.ref(normed)
        del normed, other
        gone.append(reference() is None)
        return graph.last(product * 1, w)

    started = HeadStart(code, wanted=True)
    called(started, head_start.MOST_LOOKS + 2)
    assert started.steps and gone[-2:] == [True, True]
    assert sum(gone) > len(gone) - 4, (
        "nor does it live longer in calls that are looked at, once there is something to see"
    )


def test_who_looks_keeps_the_memory_of_no_more_than_the_first_calls() -> None:
    x = torch.randn(3)
    look = FirstSteps([[], [x], []])
    kept: list[weakref.ref[Tensor]] = []
    for at in range(1, head_start.MOST_CALLS + 1):
        made = torch.randn(3)
        kept.append(weakref.ref(made))
        assert look(BoundCall("norm_quantize", None, [x], made)) == (at < head_start.MOST_CALLS)
    del made
    assert not look.steps and not any(each() is not None for each in kept)


def test_places_are_seen_whenever_they_were_bound(core: Core) -> None:
    """Another graph has made calls of a product's kind, so its place is bound at once, and that of the norm later."""
    graph = Graph(core)
    for _ in range(2):
        graph.product(torch.randn(LENGTH), torch.randn(LENGTH))
    assert graph.product.bound
    started = HeadStart(graph, wanted=True)
    called(started)
    assert len(started.steps) == 2


def test_it_is_not_wanted_or_graphs_write_into_their_inputs(core: Core) -> None:
    for started in (HeadStart(Graph(core), wanted=False), HeadStart(Graph(core, early=False), wanted=True)):
        called(started, head_start.MOST_LOOKS + 2)
        assert not started.steps and not started.looks


def test_a_graph_without_a_product_of_its_inputs_has_no_head_start(core: Core) -> None:
    graph = Graph(core)
    graph.product = lambda x, w: 2 * x + w
    started = HeadStart(graph, wanted=True)
    called(started)
    assert not started.steps


def test_tensors_elsewhere_are_played_once_more_and_in_the_end_no_more_early(core: Core) -> None:
    graph = Graph(core)
    started = HeadStart(graph, wanted=True)
    called(started)
    norm = graph.norm

    def copied(x: Tensor, y: Tensor, factor: float) -> Any:  # as Inductor copies what lies badly
        return norm(torch.zeros(LENGTH + 1)[1:].copy_(x), y, factor)

    graph.norm = copied
    for at in range(head_start.MOST_MISSES + 1):
        assert started.steps and started.misses == at
        called(started, 1)
    assert not started.steps
    called(started, 2)


def test_nothing_that_was_made_early_outlives_a_call_that_fails(core: Core) -> None:
    graph = Graph(core)
    started = HeadStart(graph, wanted=True)
    called(started)
    before = {id(each): each for each in gc.get_objects() if type(each) is Tensor}
    made: list[weakref.ref[Tensor]] = []

    def fails(given: Sequence[Any]) -> None:
        others = (each for each in gc.get_objects() if type(each) is Tensor and id(each) not in before)
        made.extend(weakref.ref(each) for each in others if each.shape == (LENGTH,))
        raise RuntimeError("in between")

    graph.between = fails
    with pytest.raises(RuntimeError, match="in between"):
        started([], list, inputs())
    gc.collect()
    assert made and not any(each() is not None for each in made)
    graph.between = lambda given: None
    called(started, 2)


def test_a_tensor_that_is_none_is_left_to_the_graph(core: Core) -> None:
    """One of another class, a fake one among them, may have no address."""

    class Other(Tensor):
        pass

    graph = Graph(core)
    started = HeadStart(graph, wanted=True)
    called(started)
    x, y, w = inputs()
    before = len(core.calls)
    given = [x, y.as_subclass(Other), w]
    torch.testing.assert_close(started([], list, given).as_subclass(Tensor), wanted(x, y, w).detach())
    assert graph.launched_before == before


def test_inputs_that_share_memory_are_told_apart_by_where_they_begin(core: Core) -> None:
    graph = Graph(core)
    started = HeadStart(graph, wanted=True)
    both = torch.randn(LENGTH + 3 + LENGTH)
    for _ in range(6):
        given = [both[: LENGTH + 3], torch.randn(LENGTH), both[LENGTH + 3 :]]
        torch.testing.assert_close(started([], list, given), wanted(*given))
    assert not started.steps  # which of the two a slice of the first is of is not sure


def test_an_error_of_what_is_played_early_is_the_calls(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph(core)
    started = HeadStart(graph, wanted=True)
    called(started)

    start = started.start

    class Fails:
        """At what needs copies of weights."""

        def __call__(self, given: tuple[Any, ...], made: list[Any]) -> None:
            start(given, made)
            if len(given) == 3:
                raise torch.OutOfMemoryError("no memory")

        def forget(self) -> bool:
            return bool(start.forget())

    monkeypatch.setattr(started, "start", Fails())
    with pytest.raises(torch.OutOfMemoryError):
        started([], list, inputs())
    assert not start.forget()
