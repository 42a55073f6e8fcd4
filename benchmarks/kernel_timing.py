"""How a row of ``benchmarks.kernels`` is timed, and what its share is a share of: a copy, or the largest product."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from te_compile.kernels import buffers

TURNS = 4  # sets of inputs
DEVICE = "cuda"
E4M3 = torch.float8_e4m3fn


def replayed(call: Callable[[int], Any], replays: int = 12) -> float:
    """Median milliseconds of one call in a CUDA graph of all turns. Results live as long as the graph: none reuses
    another's memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    turns = [*range(TURNS)] * 2
    with buffers.lent_while_capturing(2 * len(turns), DEVICE), torch.cuda.graph(graph):
        results = [call(turn) for turn in turns]
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(results))
    return statistics.median(times[2:])


def host_microseconds(call: Callable[[], Any], calls: int = 100) -> float:
    """What one call costs the host: the best of five loops, the device kept out of the way."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
        torch.cuda.synchronize()
    return best * 1e6


def copy_bandwidth(copies: int = 50) -> float:
    """TB/s of a 1 GiB copy, read and written bytes together.

    Plain copies one after the other: a copy in a CUDA graph is a node of its own kind and took half as long again.
    """
    source = torch.empty(1 << 29, device=DEVICE, dtype=torch.bfloat16).normal_()
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(4):  # the first one also wakes the clocks
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(copies):
            target.copy_(source)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / copies)
    return 2 * source.numel() * source.element_size() / best / 1e9


def product_peak() -> float:
    """TFLOP/s of the largest product that a layer could wish for, 8192 cubed, FP8 with fast accumulation."""
    a, b = (torch.randn(8192, 8192, device=DEVICE).to(E4M3) for _ in range(2))
    one = torch.ones((), device=DEVICE)
    multiply = functools.partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    return 2 * 8192**3 / replayed(lambda _: multiply()) / 1e9


@dataclass
class Ceilings:
    """What shares are shares of: TB/s of a copy, and TFLOP/s of a product, measured once somebody asks."""

    copy: float

    @functools.cached_property
    def product(self) -> float:
        """TFLOP/s."""
        return product_peak()
