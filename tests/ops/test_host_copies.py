"""Numbers that the host is told of later: what arrives is what was copied, and who asks does not wait."""

from __future__ import annotations

import pytest
import torch

from te_compile.ops.host_copies import HostCopy, copied_to_host


def test_a_cpus_are_there_at_once() -> None:
    numbers = torch.rand(3)
    copy = copied_to_host(numbers)
    assert copy.arrived() and torch.equal(copy.numbers, numbers)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_arrive_behind_what_it_has_to_do() -> None:
    numbers = torch.zeros(3, device="cuda")
    torch.cuda._sleep(200_000_000)
    copy = copied_to_host(numbers.add_(7))
    assert not copy.arrived() and copy.numbers.is_pinned()
    torch.cuda.synchronize()
    assert copy.arrived() and copy.numbers.tolist() == [7.0] * 3


def test_who_asks_is_told_what_the_device_says() -> None:
    class Event:
        def query(self) -> bool:
            return False

    assert not HostCopy(torch.zeros(1), Event()).arrived()  # type: ignore[arg-type]  # as much of one as is asked
