"""Arithmetic in the dtypes that it is written in, whatever autocast the user has around it.

Some devices know no autocast, as ``meta``, on which models are called for their shapes: PyTorch refuses to turn off
there what cannot be on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A block in which nothing on devices of this type is cast."""
    knows_it = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if knows_it else nullcontext()
