"""Where DistributedDataParallel cuts a graph, later pieces know which masks an earlier one made as constants."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F

from te_compile.passes import constants_across_cuts, manager
from te_compile.passes.fold_masks import KNOWN_VALUE
from tests.compiling import compiled, gradients

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_rank")
LENGTH, WIDTH, DEPTH = 16, 32, 3
Inputs = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def small_first_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 1 MiB would take all of a small model."""
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1)


class Block(nn.Module):
    """Attention under a mask that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4).unbind(0)
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Stack(nn.Module):
    """Blocks under one mask, which ``mask`` makes of the model's inputs; ``between`` is done to it after each block."""

    def __init__(self, mask: Callable[..., Tensor], between: Callable[[Tensor], object] = lambda mask: None) -> None:
        super().__init__()
        self.mask, self.between = mask, between
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        mask = self.mask(x, *others)
        for block in self.blocks:
            x = block(x, mask)
            self.between(mask)
        return x


def causal(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1], device=x.device)
    return (at[None, :] <= at[:, None]).expand(x.shape[0], 1, -1, -1)


def additive(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1], device=x.device)
    hidden = torch.full((LENGTH, LENGTH), float("-inf"))
    return torch.where(at[None, :] <= at[:, None], torch.zeros(()), hidden)[None, None]


def spelled(x: Tensor) -> Tensor:
    """As PyTorch 2.11 captures comparisons that Hugging Face's masks are made of."""
    at = torch.arange(x.shape[1], device=x.device)
    return at[None, :].__le__(at[:, None]).__eq__(torch.ones((), dtype=torch.bool))[None, None]


def padded(x: Tensor, kept: Tensor) -> Tensor:
    return causal(x) & kept[:, None, None, :]


def hide_the_first(mask: Tensor) -> None:
    mask[..., 1:, 0] = False


def masks(model: nn.Module, inputs: Inputs, *, cut: bool = True, calls: int = 2) -> tuple[list[str], dict[str, Any]]:
    """What became of the masks, attention by attention, and results and gradients of the last call."""
    torch._dynamo.reset()
    called = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.005)
    with torch._dynamo.config.patch(optimize_ddp=cut), manager.recording() as records:
        run = compiled(called)
        for _ in range(calls):
            model.zero_grad()
            result = run(*inputs)
            result.square().mean().backward()
    assert (len(records) > 1) == cut
    seen = {"result": result.detach(), **gradients(model)}
    return [attention.mask for record in records for attention in record.plan.attentions], seen


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("mask", [causal, additive, spelled])
def test_a_mask_of_an_earlier_piece_is_folded(mask: Callable[..., Tensor]) -> None:
    model, x = Stack(mask), torch.randn(2, LENGTH, WIDTH)
    found, seen = masks(model, (x,))
    assert found == DEPTH * ["folded_causal"]
    torch._dynamo.reset()
    expected, whole = masks(model, (x,), cut=False)
    assert found == expected
    same(seen, whole)


def test_a_mask_of_the_calls_data_stays() -> None:
    model, x = Stack(padded), torch.randn(2, LENGTH, WIDTH)
    kept = torch.arange(LENGTH)[None] < torch.tensor([[LENGTH], [LENGTH - 5]])
    found, seen = masks(model, (x, kept))
    assert found == DEPTH * ["kept"]
    same(seen, masks(model, (x, kept), cut=False)[1])


def test_a_mask_that_a_piece_changes_stays() -> None:
    """In every piece, for what is read before the change is changed in a later one."""
    model, x = Stack(lambda x: causal(x).clone(), hide_the_first), torch.randn(2, LENGTH, WIDTH)
    found, seen = masks(model, (x,))
    assert "kept" in found
    same(seen, masks(model, (x,), cut=False)[1])


def test_a_mask_that_a_piece_changes_by_an_odd_view_stays() -> None:
    model = Stack(lambda x: causal(x).clone(), lambda mask: hide_the_first(mask.moveaxis(-1, -2).mT))
    x = torch.randn(2, LENGTH, WIDTH)
    found, seen = masks(model, (x,))
    assert "kept" in found
    same(seen, masks(model, (x,), cut=False)[1])


def test_a_change_to_another_tensor_of_an_earlier_piece_counts_too() -> None:
    """It may be what the mask is a view of."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])

        def forward(self, x: Tensor) -> Tensor:
            memory = causal(x).clone()
            mask = memory[:, :1]
            x = self.blocks[0](x, mask)
            x = self.blocks[1](x, memory.logical_not().logical_not())
            memory[..., 1:, 0] = False
            return self.blocks[2](x, mask)

    model, x = Views(), torch.randn(2, LENGTH, WIDTH)
    _, seen = masks(model, (x,))
    same(seen, masks(model, (x,), cut=False)[1])


def test_nothing_is_known_once_all_pieces_are_compiled() -> None:
    masks(Stack(causal), (torch.randn(2, LENGTH, WIDTH),))
    assert not any(constants_across_cuts._known.values())
    gc.collect()  # what is compiled keeps its graphs
    assert not any(KNOWN_VALUE in each.meta for each in gc.get_objects() if type(each) is Node)


def test_nothing_is_computed_for_a_graph_that_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(constants_across_cuts, "evaluated", fail)
    run = compiled(Stack(causal))
    run(torch.randn(2, LENGTH, WIDTH)).sum().backward()
