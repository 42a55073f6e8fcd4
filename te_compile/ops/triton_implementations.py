"""Which operators Triton kernels run, and on what: the one place where ``ops`` meets ``kernels``.

Registering costs nothing and works everywhere; Triton and the kernels are imported by the first call, so a machine
without Triton never notices. The adapters add what a kernel must be told and an operator's arguments do not say:
whether a scale may still be missing, and where in a flat tensor each part goes.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from te_compile.kernels.tiles import alone
from te_compile.ops import calibration, registry
from te_compile.ops.cross_entropy import (
    cross_entropy_backward_reference,
    cross_entropy_backward_with_sums_reference,
    cross_entropy_forward_reference,
)
from te_compile.ops.dropout_attention import dropout_attention_backward_reference, dropout_attention_reference
from te_compile.ops.dropout_bits import dropout_bits_reference, kept_share, nearest_share, words_of
from te_compile.ops.dropout_masks import dropout_mask_reference
from te_compile.ops.fp8_attention import fp8_attention_reference
from te_compile.ops.gather_backward import NARROW, gather_backward_reference
from te_compile.ops.mask_tiles import mask_tiles_reference
from te_compile.ops.norm import KINDS
from te_compile.ops.norm_backward import norm_backward_reference
from te_compile.ops.norm_quantize import Norm, Wanted, norm_quantize_reference
from te_compile.ops.norm_quantize import Outputs as NormOutputs
from te_compile.ops.quantize import ALIGNMENT, quantize_reference
from te_compile.ops.reach import MOST_STRIDE, MOST_WORDS, check_reach, is_within_reach
from te_compile.ops.registry import Target, Unsupported
from te_compile.ops.weight_refresh import Layout, Refresher
from te_compile.ops.weights import Outputs, column_places, row_places
from te_compile.recipe import DelayedScaling, ScaleRule, recipe_of

TRITON = "triton"
PRIORITY = 10
CAPABILITY = (8, 9)  # the first with FP8 conversion instructions
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDEST_HEAD = 128  # features: beyond it a program's registers do not hold the result
NARROWEST_HEAD = 32  # features of one with a dropout: below it products are small beside what is done to each weight
NARROWEST_READ = 4  # bytes by which a thread reads: with less the second pass that sums save costs no more than they do
HOPPER = (9, 0)
NOT_WANTED = -1


@cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def check_target(target: Target) -> None:
    """Raise Unsupported unless ``target`` can run Triton kernels that convert to FP8."""
    if target.device != "cuda":
        raise Unsupported(f"needs a CUDA device, not {target.device}")
    if target.capability is None or target.capability < CAPABILITY:
        raise Unsupported(f"FP8 conversion needs compute capability 8.9, this device has {target.capability}")
    if not _triton_is_installed():
        raise Unsupported("Triton is not installed")


def _check_high_precision(tensors: Sequence[Tensor | None]) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in DTYPES:
            raise Unsupported(f"{tensor.dtype} is none of {', '.join(map(str, DTYPES))}")


def _check_dtypes(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> None:
    _check_high_precision(tensors)
    if dtype not in FP8:
        raise Unsupported(f"{dtype} is none of {', '.join(map(str, FP8))}")


def _check_quantize(target: Target, arguments: dict[str, Any]) -> None:
    check_target(target)
    _check_dtypes([arguments["x"]], arguments["dtype"])
    check_reach(*arguments["x"].shape)


def _check_norm_quantize(target: Target, arguments: dict[str, Any]) -> None:
    check_target(target)
    _check_dtypes([arguments["x"], arguments["weight"], arguments["bias"]], arguments["dtype"])
    _check_kind(arguments["kind"])
    check_reach(*arguments["x"].shape)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise Unsupported(f"norm kind {kind!r} is none of {', '.join(KINDS)}")


def _check_norm_backward(target: Target, arguments: dict[str, Any]) -> None:
    check_target(target)
    dy, x = arguments["dy"], arguments["x"]
    _check_high_precision([dy, x, arguments["weight"], arguments["residual"]])
    _check_kind(arguments["kind"])
    if arguments["bias_dtype"] not in (None, *DTYPES):
        raise Unsupported(f"{arguments['bias_dtype']} is none of {', '.join(map(str, DTYPES))}")
    columns = x.shape[1]
    if not isinstance(columns, int):
        raise Unsupported("the length of a row is not known at compile time")
    from te_compile.kernels.norm_backward import LONGEST_ROW

    longest = LONGEST_ROW // max(dy.itemsize, x.itemsize)
    if arguments["wants_dx"] and columns > longest:
        raise Unsupported(f"K={columns}: no more than {longest} elements of these dtypes fit a program")


def _check_quantize_weights(target: Target, arguments: dict[str, Any]) -> None:
    check_target(target)
    _check_dtypes(arguments["weights"], arguments["dtype"])
    if len({weight.dtype for weight in arguments["weights"]}) > 1:
        raise Unsupported("the weights differ in dtype")
    for weight in arguments["weights"]:
        *above, columns = weight.shape  # experts lie on top of each other
        check_reach(math.prod(above), columns)


def check_grouped(target: Target, arguments: dict[str, Any]) -> None:
    """Raise Unsupported, with the reason, for grouped products that no kernel of ours takes."""
    check_target(target)
    a, b = arguments["a"], arguments["b"]
    if a.dtype not in FP8 or b.dtype not in FP8:
        raise Unsupported(f"{a.dtype} and {b.dtype} are not both among {', '.join(map(str, FP8))}")
    if arguments["out_dtype"] not in DTYPES:
        raise Unsupported(f"{arguments['out_dtype']} is none of {', '.join(map(str, DTYPES))}")


def check_grouped_gemm(target: Target, arguments: dict[str, Any]) -> None:
    """The same for those whose groups lie along rows."""
    check_grouped(target, arguments)
    b = arguments["b"]
    if b.stride(2) != 1:
        raise Unsupported("the experts' rows do not run along the contraction")
    for name, length in (("K", b.shape[2]), ("an expert's stride", b.stride(0)), ("a row's stride", b.stride(1))):
        if isinstance(length, int) and length % ALIGNMENT:
            raise Unsupported(f"{name}={length} is not a multiple of {ALIGNMENT}")
    for name, length in (("K", b.shape[2]), ("N", b.shape[1]), ("a row's stride", b.stride(1))):
        if isinstance(length, int) and length > MOST_STRIDE:
            raise Unsupported(f"{name}={length} is more than {MOST_STRIDE}, for a tile's offsets have 32 bits")


def _check_snapshot(target: Target, arguments: dict[str, Any]) -> None:
    check_target(target)


def _check_update_scales(target: Target, arguments: dict[str, Any]) -> None:
    check_target(target)
    recipe = recipe_of(arguments["recipe"])
    if not isinstance(recipe, DelayedScaling):
        raise Unsupported(f"recipe {recipe.name!r} keeps no state")
    if callable(recipe.amax_compute_algo):
        raise Unsupported("amax_compute_algo is a function")
    if recipe.scaling_factor_compute_algo is not None:
        raise Unsupported("scaling_factor_compute_algo is a function")


@registry.register("quantize", TRITON, priority=PRIORITY, check=_check_quantize)
def quantize(
    x: Tensor, scale: Tensor | None, dtype: torch.dtype, rowwise: bool, columnwise: bool, rule: ScaleRule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``te::quantize`` by kernels/quantize.py."""
    if x.numel() == 0 or not is_within_reach(*x.shape):  # no tile to launch
        return quantize_reference(x, scale, dtype, rowwise, columnwise, rule)
    from te_compile.kernels.alone import quantize_alone
    from te_compile.kernels.quantize import quantize as kernel

    measure = calibration.must_measure(scale)
    if measure and not columnwise and (whole := alone(*x.shape)):
        return quantize_alone(x, scale, dtype, rowwise, rule, whole)
    return kernel(x, scale, dtype, rowwise, columnwise, rule, measure)


