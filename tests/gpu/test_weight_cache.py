"""Kept FP8 copies of weights on a GPU: found, checked without a host sync, made anew in place, and captured."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_compile import backend, weight_cache
from te_compile.kernels.weight_refresh import TritonRefresher
from te_compile.ops.quantize import padded
from te_compile.ops.weight_refresh import Layout, fingerprint_reference
from te_compile.ops.weights import Outputs, copies_of, quantize_weights_reference
from te_compile.recipe import ScaleRule
from te_compile.state_files import state_dict
from tests.compiling import compiled, cosine, gradients, relative_error, train_step
from tests.needs import FP8_GPU
from tests.weight_changes import addresses_of_copies

pytestmark = [
    *FP8_GPU,
    pytest.mark.usefixtures("fresh_dynamo"),
]

E4M3 = torch.float8_e4m3fn
D = 256


class Chain(nn.Module):
    """Three linears in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, 2 * D), nn.Linear(2 * D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def on_gpu() -> Chain:
    return Chain().to("cuda", torch.bfloat16)


def data(rows: int = 64) -> Tensor:
    return torch.randn(rows, D, device="cuda", dtype=torch.bfloat16)


def fast_on_gpu(model: nn.Module, **options: Any) -> Any:
    return compiled(model, **{"cost_model": False, **options})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever copies are made from nothing."""
    counted: list[int] = []
    for name in ("_quantized", "_quantized_again"):
        original = getattr(weight_cache.CopiesOfGroup, name)

        def quantized(*args: Any, original: Any = original) -> Any:
            counted.append(1)
            return original(*args)

        monkeypatch.setattr(weight_cache.CopiesOfGroup, name, quantized)
    return counted


def step(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
    model.zero_grad()


def edit_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.b.weight.mul_(-2)


def edit_data(model: nn.Module) -> None:
    """Not so much that the weight outgrows its scale, and is cast by another one than it would be on each call."""
    model.b.weight.data.add_(torch.randn_like(model.b.weight), alpha=0.005)


def new_data(model: nn.Module) -> None:
    model.b.weight.data = torch.randn_like(model.b.weight)


SEEN_BY_THE_HOST: tuple[Callable[[nn.Module], None], ...] = (step, edit_in_place, new_data)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_every_change_is_seen_by_the_next_call(recipe: str, compiler: str, launches: list[int]) -> None:
    model, x = on_gpu(), data()
    fast = fast_on_gpu(model, recipe=recipe, compiler=compiler)
    plain = fast_on_gpu(model, recipe=recipe, compiler=compiler, cache_weights=False)
    train_step(model, plain, x)
    with torch.no_grad():
        for change in (edit_data, edit_data, *SEEN_BY_THE_HOST):
            got = fast(x)
            launches.clear()
            assert torch.equal(fast(x), got) and not launches
            change(model)
            now = fast(x)
            assert len(launches) == (change in SEEN_BY_THE_HOST)
            assert torch.equal(now, plain(x)) and not torch.equal(now, got), change.__name__


def test_a_hit_asks_the_host_nothing() -> None:
    model, x = on_gpu(), data()
    fast = fast_on_gpu(model)
    with torch.no_grad():
        fast(x), fast(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            fast(x)
            edit_data(model)
            fast(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_micro_batches_share_one_launch(launches: list[int]) -> None:
    model, x = on_gpu(), data()
    fast = fast_on_gpu(model)
    counts = []
    for micro_batches in (1, 3, 3, 1, 1):
        launches.clear()
        for _ in range(micro_batches):
            fast(x).square().mean().backward()
        step(model)
        counts.append(len(launches))
    assert counts == [1, 2, 1, 1, 1]


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_copies_that_each_step_makes_anew_are_replayed_and_the_same(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Outputs, Outputs]] = []
    records: list[weight_cache._Record] = []
    original = weight_cache.CopiesOfGroup._quantized

    def quantized(copies: Any, make: Any, weights: Any, rows: Any) -> tuple[Outputs, Any]:
        outputs, scales = original(copies, make, weights, rows)
        again, scales_again = original(copies, copies_of, weights, rows)
        made.append((outputs, again))
        assert recipe == "current" or torch.equal(scales, scales_again)
        records[:] = copies.records.values()
        return outputs, scales

    monkeypatch.setattr(weight_cache.CopiesOfGroup, "_quantized", quantized)
    model = on_gpu()
    fast = fast_on_gpu(model, recipe=recipe)
    for _ in range(8):
        train_step(model, fast, data())
        step(model)
    both = [(a.view(torch.uint8), b.view(torch.uint8)) for pair in made for a, b in zip(*pair, strict=True)]
    assert len(made) == 8 and all(torch.equal(a, b) for a, b in both)
    assert len(records) == 1 and records[0].make.bound  # type: ignore[attr-defined]  # it is a place


def test_a_plain_training_needs_no_more_memory_between_steps() -> None:
    held = []
    for cache_weights in (False, True):
        torch._dynamo.reset()
        gc.collect()  # of the model before
        before = torch.cuda.memory_allocated()
        torch.manual_seed(5)
        model, x = on_gpu(), data()
        fast = fast_on_gpu(model, cache_weights=cache_weights)
        for _ in range(3):
            fast(x).square().mean().backward()
            model.zero_grad()
            edit_in_place(model)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        del fast, model, x
    copies = 2 * (2 * D * D * 2 + 4 * D * D)
    assert held[1] - held[0] < copies / 4


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_training_is_the_same_to_the_bit_with_and_without_cache(recipe: str) -> None:
    models = [on_gpu()]
    models.append(copy.deepcopy(models[0]))
    batches = [2.0**i * data() for i in range(4)]
    results = []
    for model, cache_weights in zip(models, (True, False), strict=True):
        torch._dynamo.reset()
        fast = fast_on_gpu(model, recipe=recipe, cache_weights=cache_weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found = []
        for batch in batches:
            y, got = train_step(model, fast, batch)
            found += [y, *got.values()]
            optimizer.step()
            with torch.no_grad():
                found += [fast(batch), fast(-batch)]
        results.append([*found, *state_dict(model).values()])
    assert all(map(torch.equal, *results))


def test_another_stream_does_not_read_copies_that_are_still_being_made(launches: list[int]) -> None:
    model, x = on_gpu(), data()
    fast = fast_on_gpu(model)
    with torch.no_grad():
        fast(x)
        expected = fast(x)
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        launches.clear()
        with torch.cuda.stream(other):
            got = fast(x)
        torch.cuda.synchronize()
    assert len(launches) == 1 and torch.equal(got, expected)


# --- CUDA graphs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_replays_of_inductors_cuda_graphs_read_copies_that_are_made_anew_in_place(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Copies of a weight that does not change keep their scale; under delayed scaling those made anew have another one.
    changes = [step, edit_in_place, edit_data, *([lambda _: None] if recipe == "current" else [])]
    addresses = addresses_of_copies(monkeypatch)
    plain = on_gpu()
    graphed = copy.deepcopy(plain)
    x = data()
    results: list[list[tuple[Tensor, dict[str, Tensor]]]] = []
    for model, options in ((plain, {"cache_weights": False}), (graphed, {"mode": "reduce-overhead"})):
        torch._dynamo.reset()
        fast = fast_on_gpu(model, compiler="inductor", recipe=recipe, **options)
        torch.manual_seed(3)
        found = []
        for i in range(8):
            torch.compiler.cudagraph_mark_step_begin()
            y, got = train_step(model, fast, x)
            found.append((y.clone(), got))
            changes[i % len(changes)](model)
        results.append(found)
    for i, ((y, got), (expected, expected_gradients)) in enumerate(zip(results[1], results[0], strict=True)):
        assert relative_error(y, expected) < 2e-2, i
        assert all(cosine(got[name], gradient) > 0.99 for name, gradient in expected_gradients.items()), i
    assert len(addresses) == 8 and all(each == addresses[0] for each in addresses)


def test_decoding_with_cuda_graphs_follows_the_weights() -> None:
    model, x = on_gpu(), data(8)
    fast = fast_on_gpu(model, compiler="inductor", mode="reduce-overhead")
    plain = fast_on_gpu(model, compiler="inductor", cache_weights=False)
    with torch.no_grad():
        for change in (lambda _: None, lambda _: None, edit_in_place, edit_data, step, lambda _: None):
            change(model)
            torch.compiler.cudagraph_mark_step_begin()
            assert relative_error(fast(x).clone(), plain(x)) < 1e-2


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_backward_that_comes_too_late_is_refused_where_copies_change_in_place(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "captures_cuda_graphs", lambda options: True)
    model, x = on_gpu(), data()
    fast = fast_on_gpu(model, compiler=compiler)
    late = fast(x)
    step(model)
    fast(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.square().mean().backward()


def test_a_late_backward_reads_its_own_copies_where_they_do_not() -> None:
    model, x = on_gpu(), data()
    fast = fast_on_gpu(model, recipe="current")
    for _ in range(2):
        model.zero_grad()
        fast(x).square().mean().backward()
        expected = gradients(model)
        model.zero_grad()
        late = fast(x)
        edit_in_place(model)
        fast(2 * x)
        late.square().mean().backward()
        assert all(torch.equal(gradients(model)[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_graph_that_the_user_captures_quantises_on_each_replay(recipe: str) -> None:
    model, x = on_gpu(), data()
    fast = fast_on_gpu(model, recipe=recipe, compiler="inductor")
    plain = fast_on_gpu(model, recipe=recipe, compiler="inductor", cache_weights=False)
    train_step(model, plain, x)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                fast(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fast(x)
        for change in (lambda _: None, edit_data, edit_in_place, step):
            change(model)
            graph.replay()
            assert torch.equal(captured, plain(x))
            assert torch.equal(fast(x), plain(x)), "a call between replays"


# --- the kernels at full size --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scaled", [True, False], ids=["delayed", "current"])
def test_copies_of_large_weights_follow_them(dtype: torch.dtype, scaled: bool) -> None:
    shapes = [(4096, 4096), (4096, 11008), (50257, 1024), (37, 50), (16, 16)]
    weights = [torch.randn(shape, device="cuda", dtype=dtype) / (i + 1) for i, shape in enumerate(shapes)]
    copies = tuple((padded(rows), padded(columns)) for rows, columns in shapes)
    everywhere = (True,) * len(weights)
    offsets, numbers = (0,) * len(weights), tuple(range(len(weights)))
    layout = Layout(numbers, offsets, tuple(shapes), copies, everywhere, everywhere, E4M3, ScaleRule())
    rows = [torch.rand(1, 18, device="cuda") * 100 + 1 for _ in weights] if scaled else None

    def quantized() -> Outputs:
        scales = None if rows is None else torch.cat([row[:, 0] for row in rows])
        flags = list(everywhere), list(everywhere)
        return quantize_weights_reference(layout.padded(weights), scales, E4M3, *flags, ScaleRule())

    def same(some: Outputs, others: Outputs) -> bool:
        pairs = zip(some, others, strict=True)
        return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)

    outputs = quantized()
    refresher = TritonRefresher(layout, outputs, rows, weights)
    numbers_of = refresher.fingerprints.to(torch.int64) & 0xFFFFFFFF
    assert torch.equal(numbers_of, fingerprint_reference(layout.matrices(weights)))
    before = tuple(output.clone() for output in outputs)
    refresher(weights, True, False)
    assert same(outputs, before)
    for _ in range(3):
        random.choice(weights).mul_(-0.5)
        refresher(weights, True, False)
        assert same(outputs, quantized())
    for output in outputs:
        output.view(torch.uint8).fill_(0)
    refresher(weights, True, False, force=True)
    assert same(outputs, quantized())
