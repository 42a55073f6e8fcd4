"""Is a tensor that was saved for a backward pass the last thing that holds its memory?

Then an operator of that pass may write its result there. A tensor's memory is its storage's, which counts its tensors:
views, detached ones and those that another node of autograd has saved are all among them. What it cannot know is the
concern of who asks: whether the very tensor is in other hands, too (passes/overwrite_logits.py).
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from te_compile.kernels.recording import here


def is_last_holder(saved: Tensor) -> bool:
    """May this backward pass overwrite ``saved``, which it was given and reads nowhere else?

    Not where it may run once more (``retain_graph=True``), where a CUDA graph is captured, whose replays would not ask,
    nor outside of a backward pass that autograd runs.
    """
    if here.rehearsal is not None or type(saved) is not Tensor:
        return False
    if torch._C._current_graph_task_id() == -1 or torch._dynamo.compiled_autograd.compiled_autograd_enabled:
        return False
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return False
    if saved.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return _holders(saved) == _holders(torch.empty(0))


def _holders(tensor: Tensor) -> tuple[int, int]:
    """How many hold the memory of ``tensor``, and how many of them in Python; of a new one no fewer."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
