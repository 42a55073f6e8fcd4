"""What the C++ core plays and asks, on a pretended driver: launches, memory, results, errors, places, threads.

tests/kernels/test_replay.py holds the core against Python; here is what only the core does.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from te_compile.kernels import buffers, driver_launch, native, player
from te_compile.kernels.driver_launch import DriverLaunch
from te_compile.kernels.replay import Binding, Step, Tape

pytestmark = pytest.mark.skipif(bool(native.missing()), reason="the C++ core is not built")

STREAM = 0x7F00_0000_1230
POINTER, UNSIGNED = ctypes.c_void_p, ctypes.c_uint
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, *[UNSIGNED] * 7, POINTER, ctypes.POINTER(POINTER), POINTER)
CONTEXT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
ERROR = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))


class Driver:
    """Notes launches of kernels with ``words`` parameters. ``status``: what launches return."""

    def __init__(self, words: int = 3) -> None:
        self.words, self.status, self.has_context = words, 0, True
        self.launches: list[tuple[Any, ...]] = []
        self.entries = (LAUNCH(self.launch), CONTEXT(self.context), ERROR(self.error))

    def launch(self, function: int, *rest: Any) -> int:
        *sizes, stream, parameters, extra = rest
        words = tuple(ctypes.cast(parameters[at], ctypes.POINTER(ctypes.c_uint64))[0] for at in range(self.words))
        assert extra is None
        self.launches.append((function, tuple(sizes), stream, words))
        return self.status

    def context(self, found: Any) -> int:
        found[0] = 1 if self.has_context else None
        return 0

    def error(self, status: int, text: Any) -> int:
        text[0] = b"out of something"
        return 0


@pytest.fixture
def core() -> Any:
    return native.module()


@pytest.fixture
def driver(core: Any) -> Iterator[Driver]:
    made = Driver()
    core.pretend_driver(*(ctypes.cast(entry, ctypes.c_void_p).value for entry in made.entries))
    yield made
    core.pretend_driver(0, 0, 0)


def no_call(*arguments: Any) -> None:
    raise AssertionError("Python was asked to do it")


def launch_step(places: Any = ((0, 0, 0), (2, -1, 0)), function: Callable[..., Any] = no_call) -> tuple[Any, ...]:
    """Three words, of which two are addresses."""
    return (function, [5, None], [(1, 0, 8)], "launch", (0xABC0, (3, 2, 1), 128, 64, [0, 7, 0], list(places)))


def fresh(length: int) -> tuple[Any, ...]:
    return "fresh", torch.empty, ((length,),)


def call(made: Any, *tensors: Tensor) -> Any:
    return made(list(tensors), [tensor.data_ptr() for tensor in tensors], 0, STREAM)


# --- steps ------------------------------------------------------------------------------------------------------------


def test_a_launch_gets_its_grid_its_stream_and_the_addresses_of_this_call(core: Any, driver: Driver) -> None:
    places = [(0, 0, 16), (1, 1, 0), (2, -1, 0)]
    made = core.player(1, [fresh(4)], [launch_step(places)], 1, None)
    for _ in range(3):
        x = torch.zeros(8)
        y = call(made, x)
        function, sizes, stream, words = driver.launches[-1]
        assert (function, sizes, stream) == (0xABC0, (3, 2, 1, 128, 1, 1, 64), STREAM)
        assert words == (x.data_ptr() + 16, y.data_ptr(), STREAM)
    assert len(driver.launches) == 3


def test_constants_stay_and_steps_keep_their_order(core: Any, driver: Driver) -> None:
    order: list[Any] = []
    noted = (lambda *given: order.append((len(driver.launches), given)), ["a", 0, "b"], [(1, 0, 4)])
    made = core.player(1, [], [launch_step(), noted, launch_step(), launch_step(), noted], [], None)
    x = torch.zeros(8)
    assert call(made, x) == [] and made.steps == (3, 5)
    assert order == [(1, ("a", x.data_ptr() + 4, "b")), (3, ("a", x.data_ptr() + 4, "b"))]
    assert [words for *_, words in driver.launches] == [(x.data_ptr(), 7, STREAM)] * 3


def test_what_the_driver_refuses_is_the_error_of_tritons_launcher(core: Any, driver: Driver) -> None:
    after: list[Any] = []
    made = core.player(1, [], [launch_step(), launch_step(), (after.append, [1], [])], [], None)
    driver.status = 700
    with pytest.raises(RuntimeError, match=r"^Triton Error \[CUDA\]: out of something$"):
        call(made, torch.zeros(8))
    assert len(driver.launches) == 1 and not after


def test_a_thread_without_a_context_leaves_launches_to_triton(core: Any, driver: Driver) -> None:
    driver.has_context = False
    calls: list[Any] = []
    made = core.player(1, [], [launch_step(function=lambda *given: calls.append(given))], [], None)
    x = torch.zeros(8)
    call(made, x)
    assert calls == [(5, x.data_ptr() + 8)] and not driver.launches


def test_without_a_driver_python_launches(core: Any) -> None:
    if not core.driver_missing():
        pytest.skip("there is one here")
    calls: list[Any] = []
    made = core.player(1, [], [launch_step(function=lambda *given: calls.append(given))], [], None)
    call(made, torch.zeros(8))
    assert len(calls) == 1


def test_a_product_that_cannot_be_prepared_is_left_to_python(core: Any, driver: Driver) -> None:
    """Here its scales do not start on a multiple of 16 bytes."""
    calls: list[Any] = []
    arguments = [0] * 30
    places = [(1, 0, 0), (2, 0, 0), (3, 0, 0), (4, 0, 4), (5, 0, 0), (26, 0, 0), (29, -1, 0)]
    step = (lambda *given: calls.append(given), arguments, places, "product", (arguments, places))
    x = torch.zeros(8)
    call(core.player(1, [], [step], [], None), x)
    ((_, a, *_, stream),) = calls
    assert (a, stream) == (x.data_ptr(), STREAM)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ((no_call, [1], [(1, 0, 0)]), "place leads"),
        ((no_call, [1], [(0, 1, 0)]), "place leads"),
        ((no_call, [1], [(0, -2, 0)]), "place leads"),
        (launch_step([(3, 0, 0)]), "place leads"),
        ((*launch_step()[:4], (0xABC0, (0, 1, 1), 128, 0, [], [])), "of nothing"),
        ((*launch_step()[:4], (0, (1, 1, 1), 128, 0, [], [])), "without a kernel"),
        ((no_call, [], [], "jump", ()), "'jump'"),
        ((no_call, [], [], "product", ([0] * 29, [])), "not as many arguments"),
        ((no_call, [], [], "norm", ([0] * 30, [])), "not as many arguments"),
        ((no_call, [], [], "norm", ([0] * 28, [(15, 0, 0)])), "argument 15"),
        ((no_call, [], [], "product", ([0] * 30, [(11, 0, 0)])), "argument 11"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(core: Any, described: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        core.player(1, [], [described], [], None)


def test_the_interpreter_runs_on_while_the_driver_waits(core: Any) -> None:
    """usleep stands in for a launch into a full queue: it takes its microseconds where a launch takes a kernel."""
    libc = ctypes.CDLL(None)
    entries = Driver().entries
    core.pretend_driver(*(ctypes.cast(entry, ctypes.c_void_p).value for entry in (libc.usleep, *entries[1:])))
    try:
        step = (no_call, [], [], "launch", (500_000, (1, 1, 1), 32, 0, [], []))
        made = core.player(0, [], [step], [], None)
        thread = threading.Thread(target=made, args=([], [], 0, STREAM))
        thread.start()
        turns = 0
        while thread.is_alive():
            turns += 1
        assert turns > 1000
    finally:
        core.pretend_driver(0, 0, 0)


# --- memory and results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("results", [1, [1], [2, 1], (1, 2), ()])
def test_results_have_the_shape_that_was_recorded(core: Any, results: Any) -> None:
    got = call(core.player(1, [fresh(2), fresh(3)], [], results, None), torch.zeros(1))
    lengths = {1: 2, 2: 3}
    if isinstance(results, int):
        assert got.shape == (2,)
    else:
        assert type(got) is type(results)
        assert [each.shape[0] for each in got] == [lengths[at] for at in results]


def test_stock_is_used_from_the_end_and_refilled_when_there_is_none(core: Any) -> None:
    first, second, third = (torch.full((), float(n)) for n in range(3))
    stock: dict[Any, list[Tensor]] = {(0, STREAM, "amax"): [first, second], (1, STREAM, "amax"): [first]}
    asked: list[Any] = []

    def otherwise(device: int, stream: int, kind: str) -> Tensor:
        asked.append((device, stream, kind))
        return third

    made = core.player(0, [("stock", otherwise, stock, "amax")], [], 0, None)
    assert [made([], [], 0, STREAM).item() for _ in range(3)] == [1, 0, 2]
    assert asked == [(0, STREAM, "amax")] and stock[0, STREAM, "amax"] == []
    assert made([], [], 0, 5) is third and asked[-1] == (0, 5, "amax")


def test_a_workspace_is_lent_to_one_call_at_a_time(core: Any) -> None:
    workspaces: dict[Any, list[Tensor]] = {}
    seen: list[int] = []
    made: list[Any] = []
    depth = [0]

    def used(address: int) -> None:
        seen.append(address)
        depth[0] += 1
        if depth[0] == 2:
            made[0]([], [], 0, STREAM)  # while the other one has not returned
        if depth[0] == 4:
            raise KeyError("no")

    borrow = ("borrowed", lambda device, stream: torch.empty(64), workspaces, 64)
    made.append(core.player(0, [borrow], [(used, [0], [(0, 0, 0)])], [], None))
    made[0]([], [], 0, STREAM)
    made[0]([], [], 0, STREAM)  # and one within it
    assert seen[0] == seen[1] != seen[2]
    assert len(workspaces[0, STREAM, 64]) == 2
    with pytest.raises(KeyError):
        made[0]([], [], 0, STREAM)
    assert len(workspaces[0, STREAM, 64]) == 2, "it is back after an error too"
    made[0]([], [], 0, STREAM + 1)
    assert len(workspaces[0, STREAM + 1, 64]) == 1, "streams do not share"


@pytest.mark.parametrize("failing", ["memory", "step", None])
def test_nothing_is_leaked_or_freed_twice(core: Any, driver: Driver, failing: str | None) -> None:
    def broken(*arguments: Any) -> Any:
        raise ValueError("no")

    makes = [fresh(4), ("called", broken if failing == "memory" else lambda device, stream: torch.empty(3))]
    constant = "".join(["not", "interned"])
    last = (broken if failing == "step" else lambda *given: None, [0, constant], [(0, 2, 0)])
    made = core.player(1, makes, [launch_step(), last], [1, 2], None)
    x = torch.zeros(8)
    objects = (x, made, constant, makes[0][2])

    def run() -> None:
        try:
            call(made, x)
        except ValueError:
            assert failing is not None
        driver.launches.clear()

    for _ in range(100):
        run()
    gc.collect()
    before = [sys.getrefcount(each) for each in objects], len(gc.get_objects())
    for _ in range(1000):
        run()
    gc.collect()
    assert [sys.getrefcount(each) for each in objects] == before[0]
    assert len(gc.get_objects()) - before[1] < 500


def test_wrong_calls_are_refused_by_name(core: Any) -> None:
    made = core.player(1, [], [], [], None)
    x = torch.zeros(1)
    with pytest.raises(TypeError, match="tensors: list"):
        made([x], [1], 0)
    with pytest.raises(ValueError, match="takes 1"):
        made([x, x], [1, 2], 0, STREAM)
    with pytest.raises(ValueError, match="no tensor"):
        core.player(1, [], [], 1, None)
    with pytest.raises(TypeError):
        core.Player()


# --- places -----------------------------------------------------------------------------------------------------------


class Around:
    """What a place asks, each answer to be set; and what it gave up on."""

    def __init__(self) -> None:
        self.profiled = self.capturing = self.deterministic = False
        self.device = self.current = self.offset = 0
        self.flags: dict[str, Any] = {"stopped": False}
        self.pending: dict[str, Any] = {"waiting": set()}
        self.runtime = SimpleNamespace(enter=SimpleNamespace(calls=[]), leave=None)
        self.given_up: list[Any] = []
        self.questions = {
            "tensor_type": Tensor,
            "profiler_enabled": lambda: self.profiled,
            "device_of": lambda tensor: self.device,
            "current_device": lambda: self.current,
            "is_capturing": lambda: self.capturing,
            "stream_of": lambda device: STREAM + device + self.offset,
            "flags": [(self.flags, "stopped")],
            "closed": [lambda: self.deterministic],
            "pending": (self.pending, "waiting"),
            "runtime": (vars(self), "runtime"),
            "hooks": ["enter", "leave"],
        }

    def unbound(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
        self.given_up.append((arguments, named))
        return "Python"


@pytest.fixture
def around() -> Around:
    return Around()


def bound(core: Any, around: Around, steps: Any = ()) -> Any:
    """A place called as ``place(x, 3, [y, 5], last=z)``; its result is where x, y and z are."""
    seen: list[int] = []
    noted = (lambda *given: seen.extend(given), [0, 0, 0], [(0, 0, 0), (1, 1, 0), (2, 2, 0)])
    made = core.player(3, [fresh(1)], [*steps, noted], 3, None)
    place = core.place(around.unbound, around.questions)
    assert not place.bound and place(1, last=2) == "Python" and around.given_up.pop() == ((1,), {"last": 2})
    core.bind(place, made, [(0, None), (2, 0), ("last", None)], 3, 1, 15, [0, 0, 4], 0, False)
    assert place.bound
    return place, seen


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(8), torch.zeros(8), torch.zeros(8)[1:]


def test_a_place_finds_tensors_in_order_in_lists_and_by_name(core: Any, around: Around) -> None:
    place, seen = bound(core, around)
    for _ in range(3):
        x, y, z = tensors()
        assert place(x, 3, [y, 5], last=z).shape == (1,)
        assert seen[-3:] == [x.data_ptr(), y.data_ptr(), z.data_ptr()]
        assert place(x, 3, (y,), **{"".join(["la", "st"]): z}).shape == (1,)
    assert not around.given_up and len(seen) == 18


def test_what_is_not_as_it_was_bound_goes_to_python(core: Any, around: Around) -> None:
    place, seen = bound(core, around)
    x, y, z = tensors()
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x[1:], 3, [y]), {"last": z}),  # alignments
        ((x, 3, [y]), {"last": x}),
        ((x, 3, [y]), {}),  # fewer, more, others
        ((x, 3, [y], 4), {"last": z}),
        ((x, 3, [y]), {"last": z, "more": 1}),
        ((x, 3, [y]), {"first": z}),
        ((x, 3, []), {"last": z}),
        ((x, 3, y), {"last": z}),
        ((None, 3, [y]), {"last": z}),
        ((x, 3, [3]), {"last": z}),
    ]
    for arguments, named in calls:
        assert place(*arguments, **named) == "Python"
        got, got_named = around.given_up[-1]
        assert all(one is other for one, other in zip(got, arguments, strict=True)) and got_named == named
    assert len(around.given_up) == len(calls) and not seen
    core.unbind(place)
    assert not place.bound and place(x, 3, [y], last=z) == "Python"


@pytest.mark.parametrize(
    "change",
    [
        lambda around: setattr(around, "profiled", True),
        lambda around: setattr(around, "capturing", True),
        lambda around: setattr(around, "deterministic", True),
        lambda around: setattr(around, "device", 1),
        lambda around: setattr(around, "current", 1),
        lambda around: around.flags.update(stopped=True),
        lambda around: around.pending.update(waiting={1}),
        lambda around: around.runtime.enter.calls.append(print),
        lambda around: setattr(around.runtime, "leave", print),
        lambda around: setattr(around, "runtime", SimpleNamespace(enter=None, leave=print)),
    ],
    ids=["profiler", "capture", "deterministic", "device", "current", "flag", "pending", "hooks", "hook", "settings"],
)
def test_each_question_decides(core: Any, around: Around, change: Callable[[Around], Any]) -> None:
    place, _ = bound(core, around)
    x, y, z = tensors()
    assert place(x, 3, [y], last=z) != "Python"
    change(around)
    assert place(x, 3, [y], last=z) == "Python"


def test_errors_of_questions_and_steps_reach_the_caller(core: Any, around: Around) -> None:
    place, _ = bound(core, around)
    x, y, z = tensors()
    around.questions.clear()  # what a place asks is its own
    around.flags.clear()
    with pytest.raises(KeyError, match="stopped"):
        place(x, 3, [y], last=z)
    around.flags["stopped"] = False
    core.bind(place, core.player(1, [], [(int, ["no number"], [])], [], None), [(0, None)], 1, 0, 15, [0], 0, False)
    with pytest.raises(ValueError, match="no number"):
        place(x)
    assert not around.given_up


def test_a_call_through_a_place_leaks_nothing(core: Any, around: Around, driver: Driver) -> None:
    place, seen = bound(core, around, [launch_step()])
    x, y, z = tensors()
    calls = [lambda: place(x, 3, [y], last=z), lambda: place(x[1:], 3, [y], last=z)]
    counts = []
    for _ in range(3):
        for _ in range(300):
            for each in calls:
                each()
        seen.clear()
        around.given_up.clear()
        driver.launches.clear()
        gc.collect()
        counts.append([sys.getrefcount(each) for each in (x, y, z, place, around.unbound, "last")])
    assert counts[1] == counts[2]


def test_a_place_that_nobody_calls_any_more_is_freed(core: Any) -> None:
    class Owner(Around):
        place: Any

    owner = Owner()
    owner.place, _ = bound(core, owner)  # a cycle, as that of a Site and its place
    watched = weakref.ref(owner)
    del owner
    gc.collect()
    assert watched() is None


def test_threads_do_not_mix(core: Any, around: Around, driver: Driver) -> None:
    made = core.player(2, [fresh(1)], [launch_step([(0, 0, 0), (1, 1, 0), (2, 2, 0)])], 2, None)
    place = core.place(around.unbound, around.questions)
    core.bind(place, made, [(0, None), (1, None)], 2, 0, 0, [0, 0], 0, False)
    pairs = [(torch.zeros(8), torch.zeros(8)) for _ in range(4)]
    kept: list[list[Tensor]] = [[] for _ in pairs]

    def run(x: Tensor, y: Tensor, results: list[Tensor]) -> None:
        for turn in range(400):
            results.append(place(x, y))
            if turn % 50 == 0:  # another thread is in the middle of what was bound
                core.bind(place, made, [(0, None), (1, None)], 2, 0, 0, [0, 0], 0, False)

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=run, args=(*pair, results)) for pair, results in zip(pairs, kept, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(switching)
    launched = {words for *_, words in driver.launches}
    wanted = {
        (x.data_ptr(), y.data_ptr(), result.data_ptr())
        for (x, y), results in zip(pairs, kept, strict=True)
        for result in results
    }
    assert len(driver.launches) == 1600 and launched == wanted


# --- what Python decides ----------------------------------------------------------------------------------------------


def test_memory_is_made_as_its_kind_says(core: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch._C._dynamo.guards._empty_strided_cpu
    monkeypatch.setattr(buffers, "_empty_on_current_device", empty)
    monkeypatch.setattr(buffers, "_clear", lambda count, device: tuple(torch.zeros(count)[:, None].unbind()))
    monkeypatch.setattr(buffers, "_cleared", {})
    monkeypatch.setattr(buffers, "lent_workspaces", {})
    monkeypatch.setattr(player, "core", lambda: core)
    makes = [buffers.Fresh((3, 5), (5, 1), torch.float16), buffers.FromStock("amax0"), buffers.Workspace(48),
             lambda device, stream: torch.full((), float(device + stream))]  # fmt: skip
    made = player.played(Tape(makes, [], [0, 1, 3]), 0)
    assert isinstance(made, core.Player)
    for turn in range(3):
        whole, number, called = made([], [], 0, STREAM)
        assert (whole.shape, whole.stride(), whole.dtype) == ((3, 5), (5, 1), torch.float16)
        assert number == 0 and called == STREAM
        assert [len(stock) for stock in buffers._cleared.values()] == [buffers.NUMBERS - 1 - turn]
    ((key, workspaces),) = buffers.lent_workspaces.items()
    assert key == (0, STREAM, 48) and [each.shape for each in workspaces] == [(48,)]


@pytest.mark.parametrize("possible", [True, False])
def test_kernels_are_launched_by_the_driver_where_they_can_be(
    core: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch, possible: bool
) -> None:
    """The launcher's arguments: programs, stream, kernel, metadata, three of hooks, the kernel's own."""
    launch = DriverLaunch(0xAB0, (4, 1, 1), 64, 0, (0, 9, 0), {0: 0, 2: 1, 3: 2})
    asked: list[Any] = []

    def described(kernel: Any, grid: Any, arguments: Any) -> DriverLaunch | None:
        asked.append((kernel, list(grid), list(arguments)))
        return launch if possible else None

    monkeypatch.setattr(player, "driver_launch", described)
    monkeypatch.setattr(player, "core", lambda: core)
    run: list[Any] = []
    template = [4, 1, 1, None, "function", "metadata", None, None, None, None, 64, 9, None]
    step = Step(lambda *given: run.append(given), template, [(3, -1, 0), (9, 0, 0), (12, 0, 4)], "kernel")
    made = player.played(Tape([], [step], []), 1)
    x = torch.zeros(8)
    call(made, x)
    assert asked == [("kernel", [4, 1, 1], [None, 64, 9, None])]
    if possible:
        assert driver.launches == [(0xAB0, (4, 1, 1, 64, 1, 1, 0), STREAM, (x.data_ptr(), 9, x.data_ptr() + 4))]
    else:
        assert run == [
            (4, 1, 1, STREAM, "function", "metadata", None, None, None, x.data_ptr(), 64, 9, x.data_ptr() + 4)
        ]


def test_an_address_for_a_constant_is_left_to_triton(
    core: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = DriverLaunch(0xAB0, (4, 1, 1), 64, 0, (0, 0, 0), {1: 0})
    monkeypatch.setattr(player, "driver_launch", lambda *given: launch)
    monkeypatch.setattr(player, "core", lambda: core)
    run: list[Any] = []
    template = [4, 1, 1, None, *[None] * 5, None, 64]
    step = Step(lambda *given: run.append(given), template, [(3, -1, 0), (9, 0, 0)], "kernel")
    call(player.played(Tape([], [step], []), 1), torch.zeros(8))
    assert len(run) == 1 and not driver.launches


def test_python_plays_what_it_is_asked_to(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "missing", lambda cuda=False: "")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    tape = Tape([], [], [])
    assert player.core() is core and isinstance(player.played(tape, 0), core.Player)
    with player.by_python():
        assert player.core() is None and player.played(tape, 0) is tape and player.place(print) is None
    assert player.core() is core
    monkeypatch.setattr(native, "missing", lambda cuda=False: "built without CUDA" if cuda else "")
    assert player.core() is None


def test_what_the_core_does_not_take_is_played_by_python_and_said(
    core: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(player, "core", lambda: core)
    tape = Tape([], [Step(core.cublaslt_gemm, ["no device", *[0] * 29], [])], [])
    assert player.played(tape, 0) is tape
    assert "replayed by Python" in caplog.text


def test_a_tape_of_pythons_unbinds_a_place(core: Any, around: Around) -> None:
    place, _ = bound(core, around)
    player.bind(place, Binding(Tape([], [], []), ((0, None),), 15, (0,), 0, False), 1, 0)
    assert not place.bound


def test_triton_and_its_settings_have_what_is_asked_of_them() -> None:
    runtime = vars(triton.knobs)["runtime"]
    for hook in ("launch_enter_hook", "launch_exit_hook"):
        assert not getattr(getattr(runtime, hook), "calls", getattr(runtime, hook))
    assert driver_launch._is_known_triton()
