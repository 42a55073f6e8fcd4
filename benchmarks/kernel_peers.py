"""Rows of ``benchmarks.kernels`` for Transformer Engine: its kernels for the jobs that ours do, on the same shapes.

Called as its modules call them, through its torch extension, with its quantisers. Where one call launches several
kernels (a norm, then a transpose), the time is that of all: it is what the job costs there. Results are checked against
our references, so that a row compares like with like.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks import kernels, products
from benchmarks.kernel_timing import E4M3
from benchmarks.kernels import E5M2, Row
from te_compile.ops.norm import norm_reference
from te_compile.ops.pointwise import Spec, evaluate
from te_compile.ops.quantize import quantize_reference

BY = "Transformer Engine"
MOST_WRONG = 0.01  # bytes that may differ: it rounds intermediate values elsewhere than our references do


def available() -> bool:
    """Is it installed, and does it load on this machine?"""
    if find_spec("transformer_engine") is None or not torch.cuda.is_available():
        return False
    try:
        extension()
    except Exception as error:  # a build for another torch, a library that is missing
        print(f"Transformer Engine does not load: {error!r}", file=sys.stderr)
        return False
    return True


def extension() -> Any:
    """Its torch extension, which wants its package to be imported first."""
    import transformer_engine.pytorch  # noqa: F401  # loads the libraries that the extension links to
    import transformer_engine_torch

    return transformer_engine_torch


def general_gemm() -> Callable[..., Any]:
    """The function through which its modules multiply."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    found: Callable[..., Any] = general_gemm
    return found


def quantizer(scale: Tensor | None, dtype: torch.dtype = E4M3, columnwise: bool = True) -> Any:
    """Its quantiser for a given scale [], or for current scaling."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    code = _dtype_code(dtype)
    if scale is None:
        device = torch.device(kernels.DEVICE)
        return Float8CurrentScalingQuantizer(code, device, rowwise=True, columnwise=columnwise)
    amax = torch.zeros(1, device=kernels.DEVICE)
    return Float8Quantizer(scale.reshape(1), amax, code, rowwise=True, columnwise=columnwise)


def _dtype_code(dtype: torch.dtype) -> Any:
    from transformer_engine.pytorch.constants import TE_DType

    return TE_DType[dtype]


def same_codes(got: Any, wanted: tuple[Tensor, ...], columnwise: bool) -> bool:
    """Do its codes agree with q and, where it has them, qᵀ?"""
    if got._data is None or not kernels._same(got._data.view(torch.uint8), wanted[0].view(torch.uint8), MOST_WRONG):
        return False
    if not columnwise:
        return True
    transposed = got._transpose
    return transposed is not None and kernels._same(
        transposed.view(torch.uint8), wanted[1].view(torch.uint8), MOST_WRONG
    )


def peer_row(name: str, shape: str, size: int, call: Callable[[int], Any], check: Callable[[Any], bool]) -> Row:
    """A row that is held to no goal."""
    return Row(name, shape, size, lambda _, turn: call(turn), check, "", False, False, BY)


def quantize_rows(m: int, k: int) -> Iterator[Row]:
    """``quantize`` with its quantisers."""
    tex = extension()
    xs = kernels._randoms(m, k)
    for name, dtype, delayed, columnwise in (
        ("quantize", E4M3, True, True),
        ("quantize E5M2", E5M2, True, True),
        ("quantize rowwise only", E4M3, True, False),
        ("quantize current scaling", E4M3, False, True),
    ):
        scale = kernels._scale_of(xs[0], dtype) if delayed else None
        how = quantizer(scale, dtype, columnwise)

        def call(turn: int, how: Any = how) -> Any:
            return tex.quantize(xs[turn], how)

        def check(got: Any, scale=scale, dtype=dtype, columnwise=columnwise) -> bool:
            wanted = quantize_reference(xs[0], scale, dtype, True, columnwise, kernels.RULE)
            return same_codes(got, wanted, columnwise)

        yield peer_row(name, f"{m}x{k}", m * k * (4 if columnwise else 3), call, check)


def norm_rows(m: int, k: int) -> Iterator[Row]:
    """``layernorm_fwd`` and ``rmsnorm_fwd`` into FP8."""
    tex = extension()
    xs = kernels._randoms(m, k)
    weight = 1 + torch.randn(k, device=kernels.DEVICE, dtype=torch.bfloat16) / 8
    bias = torch.randn(k, device=kernels.DEVICE, dtype=torch.bfloat16)
    given = torch.tensor(60.0, device=kernels.DEVICE)
    for name, kind, scale, columnwise in (
        ("norm layer", "layer", given, True),
        ("norm rms", "rms", given, True),
        ("norm rms rowwise only", "rms", given, False),
        ("norm rms current scaling", "rms", None, True),
    ):
        how = quantizer(scale, E4M3, columnwise)
        rest = (kernels.EPS, None, how, _dtype_code(torch.bfloat16), 0, False)

        def call(turn: int, kind: str = kind, rest: Any = rest) -> Any:
            if kind == "layer":
                return tex.layernorm_fwd(xs[turn], weight, bias, *rest)[0]
            return tex.rmsnorm_fwd(xs[turn], weight, *rest)[0]

        def check(got: Any, kind=kind, scale=scale, columnwise=columnwise) -> bool:
            # Its RMS norm rounds once; that of our row also before the weight, as Llama's: equal bytes, other numbers.
            theirs = "rms_float" if kind == "rms" else kind
            # With a known scale it quantises what it computed, ours and current scaling what the model would see of it.
            x, w, b = (each.float() if scale is not None else each for each in (xs[0], weight, bias))
            y, _, _ = norm_reference(x, w, b if kind == "layer" else None, kernels.EPS, theirs)
            wanted = quantize_reference(y, scale, E4M3, True, columnwise, kernels.RULE)
            return same_codes(got, wanted, columnwise)

        yield peer_row(name, f"{m}x{k}", m * k * (3 + columnwise), call, check)


def activation_rows(m: int, k: int) -> Iterator[Row]:
    """Activations and their backwards with the bias gradient, into FP8. It wants a gate's two halves side by side."""
    tex = extension()
    how = quantizer(torch.tensor(20.0, device=kernels.DEVICE))

    def gated(inputs: list[Tensor]) -> Any:
        return tex.swiglu(inputs[0], how)

    calls: dict[str, Callable[[list[Tensor]], Any]] = {
        "swiglu": gated,
        "gelu": lambda inputs: tex.gelu(inputs[0], how),
        "relu2_backward": lambda inputs: tex.dbias_dsrelu(inputs[0], inputs[1], how)[1],
        "gelu_backward": lambda inputs: tex.dbias_dgelu(inputs[0], inputs[1], how)[1],
    }
    for name, run in calls.items():
        spec = Spec.parse(kernels.SPECS[name])
        turns = list(zip(*(kernels._randoms(m, k) for _ in spec.inputs), strict=True))
        taken = [[torch.cat(each, dim=1)] if name == "swiglu" else list(each) for each in turns]

        def call(turn: int, run=run, taken=taken) -> Any:
            return run(taken[turn])

        def check(got: Any, spec=spec, inputs=turns[0]) -> bool:
            z, _, _ = evaluate(unrounded(spec), list(inputs))
            wanted = quantize_reference(z, how.scale.reshape(()), E4M3, True, True, kernels.RULE)
            return same_codes(got, wanted, True)

        yield peer_row(f"fused {name}", f"{m}x{k}", m * k * (2 * len(spec.inputs) + 2), call, check)


