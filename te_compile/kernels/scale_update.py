"""Delayed scaling's bookkeeping: one launch rolls all amax histories and renews all scales, one reads all scales.

Bytes: 8·(L + 2) a state row, with histories of L = 1024 and the 14 rows of a layer 115 kB: nothing. The time is that of
one launch, 2–3 µs on an H200, where a handful of torch operators per tensor would be that many times as much.

A program takes one row: scale | count of skipped amaxes | history, newest first. It reads the history whole before it
writes it back one place further, with a barrier between, since one thread's place is another one's source.

Amaxes lie wherever they were measured, elsewhere in each step. A launch takes the addresses of ``ROWS`` rows and amaxes
among its parameters, where a table of them, or the amaxes put together, would be one more thing to make at each step.
So does the reading of a few rows: where one graph serves many blocks, which are compiled one by one, each call brings
other states, and a table would have to be found for them each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.device_tables import device_table
from te_compile.kernels.launch import launch
from te_compile.kernels.quantize import scale_from_amax
from te_compile.kernels.recording import address_of
from te_compile.recipe import ScaleRule

SCALE = tl.constexpr(0)
SKIPPED = tl.constexpr(1)
HISTORY = tl.constexpr(2)
SNAPSHOT_BLOCK = 256  # rows a program
ROWS = 16  # that one launch updates
FEW = 32  # rows that one launch reads by parameters


@triton.jit(do_not_specialize_on_alignment=[f"{name}{at}" for name in ("row", "amax") for at in range(ROWS)])
def _update_kernel(
    row0, row1, row2, row3, row4, row5, row6, row7, row8, row9, row10, row11, row12, row13, row14, row15,
    amax0, amax1, amax2, amax3, amax4, amax5, amax6, amax7,
    amax8, amax9, amax10, amax11, amax12, amax13, amax14, amax15,
    LENGTH: tl.constexpr, MOST_RECENT: tl.constexpr,
    TARGET: tl.constexpr, EPSILON: tl.constexpr, POWER_2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = (row0, row1, row2, row3, row4, row5, row6, row7, row8, row9, row10, row11, row12, row13, row14, row15)
    amaxes = (
        amax0, amax1, amax2, amax3, amax4, amax5, amax6, amax7,
        amax8, amax9, amax10, amax11, amax12, amax13, amax14, amax15,
    )  # fmt: skip
    row, amax_at = row0, amax0
    for at in tl.static_range(1, len(rows)):
        row = tl.where(tl.program_id(0) == at, rows[at], row)
        amax_at = tl.where(tl.program_id(0) == at, amaxes[at], amax_at)
    amax = tl.load(amax_at)
    if (amax > 0) & (amax < float("inf")):
        place = tl.arange(0, BLOCK)
        stays = place < LENGTH - 1
        history = tl.load(row + HISTORY + place, mask=stays, other=0.0)
        tl.debug_barrier()
        tl.store(row + HISTORY + 1 + place, history, mask=stays)
        tl.store(row + HISTORY, amax)
        if not MOST_RECENT:
            amax = tl.maximum(amax, tl.max(history, axis=0))
        tl.store(row + SCALE, scale_from_amax(amax, TARGET, EPSILON, POWER_2))
    elif amax != 0:
        tl.store(row + SKIPPED, tl.load(row + SKIPPED) + 1.0)


@triton.jit(do_not_specialize_on_alignment=[f"row{at}" for at in range(FEW)])
def _snapshot_few_kernel(
    row0, row1, row2, row3, row4, row5, row6, row7, row8, row9, row10, row11, row12, row13, row14, row15, row16,
    row17, row18, row19, row20, row21, row22, row23, row24, row25, row26, row27, row28, row29, row30, row31,
    scales,
):  # fmt: skip
    rows = (
        row0, row1, row2, row3, row4, row5, row6, row7, row8, row9, row10, row11, row12, row13, row14, row15, row16,
        row17, row18, row19, row20, row21, row22, row23, row24, row25, row26, row27, row28, row29, row30, row31,
    )  # fmt: skip
    row = row0
    for at in tl.static_range(1, len(rows)):
        row = tl.where(tl.program_id(0) == at, rows[at], row)
    tl.store(scales + tl.program_id(0), tl.load(row + SCALE))


@triton.jit
def _snapshot_kernel(row_addresses, scales, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(row_addresses + index, mask=index < count, other=0).to(tl.pointer_type(tl.float32))
    tl.store(scales + index, tl.load(rows + SCALE, mask=index < count, other=0.0), mask=index < count)


def needs_table(states: Sequence[Tensor]) -> bool:
    """Are these too many rows to be read without a table of their addresses?"""
    return sum(state.shape[0] for state in states) > FEW


def _row_table(states: Sequence[Tensor]) -> Tensor:
    """The address of each row of each state, as a table on their device.

    A step looks it up before it launches its first product, so little is asked of each tensor. Addresses alone would
    not do, for memory is used again, with other rows and histories; within a list all rows are equally long.
    """
    key = (states[0].stride(0), *map(address_of, states), *map(Tensor.numel, states))
    return device_table(key, lambda: _rows_of(states), states[0].device)


def _rows_of(states: Sequence[Tensor]) -> Tensor:
    addresses: list[int] = []
    for state in states:
        start, step = address_of(state), state.stride(0) * state.element_size()
        addresses.extend(range(start, start + step * state.shape[0], step))
    return torch.tensor(addresses, dtype=torch.int64, device="cpu")


def _rows(several: Tensor) -> Iterator[Tensor]:
    return (several.select(0, row) for row in range(several.shape[0]))


def update_scales(
    states: Sequence[Tensor], amaxes: Sequence[Tensor], fp8_max: float, rule: ScaleRule, algorithm: str
) -> None:
    """Note ``amaxes`` in the rows of all ``states``, fp32 [rows, 2 + L] with unit inner stride, in place.

    amaxes: fp32, each [] for one row or [n] for n; R in all, as there are rows. algorithm: "max" of the history or
    "most_recent". An amax of 0 changes nothing, one that is not finite counts as skipped and changes nothing else.
    """
    rows = [row for state in states for row in _rows(state)]
    measured = [each for amax in amaxes for each in ([amax] if amax.dim() == 0 else _rows(amax))]
    if not rows:
        return
    length = states[0].shape[1] - HISTORY.value
    with on_device_of(rows[0]):
        for first in range(0, len(rows), ROWS):
            some, theirs = rows[first : first + ROWS], measured[first : first + ROWS]
            idle = ROWS - len(some)  # places that no program looks at
            launch(
                _update_kernel, len(some), *some, *some[:1] * idle, *theirs, *theirs[:1] * idle,
                LENGTH=length, MOST_RECENT=algorithm == "most_recent",
                TARGET=fp8_max * 2.0**-rule.margin, EPSILON=rule.epsilon, POWER_2=rule.power_2,
                BLOCK=triton.next_power_of_2(max(length - 1, 1)), num_warps=4,
            )  # fmt: skip


def snapshot_scales(states: Sequence[Tensor]) -> Tensor:
    """The scales of all rows of all states, one after the other, in a fresh tensor: fp32 [R]."""
    count = sum(state.shape[0] for state in states)
    with on_device_of(states[0]):
        scales = buffers.empty(states[0], (count,), torch.float32)
        if needs_table(states):
            launch(
                _snapshot_kernel, triton.cdiv(count, SNAPSHOT_BLOCK), _row_table(states), scales, count,
                BLOCK=SNAPSHOT_BLOCK, num_warps=4,
            )  # fmt: skip
        elif count:
            rows = [row for state in states for row in _rows(state)]
            launch(_snapshot_few_kernel, count, *rows, *rows[:1] * (FEW - count), scales, num_warps=1)
    return scales
