"""Each kernel family on the tensors of a 4096 / 16384 layer: time, bandwidth and the share of a plain copy's bandwidth.

    python -m benchmarks.kernels                  all rows
    python -m benchmarks.kernels --sweep          other tiles beside the chosen ones
    python -m benchmarks.kernels --only norm      rows whose name contains "norm"
    python -m benchmarks.kernels --no-peers       only te_compile's own

One JSON line a row. ``bytes`` is what the operation must move once: inputs read, outputs written; ``share`` compares
the bandwidth that follows with that of a 1 GiB copy in the same run. Matrix products count FLOPs instead, and their
share is that of an 8192 cubed FP8 product in the same run. Where Transformer Engine is installed, its kernels for the
same job stand beside ours (``by``); a job that it does not run leaves a row with the error.

A time is that of one call within a CUDA graph of several, as in a model's step: the host plays no part, each call has
inputs and outputs of its own, together more than the L2 holds, and what one call leaves to be written back is paid by
the next. Amaxes are cleared beforehand, as they are outside of graphs, some hundreds at a time. ``host_us`` is what one
call costs the host. Every row's result is checked in the same run. It exits with 1 if a check of ours fails or a
single-pass row with the chosen tile stays below the goal.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_timing import DEVICE, E4M3, TURNS, Ceilings, copy_bandwidth, host_microseconds, replayed
from benchmarks.measure import Rows, add_out
from te_compile.kernels import (
    cross_entropy,
    native_norm,
    norm,
    norm_backward,
    quantize,
    scale_update,
    weight_refresh,
    weights,
)
from te_compile.kernels.pointwise import fused_quantize, fused_quantize_cat, fused_quantize_pair
from te_compile.kernels.tiles import Tile
from te_compile.ops.cross_entropy import (
    cross_entropy_backward_reference,
    cross_entropy_backward_with_sums_reference,
    cross_entropy_forward_reference,
)
from te_compile.ops.fused_quantize_cat import fused_quantize_cat_reference
from te_compile.ops.fused_quantize_pair import fused_quantize_pair_reference
from te_compile.ops.norm import norm_reference
from te_compile.ops.norm_backward import norm_backward_reference
from te_compile.ops.norm_quantize import Norm, Wanted
from te_compile.ops.pointwise import Spec, evaluate
from te_compile.ops.quantize import quantize_reference
from te_compile.ops.registry import Target, Unsupported
from te_compile.ops.scaling import update_scales_reference
from te_compile.ops.weight_refresh import LINE_BYTES, Layout, line_places
from te_compile.ops.weights import column_places, quantize_weights_reference, row_places
from te_compile.recipe import DelayedScaling, ScaleRule

GOAL = 0.70
OURS = "te_compile"
SHAPES = ((8192, 4096), (8192, 16384))
LOGITS = (8192, 32000)
LAYER = ((4096, 4096),) * 4 + ((16384, 4096), (4096, 16384))
E5M2 = torch.float8_e5m2
RULE = ScaleRule()
EPS = 1e-5
IGNORED = -100
# Producers in the words of the joint graph, which are what a kernel's spelling is chosen by: SwiGLU, GELU (that of tanh
# unless it is called exact), and the backward of ReLU² and both GELUs with the bias gradient.
SPECS = {
    "swiglu": "x0: bfloat16[M, K]; x1: bfloat16[M, K]; t0 = sigmoid(x0); t1 = mul(x0, t0); t2 = bfloat16(t1); "
    "t3 = mul(t2, x1); t4 = bfloat16(t3); quantize t4",
    "gelu": "x0: bfloat16[M, K]; t0 = mul(x0, x0); t1 = mul(t0, x0); t2 = mul(t1, 0.044715); t3 = add(x0, t2); "
    "t4 = mul(t3, 0.7978845608028654); t5 = tanh(t4); t6 = add(t5, 1.0); t7 = mul(x0, 0.5); t8 = mul(t7, t6); "
    "t9 = bfloat16(t8); quantize t9",
    "exact_gelu": "x0: bfloat16[M, K]; t0 = mul(x0, 0.5); t1 = mul(x0, 0.7071067811865476); t2 = erf(t1); "
    "t3 = add(t2, 1); t4 = mul(t0, t3); t5 = bfloat16(t4); quantize t5",
    "relu2_backward": "x0: bfloat16[M, K]; x1: bfloat16[M, K]; t0 = relu(x1); t1 = mul(x0, t0); t2 = mul(t1, 2.0); "
    "t3 = bfloat16(t2); quantize t3; sum t3: float32",
}
SPECS["gelu_backward"] = (
    "x0: bfloat16[M, K]; x1: bfloat16[M, K]; t0 = mul(x1, x1); t1 = mul(t0, x1); t2 = mul(t1, 0.044715); "
    "t3 = add(x1, t2); t4 = mul(t3, 0.7978845608028654); t5 = tanh(t4); t6 = add(t5, 1); t7 = mul(t6, 0.5); "
    "t8 = mul(x1, 0.5); t9 = mul(t5, t5); t10 = sub(1, t9); t11 = mul(t8, t10); t12 = mul(t0, 0.134145); "
    "t13 = add(t12, 1); t14 = mul(t13, 0.7978845608028654); t15 = mul(t11, t14); t16 = add(t7, t15); "
    "t17 = mul(x0, t16); t18 = bfloat16(t17); quantize t18; sum t18: bfloat16"
)
SPECS["exact_gelu_backward"] = (
    "x0: bfloat16[M, K]; x1: bfloat16[M, K]; t0 = mul(x1, 0.7071067811865476); t1 = erf(t0); t2 = add(t1, 1); "
    "t3 = mul(t2, 0.5); t4 = mul(x1, x1); t5 = mul(t4, -0.5); t6 = exp(t5); t7 = mul(t6, 0.3989422804014327); "
    "t8 = mul(x1, t7); t9 = add(t3, t8); t10 = mul(x0, t9); t11 = bfloat16(t10); quantize t11; sum t11: bfloat16"
)
SWIGLU_BACKWARD = (
    "x0: bfloat16[M, K]; x1: bfloat16[M, K]; x2: bfloat16[M, K]; t0 = neg(x1); t1 = exp(t0); t2 = add(t1, 1); "
    "t3 = div(x1, t2); t4 = bfloat16(t3); t5 = mul(x0, t4); t6 = bfloat16(t5); t7 = mul(x0, x2); t8 = sigmoid(x1); "
    "t9 = mul(t7, t8); t10 = sub(1, t8); t11 = mul(x1, t10); t12 = add(t11, 1); t13 = mul(t9, t12); "
    "t14 = bfloat16(t13); quantize t6; quantize t14"
)
"""The gradients of up and of gate in one pass, from that of their product."""
HEAD, LENGTH = 128, 2048  # features and sequence of what is rotated
SWEEP = {
    "quantize": [Tile(m, k, w) for m in (64, 128) for k in (64, 128) for w in (4, 8, 16) if m * k // w <= 4096],
    "norm": [Tile(m, k, w) for m in (64, 128) for k in (64, 128) for w in (4, 8) if m * k // w <= 2048],
    "fused": [Tile(m, k, w) for m in (64, 128) for k in (64, 128) for w in (4, 8) if m * k // w <= 2048],
    # Steps are stages of the pipeline here.
    "loss": [
        Tile(1, k, w, s) for k in (2048, 4096, 8192) for w in (4, 8, 16) for s in (1, 2, 3) if k // w in (256, 512)
    ],
    "loss with sums": [
        Tile(m, k, w) for m in (1, 2, 4) for k in (1024, 2048, 4096) for w in (4, 8) if m * k // w <= 1024
    ],
}


@dataclass(frozen=True)
class Row:
    """One measurement: ``call(tile, turn)`` is timed, on the inputs of that turn; ``check(result)`` says whether that
    of turn 0 is right. None is the chosen tile.

    family: whose tiles to sweep. single_pass: held to the goal. by: whose kernel it is. flops: given for products,
    which are not bound by their bytes.
    """

    name: str
    shape: str
    bytes: int
    call: Callable[[Tile | None, int], Any]
    check: Callable[[Any], bool]
    family: str = ""
    single_pass: bool = True
    swept: bool = True
    by: str = OURS
    flops: float = 0.0


def _randoms(*shape: int) -> list[Tensor]:
    """A random matrix for each turn."""
    return [torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(TURNS)]


def _same(got: Tensor, wanted: Tensor, most_wrong: float = 0.0) -> bool:
    """Are the bytes equal, but for at most this fraction of them?"""
    if got.shape != wanted.shape:
        return False
    wrong = got.view(torch.uint8) != wanted.view(torch.uint8)
    return float(wrong.float().mean()) <= most_wrong if wrong.numel() else True


def _scale_of(x: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    return RULE.scale(x.abs().amax() * 1.1, torch.finfo(dtype).max)


def quantize_rows() -> Iterator[Row]:
    """Given scale and measured scale, forward and gradient types, both layouts and one."""
    for m, k in SHAPES:
        xs = _randoms(m, k)
        x = xs[0]
        scale = _scale_of(x)
        for name, dtype, given, columnwise in (
            ("quantize", E4M3, scale, True),
            ("quantize E5M2", E5M2, _scale_of(x, E5M2), True),
            ("quantize rowwise only", E4M3, scale, False),
            ("quantize current scaling", E4M3, None, True),
        ):

            def call(tile: Tile | None, turn: int, xs=xs, given=given, dtype=dtype, columnwise=columnwise) -> Any:
                chosen = tile or quantize.TILE
                return quantize.quantize(xs[turn], given, dtype, True, columnwise, RULE, given is None, chosen)

            def check(got: Any, x=x, given=given, dtype=dtype, columnwise=columnwise) -> bool:
                wanted = quantize_reference(x, given, dtype, True, columnwise, RULE)
                scalars = torch.equal(got[2], wanted[2]) and torch.equal(got[3], wanted[3])
                return scalars and _same(got[0], wanted[0]) and _same(got[1], wanted[1])

            size = m * k * (4 if columnwise else 3)
            yield Row(name, f"{m}x{k}", size, call, check, "quantize", given is not None, name == "quantize")


def norm_rows() -> Iterator[Row]:
    """LayerNorm and RMSNorm; with y for a reader in high precision; measured scale; row-major only."""
    for m, k in SHAPES:
        xs = _randoms(m, k)
        x = xs[0]
        weight = 1 + torch.randn(k, device=DEVICE, dtype=torch.bfloat16) / 8
        bias = torch.randn(k, device=DEVICE, dtype=torch.bfloat16)
        scale = torch.tensor(60.0, device=DEVICE)
        for name, kind, given, columnwise, emit in (
            ("norm layer", "layer", scale, True, False),
            ("norm rms", "rms", scale, True, False),
            ("norm rms with y", "rms", scale, True, True),
            ("norm layer rowwise only", "layer", scale, False, False),
            ("norm rms rowwise only", "rms", scale, False, False),
            ("norm rms current scaling", "rms", None, True, False),
        ):
            b = bias if kind == "layer" else None
            task = Norm(weight, b, EPS, kind), Wanted(given, E4M3, True, columnwise, emit, RULE)

            def by_triton(tile: Tile | None, turn: int, xs=xs, task=task, measure=given is None) -> Any:
                return norm.norm_quantize(xs[turn], *task, measure, tile)

            def by_cuda(_: Tile | None, turn: int, xs=xs, task=task, measure=given is None) -> Any:
                return native_norm.norm_quantize(xs[turn], *task, measure)

            def check(got: Any, x=x, weight=weight, bias=bias, kind=kind, given=given, columnwise=columnwise) -> bool:
                y, _, _ = norm_reference(x, weight, bias if kind == "layer" else None, EPS, kind)
                wanted = quantize_reference(y, given, E4M3, True, columnwise, RULE)
                emitted = not got[0].numel() or bool(torch.allclose(got[0].float(), y.float(), rtol=0.01, atol=0.01))
                return emitted and _same(got[1], wanted[0], 1e-3) and _same(got[2], wanted[1], 1e-3)

            size = m * k * (2 + 1 + columnwise + 2 * emit)
            swept = name in ("norm layer", "norm rms")
            plain = f"{m}x{k}", size
            # Which of the two runs in a model: Triton's reads x twice where qᵀ is wanted.
            chosen = _native_norm_takes(x, *task)
            if chosen:
                yield Row(name, *plain, by_cuda, check, "norm", given is not None, False)
            in_triton = f"{name}, Triton" if chosen else name
            yield Row(in_triton, *plain, by_triton, check, "norm", given is not None and not chosen, swept)


def _native_norm_takes(x: Tensor, norm: Norm, wanted: Wanted) -> bool:
    """Does a graph's norm with these arguments run in the C++ core?"""
    try:
        native_norm.check(Target.of(x.device), {"x": x, **norm._asdict(), **wanted._asdict()})
    except Unsupported:
        return False
    return True


