"""Operators as generated code calls them on a GPU: replayed, and to the bit what their code does.

By Python and by the C++ core, which must need Python for none of their launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import triton
from torch import Tensor, nn

from te_compile.ops.library import implementations
from te_compile.ops.quantize import quantize_reference
from te_compile.ops.scaling import scale_update, update_alone
from te_compile.recipe import DelayedScaling, ScaleRule

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from te_compile import direct
from te_compile.kernels import buffers, native, player
from te_compile.kernels.replay import Replayed, forget

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
RULE = ScaleRule().text()
SPEC = "x0: bfloat16[M, K]; t0 = relu(x0); quantize t0; emit t0: bfloat16; sum t0: float32"
PAIR = "x0: bfloat16[M, K]; t0 = relu(x0); t1 = neg(x0); quantize t0; quantize t1"
PAIR_WITH_SUMS = PAIR + "; sum t0: float32; sum t1: bfloat16"
NEEDS_CORE = pytest.mark.skipif(bool(native.missing(cuda=True)), reason="the core was built without CUDA")


def matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=BF16)


def scale() -> Tensor:
    return torch.rand((), device="cuda") + 1


def fp8(rows: int, columns: int, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    q, _, _, scale_inv = quantize_reference(matrix(rows, columns), None, dtype, True, False, ScaleRule())
    return q, scale_inv.clone()


def gemm(implementation: str, bias: bool, addend: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (a, a_scale), (b, b_scale) = fp8(64, 128), fp8(96, 128)
    added = torch.randn(96, device="cuda", dtype=BF16) if bias else None
    named = {"addend": matrix(64, 96) if addend else None, "implementation": implementation}
    return (a, b, a_scale, b_scale, added, BF16, "fast", "a product"), named


def norm(kind: str, implementation: str, columnwise: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    weight = torch.randn(256, device="cuda", dtype=BF16)
    bias = torch.randn(256, device="cuda", dtype=BF16) if kind == "layer" else None
    given = (matrix(64, 256), weight, bias, 1e-5, kind, scale(), E4M3, True, columnwise, True, RULE)
    return given, {"implementation": implementation}


def norm_backward() -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, rstd = matrix(64, 256), torch.rand(64, 1, device="cuda") + 0.5
    weight = torch.randn(256, device="cuda", dtype=BF16)
    empty = torch.empty(0, device="cuda")
    return (matrix(64, 256), x, weight, empty, rstd, matrix(64, 256), "rms", True, True, None), {
        "implementation": "triton"
    }


def norm_backward_in_part() -> tuple[tuple[Any, ...], dict[str, Any]]:
    given, named = norm_backward()
    return given, {**named, "partial_sums": True}


def loss(columns: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    targets = torch.randint(0, columns, (64,), device="cuda")
    return (matrix(64, columns), targets, -100), {"implementation": "triton"}


def loss_backward(columns: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (logits, targets, ignored), named = loss(columns)
    logsumexp, gradient = logits.float().logsumexp(1), torch.rand((), device="cuda")
    return (logits, targets, logsumexp, gradient.expand(64), ignored), named | {"addend": matrix(64, columns)}


def loss_backward_with_sums(columns: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given, named = loss_backward(columns)
    return (*given, named["addend"], torch.float32), {"implementation": "triton"}


CALLS: dict[str, tuple[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "quantize": (
        "quantize",
        lambda: ((matrix(64, 128), scale(), E5M2, True, True, RULE), {"implementation": "triton"}),
    ),
    "quantize, strided": (
        "quantize",
        lambda: ((matrix(64, 256)[:, 64:192], scale(), E4M3, True, True, RULE), {"implementation": "triton"}),
    ),
    "quantize, current": (
        "quantize",
        lambda: ((matrix(64, 128), None, E4M3, True, True, RULE), {"implementation": "triton"}),
    ),
    "producer": (
        "fused_quantize",
        lambda: (([matrix(64, 128)], scale(), SPEC, E4M3, True, True, RULE), {"implementation": "triton"}),
    ),
    "pair": (
        "fused_quantize_pair",
        lambda: (
            ([matrix(64, 128)], scale(), scale(), PAIR, E5M2, True, True, True, True, RULE),
            {"implementation": "triton"},
        ),
    ),
    "halves": (
        "fused_quantize_cat",
        lambda: (([matrix(64, 128)], scale(), PAIR, E5M2, True, True, RULE), {"implementation": "triton"}),
    ),
    "halves, current, with sums": (
        "fused_quantize_cat",
        lambda: (([matrix(64, 128)], None, PAIR_WITH_SUMS, E5M2, True, True, RULE), {"implementation": "triton"}),
    ),
    "producer, current": (
        "fused_quantize",
        lambda: (([matrix(64, 128)], None, SPEC, E4M3, True, True, RULE), {"implementation": "triton"}),
    ),
    "norm, two passes": ("norm_quantize", lambda: norm("rms", "triton", True)),
    "norm, rows alone": ("norm_quantize", lambda: norm("layer", "triton", False)),
    "norm backward": ("norm_backward", norm_backward),
    "norm backward, sums in part": ("norm_backward", norm_backward_in_part),
    "column sums": (
        "column_sums",
        lambda: (
            ([torch.randn(rows, 8 * rows, device="cuda") for rows in range(1, 11)], "float32 bfloat16 " * 5),
            {"implementation": "triton"},
        ),
    ),
    "loss": ("cross_entropy_forward", lambda: loss(1024)),
    "loss, odd": ("cross_entropy_forward", lambda: loss(1037)),
    "loss backward": ("cross_entropy_backward", lambda: loss_backward(1024)),
    "loss backward, odd": ("cross_entropy_backward", lambda: loss_backward(1037)),
    "loss backward with sums": ("cross_entropy_backward_with_sums", lambda: loss_backward_with_sums(1024)),
    "product": ("gemm", lambda: gemm("cublaslt", False, False)),
    "product, bias": ("gemm", lambda: gemm("cublaslt", True, False)),
    "product, addend": ("gemm", lambda: gemm("cublaslt", False, True)),
    "norm, core": ("norm_quantize", lambda: norm("layer", "cuda", True)),
    "snapshot": ("snapshot", lambda: (([torch.rand(2, 18, device="cuda"), STATES[0]],), {"implementation": "triton"})),
    "snapshot by a table": ("snapshot", lambda: ((STATES,), {"implementation": "triton"})),
    "weights": (
        "quantize_weights",
        lambda: (
            ([matrix(64, 128), matrix(32, 48)], torch.rand(2, device="cuda"), E4M3, [True] * 2, [True] * 2, RULE),
            {"implementation": "triton"},
        ),
    ),
}
STATES = [torch.rand(17, 18, device="cuda") for _ in range(2)]
OF_THE_CORE = {"product", "product, bias", "product, addend", "norm, core"}


def flat(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.fixture(params=["Python", pytest.param("core", marks=NEEDS_CORE)])
def by(request: pytest.FixtureRequest) -> Iterator[str]:
    with player.by_python() if request.param == "Python" else nullcontext():
        yield request.param


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """No scale is missing."""
    monkeypatch.setattr("te_compile.ops.calibration._waiting", set())


def warm(name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The operator at a place of its own, where it is replayed from now on."""
    place = Replayed(name, implementations[name]).site()
    for _ in range(3):
        place(*arguments, **named)
    assert place.bound  # type: ignore[attr-defined]
    return place


