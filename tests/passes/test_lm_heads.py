"""Heads are known by their names, weights, losses and results, and what only looks like one is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_compile.ops import registry
from te_compile.options import Options
from te_compile.passes.find_linears import find_linears
from te_compile.passes.lower_losses import lower_losses
from te_compile.passes.plan import Cause, Plan
from te_compile.passes.regions import regions_of
from te_compile.passes.select import select_linears
from tests.capturing import captured
from tests.selecting import Named, planned, verdict

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Calls(nn.Module):
    """The linear ``block.output``."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block.output(x)


@pytest.mark.parametrize(
    "name", ["lm_head", "score", "classifier", "embed_out", "to_logits", "unembed", "output", "head_dist", "mlp_head"]
)
def test_a_head_by_its_name_stays_in_high_precision_unless_asked_for(name: str) -> None:
    model, x = Named(**{name: (32, 48)}), torch.randn(5, 32)
    site = verdict(model, x)
    assert site.cause is Cause.RULE and "logits" in site.reason and "lm_head=True" in site.reason
    assert verdict(model, x, lm_head=True).status == "fp8"


class Blocks(nn.Module):
    """Two blocks whose last linears have the name of a head, and a head."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.blocks = name, nn.ModuleList(nn.ModuleDict({name: nn.Linear(32, 32)}) for _ in range(2))
        self.add_module(name, nn.Linear(32, 48))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(x) * block[self.name](x)
        return getattr(self, self.name)(F.layer_norm(x, (32,)))


@pytest.mark.parametrize("name", ["proj_out", "output_projection", "head"])
def test_what_is_called_a_head_within_a_block_is_none(name: str) -> None:
    plan = planned(Blocks(name), torch.randn(5, 32))
    assert {site.name: site.status for site in plan.sites} == {
        f"blocks.0.{name}": "fp8", f"blocks.1.{name}": "fp8", name: "kept",
    }  # fmt: skip
    block = nn.ModuleDict({"proj_out": nn.Linear(32, 32)})  # compiled by itself: nothing in the graph comes after
    assert verdict(lambda x: x + block["proj_out"](x), torch.randn(5, 32)).status == "fp8"


@pytest.mark.parametrize(("out_features", "status"), [(16, "fp8"), (64, "fp8"), (128, "kept")])
def test_what_makes_patches_of_features_is_no_head_though_it_is_called_like_one(out_features: int, status: str) -> None:
    model = nn.ModuleDict({"proj_out": nn.Linear(64, out_features)})
    site = verdict(lambda x: model["proj_out"](x).unflatten(-1, (4, -1)), torch.randn(5, 64))
    assert site.status == status and site.name.endswith("proj_out")


def test_a_head_whose_chances_are_read_by_a_linear_is_one() -> None:
    model, back = Named(head=(32, 48)), nn.Linear(48, 32)
    plan = planned(lambda x: (x + back(model(x)[0].softmax(-1))).cos(), torch.randn(5, 32))
    assert [site.status for site in plan.sites] == ["kept", "fp8"]


def test_the_output_of_a_part_of_the_model_is_no_head() -> None:
    block = nn.Module()
    block.output = nn.Linear(32, 48)
    assert verdict(nn.Sequential(Calls(block)), torch.randn(5, 32)).status == "fp8"


@pytest.mark.parametrize("loss", [F.cross_entropy, torch.ops.aten.cross_entropy_loss.default, torch.ops.aten.nll_loss])
def test_a_head_by_the_loss_that_reads_it(loss: Callable[..., Tensor]) -> None:
    fc = nn.Linear(32, 48)

    def run(x: Tensor, target: Tensor) -> Tensor:
        return loss(fc(x).float().view(-1, 48), target)

    site = verdict(run, torch.randn(2, 5, 32), torch.randint(0, 48, (10,)))
    assert site.cause is Cause.RULE and "loss" in site.reason


CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "capped": lambda logits: 30.0 * torch.tanh(logits / 30.0),
    "in place": lambda logits: logits.mul_(0.5),
    "by a learned scale": lambda logits: logits * torch.ones(()).exp(),
    "with a bias": lambda logits: logits + torch.zeros(48),
    "without some": lambda logits: logits.masked_fill(torch.arange(48) > 40, float("-inf")),
    "wider": lambda logits: logits.double(),
    "turned twice": lambda logits: logits.T.mT,
    "turned and back": lambda logits: logits.swapaxes(0, 1).swapdims(0, 1),
    "in two parts": lambda logits: torch.cat(logits.chunk(2)),
    "in parts": lambda logits: torch.cat([part.float() for part in logits.split(5)]),
    "row by row": lambda logits: torch.stack(logits.unbind()),
    "some rows": lambda logits: logits.narrow(0, 0, 10),
    "rows by number": lambda logits: logits.index_select(0, torch.arange(10)),
}


@pytest.mark.parametrize("how", CHANGED)
def test_a_head_whose_logits_are_changed_before_the_loss(how: str) -> None:
    fc = nn.Linear(32, 48)

    def run(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(CHANGED[how](fc(x)), target)

    site = verdict(run, torch.randn(10, 32), torch.randint(0, 48, (10,)))
    assert site.cause is Cause.RULE and "loss" in site.reason


def test_a_head_by_the_logarithm_of_its_softmax() -> None:
    fc = nn.Linear(32, 48)

    def run(x: Tensor, target: Tensor) -> Tensor:
        return -fc(x).softmax(-1).gather(-1, target[:, None]).log().mean()

    site = verdict(run, torch.randn(10, 32), torch.randint(0, 48, (10,)))
    assert site.cause is Cause.RULE and "loss" in site.reason
    assert verdict(lambda x: fc(x).exp().log1p(), torch.randn(10, 32)).status == "fp8"


def test_logits_of_a_picture_in_another_size_are_logits() -> None:
    parts = nn.ModuleDict({"classifier": nn.Sequential(nn.Conv2d(32, 32, 1), nn.ReLU(), nn.Conv2d(32, 48, 1))})

    def run(x: Tensor) -> Tensor:
        return F.interpolate(parts["classifier"](x), scale_factor=2, mode="bilinear")

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(run(x), target)

    pictures, target = torch.randn(2, 32, 4, 4), torch.zeros(2, 8, 8, dtype=torch.long)
    for sites in (planned(run, pictures).sites, planned(loss, pictures, target).sites):
        assert [site.status for site in sites] == ["fp8", "kept"] and "projection to logits" in sites[1].reason


@pytest.mark.parametrize("loss", [
    lambda student, chances: F.kl_div(F.log_softmax(student / 2, dim=-1), chances, reduction="batchmean"),
    lambda student, chances: F.kl_div(F.log_softmax(student, dim=-1), target=chances),
    lambda student, chances: F.cross_entropy(student, chances.detach()),
])  # fmt: skip
def test_a_teachers_head_by_the_loss_that_its_chances_are_the_targets_of(loss: Callable[..., Tensor]) -> None:
    student, teacher = nn.Linear(32, 48), nn.Linear(32, 48)

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            chances = F.softmax(teacher(x) / 2, dim=-1)
        return loss(student(x), chances)

    sites = planned(run, torch.randn(10, 32)).sites
    assert [site.cause for site in sites] == [Cause.RULE, Cause.RULE]
    assert all("goes into the loss" in site.reason for site in sites)


def test_a_head_by_the_loss_that_is_spelled_out() -> None:
    fc = nn.Linear(32, 48)

    def run(x: Tensor, target: Tensor) -> Tensor:
        logits = fc(x)
        return (logits.logsumexp(-1) - logits.gather(-1, target[:, None])[:, 0]).mean()

    site = verdict(run, torch.randn(10, 32), torch.randint(0, 48, (10,)))
    assert site.cause is Cause.RULE and "loss" in site.reason


def test_a_head_by_the_loss_that_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator of ours stands in the place of that loss by then."""
    fc = nn.Linear(32, 1024)
    gm, examples = captured(
        lambda x, target: F.cross_entropy(fc(x), target), torch.randn(10, 32), torch.randint(0, 1024, (10,))
    )
    monkeypatch.setattr(registry, "choose", lambda operator, target, arguments: ("triton", []))
    assert lower_losses(gm.graph) == 1
    regions, left = regions_of(gm)
    plan = Plan()
    find_linears(regions, left, examples, plan)
    select_linears(plan, Options())
    (site,) = plan.sites
    assert site.cause is Cause.RULE and "loss" in site.reason