def norm_backward_rows() -> Iterator[Row]:
    """All gradients of LayerNorm and RMSNorm, with the residual's."""
    for m, k in SHAPES:
        dys, xs, residuals = (_randoms(m, k) for _ in range(3))
        weight = 1 + torch.randn(k, device=DEVICE, dtype=torch.bfloat16) / 8
        for name, kind in (("layer norm backward + residual", "layer"), ("RMS norm backward + residual", "rms")):
            _, mean, rstd = norm_reference(xs[0], weight, None, EPS, kind)
            bias_dtype = torch.bfloat16 if kind == "layer" else None
            rest = (kind, True, True, bias_dtype)
            tasks = [(dy, x, weight, mean, rstd, r, *rest) for dy, x, r in zip(dys, xs, residuals, strict=True)]

            def call(_: Tile | None, turn: int, tasks=tasks) -> Any:
                return norm_backward.norm_backward(*tasks[turn])

            def check(got: Any, tasks=tasks) -> bool:
                pairs = list(zip(got, norm_backward_reference(*tasks[0]), strict=True))
                near = all(torch.allclose(a.float(), b.float(), rtol=0.01, atol=0.05) for a, b in pairs)
                return near and _same(*pairs[0], 1e-2)

            # The sums of a layer norm's longest rows take a launch of their own, which reads dy and x once more.
            single = k * (1 + (kind == "layer")) <= norm_backward.LONGEST_SUMS
            yield Row(name, f"{m}x{k}", 8 * m * k, call, check, "", single, swept=False)


