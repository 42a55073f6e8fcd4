"""Numbers on their way from a device to the host, which asks whether they have arrived and never waits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class HostCopy:
    """``numbers``: on the CPU, of the shape and dtype of what is copied; not to be read before they have arrived."""

    numbers: Tensor
    ready: torch.cuda.Event | None  # None where they were there at once

    def arrived(self) -> bool:
        """Has the device filled it?"""
        return self.ready is None or self.ready.query()


def copied_to_host(numbers: Tensor) -> HostCopy:
    """Start a copy of ``numbers``, behind what their device has been given to do. Those of a CPU may be themselves."""
    if numbers.device.type != "cuda":
        return HostCopy(numbers.cpu(), None)
    with torch.cuda.device(numbers.device):
        host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
    return HostCopy(host, ready)
