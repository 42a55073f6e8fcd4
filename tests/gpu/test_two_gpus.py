"""Several GPUs: one process with models on each or over both, and a process for each under DDP and FSDP."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

import te_compile
from te_compile.passes import manager
from tests.compiling import BACKEND, cosine, know_the_backend
from tests.needs import FP8_GPU

pytestmark = [
    *FP8_GPU,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

WIDTH, HEADS, TOKENS, BATCH, STEPS = 256, 4, 128, 4, 6
FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
OPTIONS = {"cost_model": False, "strict": True}


class Block(nn.Module):
    """A transformer's, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.qkv.bias.device)
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, -1)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    """Two blocks, each where its parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batches(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(BATCH, TOKENS, WIDTH, dtype=dtype) for _ in range(STEPS)]


class Training:
    """Steps of SGD, and an evaluation behind each."""

    def __init__(self, model: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
        self.model, self.run = model, run
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.device = next(model.parameters()).device
        self.seen: list[Tensor] = []

    def step(self, batch: Tensor) -> None:
        batch = batch.to(self.device)
        result = self.run(batch)
        result.float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            self.seen += [result.detach().cpu(), self.run(batch).cpu()]


def fast(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=BACKEND, options=OPTIONS | options)


def alike(got: list[Tensor], expected: list[Tensor]) -> None:
    """cuDNN adds dq up in any order, and another GPU may take another algorithm."""
    for one, other in zip(got, expected, strict=True):
        assert cosine(one, other) > 0.9995


# --- one process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("current", [FIRST, SECOND], ids=str)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_each_gpu_trains_alike_whichever_is_the_current_one(recipe: str, current: torch.device) -> None:
    """Step by step in turns: what is kept from call to call is kept for each device."""
    model, data = Stack().bfloat16(), batches()
    models = [copy.deepcopy(model).to(device) for device in (FIRST, SECOND)]
    trainings = [Training(each, fast(each, recipe=recipe)) for each in models]
    with torch.cuda.device(current):
        for batch in data:
            for training in trainings:
                training.step(batch)
    alike(trainings[0].seen, trainings[1].seen)
    one, other = map(te_compile.state_dict, models)
    assert one.keys() == other.keys() and bool(one) == (recipe == "delayed")
    for name, state in one.items():
        torch.testing.assert_close(state.cpu(), other[name].cpu(), rtol=0.05, atol=1e-6)


def split(model: nn.Module, *order: torch.device) -> nn.Module:
    """A copy of a stack of two blocks with one on each device."""
    copied: Any = copy.deepcopy(model)
    for block, device in zip(copied.blocks, order, strict=True):
        block.to(device)
    return copied


@pytest.mark.parametrize("order", [(FIRST, SECOND), (SECOND, FIRST)], ids=str)
def test_of_a_graph_over_both_the_part_on_one_runs_in_fp8(order: tuple[torch.device, torch.device]) -> None:
    """The rest stays as it is, and the report says why."""
    model, data = Stack().bfloat16(), batches()
    over_both, plain = split(model, *order), split(model, *order)
    with manager.recording() as records:
        trainings = [Training(each, run) for each, run in ((over_both, fast(over_both, strict=False)), (plain, plain))]
        for batch in data:
            for training in trainings:
                training.step(batch)
    for got, expected in zip(trainings[0].seen, trainings[1].seen, strict=True):
        assert cosine(got, expected) > 0.99
    for site in (site for record in records for site in record.plan.sites):
        assert ("while this graph's first FP8 linear is on" in site.reason) == site.name.startswith("blocks.1"), site


def test_blocks_that_are_compiled_one_by_one_run_in_fp8_on_both() -> None:
    model, data = Stack().bfloat16(), batches()
    over_both, on_one = split(model, FIRST, SECOND), model.to(FIRST)
    for stack in (over_both, on_one):
        for block in stack.blocks:
            block.compile(backend=BACKEND, options=OPTIONS)
    trainings = [Training(each, each) for each in (over_both, on_one)]
    for batch in data:
        for training in trainings:
            training.step(batch)
    alike(trainings[0].seen, trainings[1].seen)


def test_a_model_that_accelerate_spreads_over_both_answers_as_without_fp8() -> None:
    accelerate, transformers = pytest.importorskip("accelerate"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, vocab_size=512
    )
    model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    places: dict[str, int] = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    places |= {f"model.layers.{i}": i // 2 for i in range(4)}
    model = accelerate.dispatch_model(model, places)
    ids = torch.randint(3, 512, (2, 64), device=FIRST)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        run = fast(model, strict=False)
        for _ in range(4):
            got = run(ids, use_cache=False).logits
            assert got.device == expected.device and cosine(got, expected) > 0.98


# --- a process for each -------------------------------------------------------------------------------------------


def in_parallel(work: Callable[..., None], directory: Path, seed: int, *given: Any) -> list[Any]:
    """What each of two ranks wrote."""
    mp.spawn(_rank, (work, str(directory), seed, *given), 2)
    return [torch.load(directory / f"{rank}.pt") for rank in range(2)]


def _rank(rank: int, work: Callable[..., Any], directory: str, seed: int, *given: Any) -> None:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    know_the_backend()
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    torch.manual_seed(seed)
    torch.save(work(rank, *given), f"{directory}/{rank}.pt")
    dist.destroy_process_group()


def whole(parameters: Any) -> list[Tensor]:
    return [getattr(each, "full_tensor", lambda each=each: each)().detach().clone().float() for each in parameters]


def check_against_high_precision(model: nn.Module, train: Callable[[list[Tensor]], list[Tensor]], rank: int) -> None:
    """Train ``model`` on this rank's halves, and a copy without FP8 on all: both must take the same way."""
    plain, data = copy.deepcopy(model), batches(torch.float32)
    before = whole(plain.parameters())
    training = Training(plain, plain)
    for batch in data:
        training.step(batch)
    after = train([batch.chunk(2)[rank].cuda() for batch in data])
    for old, got, expected in zip(before, after, whole(plain.parameters()), strict=True):
        assert old.dim() < 2 or cosine(got - old, expected - old) > 0.97