def loss_rows() -> Iterator[Row]:
    """The loss of a language model and the gradient of its logits, alone and with another gradient that is added."""
    n, v = LOGITS
    xs, others = _randoms(n, v), _randoms(n, v)
    targets = torch.randint(0, v, (n,), device=DEVICE)
    targets[::7] = IGNORED
    gradients = torch.full((), 1 / n, device=DEVICE).expand(n)
    losses, logsumexp = cross_entropy_forward_reference(xs[0], targets, IGNORED)

    def forward(tile: Tile | None, turn: int) -> Any:
        return cross_entropy.cross_entropy_forward(xs[turn], targets, IGNORED, _walk(tile, cross_entropy.FORWARD))

    def same_losses(got: Any) -> bool:
        pairs = zip(got, (losses, logsumexp), strict=True)
        return all(torch.allclose(each, wanted, rtol=1e-5, atol=1e-5) for each, wanted in pairs)

    read = int((targets != IGNORED).sum()) * v  # what is ignored is not read
    yield Row("cross entropy", f"{n}x{v}", 2 * read, forward, same_losses, "loss")
    for name, addends in (
        ("cross entropy backward", [None] * TURNS),
        ("cross entropy backward + logits' gradient", others),
    ):

        def backward(tile: Tile | None, turn: int, addends: Any = addends) -> Any:
            task = (xs[turn], targets, logsumexp, gradients, IGNORED, addends[turn])
            return cross_entropy.cross_entropy_backward(*task, _walk(tile, cross_entropy.BACKWARD))

        def same_gradients(got: Any, addends: Any = addends) -> bool:
            wanted = cross_entropy_backward_reference(xs[0], targets, logsumexp, gradients, IGNORED, addends[0])
            return _same(got, wanted, 1e-3)

        size = 2 * (read + n * v * (1 if addends[0] is None else 2))
        yield Row(name, f"{n}x{v}", size, backward, same_gradients, "loss")

    def with_sums(tile: Tile | None, turn: int) -> Any:
        task = (xs[turn], targets, logsumexp, gradients, IGNORED, None, torch.bfloat16)
        return cross_entropy.cross_entropy_backward_with_sums(*task, _descent(tile, cross_entropy.SUMMING))

    def same_gradients_and_sums(got: Any) -> bool:
        task = (xs[0], targets, logsumexp, gradients, IGNORED, None, torch.bfloat16)
        wanted = cross_entropy_backward_with_sums_reference(*task)
        return _same(got[0], wanted[0], 1e-3) and torch.allclose(got[1], wanted[1], rtol=0.02, atol=1e-4)

    size = 2 * (read + n * v)
    yield Row("cross entropy backward + sums", f"{n}x{v}", size, with_sums, same_gradients_and_sums, "loss with sums")


