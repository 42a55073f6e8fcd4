"""One rank of a data-parallel training: ``python -m tests.programs.data_parallel RANK DIRECTORY REDUCE``.

Each rank trains on data of its own magnitude and writes its scales and gradients to DIRECTORY/rank<RANK>.pt, with what
was logged. Then it goes through layers of its own choice, and what is logged of that is written as well.
"""

from __future__ import annotations

import logging
import sys
from datetime import timedelta
from logging.handlers import BufferingHandler
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


def choose_layers(rank: int, recipe: dict[str, object]) -> None:
    """Three steps of one of two layers, which are compiled one by one: the ranks differ in the first. By Inductor: what
    runs operators one by one has ranks agree before it knows whose amaxes they are."""
    layers = [compiled(nn.Linear(32, 32), recipe=recipe, compiler="inductor") for _ in range(2)]
    for chosen in (rank, 0, 0):
        layers[chosen](torch.randn(8, 32)).square().mean().backward()


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
    logged = BufferingHandler(capacity=1000)
    logged.setLevel(logging.WARNING)
    logging.getLogger("te_compile").addHandler(logged)
    torch.manual_seed(0)
    model = Model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    know_the_backend()
    recipe: dict[str, object] = {"name": "delayed", "reduce_amax": reduce_amax}
    fast = compiled(wrapped, recipe=recipe)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        x = (1 + 9 * rank) * torch.randn(8, 32, generator=generator)
        fast(x).square().mean().backward()
    result = {"gradients": gradients(model), "state": state_dict(wrapped), "names": list(model.state_dict())}
    result["logged"] = [each.getMessage() for each in logged.buffer]
    logged.flush()
    choose_layers(rank, recipe)
    result["of_own_layers"] = [each.getMessage() for each in logged.buffer]
    torch.save(result, directory / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "reduce")
