"""te:: operators as the code that Inductor generates calls them on a GPU: as Python functions, not by the dispatcher.

Below autograd, on a tensor of one device, nothing is left for PyTorch's dispatcher to decide, yet on its way through it
every argument is boxed and unboxed: 20 to 30 µs of an H200's host for an operator that takes a dozen. Each function
here replays what it did before for the same shapes (kernels/replay.py).

Generated code outlives the process that generated it, in Inductor's caches: ``CALLS`` keeps its names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from te_compile.kernels.replay import Replayed
from te_compile.kernels.scale_update import needs_table
from te_compile.ops.gemm_into_grad import add_to_grad, into_grad
from te_compile.ops.library import implementations
from te_compile.ops.scaling import scale_update, update_alone

BY_ADDRESS = {"snapshot": lambda states, *_: needs_table(states)}
"""Operators whose kernels may find their tensors in tables of addresses, and which then keep the same ones for life: by
their names, whether a call's do."""


class Choosing:
    """A te:: operator that makes, by what it finds out at each call, one of several calls that are replayed.

    code: gives the operator's code, from what makes these calls.
    """

    def __init__(self, code: Callable[..., Callable[..., Any]], *calls: Replayed) -> None:
        self.code, self.calls = code, calls
        self.run = code(*calls)

    @property
    def tapes(self) -> dict[Any, Any]:
        """Of the last of the calls, which no other operator makes."""
        return self.calls[-1].tapes

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the operator."""
        return self.run(*arguments, **named)

    def site(self, early: bool = False) -> Callable[..., Any]:
        """The operator for one place in generated code, where shapes are what they are. It is never played early."""
        return self.code(*(call.site() for call in self.calls))


CALLS = SimpleNamespace(
    **{name: Replayed(name, function, BY_ADDRESS.get(name, False)) for name, function in implementations.items()}
)
CALLS.gemm_into_grad = Choosing(into_grad, CALLS.gemm, Replayed("add_to_grad", add_to_grad))
AGREED = Replayed("update_agreed", update_alone, repeats=True)
"""Updates by amaxes that data-parallel ranks have agreed on: of several places at once, so it is none of one place."""
CALLS.update_scales_ = Choosing(
    partial(scale_update, agreed=AGREED), Replayed("update_alone", update_alone, repeats=True)
)
