"""One head of keys and values for all queries: attention is told where a kernel shares heads, else left alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_compile
from te_compile.passes.share_one_head import BROADCAST, SHARED, share_one_head
from te_compile.passes.text import ops_text
from tests.capturing import captured, rewritten

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH, HEADS, LENGTH, WIDTH = 2, 5, 7, 16


def heads(count: int, dtype: torch.dtype = torch.bfloat16, batch: int = BATCH) -> Tensor:
    return torch.randn(batch, count, LENGTH, WIDTH).to(dtype).requires_grad_()


changed = partial(rewritten, share_one_head, tolerance=5e-2)  # of bfloat16


def marks(graph: Any, key: str) -> list[Any]:
    return [node.meta[key] for node in graph.nodes if key in node.meta]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_told_that_one_head_is_for_all(causal: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)

    count, graph = changed(run, heads(HEADS), heads(1), heads(1))
    assert count == 1 and "enable_gqa=True" in ops_text(graph) and marks(graph, SHARED) == [True]


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def told(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize(
    ("run", "dtype", "reason"), [(masked, torch.bfloat16, "with a mask"), (plain, torch.float32, "in torch.float32")]
)
def test_where_no_fused_kernel_shares_heads_it_stays_and_says_why(
    run: Callable[..., Tensor], dtype: torch.dtype, reason: str
) -> None:
    count, graph = changed(run, *(heads(each, dtype) for each in (HEADS, 1, 1)))
    assert count == 0 and "enable_gqa" not in ops_text(graph)
    assert len(marks(graph, BROADCAST)) == 1 and reason in marks(graph, BROADCAST)[0]


def test_heads_whose_width_is_a_symbol_stay_as_they_are() -> None:
    operands = [heads(HEADS), heads(1), heads(1)]
    for each in operands:
        torch._dynamo.mark_dynamic(each, 3)
    graph = captured(plain, *operands)[0].graph
    count = share_one_head(graph)
    assert count == 0 and "dynamic=False" in "".join(marks(graph, BROADCAST))


def written_into(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v).add_(1.0)


def test_a_result_that_is_changed_in_place_is_not_kept_for_gradients() -> None:
    operands = [heads(HEADS), heads(1), heads(1)]
    graph = captured(written_into, *operands)[0].graph
    count = share_one_head(graph)
    (why,) = marks(graph, BROADCAST)
    assert count == 0 and "in place" in why and "enable_gqa" not in ops_text(graph)
    try:
        torch.autograd.grad(written_into(*operands).sum(), operands)
    except RuntimeError as refused:  # PyTorch 2.15 broadcasts in a kernel that keeps its result, so eager mode fails
        assert "modified by an inplace operation" in str(refused) and torch.__version__ >= "2.14"
    else:
        assert changed(written_into, *operands)[0] == 0
    with torch.no_grad():
        assert share_one_head(captured(written_into, *operands)[0].graph) == 1


@pytest.mark.parametrize(
    ("run", "counts"),
    [(told, (6, 1, 1)), (plain, (1, 1, 1)), (plain, (HEADS, HEADS, HEADS)), (plain, (HEADS, 1, HEADS))],
)
def test_what_broadcasts_no_single_head_is_left_alone(run: Callable[..., Tensor], counts: tuple[int, ...]) -> None:
    count, graph = changed(run, *map(heads, counts))
    assert count == 0 and not marks(graph, SHARED) and not marks(graph, BROADCAST)


def test_a_batch_that_broadcasts_as_well_is_left_alone() -> None:
    count, graph = changed(plain, heads(HEADS), heads(1, batch=1), heads(1, batch=1))
    assert count == 0 and not marks(graph, BROADCAST)


class MultiQuery(nn.Module):
    """Attention with one head of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 64 + 2 * WIDTH), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).split([64, WIDTH, WIDTH], -1)
        q, k, v = (each.view(b, s, -1, WIDTH).transpose(1, 2) for each in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1))


@pytest.mark.parametrize(("dtype", "words"), [(torch.bfloat16, "shared by all"), (torch.float32, "stays broadcast")])
def test_explain_says_what_became_of_it(dtype: torch.dtype, words: str) -> None:
    report = te_compile.explain(MultiQuery().to(dtype), torch.randn(2, 8, 64, dtype=dtype))
    (row,) = report.attentions
    assert words in row.detail