def test_what_is_added_to_a_residual_stream_is_no_head() -> None:
    a, b = nn.Linear(32, 32), nn.Linear(32, 32)

    def run(x: Tensor, target: Tensor) -> Tensor:
        x = x + a(x)
        return F.cross_entropy(x + b(x), target)

    plan = planned(run, torch.randn(10, 32), torch.randint(0, 32, (10,)))
    assert [site.status for site in plan.sites] == ["fp8", "fp8"]


class WithAdapter(nn.Module):
    """A linear and what an adapter of low rank adds to its result, twice: one is scaled, one adds in place."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(in_features, out_features)
        self.down = nn.ModuleList(nn.Linear(in_features, 16, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(16, out_features, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x) + self.up[0](self.down[0](x)) * 0.5
        result += self.up[1](self.down[1](x))
        return result


def test_a_head_with_adapters_before_a_loss_stays_with_what_they_add() -> None:
    model = nn.ModuleDict({"fc": WithAdapter(32, 32), "out": WithAdapter(32, 48)})

    def run(x: Tensor, target: Tensor) -> Tensor:
        x = x + model["fc"](F.layer_norm(x, (32,)))
        return F.cross_entropy(model["out"](F.layer_norm(x, (32,))).float(), target)

    plan = planned(run, torch.randn(10, 32), torch.randint(0, 48, (10,)))
    kept = [site for site in plan.sites if site.status == "kept"]
    assert [site.features for site in kept] == [(32, 48), (16, 48), (16, 48)]
    assert all(site.cause is Cause.RULE and "loss" in site.reason for site in kept)


def test_a_head_with_adapters_that_a_model_returns_stays_with_what_they_add() -> None:
    plan = planned(Untied(100, lm_head=WithAdapter(32, 48)), torch.randint(0, 100, (2, 5)))
    kept = {site.name for site in plan.sites if site.status == "kept"}
    assert kept == {"lm_head.base_layer", "lm_head.up.0", "lm_head.up.1"}


def test_a_head_by_the_embedding_that_shares_its_weight() -> None:
    embed, other = nn.Embedding(64, 32), nn.Linear(32, 32)

    def run(ids: Tensor) -> Tensor:
        return F.linear(torch.tanh(other(embed(ids))), embed.weight)

    plan = planned(run, torch.randint(0, 64, (2, 5)))
    assert [site.cause for site in plan.sites] == [None, Cause.RULE]
    assert "embedding" in plan.sites[1].reason


def test_an_activation_on_the_way_to_the_loss_makes_no_head() -> None:
    a, b = nn.Linear(32, 32), nn.Linear(32, 48)

    def run(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(b(torch.tanh(a(x))), target)

    plan = planned(run, torch.randn(10, 32), torch.randint(0, 48, (10,)))
    assert [site.cause for site in plan.sites] == [None, Cause.RULE]


class Untied(nn.Module):
    """Text in, and out what ``head`` makes of it: no loss in the graph, and no weight that is shared."""

    def __init__(self, words: int, **parts: nn.Module) -> None:
        super().__init__()
        self.table, self.fc, self.places = nn.Embedding(words, 32), nn.Linear(32, 32), nn.Embedding(64, 32)
        for name, part in parts.items():
            self.add_module(name, part)
        self.parts = list(parts)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.fc(self.table(ids) + self.places(torch.arange(ids.shape[1]))))
        return torch.stack([getattr(self, part)(x).float() for part in self.parts], dim=1)


def _unfinished(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), *modules)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head", "classifier", "classification_head", "segmentation_head", "lm_heads", "sop_classifier", "mlp_head",
        "linear_head", "small_mlp_head",
    ],
)  # fmt: skip
def test_of_a_head_of_several_linears_the_one_whose_result_is_returned_stays(name: str) -> None:
    plan = planned(Untied(100, **{name: _unfinished(nn.Linear(32, 48))}), torch.randint(0, 100, (2, 5)))
    assert {site.name: site.status for site in plan.sites} == {"fc": "fp8", f"{name}.0": "fp8", f"{name}.2": "kept"}
    assert plan.sites[-1].cause is Cause.RULE and f"from its {name!r}" in plan.sites[-1].reason


def test_logits_that_are_the_mean_of_several_heads_are_logits() -> None:
    heads, pictures, targets = nn.ModuleList(nn.Linear(32, 48) for _ in range(2)), torch.randn(5, 32), torch.arange(5)

    def run(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(torch.stack([head(x) for head in heads]).mean(0), target)

    for site in planned(run, pictures, targets).sites:
        assert site.cause is Cause.RULE and "goes into the loss" in site.reason
    plan = planned(nn.Sequential(Untied(100, classifier=_unfinished(nn.Linear(32, 48))), Mean(1)), targets[None])
    assert [site.status for site in plan.sites] == ["fp8", "fp8", "kept"]
    plan = planned(nn.Sequential(Untied(100, classifier=_unfinished(nn.Linear(32, 48))), Mean(-1)), targets[None])
    assert [site.status for site in plan.sites] == ["fp8", "fp8", "fp8"]


@pytest.mark.parametrize("along", [0, (1,)])
def test_logits_that_are_a_weighted_sum_of_a_stack_of_heads_are_logits(along: int | tuple[int, ...]) -> None:
    """Each of several depths may have a head, and what each counts may be learned."""
    heads = nn.ModuleDict({"heads": nn.ModuleList(nn.Linear(32, 48) for _ in range(3))})
    shares, place = torch.randn(3), along if isinstance(along, int) else along[0]

    def run(x: Tensor) -> Tensor:
        return torch.stack([shares[i] * head(x) for i, head in enumerate(heads["heads"])], place).sum(along)

    sites = planned(run, torch.randn(5, 32)).sites
    assert [site.status for site in sites] == ["kept"] * 3
    assert all("from its 'heads'" in site.reason for site in sites)
    # The sum over the classes is none of logits.
    (site,) = planned(lambda x: heads["heads"][0](x).sum(-1, keepdim=True), torch.randn(5, 32)).sites
    assert site.status == "fp8"


def test_logits_that_are_the_sum_of_two_heads_are_logits() -> None:
    a, b, target = nn.Linear(32, 32), nn.Linear(32, 32), torch.arange(5)
    plan = planned(lambda x, target: F.cross_entropy((a(x) + b(x).float()) / 2, target), torch.randn(5, 32), target)
    assert [site.cause for site in plan.sites] == [Cause.RULE, Cause.RULE]

    def residual(x: Tensor, target: Tensor) -> Tensor:
        x = a(x)
        return F.cross_entropy(x + b(x), target)

    plan = planned(residual, torch.randn(5, 32), target)
    assert [site.status for site in plan.sites] == ["fp8", "fp8"]


class Mean(nn.Module):
    """The mean along a dimension."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.dimension = dimension

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dimension)


