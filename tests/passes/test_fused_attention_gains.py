"""Attention stays spelled out where a fused kernel would take longer, on a GPU alone, and explain says why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from te_compile.options import Options
from te_compile.passes import fused_attention_gains
from te_compile.passes.attention_scores import NotAttentionError
from te_compile.passes.fused_attention_gains import check_that_kernels_are_faster
from te_compile.passes.softmax_attention import SoftmaxAttention

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    """A GPU's tensors, wherever the tests run."""
    with FakeTensorMode():
        yield


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of ours for a bias, whatever GPU the tests run on."""
    monkeypatch.setattr(fused_attention_gains, "is_run_by_kernels", lambda q, k, v, probability: False)


def node(value: Tensor) -> Node:
    made = Graph().placeholder("x")
    made.meta["example_value"] = value
    return made


def why(
    queries: int,
    keys: int,
    width: int,
    bias: Tensor | None = None,
    *,
    softmax: torch.dtype = HALF,
    dtype: torch.dtype = HALF,
    device: str = "cuda",
    **options: Any,
) -> str:
    """Why attention of this shape stays; "" if a fused kernel may have it."""
    empty = {"dtype": dtype, "device": device}
    query, key = torch.empty(2, 4, queries, width, **empty), torch.empty(2, 4, keys, width, **empty)
    weights = torch.empty(2, 4, queries, keys, dtype=softmax, device=device)
    found = SimpleNamespace(output=node(query), softmax=node(weights), dropout=0.1)
    try:
        check_that_kernels_are_faster(
            cast("SoftmaxAttention", found), node(query), node(key), None if bias is None else node(bias),
            Options.resolve(options),
        )  # fmt: skip
    except NotAttentionError as reason:
        return str(reason)
    return ""


def learned(keys: int, apart: bool = False, learns: bool = True) -> Tensor:
    """[1, H, S, S]; its keys lie ``apart``, as those of a table of positions do."""
    strides = (4 * keys * keys, 1, 4 * keys, 4) if apart else (4 * keys * keys, keys * keys, keys, 1)
    bias = torch.empty_strided((1, 4, keys, keys), strides, dtype=HALF, device="cuda")
    return bias.requires_grad_(learns)


def test_very_few_positions_stay() -> None:
    assert re.match("16 queries and 16 keys are too few for a fused kernel to gain; cost_model=False", why(16, 16, 32))
    assert why(16, 16, 32, learned(16)).startswith("16 queries and 16 keys are too few")
    assert not why(24, 24, 32) and not why(1, 24, 32) and not why(24, 1, 32)


@pytest.mark.parametrize(
    ("keys", "width", "stays"),
    [(256, 64, True), (1024, 32, True), (64, 128, True), (128, 64, False), (64, 32, False), (49, 64, False)],
)
def test_a_bias_that_learns_stays_where_products_are_faster(keys: int, width: int, stays: bool) -> None:
    reason = why(keys, keys, width, learned(keys))
    assert bool(reason) == stays and (
        not stays or f"longer than products for {keys} keys of {width} features" in reason
    )


def test_it_goes_where_rows_of_scores_are_not_aligned_or_more_is_read() -> None:
    assert not why(257, 257, 64, learned(257))
    assert not why(256, 256, 64, learned(256, apart=True))
    assert not why(256, 256, 64, learned(256), softmax=torch.float32)


def test_it_goes_where_nothing_learns() -> None:
    assert not why(256, 256, 64, learned(256, learns=False))
    with torch.no_grad():
        assert not why(256, 256, 64, learned(256))


def test_odd_heads_with_a_bias_that_learns_stay_unless_they_are_short() -> None:
    assert why(197, 197, 52, learned(197)) and not why(49, 49, 20, learned(49))
    assert not why(197, 197, 52, learned(197, learns=False))


@pytest.mark.parametrize("width", [64, 52])
def test_a_bias_that_learns_goes_where_kernels_of_ours_run(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def run(q: Tensor, k: Tensor, v: Tensor, probability: float) -> bool:
        asked.append((*q.shape, *k.shape))
        return probability == 0.1

    monkeypatch.setattr(fused_attention_gains, "is_run_by_kernels", run)
    assert not why(256, 128, width, learned(256))
    assert asked == [(2, 256, 4, (width + 7) // 8 * 8, 2, 128, 4, (width + 7) // 8 * 8)]
    assert bool(why(64, 64, 128, learned(64)))  # of few positions ours are not the faster


@pytest.mark.parametrize("option", [{"save_memory": True}, {"cost_model": False}])
def test_options_that_ask_for_fused_kernels_have_them(option: dict[str, bool]) -> None:
    assert not why(16, 16, 32, **option) and not why(256, 256, 64, learned(256), **option)


def test_only_speed_on_a_gpu_counts() -> None:
    assert not why(16, 16, 32, device="cpu") and not why(16, 16, 32, dtype=torch.float32)
