"""FP8 copies of weights are made once for each change of the weights, and no call ever reads old ones."""

from __future__ import annotations

import copy
import dataclasses
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from te_compile import backend, explain, refresh_weights, weight_cache
from te_compile.ops import registry, weight_refresh
from te_compile.ops.scaling import SCALE
from te_compile.ops.weight_refresh import line_places
from te_compile.passes import manager
from te_compile.state_files import load_state_dict, state_dict
from tests.backend.models import Chain, Mlp
from tests.compiling import compiled, gradients, te_nodes, train_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

RECIPES = pytest.mark.parametrize("recipe", ["delayed", "current"])


class Launches:
    """Counts the launches that quantise weights, and knows what they made as long as somebody keeps it."""

    def __init__(self) -> None:
        self.count = 0
        self.made: list[weakref.ref[Tensor]] = []

    def since(self) -> int:
        """How many there were since this was asked last."""
        count, self.count = self.count, 0
        return count

    def alive(self) -> int:
        """How many of the tensors that were made are kept by anybody."""
        gc.collect()
        return sum(made() is not None for made in self.made)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    counted = Launches()
    key = ("quantize_weights", registry.REFERENCE)
    original = registry._TABLE[key]

    def quantize(*args: Any) -> Any:
        counted.count += 1
        outputs = original.function(*args)
        counted.made += map(weakref.ref, outputs)
        return outputs

    monkeypatch.setitem(registry._TABLE, key, dataclasses.replace(original, function=quantize))
    return counted


def data() -> Tensor:
    return torch.randn(random.randrange(3, 20), 32)


def backward(y: Tensor) -> None:
    y.square().mean().backward()


def step_of(model: nn.Module, kind: str) -> None:
    """One step of an optimizer on random gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    settings: dict[str, dict[str, Any]] = {
        "SGD": {},
        "Adam": {"foreach": False},
        "Adam, foreach": {"foreach": True},
        "Adam, fused": {"fused": True},
    }
    kind_of = torch.optim.SGD if kind == "SGD" else torch.optim.Adam
    kind_of(model.parameters(), lr=0.1, **settings[kind]).step()
    model.zero_grad()


# --- what is a change ----------------------------------------------------------------------------------------------


def edit_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.b.weight.mul_(-2)


def load(model: nn.Module, **options: Any) -> None:
    model.load_state_dict({name: torch.randn_like(entry) for name, entry in model.state_dict().items()}, **options)


def edit_data(model: nn.Module) -> None:
    version = model.b.weight._version
    model.b.weight.data.add_(torch.randn_like(model.b.weight), alpha=0.02)  # not so much that it outgrows its scale
    assert model.b.weight._version == version, "autograd sees this change: the test is about nothing"


def new_data(model: nn.Module) -> None:
    model.b.weight.data = torch.randn_like(model.b.weight)


def new_parameter(model: nn.Module) -> None:
    model.b.weight = nn.Parameter(torch.randn_like(model.b.weight))


def optimizer_behind_autograds_back(model: nn.Module) -> None:
    """As those do that keep parameters in one flat buffer."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data - 0.01 * torch.randn_like(parameter))


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    **{kind: lambda model, kind=kind: step_of(model, kind) for kind in ("SGD", "Adam", "Adam, foreach", "Adam, fused")},
    "an edit in place": edit_in_place,
    "load_state_dict": load,
    "load_state_dict(assign=True)": lambda model: load(model, assign=True),
    "an edit of .data": edit_data,
    "a new .data": new_data,
    "a new parameter": new_parameter,
    "every parameter by .data": optimizer_behind_autograds_back,
}


@RECIPES
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen_by_the_next_call(change: str, recipe: str, launches: Launches) -> None:
    """To the bit what a graph computes that quantises its weights on each call. The FP8 state is the same one."""
    model, x = Chain(), data()
    fast, plain = compiled(model, recipe=recipe), compiled(model, recipe=recipe, cache_weights=False)
    train_step(model, plain, x)
    with torch.no_grad():
        assert torch.equal(fast(x), plain(x))
        launches.since()
        before = fast(x)
        assert torch.equal(fast(x), before) and launches.since() == 0
        CHANGES[change](model)
        got = fast(x)
        assert launches.since() == 1
        assert torch.equal(got, plain(x)) and not torch.equal(got, before)
        launches.since()
        assert torch.equal(fast(x), got) and launches.since() == 0