class Batch(NamedTuple):
    """What a caller may put its inputs into."""

    ids: Tensor


@dataclass
class OtherBatch:
    """The same."""

    ids: Tensor


@pytest.mark.parametrize("kind", [Batch, OtherBatch, lambda ids: SimpleNamespace(ids=ids)])
def test_words_may_come_in_an_object(kind: Callable[[Tensor], Any]) -> None:
    class OfObjects(Untied):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch.ids)

    plan = planned(OfObjects(48, out=nn.Linear(32, 48)), kind(torch.randint(0, 48, (2, 5))))
    assert [site.status for site in plan.sites] == ["fp8", "kept"] and "vocabulary" in plan.sites[1].reason


def test_what_is_returned_as_wide_as_the_vocabulary_is_logits() -> None:
    model, ids = Untied(48, out=nn.Linear(32, 48)), torch.randint(0, 48, (2, 5))
    plan = planned(model, ids)
    assert [site.status for site in plan.sites] == ["fp8", "kept"] and "vocabulary" in plan.sites[1].reason
    assert [site.status for site in planned(model, ids, lm_head=True).sites] == ["fp8", "fp8"]


@pytest.mark.parametrize(("words", "status"), [(1030, "kept"), (1010, "kept"), (1060, "fp8"), (900, "fp8")])
def test_a_table_or_a_head_may_have_a_few_words_of_its_own(words: int, status: str) -> None:
    """As one for what is masked, which is read and never written."""
    plan = planned(Untied(words, out=nn.Linear(32, 1020)), torch.randint(0, words, (2, 5)))
    assert [site.status for site in plan.sites] == ["fp8", status]
    plan = planned(Untied(words, out=nn.Linear(32, 32), wide=nn.Linear(32, 32)), torch.randint(0, words, (2, 5)))
    assert [site.status for site in plan.sites] == ["fp8", "fp8", "fp8"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (100, {"projection": nn.Linear(32, 48)}),  # an embedding, not a word's score
        (100, {"projection": nn.Linear(32, 64)}),  # nor that of a place
        (48, {"classifier": nn.Sequential(nn.Linear(32, 48), nn.GELU())}),  # a feature: more is done with it
    ],
)
def test_what_is_returned_and_no_logits_goes_to_fp8(words: int, parts: dict[str, nn.Module]) -> None:
    plan = planned(Untied(words, **parts), torch.randint(0, words, (2, 5)))
    assert [site.status for site in plan.sites] == ["fp8", "fp8"]


