"""FP8 attention beside PyTorch's own kernels: forward, and forward with backward.

    python -m benchmarks.attention                    causal and full, B 4, H 32, S 2048, D 128
    python -m benchmarks.attention --shape 2,16,8192,128 --shared 4
    python -m benchmarks.attention --sweep            other tiles of the FP8 kernel, too

One JSON line a row. ``flash`` and ``cudnn`` are F.scaled_dot_product_attention held to that kernel. ``te_fp8`` is the
same call compiled with ``fp8_dpa=True``, so its forward includes the quantizes of q, k and v; ``te_fp8 kernel`` is its
attention kernel alone, on codes. Every row's result is checked in the same run against fp32, rows of ours for 20 dB of
signal over error, their gradients for 15 dB; the exit status is 1 if one falls short. A time is that of one call within
a CUDA graph of several, which leaves the host out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernel_timing import replayed
from benchmarks.measure import (
    DEVICE,
    DTYPES,
    Rows,
    Runnable,
    Variant,
    add_out,
    attempt,
    chosen,
    describe_device,
    median_ms,
    sqnr,
)
from te_compile.backend import te_fp8
from te_compile.kernels.attention_tiles import AttentionTile
from te_compile.kernels.fp8_attention import fp8_attention
from te_compile.ops.fp8_attention import fp8_attention_reference
from te_compile.ops.quantize import QUANTIZE
from te_compile.recipe import ScaleRule

E4M3 = torch.float8_e4m3fn
LEAST_DB = {"forward": 20.0, "step": 15.0}
TILES = [
    AttentionTile(queries, keys, warps, stages)
    for queries, warps in ((64, 4), (128, 4), (128, 8))
    for keys in (64, 128)
    for stages in (2, 3, 4)
]


@dataclass(frozen=True)
class Work:
    """One attention: q [B, H, S, D], k and v with ``shared`` heads, in memory as projections write them."""

    batch: int
    heads: int
    length: int
    width: int
    shared: int
    causal: bool
    dtype: torch.dtype

    def inputs(self) -> list[Tensor]:
        """q, k and v, drawn anew."""
        shapes = [(self.batch, self.length, heads, self.width) for heads in (self.heads, self.shared, self.shared)]
        drawn = [torch.randn(shape, device=DEVICE, dtype=self.dtype) for shape in shapes]
        return [x.transpose(1, 2).requires_grad_() for x in drawn]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The call that all variants make."""
        shared = self.shared != self.heads
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=shared)

    def flops(self, what: str) -> float:
        """Of the products: two forward, five backward, half of each where it is causal."""
        products = 2 if what == "forward" else 7
        return products * 2.0 * self.batch * self.heads * self.length**2 * self.width / (2 if self.causal else 1)


