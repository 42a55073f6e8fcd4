"""What is compiled ahead is what is launched, to the hash by which Triton finds it; and nothing depends on it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch._inductor import async_compile
from torch._subclasses.fake_tensor import FakeTensorMode

from te_compile.kernels import ahead, compile_worker, cross_entropy, fp8_attention, grouped_gemm
from te_compile.kernels.compile_worker import Answer, Pointer
from te_compile.kernels.launch import Repeated, launch
from te_compile.kernels.quantize import quantize
from te_compile.kernels.recording import address_of, rehearsing
from te_compile.ops import calibration
from te_compile.ops.library import implementations
from te_compile.ops.triton_implementations import TRITON
from te_compile.recipe import ScaleRule

ROOT = Path(__file__).parents[2]
E4M3 = torch.float8_e4m3fn


class Kernel:
    """Stands in for a ``triton.jit`` function of (x, scale, n); of scale no alignment is asked."""

    def __init__(self) -> None:
        self.fn = quantize  # some function of a module
        self.params = [SimpleNamespace(do_not_specialize_on_alignment=name == "scale") for name in ("x", "scale", "n")]


class Pool:
    """Compile workers that do what they are told to."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work, self.orders = work, list[Any]()

    def submit(self, function: Any, given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if function is compile_worker.fill:
            self.orders.append(given)
            try:
                future.set_result(self.work(given))
            except Exception as error:
                future.set_exception(error)
        return future


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """A pool that compiles everything, and nothing known from before."""
    workers = Pool(lambda order: Answer("the hash", 0.1))
    monkeypatch.setattr(ahead, "is_possible", lambda: True)
    monkeypatch.setattr(ahead, "statistics", ahead.Statistics())
    monkeypatch.setattr(ahead, "_orders", {})
    monkeypatch.setattr(ahead, "_known", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(async_compile.AsyncCompile, "use_process_pool", lambda: True)
    monkeypatch.setattr(async_compile.AsyncCompile, "process_pool", lambda: workers)
    return workers


def arguments(rows: int = 48, start: int = 0, scale_start: int = 0) -> tuple[Tensor, Tensor, int]:
    return torch.zeros(64, dtype=torch.bfloat16)[start:], torch.zeros(64)[scale_start:], rows


# --- the whole road, without Triton's interpreter ---


@cache
def steps_on_a_pretended_gpu(recipe: str, jobs: int) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
    command = [sys.executable, "-m", "tests.programs.compile_ahead", recipe, str(jobs)]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "jobs"), [("delayed", 6), ("current", 2)])
def test_what_steps_launch_was_all_rehearsed_and_has_the_hash_that_triton_looks_for(recipe: str, jobs: int) -> None:
    found = steps_on_a_pretended_gpu(recipe, jobs)
    first, later = map(set, found["ahead"])
    assert set(found["launched"][0]) == first, "what is ordered first is what the first step launches, and no more"
    assert set().union(*found["launched"][1:]) == later - first
    names = {form.split("((")[0].rsplit(".", 1)[1] for form in first}
    assert {"produce", "_quantize_kernel", "_norm_backward_kernel", "_add_up_many_kernel"} <= names
    assert {"_cross_entropy_forward_kernel", "_cross_entropy_backward_kernel"} <= names
    assert found["hashes"] == found["at launch"] and len(found["hashes"]) > 20
    assert found["statistics"]["ordered"] == len(found["answers"]) == jobs
    for by_parent, by_worker, expected in found["answers"]:
        assert by_parent == by_worker == expected


# --- orders ---


