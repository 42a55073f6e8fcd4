"""Masks that a graph proves to be causal or empty go away; every other one stays, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from te_compile.passes import fold_masks, manager
from te_compile.passes.fold_masks import meaning
from te_compile.passes.fold_masks import window as window_of
from te_compile.passes.regions import regions_of
from tests.capturing import captured
from tests.compiling import BACKEND

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LENGTH = 24
Mask = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """Attention under the mask that ``mask(x)`` builds inside the graph."""

    def __init__(self, mask: Mask, recomputed: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.mask, self.recomputed = mask, recomputed

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        return checkpoint(self.attend, x, mask, use_reentrant=False) if self.recomputed else self.attend(x, mask)


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Query positions [S, 1] and key positions [1, S]."""
    at = torch.arange(x.shape[1], device=x.device)
    return at[:, None], at[None, :]


def causal(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k <= q).expand(x.shape[0], 1, -1, -1)


def additive(x: Tensor) -> Tensor:
    q, k = positions(x)
    return torch.zeros(x.shape[1], x.shape[1]).masked_fill(k > q, float("-inf"))


def one_packed_sequence(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])[None].expand(x.shape[0], -1)
    sequence = (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return (sequence[:, None, :, None] == sequence[:, None, None, :]) & causal(x)


def wide_window(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k <= q) & (k > q - LENGTH)


def wide_window_both_ways(x: Tensor) -> Tensor:
    q, k = positions(x)
    return abs(q - k) < LENGTH


def added_and_scaled(x: Tensor) -> Tensor:
    return torch.where(causal(x), torch.zeros((), dtype=x.dtype), torch.finfo(x.dtype).min) / 8.0


def a_triangle(x: Tensor) -> Tensor:
    return torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device).triu(1)


def a_triangle_of_its_kind(x: Tensor) -> Tensor:
    return x.new_full((x.shape[1], x.shape[1]), float("-inf")).triu(1)


def ones_of_its_kind(x: Tensor) -> Tensor:
    return x.new_ones(x.shape[1], x.shape[1]).tril().bool()


def ones_as_many(x: Tensor) -> Tensor:
    return torch.ones_like(x[0, :, :1] @ x[0, :, :1].T).tril() > 0


def everything(x: Tensor) -> Tensor:
    return positions(x)[0] >= 0


def window(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k <= q) & (k > q - 8)


def filled_by_data(x: Tensor) -> Tensor:
    return x.new_full((x.shape[1], x.shape[1]), x.abs().amax()).tril() > 0


def from_data(x: Tensor) -> Tensor:
    return causal(x) & (x[:, None, None, :, 0] < 1e9)