def _walk(tile: Tile | None, chosen: cross_entropy.Walk) -> cross_entropy.Walk:
    """Steps of the tile's columns, of two bytes each."""
    if tile is None:
        return chosen
    return cross_entropy.Walk(2 * tile.columns // cross_entropy.VECTOR_BYTES, tile.warps, tile.steps)


def _descent(tile: Tile | None, chosen: cross_entropy.Descent) -> cross_entropy.Descent:
    """Steps of the tile's rows and columns."""
    return chosen if tile is None else cross_entropy.Descent(tile.rows, tile.columns, tile.warps, chosen.height)


def weight_rows() -> Iterator[Row]:
    """All weights of one layer."""
    ws = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) / 50 for shape in LAYER]
    scales = torch.stack([_scale_of(w) for w in ws])
    everywhere = [True] * len(ws)
    (row_starts, row_length), (column_starts, column_length) = row_places(ws, everywhere), column_places(ws, everywhere)
    for name, given in (("weights", scales), ("weights current scaling", None)):

        def call(tile: Tile | None, _: int, given=given) -> Any:
            return weights.quantize_weights(
                ws, given, E4M3, row_starts, column_starts, row_length, column_length, RULE, given is None,
                tile or weights.TILE,
            )  # fmt: skip

        def check(got: Any, given=given) -> bool:
            wanted = quantize_weights_reference(ws, given, E4M3, everywhere, everywhere, RULE)
            return all(_same(a, b) for a, b in zip(got, wanted, strict=True))

        size = 4 * sum(w.numel() for w in ws)
        yield Row(name, f"{len(ws)} weights", size, call, check, "quantize", given is not None, name == "weights")


