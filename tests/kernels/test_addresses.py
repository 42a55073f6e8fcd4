"""The interpreter refuses what reaches outside of a launch's tensors."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from te_compile.kernels.launch import launch

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="a GPU has compute-sanitizer for it")


@triton.jit
def _copy_kernel(x, y, length, shift, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    inside = place < length
    if MASKED:
        value = tl.load(x + place + shift, mask=inside, other=0.0)
    else:
        value = tl.load(x + place + shift)
    tl.store(y + place, value, mask=inside)


@triton.jit
def _add_kernel(total, place):
    tl.atomic_add(total + place, 1.0)


def copied(length: int, shift: int = 0, masked: bool = True, written: int = 12) -> torch.Tensor:
    """The first ``length`` elements from ``shift`` on of a view of twelve that lies in the middle of twenty-four."""
    x, y = torch.arange(24.0)[6:18], torch.zeros(written)
    launch(_copy_kernel, 1, x, y, length, shift, MASKED=masked, BLOCK=16)
    return y


def test_what_the_mask_keeps_inside_is_allowed() -> None:
    assert copied(12).tolist() == list(range(6, 18))
    assert copied(11, shift=1, written=11).tolist() == list(range(7, 18))


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"length": 12, "shift": 1}, "a load"),
        ({"length": 12, "shift": -1}, "a load"),
        ({"length": 12, "masked": False}, "a load"),
        ({"length": 12, "written": 11}, "a store"),
    ],
)
def test_what_goes_past_an_end_is_refused(how: dict[str, int], what: str) -> None:
    with pytest.raises(triton.runtime.errors.InterpreterError, match=f"{what} outside of every tensor"):
        copied(**how)


def test_so_is_an_atomic() -> None:
    total = torch.zeros(4)
    launch(_add_kernel, 1, total, 3)
    assert total.tolist() == [0, 0, 0, 1]
    with pytest.raises(triton.runtime.errors.InterpreterError, match="an atomic outside of every tensor"):
        launch(_add_kernel, 1, total, 4)