@registry.register("norm_quantize", TRITON, priority=PRIORITY, check=_check_norm_quantize)
def norm_quantize(x: Tensor, norm: Norm, wanted: Wanted) -> NormOutputs:
    """``te::norm_quantize`` by kernels/norm.py."""
    if x.numel() == 0 or not is_within_reach(*x.shape):
        return norm_quantize_reference(x, norm, wanted)
    from te_compile.kernels.norm import norm_quantize as kernel

    return kernel(x, norm, wanted, calibration.must_measure(wanted.scale))


@registry.register("norm_backward", TRITON, priority=PRIORITY, check=_check_norm_backward)
def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    residual: Tensor | None,
    kind: str,
    wants_dx: bool,
    wants_dw: bool,
    bias_dtype: torch.dtype | None,
    partial_sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``te::norm_backward`` by kernels/norm_backward.py."""
    given = (dy, x, weight, mean, rstd, residual, kind, wants_dx, wants_dw, bias_dtype)
    if x.numel() == 0 or not (wants_dx or wants_dw or bias_dtype):
        return norm_backward_reference(*given, partial_sums)
    from te_compile.kernels.norm_backward import norm_backward as kernel

    return kernel(*given, partial_sums=partial_sums)


def _check_column_sums(target: Target, arguments: dict[str, Any]) -> None:
    check_target(target)


@registry.register("column_sums", TRITON, priority=PRIORITY, check=_check_column_sums)
def column_sums(partials: list[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    """``te::column_sums`` by kernels/column_sums.py."""
    from te_compile.kernels.column_sums import added_up_at_once

    return added_up_at_once(partials, dtypes)


def _check_gather_backward(target: Target, arguments: dict[str, Any]) -> None:
    check_target(target)
    if arguments["dy"].dtype not in NARROW:
        raise Unsupported(f"dy is {arguments['dy'].dtype}, not of 16 bits")


@registry.register("gather_backward", TRITON, priority=PRIORITY, check=_check_gather_backward)
def gather_backward(dy: Tensor, index: Tensor, columns: int) -> Tensor:
    """``te::gather_backward`` by kernels/gather_backward.py."""
    from te_compile.kernels.gather_backward import MOST_PROGRAMS
    from te_compile.kernels.gather_backward import gather_backward as kernel

    if dy.numel() == 0 or columns == 0 or max(dy.shape[:2]) > MOST_PROGRAMS:
        return gather_backward_reference(dy, index, columns)
    return kernel(dy, index, columns)


@registry.register("quantize_weights", TRITON, priority=PRIORITY, check=_check_quantize_weights)
def quantize_weights(
    weights: list[Tensor],
    scales: Tensor | None,
    dtype: torch.dtype,
    rowwise: list[bool],
    columnwise: list[bool],
    rule: ScaleRule,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``te::quantize_weights`` by kernels/weights.py."""
    from te_compile.kernels.weights import quantize_weights as kernel

    weights = [weight.contiguous() for weight in weights]
    row_starts, row_length = row_places(weights, rowwise)
    column_starts, column_length = column_places(weights, columnwise)
    return kernel(
        weights,
        scales,
        dtype,
        [NOT_WANTED if start is None else start for start in row_starts],
        [NOT_WANTED if start is None else start for start in column_starts],
        row_length,
        column_length,
        rule,
        calibration.must_measure(scales),
    )


