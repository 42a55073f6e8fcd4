"""A training step of equal layers whose graph is cut between them, with Inductor's cache on.

    python -m tests.programs.equal_layers DIRECTORY SEED

DIRECTORY is for the cache. Prints JSON: how many graphs there were, what the cache had and had not, the names of the
linears that the reports have, and the largest difference of a gradient to that of the graph as a whole.
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
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.utils import counters
from torch.nn import functional as F

from te_compile.backend import te_fp8
from te_compile.passes import manager
from tests.compiling import compiled, gemm_labels, relative_error, train_step

LAYERS, WIDTH = 3, 64


class Layer(nn.Module):
    """A perceptron on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def main(seed: int) -> None:
    """The step as DistributedDataParallel would have it cut, at a bucket for each layer."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, x = nn.Sequential(*[Layer() for _ in range(LAYERS)]), torch.randn(8, WIDTH, requires_grad=True)
    bucket = sum(parameter.nbytes for parameter in model[0].parameters())

    def cut(gm: Any, inputs: Any) -> Any:
        return DDPOptimizer(bucket, te_fp8, bucket).compile_fn(gm, inputs)

    with manager.recording() as records:
        _, got = train_step(model, torch.compile(model, backend=cut), x)
    found = dict(counters["inductor"])
    torch._dynamo.reset()
    _, expected = train_step(model, compiled(model, recipe="current"), x)
    names = {label.rpartition(" ")[0] for record in records for label in gemm_labels(record)}
    print(
        json.dumps(
            {
                "graphs": len(records),
                "hits": found.get("fxgraph_cache_hit", 0),
                "misses": found.get("fxgraph_cache_miss", 0),
                "names": sorted(names),
                "error": max(relative_error(got[name], gradient) for name, gradient in expected.items()),
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[2]))
