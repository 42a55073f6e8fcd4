"""te:: operators as the code that Inductor generates calls them on a GPU: as Python functions, not by the dispatcher.

Below autograd, on a tensor of one device, nothing is left for PyTorch's dispatcher to decide, yet on its way through it
every argument is boxed and unboxed: 20 to 30 µs of an H200's host for an operator that takes a dozen. Each function
here replays what it did before for the same shapes (kernels/replay.py).

Generated code outlives the process that generated it, in Inductor's caches: ``CALLS`` keeps its names.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from te_compile.kernels.replay import Replayed
from te_compile.ops.gemm_into_grad import add_to_grad, into_grad
from te_compile.ops.library import implementations
from te_compile.ops.scaling import scale_update, update_alone

BY_ADDRESS = {"snapshot"}
"""Operators whose kernels find their tensors in tables of addresses, and which keep the same ones for life."""


class IntoGrad:
    """te::gemm_into_grad: at each call one of two products, each of which is replayed by itself."""

    def __init__(self, gemm: Replayed, add: Replayed) -> None:
        self.gemm, self.add = gemm, add
        self.run = into_grad(gemm, add)

    @property
    def tapes(self) -> dict[Any, Any]:
        """Of the product that adds; the other one's are te::gemm's."""
        return self.add.tapes

    def __call__(self, *arguments: Any, **named: Any) -> Tensor | None:
        """Run the operator."""
        return self.run(*arguments, **named)

    def site(self) -> Callable[..., Tensor | None]:
        """The operator for one place in generated code, where shapes are what they are."""
        return into_grad(self.gemm.site(), self.add.site())


class ScaleUpdate:
    """te::update_scales_: replayed unless ranks have to agree on the amaxes first."""

    def __init__(self, alone: Replayed) -> None:
        self.alone = alone
        self.run = scale_update(alone)

    @property
    def tapes(self) -> dict[Any, Any]:
        """Of the update by amaxes as they are."""
        return self.alone.tapes

    def __call__(self, *arguments: Any, **named: Any) -> None:
        """Run the operator."""
        self.run(*arguments, **named)

    def site(self) -> Callable[..., None]:
        """The operator for one place in generated code, where shapes are what they are."""
        return scale_update(self.alone.site())


CALLS = SimpleNamespace(
    **{name: Replayed(name, function, name in BY_ADDRESS) for name, function in implementations.items()}
)
CALLS.gemm_into_grad = IntoGrad(CALLS.gemm, Replayed("add_to_grad", add_to_grad))
CALLS.update_scales_ = ScaleUpdate(Replayed("update_alone", update_alone, repeats=True))
