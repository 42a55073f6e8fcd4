"""Operators as generated code calls them on a GPU: replayed, and to the bit what their code does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_compile.ops.library import implementations
from te_compile.ops.quantize import quantize_reference
from te_compile.recipe import ScaleRule

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from te_compile import direct
from te_compile.kernels import native
from te_compile.kernels.replay import Replayed

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
RULE = ScaleRule().text()
SPEC = "x0: bfloat16[M, K]; t0 = relu(x0); quantize t0; emit t0: bfloat16; sum t0: float32"
NEEDS_CORE = pytest.mark.skipif(bool(native.missing(cuda=True)), reason="the core was built without CUDA")


def matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=BF16)


def scale() -> Tensor:
    return torch.rand((), device="cuda") + 1


def fp8(rows: int, columns: int, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    q, _, _, scale_inv = quantize_reference(matrix(rows, columns), None, dtype, True, False, ScaleRule())
    return q, scale_inv.clone()


def gemm(implementation: str, bias: bool, addend: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (a, a_scale), (b, b_scale) = fp8(64, 128), fp8(96, 128)
    added = torch.randn(96, device="cuda", dtype=BF16) if bias else None
    named = {"addend": matrix(64, 96) if addend else None, "implementation": implementation}
    return (a, b, a_scale, b_scale, added, BF16, "fast", "a product"), named


def norm(kind: str, implementation: str, columnwise: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    weight = torch.randn(256, device="cuda", dtype=BF16)
    bias = torch.randn(256, device="cuda", dtype=BF16) if kind == "layer" else None
    given = (matrix(64, 256), weight, bias, 1e-5, kind, scale(), E4M3, True, columnwise, True, RULE)
    return given, {"implementation": implementation}


def norm_backward() -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, rstd = matrix(64, 256), torch.rand(64, 1, device="cuda") + 0.5
    weight = torch.randn(256, device="cuda", dtype=BF16)
    empty = torch.empty(0, device="cuda")
    return (matrix(64, 256), x, weight, empty, rstd, matrix(64, 256), "rms", True, True, None), {
        "implementation": "triton"
    }


CALLS: dict[str, tuple[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "quantize": (
        "quantize",
        lambda: ((matrix(64, 128), scale(), E5M2, True, True, RULE), {"implementation": "triton"}),
    ),
    "quantize, strided": (
        "quantize",
        lambda: ((matrix(64, 256)[:, 64:192], scale(), E4M3, True, True, RULE), {"implementation": "triton"}),
    ),
    "quantize, current": (
        "quantize",
        lambda: ((matrix(64, 128), None, E4M3, True, True, RULE), {"implementation": "triton"}),
    ),
    "producer": (
        "fused_quantize",
        lambda: (([matrix(64, 128)], scale(), SPEC, E4M3, True, True, RULE), {"implementation": "triton"}),
    ),
    "norm, two passes": ("norm_quantize", lambda: norm("rms", "triton", True)),
    "norm, rows alone": ("norm_quantize", lambda: norm("layer", "triton", False)),
    "norm backward": ("norm_backward", norm_backward),
    "product": ("gemm", lambda: gemm("cublaslt", False, False)),
    "product, bias": ("gemm", lambda: gemm("cublaslt", True, False)),
    "product, addend": ("gemm", lambda: gemm("cublaslt", False, True)),
    "norm, core": ("norm_quantize", lambda: norm("layer", "cuda", True)),
    "snapshot": ("snapshot", lambda: (([STATES[0], STATES[1]],), {"implementation": "triton"})),
}
STATES = [torch.rand(2, 18, device="cuda") for _ in range(2)]
OF_THE_CORE = {"product", "product, bias", "product, addend", "norm, core"}


def flat(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("case", [pytest.param(c, marks=NEEDS_CORE if c in OF_THE_CORE else ()) for c in CALLS])
def test_replays_give_the_bits_of_the_operators_code(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_compile.ops.calibration._waiting", set())
    name, make = CALLS[case]
    replayed = Replayed(name, implementations[name], name in direct.BY_ADDRESS)
    for _ in range(5):
        arguments, named = make()
        if name == "snapshot":
            STATES[0].uniform_()
        got = flat(replayed(*arguments, **named))
        wanted = flat(implementations[name](*arguments, **named))
        assert len(got) == len(wanted) and all(map(same, got, wanted))
    (tape,) = replayed.tapes.values()
    assert tape is not None


def test_another_stream_gets_memory_and_launches_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_compile.ops.calibration._waiting", set())
    replayed = Replayed("quantize", implementations["quantize"])
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(4):
                x, used = matrix(64, 128), scale()
                got = replayed(x, used, E4M3, True, True, RULE, implementation="triton")
                wanted = quantize_reference(x, used, E4M3, True, True, ScaleRule())
                assert torch.equal(got[0].float(), wanted[0].float()) and got[2] == wanted[2]
        stream.synchronize()


def test_what_a_graph_captures_is_not_replayed() -> None:
    replayed = Replayed("quantize", implementations["quantize"])
    x, used = matrix(64, 128), scale()
    for _ in range(3):
        replayed(x, used, E4M3, True, True, RULE, implementation="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, _, amax, _ = replayed(x, used, E4M3, True, True, RULE, implementation="triton")
    for factor in (1, 3):
        x.mul_(factor)
        graph.replay()
        wanted = quantize_reference(x, used, E4M3, True, True, ScaleRule())
        assert torch.equal(q.float(), wanted[0].float()) and amax == wanted[2]


def test_a_training_step_replays_every_operator_but_the_scale_update() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda().bfloat16()
    compiled = torch.compile(model, backend="te_fp8", options={"cost_model": False})
    operators = vars(direct.CALLS).items()
    before = {name: len([tape for tape in each.tapes.values() if tape]) for name, each in operators}
    for _ in range(8):
        compiled(matrix(128, 256)).sum().backward()
    torch.cuda.synchronize()
    grown = {name for name, each in operators if len([tape for tape in each.tapes.values() if tape]) > before[name]}
    assert grown >= {"snapshot", "norm_quantize", "gemm", "fused_quantize", "norm_backward"}
