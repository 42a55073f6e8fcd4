"""Training steps on several GPUs, a process for each: te_fp8 beside torch.compile under DDP and FSDP.

Every rank trains a Llama of its own data, optimizer included. The ways:

- ``alone``: without exchange, what the others are held against.
- ``ddp``: DistributedDataParallel around a graph that is left whole (``optimize_ddp=False``): gradients are exchanged
  behind the backward pass.
- ``ddp_cut``: Dynamo's default, which cuts the graph at the buckets of 25 MiB, so that they are exchanged meanwhile.
- ``fsdp``: ``fully_shard`` around blocks that are compiled one by one; parameters in fp32, computed with in bf16.

One row for each way and variant: the median step of rank 0, how long the first steps took with what they compile, the
peak of its memory, and how far the loss fell in them, for te_fp8 at least nine tenths as far as for torch.compile.
``--in-turns``: steps of all variants of a way in turns, where the host decides and drifts; then without memory.
Without GPUs all of it runs on tiny shapes over gloo, and the times mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.measure import DEVICE, Memory, Rows, add_out, describe_device, known, median_ms, synchronize

ON_GPU = DEVICE.type == "cuda"
LLAMA = (
    {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 6}
    | {"num_attention_heads": 32, "num_key_value_heads": 8}
    if ON_GPU
    else {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2}
)
BUCKET_MIB = 25 if ON_GPU else 1  # PyTorch's default, and less for the tiny model, so that it is cut as well
BATCH, SEQUENCE = (8, 1024) if ON_GPU else (2, 32)
WARM_UP = 6  # steps: the compilation, the calibration, and recorded calls
WAYS = ("alone", "ddp", "ddp_cut", "fsdp")
VARIANTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "compile": ("inductor", None),
    "te_fp8": ("te_fp8", None),
    "te_fp8_unreduced": ("te_fp8", {"recipe": {"name": "delayed", "reduce_amax": False}}),
    "te_fp8_current": ("te_fp8", {"recipe": "current"}),
}
"""Backend and options by name; unreduced, each rank has scales of its own."""


def llama(dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model, with the same weights on every rank."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    config.use_cache = False
    with device:
        model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.to(dtype).train()


def built(way: str, name: str, device: torch.device) -> tuple[Callable[..., Any], nn.Module]:
    """What a step calls, and the module whose parameters it trains."""
    backend, options = VARIANTS[name]
    if way == "fsdp":
        model: Any = llama(torch.float32, device)
        for block in model.model.layers:
            block.compile(backend=backend, options=options)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for each in (*model.model.layers, model):
            fully_shard(each, mp_policy=policy)
        return model, model
    model = llama(torch.bfloat16, device)
    torch._dynamo.config.optimize_ddp = way == "ddp_cut"
    called = model
    if way != "alone":
        places = [device] if device.type == "cuda" else None
        called = nn.parallel.DistributedDataParallel(
            model, device_ids=places, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MIB
        )
    return torch.compile(called, backend=backend, options=options), model


class Trained:
    """One variant of one way, past the steps in which it is compiled and calibrated."""

    def __init__(self, way: str, name: str, device: torch.device, ids: torch.Tensor) -> None:
        self.called, model = built(way, name, device)
        self.optimizer, self.ids = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), ids
        began = time.perf_counter()
        losses = [self.step().item() for _ in range(WARM_UP)]
        self.figures = {"fell": losses[0] - losses[-1], "start_s": time.perf_counter() - began}

    def step(self) -> torch.Tensor:
        """A step; its loss."""
        loss: torch.Tensor = self.called(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def one_by_one(
    way: str, names: Sequence[str], device: torch.device, ids: torch.Tensor, steps: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures of each variant, alone on its GPUs."""
    for name in names:
        torch._dynamo.reset()
        trained = Trained(way, name, device, ids)
        with Memory() as memory:
            milliseconds = median_ms(trained.step, steps, warmup=0)
        yield name, {"ms": milliseconds, **memory.row(), **trained.figures}
        del trained


def in_turns(
    way: str, names: Sequence[str], device: torch.device, ids: torch.Tensor, steps: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures of all variants, two steps of one after two of another, milliseconds a step: where the host decides,
    it drifts by more than they differ. Each begins one of the rounds as often as the others."""
    torch._dynamo.reset()
    trained = {name: Trained(way, name, device, ids) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(max(steps // 2, 1)):
        first = round_ % len(names)
        for name in (*names[first:], *names[:first]):
            trained[name].step()
            synchronize()
            dist.barrier()
            synchronize()
            began = time.perf_counter()
            for _ in range(2):
                trained[name].step()
            synchronize()
            times[name].append(500 * (time.perf_counter() - began))
    for name in names:
        yield name, {"ms": statistics.median(times[name]), **trained[name].figures}


def run_rank(rank: int, ranks: int, rendezvous: str, given: argparse.Namespace) -> None:
    """All rows, as one of the processes sees them; the first one writes them."""
    device = torch.device("cuda", rank) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    options = {"device_id": device} if ON_GPU else {}
    backend = "nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, **options)
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, LLAMA["vocab_size"], (BATCH, SEQUENCE), generator=generator).to(device)
    rows = Rows(given.out if rank == 0 else None)
    if rank == 0:
        describe_device(rows)
    for way in given.ways:
        fell: dict[str, float] = {}
        measured = in_turns if given.in_turns else one_by_one
        for name, row in measured(way, given.only, device, ids, given.iters):
            fell[name] = row["fell"]
            if rank == 0:
                rows.write(what="data_parallel", ranks=ranks, way=way, name=name, **row)
            if row["fell"] < 0.9 * fell.get("compile", row["fell"]):
                rows.fail(
                    f"{way} {name}", f"the loss fell by {row['fell']:.4f}, torch.compile's by {fell['compile']:.4f}"
                )
    dist.destroy_process_group()
    if rank == 0 and rows.exit_status():
        sys.exit(1)


def main() -> int:
    """Start the ranks; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if ON_GPU else 2, help="(%(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="(%(default)s)")
    parser.add_argument("--only", default=",".join(VARIANTS), help="variants (%(default)s)")
    parser.add_argument("--iters", type=int, default=12, help="timed steps per row (%(default)s)")
    parser.add_argument("--in-turns", action="store_true", help="the steps of all variants in turns, without memory")
    add_out(parser)
    given = parser.parse_args()
    given.ways, given.only = known("--ways", given.ways, WAYS), known("--only", given.only, VARIANTS)
    with tempfile.TemporaryDirectory() as directory:
        ranks = (given.ranks, str(Path(directory) / "rendezvous"), given)
        try:
            mp.spawn(run_rank, ranks, given.ranks)
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            print(f"FAILED {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
