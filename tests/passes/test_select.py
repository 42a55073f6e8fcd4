"""Selection: each rule fires, does not fire where it should not, and says why."""

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
from te_compile.ops.registry import Target
from te_compile.options import Options
from te_compile.passes import manager, select
from te_compile.passes.find_linears import find_linears
from te_compile.passes.lower_losses import lower_losses
from te_compile.passes.plan import Cause, Plan, Site, StrictError
from te_compile.passes.regions import regions_of
from te_compile.passes.select import select_linears
from te_compile.passes.speed import gain_microseconds
from tests.capturing import captured, regions_and_plan
from tests.compiling import compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def planned(run: Callable[..., Any], *inputs: Any, **options: Any) -> Plan:
    """The plan after selection."""
    _, plan = regions_and_plan(run, *inputs)
    select_linears(plan, Options.resolve(options))
    return plan


def verdict(run: Callable[..., Any], *inputs: Any, **options: Any) -> Site:
    """The only site."""
    (site,) = planned(run, *inputs, **options).sites
    return site


class Calls(nn.Module):
    """The linear ``block.output``."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block.output(x)


class Named(nn.Module):
    """Linears under names of a test's choosing, all applied to one input."""

    def __init__(self, **sizes: tuple[int, int]) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(*size))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [module(x).sin() for module in self.children()]


def test_a_plain_linear_goes_to_fp8() -> None:
    site = verdict(Named(proj=(32, 48)), torch.randn(5, 32))
    assert (site.status, site.reason, site.cause) == ("fp8", "", None)


def test_the_count_is_that_of_the_selected() -> None:
    _, plan = regions_and_plan(Named(a=(32, 48), b=(32, 8), c=(32, 16)), torch.randn(5, 32))
    assert select_linears(plan, Options.resolve({})) == 2 == len(plan.selected)


# --- the user ------------------------------------------------------------------------------------------------------


def test_exclude_and_include_decide_by_module_name() -> None:
    model, x = Named(a=(32, 48), b=(32, 48)), torch.randn(5, 32)
    excluded = {site.name: site.cause for site in planned(model, x, exclude=["a"]).sites}
    included = {site.name: site.cause for site in planned(model, x, include=["a"]).sites}
    assert excluded == {"a": Cause.USER, "b": None}
    assert included == {"a": None, "b": Cause.USER}


def test_a_function_may_look_at_the_site() -> None:
    model, x = Named(narrow=(32, 16), wide=(32, 64)), torch.randn(5, 32)
    plan = planned(model, x, exclude=lambda name, site: site.features[1] < 32)
    assert {site.name: site.status for site in plan.sites} == {"narrow": "kept", "wide": "fp8"}


def test_what_the_user_excluded_says_so_whatever_else_is_wrong_with_it() -> None:
    site = verdict(Named(odd=(32, 20)).double(), torch.randn(5, 32).double(), exclude=["odd"])
    assert site.cause is Cause.USER and "odd" in site.reason


# --- projections to logits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lm_head", "score", "classifier", "embed_out", "to_logits", "unembed", "output"])
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


def test_a_head_whose_chances_are_read_by_a_linear_is_one() -> None:
    model, back = Named(head=(32, 48)), nn.Linear(48, 32)
    plan = planned(lambda x: (x + back(model(x)[0].softmax(-1))).cos(), torch.randn(5, 32))
    assert [site.status for site in plan.sites] == ["kept", "fp8"]


def test_the_output_of_a_part_of_the_model_is_no_head() -> None:
    block = nn.Module()
    block.output = nn.Linear(32, 48)
    assert verdict(nn.Sequential(Calls(block)), torch.randn(5, 32)).status == "fp8"


def test_a_head_whose_embedding_is_behind_a_graph_break() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.fc, self.out = nn.Embedding(48, 32), nn.Linear(32, 32), nn.Linear(32, 48)
            self.out.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            torch._dynamo.graph_break()
            return self.out(self.fc(x))

    with manager.recording() as records, torch.no_grad():
        compiled(Tied())(torch.randint(0, 48, (2, 5)))
    sites = {site.name: site for record in records for site in record.plan.sites}
    assert sites["fc"].status == "fp8"
    assert sites["out"].cause is Cause.RULE and "tied" in sites["out"].reason


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


