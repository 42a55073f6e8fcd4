"""Do all data-parallel ranks exchange the amaxes of the same layers? A warning says so where they do not.

An exchange knows amaxes by their places. A rank that has dropped a layer, or taken another branch of the model, has
another layer's in one of them, and where all have as many as before, each takes the larger of two that have nothing to
do with one another: no step fails, and scales stay smaller than they need to be. So an exchange carries two numbers
more, a fingerprint of the states that take part and its negative. The largest of each over all ranks add up to zero
only where the ranks have the same fingerprint.

States are told apart by the order in which they first took part in an exchange, which ranks that train the same layers
have in common, and nothing else has: a name in a graph is that of many blocks which are compiled one by one.

Nobody waits for the answer. The host reads it at a later exchange, when it has arrived from the device.
"""

from __future__ import annotations

import logging
import zlib
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from te_compile.ops.host_copies import HostCopy, copied_to_host

LOG = logging.getLogger("te_compile")
WARNING = (
    "te_fp8: data-parallel ranks have run different layers in one step, and amaxes of one were taken for those of "
    "another. With reduce_amax=False in the recipe each rank keeps its own."
)
NUMBERS = 2  # that an exchange carries more


_answers: dict[torch.device, HostCopy] = {}  # on their way, fp32 []: 0 where all ranks are the same
_told = False


def fingerprint(order: Sequence[int], device: torch.device) -> list[Tensor]:
    """Two fp32 [1], to be exchanged behind the amaxes of the states that have these places in the order."""
    number = zlib.crc32(array("q", order).tobytes()) & 0xFFFFFF  # fp32 holds integers of 24 bits
    # Filled on the device: a copy from the host's memory would wait for it.
    return [torch.full((1,), float(each), dtype=torch.float32, device=device) for each in (number, -number)]


def begin_again() -> None:
    """Ranks have come together anew."""
    global _told
    _told = False
    _answers.clear()


def look_at(agreed: Tensor) -> None:
    """``agreed``, fp32 [2]: what a fingerprint has become by the reduction by the largest. Warns once in a process."""
    if _told or agreed.is_meta:
        return
    device = agreed.device
    answer = _answers.pop(device, None)
    if answer is not None and not answer.arrived():
        _answers[device] = answer  # one at a time: a device that lags behind is asked about some of the steps
        return
    if answer is not None:
        _tell(answer.numbers)
    answer = copied_to_host(agreed.sum())
    if answer.ready is None:
        _tell(answer.numbers)
    else:
        _answers[device] = answer


def _tell(total: Tensor) -> None:
    global _told
    if not _told and total.item() != 0:
        _told = True
        LOG.warning(WARNING)
