"""A mask that hides whole rows hides those of the result; what is computed stays the same, rows without a key too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

import te_compile
from te_compile.passes.fold_masks import FOLDED
from te_compile.passes.move_row_masks import move_row_masks
from te_compile.passes.text import ops_text
from tests.capturing import rewritten
from tests.compiling import compiled, relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 3, 6, 5, 16
Run = Callable[..., Tensor]


def heads(length: int = KEYS) -> Tensor:
    return torch.randn(BATCH, HEADS, length, WIDTH, requires_grad=True)


def rows_of(*shape: int) -> Tensor:
    """Some of the rows, not all and not none."""
    rows = torch.rand(shape) < 0.5
    flat = rows.view(-1)
    flat[0], flat[-1] = True, False
    return rows[..., None]


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def changed(run: Run, mask: Tensor) -> tuple[int, Graph]:
    """How many masks of ``run`` moved, and the graph."""
    return rewritten(move_row_masks, run, heads(QUERIES), heads(), heads(), mask)


@pytest.mark.parametrize(
    "shape",
    [(QUERIES,), (1, QUERIES), (BATCH, 1, QUERIES), (BATCH, HEADS, QUERIES), (1, HEADS, QUERIES), (1,)],
    ids=str,
)
@pytest.mark.parametrize("expanded", [True, False])
def test_rows_of_any_kind_are_hidden_behind_attention(shape: tuple[int, ...], expanded: bool) -> None:
    rows = rows_of(*shape)
    mask = rows.expand(*shape, KEYS) if expanded else rows
    count, graph = changed(plain, mask)
    text = ops_text(graph)
    assert count == 1 and "where" in text and "attn_mask=None" in text
    assert [node.meta[FOLDED] for node in graph.nodes if FOLDED in node.meta] == ["rows"]


def test_a_mask_that_hides_nothing_or_everything() -> None:
    for value in (True, False):
        assert changed(plain, torch.tensor(value).expand(BATCH, 1, QUERIES, KEYS))[0] == 1


def test_the_mask_may_be_the_fourth_argument() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, False, scale=0.2)

    assert changed(run, rows_of(QUERIES).expand(QUERIES, KEYS))[0] == 1


def test_whoever_reads_the_result_reads_it_without_the_hidden_rows() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        y = plain(q, k, v, mask)
        return torch.cat([y + 1, y.transpose(1, 2).reshape(y.shape)])

    assert changed(run, rows_of(QUERIES).expand(QUERIES, KEYS))[0] == 1


def written_later(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    own = (mask & mask)[:, :1]
    y = plain(q, k, v, own.expand(QUERIES, KEYS))
    own.logical_not_()
    return y


LEFT: dict[str, tuple[Run, Callable[[], Tensor]]] = {
    "of some keys": (plain, lambda: (torch.arange(KEYS) < 3).expand(QUERIES, KEYS)),
    "in memory of its own": (plain, lambda: rows_of(QUERIES).expand(QUERIES, KEYS).contiguous()),
    "added": (plain, lambda: torch.randn(QUERIES, 1).expand(QUERIES, KEYS)),
    "written to later": (written_later, lambda: rows_of(QUERIES).expand(QUERIES, KEYS).contiguous()),
    "none": (lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v), lambda: rows_of(QUERIES)),
}


@pytest.mark.parametrize("case", LEFT)
def test_other_masks_are_left_alone(case: str) -> None:
    run, mask = LEFT[case]
    count, graph = changed(run, mask())
    assert count == 0 and "where" not in ops_text(graph)


class Layer(nn.Module):
    """Attention under a mask that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: [B, S, 64], mask: broadcast to [B, 4, S, S]."""
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_layer_that_is_given_such_a_mask_trains_as_before(dynamic: bool) -> None:
    model = Layer()
    fast = compiled(model, recipe="current", dynamic=dynamic)
    for length in (8, 12):
        x = torch.randn(2, length, 64)
        rows = torch.arange(length) < torch.tensor([length, length - 3])[:, None]
        results = []
        for mask in (rows[:, None, :, None].expand(2, 1, length, length), None):
            model.zero_grad()
            given = mask if mask is not None else rows[:, None, :, None].repeat(1, 1, 1, length)
            y = fast(x, given)
            y.square().mean().backward()
            results.append([y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        for got, wanted in zip(*results, strict=True):
            assert relative_error(got, wanted) < 2e-2


@pytest.mark.parametrize("dynamic", [False, True, None])
def test_a_mask_of_the_same_shape_that_hides_keys_is_not_taken_for_one(dynamic: bool | None) -> None:
    """Its strides are others, and Dynamo looks at these."""
    model = Layer()
    fast = compiled(model, exclude=["*"], dynamic=dynamic)
    for length in (8, 12):
        x, rows = torch.randn(2, length, 64), rows_of(2, 1, length).expand(2, 1, length, length)
        keys = torch.rand(2, 1, length, length) < 0.5
        for mask in (rows, keys, rows):
            torch.testing.assert_close(fast(x, mask), model(x, mask), rtol=1e-5, atol=1e-5)


def test_explain_says_where_the_mask_went() -> None:
    mask = torch.ones(1, 1, 8, 1, dtype=torch.bool).expand(2, 1, 8, 8)
    (row,) = te_compile.explain(Layer(), torch.randn(2, 8, 64), mask).attentions
    assert row.mask == "folded_rows" and "behind attention" in row.detail and not row.mask_reason
