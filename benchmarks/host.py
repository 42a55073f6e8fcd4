"""What a call of a te:: operator costs the host, as generated code calls it, played by Python and by the C++ core.

    python -m benchmarks.host                     every operator
    python -m benchmarks.host --only gemm         those whose name contains "gemm"

One JSON line an operator, in microseconds of the host: ``code_us`` runs the operator's code each time, ``python_us``
and ``core_us`` replay it (docs/passes.md, "What a call costs the host"), ``launches_us`` is what its launches alone
take when the core makes them, and ``beyond_us`` is core_us less that. Shapes are small and the queue is empty when each
loop starts, so that nobody waits for the GPU. The results of all three must be equal, bit for bit. It exits with 1
where they are not, or where nothing is replayed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Rows, add_out, describe_device
from te_compile.kernels import player, recording
from te_compile.kernels.replay import Replayed, Tape
from te_compile.ops import calibration
from te_compile.ops.library import implementations
from te_compile.ops.quantize import quantize_reference
from te_compile.recipe import ScaleRule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON, CUBLASLT, CUDA = "triton", "cublaslt", "cuda"
ROWS, COLUMNS = 512, 1024
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
RULE = ScaleRule()
WARM = 5  # calls: the code runs, is recorded, and replayed
SPEC = "x0: bfloat16[M, K]; t0 = relu(x0); quantize t0"
SPEC_WITH_SUM = "x0: bfloat16[M, K]; t0 = relu(x0); quantize t0; sum t0: float32"
PAIR = "x0: bfloat16[M, K]; t0 = relu(x0); t1 = neg(x0); quantize t0; quantize t1"

Given = tuple[tuple[Any, ...], dict[str, Any]]


def _matrix() -> Tensor:
    return torch.randn(ROWS, COLUMNS, device=DEVICE, dtype=BF16)


def _scale() -> Tensor:
    return torch.rand((), device=DEVICE) + 1


def _gemm(biased: bool, added: bool) -> Given:
    operands = [quantize_reference(_matrix(), None, E4M3, True, False, RULE) for _ in range(2)]
    (a, _, _, a_scale), (b, _, _, b_scale) = operands
    bias = torch.randn(ROWS, device=DEVICE, dtype=BF16) if biased else None
    addend = torch.randn(ROWS, ROWS, device=DEVICE, dtype=BF16) if added else None
    named = {"addend": addend, "implementation": CUBLASLT}
    return (a, b, a_scale.clone(), b_scale.clone(), bias, BF16, "fast", "a product"), named


def _norm(implementation: str) -> Given:
    weight = torch.randn(COLUMNS, device=DEVICE, dtype=BF16)
    given = (_matrix(), weight, None, 1e-5, "rms", _scale(), E4M3, True, True, False, RULE.text())
    return given, {"implementation": implementation}


def _norm_backward() -> Given:
    weight, rstd = torch.randn(COLUMNS, device=DEVICE, dtype=BF16), torch.rand(ROWS, 1, device=DEVICE) + 0.5
    mean = torch.empty(0, device=DEVICE)
    given = (_matrix(), _matrix(), weight, mean, rstd, _matrix(), "rms", True, True, None)
    return given, {"implementation": TRITON}


def _produced(spec: str) -> Given:
    return ([_matrix()], _scale(), spec, E4M3, True, True, RULE.text()), {"implementation": TRITON}


CALLS: dict[str, tuple[str, Callable[[], Given]]] = {
    "gemm": ("gemm", lambda: _gemm(False, False)),
    "gemm, bias": ("gemm", lambda: _gemm(True, False)),
    "gemm, addend": ("gemm", lambda: _gemm(False, True)),
    "quantize": (
        "quantize",
        lambda: ((_matrix(), _scale(), E4M3, True, True, RULE.text()), {"implementation": TRITON}),
    ),
    "fused_quantize": ("fused_quantize", lambda: _produced(SPEC)),
    "fused_quantize, sum": ("fused_quantize", lambda: _produced(SPEC_WITH_SUM)),
    "fused_quantize_pair": (
        "fused_quantize_pair",
        lambda: (
            ([_matrix()], _scale(), _scale(), PAIR, E4M3, True, True, True, True, RULE.text()),
            {"implementation": TRITON},
        ),
    ),
    "fused_quantize_cat": ("fused_quantize_cat", lambda: _produced(PAIR)),
    "norm_quantize": ("norm_quantize", lambda: _norm(TRITON)),
    "norm_quantize, core": ("norm_quantize", lambda: _norm(CUDA)),
    "norm_backward": ("norm_backward", _norm_backward),
}


def microseconds(call: Callable[[], Any], calls: int = 200) -> float:
    """What one call costs the host: the best of seven loops."""
    best = float("inf")
    for _ in range(7):
        _wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    _wait()
    return best * 1e6


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def placed(name: str, given: Given, by_python: bool) -> tuple[Callable[..., Any], Replayed]:
    """The operator at a place of its own, warm: called with ``given`` it is replayed, if it can be."""
    operator = Replayed(name, implementations[name])
    with player.by_python() if by_python else nullcontext():
        site = operator.site()
        for _ in range(WARM):
            site(*given[0], **given[1])
    return site, operator


def launches_alone(tape: Tape, given: Sequence[Tensor], device: int, stream: int) -> Callable[[], Any] | None:
    """The launches of a tape, again and again at the same addresses. None where the core makes none."""
    tensors = [*given, *(make(device, stream) for make in tape.makes)]
    steps = []
    for function, template, places, kernel in tape.steps:
        filled = list(template)
        for place, tensor, offset in places:
            if tensor >= 0:
                filled[place] = tensors[tensor].data_ptr() + offset
        streams = [each for each in places if each[1] < 0]
        steps.append(recording.Step(function, filled, streams, kernel))
    made = player.launches(steps)
    if made is None:
        return None
    return lambda kept=tensors: made([], [], device, stream)  # type: ignore[misc]  # a default that nobody gives


def equal(one: Any, other: Any) -> bool:
    """Have these results the same bits?"""
    ones, others = ([each] if isinstance(each, Tensor) else each for each in (one, other))
    pairs = list(zip(ones, others, strict=True))
    return all(a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def row_of(case: str) -> dict[str, Any]:
    """Measure one operator. Raises RuntimeError if it is not replayed, or wrongly."""
    name, make = CALLS[case]
    given = make()
    code = implementations[name]
    wanted = code(*given[0], **given[1])
    row: dict[str, Any] = {"what": "host", "operator": case, "launches": None}
    row["code_us"] = microseconds(lambda: code(*given[0], **given[1]))
    for by in ("python", "core"):
        site, operator = placed(name, given, by == "python")
        if not getattr(site, "bound", False):
            raise RuntimeError(f"played by {by} it is not replayed")
        if by == "core" and player.core() is None:
            raise RuntimeError("there is no C++ core with CUDA here")
        if not equal(site(*given[0], **given[1]), wanted):
            raise RuntimeError(f"played by {by} its results are others")
        row[f"{by}_us"] = microseconds(lambda site=site: site(*given[0], **given[1]))  # type: ignore[misc]  # a default that nobody gives
        if by == "python":
            row |= _launches(operator, given)
    row["beyond_us"] = row["core_us"] - row["launches_us"]
    return row


def _launches(operator: Replayed, given: Given) -> dict[str, Any]:
    """How many steps there are, and what they cost by themselves."""
    (tape,) = (each for each in operator.tapes.values() if isinstance(each, Tape))
    tensors, _, _ = operator._read(*given)
    device = torch.cuda.current_device()
    alone = launches_alone(tape, tensors, device, torch.cuda.current_stream().cuda_stream)
    return {"launches": len(tape.steps), "launches_us": float("nan") if alone is None else microseconds(alone)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what was asked for; the exit status says whether all of it is replayed and right."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description="Microseconds of the host a call.")
    parser.add_argument("--only", default="", help="operators whose name contains this; all when empty")
    add_out(parser)
    arguments = parser.parse_args(argv)
    cases = [case for case in CALLS if arguments.only in case]
    if not cases:
        parser.error(f"--only {arguments.only!r} fits none of {', '.join(CALLS)}")
    rows = Rows(arguments.out)
    describe_device(rows)
    waiting, calibration._waiting = calibration._waiting, set()  # no scale is missing in what is measured
    try:
        for case in cases:
            try:
                rows.write(**row_of(case))
            except Exception as error:
                rows.write(what="host", operator=case, error=str(error))
                rows.fail(case, str(error))
    finally:
        calibration._waiting = waiting
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
