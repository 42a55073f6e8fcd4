"""Attention with sinks: softmax over one column more, in float64, with its gradients; on the kernels of a CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from te_compile.ops.registry import Target
from te_compile.ops.sink_attention import SINK_ATTENTION, runs_on_the_efficient_kernel
from te_compile.ops.window_attention import (
    EVERYTHING,
    WINDOW_ATTENTION,
    beside_sinks,
    gradient_of_sinks,
    visible_within,
)
from tests.compiling import relative_error
from tests.sink_attention import plain

BATCH, HEADS, LENGTH, WIDTH, SCALE = 2, 4, 19, 8, 0.3


def drawn(keys: int = HEADS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v [B, H, S, D] and sinks [B, H, S, 1]."""
    shapes = [(BATCH, count, LENGTH, WIDTH) for count in (HEADS, keys, keys)] + [(BATCH, HEADS, LENGTH, 1)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def agree(got: Tensor, wanted: Tensor, leaves: list[Tensor]) -> None:
    assert relative_error(got, wanted) < 1e-6
    grad = torch.randn_like(got)
    gradients = (torch.autograd.grad(y, leaves, grad.to(y.dtype), allow_unused=True) for y in (got, wanted))
    # A sink's gradient may sum over queries, and what cancels there leaves the roundings of what was added.
    rounding = 2.0**-24 * float((grad * wanted).abs().sum())
    for one, other in zip(*gradients, strict=True):
        assert one.shape == other.shape
        assert (one.double() - other.double()).norm() < 1e-5 * other.double().norm() + rounding


def causal() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("given", "mask"),
    [
        ({}, None),
        ({"is_causal": True}, causal()),
        ({"attn_mask": causal()}, causal()),
        ({"attn_mask": torch.linspace(-3, 3, LENGTH)}, torch.linspace(-3, 3, LENGTH)),
    ],
    ids=["all", "causal", "bool", "added"],
)
def test_it_is_softmax_over_one_column_more(given: dict[str, Any], mask: Tensor | None) -> None:
    leaves = drawn()
    q, k, v, sinks = leaves
    agree(SINK_ATTENTION(q, k, v, scale=SCALE, sinks=sinks, **given), plain(*leaves, mask, scale=SCALE), leaves)


def test_heads_are_shared() -> None:
    leaves = drawn(keys=2)
    q, k, v, sinks = leaves
    agree(SINK_ATTENTION(q, k, v, scale=SCALE, enable_gqa=True, sinks=sinks), plain(*leaves, scale=SCALE), leaves)


def test_sinks_may_be_one_for_each_head() -> None:
    q, k, v, _ = drawn()
    sinks = torch.randn(1, HEADS, 1, 1, requires_grad=True)
    agree(SINK_ATTENTION(q, k, v, scale=SCALE, sinks=sinks), plain(q, k, v, sinks, scale=SCALE), [q, k, v, sinks])


def test_a_query_without_keys_gets_nothing_and_gives_nothing() -> None:
    q, k, v, sinks = drawn()
    mask = torch.arange(LENGTH)[:, None].expand(LENGTH, LENGTH) % 2 == 0
    out = SINK_ATTENTION(q, k, v, mask, sinks=sinks)
    out.sum().backward()
    assert not out[:, :, 1::2].any() and out[:, :, ::2].all()
    assert q.grad is not None and not q.grad[:, :, 1::2].any() and not sinks.grad[:, :, 1::2].any()


def test_16_bits_are_added_up_in_32_where_the_model_did_that() -> None:
    q, k, v, sinks = (x.detach() for x in drawn(dtype=torch.bfloat16))
    far = 40 * q  # scores whose roundings in 16 bits are as large as a score that counts
    right = plain(far, k, v, sinks, scale=SCALE)
    wide, narrow = (SINK_ATTENTION(far, k, v, scale=SCALE, sinks=sinks, wide=wide) for wide in (True, False))
    assert wide.dtype == torch.bfloat16 and relative_error(wide, right) < 5e-3 < relative_error(narrow, right)


def test_dropout_is_refused() -> None:
    q, k, v, sinks = drawn()
    with pytest.raises(ValueError, match=r"dropout_p=0\.1"):
        SINK_ATTENTION(q, k, v, None, 0.1, sinks=sinks)


@pytest.mark.parametrize("keys", [4, 2])
@pytest.mark.parametrize("window", [(3, 0), (2, 5), (EVERYTHING, 0), (EVERYTHING, EVERYTHING), (0, EVERYTHING)])
def test_in_a_window_it_is_the_same(window: tuple[int, int], keys: int) -> None:
    leaves = drawn(keys)
    q, k, v, sinks = leaves
    mask = visible_within(LENGTH, *window, torch.device("cpu"))
    agree(WINDOW_ATTENTION(q, k, v, *window, SCALE, sinks), plain(*leaves, mask, scale=SCALE), leaves)


def test_sinks_that_learn_nothing_get_no_gradient() -> None:
    q, k, v, sinks = drawn()
    WINDOW_ATTENTION(q, k, v, EVERYTHING, 0, SCALE, sinks.detach()).sum().backward()
    assert q.grad is not None and sinks.grad is None


def test_large_sinks_leave_nothing_and_small_ones_everything() -> None:
    logsumexp = torch.tensor([0.0, 5.0, -3.0, -math.inf])
    kept, total = beside_sinks(logsumexp, torch.tensor([300.0, -300.0, -math.inf, 2.0]))
    torch.testing.assert_close(kept, torch.tensor([0.0, 1.0, 1.0, 0.0]))
    torch.testing.assert_close(total, torch.tensor([300.0, 5.0, -3.0, 2.0]))
    assert gradient_of_sinks(torch.ones(2), total[:2], torch.tensor([300.0, -300.0])).tolist() == [-1.0, 0.0]


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        ({}, True),
        ({"target": Target("cpu")}, False),
        ({"target": Target("cuda", (7, 5))}, False),
        ({"target": Target("rocm")}, False),
        ({"dtype": torch.float32}, False),
        ({"width": 12}, False),
        ({"value_width": 20}, False),
        ({"keys": 17}, True),  # without a mask there are no rows that have to be aligned
        ({"keys": 17, "masked": True}, False),
        ({"keys": 24, "masked": True}, True),
    ],
    ids=str,
)
def test_what_the_efficient_kernel_takes(change: dict[str, Any], runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"target": Target("cuda", (9, 0)), "dtype": torch.bfloat16, "width": 8, "value_width": 16, "keys": 16}
    given |= {"masked": False} | change
    monkeypatch.setattr(Target, "of", lambda device: given["target"])
    q = torch.empty(1, 2, 19, given["width"], dtype=given["dtype"])
    k, v = (torch.empty(1, 2, given["keys"], given[name], dtype=q.dtype) for name in ("width", "value_width"))
    mask = torch.zeros(19, given["keys"]) if given["masked"] else None
    assert runs_on_the_efficient_kernel(q, k, v, mask) == runs


def test_its_sums_of_gradients_are_not_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "of", lambda device: Target("cuda", (9, 0)))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    q = torch.empty(1, 2, 16, 8, dtype=torch.bfloat16)
    assert not runs_on_the_efficient_kernel(q, q, q, None)
