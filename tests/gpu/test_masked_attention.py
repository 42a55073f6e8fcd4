"""Attention under masks by tiles, by the C++ core: the definition, whatever the mask, and models that are padded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_compile.kernels.mask_tiles import mask_tiles
from te_compile.kernels.native_attention import backward, forward
from te_compile.ops import native_implementations
from te_compile.ops.dropout_bits import growth_of
from te_compile.ops.mask_tiles import mask_tiles_reference
from te_compile.ops.masked_attention import (
    bits_of_tiles,
    masked_attention_backward_reference,
    masked_attention_reference,
)
from te_compile.passes import manager
from tests.compiling import compiled, cosine, relative_error
from tests.masks import KINDS, drawn_mask
from tests.needs import HOPPER_CORE
from tests.padded_attention import Checkpointed, gradients, padded

pytestmark = [HOPPER_CORE, pytest.mark.usefixtures("fresh_dynamo")]
CLOSE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
SIZES = [  # heads, heads of keys, queries, keys, features
    (2, 2, 256, 256, 64),
    (4, 2, 512, 512, 128),
    (3, 1, 389, 389, 128),
    (2, 2, 130, 700, 72),
    (2, 1, 700, 65, 96),
    (3, 3, 577, 577, 40),
    (80, 40, 260, 260, 64),  # more heads than there are blocks
    (2, 2, 64, 1, 128),
]
DROPPED = [
    (2, 2, 256, 256, 64),
    (4, 4, 128, 512, 128),
    (3, 3, 389, 389, 128),
    (2, 2, 321, 193, 72),
    (2, 2, 130, 60, 64),
    (40, 40, 300, 320, 64),
    (2, 2, 1, 129, 128),
]


def drawn(size: tuple[int, ...], dtype: torch.dtype, packed: bool = False) -> list[Tensor]:
    """q, k, v and the gradient of the result, [2, S, H, D]; packed: as parts of what one projection writes."""
    heads, shared, queries, keys, width = size
    if packed and queries == keys:
        counts = (heads, shared, shared, heads)
        return [*torch.randn(2, queries, sum(counts), width, device="cuda", dtype=dtype).split(counts, 2)]
    shapes = ((queries, heads), (keys, shared), (keys, shared), (queries, heads))
    return [torch.randn(2, *shape, width, device="cuda", dtype=dtype) for shape in shapes]


def assert_close(got: Tensor, wanted: Tensor, bound: float) -> None:
    assert got.is_contiguous() and got.dtype == wanted.dtype and got.shape == wanted.shape
    assert bool(got.isfinite().all())
    if not wanted.any():
        assert not got.any()
        return
    assert relative_error(got, wanted) < bound
    norms = wanted.float().norm(dim=(0, 1))
    columns = (got.float() - wanted.float()).norm(dim=(0, 1)) / norms
    few = got.shape[0] * got.shape[1] < 16  # such a column may be near nothing, and the rounding of weights is not
    assert columns[norms > (0.5 if few else 0.1) * norms.mean()].max() < 3 * bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(256, 256), (130, 300), (1, 5), (1000, 4100), (4100, 65)], ids=str)
def test_tiles_are_those_of_the_reference(kind: str, size: tuple[int, int]) -> None:
    mask = drawn_mask(kind, 3, *size, "cuda")
    assert all(map(torch.equal, mask_tiles(mask, True), mask_tiles_reference(mask, True)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_they_compute_the_definition(kind: str, size: tuple[int, ...]) -> None:
    dtype = (torch.bfloat16, torch.float16)[torch.randint(2, ()).item()]
    q, k, v, grad = drawn(size, dtype, packed=bool(torch.randint(2, ())))
    rows, row_tiles, columns, column_tiles = mask_tiles(drawn_mask(kind, 2, *size[2:4], "cuda"), True)
    scale = size[4] ** -0.5
    out, logsumexp = forward(q, k, v, -1, -1, scale, mask=(rows, row_tiles))
    wanted, wanted_sums = masked_attention_reference(q, k, v, rows, row_tiles, None, 0.0, scale)
    assert_close(out, wanted, CLOSE[dtype])
    torch.testing.assert_close(logsumexp, wanted_sums, rtol=1e-4, atol=1e-4)
    got = backward(grad, q, k, v, out, logsumexp, -1, -1, scale, mask=(columns, column_tiles))
    given = (grad, q, k, v, wanted, wanted_sums, columns, column_tiles, None, 0.0, scale)
    for one, other, operand in zip(got, masked_attention_backward_reference(*given), (q, k, v), strict=True):
        # Of a softmax of one key nothing is left but rounding.
        least = 1e-3 * size[2] if size[3] == 1 else 0.0
        if other.float().norm() > least:
            assert_close(one, other, 2 * CLOSE[dtype])
        assert one.shape == operand.shape


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", DROPPED, ids=str)
def test_with_a_dropout_too(kind: str, size: tuple[int, ...]) -> None:
    """Whatever the lengths: bits are of whole tiles."""
    q, k, v, grad = drawn(size, torch.bfloat16)
    _, _, queries, keys, width = size
    tiles, scale, probability = mask_tiles(drawn_mask(kind, 2, queries, keys, "cuda"), True), width**-0.5, 0.1
    bits = bits_of_tiles(q, k, probability)
    constants = (-1, -1, scale, bits, growth_of(probability))
    out, logsumexp = forward(q, k, v, *constants, mask=tiles[:2])
    wanted, sums = masked_attention_reference(q, k, v, *tiles[:2], bits, probability, scale)
    assert_close(out, wanted, 6e-3)
    got = backward(grad, q, k, v, out, logsumexp, *constants, mask=tiles[2:])
    right = masked_attention_backward_reference(grad, q, k, v, wanted, sums, *tiles[2:], bits, probability, scale)
    for one, other in zip(got, right, strict=True):
        assert_close(one, other, 1.2e-2)


def test_what_nobody_sees_may_be_anything() -> None:
    q, k, v, grad = drawn((2, 2, 300, 300, 128), torch.bfloat16)
    mask = drawn_mask("padded", 2, 300, 300, "cuda") & (torch.arange(300, device="cuda") < 120)
    rows, row_tiles, columns, column_tiles = mask_tiles(mask, True)
    results = []
    for huge in (1.0, 1e4):
        keys = torch.cat([k[:, :120], huge * k[:, 120:]], 1)
        out, sums = forward(q, keys, v, -1, -1, 0.1, mask=(rows, row_tiles))
        results.append([out, *backward(grad, q, keys, v, out, sums, -1, -1, 0.1, mask=(columns, column_tiles))])
    for one, other in zip(*results, strict=True):
        assert relative_error(one, other) < 1e-3  # dq is added up in another order


class Block(nn.Module):
    """Heads of queries that share keys, under a mask for each row of the batch, as Hugging Face hands it on."""

    def __init__(self, width: int = 512, heads: int = 8, keys: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.size, self.shared, self.dropout = width // heads, heads // keys, dropout
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, keys * self.size), nn.Linear(width, keys * self.size)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(self.shared, 1) for each in (k, v))
        place = torch.arange(x.shape[1], device=x.device)
        mask = (place <= place[:, None]) & seen[:, None, None, :].bool()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("wrap", [lambda block: block, Checkpointed], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("exclude", [["*"], []], ids=["bf16", "fp8"])
def test_a_model_trains_as_under_pytorchs_kernels(wrap: Any, exclude: list[str]) -> None:
    model = wrap(Block()).to("cuda", torch.bfloat16)
    x, seen = padded(384)
    with manager.recording() as records:
        fast = compiled(model, exclude=exclude, cost_model=False, compiler="inductor")
        y = fast(x, seen)
    assert [each.kernel for record in records for each in record.plan.attentions] == ["tiles"]
    wanted, dy = model(x, seen), torch.randn_like(y)
    least = 0.999 if exclude else 0.98
    assert cosine(y, wanted) > least
    got, expected = gradients(y, model, dy), gradients(wanted, model, dy)
    assert all(cosine(one, other) > least for one, other in zip(got, expected, strict=True) if other.norm() > 1)


def test_lengths_may_be_symbols_and_no_other_kernel_runs() -> None:
    model = Block().to("cuda", torch.bfloat16)
    fast = compiled(model, exclude=["*"], cost_model=False, compiler="inductor")
    for length in (384, 391):  # the second one makes it a symbol
        x, seen = padded(length)
        assert cosine(fast(x, seen), model(x, seen)) > 0.999
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fast(x, seen).sum().backward()
        torch.cuda.synchronize()
    names = [each.key for each in profile.key_averages()]
    assert any("attention::forward_kernel" in name for name in names)
    assert any("attention::backward_kernel" in name for name in names)
    assert not any(word in name for name in names for word in ("cudnn", "efficient", "fmha_cutlass", "flash_fwd"))


def test_a_dropout_of_the_model_is_drawn_under_the_mask() -> None:
    model = Block(keys=8, dropout=0.2).to("cuda", torch.bfloat16)
    fast = compiled(model, exclude=["*"], cost_model=False, compiler="inductor")
    for length in (384, 391, 203):  # the second one makes it a symbol
        x, seen = padded(length)
        model.dropout = 0.2
        with manager.recording() as records:
            results, dy = [], torch.randn_like(x)
            for _ in range(64):
                y = fast(x, seen)
                results.append((y.float().detach(), *gradients(y, model, dy)))
        assert [each.kernel for record in records for each in record.plan.attentions] == ["tiles"] * len(records)
        assert len(records) == (length != 203) and not torch.equal(results[0][0], results[1][0])
        model.dropout = 0.0
        wanted = model(x, seen)
        means = [torch.stack(each).float().mean(0) for each in zip(*results, strict=True)]
        assert cosine(means[0], wanted) > 0.99
        # The bias of keys shifts all scores of a query alike: its gradient is rounding.
        pairs = zip(means[1:], gradients(wanted, model, dy), strict=True)
        assert all(cosine(one, other) > 0.97 for one, other in pairs if other.dim() == 2)


def test_cuda_graphs_replay_it() -> None:
    model = Block().to("cuda", torch.bfloat16)
    fast = compiled(model, mode="reduce-overhead", cost_model=False, compiler="inductor")
    with torch.no_grad():
        for length in (384, 384, 384, 384):
            x, seen = padded(length)
            seen[1, torch.randint(1, length, ()).item() :] = 0  # another mask each time
            assert cosine(fast(x, seen), model(x, seen)) > 0.98


def test_where_runs_must_not_differ_pytorchs_kernels_run() -> None:
    model = Block().to("cuda", torch.bfloat16)
    x, seen = padded(256)
    torch.use_deterministic_algorithms(True)
    try:
        with manager.recording() as records:
            compiled(model, exclude=["*"], cost_model=False, compiler="aot_eager")(x, seen)
        operands = [x.detach() for x in drawn((2, 2, 256, 256, 64), torch.bfloat16)]
        tiles = mask_tiles(drawn_mask("left", 2, 256, 256, "cuda"), True)
        made = native_implementations.masked_attention_forward(*operands[:3], *tiles[:2], None, 0.0, 0.1)
        given = (operands[3], *operands[:3], *made, *tiles[2:], None, 0.0, 0.1)
        once, again = (native_implementations.masked_attention_backward(*given) for _ in range(2))
        assert all(map(torch.equal, once, again))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [each.kernel for record in records for each in record.plan.attentions] == [""]