class OfPictures(nn.Module):
    """A convolution, a pool, and the linear ``fc``."""

    def __init__(self, *behind: nn.Module) -> None:
        super().__init__()
        self.stem, self.pool, self.drop = nn.Conv2d(3, 32, 3), nn.AdaptiveAvgPool2d(1), nn.Dropout(0.1)
        self.fc, self.behind = nn.Linear(32, 48), nn.Sequential(*behind)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.behind(self.fc(self.drop(self.pool(self.stem(pictures)).flatten(1))))


def test_the_fc_behind_the_pool_of_a_network_for_pictures_is_a_head() -> None:
    site = verdict(OfPictures(), torch.randn(2, 3, 8, 8))
    assert site.cause is Cause.RULE and "from 'fc' behind a pool" in site.reason
    assert verdict(OfPictures(), torch.randn(2, 3, 8, 8), lm_head=True).status == "fp8"


@pytest.mark.parametrize(
    "over_all_places",
    [
        lambda x: x.mean((2, 3)), lambda x: torch.mean(x, dim=(-2, -1), keepdim=True),
        lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1), nn.AvgPool2d(6),
    ],
)  # fmt: skip
def test_the_logits_of_all_places_are_logits_as_their_mean(over_all_places: Callable[[Tensor], Tensor]) -> None:
    """A classifier may be a convolution, its pool behind it."""
    stem, classifier = nn.Conv2d(3, 32, 3), nn.Sequential(nn.Dropout(), nn.Conv2d(32, 48, 1))
    site = verdict(lambda x: over_all_places(classifier(stem(x))), torch.randn(2, 3, 8, 8))
    assert site.cause is Cause.RULE and "from its 'classifier'" in site.reason
    # A mean over the classes is none of logits.
    assert verdict(lambda x: classifier(stem(x)).mean(1), torch.randn(2, 3, 8, 8)).status == "fp8"


