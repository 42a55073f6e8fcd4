"""What the first call at a new length costs PyTorch's attention kernels: cuDNN builds a plan, flash does not.

    python -m benchmarks.new_lengths

Two JSON lines for each kernel: milliseconds of a forward and of a backward from the host's call to the GPU's end,
causal, 16 heads of 64, the medians over twelve lengths; ``first`` at lengths that the process has not met, ``again`` at
the same ones later.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from statistics import median

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import DEVICE, Rows, add_out, describe_device, synchronize

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
LENGTHS = range(256, 1664 + 1, 128)
_WARM = 64  # a length to load the library with


def times(kernel: SDPBackend, length: int) -> tuple[float, float]:
    """Milliseconds of one forward and one backward of ``length`` tokens in two sequences."""
    shape = 2, length, 16, 64
    q, k, v = (
        torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    synchronize()
    start = time.perf_counter()
    with sdpa_kernel(kernel):
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    synchronize()
    between = time.perf_counter()
    mixed.backward(torch.ones_like(mixed))
    synchronize()
    return (between - start) * 1e3, (time.perf_counter() - between) * 1e3


def medians(kernel: SDPBackend, lengths: Iterable[int]) -> dict[str, float]:
    """Of the forwards and the backwards at all ``lengths``."""
    forwards, backwards = zip(*(times(kernel, length) for length in lengths), strict=True)
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
    for name, kernel in KERNELS.items():
        times(kernel, _WARM)
        for when in ("first", "again"):
            rows.write(what="new lengths", name=name, when=when, **medians(kernel, LENGTHS))
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
