"""Attention with a bias that learns, by the C++ core: the definition, whatever the bias, and models that train."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_compile.kernels.native_attention import biased_backward, forward
from te_compile.ops.biased_attention import (
    aligned,
    biased_attention_backward_reference,
    biased_attention_reference,
)
from te_compile.ops.dropout_bits import growth_of
from te_compile.ops.masked_attention import bits_of_tiles
from te_compile.passes import manager
from tests.compiling import compiled, cosine, relative_error
from tests.needs import HOPPER_CORE
from tests.padded_attention import Checkpointed, gradients, padded

pytestmark = [HOPPER_CORE, pytest.mark.usefixtures("fresh_dynamo")]
CLOSE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
SIZES = [  # heads, heads of keys, queries, keys, features
    (2, 2, 256, 256, 64),
    (4, 2, 512, 512, 64),
    (3, 1, 389, 389, 64),
    (2, 2, 130, 700, 40),
    (2, 1, 700, 65, 56),
    (3, 3, 577, 577, 40),
    (80, 40, 260, 260, 64),  # more heads than there are blocks
    (12, 12, 197, 197, 64),
    (2, 2, 64, 3, 64),
    (2, 2, 1, 129, 64),
    (2, 2, 256, 256, 128),
    (4, 2, 389, 389, 96),
    (2, 2, 130, 700, 72),
    (40, 40, 260, 260, 128),
    (3, 1, 513, 65, 128),
]
BATCH = 2
OWN = [(1, 1), (1, 0), (0, 1), (0, 0)]


def drawn(size: tuple[int, ...], dtype: torch.dtype, own: tuple[int, int]) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k and v, a bias in rows of a multiple of eight, and the gradient of the result."""
    heads, shared, queries, keys, width = size
    shapes = ((queries, heads), (keys, shared), (keys, shared), (queries, heads))
    *operands, grad = (torch.randn(BATCH, *shape, width, device="cuda", dtype=dtype) for shape in shapes)
    of_bias = (BATCH if own[0] else 1, heads if own[1] else 1, queries, aligned(keys))
    return operands, torch.randn(of_bias, device="cuda", dtype=dtype), grad


