"""Attention with a bias that is added to its scores, by PyTorch's kernels and by ours: forward, and with backward.

    python -m benchmarks.biased_attention                                        shapes of real models, bf16
    python -m benchmarks.biased_attention --shape 64,12,200,200,64 --own 1 --dropout 0.1

A shape is B,H,Q,K,D: rows, heads, queries, keys and features; ``--own 1`` gives each row of the batch a bias of its
own, as padding beside a bias does, in place of one for all. ``efficient`` is PyTorch's memory-efficient kernel, which
alone has a gradient for a bias; ``cudnn`` is cuDNN's, with a bias that learns nothing; ``te_compile`` has the gradient
too. A step of those that learn includes adding up the gradients of rows that share a bias. One JSON line each:
milliseconds of a call within a CUDA graph of several, which leaves the host out; a dropout's bits are drawn before.
Without a dropout results are checked in the same run against attention in float32, ours for 45 dB of signal over error,
their gradients for 40; the exit status is 1 if one falls short.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention import milliseconds_of
from benchmarks.measure import DEVICE, Rows, add_out, describe_device, sqnr
from te_compile.ops import registry
from te_compile.ops.biased_attention import (
    BIASED_ATTENTION_BACKWARD,
    BIASED_ATTENTION_FORWARD,
    aligned,
    gradient_of_bias,
)
from te_compile.ops.masked_attention import bits_of_tiles

WORKS = [
    ("32,12,320,320,64", False, 0.1),
    ("64,12,200,200,64", False, 0.0),
    ("8,32,1024,1024,64", False, 0.0),
    ("64,12,320,320,64", True, 0.1),
    ("8,32,2048,2048,64", True, 0.0),
    ("8,32,1024,1024,128", False, 0.0),
    ("16,32,512,512,128", False, 0.1),
    ("128,12,144,144,32", False, 0.0),
    ("256,8,72,72,32", False, 0.0),
    ("1024,4,64,64,32", False, 0.0),
]
LEAST_DB = {"forward": 45.0, "step": 40.0}
KERNELS = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
Call = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Work:
    """q, k and v [B, H, S, D] as projections write them, the gradient of their attention, and a bias [B or 1, H, Q, R],
    R the next multiple of eight of K."""

    inputs: list[Tensor]
    grad: Tensor
    bias: Tensor
    dropout: float

    @staticmethod
    def drawn(shape: str, own: bool, dropout: float) -> Work:
        """Operands drawn anew."""
        batch, heads, queries, keys, width = map(int, shape.split(","))
        drawn = [
            torch.randn(batch, length, heads, width, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
            for length in (queries, keys, keys, queries)
        ]
        bias = torch.randn(batch if own else 1, heads, queries, aligned(keys), device=DEVICE, dtype=torch.bfloat16)
        return Work(drawn[:3], drawn[3], bias, dropout)

    def once(self, what: str, learns: bool, dtype: torch.dtype = torch.bfloat16) -> Sequence[Tensor]:
        """SDPA's call, or a step of it: the result or the gradients of q, k, v and, if it ``learns``, the bias."""
        steps = what == "step"
        q, k, v = (x.detach().to(dtype).requires_grad_(steps) for x in self.inputs)
        bias = self.bias.detach().to(dtype).requires_grad_(steps and learns)
        added = bias[..., : k.shape[2]].expand(q.shape[0], -1, -1, -1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=added, dropout_p=self.dropout)
        wanted = (q, k, v, bias) if learns else (q, k, v)
        return torch.autograd.grad(y, wanted, self.grad.to(dtype)) if steps else (y,)

    def on(self, kernel: SDPBackend, what: str) -> Sequence[Tensor]:
        """The same held to a kernel of PyTorch's."""
        with sdpa_kernel(kernel):
            return self.once(what, kernel == SDPBackend.EFFICIENT_ATTENTION)

    def by_ours(self, name: str) -> dict[str, Call]:
        """Both kinds of call by an implementation of our operators."""
        q, k, v = (x.transpose(1, 2) for x in self.inputs)
        grad, scale = self.grad.transpose(1, 2), q.shape[3] ** -0.5
        bits = bits_of_tiles(q, k, self.dropout) if self.dropout else None

        def forward() -> Sequence[Tensor]:
            made: Sequence[Tensor] = BIASED_ATTENTION_FORWARD(q, k, v, self.bias, bits, self.dropout, scale, name)
            return made

        def step() -> Sequence[Tensor]:
            given = (grad, q, k, v, self.bias, *forward(), bits, self.dropout, scale, True)
            *made, ds = BIASED_ATTENTION_BACKWARD(*given, name)
            return [*(x.transpose(1, 2) for x in made), gradient_of_bias(self.bias.shape, ds)]

        return {"forward": lambda: [forward()[0].transpose(1, 2)], "step": step}


def measure(work: Work, described: dict[str, object], rows: Rows, iterations: int) -> None:
    """The rows of one work."""
    named = dict(zip(("q", "k", "v"), (x.transpose(1, 2) for x in work.inputs), strict=True))
    given = {**named, "probability": work.dropout}
    ours = work.by_ours(registry.choose("biased_attention_backward", registry.Target.of(DEVICE), given)[0])
    for what in ("forward", "step"):
        calls: dict[str, Call] = {"te_compile": ours[what]}
        if DEVICE.type == "cuda":
            of_pytorch = {
                name: partial(work.on, kernel, what)
                for name, kernel in KERNELS.items()
                if not (work.dropout and name == "cudnn")  # it would round a dropout
            }
            calls = {**of_pytorch, **calls}
        right = [] if work.dropout else work.once(what, True, torch.float32)
        for name, call in calls.items():
            row: dict[str, object] = {"ms": milliseconds_of(call, iterations)}
            decibels = [sqnr(*pair) for pair in zip(right, call(), strict=False)] if right else []
            if decibels:
                row["sqnr_db"] = min(decibels)
            rows.write(what=f"biased attention {what}", name=name, **described, **row)
            if decibels and name == "te_compile" and not min(decibels) >= LEAST_DB[what]:
                rows.fail(name, f"{what}: {min(decibels):.1f} dB, {LEAST_DB[what]:.0f} needed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny = DEVICE.type != "cuda"
    parser.add_argument("--shape", help="B,H,Q,K,D; those of real models if left out")
    parser.add_argument("--own", type=int, choices=(0, 1), default=0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--iters", type=int, default=2 if tiny else 20)
    add_out(parser)
    given = parser.parse_args(arguments)
    shape = given.shape or ("2,4,40,37,16" if tiny else "")
    rows = Rows(given.out)
    describe_device(rows)
    for size, own, dropout in [(shape, bool(given.own), given.dropout)] if shape else WORKS:
        described = {"shape": size, "own": own, "dropout": dropout}
        measure(Work.drawn(size, own, dropout), described, rows, given.iters)
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