def quantized(x: Tensor, used: Tensor) -> tuple[Any, ...]:
    return (x, used, E4M3, True, True, RULE)


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("case", [pytest.param(c, marks=NEEDS_CORE if c in OF_THE_CORE else ()) for c in CALLS])
def test_replays_give_the_bits_of_the_operators_code(case: str, placed: bool, by: str, calibrated: None) -> None:
    name, make = CALLS[case]
    operator = Replayed(name, implementations[name], direct.BY_ADDRESS.get(name, False))
    replayed = operator.site() if placed else operator
    for _ in range(6):
        arguments, named = make()
        if name == "snapshot":
            STATES[0].uniform_()
        got = flat(replayed(*arguments, **named))
        wanted = flat(implementations[name](*arguments, **named))
        assert len(got) == len(wanted) and all(map(same, got, wanted))
    (tape,) = operator.tapes.values()
    assert tape is not None and (not placed or replayed.bound)  # type: ignore[attr-defined]
    if by == "core":
        native_steps, steps = tape.steps  # type: ignore[attr-defined]
        assert native_steps == steps > 0


@NEEDS_CORE
def test_places_on_streams_and_in_threads_do_not_mix(calibrated: None) -> None:
    """Products share a place and its plan; each thread is new to the device, and on a stream of its own or shared."""
    (arguments, named), shared = gemm("cublaslt", True, False), torch.cuda.Stream()
    place = warm("gemm", arguments, named)
    quantize = warm("quantize", quantized(matrix(64, 128), scale()), {"implementation": "triton"})
    wrong: list[str] = []

    def run(stream: torch.cuda.Stream | None) -> None:
        if stream is None:  # the default one, of a thread that has not asked for anything yet
            check(8)
            return
        with torch.cuda.stream(stream):
            check(30)

    def check(turns: int) -> None:
        for _ in range(turns):
            given, options = gemm("cublaslt", True, False)
            if not same(place(*given, **options), implementations["gemm"](*given, **options)):
                wrong.append("gemm")
            x, used = matrix(64, 128), scale()
            got = quantize(*quantized(x, used), implementation="triton")
            wanted = implementations["quantize"](*quantized(x, used), implementation="triton")
            if not all(map(same, got, wanted)):
                wrong.append("quantize")

    torch.cuda.synchronize()
    threads = [threading.Thread(target=run, args=(each,)) for each in (None, shared, shared, torch.cuda.Stream())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not wrong


@NEEDS_CORE
def test_a_thread_may_begin_with_a_replay(calibrated: None) -> None:
    x, used = matrix(64, 128), scale()
    place = warm("quantize", quantized(x, used), {"implementation": "triton"})
    wanted = quantize_reference(x, used, E4M3, True, True, ScaleRule())
    torch.cuda.synchronize()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(place(*quantized(x, used), implementation="triton")))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert same(found[0][0], wanted[0]) and found[0][2] == wanted[2]