def kept_rows() -> Iterator[Row]:
    """The check of copies that are kept, of weights that have not changed; bound by the launches, not by bytes."""
    ws = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) / 50 for shape in LAYER]
    rows = [torch.cat([_scale_of(w).view(1, 1), torch.zeros(1, 1025, device=DEVICE)], dim=1) for w in ws]
    everywhere = (True,) * len(ws)
    numbers, offsets = tuple(range(len(ws))), (0,) * len(ws)
    layout = Layout(numbers, offsets, LAYER, LAYER, everywhere, everywhere, E4M3, RULE)
    flags = list(everywhere), list(everywhere)
    scales = torch.cat([row[:, 0] for row in rows])
    outputs = quantize_weights_reference(ws, scales, E4M3, *flags, RULE)
    refresher = weight_refresh.TritonRefresher(layout, outputs, rows, ws)
    lines = sum(map(len, line_places(tuple(w.numel() for w in ws), 2)))

    def check(_: Any) -> bool:
        before = [output.clone() for output in outputs]
        ws[3].neg_()
        refresher(ws, True, False)
        wanted = quantize_weights_reference(ws, scales, E4M3, *flags, RULE)
        changed = all(_same(got, each) for got, each in zip(outputs, wanted, strict=True))
        ws[3].neg_()
        refresher(ws, True, False)
        return changed and all(_same(got, each) for got, each in zip(outputs, before, strict=True))

    for name, amaxes in (("kept weights, training", True), ("kept weights, inference", False)):

        def call(_: Tile | None, turn: int, amaxes=amaxes) -> Any:
            return refresher(ws, amaxes, False)

        yield Row(name, f"{len(ws)} weights", lines * LINE_BYTES, call, check, "", single_pass=False, swept=False)


