"""Convolutions: a kernel of one and patches side by side are linears, everything else stays a convolution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_compile.passes import manager
from te_compile.passes.text import ops_text
from tests.capturing import captured, only_site, regions_and_plan
from tests.compiling import compiled, error_but_for_ties, relative_error, train_step
from tests.emulation import emulated_linear

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LINEARS = {
    "1d": (lambda: nn.Conv1d(32, 48, 1), (2, 32, 7), 14),
    "2d without bias": (lambda: nn.Conv2d(32, 48, 1, bias=False), (2, 32, 3, 5), 30),
    "2d padded by name": (lambda: nn.Conv2d(32, 48, 1, padding="valid"), (2, 32, 3, 5), 30),
    "2d of the same size": (lambda: nn.Conv2d(32, 48, 1, padding="same", dilation=2), (2, 32, 3, 5), 30),
    "3d": (lambda: nn.Conv3d(32, 48, 1), (2, 32, 3, 2, 5), 60),
    "patches in 1d": (lambda: nn.Conv1d(8, 48, 4, 4), (2, 8, 12), 6),
    "patches of an image": (lambda: nn.Conv2d(2, 48, 4, stride=4), (2, 2, 12, 8), 12),
    "patches and a rest": (lambda: nn.Conv2d(2, 48, 4, stride=4), (2, 2, 13, 10), 12),
    "patches padded by name": (lambda: nn.Conv2d(2, 48, 4, stride=4, padding="valid"), (2, 2, 12, 8), 12),
    "patches that are not square": (lambda: nn.Conv2d(2, 48, (2, 8), stride=(2, 8)), (2, 2, 4, 24), 12),
    "patches of a video": (lambda: nn.Conv3d(1, 48, (2, 4, 4), (2, 4, 4)), (2, 1, 4, 8, 8), 16),
}


def _as_linear(model: nn.Module, x: Tensor) -> Tensor:
    """The convolution in emulated FP8, by another road: one kernel position after the other."""
    kernel, weight = model.kernel_size, model.weight
    for dimension, size in enumerate(kernel):
        x = x.unfold(2 + dimension, size, size)
    features = x.movedim(1, 1 + len(kernel)).flatten(1 + len(kernel))
    return emulated_linear(features, weight.flatten(1), model.bias).movedim(-1, 1)


@pytest.mark.parametrize("name", LINEARS)
def test_a_convolution_that_is_a_linear_is_one(name: str) -> None:
    build, shape, positions = LINEARS[name]
    model, x = build(), torch.randn(shape, requires_grad=True)
    site = only_site(model, x)
    assert (site.form, site.status, site.features, site.tokens) == ("convolution", "fp8", (32, 48), positions)
    y, got = train_step(model, compiled(model, strict=True), x)
    dx, x.grad = x.grad, None
    exact = model(x)
    assert y.shape == exact.shape and y.stride() == exact.stride()
    expected_y, expected = train_step(model, lambda x: _as_linear(model, x), x)
    assert error_but_for_ties(y, expected_y) < 1e-4 and error_but_for_ties(dx, x.grad) < 1e-3
    assert all(error_but_for_ties(got[name], expected[name]) < 1e-3 for name in expected)


@pytest.mark.parametrize("name", ("patches in 1d", "patches and a rest"))
def test_patches_of_images_of_any_size(name: str) -> None:
    build, shape, _ = LINEARS[name]
    model, seen = build(), []
    fast = compiled(model, dynamic=True, strict=True, recipe="current")
    for patches in (0, 1, 5):
        x = torch.randn(*shape[:2], *(size + 4 * patches for size in shape[2:]), requires_grad=True)
        with manager.recording() as records:
            y, got = train_step(model, fast, x)
        dx, x.grad = x.grad, None
        seen.append([site.status for record in records for site in record.plan.sites])
        expected_y, expected = train_step(model, lambda x: _as_linear(model, x), x)
        assert y.shape == expected_y.shape
        assert error_but_for_ties(y, expected_y) < 1e-4 and error_but_for_ties(dx, x.grad) < 1e-3
        assert all(error_but_for_ties(got[name], expected[name]) < 1e-3 for name in expected)
    assert seen == [["fp8"], [], []]


def test_an_image_that_is_smaller_than_a_patch_is_an_error() -> None:
    fast = compiled(nn.Conv2d(3, 48, 4, 4), dynamic=True)
    fast(torch.randn(2, 3, 12, 16))
    with pytest.raises(RuntimeError, match=r"[Kk]ernel size"):
        fast(torch.randn(2, 3, 12, 2))


@pytest.mark.parametrize(
    "call",
    (
        lambda x, w, b: F.conv2d(x, w, b, 4, "valid"),
        lambda x, w, b: F.conv2d(x, weight=w, bias=b, stride=(4, 4), padding="valid"),
        lambda x, w, b: torch.conv2d(x, w, b, padding="valid", stride=[4], dilation=1, groups=1),
        lambda x, w, b: torch.conv3d(x[:, :, None], w[:, :, None], b, (1, 4, 4), "valid"),
        lambda x, w, b: torch.conv1d(x[:, :, 0], w[:, :, 0], b, 4, "valid"),
        lambda x, w, b: torch.ops.aten.conv2d.padding(x, w, b, [4, 4], "valid"),
    ),
    ids=("by position", "by keyword", "torch", "3d", "1d", "aten"),
)
def test_no_padding_may_be_called_valid_in_any_spelling(call: Callable[..., Tensor]) -> None:
    class Functional(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return call(x, self.weight, self.bias)

    model, x = Functional(8, 48, 4), torch.randn(2, 8, 8, 12)
    with manager.recording() as records:
        y = compiled(model, strict=True)(x)
    assert [site.status for site in records[0].plan.sites] == ["fp8"] and relative_error(y, model(x)) < 0.1


def test_channels_last_stay_last() -> None:
    model = nn.Conv2d(32, 48, 1).to(memory_format=torch.channels_last)
    x = torch.randn(2, 32, 3, 5).to(memory_format=torch.channels_last)
    y = compiled(model, strict=True)(x)
    assert y.is_contiguous(memory_format=torch.channels_last) and relative_error(y, model(x)) < 0.1


def test_a_checkpointed_embedding_of_patches() -> None:
    model, x = nn.Sequential(nn.Conv2d(2, 48, 4, 4), nn.Flatten(2)), torch.randn(2, 2, 8, 8)
    y, got = train_step(model, compiled(lambda x: checkpoint(model, x, use_reentrant=False), strict=True), x)
    expected_y, expected = train_step(model, model, x)
    assert relative_error(y, expected_y) < 0.1
    assert all(relative_error(got[name], expected[name]) < 0.1 for name in expected)


@pytest.mark.parametrize(
    ("build", "shape"),
    (
        (lambda: nn.Conv2d(32, 48, 3), (2, 32, 5, 5)),
        (lambda: nn.Conv2d(32, 48, 1, stride=2), (2, 32, 5, 5)),
        (lambda: nn.Conv2d(32, 48, 1, padding=1), (2, 32, 5, 5)),
        (lambda: nn.Conv2d(32, 48, 3, padding="same"), (2, 32, 5, 5)),
        (lambda: nn.Conv2d(32, 48, 1, groups=2), (2, 32, 5, 5)),
        (lambda: nn.Conv2d(2, 48, 4, 4, padding=4), (2, 2, 8, 8)),
        (lambda: nn.Conv2d(2, 48, 4, 4, dilation=2), (2, 2, 8, 8)),
        (lambda: nn.Conv2d(32, 48, 1), (32, 5, 5)),
    ),
    ids=("overlap", "stride", "padding", "same size", "groups", "padded patches", "dilation", "no batch"),
)
def test_other_convolutions_are_left_alone(build: object, shape: tuple[int, ...]) -> None:
    _, plan = regions_and_plan(build(), torch.randn(shape))
    assert not plan.sites


def test_a_convolution_that_stays_in_high_precision_stays_a_convolution() -> None:
    model, x = nn.Conv2d(32, 48, 1), torch.randn(2, 32, 3, 5)
    fast = compiled(model, exclude=["*"])
    assert torch.equal(fast(x), model(x))
    assert "conv2d" in ops_text(captured(model, x)[0].graph)
