"""Routers and codebooks are known by what is picked, whatever scores become before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_compile.passes.plan import Cause
from tests.selecting import planned, verdict

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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


@pytest.mark.parametrize(
    "likeliest",
    [
        lambda scores: scores.max(-1).values,
        lambda scores: scores.sigmoid().max(-1)[0],
        lambda scores: torch.max(scores, -1)[0],
        lambda scores: scores.amax(-1),
    ],
)
def test_scores_of_whose_places_the_likeliest_are_read_on_keep_their_precision(
    likeliest: Callable[[Tensor], Tensor],
) -> None:
    classify, queries = nn.Linear(32, 48), nn.Linear(32, 32)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        of_classes = classify(x)
        places = likeliest(of_classes).topk(4, dim=1).indices.unsqueeze(-1)
        return of_classes.gather(1, places.expand(-1, -1, 48)), queries(x.gather(1, places.expand(-1, -1, 32)))

    picking, reading = planned(run, torch.randn(2, 20, 32)).sites
    assert picking.cause is Cause.RULE and "scores of places" in picking.reason and reading.status == "fp8"


class Peaks(nn.Module):
    """A map of scores, of which those stay that are ``largest`` there, and another layer of the same features."""

    def __init__(self, largest: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scores, self.others, self.largest = nn.Conv2d(32, 17, 1), nn.Conv2d(32, 32, 1), largest

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scores(x).softmax(1)[:, :-1]
        return torch.where(self.largest(scores), scores, 0.0), self.others(x).relu()


@pytest.mark.parametrize(
    "largest",
    [
        lambda scores: scores == F.max_pool2d(scores, 3, stride=1, padding=1),
        lambda scores: F.max_pool2d(scores, 3, stride=1, padding=1).eq(scores),
        lambda scores: scores >= scores.amax((2, 3), keepdim=True),
        lambda scores: scores == scores.max(1, keepdim=True)[0],
    ],
)
def test_scores_whose_peaks_are_kept_keep_their_precision(largest: Callable[[Tensor], Tensor]) -> None:
    scores, others = planned(Peaks(largest), torch.randn(2, 32, 8, 8)).sites
    assert (scores.cause, others.status) == (Cause.RULE, "fp8")
    assert scores.reason.startswith("scores of places: its result picks those that are read on")


@pytest.mark.parametrize("alike", [lambda scores: scores >= 0.1, lambda scores: scores > scores.mean((2, 3), True)])
def test_scores_above_a_bound_are_no_pick(alike: Callable[[Tensor], Tensor]) -> None:
    scores, _ = planned(Peaks(alike), torch.randn(2, 32, 8, 8)).sites
    assert scores.status == "fp8"


def test_a_router_whose_groups_have_the_score_of_their_best_is_one() -> None:
    gate = nn.Linear(32, 32)

    def run(x: Tensor) -> Tensor:
        scores = gate(x).sigmoid().view(-1, 4, 8)
        groups = torch.zeros_like(scores[..., 0]).scatter(1, scores.max(-1).values.topk(2).indices, 1)
        return (scores * groups.unsqueeze(-1)).flatten(1).topk(4).indices

    site = verdict(run, torch.randn(10, 32))
    assert site.cause is Cause.RULE and "a router" in site.reason


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


class Gated(nn.Module):
    """Two experts for each row, picked by a router of three layers; ``more`` is made of what its first layers give."""

    def __init__(self, more: Callable[[Tensor], Tensor | int] = lambda hidden: 0) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.SiLU(inplace=True))
        self.gate.add_module("last", nn.Linear(32, 16))
        self.before, self.expert, self.more = nn.Linear(32, 32), nn.Linear(32, 32), more

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        hidden = self.gate[:4](x)
        chances, picked = self.gate.last(hidden).softmax(-1).topk(2)
        return self.expert(x * chances.sum(-1, keepdim=True)) * picked.sum(-1, keepdim=True) + self.more(hidden)


def _statuses(model: nn.Module, *inputs: Tensor, **options: bool) -> dict[str, str]:
    return {site.name: site.status for site in planned(model, *inputs, **options).sites}


def test_a_router_of_several_layers_keeps_the_precision_of_all() -> None:
    sites = {site.name: site for site in planned(Gated(), torch.randn(10, 32)).sites}
    kept = {name for name, site in sites.items() if site.status == "kept"}
    assert kept == {"gate.0", "gate.2", "gate.last"}
    assert all(sites[name].cause is Cause.RULE for name in kept)
    assert "only what picks experts" in sites["gate.0"].reason and "a router: " in sites["gate.last"].reason


def test_how_many_rows_a_routers_layer_has_may_be_read_elsewhere() -> None:
    x = torch.randn(10, 32)
    torch._dynamo.mark_dynamic(x, 0)
    statuses = _statuses(Gated(lambda hidden: hidden.shape[0]), x)
    assert [name for name, status in statuses.items() if status == "kept"] == ["gate.0", "gate.2", "gate.last"]


@pytest.mark.parametrize(
    "more", [lambda hidden: hidden, lambda hidden: (hidden > 0).any(), lambda hidden: hidden.sum()]
)
def test_what_is_read_by_more_than_a_router_is_no_layer_of_it(more: Callable[[Tensor], Tensor]) -> None:
    statuses = _statuses(Gated(more), torch.randn(10, 32))
    assert [name for name, status in statuses.items() if status == "kept"] == ["gate.last"]


def test_what_lies_before_a_pick_outside_of_its_module_is_no_router() -> None:
    """As all of a model whose words are picked in the same graph."""

    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.words = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.words(self.layers(x)).argmax(-1)

    assert _statuses(Greedy(), torch.randn(10, 32)) == {"layers.0": "fp8", "layers.2": "fp8", "words": "kept"}


class Router(nn.Module):
    """Its last layers are a module in it, and what its first gives is read by the router of the next layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(32, 32)
        self.last = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        state = self.down(x) + before
        return self.last(state).softmax(-1).topk(2)[1].sum(-1, keepdim=True), state.clone()