def test_each_form_is_ordered_once_and_found_once(pool: Pool) -> None:
    kernel = Kernel()
    launches = [ahead.rehearsed(kernel, arguments(), {"num_warps": 4}) for _ in range(2)]
    assert ahead.compile_ahead(launches) == 1
    assert ahead.compile_ahead(launches) == 0
    (order,) = pool.orders
    assert (order.module, order.name) == (quantize.__module__, quantize.__name__)
    assert order.arguments == (Pointer(torch.bfloat16, True), Pointer(torch.float32, True), 48)
    assert ahead.awaited(kernel, arguments(rows=64), {"num_warps": 4}) == "the hash"
    assert ahead.awaited(kernel, arguments(rows=64), {"num_warps": 4}) is None
    assert ahead.compile_ahead(launches) == 0, "it is compiled, though nobody waits for it any more"


@pytest.mark.parametrize(
    ("given", "constants"),
    [
        (arguments(start=1), {"num_warps": 4}),  # other alignment
        (arguments(rows=47), {"num_warps": 4}),
        (arguments(rows=1), {"num_warps": 4}),
        (arguments(rows=2**40), {"num_warps": 4}),
        ((None, *arguments()[1:]), {"num_warps": 4}),
        (arguments(), {"num_warps": 8}),
    ],
)
def test_a_launch_of_another_form_finds_nothing(pool: Pool, given: Any, constants: dict[str, Any]) -> None:
    kernel = Kernel()
    ahead.compile_ahead([ahead.rehearsed(kernel, arguments(), {"num_warps": 4})])
    assert ahead.awaited(kernel, given, constants) is None
    assert ahead.awaited(Kernel(), arguments(), {"num_warps": 4}) is None
    assert ahead.awaited(kernel, arguments(), {"num_warps": 4}) == "the hash"


def test_where_a_scale_lies_makes_no_difference_to_kernels_that_do_not_ask(pool: Pool) -> None:
    kernel = Kernel()
    ahead.compile_ahead([ahead.rehearsed(kernel, arguments(scale_start=1), {})])
    assert ahead.awaited(kernel, arguments(), {}) == "the hash"


