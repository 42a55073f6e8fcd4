"""FullyShardedDataParallel, whose modules have views of one flat parameter while they run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import te_compile
from te_compile.flat_parameters import has_flat_parameters, parameter_of
from tests.compiling import BACKEND, cosine, know_the_backend

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH, INNER = 32, 48
OPTIONS = {"compiler": "aot_eager", "strict": True}


class Block(nn.Module):
    """A perceptron on a residual stream, recomputed in the backward pass if asked for."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.gain = nn.Parameter(torch.ones(3))  # nothing that FSDP lays out in a row follows on a multiple of 16 bytes
        self.checkpointed = checkpointed

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.gain.mean()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


class Stack(nn.Module):
    """Blocks, and nothing around them."""

    def __init__(self, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def flat(model: nn.Module, strategy: ShardingStrategy = ShardingStrategy.NO_SHARD) -> FullyShardedDataParallel:
    """``model`` with a flat parameter for each block."""
    return FullyShardedDataParallel(
        model, use_orig_params=True, device_id=torch.device("cpu"), sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
    )  # fmt: skip


def compile_blocks(model: Stack, **options: Any) -> None:
    for block in model.blocks:
        block.compile(backend=BACKEND, options=OPTIONS | options)


def train(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """What came out of a few steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    results = []
    for batch in batches:
        result = model(batch)
        result.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(result.detach())
    return results


def batches(steps: int = 3) -> list[Tensor]:
    return [torch.randn(6, WIDTH) for _ in range(steps)]


# --- which parameter a view is ----------------------------------------------------------------------------------------


def test_each_view_is_known_for_its_parameter(one_rank: DeviceMesh) -> None:
    model = Stack()
    model.blocks[1].down.bias = model.blocks[1].norm.bias  # one parameter at two places
    expected = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    wrapped, seen = flat(model), {}

    def look(block: nn.Module, *_: Any) -> None:
        number = [getattr(each, "module", each) for each in model.blocks].index(block)
        views = {f"{owner}.{name}" if owner else name: view
                 for owner, module in block.named_modules() for name, view in module._parameters.items()}  # fmt: skip
        assert not any(isinstance(view, nn.Parameter) for view in views.values())
        seen.update({f"blocks.{number}.{name}": id(parameter_of(view)) for name, view in views.items()})

    for module in list(wrapped.modules()):
        if isinstance(module, Block):
            module.register_forward_hook(look)
    wrapped(torch.randn(2, WIDTH))
    assert seen == expected


def test_other_tensors_are_no_parameters() -> None:
    parameter = nn.Parameter(torch.randn(4, 4))
    assert parameter_of(parameter) is parameter
    assert parameter_of(parameter[1:]) is None and parameter_of(torch.randn(2)) is None
    assert parameter_of(3) is None  # type: ignore[arg-type]  # a graph may get numbers, too
    assert not has_flat_parameters(Stack())


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointed", [False, True], ids=["saved", "checkpointed"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_training_is_bit_for_bit_the_one_without_fsdp(one_rank: DeviceMesh, recipe: str, checkpointed: bool) -> None:
    model = Stack(lambda: Block(checkpointed))
    plain, data = copy.deepcopy(model), batches()
    compile_blocks(plain, recipe=recipe, cache_weights=False)
    expected = train(plain, data)
    compile_blocks(model, recipe=recipe)
    wrapped = flat(model)
    got = train(wrapped, data)
    assert all(map(torch.equal, got, expected))
    assert all(map(torch.equal, wrapped.parameters(), plain.parameters()))
    states, expected_states = te_compile.state_dict(wrapped), te_compile.state_dict(plain)
    assert len(expected_states) == (8 if recipe == "delayed" else 0)
    assert states.keys() == expected_states.keys()
    assert all(torch.equal(states[name], expected_states[name]) for name in states)


def test_a_saved_state_goes_on_with_and_without_fsdp(one_rank: DeviceMesh) -> None:
    model = Stack()
    compile_blocks(model)
    wrapped = flat(model)
    train(wrapped, batches())
    saved, resumed, data = te_compile.state_dict(wrapped), Stack(), batches()
    names = (name.replace("_fsdp_wrapped_module.", "") for name, _ in wrapped.named_parameters())
    resumed.load_state_dict(dict(zip(names, (p.detach().clone() for p in wrapped.parameters()), strict=True)))
    compile_blocks(resumed, cache_weights=False)
    te_compile.load_state_dict(resumed, saved)
    te_compile.load_state_dict(wrapped, saved)
    assert all(map(torch.equal, train(wrapped, data), train(resumed, data)))


def test_explain_names_the_linears_and_stats_reads_the_state(one_rank: DeviceMesh) -> None:
    model = Stack()
    compile_blocks(model)
    wrapped = flat(model)
    train(wrapped, batches())
    report = te_compile.explain(wrapped, torch.randn(6, WIDTH), options={"cost_model": False})
    names = {f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")}
    assert {row.name: row.status for row in report.rows} == dict.fromkeys(names, "fp8")
    rows = [row for row in te_compile.stats(wrapped).rows if row.role == "w"]
    assert len(rows) == 4 and all(row.amax and row.sqnr is None for row in rows)  # a rank has shards alone to measure
    with pytest.raises(ValueError, match="is sharded over ranks"):
        te_compile.stats(wrapped, torch.randn(6, WIDTH))


def _one_of_two(rank: int, directory: str, seed: int) -> None:
    """Train the shards of one rank on half of each batch, beside a model in high precision on all of it."""
    know_the_backend()
    store = torch.distributed.FileStore(f"{directory}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(seed)
    model = Stack()
    plain, data = copy.deepcopy(model), batches(2)
    before = [parameter.detach().clone() for parameter in plain.parameters()]
    compile_blocks(model)
    wrapped = flat(model, ShardingStrategy.FULL_SHARD)
    train(wrapped, [batch.chunk(2)[rank] for batch in data])
    train(plain, data)
    with FullyShardedDataParallel.summon_full_params(wrapped):
        for whole, expected, old in zip(wrapped.parameters(), plain.parameters(), before, strict=True):
            assert old.dim() < 2 or cosine(whole - old, expected - old) > 0.97
    torch.save(te_compile.state_dict(wrapped), f"{directory}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_have_the_same_states_of_whole_parameters(tmp_path: Any, seed: int) -> None:
    mp.spawn(_one_of_two, (str(tmp_path), seed), 2)  # type: ignore[no-untyped-call]
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert len(one) == 8 and one.keys() == other.keys()
    for name, state in one.items():
        assert torch.equal(state, other[name]) and bool((state[:, 0] > 0).all()), name