def unrounded(spec: Spec) -> Spec:
    """What it quantises: the value itself, where our producers round first to what the model would see of it."""
    return Spec.parse(re.sub(r"= bfloat16\((t\d+)\)", r"= mul(\1, 1)", spec.text()))


def weight_rows() -> Iterator[Row]:
    """All weights of one layer by ``multi_tensor_quantize``."""
    tex = extension()
    ws = [torch.randn(shape, device=kernels.DEVICE, dtype=torch.bfloat16) / 50 for shape in kernels.LAYER]
    for name, delayed in (("weights", True), ("weights current scaling", False)):
        scales = [kernels._scale_of(w) if delayed else None for w in ws]
        how = [quantizer(scale) for scale in scales]

        def call(turn: int, how: Any = how) -> Any:
            return tex.multi_tensor_quantize(ws, how)

        def check(got: Any, scales=scales) -> bool:
            return all(
                same_codes(each, quantize_reference(w, scale, E4M3, True, True, kernels.RULE), True)
                for each, w, scale in zip(got, ws, scales, strict=True)
            )

        yield peer_row(name, f"{len(ws)} weights", 4 * sum(w.numel() for w in ws), call, check)


def update_rows() -> Iterator[Row]:
    """Scales and histories of seven linears by its one call after a step."""
    tex = extension()
    histories = [torch.rand(1024, 2, device=kernels.DEVICE) for _ in range(7)]
    scales = [torch.ones(2, device=kernels.DEVICE) for _ in range(7)]
    amaxes = torch.rand(14, device=kernels.DEVICE) + 0.1

    def call(_: int) -> Any:
        code = _dtype_code(E4M3)
        tex.fused_amax_and_scale_update_after_reduction(amaxes, histories, scales, "max", code, 0.0)
        return scales

    def check(got: Any) -> bool:
        return all(bool((each > 0).all() and each.isfinite().all()) for each in got)

    yield peer_row("scale update", "14 x 1026", 14 * 1026 * 8, call, check)


def product_rows() -> Iterator[Row]:
    """Its products: operands hold both layouts, and the layout argument says which one a product reads."""
    tex, multiplier = extension(), general_gemm()
    one = torch.ones((), device=kernels.DEVICE)
    layouts = {"forward": "TN", "dgrad": "NN", "wgrad": "NT"}
    for product in products.products():
        high_a, high_b = (each.bfloat16() for each in product.operands())
        # Codes of what is E4M3 or E5M2 already are those values. A product reads along the contraction: for dgrad the
        # weight, and for wgrad both operands, are held transposed, as its modules hold them.
        stored_a = high_a.t().contiguous() if product.part == "wgrad" else high_a
        stored_b = high_b if product.part == "forward" else high_b.t().contiguous()
        a = tex.quantize(stored_a, quantizer(one, E4M3 if product.part == "forward" else E5M2))
        b = tex.quantize(stored_b, quantizer(one))
        layout, split = layouts[product.part], product.part != "forward"

        def multiply(a: Any = a, b: Any = b, layout: str = layout, split: bool = split) -> Any:
            return multiplier(
                b, a, out_dtype=torch.bfloat16, layout=layout, use_split_accumulator=split, grad=split
            )[0]  # fmt: skip

        def check(got: Any, a=high_a, b=high_b) -> bool:
            return products.close(got, a, b)

        yield products.row_of(product, BY, multiply, check)


def at(shape: tuple[int, int], rows: Callable[[int, int], Iterator[Row]]) -> Callable[[], Iterator[Row]]:
    """The rows of one shape, as a family by itself: what fails in one leaves the others."""

    @functools.wraps(rows)
    def family() -> Iterator[Row]:
        return rows(*shape)

    return family


FAMILIES = [
    *(at(shape, rows) for shape in kernels.SHAPES for rows in (quantize_rows, norm_rows, activation_rows)),
    weight_rows,
    update_rows,
    product_rows,
]