def test_a_worker_that_fails_is_told_of_and_nothing_else(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    def fail(order: Any) -> Answer:
        raise RuntimeError("out of paper")

    pool.work = fail
    kernel = Kernel()
    assert ahead.compile_ahead([ahead.rehearsed(kernel, arguments(), {})]) == 1
    with caplog.at_level(logging.WARNING, "te_compile"):
        assert ahead.awaited(kernel, arguments(), {}) is None
    assert "out of paper" in caplog.text


def test_a_kernel_without_its_launcher_is_one_all_the_same(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    pool.work = lambda order: Answer("the hash", 0.1, "no compiler for C")
    kernel = Kernel()
    ahead.compile_ahead([ahead.rehearsed(kernel, arguments(), {})])
    with caplog.at_level(logging.INFO, "te_compile"):
        assert ahead.awaited(kernel, arguments(), {}) == "the hash"
    assert "no compiler for C" in caplog.text


def test_a_pool_that_cannot_be_had_is_told_of_and_nothing_else(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> Any:
        raise RuntimeError("no daemons")

    monkeypatch.setattr(async_compile.AsyncCompile, "process_pool", refuse)
    with caplog.at_level(logging.WARNING, "te_compile"):
        assert ahead.compile_ahead([ahead.rehearsed(Kernel(), arguments(), {})]) == 0
    assert "no daemons" in caplog.text


def test_a_worker_that_does_not_answer_is_not_waited_for_for_ever(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    lost = ahead.rehearsed(kernel, arguments(), {})
    ahead._orders[lost.form] = Future()
    monkeypatch.setattr(ahead, "PATIENCE", 0.01)
    assert ahead.awaited(kernel, arguments(), {}) is None
    assert ahead.statistics.waited >= 0.01


def test_what_was_ordered_in_vain_is_counted(pool: Pool) -> None:
    ahead.note_use(None, SimpleNamespace(hash="any", name="kernel"))
    ahead.note_use("one", SimpleNamespace(hash="one", name="kernel"))
    ahead.note_use("one", SimpleNamespace(hash="two", name="kernel"))
    assert (ahead.statistics.found, ahead.statistics.missed) == (1, 1)


def test_without_workers_nothing_is_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 4)
    assert ahead.is_possible()
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 1)
    assert not ahead.is_possible()


# --- rehearsals ---


class Notes:
    """Notes what would have been launched."""

    def __init__(self, missing: bool = False) -> None:
        self.missing, self.launches = missing, list[tuple[Any, tuple[Any, ...], dict[str, Any]]]()

    def launched(self, kernel: Any, arguments: Any, constants: Any) -> None:
        self.launches.append((kernel, tuple(arguments), constants))


@pytest.mark.parametrize("missing", [False, True])
def test_a_rehearsal_launches_nothing_and_has_no_memory(missing: bool) -> None:
    notes = Notes(missing)
    with FakeTensorMode() as mode, rehearsing(notes):
        x, scales = torch.empty(64, 128, dtype=torch.bfloat16), torch.empty(4)
        must = calibration.must_measure(scales[1])
        results = quantize(x, scales[1], E4M3, True, True, ScaleRule(), must)
    assert must == missing
    assert all(result.fake_mode is mode for result in results)
    assert [kernel.__name__ for kernel, _, _ in notes.launches] == ["_measure_kernel"] * missing + ["_quantize_kernel"]
    assert notes.launches[-1][2]["MEASURED"] == missing
    assert not calibration.must_measure(scales[1]) or calibration.pending(), "outside all is as it was"


def operator_calls() -> dict[str, Callable[[], Any]]:
    """Operators that the steps above do not have, as they are called where a Triton kernel runs them."""
    one, ends = torch.empty(()), torch.empty(4, dtype=torch.int32)
    wide, tall = torch.empty(96, 64).to(E4M3), torch.empty(4, 32, 64).to(E4M3)
    heads = torch.empty(2, 16, 4, 32).to(E4M3)
    values = torch.empty(4 * 32, 2 * 16).to(E4M3)
    logits, targets, row = torch.empty(6, 131, dtype=torch.bfloat16), torch.empty(6, dtype=torch.int64), torch.empty(6)
    call = implementations
    return {
        "_grouped_gemm_kernel": lambda: call["grouped_gemm"](
            wide, tall, one, one, ends, torch.bfloat16, "fast", "a product", TRITON
        ),
        "_grouped_wgrad_kernel": lambda: call["grouped_wgrad"](
            wide, wide, one, one, ends, torch.bfloat16, "split", "a product", TRITON
        ),
        "_fp8_attention_kernel": lambda: call["fp8_attention"](
            heads, heads, values, one, one, one, True, 0.5, torch.bfloat16, "attention", TRITON
        ),
        "_cross_entropy_forward_kernel": lambda: call["cross_entropy_forward"](logits, targets, -100, TRITON),
        "_cross_entropy_backward_kernel": lambda: call["cross_entropy_backward"](
            logits, targets, row, one.expand(6), -100, logits, False, TRITON
        ),
    }


@pytest.mark.parametrize(
    "kernel",
    [
        *("_grouped_gemm_kernel", "_grouped_wgrad_kernel", "_fp8_attention_kernel"),
        *("_cross_entropy_forward_kernel", "_cross_entropy_backward_kernel"),
    ],
)
def test_products_of_experts_attention_and_losses_are_rehearsed_as_they_are_launched(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, real = Notes(), Notes()
    with FakeTensorMode():
        fake_call = operator_calls()[kernel]
        with rehearsing(notes):
            fake_call()
    real_call = operator_calls()[kernel]
    for module in (grouped_gemm, fp8_attention, cross_entropy):
        monkeypatch.setattr(module, "launch", lambda kernel, grid, *given, **named: real.launched(kernel, given, named))
    real_call()
    ((rehearsed, fakes, constants),) = notes.launches
    assert rehearsed.__name__ == kernel
    ((launched, given, named),) = real.launches
    assert launched is rehearsed and named == constants
    for fake, argument in zip(fakes, given, strict=True):
        if isinstance(argument, Tensor):
            assert (fake.dtype, fake.shape, fake.stride()) == (argument.dtype, argument.shape, argument.stride())
        else:
            assert fake == argument


def test_a_loss_with_sums_is_rehearsed_with_what_adds_them_up() -> None:
    notes = Notes()
    with FakeTensorMode(), rehearsing(notes):
        logits, targets, row = torch.empty(6, 130), torch.empty(6, dtype=torch.int64), torch.empty(6)
        implementations["cross_entropy_backward_with_sums"](
            logits, targets, row, torch.empty(()).expand(6), -100, None, torch.bfloat16, False, TRITON
        )
        ticket = torch.empty((), dtype=torch.float64)
        implementations["cross_entropy_backward_deferred_with_sums"](
            logits, targets, row, row, -100, ticket, torch.float32, False, TRITON
        )
    names = [kernel.__name__ for kernel, _, _ in notes.launches]
    assert names == 2 * ["_cross_entropy_backward_with_sums_kernel", "_add_up_kernel"]


def test_in_a_rehearsal_a_view_begins_where_it_begins_in_its_storage() -> None:
    real = torch.zeros(64, dtype=torch.bfloat16)
    assert address_of(real[3:]) == real.data_ptr() + 6
    with FakeTensorMode(), rehearsing(Notes()):
        assert address_of(torch.empty(64, dtype=torch.bfloat16)[3:]) == 6


def test_repeated_launches_are_rehearsed_too() -> None:
    notes = Notes()
    with FakeTensorMode(), rehearsing(notes):
        x = torch.empty(64)
        repeated = Repeated("kernel", 3, x, 5, TILE=64)
        repeated()
        launch("other", 3, x, 5, TILE=64)
    assert notes.launches == [("kernel", (x, 5), {"TILE": 64}), ("other", (x, 5), {"TILE": 64})]


# --- workers ---


@pytest.mark.parametrize("variable", compile_worker.PTXAS)
def test_later_orders_are_for_the_ptxas_of_the_first(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Inductor points this process to another one when it compiles a kernel here; Triton has asked before."""
    monkeypatch.setattr(compile_worker, "decided_ptxas", cache(compile_worker.decided_ptxas.__wrapped__))
    monkeypatch.delenv(variable, raising=False)
    kernel = Kernel()
    for rows, directory in ((48, "here"), (1, "there")):
        monkeypatch.setenv("TRITON_CACHE_DIR", directory)
        assert ahead.compile_ahead([ahead.rehearsed(kernel, arguments(rows), {"num_warps": 4})]) == 1
        monkeypatch.setenv(variable, "another")
    assert [order.environment["TRITON_CACHE_DIR"] for order in pool.orders] == ["here", "there"]
    assert all(variable not in order.environment for order in pool.orders)


@pytest.mark.parametrize("variable", compile_worker.PTXAS)
def test_a_worker_has_the_environment_of_the_order_only_while_it_works(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "mine")
    monkeypatch.setenv("TRITON_ONLY_HERE", "1")
    before, version = dict(os.environ), compile_worker.nvidia_compiler.get_ptxas_version
    cleared: list[str | None] = []
    replacement = SimpleNamespace(cache_clear=lambda: cleared.append(os.environ.get(variable)))
    monkeypatch.setattr(compile_worker.nvidia_compiler, "get_ptxas_version", replacement)
    with compile_worker._environment({"TRITON_CACHE_DIR": "theirs"}):
        assert compile_worker.triton_environment() == {"TRITON_CACHE_DIR": "theirs"}
        assert os.environ["PATH"] == before["PATH"]
    assert dict(os.environ) == before
    assert cleared == [None, "mine"], "the version of ptxas is asked again"
    assert hasattr(version, "cache_clear")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_waits_for_nobody() -> None:
    form = ("ordered before the fork",)
    ahead._orders[form] = Future()
    try:
        child = os.fork()
        if child == 0:
            os._exit(len(ahead._orders))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        del ahead._orders[form]
