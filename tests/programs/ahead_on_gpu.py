"""Three training steps on a GPU through Inductor, and which kernels were compiled where.

    python -m tests.programs.ahead_on_gpu SEED

Prints JSON: the losses and the gradients' sums, what was compiled ahead, and the names of the kernels of ours that
this process compiled itself.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from triton import knobs

from te_compile.kernels import ahead
from tests.compiling import compiled, know_the_backend

by_itself: list[str] = []


class Block(nn.Module):
    """Norms, a gate, and an activation with a bias."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        x = x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))


def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
    """What Triton calls after each compilation."""
    module = getattr(getattr(src, "fn", None), "__module__", "")
    if not cache_hit and module.startswith("te_compile"):
        by_itself.append(f"{module}.{src.fn.__name__}")


def main(seed: int) -> None:
    """The steps, and what happened."""
    know_the_backend()
    knobs.compilation.listener = listen
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), Block()).to("cuda", torch.bfloat16)
    run = compiled(model, compiler="inductor", cost_model=False)
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    losses = []
    for _ in range(3):
        loss = run(x).float().square().mean()
        loss.backward()
        losses.append(loss.item())
    sums = [float(parameter.grad.double().sum()) for parameter in model.parameters() if parameter.grad is not None]
    print(json.dumps({"losses": losses, "sums": sums, "by itself": by_itself, **vars(ahead.statistics)}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
