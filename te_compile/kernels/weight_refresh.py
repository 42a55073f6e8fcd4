"""Kept FP8 copies of weights: are they still right, and if not, made anew where they are. See ops/weight_refresh.py.

Up to three launches, of which all but the first do nothing as long as no weight changes:

    check      a program takes 64 lines of 128 bytes, compares their hash with the one that it wrote last time, and
               leaves its verdict. 201 M weights of two bytes: 49,000 lines, 6.3 MB, 768 programs
    measure    if any verdict says so: the amax of every weight. Left out where all scales are known and no weight can
               have outgrown its own unseen, as one can whose copies last
    quantise   if any verdict says so: all codes and multipliers, and amaxes that nobody has measured before

There is no barrier between programs of one launch, so each reads all verdicts, a few kilobytes in the L2. Amaxes that
the last launch finds on its way must stay what they were until it is known that they change: they are gathered
elsewhere, and whichever program is done last takes them over. The last two are launched with a few programs a
multiprocessor that take tile after tile: most of the time all that they do is start and leave, and one for every tile
would be 12,000 of them for that layer.

Where the host knows of a change, all of this is forced: every program has one tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.device_tables import address_table, device_table
from te_compile.kernels.launch import Launches, Repeated
from te_compile.kernels.quantize import TRITON_DTYPES, record_amax, rule_constants, scale_from_amax
from te_compile.kernels.recording import address_of
from te_compile.kernels.weights import (
    FIELDS,
    NOT_WANTED,
    TILE,
    geometry_of,
    measure_tile,
    quantize_tile,
    tile_map,
)
from te_compile.ops.weight_refresh import (
    FIRST_FACTOR,
    GOLDEN,
    LINE_BYTES,
    LINES,
    SECOND_FACTOR,
    Layout,
    line_places,
)
from te_compile.ops.weights import Outputs

PROGRAMS_PER_MULTIPROCESSOR = 4  # of 256 threads: half of what one holds
_GOLDEN, _FIRST, _SECOND = tl.constexpr(GOLDEN), tl.constexpr(FIRST_FACTOR), tl.constexpr(SECOND_FACTOR)
_WORDS = {2: tl.uint16, 4: tl.uint32}  # by bytes of an element


@triton.jit
def _check_kernel(
    lines, count, fingerprints, verdicts, scratch, done, weights,
    FORCE: tl.constexpr,
    WORD: tl.constexpr, LENGTH: tl.constexpr, LINES: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    line, element = program * LINES + tl.arange(0, LINES), tl.arange(0, LENGTH)
    start = tl.load(lines + line, mask=line < count, other=0).to(tl.pointer_type(WORD))
    inside = (line < count)[:, None] & (element >= 0)[None, :]
    bits = tl.load(start[:, None] + element[None, :], mask=inside, other=0).to(tl.uint32)
    number = (line[:, None] * LENGTH + element[None, :]).to(tl.uint32)
    mixed = bits ^ (number * _GOLDEN)
    mixed = (mixed ^ (mixed >> 16)) * _FIRST
    mixed = (mixed ^ (mixed >> 13)) * _SECOND
    mixed = tl.where(inside, mixed ^ (mixed >> 16), 0).to(tl.int32, bitcast=True)
    fingerprint = tl.sum(tl.sum(mixed, axis=1), axis=0).to(tl.int32)
    if FORCE:
        tl.store(verdicts + program, 1)
    else:
        tl.store(verdicts + program, (fingerprint != tl.load(fingerprints + program)).to(tl.int32))
    tl.store(fingerprints + program, fingerprint)
    if program == 0:  # what the next launch gathers amaxes in
        weight = tl.arange(0, WEIGHTS)
        tl.store(scratch + weight, tl.zeros((WEIGHTS,), tl.float32), mask=weight < weights)
        tl.store(done, 0)


@triton.jit
def _any(verdicts, count, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    return tl.max(tl.load(verdicts + place, mask=place < count, other=0), axis=0) > 0


@triton.jit
def _measure_kernel(
    verdicts, count, addresses, geometry, tiles, programs, scratch,
    BLOCK: tl.constexpr,
    ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    if _any(verdicts, count, BLOCK):
        for program in range(tl.program_id(0), programs, tl.num_programs(0)):
            index = tl.load(tiles + program)
            measure_tile(program, addresses, geometry, index, scratch, ELEMENT, ALIGNED, TILE_ROWS, TILE_COLUMNS)


@triton.jit
def _quantize_kernel(
    verdicts, count, addresses, geometry, tiles, programs, rows, q, qt, scratch, done, amax, scale_inv, weights,
    WEIGHTS: tl.constexpr, BLOCK: tl.constexpr, MEASURED: tl.constexpr, RECORD: tl.constexpr, MOST: tl.constexpr,
    TARGET: tl.constexpr, EPSILON: tl.constexpr, POWER_2: tl.constexpr, E5M2: tl.constexpr,
    ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    if _any(verdicts, count, BLOCK):
        for program in range(tl.program_id(0), programs, tl.num_programs(0)):
            index = tl.load(tiles + program)
            tile = program - tl.load(geometry + index * FIELDS + 3).to(tl.int32)
            if rows is None:
                used = scale_from_amax(tl.load(scratch + index), TARGET, EPSILON, POWER_2)
            else:
                used = tl.load(tl.load(rows + index).to(tl.pointer_type(tl.float32)))
                if MEASURED:
                    measured = tl.load(scratch + index)
                    fits = used > 0
                    if MOST is not None:  # beyond which a code would be cut off
                        fits = fits & ((measured * used <= MOST) | ~(measured < float("inf")))
                    used = tl.where(fits, used, scale_from_amax(measured, TARGET, EPSILON, POWER_2))
            largest = quantize_tile(
                tile, addresses, geometry, index, used, q, qt, scale_inv,
                E5M2, ELEMENT, ALIGNED, TILE_ROWS, TILE_COLUMNS,
            )  # fmt: skip
            if MEASURED:
                tl.store(amax + index, tl.load(scratch + index), mask=tile == 0)
            if RECORD:
                record_amax(scratch + index, largest)
        if RECORD:
            tl.debug_barrier()  # all that this program records is recorded
            if tl.atomic_add(done, 1, sem="acq_rel") == tl.num_programs(0) - 1:
                weight = tl.arange(0, WEIGHTS)
                found = tl.load(scratch + weight, mask=weight < weights, other=0.0, cache_modifier=".cg")
                tl.store(amax + weight, found, mask=weight < weights)


def _line_table(matrices: Sequence[Tensor]) -> Tensor:
    """int64 [lines]: the address of each line that is looked at."""
    element = matrices[0].element_size()
    places = line_places(tuple(matrix.numel() for matrix in matrices), element)
    return torch.cat([place * element + address_of(matrix) for place, matrix in zip(places, matrices, strict=True)])


class TritonRefresher:
    """See ops/weight_refresh.py: ``Refresher``, and ``ReferenceRefresher`` for the arguments.

    It knows the addresses of the weights and of the rows, and keeps neither alive.
    """

    def __init__(self, layout: Layout, outputs: Outputs, rows: Sequence[Tensor] | None, weights: Sequence[Tensor]):
        self.layout, self.outputs = layout, outputs
        self.outgrows = layout.lasting and rows is not None
        like = self.like = outputs[2]
        matrices = layout.matrices(weights)
        addresses = tuple(map(address_of, matrices))
        with on_device_of(like):
            self.addresses = address_table(addresses, like.device)
            self.rows = None if rows is None else address_table(tuple(map(address_of, rows)), like.device)
            lines = ("lines", addresses, layout.shapes, matrices[0].element_size())
            self.lines = device_table(lines, lambda: _line_table(matrices), like.device)
            places = (layout.shapes, self._starts(layout.row_starts), self._starts(layout.column_starts), TILE)
            self.geometry = device_table(
                ("geometry", *places, layout.copies), lambda: geometry_of(*places, layout.copies), like.device
            )  # fmt: skip
            self.tiles = device_table(
                ("tiles", layout.shapes, TILE), lambda: tile_map(layout.shapes, TILE), like.device
            )
            self.fingerprints = torch.zeros(
                triton.cdiv(self.lines.numel(), LINES), dtype=torch.int32, device=like.device
            )  # fmt: skip
            self.verdicts, self.scratch = torch.empty_like(self.fingerprints), torch.zeros_like(like)
            self.done = torch.zeros((), dtype=torch.int32, device=like.device)
            self.constants = self._constants(matrices, addresses)
            self._launches: dict[tuple[bool, bool, bool, float | None], Launches] = {}
            self._check(matrices[0].element_size(), force=True)()

    @staticmethod
    def _starts(starts: Sequence[int | None]) -> tuple[int, ...]:
        return tuple(NOT_WANTED if start is None else start for start in starts)

    def _constants(self, matrices: Sequence[Tensor], addresses: Sequence[int]) -> dict[str, object]:
        aligned = all(at % 16 == 0 for at in addresses) and all(shape[1] % 16 == 0 for shape in self.layout.shapes)
        return {
            "BLOCK": triton.next_power_of_2(self.verdicts.numel()),
            "ELEMENT": TRITON_DTYPES[matrices[0].dtype],
            "ALIGNED": aligned,
            "TILE_ROWS": TILE.rows,
            "TILE_COLUMNS": TILE.columns,
            "num_warps": TILE.warps,
        }

    def __call__(self, weights: Sequence[Tensor], amaxes: bool, missing: bool, force: bool = False) -> None:
        """See ``Refresher``."""
        measured = self.rows is None or missing or (self.outgrows and not force)
        most = self.layout.most_before_outgrown(amaxes) if self.outgrows and not force else None
        record = (amaxes or force) and not measured
        launches = self._launches.get((measured, record, force, most))
        if launches is None:
            prepared = self._prepared(weights[0].element_size(), measured, record, force, most)
            launches = self._launches[measured, record, force, most] = Launches(prepared)
        with on_device_of(self.like):
            launches()

    def repeated(self, amaxes: bool) -> Callable[[], object] | None:
        """See ``Refresher``."""
        measured = self.rows is None or self.outgrows
        most = self.layout.most_before_outgrown(amaxes) if self.outgrows else None
        launches = self._launches.get((measured, amaxes and not measured, False, most))
        return None if launches is None else launches.played()

    def _check(self, element: int, force: bool) -> Repeated:
        return Repeated(
            _check_kernel, self.fingerprints.numel(),
            self.lines, self.lines.numel(), self.fingerprints, self.verdicts, self.scratch, self.done,
            self.scratch.numel(),
            FORCE=force, WORD=_WORDS[element], LENGTH=LINE_BYTES // element, LINES=LINES,
            WEIGHTS=triton.next_power_of_2(self.scratch.numel()), num_warps=8,
        )  # fmt: skip

    def _prepared(self, element: int, measured: bool, record: bool, force: bool, most: float | None) -> list[Repeated]:
        layout, count, programs = self.layout, self.verdicts.numel(), self.tiles.numel()
        few = programs
        if not force and self.like.is_cuda:
            processors = torch.cuda.get_device_properties(self.like.device).multi_processor_count
            few = min(programs, PROGRAMS_PER_MULTIPROCESSOR * processors)
        q, qt, amax, scale_inv = self.outputs
        target, epsilon, power_2 = rule_constants(layout.rule, layout.dtype)
        tables = (self.verdicts, count, self.addresses, self.geometry, self.tiles, programs)
        measuring = Repeated(_measure_kernel, few, *tables, self.scratch, **self.constants)
        quantizing = Repeated(
            _quantize_kernel, few,
            *tables, self.rows, q.view(torch.uint8), qt.view(torch.uint8), self.scratch, self.done, amax, scale_inv,
            self.scratch.numel(), WEIGHTS=triton.next_power_of_2(self.scratch.numel()),
            MEASURED=measured, RECORD=record, MOST=most,
            TARGET=target, EPSILON=epsilon, POWER_2=power_2, E5M2=layout.dtype == torch.float8_e5m2, **self.constants,
        )  # fmt: skip
        return [self._check(element, force), *([measuring] if measured else []), quantizing]
