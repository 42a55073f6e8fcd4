"""Memory for kernels: shapes, and amaxes that are 0 when their turn comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_compile.kernels import buffers, recording
from tests import poison

BF16 = torch.bfloat16
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(), (0,), (7,), (3, 5), (0, 4)])
def test_empty_is_contiguous_and_as_asked_for(device: str, size: tuple[int, ...]) -> None:
    like = torch.zeros(2, device=device)
    made = buffers.empty(like, size, BF16)
    assert made.shape == size and made.dtype == BF16 and made.device == like.device and made.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
def test_results_of_a_quantize(device: str) -> None:
    like = torch.zeros(2, device=device)
    q, qt, amax, scale_inv = buffers.quantized(like, 20, 12, torch.float8_e4m3fn, True, True)
    assert q.shape == (20, 12) and qt.shape == (12, 32) and amax.shape == scale_inv.shape == ()
    q, qt, _, _ = buffers.quantized(like, 20, 12, torch.float8_e4m3fn, False, False)
    assert q.shape == qt.shape == (0,)


@pytest.mark.parametrize("device", DEVICES)
def test_no_two_results_of_an_operator_share_a_storage(device: str) -> None:
    like = torch.zeros(2, device=device)
    for _ in range(2):  # what is cleared together is in use by the second time
        made = [t for n in range(2) for t in buffers.quantized(like, 4, 16, torch.float8_e4m3fn, True, True, n)]
        assert len({tensor.untyped_storage()._cdata for tensor in made}) == len(made)


@pytest.mark.parametrize("device", DEVICES)
def test_every_amax_is_zero_and_none_is_given_twice(device: str) -> None:
    like = torch.zeros(2, device=device)
    made = [buffers.amax(like) for _ in range(2 * buffers.NUMBERS + 3)]
    assert not torch.stack(made).any()
    assert len({amax.data_ptr() for amax in made}) == len(made)
    assert all(amax.dtype == torch.float32 and amax.data_ptr() % 16 == 0 for amax in made)


def test_threads_that_share_a_stream_each_get_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes the last amax between another's look and its hand."""

    class OnCuda:
        is_cuda, device = True, torch.device("cpu")

        def get_device(self) -> int:
            return 0

    class Raced(list[torch.Tensor]):
        def extend(self, more: Any) -> None:
            super().extend(more)
            if len(raced) < 2:
                raced.append(len(self))
                self.clear()

    raced: list[int] = []
    clear = buffers._clear
    monkeypatch.setattr(buffers, "_clear", lambda count, device: clear(count, torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    monkeypatch.setattr(buffers, "_lending", {"stopped": False})
    monkeypatch.setattr(buffers, "_cleared", {(0, 5, "amax0"): Raced()})
    assert buffers.amax(OnCuda()) == 0  # type: ignore[arg-type]  # what is asked of a tensor, and no more
    assert raced == [buffers.NUMBERS] * 2


def test_an_amax_made_in_inference_mode_serves_a_training() -> None:
    like = torch.zeros(2, device="cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        buffers._cleared.clear()
        buffers.amax(like)
    if like.is_cuda:
        assert not buffers.amax(like).is_inference()


@on_gpu
def test_a_graph_clears_its_own_amaxes_at_every_replay() -> None:
    like = torch.zeros(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        amax = buffers.amax(like)
        amax += 1
    for _ in range(2):
        graph.replay()
    assert amax == 1
    assert buffers.amax(like) == 0


@on_gpu
def test_streams_do_not_share_amaxes() -> None:
    like, other = torch.zeros(2, device="cuda"), torch.cuda.Stream()
    buffers.amax(like)
    with torch.cuda.stream(other):
        buffers.amax(like)
    stocks = [stock for (_, _, kind), stock in buffers._cleared.items() if kind == "amax0"]
    blocks = {stock[-1].untyped_storage().data_ptr() for stock in stocks if stock}
    assert len(blocks) == len([stock for stock in stocks if stock]) >= 2


@on_gpu
def test_where_graphs_are_compiled_to_cuda_graphs_each_amax_is_cleared_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffers, "_lending", {"stopped": False})
    like = torch.zeros(2, device="cuda")
    buffers.stop_lending()
    assert buffers.amax(like).untyped_storage().nbytes() == 4


def test_a_workspace_is_noted_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as memory that a call keeps."""
    noted: list[tuple[torch.Tensor, Any]] = []

    class Recorder:
        def made(self, tensor: torch.Tensor, make: Any) -> None:
            noted.append((tensor, make))

    monkeypatch.setattr(recording.here, "recorder", Recorder())
    monkeypatch.setattr(buffers, "_keeping", {"stopped": False})
    made = buffers.workspace(torch.zeros(2), 48)
    ((tensor, make),) = noted
    assert tensor is made and made.shape == (48,) and made.dtype == torch.uint8
    assert make == buffers.Workspace(48) and recording.here.recorder is not None
    monkeypatch.setattr(buffers, "_empty_on_current_device", torch._C._dynamo.guards._empty_strided_cpu)
    again = make(0, 77)
    assert again.shape == (48,) and again.data_ptr() != made.data_ptr()


def test_where_memory_is_to_be_saved_no_workspace_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []

    class Recorder:
        def made(self, tensor: torch.Tensor, make: Any) -> None:
            noted.append(make)

    monkeypatch.setattr(recording.here, "recorder", Recorder())
    monkeypatch.setattr(buffers, "_keeping", {"stopped": False})
    monkeypatch.setattr(buffers, "lent_workspaces", {(0, 77, 48): [torch.zeros(48)]})
    buffers.stop_keeping_workspaces()
    buffers.workspace(torch.zeros(2), 48)
    assert not buffers.lent_workspaces and noted == [buffers.Fresh((48,), (1,), torch.uint8)]


def test_where_graphs_become_cuda_graphs_no_workspace_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_lending", {"stopped": False})
    monkeypatch.setattr(buffers, "_cleared", {})
    monkeypatch.setattr(buffers, "lent_workspaces", {(0, 77, 48): [torch.zeros(48)]})
    buffers.stop_lending()
    assert not buffers.lent_workspaces


def test_tests_find_memory_poisoned(device: str) -> None:
    codes = buffers.empty(torch.empty(0, device=device), (3, 5), torch.float8_e4m3fn)
    assert set(codes.view(torch.uint8).flatten().tolist()) == {poison.BYTE}