def _held_to(kernel: SDPBackend, work: Work, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(kernel) if DEVICE.type == "cuda" else nullcontext():
        return work.attend(q, k, v)


def _compiled(work: Work) -> Callable[..., Tensor]:
    options = {"recipe": "current fp8_dpa=True", "cost_model": False}
    if DEVICE.type != "cuda":
        options["compiler"] = "aot_eager"
    return torch.compile(work.attend, backend=te_fp8, options=options)


def _kernel_alone(work: Work, inputs: Sequence[Tensor], tile: AttentionTile | None) -> Callable[..., Tensor]:
    """A function of nothing that it reads: the codes are made here."""
    rule = ScaleRule().text()
    made = []
    for x in inputs:
        rows = x.detach().transpose(1, 2)
        codes, transposed, _, scale_inv = QUANTIZE(rows.flatten(2).flatten(0, 1), None, E4M3, True, True, rule)
        made.append((codes.view(rows.shape), transposed, scale_inv))
    (q, _, q_scale_inv), (k, _, k_scale_inv), (_, vt, v_scale_inv) = made
    given = (q, k, vt, q_scale_inv, k_scale_inv, v_scale_inv, work.causal, work.width**-0.5, work.dtype)

    def call(*_: Tensor) -> Tensor:
        out, _ = fp8_attention(*given, tile) if DEVICE.type == "cuda" else fp8_attention_reference(*given)
        return out.transpose(1, 2)

    return call


def _variants(work: Work, inputs: Sequence[Tensor], what: str, sweep: bool) -> Iterator[Variant]:
    nothing = nn.Identity()

    def variant(name: str, build: Callable[[], Callable[..., Tensor]], ours: bool) -> Variant:
        return Variant(name, lambda: Runnable(build(), nothing), ours)

    for name, kernel in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        yield variant(name, lambda kernel=kernel: partial(_held_to, kernel, work), False)
    yield variant("te_fp8", lambda: _compiled(work), True)
    if what == "forward":
        yield variant("te_fp8 kernel", lambda: _kernel_alone(work, inputs, None), True)
        for tile in TILES if sweep and DEVICE.type == "cuda" else []:
            name = f"te_fp8 kernel {tile.queries}x{tile.keys} {tile.warps} warps {tile.stages} stages"
            yield variant(name, lambda tile=tile: _kernel_alone(work, inputs, tile), False)


def once(call: Callable[..., Tensor], what: str, inputs: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
    """A forward without gradients, or a step: the result or the gradients of the inputs."""
    if what == "forward":
        with torch.no_grad():
            return [call(*inputs)]
    return torch.autograd.grad(call(*inputs), inputs, grad)


def milliseconds_of(call: Callable[[], Any], iterations: int) -> float:
    """Of one call; on a GPU within a CUDA graph of several, so that the host plays no part."""
    if DEVICE.type == "cuda":
        return replayed(lambda _: call(), iterations)
    return median_ms(call, iterations, warmup=1)


def _measure(
    work: Work, what: str, inputs: Sequence[Tensor], grad: Tensor, right: Sequence[Tensor], iterations: int,
    variant: Variant,
) -> dict[str, Any]:  # fmt: skip
    """The columns of one row."""
    call = variant.build().call
    decibels = min(sqnr(*pair) for pair in zip(right, once(call, what, inputs, grad), strict=True))
    milliseconds = milliseconds_of(lambda: once(call, what, inputs, grad), iterations)
    row: dict[str, Any] = {
        "ms": milliseconds,
        "tflops": work.flops(what) / milliseconds / 1e9,
        "sqnr_db": decibels,
    }
    if not decibels >= LEAST_DB[what]:
        row["wrong"] = f"{what}: {decibels:.1f} dB, {LEAST_DB[what]:.0f} needed"
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny = DEVICE.type != "cuda"
    parser.add_argument("--shape", default="1,2,64,64" if tiny else "4,32,2048,128", help="B,H,S,D (%(default)s)")
    parser.add_argument("--shared", type=int, help="heads of keys and values; as many as of queries if left out")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--only", default="", help="comma-separated variants; all when empty")
    parser.add_argument("--iters", type=int, default=3 if tiny else 20)
    parser.add_argument("--sweep", action="store_true", help="other tiles of the kernel too")
    add_out(parser)
    given = parser.parse_args(arguments)
    batch, heads, length, width = map(int, given.shape.split(","))
    rows = Rows(given.out)
    describe_device(rows)
    for causal in (True, False):
        work = Work(batch, heads, length, width, given.shared or heads, causal, DTYPES[given.dtype])
        inputs = work.inputs()
        grad = torch.randn(batch, length, heads, width, device=DEVICE, dtype=work.dtype).transpose(1, 2)
        wide = [x.detach().float().requires_grad_() for x in inputs]
        for what in ("forward", "step"):
            right = [x.detach() for x in once(work.attend, what, wide, grad.float())]
            described = {"what": f"attention {what}", "shape": given.shape, "shared": work.shared, "causal": causal}
            measure = partial(_measure, work, what, inputs, grad, right, given.iters)
            names = [each.name for each in chosen(_variants(work, inputs, "forward", given.sweep), given.only)]
            for variant in _variants(work, inputs, what, given.sweep):
                if variant.name in names:
                    attempt(variant, rows, described, measure)
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
