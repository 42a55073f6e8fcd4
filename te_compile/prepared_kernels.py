"""What is done about a graph's Triton kernels while it is compiled, before Inductor compiles the rest of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from te_compile.kernels import ahead, tile_choices
from te_compile.options import Options
from te_compile.passes import time_tiles
from te_compile.passes.manager import Compilation
from te_compile.passes.rehearse import rehearse, rehearse_copies
from te_compile.passes.step_cost import asked_of_inductor

LOG = logging.getLogger("te_compile")


class TimedTiles:
    """Has tiles timed before kernels are ordered, if the user asks for that (passes/time_tiles.py)."""

    def __init__(self, compilation: Compilation, options: Options, inputs: Sequence[Any]) -> None:
        self.compilation, self.is_asked_for = compilation, time_tiles.is_asked_for(asked_of_inductor(options))
        if self.is_asked_for:  # those of a graph that a cache has are not timed
            for device in {each.get_device() for each in inputs if isinstance(each, torch.Tensor) and each.is_cuda}:
                tile_choices.load(device)

    def time(self, graph: Graph) -> None:
        """Time those of this graph that nobody has timed."""
        if not self.is_asked_for or not any(map(_is_on_gpu, graph.find_nodes(op="placeholder"))):
            return
        try:
            self.compilation.run("time_tiles", partial(time_tiles.time_tiles, graph), graph)
        except Exception as error:  # whatever it is, launchers have tiles of their own
            LOG.warning("not all tiles are timed: %r", error)


class KernelsAhead:
    """Has workers compile the Triton kernels of a compilation while Inductor compiles the rest (kernels/ahead.py).

    What the first step launches is ordered as soon as the graph is known. Later steps, which know all scales, launch
    other forms of some; these wait until Inductor needs its workers no more.
    """

    def __init__(self, compilation: Compilation, options: Options) -> None:
        self.compilation, self.stateful = compilation, options.recipe.stateful
        self.later: list[ahead.Launch] = []

    def order(self, graph: Graph) -> None:
        """Order what the first step launches."""
        if not ahead.is_possible() or not any(map(_is_on_gpu, graph.find_nodes(op="placeholder"))):
            return
        try:
            ahead.compile_ahead(self._launches(graph, missing=True))
            self.later = self._launches(graph, missing=False)
        except Exception as error:  # whatever it is, kernels can still be compiled when they are launched
            LOG.warning("no kernels are compiled ahead: %r", error)

    def order_later(self) -> None:
        """Order what only later steps launch."""
        ahead.compile_ahead(self.later)

    def _launches(self, graph: Graph, missing: bool) -> list[ahead.Launch]:
        groups = self.compilation.plan.groups
        return [*rehearse_copies(groups, self.stateful, missing), *rehearse(graph, missing)]


def _is_on_gpu(placeholder: Node) -> bool:
    value = placeholder.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_cuda