def assert_close(got: Tensor, wanted: Tensor, bound: float) -> None:
    """In aggregate, and for the columns of the last dimension."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape and bool(got.isfinite().all())
    assert relative_error(got, wanted) < bound
    rows = wanted.float().flatten(0, -2)
    norms, few = rows.norm(dim=0), len(rows) < 16  # such a column may be near nothing, and rounding of weights is not
    columns = (got.float().flatten(0, -2) - rows).norm(dim=0) / norms
    assert columns[norms > (0.5 if few else 0.1) * norms.mean()].max() < 3 * bound


def check(size: tuple[int, ...], own: tuple[int, int], dtype: torch.dtype, probability: float, hide: float) -> None:
    (q, k, v), bias, grad = drawn(size, dtype, own)
    queries, keys, scale = size[2], size[3], size[4] ** -0.5
    if hide:
        shown = torch.rand(bias.shape, device="cuda") < 0.4
        shown[..., 0] = True
        bias = bias.where(shown, hide)
    bits = bits_of_tiles(q, k, probability) if probability else None
    growth = growth_of(probability)
    out, logsumexp = forward(q, k, v, -1, -1, scale, bits, growth, bias=bias)
    wanted, sums = biased_attention_reference(q, k, v, bias, bits, probability, scale)
    assert out.is_contiguous()
    assert_close(out, wanted, CLOSE[dtype])
    torch.testing.assert_close(logsumexp, sums, rtol=1e-4, atol=1e-4)
    got = biased_backward(grad, q, k, v, bias, out, logsumexp, scale, bits, growth, True)
    given = (grad, q, k, v, bias, wanted, sums, bits, probability, scale, True)
    right = biased_attention_backward_reference(*given)
    for one, other in zip(got[:3], right[:3], strict=True):
        assert_close(one, other, 2 * CLOSE[dtype])
    assert got[3].shape == (BATCH, size[0], keys, aligned(queries))
    assert_close(got[3][..., :queries], right[3][..., :queries], 2 * CLOSE[dtype])
    *rest, nothing = biased_backward(grad, q, k, v, bias, out, logsumexp, scale, bits, growth, False)
    assert nothing.numel() == 0
    for one, other in zip(rest, right[:3], strict=True):
        assert_close(one, other, 2 * CLOSE[dtype])


@pytest.mark.parametrize("own", OWN, ids=["own", "own-for-rows", "own-for-heads", "shared"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_they_compute_the_definition(size: tuple[int, ...], own: tuple[int, int]) -> None:
    check(size, own, (torch.bfloat16, torch.float16)[torch.randint(2, ()).item()], 0.0, 0.0)


@pytest.mark.parametrize("hide", [-torch.inf, torch.finfo(torch.bfloat16).min], ids=["infinity", "lowest"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_bias_that_hides_keys(size: tuple[int, ...], hide: float) -> None:
    check(size, (1, 1), torch.bfloat16, 0.0, hide)


@pytest.mark.parametrize("size", [size for size in SIZES if size[0] == size[1]], ids=str)
def test_with_a_dropout_too(size: tuple[int, ...]) -> None:
    """Whatever the lengths: bits are of whole tiles."""
    check(size, (0, 1), torch.bfloat16, 0.1, 0.0)


def test_a_query_that_sees_nothing_has_no_gradients() -> None:
    (q, k, v), bias, grad = drawn((2, 2, 300, 300, 64), torch.bfloat16, (1, 1))
    bias[:, :, 3], bias[:, :, 200] = -torch.inf, torch.finfo(torch.bfloat16).min
    out, logsumexp = forward(q, k, v, -1, -1, 0.1, bias=bias)
    assert not out[:, 3].any() and bool((logsumexp[:, :, [3, 200]] == -torch.inf).all())
    assert relative_error(out[:, 200], v.float().mean(1)) < 1e-2
    dq, *rest, ds = biased_backward(grad, q, k, v, bias, out, logsumexp, 0.1, None, 1.0, True)
    assert not dq[:, [3, 200]].any() and not ds[..., [3, 200]].any()
    assert all(bool(each.isfinite().all()) for each in (dq, *rest))


class Block(nn.Module):
    """Attention as T5 has it: a bias by distance and head that learns, lowest where a row of the batch has ended."""

    def __init__(self, width: int = 512, heads: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.size, self.dropout = width // heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Embedding(32, heads)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in self.qkv(x).unflatten(2, (3, -1, self.size)).unbind(2))
        place = torch.arange(x.shape[1], device=x.device)
        bias = self.table((place[:, None] - place).abs().clamp(max=31)).permute(2, 0, 1).unsqueeze(0)
        bias = bias.where(there[:, None, None, :].bool(), torch.finfo(x.dtype).min)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=self.dropout)
        return self.out(y.transpose(1, 2).flatten(2))


def truth(model: nn.Module, x: Tensor, there: Tensor) -> tuple[Tensor, nn.Module]:
    """The result in fp32, and the model that it is of: in bf16 the table's gradient is added up term by term, of which
    few count, and is 5% off itself."""
    exact = deepcopy(model).float()
    return exact(x.float(), there), exact


def agree(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], least: float) -> bool:
    """A bias of keys shifts all scores of a query alike: the gradient of such is rounding."""
    pairs = zip(got, wanted, strict=True)
    return all(cosine(one, other) > least for one, other in pairs if other.dim() == 2)


@pytest.mark.parametrize("wrap", [lambda block: block, Checkpointed], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("exclude", [["*"], []], ids=["bf16", "fp8"])
def test_a_model_trains_as_under_pytorchs_kernels(wrap: Any, exclude: list[str]) -> None:
    model = wrap(Block()).to("cuda", torch.bfloat16)
    fast = compiled(model, exclude=exclude, cost_model=False, compiler="inductor")
    least = 0.998 if exclude else 0.97
    with manager.recording() as records:
        for length in (384, 391, 203):  # the second one makes it a symbol
            x, there = padded(length)
            y, (wanted, exact) = fast(x, there), truth(model, x, there)
            dy = torch.randn_like(y)
            assert cosine(y, wanted) > least
            assert agree(gradients(y, model, dy), gradients(wanted, exact, dy.float()), least)
    assert {each.kernel for record in records for each in record.plan.attentions} == {"biased"}


def test_a_dropout_of_the_model_is_drawn_beside_the_bias() -> None:
    model = Block(dropout=0.2).to("cuda", torch.bfloat16)
    fast = compiled(model, exclude=["*"], cost_model=False, compiler="inductor")
    x, there = padded(203)
    results, dy = [], torch.randn_like(x)
    for _ in range(64):
        y = fast(x, there)
        results.append((y.float().detach(), *gradients(y, model, dy)))
    assert not torch.equal(results[0][0], results[1][0])
    model.dropout = 0.0
    wanted = model(x, there)
    means = [torch.stack(each).float().mean(0) for each in zip(*results, strict=True)]
    assert cosine(means[0], wanted) > 0.99 and agree(tuple(means[1:]), gradients(wanted, model, dy), 0.95)


def test_cuda_graphs_replay_it() -> None:
    model = Block().to("cuda", torch.bfloat16)
    fast = compiled(model, mode="reduce-overhead", cost_model=False, compiler="inductor")
    for _ in range(5):
        x, there = padded(384)
        there[1, torch.randint(192, 384, ()).item() :] = 0  # a delayed scale does not foresee a row of a few tokens
        y, (wanted, exact) = fast(x, there), truth(model, x, there)
        dy = torch.randn_like(y)
        assert cosine(y, wanted) > 0.97
        assert agree(gradients(y, model, dy), gradients(wanted, exact, dy.float()), 0.97)