def update_rows() -> Iterator[Row]:
    """Fourteen rows of 1024 amaxes, as one layer has; bound by the launch, not by bytes."""
    recipe = DelayedScaling()
    states = [torch.rand(2, 1026, device=DEVICE) for _ in range(7)]
    amaxes = torch.rand(14, device=DEVICE) + 0.1
    before = [state.clone() for state in states]

    def call(_: Tile | None, turn: int) -> Any:
        scale_update.update_scales(states, [amaxes], 448.0, recipe.rule(), "max")

    def check(_: Any) -> bool:
        ours, wanted = ([state.clone() for state in before] for _ in range(2))
        scale_update.update_scales(ours, [amaxes], 448.0, recipe.rule(), "max")
        update_scales_reference(wanted, [amaxes], 448.0, recipe)
        return all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))

    yield Row("scale update", "14 x 1026", 14 * 1026 * 8, call, check, "", single_pass=False)

    def same_scales(got: Tensor) -> bool:
        return torch.equal(got, torch.cat([state[:, 0] for state in states]))

    yield Row(
        "snapshot",
        "14 x 1026",
        14 * 8,
        lambda _, turn: scale_update.snapshot_scales(states),
        same_scales,
        "",
        single_pass=False,
    )


def fused_rows() -> Iterator[Row]:
    """Generated producers."""
    for m, k in SHAPES:
        for name, text in SPECS.items():
            spec = Spec.parse(text)
            turns = list(zip(*(_randoms(m, k) for _ in spec.inputs), strict=True))
            inputs = list(turns[0])
            scale = torch.tensor(20.0, device=DEVICE)

            def call(tile: Tile | None, turn: int, turns=turns, scale=scale, spec=spec) -> Any:
                return fused_quantize(list(turns[turn]), scale, spec, E4M3, True, True, RULE, False, tile)

            def check(got: Any, inputs=inputs, scale=scale, spec=spec) -> bool:
                z, _, sums = evaluate(spec, inputs)
                wanted = quantize_reference(z, scale, E4M3, True, True, RULE)
                rtol = max([1e-3, *(torch.finfo(each.dtype).eps for each in sums)])
                close = all(torch.allclose(a, b, rtol=rtol, atol=0.05) for a, b in zip(got[4:], sums, strict=True))
                return close and _same(got[0], wanted[0], 1e-3) and _same(got[1], wanted[1], 1e-3)

            yield Row(f"fused {name}", f"{m}x{k}", m * k * (2 * len(inputs) + 2), call, check, "fused")


def rotation_backward(head: int) -> str:
    """The gradient of a Llama's queries before their rotation, of heads of so many features."""
    half = head // 2
    exchanged = f"a[{half}:{head}] + a[0:{half}]"
    return (
        f"x0: bfloat16[M, K of {exchanged}]; x1: bfloat16[M, D of {exchanged.replace('a', 'b')}]; "
        f"x2: bool[columns 0:{half} of {head}]; x3: bfloat16[M, K of a[0:{head}]]; x4: bfloat16[M, D of c[0:{head}]]; "
        "t0 = mul(x0, x1); t1 = neg(t0); t2 = where(x2, 0.0, t1); t3 = where(x2, t0, 0.0); t4 = add(t2, t3); "
        "t5 = mul(x3, x4); t6 = add(t4, t5); t7 = bfloat16(t6); quantize t7"
    )


