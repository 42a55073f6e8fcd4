"""One rank of a data-parallel training: ``python -m tests.programs.data_parallel RANK DIRECTORY REDUCE``.

Each rank trains on data of its own magnitude and writes its scales and gradients to DIRECTORY/rank<RANK>.pt.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn

from te_compile.state_files import state_dict
from tests.compiling import compiled, gradients, know_the_backend

WORLD_SIZE = 2


class Model(nn.Module):
    """Two linears with an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def main(rank: int, directory: Path, reduce_amax: bool) -> None:
    """Two steps of DistributedDataParallel around the model, compiled from outside."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{directory / 'rendezvous'}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=240),
    )
    torch.manual_seed(0)
    model = Model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    know_the_backend()
    fast = compiled(wrapped, recipe={"name": "delayed", "reduce_amax": reduce_amax})
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        x = (1 + 9 * rank) * torch.randn(8, 32, generator=generator)
        fast(x).square().mean().backward()
    result = {"gradients": gradients(model), "state": state_dict(wrapped), "names": list(model.state_dict())}
    torch.save(result, directory / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "reduce")
