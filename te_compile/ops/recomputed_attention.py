"""PyTorch's fused attentions, as operators that a checkpointed region runs twice as it runs any other.

PyTorch marks each of them as one that draws random numbers, whatever its dropout. Where a checkpointed region computes
one again in the backward pass, AOTAutograd therefore wraps both calls in an operator that sets the generator back. That
costs the host more than the call itself, and Inductor gives what is wrapped its operands in any layout: the kernels
refuse keys whose features do not lie side by side, and a bias that is not aligned.

So each has two operators here. One is for attention without dropout, and draws nothing. The other has a dropout, is
wrapped as before, and lays its operands out as the kernels want them, if they are not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

from te_compile.ops.attention_shapes import side_by_side
from te_compile.ops.library import define

_ALIGNMENT = 8  # elements between rows of a bias: what PyTorch pads to before it calls a kernel
_BIAS = 3  # the place of a bias among the arguments, where there is one
_NAMES = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")


def _aligned(bias: Tensor) -> Tensor:
    """A bias whose rows lie where vectors of it can be read."""
    if bias.stride(-1) == 1 and all(stride % _ALIGNMENT == 0 for stride in bias.stride()[:-1]):
        return bias
    length = bias.shape[-1]
    return F.pad(bias, (0, -length % _ALIGNMENT)).contiguous()[..., :length]


def _with_sound_operands(kernel: OpOverload) -> Callable[..., Any]:
    @wraps(kernel)
    def call(*arguments: Any, **named: Any) -> Any:
        given = [side_by_side(each) for each in arguments[:_BIAS]] + list(arguments[_BIAS:])
        if len(given) > _BIAS and isinstance(given[_BIAS], Tensor):
            given[_BIAS] = _aligned(given[_BIAS])
        return kernel(*given, **named)

    return call


def _defined(kernel: OpOverload, name: str, call: Callable[..., Any], draws: bool) -> OpOverload:
    signature = str(kernel._schema).split("(", 1)[1]
    operator: OpOverload = define(f"{name}({signature}", call, kernel, draws=draws)
    return operator


def _twins(name: str) -> tuple[OpOverload, tuple[OpOverload, OpOverload]]:
    kernel: OpOverload = getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    silent = _defined(kernel, f"recomputed_{name}", kernel, draws=False)
    drawing = _defined(kernel, f"recomputed_{name}_with_dropout", _with_sound_operands(kernel), draws=True)
    return kernel, (silent, drawing)


RECOMPUTED: dict[OpOverload, tuple[OpOverload, OpOverload]] = dict(map(_twins, _NAMES))
"""PyTorch's operators: (the one without dropout, the one with), of the same arguments and results each."""