@pytest.mark.parametrize("name", ["lm_head", "classifier", "classification_head", "lm_heads", "sop_classifier"])
def test_of_a_head_of_several_linears_the_one_whose_result_is_returned_stays(name: str) -> None:
    plan = planned(Untied(100, **{name: _unfinished(nn.Linear(32, 48))}), torch.randint(0, 100, (2, 5)))
    assert {site.name: site.status for site in plan.sites} == {"fc": "fp8", f"{name}.0": "fp8", f"{name}.2": "kept"}
    assert plan.sites[-1].cause is Cause.RULE and f"from its {name!r}" in plan.sites[-1].reason


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


def test_a_router_keeps_its_precision() -> None:
    gate = nn.Linear(32, 16)

    def run(x: Tensor) -> Tensor:
        return torch.topk(F.softmax(gate(x).float(), dim=-1), 2).values

    site = verdict(run, torch.randn(10, 32))
    assert site.cause is Cause.RULE and "router" in site.reason


ROUTERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a bias decides as well": lambda scores: (scores.sigmoid() + torch.zeros(32)).topk(2).indices,
    "by groups": lambda scores: (scores + 0.1).view(-1, 4, 8).topk(2).values.sum(-1).topk(2).indices,
    "noisy": lambda scores: torch.topk(scores + torch.randn(10, 32) * 0.1, 2).indices,
    "one expert": lambda scores: scores.softmax(-1).argmax(-1),
    "one expert and its probability": lambda scores: torch.max(scores.softmax(-1), dim=-1)[1],
    "one expert, by name": lambda scores: scores.max(dim=-1).indices,
    "by a temperature": lambda scores: torch.topk(scores / 0.7, 2).indices,
    "experts choose": lambda scores: scores.T.softmax(-1).topk(3).indices,
    "some are masked": lambda scores: scores.masked_fill(torch.arange(32) > 20, float("-inf")).topk(2).indices,
    "sorted": lambda scores: scores.sort(dim=-1, descending=True)[1][:, :2],
    "above the least of the largest": lambda scores: scores >= scores.kthvalue(31, dim=-1, keepdim=True).values,
    "drawn with a gradient": lambda scores: F.gumbel_softmax(scores, hard=True),
    "drawn": lambda scores: torch.multinomial(scores.softmax(-1), 2),
    "by the root of a softplus": lambda scores: F.softplus(scores).sqrt().topk(2).indices,
    "by a softmax that is spelled out": lambda scores: (scores - scores.amax(-1, keepdim=True)).exp().topk(2).indices,
    "by a logarithm": lambda scores: F.logsigmoid(scores).topk(2).indices,
    "by a direction": lambda scores: F.normalize(scores, dim=-1).topk(2).indices,
    "normalised": lambda scores: F.layer_norm(scores, (32,)).softmax(-1).topk(2).indices,
    "turned": lambda scores: scores.swapaxes(0, 1).softmax(0).swapaxes(0, 1).topk(2).indices,
    "a softmax for each group": lambda scores: torch.cat([s.softmax(-1) for s in scores.chunk(2, -1)], -1).topk(2)[1],
}


@pytest.mark.parametrize("way", ROUTERS)
def test_a_router_is_known_by_what_it_picks(way: str) -> None:
    gate = nn.Linear(32, 32)
    site = verdict(lambda x: ROUTERS[way](gate(x)), torch.randn(10, 32))
    assert site.cause is Cause.RULE and "router" in site.reason


def test_a_router_is_no_head_whatever_it_is_called() -> None:
    classifier, x = nn.Linear(32, 16), torch.randn(10, 32)

    def picked(x: Tensor) -> Tensor:
        return classifier(x).softmax(-1).topk(2).indices

    def beside_its_scores(x: Tensor) -> tuple[Tensor, Tensor]:
        scores = classifier(x)
        return scores, scores.argmax(-1)

    site = verdict(picked, x)
    assert site.name == "classifier" and site.cause is Cause.RULE and "a router" in site.reason
    assert "projection to logits" in verdict(beside_its_scores, x).reason


def test_the_largest_values_alone_are_no_pick() -> None:
    """As a pooling over points takes them."""
    fc = nn.Linear(32, 32)
    assert verdict(lambda x: fc(x).max(dim=1)[0], torch.randn(2, 10, 32)).status == "fp8"
    assert verdict(lambda x: fc(x).sort(dim=1).values, torch.randn(2, 10, 32)).status == "fp8"


def test_a_draw_that_mixes_all_is_no_pick() -> None:
    fc = nn.Linear(32, 32)
    assert verdict(lambda x: F.gumbel_softmax(fc(x), tau=0.5), torch.randn(10, 32)).status == "fp8"


