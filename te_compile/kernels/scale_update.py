"""Delayed scaling's bookkeeping: one launch rolls all amax histories and renews all scales, one reads all scales.

Bytes: 8·(L + 2) a state row, with histories of L = 1024 and the 14 rows of a layer 115 kB: nothing. The time is that of
one launch, 2–3 µs on an H200, where a handful of torch operators per tensor would be that many times as much.

A program takes one row: scale | count of skipped amaxes | history, newest first. It reads the history whole before it
writes it back one place further, with a barrier between, since one thread's place is another one's source.
"""

from __future__ import annotations

from collections.abc import Sequence

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


@triton.jit
def _update_kernel(
    row_addresses, amaxes,
    LENGTH: tl.constexpr, MOST_RECENT: tl.constexpr,
    TARGET: tl.constexpr, EPSILON: tl.constexpr, POWER_2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.load(row_addresses + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    amax = tl.load(amaxes + tl.program_id(0))
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


@triton.jit
def _snapshot_kernel(row_addresses, scales, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(row_addresses + index, mask=index < count, other=0).to(tl.pointer_type(tl.float32))
    tl.store(scales + index, tl.load(rows + SCALE, mask=index < count, other=0.0), mask=index < count)


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
    return torch.tensor(addresses, dtype=torch.int64)


def update_scales(states: Sequence[Tensor], amaxes: Tensor, fp8_max: float, rule: ScaleRule, algorithm: str) -> None:
    """Note ``amaxes``, fp32 [R], in the R rows of all ``states``, fp32 [rows, 2 + L] with unit inner stride, in place.

    algorithm: "max" of the history or "most_recent". An amax of 0 changes nothing, one that is not finite counts as
    skipped and changes nothing else.
    """
    if amaxes.numel() == 0:
        return
    length = states[0].shape[1] - HISTORY.value
    with on_device_of(amaxes):
        launch(
            _update_kernel, amaxes.numel(), _row_table(states), amaxes,
            LENGTH=length, MOST_RECENT=algorithm == "most_recent",
            TARGET=fp8_max * 2.0**-rule.margin, EPSILON=rule.epsilon, POWER_2=rule.power_2,
            BLOCK=triton.next_power_of_2(max(length - 1, 1)), num_warps=4,
        )  # fmt: skip


def snapshot_scales(states: Sequence[Tensor]) -> Tensor:
    """The scales of all rows of all states, one after the other, in a fresh tensor: fp32 [R]."""
    with on_device_of(states[0]):
        rows = _row_table(states)
        count = rows.numel()
        scales = buffers.empty(states[0], (count,), torch.float32)
        if count:
            launch(
                _snapshot_kernel, triton.cdiv(count, SNAPSHOT_BLOCK), rows, scales, count,
                BLOCK=SNAPSHOT_BLOCK, num_warps=4,
            )  # fmt: skip
    return scales