def rotated_rows() -> Iterator[Row]:
    """The backward of a rotary embedding, of what attention gave back as [B, S, H, D]."""
    scale = torch.tensor(20.0, device=DEVICE)
    for m, k in SHAPES:
        head, length = min(HEAD, k), min(LENGTH, m)
        spec = Spec.parse(rotation_backward(head))
        of_heads = (m // length, length, k // head, head)
        turns = [x.view(of_heads) for x in _randoms(m, k)]
        sin, cos = (torch.randn(1, length, 1, head, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))

        def call(tile: Tile | None, turn: int, turns=turns, sin=sin, cos=cos, spec=spec) -> Any:
            inputs = [turns[turn], sin, cos]
            return fused_quantize(inputs, scale, spec, E5M2, True, True, RULE, False, tile)

        def check(got: Any, turns=turns, sin=sin, cos=cos, spec=spec) -> bool:
            wanted = quantize_reference(evaluate(spec, [turns[0], sin, cos])[0], scale, E5M2, True, True, RULE)
            return _same(got[0], wanted[0], 1e-3) and _same(got[1], wanted[1], 1e-3)

        yield Row("fused rotation backward", f"{m}x{k}", 4 * m * k, call, check, "fused")


def pair_rows() -> Iterator[Row]:
    """Producers of two values."""
    for m, k in SHAPES:
        yield _pair_row(m, k)
        yield _halves_row(m, k)


def _pair_row(m: int, k: int) -> Row:
    """Two values from three matrices."""
    spec, scales = Spec.parse(SWIGLU_BACKWARD), [torch.tensor(each, device=DEVICE) for each in (20.0, 30.0)]
    turns = list(zip(*(_randoms(m, k) for _ in spec.inputs), strict=True))
    inputs, layouts = list(turns[0]), [(True, True)] * 2

    def call(tile: Tile | None, turn: int) -> Any:
        return fused_quantize_pair(list(turns[turn]), scales, spec, E5M2, layouts, RULE, False, tile)

    def check(got: Any) -> bool:
        wanted = fused_quantize_pair_reference(inputs, scales, spec, E5M2, layouts, RULE)
        return all(_same(got[i], wanted[i], 1e-3) for i in (0, 1, 4, 5))

    return Row("fused swiglu backward, both", f"{m}x{k}", m * k * (2 * len(inputs) + 4), call, check, "fused")


def _halves_row(m: int, k: int) -> Row:
    """The same two beside each other, of a gate and what it gates that lie so, too."""
    spec, scale = Spec.parse(SWIGLU_BACKWARD), torch.tensor(20.0, device=DEVICE)
    gradients, gated = _randoms(m, k), _randoms(m, 2 * k)
    turns = [[dy, *both.chunk(2, 1)] for dy, both in zip(gradients, gated, strict=False)]

    def call(tile: Tile | None, turn: int) -> Any:
        return fused_quantize_cat(turns[turn], scale, spec, E5M2, True, True, RULE, False, tile)

    def check(got: Any) -> bool:
        wanted = fused_quantize_cat_reference(turns[0], scale, spec, E5M2, True, True, RULE)
        return all(_same(got[i], wanted[i], 1e-3) for i in (0, 1))

    return Row("fused swiglu backward, beside each other", f"{m}x{k}", m * k * 10, call, check, "fused")


def measure(row: Row, tile: Tile | None, ceilings: Ceilings) -> dict[str, Any]:
    """The JSON of one row with one tile."""
    right = row.check(row.call(tile, 0))
    milliseconds = replayed(lambda turn: row.call(tile, turn))
    rate, ceiling = row.bytes / milliseconds / 1e9, ceilings.copy
    if row.flops:
        rate, ceiling = row.flops / milliseconds / 1e9, ceilings.product
    # A long kernel fills the launch queue, and then the host's time is the device's.
    host = host_microseconds(lambda: row.call(tile, 0)) if milliseconds < 0.05 and tile is None else None
    return {
        **described(row, tile),
        "ms": round(milliseconds, 5),
        "tflop_s" if row.flops else "tb_s": round(rate, 3),
        "share": round(rate / ceiling, 3),
        "host_us": None if host is None else round(host, 1),
        "right": right,
    }


def described(row: Row, tile: Tile | None) -> dict[str, Any]:
    """The columns that say which row it is."""
    tiles = "chosen" if tile is None else f"{tile.rows}x{tile.columns} {tile.warps} warps"
    if tile is not None and tile.steps > 1:
        tiles += f" {tile.steps} steps"
    work = {"flops": row.flops} if row.flops else {"bytes": row.bytes}
    return {"kernel": row.name, "by": row.by, "shape": row.shape, "tile": tiles, **work}


def judged(row: Row, tile: Tile | None, ceilings: Ceilings) -> tuple[dict[str, Any], str]:
    """The JSON of one row and what is wrong with it: of our own, an error, a wrong result or a missed goal."""
    try:
        result = measure(row, tile, ceilings)
    except Exception as error:  # the other rows go on
        traceback.print_exc()
        reason = repr(error)[:300]
        return {**described(row, tile), "error": reason}, f"{row.name} {row.shape}: {reason}" if row.by == OURS else ""
    if row.by != OURS:
        return result, ""
    if not result["right"]:
        return result, f"{row.name} {row.shape} {result['tile']}: wrong"
    if tile is None and row.single_pass and result["share"] < GOAL:
        return result, f"{row.name} {row.shape}: {result['share']} of copy bandwidth, goal {GOAL}"
    return result, ""


Family = Callable[[], Iterator[Row]]


def families(peers: bool) -> list[Family]:
    """What makes the rows, in the order of the output."""
    from benchmarks import kernel_peers, products, short_kernels

    of_matrices: list[Family] = [
        quantize_rows, norm_rows, norm_backward_rows, fused_rows, rotated_rows, pair_rows, loss_rows,
    ]  # fmt: skip
    ours: list[Family] = [*of_matrices, weight_rows, kept_rows, update_rows, short_kernels.rows, products.rows]
    return [*ours, *(kernel_peers.FAMILIES if peers else [])]


def rows_of(family: Family, out: Rows) -> Iterator[Row]:
    """The rows of one family; one that cannot be made ends it with a row that says why, and the others go on."""
    try:
        yield from family()
    except Exception as error:
        traceback.print_exc()
        out.write(kernel=family.__name__, by=family.__module__, error=repr(error)[:300])
        if not family.__module__.endswith("kernel_peers"):
            out.fail(family.__name__, repr(error)[:200])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--sweep", action="store_true", help="other tiles too")
    parser.add_argument("--no-peers", action="store_true", help="leave out Transformer Engine")
    add_out(parser)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.kernels needs a CUDA device; there is none here", file=sys.stderr)
        return 2
    from benchmarks import kernel_peers

    out = Rows(given.out)
    peers = not given.no_peers and kernel_peers.available()  # asked first: it must load before cuDNN does
    ceilings = Ceilings(copy_bandwidth())
    gpu = torch.cuda.get_device_name()
    out.write(kernel="copy", by="torch", shape="1 GiB", tb_s=ceilings.copy, share=1.0, gpu=gpu, torch=torch.__version__)
    for family in families(peers):
        for row in rows_of(family, out):
            if given.only not in row.name:
                continue
            for tile in [None, *(SWEEP.get(row.family, []) if given.sweep and row.swept else [])]:
                result, wrong = judged(row, tile, ceilings)
                out.write(**result)
                if wrong:
                    out.failures.append(wrong)
    if not out.failures:
        print("every row is right and reaches the goal", file=sys.stderr)
    return out.exit_status()


if __name__ == "__main__":
    sys.exit(main())
