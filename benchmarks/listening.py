"""The convolutions by which models of speech listen: compiled by torch.compile, with the channels last, and by te_fp8.

    python -m benchmarks.listening                          both kinds, 8 times 10 seconds of sound, bf16
    python -m benchmarks.listening --only layer --rows 2

Seven convolutions of 512 channels, with a GroupNorm behind the first as the base models of wav2vec 2.0 and HuBERT have
it ("group"), or with a LayerNorm behind each as the large ones do ("layer"). "by hand": as ``conv2d`` with the channels
last, which is what ``channels_last_convolutions`` makes of them. One JSON line a way: milliseconds of the device in a
training step and in a forward without gradients, GiB at the step's peak, and how far the result is from the first
way's; the exit status is 1 if that is more than 2⁻⁵.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import DEVICE, Memory, Rows, add_out, busy_microseconds, describe_device

TAPS, STRIDES = (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)
NORMS = ("group", "layer")
MOST_OFF = 2.0**-5


class Layer(nn.Module):
    """A convolution, a norm and a GELU."""

    def __init__(self, before: int, width: int, taps: int, stride: int, norm: nn.Module | None, by_hand: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(before, width, taps, stride=stride, bias=isinstance(norm, nn.LayerNorm))
        self.norm, self.by_hand = norm, by_hand and before > 1

    def convolved(self, x: Tensor) -> Tensor:
        """y [B, O, L'] for x [B, C, L]."""
        if not self.by_hand:
            y: Tensor = self.convolution(x)
            return y
        x, weight = (
            each.unsqueeze(2).contiguous(memory_format=torch.channels_last) for each in (x, self.convolution.weight)
        )
        return F.conv2d(x, weight, self.convolution.bias, (1, *self.convolution.stride)).squeeze(2)

    def forward(self, x: Tensor) -> Tensor:
        """The next layer's x."""
        x = self.convolved(x)
        if isinstance(self.norm, nn.LayerNorm):
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        elif self.norm is not None:
            x = self.norm(x)
        return F.gelu(x)


def built(norm: str, width: int, by_hand: bool) -> nn.Module:
    """The seven of them, the same weights each time."""
    torch.manual_seed(0)
    norms: list[nn.Module | None] = [nn.LayerNorm(width) for _ in TAPS]
    if norm == "group":
        norms = [nn.GroupNorm(width, width), *[None] * (len(TAPS) - 1)]
    before = (1, *[width] * (len(TAPS) - 1))
    sizes = zip(before, TAPS, STRIDES, norms, strict=True)
    layers = (Layer(inner, width, taps, stride, each, by_hand) for inner, taps, stride, each in sizes)
    return nn.Sequential(*layers).to(DEVICE, torch.bfloat16)


def _plain() -> str:
    return "inductor" if DEVICE.type == "cuda" else "aot_eager"


def ways(norm: str, width: int) -> dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Each way's model, and that as it is run."""
    models = {name: built(norm, width, by_hand=name == "by hand") for name in ("torch.compile", "by hand", "te_fp8")}
    return {
        name: (
            model,
            torch.compile(model, backend="te_fp8", options={"exclude": ["*"], "compiler": _plain()})
            if name == "te_fp8"
            else torch.compile(model, backend=_plain()),
        )
        for name, model in models.items()
    }


def measure(norm: str, x: Tensor, width: int, out: Rows, calls: int) -> None:
    """The rows of one kind."""
    right: Tensor | None = None
    for name, (model, fast) in ways(norm, width).items():
        torch._dynamo.reset()

        def step(model: nn.Module = model, fast: Callable[[Tensor], Tensor] = fast) -> Tensor:
            model.zero_grad(set_to_none=True)
            y = fast(x)
            y.backward(torch.ones_like(y))
            return y.detach()

        def forward(fast: Callable[[Tensor], Tensor] = fast) -> Tensor:
            with torch.no_grad():
                return fast(x)

        y = step().float()
        right = y if right is None else right
        off = float((y - right).norm() / right.norm())
        of_step, of_forward = (busy_microseconds(call, calls) / 1000 for call in (step, forward))
        with Memory() as memory:
            step()
        out.write(
            what="listening", name=name, norm=norm, step_ms=of_step, forward_ms=of_forward, gib=memory.peak, off=off
        )
        if not off < MOST_OFF:
            out.fail(name, f"{norm}: off by {off:.4f}, {MOST_OFF:.4f} allowed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny = DEVICE.type != "cuda"
    parser.add_argument("--only", choices=NORMS, help="one kind in place of both")
    parser.add_argument("--rows", type=int, default=1 if tiny else 8, help="how many sounds at once")
    parser.add_argument("--iters", type=int, default=1 if tiny else 6)
    add_out(parser)
    given = parser.parse_args(arguments)
    rows = Rows(given.out)
    describe_device(rows)
    x = torch.randn(given.rows, 1, 800 if tiny else 160000, device=DEVICE, dtype=torch.bfloat16)
    for norm in [given.only] if given.only else NORMS:
        measure(norm, x, 64 if tiny else 512, rows, given.iters)
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