@registry.register("refresh_weights", TRITON, priority=PRIORITY, check=_check_quantize_weights)
def refresh_weights(
    layout: Layout, outputs: Outputs, rows: Sequence[Tensor] | None, weights: Sequence[Tensor]
) -> Refresher:
    """A refresher by kernels/weight_refresh.py."""
    from te_compile.kernels.weight_refresh import TritonRefresher

    return TritonRefresher(layout, outputs, rows, weights)


@registry.register("grouped_gemm", TRITON, priority=PRIORITY, check=check_grouped_gemm)
def grouped_gemm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulation: str,
) -> Tensor:
    """``te::grouped_gemm`` by kernels/grouped_gemm.py."""
    from te_compile.kernels.grouped_gemm import grouped_gemm as kernel

    return kernel(a, b, a_scale_inv, b_scale_inv, ends, out_dtype, accumulation)


@registry.register("grouped_wgrad", TRITON, priority=PRIORITY, check=check_grouped)
def grouped_wgrad(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulation: str,
) -> Tensor:
    """``te::grouped_wgrad`` by kernels/grouped_gemm.py."""
    from te_compile.kernels.grouped_gemm import grouped_wgrad as kernel

    return kernel(a, b, a_scale_inv, b_scale_inv, ends, out_dtype, accumulation)


@registry.register("snapshot", TRITON, priority=PRIORITY, check=_check_snapshot)
def snapshot(states: list[Tensor]) -> Tensor:
    """``te::snapshot`` by kernels/scale_update.py."""
    from te_compile.kernels.scale_update import snapshot_scales

    return snapshot_scales(states)


@registry.register("update_scales_", TRITON, priority=PRIORITY, check=_check_update_scales)
def update_scales(states: list[Tensor], amaxes: Sequence[Tensor], fp8_max: float, recipe: DelayedScaling) -> None:
    """``te::update_scales_`` by kernels/scale_update.py."""
    from te_compile.kernels.scale_update import update_scales as kernel

    assert isinstance(recipe.amax_compute_algo, str)
    kernel(states, amaxes, fp8_max, recipe.rule(), recipe.amax_compute_algo)