def _data_parallel(rank: int, recipe: str) -> dict[str, Any]:
    model = Stack().cuda()
    trained = copy.deepcopy(model)

    def train(halves: list[Tensor]) -> list[Tensor]:
        wrapped = nn.parallel.DistributedDataParallel(trained, device_ids=[rank])
        run = fast(wrapped, recipe=recipe)

        def amp(batch: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                result: Tensor = run(batch)
            return result

        training = Training(trained, amp)
        for half in halves:
            training.step(half)
        return whole(trained.parameters())

    check_against_high_precision(model, train, rank)
    return {"state": te_compile.state_dict(trained), "weights": whole(trained.parameters())}


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_data_parallel_ranks_keep_the_same_weights_and_scales(tmp_path: Path, seed: int, recipe: str) -> None:
    one, other = in_parallel(_data_parallel, tmp_path, seed, recipe)
    for mine, others in zip(one["weights"], other["weights"], strict=True):
        assert torch.equal(mine.cpu(), others.cpu())
    assert bool(one["state"]) == (recipe == "delayed")
    for name, state in one["state"].items():
        assert torch.equal(state.cpu(), other["state"][name].cpu()) and bool((state[:, 0] > 0).all()), name


def _sharded(rank: int, how: str) -> dict[str, Any]:
    model = Stack().cuda()
    trained: Any = copy.deepcopy(model)
    bf16 = torch.bfloat16

    def shard() -> nn.Module:
        for block in trained.blocks:
            block.compile(backend=BACKEND, options=OPTIONS)
        if how == "flat parameters":
            return FullyShardedDataParallel(
                trained,
                use_orig_params=True,
                device_id=rank,
                sharding_strategy=ShardingStrategy.FULL_SHARD,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                mixed_precision=MixedPrecision(param_dtype=bf16, reduce_dtype=torch.float32),
            )
        for block in (*trained.blocks, trained):
            fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32))
        return trained

    def train(halves: list[Tensor]) -> list[Tensor]:
        nonlocal trained
        trained = shard()
        training = Training(trained, trained)
        for half in halves:
            training.step(half)
        if isinstance(trained, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(trained):
                return whole(trained.parameters())
        return whole(trained.parameters())

    check_against_high_precision(model, train, rank)
    for each in trained.modules():
        if isinstance(each, FSDPModule):
            each.unshard()
    return {"state": te_compile.state_dict(trained)}


@pytest.mark.parametrize("how", ["fully_shard", "flat parameters"])
def test_sharded_ranks_have_the_scales_of_whole_parameters(tmp_path: Path, seed: int, how: str) -> None:
    one, other = in_parallel(_sharded, tmp_path, seed, how)
    assert len(one["state"]) == 2 * 8 and one["state"].keys() == other["state"].keys()
    for name, state in one["state"].items():
        assert torch.equal(state.cpu(), other["state"][name].cpu()) and bool((state[:, 0] > 0).all()), name
