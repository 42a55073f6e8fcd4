"""FP8 copies of weights are made once for each change of the weights, and kept no longer than somebody reads them.

Of a parameter's parts as of whole ones; not of expressions, of parameters that have no version, or under FSDP.
"""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from te_compile import explain, weight_cache
from te_compile.ops.scaling import SCALE
from te_compile.passes import manager
from te_compile.state_files import state_dict
from tests.backend.models import Chain, Mlp
from tests.compiling import compiled, te_nodes, train_step
from tests.weight_changes import Launches, Packed, backward, data, edit_data, edit_in_place, step_of
from tests.weight_changes import launches as launches

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

RECIPES = pytest.mark.parametrize("recipe", ["delayed", "current"])


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
