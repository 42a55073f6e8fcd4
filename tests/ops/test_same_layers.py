"""Fingerprints of what ranks exchange tell orders apart, cancel out where ranks agree, and are read without waiting."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor

from te_compile.ops import same_layers

CPU = torch.device("cpu")
DEVICES = [CPU, *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True)
def nothing_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_layers, "_told", False)
    monkeypatch.setattr(same_layers, "_answers", {})


def reduced(*ranks: Tensor) -> Tensor:
    return torch.stack(ranks).amax(dim=0)


def test_they_tell_orders_apart() -> None:
    orders = [list(order) for length in range(1, 5) for order in permutations(range(5), length)]
    assert len({same_layers.fingerprint(order, CPU)[0].item() for order in orders}) == len(orders)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_warning_tells_once_where_ranks_differ(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    same, other = (torch.cat(same_layers.fingerprint(order, device)) for order in ([3, 4, 5], [3, 5, 4]))

    def look_at(agreed: Tensor) -> None:
        same_layers.look_at(agreed)
        if device.type == "cuda":
            torch.cuda.synchronize()

    for agreed in (reduced(same, same), reduced(same), reduced(other, other, other)):
        look_at(agreed)
    assert not caplog.messages
    for _ in range(3):
        look_at(reduced(same, other))
    assert caplog.messages == [same_layers.WARNING]


def test_the_numbers_are_exact() -> None:
    one, other = same_layers.fingerprint([1, 2], CPU)
    assert one.dtype == other.dtype == torch.float32 and one == -other and one == one.long() and one != 0


def test_ranks_that_come_together_anew_are_told_anew(caplog: pytest.LogCaptureFixture) -> None:
    one, other = (torch.cat(same_layers.fingerprint(order, CPU)) for order in ([1], [2]))
    for _ in range(2):
        for _ in range(2):
            same_layers.look_at(reduced(one, other))
        same_layers.begin_again()
    assert caplog.messages == [same_layers.WARNING] * 2