# --- support -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(33, 48), (32, 50), (17, 131)])
def test_any_size_from_sixteen_up_is_taken(size: tuple[int, int]) -> None:
    site = verdict(Named(proj=size), torch.randn(5, size[0]))
    assert site.status == "fp8"
    assert all((had + added) % 16 == 0 and added < 16 for had, added in zip(size, site.padding, strict=True))


@pytest.mark.parametrize(("size", "what"), [((8, 48), "in_features=8"), ((32, 2), "out_features=2"), ((4, 4), "in")])
def test_what_would_be_mostly_padding_stays_in_high_precision_by_rule(size: tuple[int, int], what: str) -> None:
    site = verdict(Named(proj=size), torch.randn(5, size[0]), cost_model=False)
    assert site.cause is Cause.RULE and "narrow" in site.reason and what in site.reason


def test_the_number_of_tokens_may_be_anything() -> None:
    assert verdict(Named(proj=(32, 48)), torch.randn(7, 32)).status == "fp8"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_training_dtype_is_taken(dtype: torch.dtype) -> None:
    assert verdict(Named(proj=(32, 48)).to(dtype), torch.randn(5, 32, dtype=dtype)).status == "fp8"


@pytest.mark.parametrize("form", [F.linear, lambda x, w: x @ w.T])
def test_what_pytorch_would_not_multiply_is_not_multiplied(form: Callable[..., Tensor]) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(48, 32, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return form(x, self.weight).float()

    x = torch.randn(5, 32)
    for fast in (Mixed(), compiled(Mixed())):
        with pytest.raises(RuntimeError, match="same dtype"):
            fast(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(Mixed())(x).shape == (5, 48)


def test_a_dtype_that_is_not_taken_is_named() -> None:
    site = verdict(Named(proj=(32, 48)).double(), torch.randn(5, 32).double())
    assert site.cause is Cause.UNSUPPORTED and "float64" in site.reason


def fake_site(x_device: str, weight_device: str | None = None, tokens: int = 8192) -> Any:
    """A site whose operands only claim to live somewhere."""

    def node(device: str, *shape: int) -> Any:
        value = SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16, shape=shape)
        return SimpleNamespace(meta={"example_value": value})

    return SimpleNamespace(
        x=node(x_device, tokens, 64), weight=node(weight_device or x_device, 64, 64), tokens=tokens, features=(64, 64),
        padding=(0, 0), linears=1, ends=None, spell=None,
    )  # fmt: skip


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_other_accelerators_are_named_in_the_reason(device: str) -> None:
    cause, reason = select.by_device(fake_site(device), Options())
    assert cause is Cause.UNSUPPORTED and repr(device) in reason


@pytest.mark.parametrize(("capability", "taken"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_without_fp8_is_left_alone(
    capability: tuple[int, int], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "of", staticmethod(lambda device: Target("cuda", capability)))
    found = select.by_device(fake_site("cuda"), Options())
    assert (found is None) is taken
    if found is not None:
        assert ".".join(map(str, capability)) in found[1]


def test_amds_gpus_are_named_in_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    cause, reason = select.by_device(fake_site("cuda"), Options())
    assert cause is Cause.UNSUPPORTED and "'rocm'" in reason


def test_operands_on_two_devices_are_left_alone() -> None:
    cause, reason = select.by_device(fake_site("cuda:0", "cuda:1"), Options())
    assert cause is Cause.UNSUPPORTED and "cuda:0" in reason and "cuda:1" in reason


# --- cost ----------------------------------------------------------------------------------------------------------


def test_a_small_linear_on_a_gpu_is_left_alone_unless_forced() -> None:
    small = fake_site("cuda", tokens=16)
    ((site, reason),) = select.by_cost([small], Options())
    assert site is small and "16×64×64" in reason and "cost_model=False" in reason
    assert not list(select.by_cost([small], Options(cost_model=False)))


def test_the_cost_model_is_off_on_a_cpu() -> None:
    assert not list(select.by_cost([fake_site("cpu", tokens=16)], Options()))


def readers_of_one_input(tokens: int, *features: tuple[int, int], apart: bool = False) -> list[Any]:
    """Linears on a GPU that read the same x; ``apart``: each its own."""
    sites = [fake_site("cuda", tokens=tokens) for _ in features]
    for site, size in zip(sites, features, strict=True):
        site.features, site.x = size, site.x if apart else sites[0].x
    return sites


def goes_to_fp8(sites: list[Any]) -> list[bool]:
    kept = {id(site) for site, _ in select.by_cost(sites, Options())}
    return [id(site) not in kept for site in sites]


def test_linears_that_read_one_input_share_what_its_fp8_copy_costs() -> None:
    projections = (4096, 4096), (4096, 1024), (4096, 1024)
    assert goes_to_fp8(readers_of_one_input(1024, *projections, apart=True)) == [True, False, False]
    assert goes_to_fp8(readers_of_one_input(1024, *projections)) == [True] * 3
    with torch.no_grad():  # a decoding step, where none would gain by itself
        assert goes_to_fp8(readers_of_one_input(16, *projections, apart=True)) == [False] * 3
        assert goes_to_fp8(readers_of_one_input(16, *projections)) == [True] * 3


def test_of_linears_that_read_one_input_those_that_lose_stay_and_the_others_pay() -> None:
    sites = readers_of_one_input(1024, (4096, 16), (4096, 4096))
    assert goes_to_fp8(sites) == [False, True]
    assert goes_to_fp8(readers_of_one_input(16, (64, 64), (64, 64), (64, 64))) == [False] * 3


@pytest.mark.parametrize("training", [True, False])
def test_large_linears_gain_and_tiny_ones_lose(training: bool) -> None:
    assert gain_microseconds(8192, 4096, 4096, training=training) > 0
    assert gain_microseconds(16, 64, 64, training=training) < 0


def test_in_the_range_where_fp8_gains_more_tokens_gain_more() -> None:
    gains = [gain_microseconds(tokens, 4096, 4096, training=True) for tokens in (4096, 8192, 16384)]
    assert gains == sorted(gains)


def test_padding_costs_time_and_a_large_head_still_gains() -> None:
    size = (8192, 4096, 50257)
    padded, aligned = (gain_microseconds(*size, padding=more, training=True) for more in ((0, 15), (0, 0)))
    assert 0 < padded < aligned
    assert gain_microseconds(8192, 1000, 17, padding=(8, 15), training=True) < 0


# --- strict --------------------------------------------------------------------------------------------------------


class WithWideOne(Named):
    """Linears of one input, and one named ``odd`` in a dtype that has no FP8 copy."""

    def __init__(self, **sizes: tuple[int, int]) -> None:
        super().__init__(**sizes)
        self.odd.double()

    def forward(self, x: Tensor) -> list[Tensor]:
        return [module(x.to(module.weight.dtype)).sin() for module in self.children()]


def test_strict_objects_to_missing_support_alone() -> None:
    model, x = WithWideOne(odd=(32, 20), lm_head=(32, 48), narrow=(32, 2), other=(32, 16)), torch.randn(5, 32)
    with pytest.raises(StrictError, match=r"(?s)1 linear.*odd.*20.*float64"):
        planned(model, x).require_all_supported()
    planned(model, x, exclude=["odd"]).require_all_supported()


def test_strict_does_not_object_to_what_a_rule_would_keep_anyway() -> None:
    model, x = WithWideOne(odd=(32, 2)), torch.randn(5, 32)
    planned(model, x).require_all_supported()


def test_the_fp8_share_leaves_out_what_rules_and_users_keep() -> None:
    model, x = WithWideOne(a=(32, 48), odd=(32, 20), lm_head=(32, 1600)), torch.randn(5, 32)
    assert planned(model, x).fp8_flops_fraction == pytest.approx(48 / (48 + 20))
    assert planned(model, x, exclude=["odd"]).fp8_flops_fraction == 1.0


class Codebook(nn.Module):
    """Takes for each row the nearest entry of a table, as a quantising autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.table, self.decode = nn.Linear(64, 32), nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        z, entries = self.encode(x), self.table.weight
        distances = z.square().sum(-1, keepdim=True) - 2 * z @ entries.t() + entries.square().sum(1)
        return self.decode(z + (self.table(distances.argmin(-1)) - z).detach())


@pytest.mark.parametrize("lm_head", [False, True])
def test_a_codebook_is_no_head_though_its_weight_is_a_table(lm_head: bool) -> None:
    sites = {site.name: site for site in planned(Codebook(), torch.randn(16, 64), lm_head=lm_head).sites}
    assert sites["encode"].status == sites["decode"].status == "fp8"
    assert sites["table"].cause is Cause.RULE and sites["table"].reason.startswith(
        "a codebook: its result picks entries"
    )
