"""``te::linear``: a linear layer in FP8, forward and backward.

    y  = Q(x) · Q(w)ᵀ + b          dx = Q(dy) · Q(w)          dw = Q(dy)ᵀ · Q(x)          db = Σ dy

It is a composite: the graph that Dynamo hands over holds one node per linear, and tracing it for autograd leaves the
small operators ``te::quantize`` and ``te::gemm`` in the joint graph, where passes fuse what stands around them. The
quantised weight comes in from outside, because all weights of a graph are quantised together. Where it does not, each
product quantises the weight for itself, in the layout that it reads: forward once, and dgrad once more from the weight
in high precision and by the same scale. Then no FP8 copy outlives its product.

Features that are no multiples of 16 are padded with zeros: x and b out here, where autograd cuts their gradients back
by itself, and the weight where it is quantised. Zeros add nothing to a sum or an amax, and what they lead to is cut
off, so neither a result nor a gradient nor a state knows of them.

The amax of x goes out as a second result. The amax of dy cannot: it is born in the backward pass. It leaves as the
"gradient" of ``slot``, an input that takes no part in the result; see ``te_compile.ops.gradient_slots``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.ops.gemm import GEMM
from te_compile.ops.library import define_composite
from te_compile.ops.quantize import QUANTIZE, padded

_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float8_e4m3fn, torch.float8_e5m2)}


@dataclass(frozen=True)
class LinearConfig:
    """What is constant about one lowered linear; it stands on the node as text.

    ``forward`` and ``backward`` are the FP8 dtypes of x, w and of dy; ``rule`` is the scale rule's text; ``transposed``
    says that the weight is stored [K, N] (Hugging Face's Conv1D) rather than [N, K].
    """

    name: str
    forward: torch.dtype
    backward: torch.dtype
    rule: str
    transposed: bool = False

    def text(self) -> str:
        """One line that :meth:`parse` reads back."""
        dtypes = f"{str(self.forward).removeprefix('torch.')}/{str(self.backward).removeprefix('torch.')}"
        return f"{self.name}|{dtypes}|{self.rule}|{'kn' if self.transposed else 'nk'}"

    @staticmethod
    @cache
    def parse(text: str) -> LinearConfig:
        """The config that :meth:`text` wrote."""
        name, dtypes, rule, layout = text.rsplit("|", 3)
        forward, backward = dtypes.split("/")
        return LinearConfig(name, _DTYPES[forward], _DTYPES[backward], rule, layout == "kn")


class _Linear(torch.autograd.Function):
    """The module's formulas and gradients, in operators of the joint graph; x [M, K] and y [M, N] are matrices."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        codes: Tensor | None,
        codes_transposed: Tensor | None,
        weight_scale_inv: Tensor | None,
        x_scale: Tensor | None,
        grad_scale: Tensor | None,
        slot: Tensor | None,
        out_dtype: torch.dtype,
        config: LinearConfig,
        weight_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Codes are named as stored. The forward product wants the copy whose rows run along K, dgrad the other one.
        along_k, along_n = (codes_transposed, codes) if config.transposed else (codes, codes_transposed)
        ctx.quantizes_weight = weight_scale_inv is None
        weight_amax = x.new_empty(0, dtype=torch.float32)
        if weight_scale_inv is None:
            along_k, weight_amax, weight_scale_inv = quantized_weight(weight, weight_scale, config, forward=True)
            along_n = weight
        q, qt, amax, scale_inv = QUANTIZE(x, x_scale, config.forward, True, True, config.rule)
        added = _bias_of_result(bias, out_dtype)
        y = GEMM(q, along_k, scale_inv, weight_scale_inv, added, out_dtype, "fast", f"{config.name} forward")
        ctx.save_for_backward(qt, scale_inv, along_n, weight_scale_inv, grad_scale, weight_scale)
        ctx.config, ctx.has_slot = config, slot is not None
        ctx.x_dtype, ctx.weight_dtype, ctx.out_dtype = x.dtype, weight.dtype, out_dtype
        ctx.weight_padding = weight_padding(weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(amax, weight_amax)
        return y, amax, weight_amax

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        qt, scale_inv, along_n, weight_scale_inv, grad_scale, weight_scale = ctx.saved_tensors
        config = ctx.config
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = grad_amax = None
        if needs_x and ctx.quantizes_weight:
            along_n = quantized_weight(along_n, weight_scale, config, forward=False)[0]
        if needs_x or needs_weight:
            q, q_transposed, grad_amax, grad_scale_inv = QUANTIZE(
                grad, grad_scale, config.backward, True, True, config.rule
            )
        if needs_x:
            grad_x = GEMM(
                q, along_n, grad_scale_inv, weight_scale_inv, None, ctx.out_dtype, "split", f"{config.name} dgrad"
            )
            grad_x = grad_x.to(ctx.x_dtype)
        if needs_weight:
            operands = (
                (qt, q_transposed, scale_inv, grad_scale_inv)
                if config.transposed
                else (q_transposed, qt, grad_scale_inv, scale_inv)
            )
            grad_weight = GEMM(*operands, None, ctx.weight_dtype, "split", f"{config.name} wgrad")
            if any(ctx.weight_padding):
                more_rows, more_columns = ctx.weight_padding
                grad_weight = F.pad(grad_weight, (0, -more_columns, 0, -more_rows))
        if needs_bias:
            grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        if not ctx.has_slot:
            grad_amax = None
        return grad_x, grad_weight, grad_bias, None, None, None, None, None, grad_amax, None, None, None


def _bias_of_result(bias: Tensor | None, out_dtype: torch.dtype) -> Tensor | None:
    """``bias`` as a product with a result of ``out_dtype`` adds it.

    Under autocast parameters are wider than results. PyTorch rounds the bias there, as it does the weight, and what a
    product adds on its way out has its result's 16 bits; a wider one would take two more passes over the result.
    """
    return bias if bias is None or out_dtype == torch.float32 else bias.to(out_dtype)


def quantized_weight(
    weight: Tensor, scale: Tensor | None, config: LinearConfig, forward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The copy of ``weight`` [R, C], or of a batch of experts [E, R, C] on top of each other, that one product reads.

    scale: [] fp32, None for the weight's own. The forward product reads the copy whose rows run along K, dgrad the one
    whose rows run along N; both calls give the same codes. Returns them, padded to multiples of 16, amax and scale_inv.
    """
    more_rows, more_columns = weight_padding(weight)
    if more_rows or more_columns:
        weight = F.pad(weight, (0, more_columns, 0, more_rows))
    matrix = weight if weight.dim() == 2 else weight.reshape(-1, weight.shape[-1])
    as_stored = config.transposed != forward
    q, qt, amax, scale_inv = QUANTIZE(matrix, scale, config.forward, as_stored, not as_stored, config.rule)
    return (q if as_stored else qt), amax, scale_inv


def weight_padding(weight: Tensor) -> tuple[int, int]:
    """The rows and columns that FP8 adds to ``weight`` [..., R, C] as it is stored, to each matrix of a batch."""
    rows, columns = weight.shape[-2:]
    return padded(rows) - rows, padded(columns) - columns


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    codes: Tensor | None,
    codes_transposed: Tensor | None,
    weight_scale_inv: Tensor | None,
    x_scale: Tensor | None,
    grad_scale: Tensor | None,
    slot: Tensor | None,
    out_dtype: torch.dtype,
    config: str,
    weight_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x: [..., K]; weight as the user stores it, for its gradient alone; codes: the weight's FP8 copy as stored, padded
    to multiples of 16, and codes_transposed its transpose, the one that no product reads may be absent; scales: [] fp32
    (None: current). Without weight_scale_inv there are no copies: they are made of the weight, by weight_scale.
    Returns y [..., N], amax of x [], amax of the weight if it was quantised here, [], else [0]."""
    # A slot that requires a gradient would make a frozen layer's result require one, and backward work with it.
    if slot is not None and not (x.requires_grad or weight.requires_grad):
        slot = slot.detach()
    constants = LinearConfig.parse(config)
    more_rows, more_columns = weight_padding(weight)
    more_in, more_out = (more_rows, more_columns) if constants.transposed else (more_columns, more_rows)
    # Reshaped out here: what a custom function returns as a view may not be changed in place, and models do that.
    matrix = x.reshape(-1, x.shape[-1])
    if more_in:
        matrix = F.pad(matrix, (0, more_in))
    if more_out and bias is not None:
        bias = F.pad(bias, (0, more_out))
    y, amax, weight_amax = _Linear.apply(
        matrix,
        weight,
        bias,
        codes,
        codes_transposed,
        weight_scale_inv,
        x_scale,
        grad_scale,
        slot,
        out_dtype,
        constants,
        weight_scale,
    )
    if more_out:
        # A copy and no slice: models take views of a linear's result that only a contiguous one has.
        y = F.pad(y, (0, -more_out))
    if x.dim() != 2:  # no view that changes nothing: autograd would not see a change in place behind it
        y = y.view(*x.shape[:-1], y.shape[-1])
    return y, amax, weight_amax


LINEAR = define_composite(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? codes, Tensor? codes_transposed, Tensor? weight_scale_inv, "
    "Tensor? x_scale, Tensor? grad_scale, Tensor? slot, ScalarType out_dtype, str config, Tensor? weight_scale=None) "
    "-> (Tensor y, Tensor amax, Tensor weight_amax)",
    linear,
)
