"""Kernels of attention with dropout: the very bits of the reference, and what its definition says in fp64."""

from __future__ import annotations

import pytest
import torch

from te_compile.kernels.attention_tiles import AttentionTile, Tiles
from te_compile.kernels.dropout_attention import forward
from te_compile.kernels.dropout_attention_backward import backward
from te_compile.kernels.dropout_bits import draw
from te_compile.ops.dropout_bits import dropout_bits_reference, unpacked
from tests.compiling import relative_error
from tests.dropout_attention import Sizes, drawn, expected

SIZES = {
    "one tile": Sizes(1, 64, 64, 1, 32),
    "many": Sizes(2, 192, 192, 2, 64),
    "ragged": Sizes(2, 133, 133, 2, 32),
    "odd width": Sizes(1, 65, 65, 2, 48),
    "fewer keys": Sizes(1, 150, 71, 2, 32),
    "fewer queries": Sizes(1, 71, 150, 2, 32),
    "one query": Sizes(2, 1, 100, 2, 32),
    "one key": Sizes(1, 40, 1, 2, 32),
}
TILES = [
    Tiles(AttentionTile(64, 64, 4, 1), AttentionTile(32, 64, 4, 1), AttentionTile(64, 64, 4, 1)),
    Tiles(AttentionTile(32, 128, 4, 2, True), AttentionTile(64, 128, 4, 2, True), AttentionTile(32, 64, 4, 2, True)),
    Tiles(AttentionTile(128, 64, 4, 2, True), AttentionTile(128, 64, 4, 2, True), AttentionTile(128, 64, 4, 2, True)),
]
CLOSE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


def seed(device: str) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, (1,), device=device)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9, 2**-16])
@pytest.mark.parametrize(("heads", "queries", "keys"), [(3, 65, 70), (1, 1, 1), (2, 64, 512)])
def test_the_bits_are_those_of_the_reference(
    heads: int, queries: int, keys: int, probability: float, device: str
) -> None:
    key = seed(device)
    want = dropout_bits_reference(key, heads, queries, keys, probability)
    assert torch.equal(draw(key, heads, queries, keys, probability), want)


@pytest.mark.parametrize("length", [64, 200, 700])
def test_bits_that_nobody_sees_are_all_that_may_be_missing(length: int, device: str) -> None:
    key = seed(device)
    seen = torch.ones(length, length, device=device).tril().bool()
    want = unpacked(dropout_bits_reference(key, 2, length, length, 0.5), length)
    got = unpacked(draw(key, 2, length, length, 0.5, causal=True), length)
    assert torch.equal(got & seen, want & seen)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("tiles", TILES, ids=["square", "wide", "tall"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_the_kernels_compute_the_definition(sizes: Sizes, tiles: Tiles, causal: bool, device: str) -> None:
    if causal and sizes.queries != sizes.keys:
        pytest.skip("causal attention has as many keys as queries here")
    dtype = torch.bfloat16 if tiles is TILES[0] and device == "cuda" else torch.float16  # which the interpreter knows
    packed = sizes.queries == sizes.keys
    operands = drawn(sizes, device, dtype, packed)
    bits = dropout_bits_reference(seed(device), sizes.batch * sizes.heads, sizes.queries, sizes.keys, 0.3)
    scale = sizes.width**-0.5
    given = (operands.q, operands.k, operands.v, bits)
    out, logsumexp, gradients = expected(operands, bits, 0.3, causal, scale)
    got = forward(*given, 0.3, causal, scale, tiles)
    assert got[0].is_contiguous() and relative_error(got[0], out) < CLOSE[dtype]
    assert relative_error(got[1], logsumexp) < 1e-3
    of_inputs = backward(operands.grad, *given, *got, 0.3, causal, scale, tiles)
    for one, wanted in zip(of_inputs, gradients, strict=True):
        assert one.dtype == dtype and one.is_contiguous()
        if sizes.keys > 1:
            assert relative_error(one, wanted) < CLOSE[dtype]
        else:  # a softmax of one has no gradient but what rounding leaves
            assert (one - wanted).abs().max() < 20 * CLOSE[dtype]


def test_scores_far_below_zero_make_no_nan_where_there_are_no_keys(device: str) -> None:
    sizes, scale = Sizes(1, 70, 70, 1, 32), 0.05
    operands = drawn(sizes, device, torch.float16, shift=9.0)  # scores around -130: e^130 is no number of fp32
    bits = dropout_bits_reference(seed(device), 1, 70, 70, 0.2)
    given = (operands.q, operands.k, operands.v, bits)
    out, logsumexp, gradients = expected(operands, bits, 0.2, False, scale)
    assert logsumexp.max() < -88
    got = forward(*given, 0.2, False, scale)
    assert relative_error(got[0], out) < 2e-3
    for one, wanted in zip(backward(operands.grad, *given, *got, 0.2, False, scale), gradients, strict=True):
        assert torch.isfinite(one).all() and relative_error(one, wanted) < 1e-2
