"""Kernels compiled for a GPU that is not there, in the forms that their launchers choose for it: what each takes.

    python -m tests.programs.small_gpu MAJOR MINOR [FAMILY …]

Run without Triton's interpreter. The GPU has the 99 KiB of shared memory a block that Ada (8.9) and desktop Blackwell
(12.0) have. Prints JSON, of each kernel its name, its constants, and the bytes of shared memory that a program takes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.kernels import SPECS, SWIGLU_BACKWARD
from te_compile.kernels import (
    alone,
    column_sums,
    cross_entropy,
    dropout_masks,
    gather_backward,
    norm,
    norm_backward,
    pointwise,
    quantize,
    scale_update,
)
from te_compile.kernels.ahead import Launch, Notes
from te_compile.kernels.compile_worker import source_of, target_of
from te_compile.kernels.fp8_attention import fp8_attention
from te_compile.kernels.grouped_gemm import grouped_gemm, grouped_wgrad
from te_compile.kernels.recording import rehearsing
from te_compile.kernels.tiles import alone as tile_alone
from te_compile.kernels.weight_refresh import TritonRefresher
from te_compile.kernels.weights import quantize_weights
from te_compile.ops.norm_quantize import Norm, Wanted
from te_compile.ops.pointwise import Spec
from te_compile.ops.weight_refresh import Layout
from te_compile.ops.weights import column_places, row_places
from te_compile.recipe import ScaleRule

SHARED_MEMORY = 99 << 10
BF16, FP32, E4M3, E5M2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
RULE = ScaleRule()
PARTS = "x0: bfloat16[M, K of 128 + 128]; x1: bfloat16[M, K of a[64:128] + a[0:64]]; t0 = add(x0, x1); quantize t0"


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def quantizes() -> None:
    for x in (empty(8192, 4096, dtype=FP32), empty(4096, 8192).t(), empty(197, 1000)):
        quantize.quantize(x, empty(dtype=FP32), E4M3, True, True, RULE, x.dtype == FP32)


def norms() -> None:
    for kind, columns, columnwise in (("layer", 4096, True), ("rms", 5120, False), ("layer", 16384, False)):
        x, parameters = empty(64, columns, dtype=FP32), [empty(columns, dtype=FP32)] * (1 + (kind == "layer"))
        weight, bias = (*parameters, None)[:2]
        wanted = Wanted(empty(dtype=FP32), E4M3, True, columnwise, True, RULE)
        norm.norm_quantize(x, Norm(weight, bias, 1e-5, kind), wanted, False)


def few_rows() -> None:
    zero = empty(dtype=FP32)
    for rows, columns in ((8, 4096), (1, 5120), (1, 1)):
        x, row, tile = empty(rows, columns, dtype=FP32), empty(columns, dtype=FP32), tile_alone(rows, columns)
        assert tile is not None
        alone.quantize_alone(x, zero, E5M2, True, RULE, tile)
        norm.norm_quantize(x, Norm(row, row, 1e-5, "layer"), Wanted(None, E4M3, True, True, True, RULE), True)
        inputs = [empty(rows, columns)] * 2
        pointwise.fused_quantize(inputs, zero, Spec.parse(SPECS["swiglu"]), E4M3, True, False, RULE, True)


def norm_backwards() -> None:
    for columns, dtype in ((16384, BF16), (8192, BF16), (4096, BF16), (1000, BF16), (128, BF16), (8192, FP32)):
        dy, x, residual = (empty(4096, columns, dtype=dtype) for _ in range(3))
        weight, mean, rstd = empty(columns, dtype=dtype), empty(4096, 1, dtype=FP32), empty(4096, 1, dtype=FP32)
        norm_backward.norm_backward(dy, x, weight, mean, rstd, residual, "layer", True, True, dtype)


def losses() -> None:
    for columns in (32000, 50257):
        logits, targets, numbers = empty(64, columns), empty(64, dtype=torch.int64), empty(64, dtype=FP32)
        cross_entropy.cross_entropy_forward(logits, targets, -100)
        cross_entropy.cross_entropy_backward(logits, targets, numbers, numbers, -100, logits)
    logits, targets, numbers = empty(64, 30522), empty(64, dtype=torch.int64), empty(64, dtype=FP32)
    cross_entropy.cross_entropy_backward_with_sums(logits, targets, numbers, numbers, -100, None, BF16)


def producers() -> None:
    scale = empty(dtype=FP32)
    for name in ("swiglu", "exact_gelu_backward"):
        spec = Spec.parse(SPECS[name])
        inputs = [empty(8192, 4096) for _ in spec.inputs]
        pointwise.fused_quantize(inputs, scale, spec, E4M3, True, True, RULE, True)
    heads = [empty(2, 1024, 8, 128) for _ in range(3)]
    pointwise.fused_quantize(heads, scale, Spec.parse(PARTS), E4M3, True, True, RULE, False)
    inputs, layouts = [empty(197, 1000) for _ in range(3)], [(True, True)] * 2
    pointwise.fused_quantize_pair(inputs, [scale] * 2, Spec.parse(SWIGLU_BACKWARD), E5M2, layouts, RULE, False)
    pointwise.fused_quantize_cat(inputs, scale, Spec.parse(SWIGLU_BACKWARD), E5M2, True, True, RULE, False)


def products() -> None:
    scale = empty(dtype=FP32)
    for rows, experts, accumulation in ((16384, 8, "fast"), (300, 64, "split")):
        ends = empty(experts, dtype=torch.int32)
        a, b = empty(rows, 4096, dtype=E4M3), empty(experts, 1024, 4096, dtype=E4M3)
        grouped_gemm(a, b, scale, scale, ends, FP32, accumulation)
        a, b = empty(1024, 304, dtype=E5M2), empty(4096, 304, dtype=E4M3)
        grouped_wgrad(a, b, scale, scale, ends, FP32, accumulation)


def attentions() -> None:
    for queries, width in ((1024, 128), (1, 64), (197, 16)):
        q, k, vt = empty(2, queries, 4, width), empty(2, 1024, 2, width), empty(2 * width, 2048)
        operands = [x.to(E4M3) for x in (q, k, vt)]
        fp8_attention(*operands, *[empty(dtype=FP32)] * 3, True, 0.1, BF16)


def quantized(matrices: list[Tensor], scales: Tensor) -> tuple[Tensor, ...]:
    flags = [True] * len(matrices)
    places = row_places(matrices, flags), column_places(matrices, flags)
    starts, lengths = zip(*places, strict=True)
    return quantize_weights(matrices, scales, E4M3, *starts, *lengths, RULE, True)


def weights() -> None:
    quantized([empty(64, 64)] * 17, empty(17, dtype=FP32))
    matrices = [empty(4096, 4096), empty(11008, 4096)]
    scales = empty(2, dtype=FP32)
    outputs = quantized(matrices, scales)
    shapes = tuple((each.shape[0], each.shape[1]) for each in matrices)
    layout = Layout((0, 1), (0, 0), shapes, shapes, (True, True), (True, True), E4M3, RULE)
    rows = [empty(1, 2, dtype=FP32) for _ in matrices]
    TritonRefresher(layout, outputs, rows, matrices)(matrices, True, False)
    scale_update.update_scales(rows, [scales], 448.0, RULE, "max")
    scale_update.snapshot_scales(rows)


def sums() -> None:
    partials = [empty(rows, 1000, dtype=FP32) for rows in (132, 256, 3)]
    column_sums.added_up_at_once(partials, [BF16, FP32, BF16])


def gathers() -> None:
    for dtype in (BF16, torch.float16):
        gather_backward.gather_backward(empty(64, 256, 256, dtype=dtype), empty(256, 256, dtype=torch.int64), 512)


def masks() -> None:
    for size in ((8192, 4096), (197, 1001)):
        dropout_masks.draw_mask(empty(1, dtype=torch.int64), size, 0.1)


FAMILIES: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        quantizes,
        norms,
        few_rows,
        norm_backwards,
        losses,
        producers,
        products,
        attentions,
        weights,
        sums,
        gathers,
        masks,
    )
}


def pretend(capability: tuple[int, int]) -> None:
    """Have launchers find the GPU."""
    properties = SimpleNamespace(multi_processor_count=128, shared_memory_per_block_optin=SHARED_MEMORY)
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.get_device_capability = lambda *_: capability
    torch.cuda.is_current_stream_capturing = lambda: False


def launches(families: list[str]) -> Iterator[Launch]:
    notes = Notes(missing=False)
    with FakeTensorMode(), rehearsing(notes):
        for family in families:
            FAMILIES[family]()
    yield from {launch.form: launch for launch in notes.launches}.values()


if __name__ == "__main__":
    capability = (int(sys.argv[1]), int(sys.argv[2]))
    pretend(capability)
    taken = []
    for launch in launches(sys.argv[3:] or list(FAMILIES)):
        source, options = source_of(launch.kernel, launch.arguments, launch.constants, capability)
        compiled = triton.compile(source, target=target_of(capability), options=options)
        constants = {name: str(value) for name, value in launch.constants.items()}
        taken.append((launch.kernel.fn.__name__, constants, compiled.metadata.shared))
    print(json.dumps(taken))