@pytest.mark.parametrize(
    "of_all_places",
    [lambda x: x.amax(1), lambda x: torch.amax(x, dim=(-2,)), lambda x: x.max(1)[0], lambda x: torch.max(x, 1).values],
)
def test_the_largest_logits_of_all_places_are_logits(of_all_places: Callable[[Tensor], Tensor]) -> None:
    """Each place may be labelled, and what they say added to what is said of the whole."""
    parts = nn.ModuleDict({"head": nn.Linear(32, 48), "of_places": nn.Linear(32, 48)})

    def statuses(of_several: Callable[[Tensor], Tensor]) -> dict[str, str]:
        def run(x: Tensor) -> Tensor:
            return parts["head"](x[:, 0]) + 0.5 * of_several(parts["of_places"](x[:, 1:]))

        sites = planned(run, torch.randn(2, 9, 32)).sites
        return {site.name.rpartition(".")[2]: site.status for site in sites}

    assert statuses(of_all_places) == {"head": "kept", "of_places": "kept"}
    # The largest logit of each place is one number and no logits, nor is what is larger than something else.
    assert statuses(lambda x: x.amax(2)[:, :1]) == {"head": "kept", "of_places": "fp8"}
    assert statuses(lambda x: torch.max(x, x.cos())[:, 0]) == {"head": "kept", "of_places": "fp8"}