class Routed(nn.Module):
    """``returns_state``: the caller gets what the last router made, too."""

    def __init__(self, layers: int, returns_state: bool = False) -> None:
        super().__init__()
        self.gates = nn.ModuleList(Router() for _ in range(layers))
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.returns_state = returns_state

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        state = x.new_zeros(())
        for gate, expert in zip(self.gates, self.experts, strict=True):
            picked, state = gate(x, state)
            x = x + expert(x) * picked
        if self.returns_state:
            return x, state
        return x


def test_what_routers_hand_from_layer_to_layer_keeps_its_precision_however_many_there_are() -> None:
    statuses = _statuses(Routed(16), torch.randn(10, 32))
    assert {name for name, status in statuses.items() if status == "fp8"} == {f"experts.{i}" for i in range(16)}


def test_what_a_router_hands_on_and_the_caller_gets_is_not_for_picks_alone() -> None:
    statuses = _statuses(Routed(2, returns_state=True), torch.randn(10, 32))
    assert [name for name, status in statuses.items() if "down" in name and status == "kept"] == []
    assert [name for name, status in statuses.items() if "last" in name and status == "fp8"] == []


def test_all_before_a_pick_is_no_router_though_the_module_around_it_holds_some() -> None:
    """As a picture's encoder, of which a codebook is a module."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.pick = nn.Sequential(nn.Linear(32, 32), nn.ReLU()), nn.Sequential(nn.Linear(32, 64))

        def forward(self, x: Tensor) -> Tensor:
            return self.pick(self.layers(x)).argmax(-1)

    statuses = _statuses(nn.Sequential(Encoder()), torch.randn(10, 32))
    assert statuses == {"0.layers.0": "fp8", "0.pick.0": "kept"}


def test_the_largest_values_alone_are_no_pick() -> None:
    """As a pooling over points takes them."""
    fc = nn.Linear(32, 32)
    assert verdict(lambda x: fc(x).max(dim=1)[0], torch.randn(2, 10, 32)).status == "fp8"
    assert verdict(lambda x: fc(x).sort(dim=1).values, torch.randn(2, 10, 32)).status == "fp8"


def test_a_draw_that_mixes_all_is_no_pick() -> None:
    fc = nn.Linear(32, 32)
    assert verdict(lambda x: F.gumbel_softmax(fc(x), tau=0.5), torch.randn(10, 32)).status == "fp8"


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


def _scattered(x: Tensor, picked: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], 64).scatter_(1, picked.unsqueeze(1), 1)


ONES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scattered": _scattered,
    "scattered into zeros like the distances": lambda x, picked: torch.zeros_like(x).scatter(1, picked[:, None], 1.0),
    "one-hot": lambda x, picked: F.one_hot(picked, 64).to(x.dtype),
}


class CodebookReadByOnes(Codebook):
    """The same, whose entries are picked by a product, as many write it."""

    def __init__(self, ones: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.ones = ones

    def forward(self, x: Tensor) -> Tensor:
        z, entries = self.encode(x), self.table.weight
        distances = z.square().sum(-1, keepdim=True) - 2 * z @ entries.t() + entries.square().sum(1)
        return self.decode(z + (self.ones(distances, distances.argmin(-1)) @ entries - z).detach())


@pytest.mark.parametrize("ones", ONES)
def test_entries_of_a_codebook_that_a_product_picks_are_not_rounded(ones: str) -> None:
    sites = planned(CodebookReadByOnes(ONES[ones]), torch.randn(16, 64)).sites
    found, read = (site for site in sites if site.name == "table")
    assert found.cause is read.cause is Cause.RULE
    assert found.reason.startswith("a codebook: its result picks entries")
    assert read.reason.startswith("a codebook: it picks entries of a table")
    assert [site.status for site in sites if site.name != "table"] == ["fp8", "fp8"]


class Tokens(Codebook):
    """The same of which only the numbers of the entries are asked for, as of a tokeniser of pictures."""

    def __init__(self, squares: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.squares = squares

    def forward(self, x: Tensor) -> Tensor:
        z, entries = self.encode(x), self.table.weight
        distances = self.squares(z).sum(-1, keepdim=True) + self.squares(entries).sum(1) - 2 * z @ entries.t()
        return distances.argmin(-1)


@pytest.mark.parametrize("squares", [torch.square, lambda x: x**2, lambda x: x.pow(2), lambda x: x * x])
def test_a_codebook_whose_entries_are_not_read_is_one_by_its_distances(squares: Callable[[Tensor], Tensor]) -> None:
    encode, table = planned(Tokens(squares), torch.randn(16, 64)).sites
    assert encode.status == "fp8" and table.reason.startswith("a codebook: its result picks entries")


def test_a_linear_of_one_hot_codes_that_are_given_is_a_linear() -> None:
    fc = nn.Linear(64, 32)
    assert verdict(lambda x: fc(F.one_hot(x, 64).float()), torch.randint(0, 64, (10,))).status == "fp8"


class Indexer(nn.Module):
    """Attention to the keys that an indexer of queries, keys and weights for each of its heads finds the best; ``more``
    is made of the indexer's keys."""

    def __init__(self, width: int = 32, more: Callable[[Tensor], Tensor | int] = lambda keys: 0) -> None:
        super().__init__()
        self.find_q, self.find_k, self.weigh = nn.Linear(32, 16 * width), nn.Linear(32, width), nn.Linear(32, 16)
        self.norm, self.q, self.k, self.v = nn.LayerNorm(width), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.out, self.more = nn.Linear(32, 32), more

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            keys = self.norm(self.find_k(x)).unsqueeze(1)
            keys = keys * 0.6 + torch.cat([-keys[..., 8:], keys[..., :8]], -1) * 0.8
            scores = (self.find_q(x).unflatten(-1, (16, -1)).transpose(1, 2) @ keys.transpose(-1, -2)).relu()
            best = (self.weigh(x).unsqueeze(-2) @ scores.transpose(1, 2)).squeeze(-2).topk(4).indices
            mask = torch.full((x.shape[0], x.shape[1], x.shape[1]), float("-inf")).scatter(-1, best, 0.0)
        seen = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=mask)
        return self.out(seen) + self.more(keys)


def _kept(model: nn.Module, *inputs: Tensor) -> set[str]:
    return {name for name, status in _statuses(model, *inputs).items() if status == "kept"}


def test_what_an_indexer_finds_keys_by_keeps_its_precision() -> None:
    sites = {site.name: site for site in planned(Indexer(), torch.randn(2, 8, 32)).sites}
    kept = {name for name, site in sites.items() if site.status == "kept"}
    assert kept == {"find_q", "find_k", "weigh"}
    assert all(sites[name].cause is Cause.RULE and "what is picked by it" in sites[name].reason for name in kept)


def test_an_indexers_wide_queries_are_worth_fp8() -> None:
    assert _kept(Indexer(width=80), torch.randn(2, 8, 32)) == {"find_k", "weigh"}


def test_an_indexers_keys_that_are_returned_too_are_not_for_its_pick_alone() -> None:
    x = torch.randn(2, 8, 32)
    assert _kept(Indexer(more=lambda keys: keys.mean(1)), x) == {"find_q", "weigh"}
    assert _kept(Indexer(more=lambda keys: keys.shape[-1] + (keys > 0).sum()), x) == {"find_q", "find_k", "weigh"}
