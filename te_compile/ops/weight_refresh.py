"""Are the FP8 copies of weights still those of the weights? If not, make them anew, in place, without asking the host.

A weight that autograd sees change has another version, but ``weight.data.add_(…)`` and some optimizers change it behind
autograd's back. So copies that are kept are checked whenever they are used again:

    lines        of each weight one line of 128 bytes in every KiB, at a place in it that is different each time
    fingerprint  of each 64 lines: Σ mix(bits of an element, its number)        modulo 2³²

and where one fingerprint differs from that of the weights that the copies were made of, all copies are made again, in
the memory where they are. Of weights of more than 64 MiB in all, ``MOST_LINES`` lines are spread evenly. What an
optimizer does touches every line; a change of a few elements behind autograd's back may touch none of these, and then
it is not seen. ``mix`` is not linear, so that no regular change (every sign, every exponent) cancels in the sum.

Copies that last, of weights that no optimizer changes, are looked at by the host when they are made (weight_cache.py):
a weight that has outgrown the scale of its history would be cut off for good. It sees no change of this kind, so there
such a weight is cast by its own amax, as long as it has outgrown that scale: at all in a training, and by more than a
step of an optimizer does where there are no gradients.

On a GPU the answer never reaches the host: launches that have nothing to do leave at once (kernels/weight_refresh.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.weights import Outputs, column_places, row_places
from te_compile.recipe import ScaleRule

LINE_BYTES = 128  # what DRAM delivers at once, more or less
STRIDE_BYTES = 1024  # one line of so many bytes is looked at
MOST_LINES = 1 << 16  # 8 MiB: 2 µs at the bandwidth of a copy on an H200
LINES = 64  # in one fingerprint
GOLDEN = 0x9E3779B1  # the odd number next to 2³² / golden ratio: its multiples are spread evenly
FIRST_FACTOR, SECOND_FACTOR = 0x85EBCA6B, 0xC2B2AE35  # of the usual 32-bit finaliser (murmur3)
ROUNDED_DOWN = 1 + 1 / 28  # of the largest E4M3 number: what is above that by less is rounded to it, as by any scale
OTHER_WEIGHTS = 2.0  # times as large as those before, which a step of an optimizer does not make them
_WORDS = {2: torch.int16, 4: torch.int32}  # by bytes of an element


@dataclass(frozen=True)
class Layout:
    """The matrices that a group of weights has, and the copies that are wanted of each.

    ``sources[i]`` is the weight that matrix i lies in, as ``shapes[i]`` contiguous elements from ``offsets[i]`` on.
    Copies have ``copies[i]``, the shape in multiples of 16, and are asked for as te::quantize_weights is.
    ``lasting``: no optimizer is expected to change the weights, so that copies are worth keeping from the start.
    """

    sources: tuple[int, ...]
    offsets: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    copies: tuple[tuple[int, int], ...]
    rowwise: tuple[bool, ...]
    columnwise: tuple[bool, ...]
    dtype: torch.dtype
    rule: ScaleRule
    lasting: bool = False

    @cached_property
    def row_starts(self) -> tuple[int | None, ...]:
        """Where each matrix's codes start among all."""
        return tuple(row_places(self._sized, self.rowwise)[0])

    @cached_property
    def column_starts(self) -> tuple[int | None, ...]:
        """Where each matrix's transposed codes start among all."""
        return tuple(column_places(self._sized, self.columnwise)[0])

    @property
    def most(self) -> float:
        """The largest magnitude that codes stand for, times their scale, whatever the recipe's margin."""
        return torch.finfo(self.dtype).max * max(1.0, 2.0**-self.rule.margin)

    def most_before_outgrown(self, trains: bool) -> float:
        """The same for weights that have not outgrown their scale."""
        return self.most * (ROUNDED_DOWN if trains else OTHER_WEIGHTS)

    @property
    def _sized(self) -> list[Tensor]:
        return [torch.empty(shape, device="meta") for shape in self.copies]

    def matrices(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The matrices as the weights have them, views."""
        return [
            weights[source]
            if weights[source].shape == shape and weights[source].is_contiguous()
            else weights[source].as_strided(shape, (shape[1], 1), weights[source].storage_offset() + offset)
            for source, offset, shape in zip(self.sources, self.offsets, self.shapes, strict=True)
        ]

    def padded(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The matrices with zeros up to the shape of their copies; views where they have it."""
        return [
            matrix if shape == copy else F.pad(matrix, (0, copy[1] - shape[1], 0, copy[0] - shape[0]))
            for matrix, shape, copy in zip(self.matrices(weights), self.shapes, self.copies, strict=True)
        ]


@lru_cache(maxsize=64)
def line_places(lengths: tuple[int, ...], element: int) -> tuple[Tensor, ...]:
    """Where the lines of matrices of so many elements of ``element`` bytes start: int64, in elements, one a matrix.

    A fixed place in every stretch would be the same columns of each row wherever a row is as long as a stretch.
    """
    total = element * sum(lengths)
    stride = max(STRIDE_BYTES, -(-total // MOST_LINES // LINE_BYTES) * LINE_BYTES) // element
    line = LINE_BYTES // element
    places, before = [], 0
    for length in lengths:
        number = torch.arange(-(-length // stride), dtype=torch.int64, device="cpu")
        within = (((number + before) * GOLDEN & 0xFFFFFFFF) >> 8) % (stride // line) * line
        places.append((number * stride + within).clamp(max=max(length - line, 0)))
        before += len(number)
    return tuple(places)


def fingerprint_reference(matrices: Sequence[Tensor]) -> Tensor:
    """int64 [ceil(lines / LINES)], each in 0 … 2³² - 1; see the module. matrices: contiguous, of one dtype."""
    element = matrices[0].element_size()
    places = line_places(tuple(matrix.numel() for matrix in matrices), element)
    line = torch.arange(LINE_BYTES // element, device="cpu")
    bits = torch.cat(
        [
            matrix.detach().reshape(-1).view(_WORDS[element])[
                (place[:, None] + line).clamp(max=matrix.numel() - 1).to(matrix.device)
            ]
            for matrix, place in zip(matrices, places, strict=True)
        ]
    ).to(torch.int64) & ((1 << 8 * element) - 1)  # fmt: skip
    mixed = _mixed(bits, torch.arange(bits.numel(), device=bits.device).view(bits.shape)).sum(1)
    padding = mixed.new_zeros(-len(mixed) % LINES)
    return torch.cat([mixed, padding]).view(-1, LINES).sum(1) & 0xFFFFFFFF


def _mixed(bits: Tensor, number: Tensor) -> Tensor:
    """``mix`` in int64, of which the lower half counts."""
    x = bits ^ (number * GOLDEN & 0xFFFFFFFF)
    x = (x ^ x >> 16) * FIRST_FACTOR & 0xFFFFFFFF
    x = (x ^ x >> 13) * SECOND_FACTOR & 0xFFFFFFFF
    return x ^ x >> 16


class Refresher(Protocol):
    """Knows the weights that copies were made of. Made right after the copies, on the stream that made them."""

    def __call__(self, weights: Sequence[Tensor], amaxes: bool, missing: bool, force: bool = False) -> None:
        """Make the copies anew, in place, if the weights have changed (``force``: in any case).

        weights: those that the refresher was made with. amaxes: will anybody read them, besides who forces this? That
        is so in a training.
        missing: may a scale be 0? Who forces it sees to weights that have outgrown their scales.
        """

    def repeated(self, amaxes: bool) -> Callable[[], object] | None:
        """What does the same for weights that the host sees no change of, on this stream, while no scale is missing.

        For callers who have asked whether kernels may be played (``questions`` in kernels/player.py). None if that is
        not known yet, or saves nothing.
        """


@registry.register("refresh_weights", registry.REFERENCE)
class ReferenceRefresher:
    """See :class:`Refresher`; asks the host.

    outputs: of te::quantize_weights for ``layout.padded(weights)``. rows: for each matrix the state row [1, 2 + L]
    whose scale it is cast with; None: with one from its own amax.
    """

    def __init__(self, layout: Layout, outputs: Outputs, rows: Sequence[Tensor] | None, weights: Sequence[Tensor]):
        self.layout, self.outputs, self.rows = layout, outputs, rows
        self.fingerprint = fingerprint_reference(layout.matrices(weights))

    @torch.no_grad()
    def __call__(self, weights: Sequence[Tensor], amaxes: bool, missing: bool, force: bool = False) -> None:
        """See :class:`Refresher`."""
        fingerprint = fingerprint_reference(self.layout.matrices(weights))
        if not force and torch.equal(fingerprint, self.fingerprint):
            return
        layout = self.layout
        scales = None if self.rows is None else torch.cat([row[:, 0] for row in self.rows])
        if scales is not None and layout.lasting and not force:
            scales = self._without_outgrown(scales, layout.matrices(weights), layout.most_before_outgrown(amaxes))
        quantize = registry.function_of("quantize_weights", registry.REFERENCE)
        flags = list(layout.rowwise), list(layout.columnwise)
        fresh = quantize(layout.padded(weights), scales, layout.dtype, *flags, layout.rule)
        for old, new in zip(self.outputs, fresh, strict=True):
            old.copy_(new)
        self.fingerprint = fingerprint

    @staticmethod
    def _without_outgrown(scales: Tensor, matrices: Sequence[Tensor], most: float) -> Tensor:
        """``scales`` with 0, which means one from its own amax, for each matrix that has outgrown its own."""
        amaxes = torch.stack(
            [matrix.abs().amax().float() if matrix.numel() else scales.new_zeros(()) for matrix in matrices]
        )
        return torch.where((amaxes * scales > most) & amaxes.isfinite(), 0.0, scales)

    def repeated(self, amaxes: bool) -> None:
        """See :class:`Refresher`."""
