"""A table stays one behind a graph break."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_compile
from te_compile.passes import manager
from te_compile.passes.plan import Cause
from tests.compiling import compiled
from tests.selecting import verdict

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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


@pytest.mark.parametrize("width", [48, 64])
def test_what_is_as_wide_as_the_vocabulary_is_a_head_though_the_embedding_is_behind_a_graph_break(width: int) -> None:
    class Parted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.places, self.fc = nn.Embedding(48, 32), nn.Embedding(64, 32), nn.Linear(32, 32)
            self.generator = nn.Linear(32, width)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
            torch._dynamo.graph_break()
            return self.generator(self.fc(x))

    with manager.recording() as records, torch.no_grad():
        compiled(Parted())(torch.randint(0, 48, (2, 5)))
    sites = {site.name: site for record in records for site in record.plan.sites}
    assert sites["fc"].status == "fp8"
    assert sites["generator"].status == ("kept" if width == 48 else "fp8")
    assert width != 48 or "as wide as the vocabulary" in sites["generator"].reason


class RelativePositions(nn.Module):
    """Scores of queries with rows of a table, which say how far apart two places are."""

    def __init__(self, lookup: Callable[[nn.Embedding, Tensor], Tensor], spelling: str) -> None:
        super().__init__()
        self.q, self.out, self.distance = nn.Linear(64, 64), nn.Linear(48, 32), nn.Embedding(95, 16)
        self.lookup, self.spelling = lookup, spelling

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 16)).transpose(1, 2)
        at = torch.arange(x.shape[1])
        rows = self.lookup(self.distance, at[None] - at[:, None] + 47)
        if self.spelling == "einsum":
            scores = torch.einsum("bhld,lrd->bhlr", q, rows)
        else:
            scores = q @ rows[0].T
        return self.out(scores)


LOOKUPS: list[Callable[[nn.Embedding, Tensor], Tensor]] = [
    lambda table, at: table(at),
    lambda table, at: F.embedding(at, table.weight).float().contiguous(),
    lambda table, at: torch.embedding(table.weight, at),
    lambda table, at: table.weight[at],
    lambda table, at: table.weight.float()[at.long()].contiguous(),
    lambda table, at: F.interpolate(table.weight.reshape(1, 95, -1).mT, size=95, mode="linear")[0].permute(1, 0)[at],
]


@pytest.mark.parametrize("lm_head", [False, True])
@pytest.mark.parametrize("spelling", ["einsum", "matmul"])
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_rows_that_were_looked_up_are_neither_a_head_nor_a_weight(
    lookup: Callable[[nn.Embedding, Tensor], Tensor], spelling: str, lm_head: bool
) -> None:
    model, x = RelativePositions(lookup, spelling), torch.randn(2, 48, 64)
    report = te_compile.explain(model, x, options={"lm_head": lm_head, "compiler": "aot_eager", "cost_model": False})
    rows = {row.name: row for row in report.rows}
    assert rows["q"].status == rows["out"].status == "fp8"
    assert rows["distance"].cause == "rule" and "looked up in a table" in rows["distance"].reason


def test_rows_of_a_weight_in_another_order_are_a_weight() -> None:
    weight = nn.Parameter(torch.randn(48, 32))
    site = verdict(lambda x: F.linear(x, weight[torch.arange(47, -1, -1)]), torch.randn(2, 32))
    assert site.status == "fp8"


def test_a_table_that_is_multiplied_by_as_a_whole_is_a_head_whatever_was_looked_up() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(48, 32)

        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(self.table(ids), self.table.weight)

    for lm_head, status in ((False, "kept"), (True, "fp8")):
        options = {"lm_head": lm_head, "compiler": "aot_eager", "cost_model": False}
        (row,) = te_compile.explain(Tied(), torch.randint(0, 48, (2, 16)), options=options).rows
        assert row.status == status and ("tied to an embedding" in row.reason) == (not lm_head)


class ReadsItsGuess(nn.Module):
    """A head tied to an embedding, and the mean of the embedding's rows by the chances of the words."""

    def __init__(self, words: int, mix: Callable[[Tensor, Tensor], Tensor], parted: bool) -> None:
        super().__init__()
        self.table, self.fc, self.mix, self.parted = nn.Embedding(words, 32), nn.Linear(32, 64), mix, parted

    def forward(self, ids: Tensor) -> Tensor:
        chances = F.linear(self.table(ids), self.table.weight).softmax(-1)
        if self.parted:
            torch._dynamo.graph_break()
        return self.fc(self.mix(chances, self.table.weight))


@pytest.mark.parametrize("parted", [False, True])
@pytest.mark.parametrize(
    ("mix", "words"),
    [
        (torch.matmul, 48),
        (torch.matmul, 32),  # as many as features
        (lambda x, table: F.linear(x, table.T), 48),
        (lambda x, table: F.linear(x, table.T), 32),
        (lambda x, table: torch.einsum("bsv,vd->bsd", x, table), 48),
    ],
)
def test_what_mixes_the_rows_of_an_embedding_is_no_head(
    mix: Callable[[Tensor, Tensor], Tensor], words: int, parted: bool
) -> None:
    for lm_head in (False, True):
        torch._dynamo.reset()
        with manager.recording() as records, torch.no_grad():
            compiled(ReadsItsGuess(words, mix, parted), lm_head=lm_head)(torch.randint(0, words, (2, 16)))
        head, mixed, fc = (site for record in records for site in record.plan.sites)
        assert head.status == ("fp8" if lm_head else "kept") and fc.status == "fp8"
        assert mixed.cause is Cause.RULE and "mixes the rows of an embedding" in mixed.reason


def test_what_multiplies_by_the_transpose_of_a_head_alone_goes_to_fp8() -> None:
    weight = nn.Parameter(torch.randn(48, 32))
    assert verdict(lambda x: x.softmax(-1) @ weight, torch.randn(2, 48)).status == "fp8"
