"""Say so where DistributedDataParallel has a model's graph cut, which FP8 has more to lose by than high precision.

Dynamo cuts the graph of a model under DistributedDataParallel at its buckets of gradients, 25 MiB unless said
otherwise, so that a bucket is exchanged while the backward pass goes on. A layer of a large model fills several. What
is cut apart cannot be merged: a norm and the quantizes of its result, a gate and what is multiplied by it, projections
that read one input. And each piece looks up its states, makes its copies of weights and agrees on its amaxes by itself.
It is the user's to weigh, and Dynamo has decided by the time a backend is called, so all that is left is to tell.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import get_optimize_ddp_mode

LOG = logging.getLogger("te_compile")
_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def tell_of_cuts() -> None:
    """Warn once for each model whose graphs are cut, while one is being compiled."""
    model = active()
    if model is None or model in _told or get_optimize_ddp_mode() != "ddp_optimizer":
        return
    bucket, exchanged = model.bucket_bytes_cap, sum(each.nbytes for each in model.parameters() if each.requires_grad)
    if exchanged <= bucket:
        return
    _told.add(model)
    LOG.warning(
        "te_fp8: DistributedDataParallel has the graph of %s cut at buckets of %d MiB, and nothing is fused across a "
        "cut. torch._dynamo.config.optimize_ddp = False leaves it whole, and gradients are exchanged behind the "
        "backward pass; a larger bucket_cap_mb cuts it less often.",
        type(model.module).__name__,
        bucket >> 20,
    )


def active() -> Any:
    """The DistributedDataParallel whose forward is running; None outside of one."""
    if not torch.distributed.is_available():
        return None
    return nn.parallel.DistributedDataParallel._get_active_ddp_module()