BEHIND_AUTOGRADS_BACK = ("an edit of .data", "every parameter by .data")


@pytest.mark.parametrize("change", CHANGES)
def test_two_checks_watch_and_each_sees_its_own(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the samples blind, what autograd and addresses show is still seen, and what they do not show is not."""
    monkeypatch.setattr(weight_refresh, "fingerprint_reference", lambda matrices: torch.zeros(1))
    model, x = Chain(), data()
    fast, plain = compiled(model), compiled(model, cache_weights=False)
    with torch.no_grad():
        fast(x)
        CHANGES[change](model)
        assert torch.equal(fast(x), plain(x)) is (change not in BEHIND_AUTOGRADS_BACK)


def test_a_few_elements_changed_behind_autograds_back_are_seen_after_a_word(launches: Launches) -> None:
    """The limit of looking at samples, and the way out."""
    model, x = Chain(64), torch.randn(5, 64)
    fast = compiled(model)
    with torch.no_grad():
        before = fast(x)
        looked_at = {int(place) + i for place in line_places((64 * 64,) * 3, 4)[0] for i in range(32)}
        hidden = random.choice([i for i in range(64 * 64) if i not in looked_at])
        model.a.weight.data.view(-1)[hidden] = 1e3
        assert torch.equal(fast(x), before)
        refresh_weights(model)
        launches.since()
        assert not torch.equal(fast(x), before) and launches.since() == 1


def test_loaded_fp8_state_is_used_from_the_next_call_on(launches: Launches) -> None:
    model, x = Chain(), data()
    fast = compiled(model)
    train_step(model, fast, x)
    saved = {name: entry.clone() for name, entry in state_dict(model).items()}
    with torch.no_grad():
        fast(x)
        for entry in saved.values():
            entry[:, 0] *= 0.37
        load_state_dict(model, saved)
        launches.since()
        got = fast(x)
        assert launches.since() == 1
        assert torch.equal(got, compiled(model, cache_weights=False)(x))


# --- when copies are kept ------------------------------------------------------------------------------------------


@RECIPES
@pytest.mark.parametrize("optimizer", ["SGD", "Adam, foreach", "Adam, fused"])
def test_micro_batches_share_one_launch_and_a_plain_training_makes_one_a_step(
    optimizer: str, recipe: str, launches: Launches
) -> None:
    """Fused optimizers leave autograd's version as it is."""
    model, x = Chain(), data()
    fast = compiled(model, recipe=recipe)
    counts = []
    for micro_batches in (1, 1, 3, 3, 3, 1, 1):
        for _ in range(micro_batches):
            backward(fast(x))
        step_of(model, optimizer)
        counts.append(launches.since())
    assert counts == [1, 1, 2, 1, 1, 1, 1]


def test_a_plain_training_holds_no_copy_between_its_steps(launches: Launches) -> None:
    model = Chain()
    fast = compiled(model)
    for kind in ("SGD", "Adam, fused", "Adam, fused", "Adam"):
        y = fast(data())
        assert launches.alive() > 0, "what backward needs"
        backward(y)
        del y
        assert launches.alive() == 0
        step_of(model, kind)


def test_old_copies_go_before_new_ones_come(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Chain(), data()
    fast = compiled(model)
    alive = []
    quantize = weight_cache.CopiesOfGroup._quantized

    def watched(*args: Any) -> Any:
        alive.append(launches.alive())
        return quantize(*args)

    monkeypatch.setattr(weight_cache.CopiesOfGroup, "_quantized", watched)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
            edit_in_place(model)
    assert alive == [0, 0, 0]


def test_a_model_that_dies_takes_its_copies_along(launches: Launches) -> None:
    model = Chain()
    fast = compiled(model)
    with torch.no_grad():
        fast(data())
    assert launches.alive() > 0
    del model, fast
    assert launches.alive() == 0


def test_training_frees_the_copies_that_an_evaluation_kept(launches: Launches) -> None:
    model, x = Chain(), data()
    fast = compiled(model)
    with torch.no_grad():
        fast(x)
    assert launches.alive() > 0
    step_of(model, "SGD")
    backward(fast(x))
    assert launches.alive() == 0


def test_frozen_weights_are_quantised_once_for_all_steps(launches: Launches) -> None:
    model, x = Chain(), data()
    model.b.requires_grad_(False)
    fast = compiled(model)
    with manager.recording() as records:
        for _ in range(3):
            backward(fast(x))
            step_of(nn.ModuleList([model.a, model.c]), "SGD")
    assert launches.since() == 3 + 1
    trained, frozen = sorted((len(group.weights) for group in records[0].plan.groups), reverse=True)
    assert (trained, frozen) == (2, 1)


def test_frozen_weights_that_grow_a_little_are_cast_by_the_scale_of_their_history(launches: Launches) -> None:
    """Which costs no second launch."""
    model, x = nn.Linear(32, 48).requires_grad_(False), data().requires_grad_()
    fast = compiled(model)
    backward(fast(x))
    launches.since()
    scale = state_dict(model)["weight.forward"][1, SCALE].item()
    with torch.no_grad():
        model.weight.mul_(1.02)
    backward(fast(x))
    [kept] = [record.known[1] for record in weight_cache._shared.values() if record.ids == [id(model.weight)]][-1:]
    assert launches.since() == 1 and kept is not None
    assert kept.outputs[3].unique().tolist() == [pytest.approx(1 / scale)]


def test_graphs_that_want_the_same_of_a_model_share_its_copies(launches: Launches) -> None:
    """Two for two lengths, as those of prefill and decode."""
    model, x = Chain(), data()
    fast = torch.compile(model, backend="te_fp8", dynamic=False, options={"compiler": "aot_eager"})
    with torch.no_grad(), manager.recording() as records:
        for _ in range(2):
            fast(x)
            fast(torch.cat([x, x]))
    assert len(records) == 2 and launches.since() == 1
    edit_in_place(model)
    with torch.no_grad():
        fast(torch.cat([x, x]))
        fast(x)
    assert launches.since() == 1


def test_blocks_that_share_code_have_copies_of_their_own(launches: Launches) -> None:
    model = nn.ModuleList([Chain() for _ in range(3)])
    for block in model:
        block.compile(backend="te_fp8", options={"compiler": "aot_eager"})
    x = data()
    with torch.no_grad():
        first = [block(x) for block in model]
        launches.since()
        assert all(map(torch.equal, [block(x) for block in model], first)) and launches.since() == 0
        edit_in_place(model[1])
        again = [block(x) for block in model]
    assert launches.since() == 1
    assert [torch.equal(*each) for each in zip(first, again, strict=True)] == [True, False, True]


# --- the numbers of a training -------------------------------------------------------------------------------------


def trained(model: nn.Module, batches: list[Tensor], **options: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Five steps of Adam with an evaluation in between: all results, and the FP8 state."""
    torch._dynamo.reset()
    fast = compiled(model, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    results = []
    for batch in batches:
        y = fast(batch)
        backward(y)
        results += [y.detach(), *gradients(model).values()]
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            results += [fast(batch), fast(2 * batch)]
        model.train()
    return results, state_dict(model)


@RECIPES
def test_a_training_is_the_same_to_the_bit_with_and_without_cache(recipe: str) -> None:
    model = Mlp()
    other, batches = copy.deepcopy(model), [2.0**i * data() for i in range(5)]
    got, got_state = trained(model, batches, recipe=recipe)
    expected, expected_state = trained(other, batches, recipe=recipe, cache_weights=False)
    assert all(map(torch.equal, got, expected))
    assert got_state.keys() == expected_state.keys()
    assert all(torch.equal(got_state[name], entry) for name, entry in expected_state.items())


def test_two_forwards_before_two_backwards(launches: Launches) -> None:
    model, x, z = Chain(), data(), data()
    other = copy.deepcopy(model)
    for each, options in ((model, {}), (other, {"cache_weights": False})):
        torch._dynamo.reset()
        fast = compiled(each, recipe="current", **options)
        for _ in range(2):
            first, second = fast(x), fast(z)
            backward(first)
            backward(second)
    assert all(torch.equal(gradients(model)[name], gradient) for name, gradient in gradients(other).items())


def test_a_backward_reads_the_copies_of_its_own_forward() -> None:
    """Also where the weights have changed since, which eager mode refuses. Twice, so that copies are being kept."""
    model, x, z = Chain(), data(), data()
    fast = compiled(model, recipe="current")
    for change in (edit_in_place, edit_in_place, CHANGES["Adam, fused"]):
        model.zero_grad()
        backward(fast(x))
        expected = gradients(model)
        late = fast(x)
        change(model)
        model.zero_grad()
        fast(z)
        backward(late)
        assert all(torch.equal(gradients(model)[name], gradient) for name, gradient in expected.items())


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Inductor captured CUDA graphs."""
    monkeypatch.setattr(backend, "captures_cuda_graphs", lambda options: True)


def test_for_cuda_graphs_copies_stay_where_they_are(
    in_place: None, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = []
    original = weight_cache.CopiesOfGroup.inputs

    def watched(*args: Any) -> Any:
        inputs = original(*args)
        addresses.append([each.data_ptr() for each in inputs])
        return inputs

    monkeypatch.setattr(weight_cache.CopiesOfGroup, "inputs", watched)
    model, x = Mlp(), data()
    other = copy.deepcopy(model)
    got, got_state = [], []
    for each, options in ((model, {}), (other, {"cache_weights": False})):
        torch._dynamo.reset()
        fast = compiled(each, **options)
        results = []
        for change in (edit_up, edit_up_data, lambda m: step_of(m, "SGD"), new_up):
            y, grads = train_step(each, fast, x)
            results += [y, *grads.values()]
            torch.manual_seed(7)
            change(each)
        got.append(results)
        got_state.append(state_dict(each))
    assert all(map(torch.equal, *got))
    assert all(torch.equal(got_state[0][name], entry) for name, entry in got_state[1].items())
    assert len(addresses) == 4 and all(each == addresses[0] for each in addresses)


def edit_up(model: nn.Module) -> None:
    with torch.no_grad():
        model.up.weight.mul_(-1.5)


def edit_up_data(model: nn.Module) -> None:
    model.up.weight.data.add_(torch.randn_like(model.up.weight))


def new_up(model: nn.Module) -> None:
    model.up.weight.data = torch.randn_like(model.up.weight)


def test_for_cuda_graphs_a_backward_that_comes_too_late_is_refused(in_place: None) -> None:
    model, x = Chain(), data()
    fast = compiled(model)
    late = fast(x)
    step_of(model, "SGD")
    fast(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(late)


# --- which weights -------------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """Weights that are parts of one parameter, an expression of one, and odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randn(96, 32) / 6)
        self.around_one = nn.Parameter(torch.randn(32, 32) / 6)
        self.odd = nn.Linear(32, 37)
        self.odd_again = nn.Linear(37, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, part) for part in self.packed.chunk(3))
        return self.odd_again(self.odd(F.linear(q.sin() * k.cos() + v, 1 + self.around_one))) @ self.packed[:32]


@RECIPES
def test_parts_of_parameters_are_kept_and_expressions_are_not(recipe: str, launches: Launches) -> None:
    model, x = Packed(), data()
    fast, plain = compiled(model, recipe=recipe), compiled(model, recipe=recipe, cache_weights=False)
    with manager.recording() as records:
        train_step(model, fast, x)
    (group,) = records[0].plan.groups
    assert len(group.weights) == 3 and len(group.layout.shapes) == 6
    assert len(te_nodes(records[0], "quantize_weights")) == 1
    with torch.no_grad():
        for change in (lambda: model.packed.mul_(-1.5), lambda: model.odd.weight.data.neg_(), lambda: None):
            assert torch.equal(fast(x), plain(x))
            change()
        launches.since()
        assert torch.equal(fast(x), plain(x))
        assert launches.since() == 1, "the expression"


def test_without_the_option_nothing_is_quantised_for_all(launches: Launches) -> None:
    model = Chain()
    fast = compiled(model, cache_weights=False)
    with torch.no_grad(), manager.recording() as records:
        for _ in range(3):
            fast(data())
    assert not records[0].plan.groups and not te_nodes(records[0], "quantize_weights")
    assert launches.since() == 0


def test_parameters_made_in_inference_mode_are_quantised_on_each_call(launches: Launches) -> None:
    """They have no version."""
    with torch.inference_mode():
        model, x = Chain(), data()
        fast = compiled(model)
        first = fast(x)
        assert torch.equal(fast(x), first) and launches.since() == 2
        model.a.weight.view(-1)[random.randrange(32 * 32)] += 5
        assert not torch.equal(fast(x), first)


def test_copies_made_in_inference_mode_serve_a_call_outside_of_it(launches: Launches) -> None:
    model, x = Chain(), data()
    model.requires_grad_(False)
    fast = compiled(model)
    with torch.inference_mode():
        fast(x)
    edit_data(model)
    with torch.no_grad():
        got = fast(x)
        assert torch.equal(got, compiled(model, cache_weights=False)(x))


def test_a_tied_weight_is_quantised_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(48, 32)

        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.embedding(ids)), self.embedding.weight)

    model, ids = Tied(), torch.randint(0, 48, (3, 7))
    fast, plain = compiled(model, lm_head=True), compiled(model, lm_head=True, cache_weights=False)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(fast(ids), plain(ids))
            model.embedding.weight.mul_(-3)


# --- surroundings --------------------------------------------------------------------------------------------------


def test_parameters_under_fsdp_are_quantised_on_the_graph(one_rank: DeviceMesh) -> None:
    """What FSDP gathers for each use and frees behind it must not live on in FP8."""
    model = nn.ModuleList([Chain(), Chain()])
    fully_shard(model[0], mesh=one_rank)
    with manager.recording() as records:
        for block in model:
            block.compile(backend="te_fp8", options={"compiler": "aot_eager"})
            backward(block(data()))
    sharded, plain = records
    assert len(te_nodes(sharded, "quantize_weights")) == 1 and not sharded.plan.groups
    assert not te_nodes(plain, "quantize_weights") and len(plain.plan.groups) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_compiled_step_of_an_optimizer_is_a_change(fused: bool) -> None:
    model, x = Chain(), data()
    fast, plain = compiled(model), compiled(model, cache_weights=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(fast(x), plain(x))
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        step()


def test_parameters_that_are_swapped_for_a_call_have_copies_of_their_own(launches: Launches) -> None:
    model, x = Chain(), data()
    others = {name: nn.Parameter(torch.randn_like(p)) for name, p in model.named_parameters()}
    fast, plain = compiled(model), compiled(model, cache_weights=False)
    with torch.no_grad():
        own = fast(x)
        for given in (others, {name: p.detach() for name, p in others.items()}):
            swapped = torch.func.functional_call(fast, given, (x,))
            assert not torch.equal(swapped, own)
            assert torch.equal(swapped, torch.func.functional_call(plain, given, (x,)))
            assert torch.equal(fast(x), own)


def test_a_checkpointed_training_reads_the_copies_that_the_root_was_given() -> None:
    class Recomputed(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    model, batches = Recomputed(), [2.0**i * data() for i in range(4)]
    other = copy.deepcopy(model)
    got, _ = trained(model, batches)
    expected, _ = trained(other, batches, cache_weights=False)
    assert all(map(torch.equal, got, expected))


def test_a_report_says_what_quantises_the_weights() -> None:
    report = explain(Chain(), data())
    assert report.implementations["te::quantize_weights"] == {"reference": 1}
    report = explain(Chain(), data(), options={"cache_weights": False})
    assert "te::quantize_weights" not in report.implementations
    assert report.implementations["te::quantize"]["reference"] >= 2 * 3 - 1, "the first dgrad is wanted by nobody"


def test_what_another_thread_adds_to_while_it_is_listed_is_listed_again() -> None:
    """As an optimizer's step lists what there is of all models, while another thread makes a first call."""
    alive = [Mlp() for _ in range(3)]
    entries = weakref.WeakValueDictionary(enumerate(alive))

    def values() -> Any:
        for place, value in enumerate(entries.values()):
            if place == 1 and len(alive) == 3:
                alive.append(Mlp())
                entries[3] = alive[3]
            yield value

    assert set(weight_cache._listed(values)) == set(alive) and len(alive) == 4
    with pytest.raises(RuntimeError, match="another"):
        weight_cache._listed(lambda: (_ for _ in ()).throw(RuntimeError("another fault")))
