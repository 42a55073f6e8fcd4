"""Attention under masks that models hand over, by PyTorch's kernels and by ours: forward, and forward with backward.

    python -m benchmarks.masked_attention                                        shapes of real models, bf16
    python -m benchmarks.masked_attention --shape 8,32,8,1024,128 --mask packed
    python -m benchmarks.masked_attention --shape 64,12,12,512,64 --mask encoder --dropout 0.1

A shape is B,H,G,S,D: rows, heads of queries and of keys, positions and features. Masks: "padded", causal, each row of
another length from a third of S to S; "left", the same with the padding in front; "packed", causal within documents of
S / 8 positions on average; "encoder", lengths alone; "all", which hides nothing. One JSON line each: milliseconds of a
call within a CUDA graph of several, which leaves the host out; "tiles" is what packing the mask takes, once for all
layers that read it. Without a dropout results are checked in the same run against attention in float32, ours for 45 dB
of signal over error, their gradients for 40; the exit status is 1 if one falls short.
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

from benchmarks.attention import milliseconds_of, once
from benchmarks.measure import DEVICE, Rows, add_out, describe_device, sqnr
from te_compile.ops import registry
from te_compile.ops.mask_tiles import MASK_TILES
from te_compile.ops.masked_attention import MASKED_ATTENTION_BACKWARD, MASKED_ATTENTION_FORWARD, bits_of_tiles

WORKS = [
    ("4,32,8,2048,128", "padded", 0.0),
    ("4,32,8,2048,128", "packed", 0.0),
    ("8,32,8,1024,64", "left", 0.0),
    ("64,12,12,512,64", "encoder", 0.0),
    ("64,12,12,512,64", "encoder", 0.1),
    ("64,12,12,320,64", "encoder", 0.1),
    ("64,16,16,200,64", "encoder", 0.1),
    ("16,16,16,1024,64", "padded", 0.1),
    ("64,12,12,512,64", "all", 0.0),
    ("64,16,16,128,64", "encoder", 0.0),
]
MASKS = ("padded", "left", "packed", "encoder", "all")
LEAST_DB = {"forward": 45.0, "step": 40.0}


def mask_of(kind: str, batch: int, length: int) -> Tensor:
    """bool [B, S, S]."""
    place = torch.arange(length, device=DEVICE)
    causal, shape = place <= place[:, None], (batch, length, length)
    ends = torch.linspace(max(1, length // 3), length, batch, device=DEVICE).long()[:, None, None]
    if kind == "packed":
        document = (torch.rand(batch, length, device=DEVICE) < 8 / length).cumsum(1)
        return causal & (document[:, :, None] == document[:, None])
    if kind == "left":
        return (causal & (place >= length - ends)).expand(shape)
    if kind == "encoder":
        return (place < ends).expand(shape)
    return (causal & (place < ends)).expand(shape) if kind == "padded" else causal.new_ones(shape)


@dataclass(frozen=True)
class Work:
    """q, k and v [B, H, S, D] as projections write them, the gradient of their attention, and its mask [B, S, S]."""

    inputs: list[Tensor]
    grad: Tensor
    mask: Tensor
    dropout: float

    @staticmethod
    def drawn(shape: str, mask: str, dropout: float) -> Work:
        """Operands drawn anew."""
        batch, heads, shared, length, width = map(int, shape.split(","))
        drawn = [
            torch.randn(batch, length, count, width, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
            for count in (heads, shared, shared, heads)
        ]
        return Work([x.requires_grad_() for x in drawn[:3]], drawn[3], mask_of(mask, batch, length), dropout)

    def by_pytorch(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The call that models make."""
        shared = q.shape[1] != k.shape[1]
        mask = self.mask.unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout, enable_gqa=shared)

    def once(self, what: str) -> Sequence[Tensor]:
        """That call, or a step of it, of new operands: a graph of launches must not wait for what read others."""
        return once(self.by_pytorch, what, [x.detach().requires_grad_() for x in self.inputs], self.grad)

    def by_tiles(self, name: str) -> dict[str, Callable[[], Sequence[Tensor]]]:
        """Both kinds of call by an implementation of our operators."""
        tiles = MASK_TILES(self.mask, True, best("mask_tiles", {"mask": self.mask}))
        q, k, v = (x.detach().transpose(1, 2) for x in self.inputs)
        grad, scale = self.grad.transpose(1, 2), q.shape[3] ** -0.5
        bits = bits_of_tiles(q, k, self.dropout) if self.dropout else None

        def forward() -> Sequence[Tensor]:
            return MASKED_ATTENTION_FORWARD(q, k, v, *tiles[:2], bits, self.dropout, scale, name)

        def step() -> Sequence[Tensor]:
            made = forward()
            return MASKED_ATTENTION_BACKWARD(grad, q, k, v, *made, *tiles[2:], bits, self.dropout, scale, name)

        def transposed(call: Callable[[], Sequence[Tensor]], count: int) -> Callable[[], Sequence[Tensor]]:
            return lambda: [x.transpose(1, 2) for x in call()[:count]]

        return {"forward": transposed(forward, 1), "step": transposed(step, 3)}


def best(operator: str, arguments: dict[str, object]) -> str:
    """The name of the implementation that runs an operator here."""
    return registry.choose(operator, registry.Target.of(DEVICE), arguments)[0]


def measure(work: Work, described: dict[str, object], rows: Rows, iterations: int) -> None:
    """The rows of one work."""
    named = dict(zip(("q", "k", "v"), (x.transpose(1, 2) for x in work.inputs), strict=True))
    ours = work.by_tiles(best("masked_attention_backward", {**named, "probability": work.dropout}))
    packing = best("mask_tiles", {"mask": work.mask})
    ms = milliseconds_of(lambda: MASK_TILES(work.mask, True, packing), iterations)
    rows.write(what="mask tiles", name="te_compile", **described, ms=ms)
    wide = [x.detach().float().requires_grad_() for x in work.inputs]
    for what in ("forward", "step"):
        calls: dict[str, Callable[[], Sequence[Tensor]]] = {
            "pytorch": partial(work.once, what),
            "te_compile": ours[what],
        }
        right = [] if work.dropout else once(work.by_pytorch, what, wide, work.grad.float())
        for name, call in calls.items():
            row: dict[str, object] = {"ms": milliseconds_of(call, iterations)}
            decibels = [sqnr(*pair) for pair in zip(right, call(), strict=True)] if right else []
            if decibels:
                row["sqnr_db"] = min(decibels)
            rows.write(what=f"masked attention {what}", name=name, **described, **row)
            if decibels and name == "te_compile" and not min(decibels) >= LEAST_DB[what]:
                rows.fail(name, f"{what}: {min(decibels):.1f} dB, {LEAST_DB[what]:.0f} needed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny = DEVICE.type != "cuda"
    parser.add_argument("--shape", help="B,H,G,S,D; those of real models if left out")
    parser.add_argument("--mask", choices=MASKS, default="padded")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--iters", type=int, default=2 if tiny else 20)
    add_out(parser)
    given = parser.parse_args(arguments)
    shape = given.shape or ("2,4,2,40,16" if tiny else "")
    rows = Rows(given.out)
    describe_device(rows)
    for size, mask, dropout in [(shape, given.mask, given.dropout)] if shape else WORKS:
        described = {"shape": size, "mask": mask, "dropout": dropout}
        measure(Work.drawn(size, mask, dropout), described, rows, given.iters)
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
