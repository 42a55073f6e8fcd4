"""One spec for two producers, in which what both read is read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from te_compile.ops.pointwise import Input, Operand, Place, Result, Spec, SpecBuilder, grouped
from te_compile.passes.index_space import behind_views

MOST_MATRICES = 5
"""Two results are held as codes beside what is read: more matrices than these would run out of registers."""

Read = tuple[Input, tuple[Node, ...]]
"""One input of a spec, and the nodes that hold its tensor or its parts."""


@dataclass(frozen=True)
class Reading:
    """A spec, and what each input of it is read from."""

    spec: Spec
    reads: tuple[Read, ...]

    @classmethod
    def of(cls, spec: Spec, inputs: Sequence[Node]) -> Reading:
        """Of the nodes in the order in which an operator gets them."""
        return cls(spec, tuple((given, tuple(nodes)) for given, nodes in grouped(spec, inputs)))

    @property
    def inputs(self) -> list[Node]:
        """The nodes, as an operator gets them."""
        return [node for _, nodes in self.reads for node in nodes]

    @property
    def matrices(self) -> dict[Any, None]:
        """What it is known by of each whole matrix that is read, in order."""
        return {known_as(read): None for read in self.reads if read[0].place is Place.FULL}


def known_as(read: Read) -> tuple[Any, ...]:
    """Equal for inputs that are the same tensor, read in the same way."""
    given, nodes = read
    if given.parts:
        return given, tuple((behind_views(node), str(node.meta["val"].shape)) for node in nodes)
    return given, tuple(map(behind_views, nodes))


def share_matrices(one: Reading, other: Reading) -> bool:
    """Do both read a whole matrix that the other reads as well, and not too many together?"""
    return bool(one.matrices.keys() & other.matrices) and len(one.matrices | other.matrices) <= MOST_MATRICES


def merged(one: Reading, other: Reading, sums: Sequence[torch.dtype] = ()) -> Reading | None:
    """What quantises the value of each; None if both are the same. sums: for each its sum and the other's are wanted.

    Neither reads a tensor in pieces.
    """
    builder = SpecBuilder()
    reads: list[Read] = []
    inputs: dict[tuple[Any, ...], str] = {}
    roots: list[str] = []
    for reading in (one, other):
        names: dict[Operand, Operand] = {}
        for index, read in enumerate(reading.reads):
            key = known_as(read)
            if key not in inputs:
                inputs[key] = builder.again(read[0])
                reads.append(read)
            names[f"x{index}"] = inputs[key]
        for index, step in enumerate(reading.spec.steps):
            operands = (names[operand] if isinstance(operand, str) else operand for operand in step.operands)
            names[f"t{index}"] = builder.step(step.operation, *operands)
        roots.append(str(names[reading.spec.quantized]))
    if roots[0] == roots[1]:
        return None
    results = [Result(root, dtype) for dtype in sums for root in roots]
    return Reading(builder.finish(roots[0], [], results, roots[1]), tuple(reads))
