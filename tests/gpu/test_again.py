"""A call whose weights are those of the last one: the bits are the same, and every change is seen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_compile import again, reset_state
from te_compile.again import Again, Memory
from te_compile.kernels import native
from tests.weight_changes import step_of

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if reason := native.missing(cuda=True):
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
RECIPES = pytest.mark.parametrize("recipe", ["delayed", "current"])
BF16, WIDTH, CALLS = torch.bfloat16, 256, 12


class Block(nn.Module):
    """A feed-forward block with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch, nothing_waits: None) -> list[Again]:
    """The calls that were like the last one."""
    found: list[Again] = []
    of = Memory.of

    def noted(self: Memory, args: tuple[Any, ...]) -> Again | None:
        last = of(self, args)
        found.extend([] if last is None else [last])
        return last

    monkeypatch.setattr(Memory, "of", noted)
    return found


def compiled(model: nn.Module, recipe: str, **options: Any) -> Any:
    return torch.compile(model, backend="te_fp8", options={"cost_model": False, "recipe": recipe, **options})


def trained(model: nn.Module, recipe: str) -> list[Tensor]:
    """Results and gradients of micro-batches with a step after each eight."""
    torch._dynamo.reset()
    fast, optimizer = compiled(model, recipe), torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator, seen = torch.Generator("cuda").manual_seed(5), []
    for at in range(4 * 8):
        x = torch.randn(4, 64, WIDTH, device="cuda", dtype=BF16, generator=generator, requires_grad=True)
        y = fast(x)
        y.float().square().mean().backward()
        assert x.grad is not None
        seen += [y.detach(), x.grad]
        if at % 8 == 7:
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return [*seen, *(p.detach() for p in model.parameters())]


@RECIPES
def test_micro_batches_give_the_same_bits(met: list[Again], recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Block().to("cuda", BF16)
    other = copy.deepcopy(model)
    got = trained(model, recipe)
    assert met
    met.clear()
    monkeypatch.setattr(again, "MOST_TRIES", 0)
    expected = trained(other, recipe)
    assert not met and len(got) == len(expected) and all(map(torch.equal, got, expected))


def edit_in_place(model: Any) -> None:
    with torch.no_grad():
        model.up.weight.mul_(1.25)


def edit_data(model: Any) -> None:
    model.up.weight.data.mul_(0.8)


def new_data(model: Any) -> None:
    model.down.weight.data = model.down.weight.data.flip(0)


@RECIPES
def test_every_change_is_seen_by_the_next_call(met: list[Again], recipe: str) -> None:
    model = Block().to("cuda", BF16)
    fast, plain = compiled(model, recipe), compiled(model, recipe, cache_weights=False)
    x = torch.randn(64, WIDTH, device="cuda", dtype=BF16)
    for _ in range(3):
        plain(x).float().square().mean().backward()
    torch.cuda.synchronize()
    with torch.no_grad():
        for _ in range(CALLS):
            before = fast(x).clone()
        assert met
        for change in (edit_data, edit_in_place, edit_data, new_data, lambda each: step_of(each, "Adam, fused")):
            change(model)
            for _ in range(CALLS):
                x = torch.randn(64, WIDTH, device="cuda", dtype=BF16)
                assert torch.equal(fast(x), plain(x))
        met.clear()
        fast(x)
        assert recipe == "delayed" or met
        reset_state(model)
        met.clear()
        fast(x)
        assert recipe == "current" or not met
        assert before.isfinite().all()


@pytest.mark.parametrize("trained_before", [False, True], ids=["never trained", "trained"])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_inference_is_met_again_sees_every_change_and_measures_as_long_as_it_must(
    met: list[Again], mode: str | None, trained_before: bool
) -> None:
    model = Block().to("cuda", BF16)
    options: Any = {"mode": mode} if mode else {}
    fast, plain = compiled(model, "delayed", **options), compiled(model, "delayed", cache_weights=False)

    def train() -> None:
        for _ in range(3):
            x = torch.randn(64, WIDTH, device="cuda", dtype=BF16)
            plain(x).float().square().mean().backward()
        torch.cuda.synchronize()

    if trained_before:
        train()
    for change in (lambda _: None, edit_data, edit_in_place, new_data, edit_data, lambda _: train()):
        change(model)
        met.clear()
        with torch.no_grad():
            for at in range(CALLS):
                x = 2.0 ** (at % 4) * torch.randn(64, WIDTH, device="cuda", dtype=BF16)
                assert torch.equal(fast(x).clone(), plain(x))
        assert met
    assert not any(each.lacking for each in met[-3:]), "it is known that there are scales"


def test_another_stream_has_copies_of_its_own(met: list[Again]) -> None:
    model = Block().to("cuda", BF16)
    fast = compiled(model, "current")
    x = torch.randn(64, WIDTH, device="cuda", dtype=BF16)
    with torch.no_grad():
        for _ in range(CALLS):
            wanted = fast(x).clone()
        assert met
        met.clear()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            elsewhere = fast(x).clone()
        torch.cuda.synchronize()
        assert not met and torch.equal(elsewhere, wanted)
        graph = torch.cuda.CUDAGraph()
        for _ in range(CALLS):
            fast(x)
        met.clear()
        with torch.cuda.graph(graph):
            captured = fast(x)
        assert not met
        edit_data(model)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, fast(x)) and not torch.equal(captured, wanted)


def test_a_model_that_only_infers_slows_no_other(met: list[Again]) -> None:
    """Its states never get a scale; kernels of others look for none, and their calls are remembered."""
    model, other = (Block().to("cuda", BF16) for _ in range(2))
    fast, infers = compiled(model, "delayed"), compiled(other, "delayed")
    x = torch.randn(4, 64, WIDTH, device="cuda", dtype=BF16, requires_grad=True)
    for _ in range(CALLS):
        with torch.no_grad():
            infers(x)
        fast(x).float().square().mean().backward()
    states = {len(each.states): bool(each.lacking) for each in met}
    assert states == {2: True, 5: False}, "two linears' states, those that trained both ways and with the token"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fast(x).float().square().mean().backward()
        torch.cuda.synchronize()
    assert not any("measure" in each.key for each in profile.key_averages())
