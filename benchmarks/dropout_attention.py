"""Attention with dropout beside PyTorch's own kernels: forward, and forward with backward.

    python -m benchmarks.dropout_attention                            causal and full, B 4, H 32, S 2048, D 128, p 0.1
    python -m benchmarks.dropout_attention --shape 16,25,1024,64

One JSON line a row. ``flash`` and ``cudnn`` are F.scaled_dot_product_attention held to that kernel; cudnn rounds the
probability to sixteenths. ``te_compile`` is the same call compiled, so it includes the drawing of bits. How far a
result lies from attention without dropout is known of a fair draw, and is checked in the same run (tests hold results
to their bits); the exit status is 1 if a row of ours is not within a factor of two. A time is the mean of a loop of
calls, the best of three loops: calls follow each other without waiting, so the host counts only where it is slower.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention import once
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
    synchronize,
)
from te_compile.backend import te_fp8

ROUNDS = 3
WITHIN = 2.0
"""What the noise of a result may be of what it should be, either way."""


def attend(q: Tensor, k: Tensor, v: Tensor, *, probability: float, causal: bool) -> Tensor:
    """The call that all variants make."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=probability, is_causal=causal)


def held_to(kernel: SDPBackend, call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The call on this kernel of PyTorch's; on a CPU on the one that there is."""
    if DEVICE.type != "cuda":
        return call(*inputs)
    with sdpa_kernel(kernel):
        return call(*inputs)


def variants(call: Callable[..., Tensor]) -> Iterator[Variant]:
    """Each kernel under its name."""
    nothing = nn.Identity()
    for name, kernel in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        yield Variant(name, lambda kernel=kernel: Runnable(partial(held_to, kernel, call), nothing), False)
    options = {"cost_model": False, **({} if DEVICE.type == "cuda" else {"compiler": "aot_eager"})}
    yield Variant("te_compile", lambda: Runnable(torch.compile(call, backend=te_fp8, options=options), nothing), True)


def milliseconds(call: Callable[[], Any], calls: int) -> float:
    """Of one of them."""
    best = math.inf
    for _ in range(ROUNDS):
        call()
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        best = min(best, 1e3 * (time.perf_counter() - start) / calls)
    return best


def noise(q: Tensor, k: Tensor, v: Tensor, probability: float, causal: bool) -> tuple[Tensor, float]:
    """Attention without dropout, and how far from it a dropout's result lies: the norm of its standard deviation."""
    query, key, value = (x.detach().float() for x in (q, k, v))
    scores = query @ key.mT / math.sqrt(q.shape[3])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], device=q.device).triu(1).bool(), -torch.inf)
    p = scores.softmax(3)
    variance = (p.square() @ value.square()).sum() * probability / (1 - probability)
    return p @ value, float(variance.sqrt())


def row_of(
    what: str, inputs: Sequence[Tensor], grad: Tensor, probability: float, causal: bool, iterations: int,
    variant: Variant,
) -> dict[str, Any]:  # fmt: skip
    """The columns of one row."""
    call = variant.build().call
    with torch.no_grad():
        got = call(*inputs)
    one = [x[:1] for x in inputs]
    mean, expected = noise(one[0], one[1], one[2], probability, causal)
    ratio = float((got[:1].float() - mean).norm()) / expected
    row: dict[str, Any] = {
        "ms": milliseconds(lambda: once(call, what, inputs, grad), iterations),
        "noise_ratio": ratio,
    }
    if not 1 / WITHIN < ratio < WITHIN:
        row["wrong"] = f"{what}: {ratio:.2f} times the noise that a dropout of {probability} makes"
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny = DEVICE.type != "cuda"
    parser.add_argument("--shape", default="1,2,64,64" if tiny else "4,32,2048,128", help="B,H,S,D (%(default)s)")
    parser.add_argument("--probability", type=float, default=0.1, help="of dropping a weight (%(default)s)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--only", default="", help="comma-separated variants; all when empty")
    parser.add_argument("--iters", type=int, default=3 if tiny else 20)
    add_out(parser)
    given = parser.parse_args(arguments)
    batch, heads, length, width = map(int, given.shape.split(","))
    rows = Rows(given.out)
    describe_device(rows)
    for causal in (True, False):
        call = partial(attend, probability=given.probability, causal=causal)
        packed = torch.randn(batch, length, heads, 3 * width, device=DEVICE, dtype=DTYPES[given.dtype])
        inputs = [x.detach().requires_grad_() for x in packed.transpose(1, 2).chunk(3, dim=3)]
        grad = torch.randn(batch, length, heads, width, device=DEVICE, dtype=DTYPES[given.dtype]).transpose(1, 2)
        for what in ("forward", "step"):
            described = {"what": f"dropout attention {what}", "shape": given.shape, "causal": causal}
            measure = partial(row_of, what, inputs, grad, given.probability, causal, given.iters)
            for variant in chosen(variants(call), given.only):
                attempt(variant, rows, described, measure)
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