def written_into(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    mask.view(-1)[-1:].logical_not_()
    return mask


def written_into_flat(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    mask.ravel()[1] = True
    return mask


def written_into_data(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    mask.data[0, 1] = True
    return mask


def written_into_turned(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    mask.moveaxis(0, 1)[1, 0] = True
    return mask


def written_into_by_position(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], x.shape[1]).tril()
    F.hardtanh(mask, 1.0, 2.0, True)
    return mask == 1


def written_into_a_copy(x: Tensor) -> Tensor:
    q, k = positions(x)
    zeros = torch.zeros(1).repeat(x.shape[1])
    zeros[2] = 2.0
    return torch.where(k <= q, zeros, float("-inf"))


def filled_into_a_written_copy(x: Tensor) -> Tensor:
    q, k = positions(x)
    zeros = torch.zeros(x.shape[1], x.shape[1]).clone()
    zeros[:, 2] = 2.0
    return zeros.masked_fill(k > q, float("-inf"))


def of_bytes(x: Tensor) -> Tensor:
    """Differences of bytes are never negative: it hides nothing."""
    at = torch.arange(x.shape[1], dtype=torch.uint8)
    return at[:, None] - at[None, :] >= 0


def of_truths(x: Tensor) -> Tensor:
    """All keys but the first are where the second is."""
    at = torch.arange(x.shape[1])
    return at.bool()[None, :] <= at[:, None]


def a_triangle_without_a_row(x: Tensor) -> Tensor:
    infinite = torch.full((x.shape[1], x.shape[1]), float("-inf"))
    infinite[0].fill_(0.0)
    return infinite.triu(1)


def a_bias(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k - q).float() / 8


def far_below(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1]).triu(1) * -1e4


def far_above(x: Tensor) -> Tensor:
    return added_and_scaled(x) / -1e30


def a_triangle_in_place(x: Tensor) -> Tensor:
    return torch.full((x.shape[1], x.shape[1]), float("-inf")).triu_(1)


def filled_in_place(x: Tensor) -> Tensor:
    return torch.empty(x.shape[1], x.shape[1]).fill_(float("-inf")).triu_(1)


def hidden_in_place(x: Tensor) -> Tensor:
    hidden = torch.ones(x.shape[1], x.shape[1]).triu_(1).bool()
    return torch.zeros_like(hidden, dtype=x.dtype).masked_fill_(hidden, float("-inf"))


def beside_an_empty_cache(x: Tensor) -> Tensor:
    later = torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf")), diagonal=1)
    return torch.hstack([torch.zeros((x.shape[1], 0)), later]).type_as(x)


def by_a_grid(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    q, k = torch.meshgrid(at, at, indexing="ij")
    return k <= q


def a_logarithm(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1]).tril().log()


def read_before_it_is_changed(x: Tensor) -> Tensor:
    infinite = torch.full((x.shape[1], x.shape[1]), float("-inf"))
    row = infinite[:1]
    infinite.triu_(1)
    return row.expand(x.shape[1], -1).tril(-1).nan_to_num(neginf=-3.0)


def patches_with_pixels(pixels: Tensor) -> Tensor:
    """Of pictures of 4 × 6 patches those that have a pixel to see, as keys."""
    patches = pixels.unfold(1, 8, 8).unfold(2, 8, 8)
    return (patches.sum(dim=(-1, -2)) > 0).flatten(1)[:, None, None, :].expand(-1, -1, LENGTH, -1)


def whole_pictures(x: Tensor) -> Tensor:
    return patches_with_pixels(torch.ones(x.shape[0], 32, 48, dtype=torch.bool))


def pictures_with_a_border(x: Tensor) -> Tensor:
    inside = torch.arange(48) < 40
    return patches_with_pixels(torch.ones(x.shape[0], 32, 48, dtype=torch.bool) & inside)


def folded(model: nn.Module, *inputs: Tensor) -> tuple[int, Tensor, Tensor]:
    """How many masks were folded, and the results with and without te_fp8; linears stay in high precision."""
    fast = torch.compile(model, backend=BACKEND, options={"compiler": "aot_eager", "exclude": "*"})
    with manager.recording() as records:
        got = fast(*inputs)
    count = sum(each.count for record in records for each in record.passes if each.name == "fold_masks")
    return count, got, model(*inputs)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("mask", [
    causal, additive, one_packed_sequence, wide_window, wide_window_both_ways, everything, added_and_scaled, a_triangle,
    a_triangle_of_its_kind, ones_of_its_kind, ones_as_many, a_triangle_in_place, filled_in_place, hidden_in_place,
    beside_an_empty_cache, by_a_grid, a_logarithm, whole_pictures,
])  # fmt: skip
def test_a_mask_built_from_positions_alone_is_folded(mask: Mask, recomputed: bool) -> None:
    count, got, wanted = folded(Attention(mask, recomputed), torch.randn(2, LENGTH, 32))
    assert count == 1
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("mask", [
    window, from_data, filled_by_data, written_into, written_into_flat, written_into_data, written_into_turned,
    written_into_by_position, written_into_a_copy, filled_into_a_written_copy, a_triangle_without_a_row, a_bias,
    far_below, far_above, read_before_it_is_changed, pictures_with_a_border,
])  # fmt: skip
def test_a_mask_that_says_more_or_that_data_decide_stays(mask: Mask, recomputed: bool) -> None:
    count, got, wanted = folded(Attention(mask, recomputed), torch.randn(2, LENGTH, 32))
    assert count == 0
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("mask", "expected"), [
    (causal, 1), (everything, 1), (added_and_scaled, 1), (a_triangle, 1), (a_triangle_in_place, 1),
    (filled_in_place, 1), (hidden_in_place, 1), (a_triangle_of_its_kind, 1), (ones_of_its_kind, 1), (ones_as_many, 1),
    (window, 0), (from_data, 0), (far_below, 0),
    (written_into_flat, 0), (written_into_a_copy, 0), (filled_into_a_written_copy, 0),
    (of_bytes, 0), (of_truths, 0), (a_triangle_without_a_row, 0),
])  # fmt: skip
def test_with_a_symbolic_length_masks_are_folded_that_are_causal_or_empty_at_any(mask: Mask, expected: int) -> None:
    x = torch.randn(2, LENGTH, 32)
    torch._dynamo.mark_dynamic(x, 1)
    count, got, wanted = folded(Attention(mask), x)
    assert count == expected
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


class MadeByTheFirst(Attention):
    """Two blocks that are recomputed, of which the first one makes the mask and returns it, as T5's do."""

    def first(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = self.mask(x)
        return self.attend(x, mask), mask

    def forward(self, x: Tensor) -> Tensor:
        x, mask = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint(self.attend, x, mask, use_reentrant=False)


@pytest.mark.parametrize("mask", [causal, additive, added_and_scaled, a_bias])
def test_a_mask_that_another_body_returns_stays_and_nothing_fails(mask: Mask) -> None:
    count, got, wanted = folded(MadeByTheFirst(mask), torch.randn(2, LENGTH, 32))
    assert count == (mask is not a_bias)  # that of the first block
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


class WithRoom(nn.Module):
    """Queries and more keys, as of a prompt whose cache has room for what follows; query i is at ``first + i``."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.qkv, self.first = nn.Linear(32, 96), first

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        q, k, v = self.qkv(torch.cat([x, cache], dim=1)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4).unbind(0)
        at = torch.arange(k.shape[2])
        shown = at[None, :] <= at[: x.shape[1], None] + self.first
        return F.scaled_dot_product_attention(q[:, :, : x.shape[1]], k, v, attn_mask=shown)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("first", "expected"), [(0, 1), (1, 0), (5, 0)])
def test_a_mask_before_a_cache_with_room_is_folded_if_it_begins_at_the_first_key(
    first: int, expected: int, dynamic: bool
) -> None:
    x, cache = torch.randn(2, 8, 32), torch.randn(2, 5, 32)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1)
        torch._dynamo.mark_dynamic(cache, 1)
    count, got, wanted = folded(WithRoom(first), x, cache)
    assert count == expected
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


class Scaled(Attention):
    """Attention with a scale of its own."""

    def __init__(self, mask: Mask, scale: float) -> None:
        super().__init__(mask)
        self.scale = scale

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale).transpose(1, 2).flatten(2)


class ScaledEager(Scaled):
    """The same spelled out."""

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.mT * self.scale).masked_fill(~mask, float("-inf"))
        return (F.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("scale", "expected"), [(0.7, 1), (-0.7, 0), (0.0, 0)])
@pytest.mark.parametrize("kind", [Scaled, ScaledEager])
def test_a_causal_mask_is_folded_where_the_scale_is_positive(
    kind: type[Scaled], scale: float, expected: int, dynamic: bool
) -> None:
    """A kernel that hides by -inf before it scales makes a NaN of it otherwise."""
    x = torch.randn(2, LENGTH, 32)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1)
    count, got, wanted = folded(kind(causal, scale), x)
    assert count == expected
    assert got.isfinite().all()
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


class WithoutSomeQueries(Attention):
    """The first queries are set to zero and see all keys, by the model's own choice: these two conditions are what
    ``recognise_attention`` writes, had it found that a mask hides those rows."""

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        at = torch.arange(x.shape[1])[:, None]
        seen = torch.where(at <= 3, torch.ones((), dtype=torch.bool), mask)
        attention = F.scaled_dot_product_attention(q.masked_fill(at <= 3, 0.0), k, v, attn_mask=seen)
        return attention.transpose(1, 2).flatten(2)


def test_queries_that_the_model_itself_sets_to_zero_stay_so() -> None:
    count, got, wanted = folded(WithoutSomeQueries(causal), torch.randn(2, LENGTH, 32))
    assert count == 0
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


class Eager(Attention):
    """Attention spelled out, as ``attn_implementation="eager"`` does."""

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        return (F.softmax(q @ k.mT / 4.0 + mask, dim=-1) @ v).transpose(1, 2).flatten(2)


class ScaledWithItsMask(Eager):
    """The mask is added to the scores, and both are divided."""

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        return (F.softmax((q @ k.mT + mask) / 4.0, dim=-1) @ v).transpose(1, 2).flatten(2)


def as_added(mask: Mask) -> Mask:
    """``mask`` as the smallest number where it hides."""
    smallest = torch.finfo(torch.float32).min

    def build(x: Tensor) -> Tensor:
        shown = mask(x).expand(x.shape[0], 1, x.shape[1], x.shape[1])
        return torch.where(shown, torch.zeros((), dtype=x.dtype), smallest)

    return build


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(("mask", "expected"), [(causal, 1), (everything, 1), (window, 0), (from_data, 0)])
@pytest.mark.parametrize("kind", [Eager, ScaledWithItsMask])
def test_masks_of_attention_that_was_spelled_out_are_folded_too(
    kind: type[Eager], mask: Mask, expected: int, recomputed: bool
) -> None:
    count, got, wanted = folded(kind(as_added(mask), recomputed), torch.randn(2, LENGTH, 32))
    assert count == expected
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_huggingface_training_call_loses_its_mask_and_keeps_real_padding() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 64, (2, LENGTH))
    padding = torch.ones_like(ids)
    padding[0, LENGTH - 5 :] = 0
    for attention_mask, expected in ((None, 2), (padding, 0)):
        torch._dynamo.reset()
        fast = torch.compile(model, backend=BACKEND, options={"compiler": "aot_eager", "exclude": "*"})
        arguments = {"input_ids": ids, "attention_mask": attention_mask, "labels": ids, "use_cache": False}
        with manager.recording() as records:
            got = fast(**arguments)
        count = sum(each.count for record in records for each in record.passes if each.name == "fold_masks")
        assert count == expected
        torch.testing.assert_close(got.logits, model(**arguments).logits, rtol=1e-4, atol=1e-4)


def test_meaning_of_masks() -> None:
    whole = torch.ones(4, 4, dtype=torch.bool)
    assert meaning(whole.expand(3, 1, 4, 4), 4, 4) == "all"
    assert meaning(whole.tril().expand(3, 1, 4, 4), 4, 4) == "causal"
    assert meaning(whole.triu(), 4, 4) is None
    unequal = torch.ones(4, 6, dtype=torch.bool)
    assert meaning(unequal.tril(), 4, 6) == "causal" and meaning(unequal.mT.tril(), 6, 4) == "causal"
    assert meaning(unequal.tril(2), 4, 6) is None  # aligned at the end
    assert meaning(unequal.tril()[:, 1:2], 4, 6) is None  # one column for all keys
    assert meaning(unequal.tril()[:1], 1, 6) is None
    different = torch.stack([whole.tril(), whole.tril().fill_diagonal_(False)])
    assert meaning(different, 4, 4) is None


def test_which_masks_are_windows() -> None:
    whole = torch.ones(6, 6, dtype=torch.bool)
    assert window_of(whole.tril().triu(-2)) == (2, 0)
    assert window_of(whole.tril(1).triu(-3).expand(2, 1, 6, 6)) == (3, 1)
    assert window_of(torch.zeros(6, 6).masked_fill(~whole.tril(1).triu(-3), float("-inf"))) == (3, 1)
    assert window_of(whole.triu()) == (0, 5)
    for other in (whole.tril(-1), whole.tril(1).triu(1), whole.tril().triu(-2)[:, :5], whole.tril().triu(-2).flip(1)):
        assert window_of(other) is None
    one_less = whole.tril().triu(-2)
    one_less[3, 2] = False
    assert window_of(one_less) is None
    assert window_of(torch.stack([whole.tril().triu(-2), whole.tril().triu(-1)])) is None
    assert window_of(torch.randn(6, 6)) is None


def test_a_mask_of_many_layers_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        inner = getattr(fold_masks, name)
        return lambda *given: (looked.append(name), inner(*given))[1]

    def run(x: Tensor) -> Tensor:
        first, second = causal(x), window(x)
        for mask in (first, second, second, first, second):
            x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask)[:, 0]
        return x

    for name in ("meaning", "window"):
        monkeypatch.setattr(fold_masks, name, noting(name))
    gm, _ = captured(run, torch.randn(2, LENGTH, 8))
    regions, _ = regions_of(gm)
    assert fold_masks.fold_masks(regions) == 2
    assert sorted(looked) == ["meaning", "meaning", "window"]
