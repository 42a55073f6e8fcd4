"""Attention in a window, by PyTorch's flash kernels and by the C++ core's, forward and backward.

    python -m benchmarks.window_attention                          windows of real models, bf16
    python -m benchmarks.window_attention --shape 4,32,8,2048,128 --window 512,0

A shape is B,H,G,S,D: rows, heads of queries and of keys, positions and features. A window is how many keys before its
own place a query sees, and how many behind; -1 for all. One JSON line each: milliseconds of a call within a CUDA graph
of several, which leaves the host out. Results are checked in the same run against attention in float32 where that fits
(positions up to 2048), rows of ours for 45 dB of signal over error, their gradients for 40; the exit status is 1 if one
falls short.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention import milliseconds_of
from benchmarks.measure import DEVICE, Rows, add_out, describe_device, sqnr
from te_compile.ops import registry
from te_compile.ops.registry import REFERENCE
from te_compile.ops.window_attention import (
    FLASH,
    WINDOW_ATTENTION_BACKWARD,
    WINDOW_ATTENTION_FORWARD,
    window_attention_backward_reference,
    window_attention_reference,
)

WORKS = [
    ("4,32,32,2048,128", "512,0"),
    ("1,32,8,8192,128", "1024,0"),
    ("1,32,8,8192,128", "4095,0"),
    ("1,32,32,4096,96", "2046,0"),
    ("8,12,12,2048,128", "64,64"),
    ("8,16,16,2048,64", "64,64"),
    ("2,64,8,4096,64", "127,0"),
    ("4,32,8,2048,128", "-1,0"),
]
"""The last one is causal attention, as behind sinks."""
LEAST_DB = {"forward": 45.0, "backward": 40.0}
_CHECKED = 2048  # positions


@dataclass(frozen=True)
class Work:
    """Operands of one attention, [B, S, H, D], and its window."""

    operands: tuple[Tensor, Tensor, Tensor]
    grad: Tensor
    window: tuple[int, int, float]

    @staticmethod
    def drawn(shape: str, window: str) -> Work:
        """With operands as one projection writes them."""
        batch, heads, shared, length, width = map(int, shape.split(","))
        left, right = map(int, window.split(","))
        x = torch.randn(batch, length, heads + 2 * shared, width, device=DEVICE, dtype=torch.bfloat16)
        grad = torch.randn(batch, length, heads, width, device=DEVICE, dtype=torch.bfloat16)
        q, k, v = x.split([heads, shared, shared], 2)
        return Work((q, k, v), grad, (left, right, width**-0.5))

    def right_results(self) -> dict[str, Sequence[Tensor]]:
        """In float32; nothing of what would not fit."""
        if self.grad.shape[1] > _CHECKED:
            return {}
        q, k, v = (x.float() for x in self.operands)
        out, sums = window_attention_reference(q, k, v, *self.window)
        gradients = window_attention_backward_reference(self.grad.float(), q, k, v, out, sums, *self.window)
        return {"forward": (out,), "backward": gradients}


def implementations(work: Work) -> list[str]:
    """PyTorch's and ours, where they run; where neither does, the definition."""
    names = {}
    arguments = dict(zip(("q", "k", "v"), work.operands, strict=True))
    for each in registry.implementations("window_attention_backward"):
        try:
            each.check(registry.Target.of(DEVICE), arguments)
        except registry.Unsupported:
            continue
        names[each.name] = each.priority
    return [name for name in names if name != REFERENCE] or [REFERENCE]


def calls_of(work: Work, name: str) -> dict[str, Callable[[], Sequence[Tensor]]]:
    """Both passes by an implementation."""
    made = WINDOW_ATTENTION_FORWARD(*work.operands, *work.window, name)
    return {
        "forward": lambda: WINDOW_ATTENTION_FORWARD(*work.operands, *work.window, name)[:1],
        "backward": lambda: WINDOW_ATTENTION_BACKWARD(work.grad, *work.operands, *made, *work.window, name),
    }


def row_of(what: str, call: Callable[[], Sequence[Tensor]], right: Sequence[Tensor], iterations: int) -> dict[str, Any]:
    """The columns of one row."""
    decibels = [sqnr(*pair) for pair in zip(right, call(), strict=True)] if right else []
    row: dict[str, Any] = {"ms": milliseconds_of(call, iterations)}
    if decibels:
        row["sqnr_db"] = min(decibels)
        if not min(decibels) >= LEAST_DB[what]:
            row["wrong"] = f"{what}: {min(decibels):.1f} dB, {LEAST_DB[what]:.0f} needed"
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny = DEVICE.type != "cuda"
    parser.add_argument("--shape", help="B,H,G,S,D; those of real models if left out")
    parser.add_argument("--window", default="7,0" if tiny else "512,0", help="of that shape (%(default)s)")
    parser.add_argument("--iters", type=int, default=2 if tiny else 20)
    add_out(parser)
    given = parser.parse_args(arguments)
    shape = given.shape or ("1,4,2,32,16" if tiny else "")
    rows = Rows(given.out)
    describe_device(rows)
    for size, window in [(shape, given.window)] if shape else WORKS:
        work = Work.drawn(size, window)
        right = work.right_results()
        for name in implementations(work):
            for what, call in calls_of(work, name).items():
                row = row_of(what, call, right.get(what, ()), given.iters)
                label = name if name in (FLASH, REFERENCE) else "te_compile"
                rows.write(what=f"window attention {what}", shape=size, window=window, name=label, **row)
                if row.get("wrong") and name != FLASH:
                    rows.fail(label, row["wrong"])
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
