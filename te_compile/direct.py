"""te:: operators as the code that Inductor generates calls them on a GPU: as Python functions, not by the dispatcher.

Below autograd, on a tensor of one device, nothing is left for PyTorch's dispatcher to decide, yet on its way through it
every argument is boxed and unboxed: 20 to 30 µs of an H200's host for an operator that takes a dozen. Each function
here replays what it did before for the same shapes (kernels/replay.py).

Generated code outlives the process that generated it, in Inductor's caches: ``CALLS`` keeps its names.
"""

from __future__ import annotations

from types import SimpleNamespace

from te_compile.kernels.replay import Replayed
from te_compile.ops.library import implementations

BY_ADDRESS = {"snapshot"}
"""Operators whose kernels find their tensors in tables of addresses, and which keep the same ones for life."""

CALLS = SimpleNamespace(
    **{name: Replayed(name, function, name in BY_ADDRESS) for name, function in implementations.items()}
)
