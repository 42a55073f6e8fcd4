"""Calls that are replayed: what is noted, what is told apart, and what is left to run as it always did.

A stand-in for the GPU: memory from the CPU, and a core whose functions write to addresses. All of it twice: played by
Python and by the C++ core, to which the same stand-ins are given.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from te_compile.kernels import alone, buffers, native, norm, norm_alone, norm_rows, player, pointwise, quantize, replay
from te_compile.kernels.recording import STREAM, here, unrecorded
from te_compile.kernels.replay import Replayed
from te_compile.ops import calibration
from te_compile.ops.library import implementations
from te_compile.recipe import ScaleRule

STREAM_NUMBER = 77
ON_NO_GPU = {
    "tensor_type": Tensor,
    "profiler_enabled": torch._C._autograd._profiler_enabled,
    "device_of": lambda tensor: replay._device_for_replays([tensor]),
    "current_device": lambda: 0,
    "is_capturing": lambda: False,
    "stream_of": lambda device: STREAM_NUMBER + device,
    "flags": [(vars(buffers), "_lent"), (player.lookers, "count")],
    "closed": [torch._C._get_deterministic_algorithms],
    "pending": (vars(calibration), "_waiting"),
    "hooks": ["launch_enter_hook", "launch_exit_hook"],
}


class Core:
    """Functions that take addresses, and note each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def axpy(self, device: int, x: int, y: int, to: int, factor: float, length: int, stream: int) -> None:
        """to = factor · x + y of ``length`` floats; y may be 0 for none."""
        self.calls.append((device, factor, length, stream))
        at = ctypes.sizeof(ctypes.c_float)
        for index in range(length):
            value = factor * ctypes.c_float.from_address(x + at * index).value
            value += ctypes.c_float.from_address(y + at * index).value if y else 0.0
            ctypes.c_float.from_address(to + at * index).value = value


NEEDS_CORE = pytest.mark.skipif(bool(native.missing()), reason="the C++ core is not built")


@pytest.fixture(params=["Python", pytest.param("C++", marks=NEEDS_CORE)])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Core:
    by_python = request.param == "Python"
    monkeypatch.setattr(player, "core", lambda: None if by_python else native.module())
    monkeypatch.setattr(player, "questions", lambda: {**ON_NO_GPU, "runtime": (vars(triton.knobs), "runtime")})
    monkeypatch.setattr(native, "current_stream", lambda device: STREAM_NUMBER)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM_NUMBER, raising=False)
    monkeypatch.setattr(replay, "_device_for_replays", lambda tensors: 0 if tensors else -1)
    return Core()


def fresh(length: int) -> Tensor:
    """As buffers.empty makes it on a GPU."""
    with unrecorded():
        made = torch.empty(length)
    if here.recorder is not None:
        here.recorder.made(made, lambda device, stream: torch.empty(length))
    return made


class Operator:
    """``to = factor · x + y`` by two launches; counts how often its code ran."""

    def __init__(self, core: Core) -> None:
        self.core, self.ran = core, 0

    def __call__(self, x: Tensor, y: Tensor | None, factor: float, *, twice: bool = False) -> list[Tensor]:
        self.ran += 1
        half, to = fresh(x.shape[0]), fresh(x.shape[0])
        native.call(self.core.axpy, 0, x, y, half, factor, x.shape[0], STREAM)
        native.call(self.core.axpy, 0, half, None, to, 2.0 if twice else 1.0, x.shape[0], STREAM)
        return [to, half]


def expected(x: Tensor, y: Tensor | None, factor: float, twice: bool = False) -> Tensor:
    sums = factor * x + (0 if y is None else y)
    return 2 * sums if twice else sums


def calls_run(operator: Operator, call: Callable[[], Any], times: int = 5) -> int:
    before = operator.ran
    for _ in range(times):
        call()
    return operator.ran - before


@pytest.mark.parametrize("with_y", [False, True])
def test_the_third_call_of_a_kind_replays_with_its_own_data(core: Core, with_y: bool) -> None:
    operator = Operator(core)
    replayed = Replayed("axpy", operator)
    for _ in range(6):
        x, y = torch.randn(5), torch.randn(5) if with_y else None
        to, half = replayed(x, y, 3.0)
        torch.testing.assert_close(to, expected(x, y, 3.0))
        torch.testing.assert_close(half, to)
    assert operator.ran == 2
    assert core.calls == [(0, 3.0, 5, STREAM_NUMBER), (0, 1.0, 5, STREAM_NUMBER)] * 6


