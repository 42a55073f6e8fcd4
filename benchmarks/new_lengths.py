"""What the first call at a new length costs attention's kernels: cuDNN builds a plan, flash and te_compile's do not.

    python -m benchmarks.new_lengths

Two JSON lines for each kernel: milliseconds of a forward and of a backward from the host's call to the GPU's end,
causal, 16 heads of 128, the medians over twelve lengths; ``first`` at lengths that the process has not met, ``again``
at the same ones later. ``flash`` and ``cudnn`` are F.scaled_dot_product_attention held to that kernel, ``te_compile``
is the same call compiled for lengths that vary, by what te_fp8 puts in its place.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import DEVICE, Rows, add_out, describe_device, synchronize
from te_compile.backend import te_fp8

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

LENGTHS = range(256, 1664 + 1, 128)
_WARM = (72, 200)  # lengths to load libraries and compile with


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The call that all kernels run."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def held_to(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The call on this kernel of PyTorch's."""
    with sdpa_kernel(kernel):
        return attend(q, k, v)


def kernels() -> dict[str, Attend]:
    """The call by each of them."""
    return {
        "flash": partial(held_to, SDPBackend.FLASH_ATTENTION),
        "cudnn": partial(held_to, SDPBackend.CUDNN_ATTENTION),
        "te_compile": torch.compile(attend, backend=te_fp8, dynamic=True, options={"cost_model": False}),
    }


def times(call: Attend, length: int) -> tuple[float, float]:
    """Milliseconds of one forward and one backward of ``length`` tokens in two sequences."""
    packed = torch.randn(2, length, 3, 16, 128, device=DEVICE, dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in packed.unbind(2))
    synchronize()
    start = time.perf_counter()
    mixed = call(q, k, v)
    synchronize()
    between = time.perf_counter()
    mixed.backward(torch.ones_like(mixed))
    synchronize()
    return (between - start) * 1e3, (time.perf_counter() - between) * 1e3


def medians(call: Attend, lengths: Iterable[int]) -> dict[str, float]:
    """Of the forwards and the backwards at all ``lengths``."""
    forwards, backwards = zip(*(times(call, length) for length in lengths), strict=True)
    return {"forward_ms": median(forwards), "backward_ms": median(backwards)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows; returns the exit status: 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_out(parser)
    given = parser.parse_args(arguments)
    if DEVICE.type != "cuda":
        print("benchmarks.new_lengths needs a CUDA device; there is none here", file=sys.stderr)
        return 2
    rows = Rows(given.out)
    describe_device(rows)
    for name, call in kernels().items():
        for length in _WARM:
            times(call, length)
        for when in ("first", "again"):
            rows.write(what="new lengths", name=name, when=when, **medians(call, LENGTHS))
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