def test_an_fc_behind_a_pool_of_the_largest_is_a_head() -> None:
    parts = nn.ModuleDict({"fc": nn.Linear(32, 48)})
    pools = (lambda x: x.amax((2, 3)), True), (lambda x: x.flatten(2).max(2)[0], True), (lambda x: x.amax(0), False)
    for pool, is_head in pools:
        site = verdict(lambda x, pool=pool: parts["fc"](pool(x)), torch.randn(2, 32, 32, 32))
        assert site.status == ("kept" if is_head else "fp8")


@pytest.mark.parametrize("last", ["cls_score", "bbox_pred"])
def test_what_a_part_that_is_called_a_predictor_returns_is_its_prediction(last: str) -> None:
    model = nn.ModuleDict({"box_predictor": nn.ModuleDict({last: nn.Linear(64, 32)})})
    site = verdict(lambda x: model["box_predictor"][last](x), torch.randn(5, 64))
    assert site.cause is Cause.RULE and "from its 'box_predictor'" in site.reason
    assert verdict(lambda x: model["box_predictor"][last](x).relu(), torch.randn(5, 64)).status == "fp8"


def test_the_classes_that_each_layer_of_a_detector_gives_are_logits() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
            self.class_embed = nn.ModuleList(nn.Linear(32, 48) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            classes = []
            for layer, classify in zip(self.layers, self.class_embed, strict=True):
                x = x + torch.tanh(layer(x))
                classes.append(classify(x))
            return torch.stack(classes, dim=1)

    status = {site.name: site.status for site in planned(Detector(), torch.randn(2, 5, 32)).sites}
    heads = {f"class_embed.{number}": "kept" for number in range(2)}
    assert status == {"layers.0": "fp8", "layers.1": "fp8", **heads}


def test_what_embeds_a_class_is_no_head_though_it_is_called_like_one() -> None:
    model = nn.ModuleDict({"class_embed": nn.Linear(32, 48), "block": nn.Linear(48, 32)})
    sites = planned(lambda x: model["block"](F.silu(model["class_embed"](x))), torch.randn(5, 32)).sites
    assert [site.status for site in sites] == ["fp8", "fp8"]


class OfManyLosses(OfPictures):
    """Auxiliary logits of what comes before the pool beside those of ``fc``."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.aux = nn.Sequential(nn.Linear(32 * 36, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        features = self.stem(pictures)
        return self.fc(self.pool(features).flatten(1)), self.aux(features.flatten(1))


def test_what_is_returned_beside_logits_of_the_same_classes_is_logits() -> None:
    sites = planned(OfManyLosses(48), torch.randn(2, 3, 8, 8)).sites
    status = {site.name: site.status for site in sites}
    assert status == {"fc": "kept", "aux.0": "fp8", "aux.2": "kept"}
    (aux,) = (site for site in sites if site.name == "aux.2")
    assert aux.cause is Cause.RULE and "beside other logits" in aux.reason
    for model, options in ((OfManyLosses(32), {}), (OfManyLosses(48), {"lm_head": True})):
        sites = planned(model, torch.randn(2, 3, 8, 8), **options).sites
        assert {site.name: site.status for site in sites}["aux.2"] == "fp8"


def test_what_ends_a_sequence_of_layers_behind_a_pool_is_a_head() -> None:
    pool = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    site = verdict(nn.Sequential(*pool, nn.Dropout(), nn.Linear(32, 48)), torch.randn(2, 3, 8, 8))
    assert site.cause is Cause.RULE and "from '5' behind a pool" in site.reason
    sites = planned(
        nn.Sequential(*pool, nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 48)), torch.randn(2, 3, 8, 8)
    ).sites
    assert [site.status for site in sites] == ["fp8", "fp8"]  # features of a picture, maybe, and no logits


@pytest.mark.parametrize("reduce", [torch.mean, torch.sum])
def test_the_mean_of_a_number_is_no_pool(reduce: Callable[..., Tensor]) -> None:
    class OfANumber(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(reduce(x.mean(), 0).view(1, 1))

    (site,) = planned(OfANumber(), torch.randn(4, 32)).sites
    assert "behind a pool" not in site.reason


def test_an_fc_is_no_head_without_a_pool_or_where_its_result_is_no_logits() -> None:
    assert verdict(OfPictures(nn.GELU()), torch.randn(2, 3, 8, 8)).status == "fp8"
    parts = nn.ModuleDict({"fc": nn.Linear(32, 48)})
    site = verdict(lambda x: parts["fc"](x), torch.randn(2, 32))
    assert site.name.endswith("fc") and site.status == "fp8"
    # A mean over an ensemble's members, or over everything, is no pool; that of positions is.
    means = (lambda x: x.mean(0), False), (lambda x: x.mean((-2, -3)), False), (lambda x: x.mean(1), True)
    for mean, is_pool in means:
        site = verdict(lambda x, mean=mean: parts["fc"](mean(x)), torch.randn(4, 5, 32))
        assert site.status == ("kept" if is_pool else "fp8")


class AngularMargin(nn.Module):
    """Cosines with a direction for each class, of which that of the true one is made smaller, as faces are learned."""

    def __init__(self, of_length_one: bool) -> None:
        super().__init__()
        self.fc, self.margin, self.of_length_one = nn.Linear(32, 32), nn.Linear(32, 48, bias=False), of_length_one

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        features, weight = self.fc(x), self.margin.weight
        cosines = F.linear(F.normalize(features), F.normalize(weight) if self.of_length_one else weight)
        sines = (1 - cosines.square()).clamp(min=1e-6).sqrt()
        true = torch.zeros_like(cosines).scatter(1, classes[:, None], 1.0)
        return (true * (cosines * 0.9 - sines * 0.4) + (1 - true) * cosines) * 30


@pytest.mark.parametrize("of_length_one", [True, False])
def test_cosines_with_a_direction_for_each_class_are_logits(of_length_one: bool) -> None:
    model = AngularMargin(of_length_one)
    sites = {site.name: site for site in planned(model, torch.randn(16, 32), torch.randint(0, 48, (16,))).sites}
    assert sites["fc"].status == "fp8" and sites["margin"].status == ("kept" if of_length_one else "fp8")
    assert not of_length_one or "cosines" in sites["margin"].reason


@pytest.mark.parametrize(("classes", "advice"), [(32, "lm_head=True puts it in FP8"), (2, "nothing to do: ")])
def test_lm_head_is_advised_only_where_it_changes_something(classes: int, advice: str) -> None:
    model, x = Named(classifier=(32, classes)), torch.randn(10, 32)
    site = verdict(model, x)
    assert site.cause is Cause.RULE and site.reason.rpartition("; ")[2].startswith(advice)
    assert (verdict(model, x, lm_head=True).status == "fp8") is (classes == 32)


def test_the_state_of_a_cell_is_no_logits_wherever_the_cell_is() -> None:
    head, x = nn.ModuleDict({"head": nn.GRUCell(32, 32)}), torch.randn(10, 32)
    site = verdict(lambda x: head["head"](x), x)
    assert site.form == "gru_cell" and site.cause is Cause.UNSUPPORTED and "inside of one operator" in site.reason
