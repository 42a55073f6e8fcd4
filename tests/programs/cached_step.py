"""One training step through Inductor with caches on.

    python -m tests.programs.cached_step DIRECTORY SEED OPTIONS CHANGE

OPTIONS is JSON for options=. CHANGE edits the package before it compiles: "nothing"; "formula" doubles the weight's
gradient and lets the fingerprint of the sources change as it would if the file had been edited; "formula in secret"
doubles it and keeps the fingerprint. Prints JSON: how often each cache was hit and missed, and the weight's gradient.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1]
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "1"
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "1"

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from te_compile import compilers
from te_compile.ops import linear
from tests.compiling import compiled, know_the_backend


class Model(nn.Module):
    """One linear and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))


def change_the_formula() -> None:
    """dw becomes 2 · dw."""
    original = linear._Linear.backward

    def doubled(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        dx, dw, *others = original(ctx, *gradients)
        return dx, 2 * dw, *others

    linear._Linear.backward = staticmethod(doubled)


def main(seed: int, options: dict[str, Any], change: str) -> None:
    """The step, and what it says about the caches."""
    torch.set_num_threads(1)
    know_the_backend()
    if change.startswith("formula"):
        change_the_formula()
    if change == "formula":
        fingerprint = compilers.source_fingerprint()
        compilers.source_fingerprint = lambda: f"edited {fingerprint}"
    torch.manual_seed(seed)
    model, x = Model(), torch.randn(8, 32)
    compiled(model, **{"compiler": "inductor", **options})(x).square().mean().backward()
    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    print(
        json.dumps(
            {
                "fx hits": inductor["fxgraph_cache_hit"],
                "fx misses": inductor["fxgraph_cache_miss"],
                "autograd hits": autograd["autograd_cache_hit"],
                "autograd misses": autograd["autograd_cache_miss"],
                "bypassed": inductor["fxgraph_cache_bypass"] + autograd["autograd_cache_bypass"],
                "gradient": model.fc.weight.grad.tolist(),
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4])