@pytest.mark.parametrize("placed", [False, True])
def test_a_call_that_adds_to_a_tensor_and_returns_none_is_replayed(core: Core, placed: bool) -> None:
    ran = []

    def add(x: Tensor, to: Tensor) -> tuple[()]:
        ran.append(x)
        native.call(core.axpy, 0, x, to, to, 3.0, x.shape[0], STREAM)
        return ()

    operator = Replayed("add", add)
    replayed = operator.site() if placed else operator
    for _ in range(6):
        x, to = torch.randn(5), torch.randn(5)
        wanted = 3 * x + to
        assert replayed(x, to) == ()
        torch.testing.assert_close(to, wanted)
    assert len(ran) == 2 and len(core.calls) == 6


def test_results_keep_their_memory_while_later_calls_are_made(core: Core) -> None:
    replayed, x = Replayed("axpy", Operator(core)), torch.randn(4)
    kept = [replayed(x, None, float(factor))[0] for factor in (1, 1, 1, 1)]
    assert len({each.data_ptr() for each in kept}) == 4


@pytest.mark.parametrize(
    "other",
    [
        lambda: ((torch.randn(6), torch.randn(6), 3.0), {}),
        lambda: ((torch.randn(5), torch.randn(5), 4.0), {}),
        lambda: ((torch.randn(5), None, 3.0), {}),
        lambda: ((torch.randn(5), torch.randn(5), 3.0), {"twice": True}),
        lambda: ((torch.randn(10)[::2], torch.randn(5), 3.0), {}),
        lambda: ((torch.randn(6)[1:], torch.randn(5), 3.0), {}),
        lambda: ((torch.randn(5).half(), torch.randn(5), 3.0), {}),
    ],
    ids=["shape", "number", "None", "named", "strides", "alignment", "dtype"],
)
def test_another_kind_of_call_runs_the_code(core: Core, other: Callable[[], tuple[Any, Any]]) -> None:
    operator = Operator(core)
    replayed = Replayed("axpy", operator)
    assert calls_run(operator, lambda: replayed(torch.randn(5), torch.randn(5), 3.0)) == 2
    arguments, named = other()
    before = operator.ran
    replayed(*arguments, **named)
    assert operator.ran == before + 1


