"""Linears that read one input share what its FP8 copy costs, and are weighed together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from te_compile.passes import speed
from te_compile.passes.input_readers import (
    gain_of,
    price_of_input,
    products_of,
    readers_of_inputs,
    saved_by,
    weights_of,
)


def site(x: object, features: tuple[int, int] = (4096, 1024), **more: Any) -> Any:
    """A linear of 8 tokens that no graph has."""
    known = {"tokens": 8, "padding": (0, 0), "linears": 1, "ends": None, "spell": None}
    return SimpleNamespace(x=x, features=features, **{**known, **more})


def test_readers_are_told_apart_by_the_node_that_they_read() -> None:
    one, other = object(), object()
    sites = [site(one), site(other), site(one)]
    assert readers_of_inputs(sites) == [[sites[0], sites[2]], [sites[1]]]
    assert readers_of_inputs([]) == []


def test_what_is_spelled_out_first_or_a_batch_reads_for_itself() -> None:
    x = object()
    sites = [site(x), site(x, spell=print), site(x, linears=4), site(x)]
    assert readers_of_inputs(sites) == [[sites[0], sites[3]], [sites[1]], [sites[2]]]


@pytest.mark.parametrize("training", [True, False])
def test_the_copy_of_an_input_is_paid_for_once(training: bool) -> None:
    x = object()
    q, k = site(x, (4096, 4096)), site(x)
    alone = [speed.gain_microseconds(8, *each.features, training=training) for each in (q, k)]
    assert [gain_of([each], training) for each in (q, k)] == pytest.approx(alone)
    together = gain_of([q, k], training)
    assert together == pytest.approx(sum(alone) + price_of_input(q, training)) and together > sum(alone)
    assert saved_by(k, training) == pytest.approx(alone[1] + price_of_input(k, training))


def test_experts_that_share_rows_are_one_product_of_many_weights() -> None:
    grouped, batched = site(object(), linears=8, ends=object()), site(object(), linears=8)
    assert (products_of(grouped), weights_of(grouped)) == (1, 8)
    assert (products_of(batched), weights_of(batched)) == (8, 1)
    assert price_of_input(batched, False) == 8 * price_of_input(grouped, False)
