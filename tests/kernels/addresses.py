"""Triton's interpreter, made to refuse what memcheck finds on a GPU: loads and stores outside of the tensors at hand.

A kernel that reads past a tensor's end and does not use what it read computes the right result, here and on a GPU,
until the memory behind is not mapped. A launch may touch what its tensors cover, from their first element to their
last, and the tensors whose addresses stand in a table that it was given.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from te_compile.kernels import scale_update, weight_refresh, weights
from te_compile.kernels.recording import address_of

Extent = tuple[int, int]
TABLES = (scale_update, weight_refresh, weights)


class OutsideError(Exception):
    """An address that belongs to no tensor of the launch."""


def extent_of(tensor: Tensor) -> Extent:
    """The first byte of ``tensor`` and the one after its last."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


class Allowed:
    """What may be touched: disjoint extents in order."""

    def __init__(self, extents: list[Extent]) -> None:
        joined: list[list[int]] = []
        for begin, end in sorted(extents):
            if joined and begin <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([begin, end])
        self.begins = np.array([begin for begin, _ in joined], dtype=np.uint64)
        self.ends = np.array([end for _, end in joined], dtype=np.uint64)

    def check(self, what: str, addresses: Any, mask: Any, itemsize: int) -> None:
        """Raise OutsideError unless every address that the mask lets through is of an element inside."""
        used = np.broadcast_to(addresses, np.shape(mask))[mask] if mask is not None else np.ravel(addresses)
        if not len(self.begins) or not len(used):
            return
        at = np.searchsorted(self.begins, used, side="right").astype(np.int64) - 1
        wrong = (at < 0) | (used + np.uint64(itemsize) > self.ends[np.maximum(at, 0)])
        if wrong.any():
            nearest = int(used[wrong][0]) - self.ends.astype(object)
            raise OutsideError(f"{what} outside of every tensor, {min(nearest, key=abs)} bytes from the end of one")


class Checked:
    """The interpreter's access to memory, with each address looked at before."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.allowed = Allowed([])
        self.listed: list[Extent] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.allowed.check("a load", addresses, mask, np.dtype(dtype).itemsize)
        return self.memory.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, value: Any, mask: Any) -> Any:
        self.allowed.check("a store", addresses, mask, value.dtype.itemsize)
        return self.memory.store(addresses, value, mask)

    def atomic_rmw(self, operation: Any, addresses: Any, value: Any, mask: Any, order: Any) -> Any:
        self.allowed.check("an atomic", addresses, mask, value.dtype.itemsize)
        return self.memory.atomic_rmw(operation, addresses, value, mask, order)

    def atomic_cas(self, addresses: Any, expected: Any, value: Any, order: Any) -> Any:
        self.allowed.check("an atomic", addresses, None, value.dtype.itemsize)
        return self.memory.atomic_cas(addresses, expected, value, order)


def check_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test."""
    memory = Checked(interpreter._interpreter)
    arguments_of_launch = interpreter.GridExecutor._init_args_hst

    def noted(executor: Any, arguments: Any, constants: Any) -> Any:
        given, named = arguments_of_launch(executor, arguments, constants)
        tensors = [each for each in (*given, *named.values()) if isinstance(each, Tensor)]
        memory.allowed = Allowed([*map(extent_of, tensors), *memory.listed])
        return given, named

    def listed(tensor: Tensor) -> int:
        if not isinstance(tensor, torch._subclasses.FakeTensor):
            memory.listed.append(extent_of(tensor))
        return address_of(tensor)

    monkeypatch.setattr(interpreter, "_interpreter", memory)
    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", noted)
    for module in TABLES:
        monkeypatch.setattr(module, "address_of", listed)
