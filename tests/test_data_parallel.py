"""What is said of graphs that DistributedDataParallel has cut."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from te_compile.ops import agreement, same_layers
from te_compile.passes import manager
from te_compile.runtime import Runner
from te_compile.state import states_by_name
from tests.compiling import compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
WIDTH = 512  # weights of 1 MiB


class Stack(nn.Module):
    """Linears in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def graphs_and_warnings(caplog: pytest.LogCaptureFixture, bucket_mib: float) -> tuple[int, list[str]]:
    """How many graphs two steps of three linears are compiled as, and what is said of cuts."""
    fast = compiled(nn.parallel.DistributedDataParallel(Stack(), bucket_cap_mb=bucket_mib))
    caplog.clear()
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "te_compile"), manager.recording() as records:
        for _ in range(2):
            fast(torch.randn(4, WIDTH)).sum().backward()
    return len(records), [message for message in caplog.messages if "DistributedDataParallel" in message]


def test_it_is_said_once_for_a_model_that_is_cut(one_rank: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        graphs, (warning,) = graphs_and_warnings(caplog, bucket_mib=1)
        assert graphs == 3
        assert "graph of Stack cut at buckets of 1 MiB" in warning and "optimize_ddp = False" in warning


def test_nothing_is_said_where_one_bucket_takes_all(one_rank: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    """But the first one, which is small: the last linear stands alone."""
    assert graphs_and_warnings(caplog, bucket_mib=100) == (2, [])


def test_nothing_is_said_of_a_graph_that_is_whole(one_rank: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    with torch._dynamo.config.patch(optimize_ddp=False):
        assert graphs_and_warnings(caplog, bucket_mib=1) == (1, [])


def test_nothing_is_said_without_data_parallelism(caplog: pytest.LogCaptureFixture) -> None:
    fast = compiled(nn.Linear(WIDTH, WIDTH))
    with caplog.at_level(logging.WARNING, "te_compile"):
        fast(torch.randn(4, WIDTH)).sum().backward()
    assert not any("DistributedDataParallel" in message for message in caplog.messages)


def test_the_pieces_of_a_graph_agree_once_a_step(one_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """And are called with tensors that are there, though they were made by calls with fake ones."""
    exchanges: list[int] = []
    monkeypatch.setattr(agreement, "are_several", lambda: True)
    monkeypatch.setattr(agreement, "agree", lambda amaxes: exchanges.append(amaxes.numel()))
    model = Stack()
    fast = compiled(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1), compiler="inductor")
    for _ in range(3):
        fast(torch.randn(4, WIDTH)).sum().backward()
    assert exchanges == [9 + same_layers.NUMBERS] * 3  # of x, w and the gradient in each linear
    assert all((state.scale > 0).all() for _, _, state in states_by_name(model))
    runners = [each for each in gc.get_objects() if type(each) is Runner and each.token is not None]
    assert runners and not any(isinstance(runner.token, FakeTensor) for runner in runners)