def test_a_scale_that_may_be_missing_makes_another_kind(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator(core)
    replayed, x = Replayed("axpy", operator), torch.randn(5)
    monkeypatch.setattr(calibration, "_waiting", {1})
    assert calls_run(operator, lambda: replayed(x, None, 3.0)) == 2
    monkeypatch.setattr(calibration, "_waiting", set())
    assert calls_run(operator, lambda: replayed(x, None, 3.0)) == 2


@pytest.mark.parametrize("placed", [False, True])
def test_a_call_that_may_lack_a_scale_measures_though_another_one_ends_while_it_is_recorded(
    core: Core, placed: bool
) -> None:
    """Whether any call may lack one, every call asks, and a call of another thread may end between two questions."""
    ends: list[int] = []

    def quantize(x: Tensor, scale: Tensor) -> Tensor:
        if ends:
            calibration.settle(ends.pop())
        to = fresh(x.shape[0])
        factor = 2.0 if calibration.must_measure(scale) else 1.0
        native.call(core.axpy, 0, x, None, to, factor, x.shape[0], STREAM)
        return to

    operator, x, scale = Replayed("quantize", quantize), torch.ones(4), torch.zeros(())
    replayed = operator.site() if placed else operator
    for another_ends in (False, True):  # the second call is recorded
        moment = calibration.moment_of(operator)
        calibration.expect(moment)
        ends += [moment] * another_ends
        replayed(x, scale)
        calibration.settle(moment)
    for _ in range(3):
        with calibration.expected():
            assert replayed(x, scale)[0] == 2


SWIGLU = (
    "x0: bfloat16[M, K]; x1: bfloat16[M, K]; t0 = sigmoid(x0); t1 = mul(x0, t0); t2 = bfloat16(t1); t3 = mul(t2, x1); "
    "t4 = bfloat16(t3); quantize t4"
)


def _matrix(rows: int) -> Tensor:
    return torch.randn(rows, 256, dtype=torch.bfloat16)


def _quantizing(name: str, rows: int) -> tuple[Any, ...]:
    """The arguments of an operator that makes codes of rows, as a model's inference has it."""
    how = torch.zeros(()), torch.float8_e4m3fn, True, False
    if name == "quantize":
        return (_matrix(rows), *how, ScaleRule().text())
    if name == "norm_quantize":
        return _matrix(rows), torch.ones(256, dtype=torch.bfloat16), None, 1e-5, "rms", *how, False, ScaleRule().text()
    return [_matrix(rows), _matrix(rows)], how[0], SWIGLU, *how[1:], ScaleRule().text()


@pytest.mark.parametrize("rows", [8, 200], ids=["few rows", "many rows"])
@pytest.mark.parametrize("missing", [False, True], ids=["known scales", "scales may be missing"])
@pytest.mark.parametrize("name", ["quantize", "norm_quantize", "fused_quantize"])
def test_what_quantises_is_replayed_with_scales_and_without(
    core: Core, name: str, missing: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that never trained has no scales, and measures at each call, few rows in the same launch."""
    launches: list[Any] = []

    def launch(kernel: Any, grid: int, *arguments: Any, **constants: Any) -> None:
        launches.append("by the code")
        if here.recorder is not None:
            here.recorder.called(lambda *given: launches.append("replayed"), (grid, STREAM, *arguments))

    def made(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        def make(*_: int) -> Tensor:
            return torch.empty(size, dtype=dtype)

        with unrecorded():
            tensor = make()
        if here.recorder is not None:
            here.recorder.made(tensor, make)
        return tensor

    for module in (alone, norm, norm_alone, norm_rows, pointwise, quantize):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(buffers, "empty", lambda like, size, dtype: made(tuple(size), dtype))
    monkeypatch.setattr(buffers, "_from_stock", lambda like, kind: made((), torch.float32))
    monkeypatch.setattr(calibration, "_waiting", {1} if missing else set())
    replayed = Replayed(name, implementations[name])
    for _ in range(4):
        launches.clear()
        replayed(*_quantizing(name, rows), implementation="triton")
    passes = 2 if missing and rows > 8 else 1
    assert launches == ["replayed"] * passes


def never_replays(core: Core, function: Callable[..., Any], *arguments: Any) -> None:
    ran = []

    def counted(*given: Any) -> Any:
        ran.append(1)
        return function(*given)

    replayed = Replayed("other", counted)
    for _ in range(5):
        replayed(*arguments)
    assert len(ran) == 5


def test_what_pytorch_does_is_not_replayed(core: Core) -> None:
    """A copy of an operand would be left out."""

    def with_a_copy(x: Tensor) -> Tensor:
        to = fresh(x.shape[0])
        native.call(core.axpy, 0, x.clone(), None, to, 1.0, x.shape[0], STREAM)
        return to

    never_replays(core, with_a_copy, torch.randn(4))


def test_memory_of_nobody_knows_whom_is_not_replayed(core: Core) -> None:
    table = torch.randn(4)

    def with_a_table(x: Tensor) -> Tensor:
        to = fresh(x.shape[0])
        native.call(core.axpy, 0, x, table, to, 1.0, x.shape[0], STREAM)
        return to

    never_replays(core, with_a_table, torch.randn(4))


def test_a_result_that_was_given_is_not_replayed(core: Core) -> None:
    never_replays(core, lambda x: x, torch.randn(4))


@pytest.mark.parametrize("placed", [False, True])
def test_where_tensors_may_repeat_each_place_is_replayed_with_its_own(core: Core, placed: bool) -> None:
    ran = []

    def sums(pairs: list[Tensor], to: Tensor) -> tuple[()]:
        ran.append(1)
        for x, y in zip(pairs[::2], pairs[1::2], strict=True):
            native.call(core.axpy, 0, x, to, to, 1.0, len(to), STREAM)
            native.call(core.axpy, 0, y, to, to, 2.0, len(to), STREAM)
        return ()

    operator = Replayed("sums", sums, repeats=True)
    replayed = operator.site() if placed else operator
    shared, other = torch.randn(3), torch.randn(3)
    for pairs in [[shared, shared, other, shared]] * 3 + [[shared, other, other, shared], [torch.randn(3)] * 4]:
        to = torch.zeros(3)
        assert replayed(pairs, to) == ()
        torch.testing.assert_close(to, pairs[0] + 2 * pairs[1] + pairs[2] + 2 * pairs[3])
    assert len(ran) == 2 and len(core.calls) == 5 * 4


def test_one_tensor_in_two_roles_does_not_mix_them_up(core: Core) -> None:
    operator = Operator(core)
    replayed, x = Replayed("axpy", operator), torch.randn(5)
    for _ in range(4):
        torch.testing.assert_close(replayed(x, x, 3.0)[0], 4 * x)
    for _ in range(4):
        x, y = torch.randn(5), torch.randn(5)
        torch.testing.assert_close(replayed(x, y, 3.0)[0], expected(x, y, 3.0))
    torch.testing.assert_close(replayed(x, x, 3.0)[0], 4 * x)


def test_views_of_what_was_given_and_made_are_found_again(core: Core) -> None:
    """Packed operands are handed over as pieces, and pieces of results as other dtypes."""

    def halves(packed: Tensor) -> Tensor:
        to = fresh(packed.shape[0])
        middle = packed.shape[0] // 2
        native.call(core.axpy, 0, packed[middle:], None, to[:middle], 1.0, middle, STREAM)
        native.call(core.axpy, 0, packed[:middle], None, to.view(torch.int32)[middle:], 1.0, middle, STREAM)
        return to

    replayed = Replayed("halves", halves)
    for _ in range(5):
        packed = torch.randn(6)
        torch.testing.assert_close(replayed(packed), torch.cat([packed[3:], packed[:3]]))
    assert any(replayed.tapes.values())


def test_tables_of_addresses_make_the_addresses_part_of_the_kind(core: Core) -> None:
    ran = []

    def by_table(states: list[Tensor]) -> Tensor:
        ran.append(1)
        with unrecorded():
            table = torch.stack(states).sum(0)  # stands for a table that is found by the addresses
        to = fresh(states[0].shape[0])
        native.call(core.axpy, 0, table, None, to, 1.0, states[0].shape[0], STREAM)
        return to

    replayed = Replayed("by_table", by_table, by_address=True)
    states, others = [torch.randn(4), torch.randn(4)], [torch.randn(4), torch.randn(4)]
    for _ in range(3):
        for each in (states, others):
            torch.testing.assert_close(replayed(each), each[0] + each[1])
    assert len(ran) == 4  # twice for each


def test_whether_addresses_are_part_of_the_kind_may_follow_from_the_call(core: Core) -> None:
    def by_table(states: list[Tensor]) -> Tensor:
        to = fresh(4)
        if len(states) == 1:
            native.call(core.axpy, 0, states[0], None, to, 1.0, 4, STREAM)
            return to
        with unrecorded():
            table = torch.stack(states).sum(0)
        native.call(core.axpy, 0, table, None, to, 1.0, 4, STREAM)
        return to

    replayed = Replayed("by_table", by_table, by_address=lambda states: len(states) > 1)
    alike = [[torch.randn(4)] for _ in range(6)]
    for states in alike:
        torch.testing.assert_close(replayed(states), states[0])
    assert len(replayed.tapes) == 1
    for states in ([torch.randn(4), torch.randn(4)] for _ in range(3)):
        for _ in range(3):
            torch.testing.assert_close(replayed(states), states[0] + states[1])
    assert len(replayed.tapes) == 4


def test_tables_that_every_call_of_a_kind_reads_do_not_bind_a_place_to_its_tensors(core: Core) -> None:
    ran, table = [], torch.randn(4)

    def with_table(x: Tensor) -> Tensor:
        ran.append(1)
        if here.recorder is not None:
            here.recorder.found(table)
        to = fresh(4)
        native.call(core.axpy, 0, x, table, to, 2.0, 4, STREAM)
        return to

    site, given = Replayed("with_table", with_table).site(), [torch.randn(4) for _ in range(6)]
    for x in given:
        torch.testing.assert_close(site(x), 2 * x + table)
    assert site.bound and len(ran) == 2


def test_an_error_leaves_nothing_behind(core: Core) -> None:
    def refuses(x: Tensor) -> Tensor:
        raise ValueError("no")

    replayed = Replayed("refuses", refuses)
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            replayed(torch.randn(3))
    assert here.recorder is None and not any(replayed.tapes.values())


def test_kinds_without_end_are_forgotten(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_KINDS", 3)
    operator = Operator(core)
    replayed = Replayed("axpy", operator)
    for length in range(1, 9):
        assert calls_run(operator, lambda n=length: replayed(torch.randn(n), None, 1.0)) == 2  # type: ignore[misc]
        assert len(replayed.tapes) <= 3


def test_a_place_whose_shapes_are_constant_replays_as_well(core: Core) -> None:
    operator = Operator(core)
    site = Replayed("axpy", operator).site()
    for _ in range(6):
        x, y = torch.randn(5), torch.randn(5)
        torch.testing.assert_close(site(x, y, 3.0, twice=True)[0], expected(x, y, 3.0, True))
    assert operator.ran == 2 and site.bound


def test_a_place_looks_again_where_an_operand_lies_otherwise(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_waiting", set())  # a model of an earlier test may wait for its scales
    operator = Operator(core)
    site, x = Replayed("axpy", operator).site(), torch.randn(8)
    assert calls_run(operator, lambda: site(x[:5], None, 3.0)) == 2
    assert calls_run(operator, lambda: site(x[1:6], None, 3.0)) == 2
    torch.testing.assert_close(site(x[1:6], None, 3.0)[0], 3 * x[1:6])
    monkeypatch.setattr(calibration, "_waiting", {1})
    assert calls_run(operator, lambda: site(x[:5], None, 3.0)) == 2
    monkeypatch.setattr(replay, "_device_for_replays", lambda tensors: -1)
    assert calls_run(operator, lambda: site(x[:5], None, 3.0)) == 5


def test_a_place_that_never_replays_stops_asking(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    operator = Replayed("copies", lambda x: x.clone())
    ask = operator.binding
    monkeypatch.setattr(operator, "binding", lambda *given: asked.append(1) or ask(*given))
    site = operator.site()
    for _ in range(2 * replay.MOST_TRIES):
        x = torch.randn(3)
        assert torch.equal(site(x), x)
    assert len(asked) == replay.MOST_TRIES


def test_a_place_replays_again_once_nobody_looks_on(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_waiting", set())
    operator = Operator(core)
    site, x = Replayed("axpy", operator).site(), torch.randn(4)
    assert calls_run(operator, lambda: site(x, None, 3.0)) == 2
    with monkeypatch.context() as watched:
        watched.setattr(replay, "_device_for_replays", lambda tensors: -1)
        for _ in range(2 * replay.MOST_TRIES):
            torch.testing.assert_close(site(x, None, 3.0)[0], 3 * x)
    assert calls_run(operator, lambda: site(x, None, 3.0)) == 0 and site.bound


def test_a_place_with_operands_in_a_list_and_by_name(core: Core) -> None:
    def joined(pieces: list[Tensor], factor: float, *, last: Tensor | None = None) -> list[Tensor]:
        given = [*pieces] if last is None else [*pieces, last]
        made = [fresh(4) for _ in given]
        for x, to in zip(given, made, strict=True):
            native.call(core.axpy, 0, x, None, to, factor, 4, STREAM)
        return made

    site = Replayed("joined", joined).site()
    for _ in range(5):
        first, second, third = torch.randn(4), torch.randn(4), torch.randn(4)
        for got, given in zip(site([first, second], 2.0, last=third), (first, second, third), strict=True):
            torch.testing.assert_close(got, 2 * given)
    assert site.bound


def test_tables_of_addresses_bind_a_place_to_its_tensors(core: Core) -> None:
    def by_table(states: list[Tensor]) -> Tensor:
        with unrecorded():
            table = torch.stack(states).sum(0)
        to = fresh(4)
        native.call(core.axpy, 0, table, None, to, 1.0, 4, STREAM)
        return to

    site = Replayed("by_table", by_table, by_address=True).site()
    blocks = [[torch.randn(4), torch.randn(4)] for _ in range(2)]
    for _ in range(4):
        for states in blocks:
            torch.testing.assert_close(site(states), states[0] + states[1])


def test_a_profiler_sees_the_operators_name(core: Core) -> None:
    replayed, x = Replayed("axpy", Operator(core)), torch.randn(3)
    with torch.profiler.profile() as profiler:
        replayed(x, None, 1.0)
    assert "te::axpy" in {event.key for event in profiler.key_averages()}


def test_nothing_is_replayed_on_a_cpu() -> None:
    operator = Operator(Core())
    ran = []
    replayed = Replayed("plain", lambda x: ran.append(1) or x + 1)
    for _ in range(4):
        replayed(torch.zeros(2))
    assert len(ran) == 4 and not replayed.tapes and operator.ran == 0
