"""Measure the constants of the cost model on this machine and print them as te_compile/passes/speed.py has them.

    python -m benchmarks.constants                  about a minute on a GPU machine, most of it compiling

The device's are rates of large products, of attention and of the quantize kernel, and the time of a kernel that has
nothing to do. The host's come from layers so small that the GPU waits: a stack of one and a stack of three are
compiled by torch.compile and by te_fp8, and a step's time is split into what grows with the linears and what does not.
Without a GPU only the host's are measured, and mean nothing but that this script runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import growth, layer, measure
from benchmarks.growth import BASELINE, FORCED
from benchmarks.measure import DEVICE
from te_compile.passes.speed import HostCost

LINEARS_A_LAYER = 4
STACKS = (1, 3)
TINY = layer.Work(hidden=256, intermediate=1024, heads=2, sequence=128, batch=1)
PREFIXES = {BASELINE: "HIGH_PRECISION", FORCED: "FP8"}
ROUNDS = 8
SHAPE = (8192, 16384, 4096)  # M, N, K of the products whose rates count


def seconds_a_call(call: Callable[[], Any], calls: int) -> float:
    """The mean of a loop. Calls follow each other without waiting, as steps of a training do."""
    measure.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    measure.synchronize()
    return (time.perf_counter() - start) / calls


def host_cost(small: float, large: float, linears: Sequence[int]) -> HostCost:
    """Split the microseconds of two steps, with so many linears each, into a step's price and a linear's."""
    few, many = linears
    slope = (large - small) / (many - few)
    return HostCost(step=max(0.0, small - slope * few), linear=slope)


Step = tuple[str, str, int]
"""Variant, work and layers of a stack."""


def tiny_steps(compiler: str) -> dict[Step, Callable[[], Any]]:
    """A step of each variant, in training and in inference, of each stack; compiled, and run a few times."""
    measure.fresh_start()
    steps: dict[Step, Callable[[], Any]] = {}
    for variant in PREFIXES:
        for layers in STACKS:
            x, dy = layer.data(TINY)
            runnable = growth.compiled(variant, nn.Sequential(*(layer.plain(TINY) for _ in range(layers))), compiler)
            growth.settle(runnable, x, dy)
            steps[variant, "training", layers] = partial(layer.train_step, runnable, x, dy)
            steps[variant, "inference", layers] = partial(growth.forward, runnable, x)
    return steps


def host_costs(compiler: str, calls: int) -> dict[str, HostCost]:
    """What a step costs the host, by the names of te_compile/passes/speed.py.

    The best of a few loops of each, which take turns: a host drifts by more than the variants differ.
    """
    steps = tiny_steps(compiler)
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(ROUNDS):
        for step, call in steps.items():
            best[step] = min(best[step], 1e6 * seconds_a_call(call, calls))
    linears = [LINEARS_A_LAYER * layers for layers in STACKS]
    return {
        f"{prefix}_{work.upper()}": host_cost(*(best[variant, work, layers] for layers in STACKS), linears)
        for variant, prefix in PREFIXES.items()
        for work in ("training", "inference")
    }


def product_rates() -> dict[str, float]:
    """FLOPs a microsecond of a bf16 product and of FP8 products as a training step mixes them."""
    from benchmarks.kernel_timing import replayed
    from te_compile.ops import registry
    from te_compile.ops.gemm import GEMM

    rows, columns, length = SHAPE
    flops = 2.0 * rows * columns * length
    a, b = (torch.randn(size, length, device=DEVICE, dtype=torch.bfloat16) for size in (rows, columns))
    one = torch.ones((), device=DEVICE)
    a8, b8, g8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), a.to(torch.float8_e5m2)

    def fp8(left: Tensor, accumulation: str) -> float:
        arguments = {
            "a": left, "b": b8, "a_scale_inv": one, "b_scale_inv": one, "bias": None, "out_dtype": torch.bfloat16,
            "accumulation": accumulation,
        }  # fmt: skip
        implementation, _ = registry.choose("gemm", registry.Target.of(left.device), arguments)
        return replayed(lambda _: GEMM(**arguments, label="constants", implementation=implementation))

    high = replayed(lambda _: a @ b.t())
    low = (fp8(a8, "fast") + 2 * fp8(g8, "split")) / 3
    return {"BF16_FLOPS_PER_MICROSECOND": flops / high / 1e3, "FP8_FLOPS_PER_MICROSECOND": flops / low / 1e3}


def attention_rate() -> dict[str, float]:
    """FLOPs a microsecond of causal attention, forward and backward."""
    q, k, v = (torch.randn(4, 32, 2048, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dy = torch.randn_like(q)

    def step() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), dy)

    flops = 3.5 * 0.5 * 4.0 * 4 * 32 * 2048 * 2048 * 128
    return {"ATTENTION_FLOPS_PER_MICROSECOND": flops / measure.median_ms(step, 20, 5) / 1e3}


def memory_rates() -> dict[str, float]:
    """Bytes a microsecond of the quantize kernel, and the time of one with next to nothing to do."""
    from benchmarks.kernel_timing import TURNS, replayed
    from te_compile.kernels.quantize import quantize
    from te_compile.recipe import ScaleRule

    scale, rule = torch.ones((), device=DEVICE), ScaleRule()

    def milliseconds(rows: int, columns: int) -> float:
        xs = [torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16) for _ in range(TURNS)]
        return replayed(lambda turn: quantize(xs[turn], scale, torch.float8_e4m3fn, True, True, rule, False))

    large = milliseconds(8192, 4096)
    return {
        "BYTES_PER_MICROSECOND": 8192 * 4096 * 4 / large / 1e3,
        "LAUNCH_MICROSECONDS": 1e3 * milliseconds(64, 64),
    }


def as_source(rates: dict[str, float], hosts: dict[str, HostCost]) -> str:
    """The lines of te_compile/passes/speed.py."""
    lines = [f"{name} = {rounded(value)}" for name, value in rates.items()]
    lines += [f"{name} = HostCost(step={each.step:.0f}.0, linear={each.linear:.0f}.0)" for name, each in hosts.items()]
    return "\n".join(lines)


def rounded(value: float) -> str:
    """A number as the source writes it, with no more digits than a measurement is good for: 1200e6, 3.2e6, 4.0."""
    if value < 1e6:
        return f"{value:.1f}"
    return f"{value / 1e6:.{0 if value >= 1e8 else 1}f}e6"


def attempted(name: str, measured: Callable[[], dict[str, float]], rows: measure.Rows) -> dict[str, float]:
    """The constants that ``measured`` finds; what fails leaves a row and the others go on."""
    try:
        found = measured()
    except Exception as error:
        rows.write(what="constant", name=name, error=repr(error)[:300])
        rows.fail(name, repr(error)[:200])
        return {}
    for constant, value in found.items():
        rows.write(what="constant", name=constant, value=value)
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--calls", type=int, default=30, help="steps in a loop (%(default)s)")
    measure.add_out(parser)
    arguments = parser.parse_args(given)
    rows = measure.Rows(arguments.out)
    measure.describe_device(rows)
    rates: dict[str, float] = {}
    if DEVICE.type == "cuda":
        for each in (product_rates, attention_rate, memory_rates):
            rates |= attempted(each.__name__, each, rows)
    hosts = host_costs(arguments.compiler, arguments.calls)
    for name, cost in hosts.items():
        rows.write(what="constant", name=name, step=cost.step, linear=cost.linear)
    print(as_source(rates, hosts))
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
