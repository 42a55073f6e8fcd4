"""Ordinary dropout on a GPU: the mask that the kernel draws, and steps of models that are compiled with it."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_compile
from te_compile.kernels.dropout_masks import draw_mask
from te_compile.ops.dropout_bits import nearest_share
from te_compile.ops.dropout_masks import dropout_mask_reference
from te_compile.passes import manager
from tests.compiling import relative_error, te_nodes, train_step
from tests.needs import FP8_GPU

pytestmark = [*FP8_GPU, pytest.mark.usefixtures("fresh_dynamo")]

P = 0.3
GROWTH = 65536 / nearest_share(P)
ALONE = {"cost_model": False}
SIZES = [(), (1,), (15,), (17,), (1023,), (1025,), (197, 1001), (3, 5, 7, 11, 13), (8192, 1024), (4099, 257)]


@pytest.mark.parametrize("probability", [0.1, 0.5, 2**-16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_mask_is_that_of_the_reference(size: tuple[int, ...], probability: float) -> None:
    seed = torch.randint(2**62, (1,), device="cuda")
    mask = draw_mask(seed, size, probability)
    assert mask.view(torch.uint8).max() <= 1
    assert torch.equal(mask, dropout_mask_reference(seed, size, probability))


def test_the_mask_of_more_elements_than_32_bits_count() -> None:
    count = (1 << 32) + 1027
    if torch.cuda.mem_get_info()[0] < 3 * count:
        pytest.skip("needs 12 GiB of free memory")
    mask = draw_mask(torch.randint(2**62, (1,), device="cuda"), (count,), 0.5)
    for part in (mask[: 1 << 20], mask[1 << 31 : (1 << 31) + (1 << 20)], mask[-(1 << 20) :]):
        assert 0.49 < part.double().mean() < 0.51


class Drops(nn.Module):
    """Its first result shows what was kept; a linear that nobody drops is in FP8 beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(x, P), self.linear(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_every_step_draws_anew_a_seed_brings_a_draw_back_and_what_is_dropped_has_no_gradient(
    mode: str | None, dtype: torch.dtype
) -> None:
    model = Drops().cuda().to(dtype)
    x = (torch.rand(1000, 256, device="cuda") + 1).to(dtype).requires_grad_()
    with te_compile.configure(**ALONE), manager.recording() as records:
        run = torch.compile(model, backend="te_fp8", mode=mode)
        draws = []
        for _ in range(6):  # operators are recorded at a second call and replayed from the third on
            first = run(x)[0]
            draws.append((first != 0).clone())
            torch.testing.assert_close(first.float(), x.float() * draws[-1] * GROWTH, rtol=1e-2, atol=0)
            (gradient,) = torch.autograd.grad(first.sum(), x)
            assert torch.equal(gradient == 0, ~draws[-1])
            torch.testing.assert_close(gradient.float(), draws[-1] * GROWTH, rtol=1e-2, atol=0)
        kept = []
        for number in (5, 5, 6):
            torch.manual_seed(number)
            kept.append((run(x)[0] != 0).clone())
    deviation = (P * (1 - P) / x.numel()) ** 0.5
    for one, other in itertools.pairwise(draws):
        assert abs(float(one.double().mean()) - (1 - P)) < 5 * deviation + 2**-16
        assert 0.36 < (one != other).double().mean() < 0.48
    assert torch.equal(kept[0], kept[1]) and not torch.equal(kept[0], kept[2])
    assert [node.kwargs.get("implementation", node.args[-1]) for node in te_nodes(records[0], "dropout_mask")] == [
        "triton"
    ]


@pytest.mark.parametrize("rows", [[1000, 1000], [999, 333]], ids=["the same", "other"])
def test_sizes_that_change_have_masks_of_their_own(rows: list[int]) -> None:
    run = torch.compile(Drops().cuda(), backend="te_fp8", dynamic=True, options=ALONE)
    for count in rows * 3:
        x = torch.ones(count, 256, device="cuda", requires_grad=True)
        first = run(x)[0]
        assert first.shape == x.shape and 0.67 < (first != 0).double().mean() < 0.73
        (gradient,) = torch.autograd.grad(first.sum(), x)
        assert torch.equal(gradient, first)


class Block(nn.Module):
    """An MLP with a dropout inside and one beside its residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 512), nn.Linear(512, 256)
        self.drop = nn.Dropout(P)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.drop(F.gelu(self.up(self.norm(x))))))


class Stack(nn.Module):
    """Two blocks, which a checkpoint may surround."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.recomputed = nn.ModuleList(Block() for _ in range(2)), False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_under_a_checkpoint_gradients_are_the_same(dtype: torch.dtype) -> None:
    plain = Stack().cuda().to(dtype)
    recomputed = copy.deepcopy(plain)
    recomputed.recomputed = True
    x = torch.randn(4, 128, 256, device="cuda", dtype=dtype)
    found = []
    for model in (plain, recomputed):
        torch._dynamo.reset()
        with manager.recording() as records:
            run = torch.compile(model, backend="te_fp8", options=ALONE)
            torch.manual_seed(5)
            found.append([train_step(model, run, x) for _ in range(4)])
        assert len(te_nodes(records[0], "dropout_mask")) == 4
    for (y, gradients), (other_y, other) in zip(*found, strict=True):
        assert relative_error(y, other_y) < 1e-2  # other masks: 0.5
        assert all(relative_error(gradients[name], other[name]) < 5e-2 for name in gradients)


def test_blocks_that_are_compiled_one_by_one_draw_the_same_mask_again() -> None:
    plain = Stack().cuda().bfloat16()
    recomputed = copy.deepcopy(plain)
    recomputed.recomputed = True
    x = torch.randn(4, 128, 256, device="cuda", dtype=torch.bfloat16)
    found = []
    for model in (plain, recomputed):
        torch._dynamo.reset()
        for block in model.blocks:
            block.compile(backend="te_fp8", options=ALONE)
        torch.manual_seed(5)
        found.append([train_step(model, model, x) for _ in range(4)])
    for (y, gradients), (other_y, other) in zip(*found, strict=True):
        assert relative_error(y, other_y) < 1e-2  # other masks: 0.5
        assert all(relative_error(gradients[name], other[name]) < 5e-2 for name in gradients)