def _check_fp8_attention(target: Target, arguments: dict[str, Any]) -> None:
    check_target(target)
    for name in ("q", "k", "vt"):
        if arguments[name].dtype != torch.float8_e4m3fn:
            raise Unsupported(f"{name} is {arguments[name].dtype}, not {torch.float8_e4m3fn}")
        if arguments[name].stride(-1) != 1:
            raise Unsupported(f"{name} does not run along its contraction")
    width = arguments["q"].shape[3]
    if width % ALIGNMENT or width > WIDEST_HEAD:
        raise Unsupported(f"a head of {width} features is no multiple of {ALIGNMENT} up to {WIDEST_HEAD}")
    if arguments["out_dtype"] not in DTYPES:
        raise Unsupported(f"{arguments['out_dtype']} is none of {', '.join(map(str, DTYPES))}")


@registry.register("fp8_attention", TRITON, priority=PRIORITY, check=_check_fp8_attention)
def fp8_attention(
    q: Tensor,
    k: Tensor,
    vt: Tensor,
    q_scale_inv: Tensor,
    k_scale_inv: Tensor,
    v_scale_inv: Tensor,
    causal: bool,
    scale: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """``te::fp8_attention`` by kernels/fp8_attention.py."""
    operands = (q, k, vt, q_scale_inv, k_scale_inv, v_scale_inv, causal, scale, out_dtype)
    if q.numel() == 0 or k.numel() == 0:  # no tile to launch, or no key to see
        return fp8_attention_reference(*operands)
    from te_compile.kernels.fp8_attention import fp8_attention as kernel

    return kernel(*operands)


def _check_cross_entropy(target: Target, arguments: dict[str, Any]) -> None:
    check_target(target)
    _check_high_precision([arguments["logits"], arguments.get("addend")])


@registry.register("cross_entropy_forward", TRITON, priority=PRIORITY, check=_check_cross_entropy)
def cross_entropy_forward(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """``te::cross_entropy_forward`` by kernels/cross_entropy.py."""
    if logits.numel() == 0:
        return cross_entropy_forward_reference(logits, targets, ignore_index)
    from te_compile.kernels.cross_entropy import cross_entropy_forward as kernel

    return kernel(logits, targets, ignore_index)


@registry.register("cross_entropy_backward_deferred", TRITON, priority=PRIORITY, check=_check_cross_entropy)
@registry.register("cross_entropy_backward", TRITON, priority=PRIORITY, check=_check_cross_entropy)
def cross_entropy_backward(
    logits: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    gradients: Tensor,
    ignore_index: int,
    addend: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """``te::cross_entropy_backward`` by kernels/cross_entropy.py."""
    operands = (logits, targets, logsumexp, gradients, ignore_index, addend)
    if logits.numel() == 0:
        return cross_entropy_backward_reference(*operands)
    from te_compile.kernels.cross_entropy import cross_entropy_backward as kernel

    return kernel(*operands, out=out)


def _check_cross_entropy_with_sums(target: Target, arguments: dict[str, Any]) -> None:
    _check_cross_entropy(target, arguments)
    logits = arguments["logits"]
    if arguments["sums_dtype"] not in DTYPES:
        raise Unsupported(f"{arguments['sums_dtype']} is none of {', '.join(map(str, DTYPES))}")
    width = logits.shape[1] * logits.itemsize
    if not isinstance(width, int) or width % NARROWEST_READ:
        raise Unsupported(f"rows of {width} bytes begin at no multiple of {NARROWEST_READ}, so they are read in halves")


@registry.register(
    "cross_entropy_backward_deferred_with_sums", TRITON, priority=PRIORITY, check=_check_cross_entropy_with_sums
)
@registry.register("cross_entropy_backward_with_sums", TRITON, priority=PRIORITY, check=_check_cross_entropy_with_sums)
def cross_entropy_backward_with_sums(
    logits: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    gradients: Tensor,
    ignore_index: int,
    addend: Tensor | None,
    sums_dtype: torch.dtype,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``te::cross_entropy_backward_with_sums`` by kernels/cross_entropy.py."""
    operands = (logits, targets, logsumexp, gradients, ignore_index, addend, sums_dtype)
    if logits.numel() == 0:
        return cross_entropy_backward_with_sums_reference(*operands)
    from te_compile.kernels.cross_entropy import cross_entropy_backward_with_sums as kernel

    return kernel(*operands, out=out)


def check_dropout(target: Target, arguments: dict[str, Any]) -> None:
    """Raise Unsupported where no bits are drawn by kernels, or for a probability that is none to them."""
    check_target(target)
    if target.capability != HOPPER:
        raise Unsupported(f"it is faster than PyTorch's on compute capability 9.0, this device has {target.capability}")
    if not 0 < kept_share(arguments["probability"]) < kept_share(0.0):
        raise Unsupported(f"a dropout of {arguments['probability']} drops none or all")


def _check_dropout_mask(target: Target, arguments: dict[str, Any]) -> None:
    check_target(target)
    if not 0 < nearest_share(arguments["probability"]) < nearest_share(0.0):
        raise Unsupported(f"a dropout of {arguments['probability']} drops none or all")


def check_dropout_attention(target: Target, arguments: dict[str, Any]) -> None:
    """Raise Unsupported for what no kernel of ours runs."""
    check_dropout(target, arguments)
    for name in ("q", "k", "v"):
        if arguments[name].dtype not in (torch.bfloat16, torch.float16):
            raise Unsupported(f"{name} is {arguments[name].dtype}, not of 16 bits")
    width = arguments["q"].shape[3]
    if not isinstance(width, int) or width % ALIGNMENT or not NARROWEST_HEAD <= width <= WIDEST_HEAD:
        allowed = f"a multiple of {ALIGNMENT} from {NARROWEST_HEAD} to {WIDEST_HEAD}"
        raise Unsupported(f"a head of {width} features is not {allowed}")


def _check_triton_dropout_attention(target: Target, arguments: dict[str, Any]) -> None:
    check_dropout_attention(target, arguments)
    queries, keys = arguments["q"].shape[1], arguments["k"].shape[1]
    if isinstance(queries, int) and isinstance(keys, int) and words_of(keys) * queries > MOST_WORDS:
        raise Unsupported(f"the bits of {queries} × {keys} weights are beyond what offsets of 32 bits reach")


def _check_mask_tiles(target: Target, arguments: dict[str, Any]) -> None:
    check_target(target)


@registry.register("dropout_bits", TRITON, priority=PRIORITY, check=check_dropout)
def dropout_bits(seed: Tensor, heads: int, queries: int, keys: int, probability: float, causal: bool) -> Tensor:
    """``te::dropout_bits`` by kernels/dropout_bits.py."""
    if heads * queries * keys == 0:
        return dropout_bits_reference(seed, heads, queries, keys, probability, causal)
    from te_compile.kernels.dropout_bits import draw as kernel

    return kernel(seed, heads, queries, keys, probability, causal)


@registry.register("dropout_mask", TRITON, priority=PRIORITY, check=_check_dropout_mask)
def dropout_mask(seed: Tensor, size: Sequence[int], probability: float) -> Tensor:
    """``te::dropout_mask`` by kernels/dropout_masks.py."""
    if math.prod(size) == 0:
        return dropout_mask_reference(seed, size, probability)
    from te_compile.kernels.dropout_masks import draw_mask as kernel

    return kernel(seed, size, probability)


@registry.register("dropout_attention_forward", TRITON, priority=PRIORITY, check=_check_triton_dropout_attention)
def dropout_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor, probability: float, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """``te::dropout_attention_forward`` by kernels/dropout_attention.py."""
    operands = (q, k, v, bits, probability, causal, scale)
    if q.numel() == 0 or k.numel() == 0:
        return dropout_attention_reference(*operands)
    from te_compile.kernels.dropout_attention import forward as kernel

    return kernel(*operands)


@registry.register("dropout_attention_backward", TRITON, priority=PRIORITY, check=_check_triton_dropout_attention)
def dropout_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bits: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    probability: float,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``te::dropout_attention_backward`` by kernels/dropout_attention_backward.py."""
    operands = (grad, q, k, v, bits, out, logsumexp, probability, causal, scale)
    if q.numel() == 0 or k.numel() == 0:
        return dropout_attention_backward_reference(*operands)
    from te_compile.kernels.dropout_attention_backward import backward as kernel

    return kernel(*operands)


@registry.register("mask_tiles", TRITON, priority=PRIORITY, check=_check_mask_tiles)
def mask_tiles(mask: Tensor, both: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``te::mask_tiles`` by kernels/mask_tiles.py."""
    if mask.numel() == 0:
        return mask_tiles_reference(mask, both)
    from te_compile.kernels.mask_tiles import mask_tiles as kernel

    return kernel(mask, both)
