"""What is said of graphs that DistributedDataParallel has cut, and ranks that agree as it has them agree."""

from __future__ import annotations

import copy
import gc
import logging
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import te_compile
from te_compile.ops import agreement, same_layers
from te_compile.passes import manager
from te_compile.runtime import Runner
from te_compile.state import states_by_name
from tests.compiling import compiled, cosine, know_the_backend

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
    monkeypatch.setattr(agreement, "agree", lambda amaxes, group: exchanges.append(amaxes.numel()))
    model = Stack()
    fast = compiled(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1), compiler="inductor")
    for _ in range(3):
        fast(torch.randn(4, WIDTH)).sum().backward()
    assert exchanges == [9 + same_layers.NUMBERS] * 3  # of x, w and the gradient in each linear
    assert all((state.scale > 0).all() for _, _, state in states_by_name(model))
    runners = [each for each in gc.get_objects() if type(each) is Runner and each.token is not None]
    assert runners and not any(isinstance(runner.token, FakeTensor) for runner in runners)


def _one_of_two(rank: int, directory: str, seed: int) -> None:
    """Train as many micro-batches as this rank has, beside a model in high precision on those of both; then a model of
    this rank's own, whose gradients are of another size than the other's."""
    know_the_backend()
    store = torch.distributed.FileStore(f"{directory}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    plain, own, own_plain = (copy.deepcopy(model) for _ in range(3))
    fast = DistributedDataParallel(compiled(model, compiler="inductor"))
    for step in range(3):
        data = [torch.randn(2 + (step + each) % 2, 32, 64) for each in range(2)]
        for place, x in enumerate(data[rank]):
            with fast.no_sync() if place < len(data[rank]) - 1 else nullcontext():
                fast(x).square().sum().backward()
        torch.cat(list(map(plain, torch.cat(data)))).square().sum().div(2).backward()
        assert_gradients_are_close(model, plain)
    torch.save(te_compile.state_dict(model), f"{directory}/{rank}.pt")
    groups = [torch.distributed.new_group([each]) for each in range(2)]
    alone = DistributedDataParallel(compiled(own, compiler="inductor"), process_group=groups[rank])
    for _ in range(3):
        x = torch.randn(32, 64)
        for each in (alone, own_plain):
            each(x).square().sum().mul((1.0, 1e8)[rank]).backward()
        assert_gradients_are_close(own, own_plain)
    torch.distributed.destroy_process_group()


def assert_gradients_are_close(model: nn.Module, plain: nn.Module) -> None:
    """And gone."""
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and cosine(one.grad, other.grad) > 0.97
        one.grad = other.grad = None


@pytest.mark.slow
def test_two_ranks_agree_as_they_exchange_gradients(tmp_path: Path, seed: int) -> None:
    mp.spawn(_one_of_two, (str(tmp_path), seed), 2)  # type: ignore[no-untyped-call]
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert len(one) == 4 and all(torch.equal(state, other[name]) for name, state in one.items())