@NEEDS_CORE
def test_replays_leave_no_memory_behind_but_one_workspace(calibrated: None) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        arguments, named = gemm("cublaslt", False, True)
        place = warm("gemm", arguments, named)
        place(*arguments, **named)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(50):
            place(*arguments, **named)
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    workspaces = [found for (_, on, _), found in buffers.lent_workspaces.items() if on == stream.cuda_stream]
    assert [len(found) for found in workspaces] == [1]


def test_whoever_watches_launches_sees_those_of_a_place(by: str, calibrated: None) -> None:
    x, used = matrix(64, 128), scale()
    place = warm("quantize", quantized(x, used), {"implementation": "triton"})
    hooks = triton.knobs.runtime.launch_enter_hook
    seen: list[str] = []

    def note(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    hooks.add(note)
    try:
        place(*quantized(x, used), implementation="triton")
    finally:
        hooks.remove(note)
    assert "_quantize_kernel" in seen
    place(*quantized(x, used), implementation="triton")
    assert len(seen) == 1
    with torch.profiler.profile() as profiler:
        place(*quantized(x, used), implementation="triton")
    assert "te::quantize" in {event.key for event in profiler.key_averages()}


def test_a_graph_captures_what_a_place_launches(by: str, calibrated: None) -> None:
    x, used = matrix(64, 128), scale()
    place = warm("quantize", quantized(x, used), {"implementation": "triton"})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, _, amax, _ = place(*quantized(x, used), implementation="triton")
    for factor in (1, 3):
        x.mul_(factor)
        graph.replay()
        wanted = quantize_reference(x, used, E4M3, True, True, ScaleRule())
        assert same(q, wanted[0]) and amax == wanted[2]


def test_a_place_meets_another_alignment(by: str, calibrated: None) -> None:
    place = warm("quantize", quantized(matrix(64, 128), scale()), {"implementation": "triton"})
    packed = torch.randn(64 * 128 + 1, device="cuda", dtype=BF16)
    x, used = packed[1:].view(64, 128), scale()
    for _ in range(4):
        got = place(*quantized(x, used), implementation="triton")
        wanted = quantize_reference(x, used, E4M3, True, True, ScaleRule())
        assert same(got[0], wanted[0]) and same(got[1], wanted[1])


def test_another_stream_gets_memory_and_launches_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_compile.ops.calibration._waiting", set())
    replayed = Replayed("quantize", implementations["quantize"])
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(4):
                x, used = matrix(64, 128), scale()
                got = replayed(x, used, E4M3, True, True, RULE, implementation="triton")
                wanted = quantize_reference(x, used, E4M3, True, True, ScaleRule())
                assert torch.equal(got[0].float(), wanted[0].float()) and got[2] == wanted[2]
        stream.synchronize()


def test_what_a_graph_captures_is_not_replayed() -> None:
    replayed = Replayed("quantize", implementations["quantize"])
    x, used = matrix(64, 128), scale()
    for _ in range(3):
        replayed(x, used, E4M3, True, True, RULE, implementation="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, _, amax, _ = replayed(x, used, E4M3, True, True, RULE, implementation="triton")
    for factor in (1, 3):
        x.mul_(factor)
        graph.replay()
        wanted = quantize_reference(x, used, E4M3, True, True, ScaleRule())
        assert torch.equal(q.float(), wanted[0].float()) and amax == wanted[2]


def test_a_scale_update_is_replayed_with_the_amaxes_of_the_step(by: str, calibrated: None) -> None:
    key = DelayedScaling(amax_history_len=8).key()
    update = direct.Choosing(scale_update, Replayed("update_alone", update_alone, repeats=True))
    at = update.site()
    ours = [torch.zeros(2, 10, device="cuda") for _ in range(20)]
    wanted = [state.clone() for state in ours]
    for _ in range(6):
        shared, some = torch.rand((), device="cuda"), torch.rand(64, device="cuda")
        # One that several linears share, those of weights side by side, and one for two rows.
        amaxes = [shared, shared, *some[:36].unbind(), torch.rand(2, device="cuda")]
        at(ours, amaxes, "forward", key, implementation="triton")
        implementations["update_scales_"](wanted, amaxes, "forward", key, "reference")
        assert all(map(torch.equal, ours, wanted))
    assert len(update.tapes) == 1 and None not in update.tapes.values(), "it is not replayed"


@pytest.mark.usefixtures("calibrated")
def test_a_training_step_replays_every_operator() -> None:
    torch._dynamo.reset()
    forget()  # another model's calls may have been of the same kinds
    model = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda().bfloat16()
    compiled = torch.compile(model, backend="te_fp8", options={"cost_model": False})
    for _ in range(8):
        compiled(matrix(128, 256)).sum().backward()
    torch.cuda.synchronize()
    replayed = {name for name, operator in vars(direct.CALLS).items() if any(operator.tapes.values())}
    assert replayed >= {"snapshot", "norm_quantize", "gemm", "fused_quantize", "norm_backward", "update_scales_"}
