"""Grouped products on the hardware: real sizes, skewed routing, CUDA graphs whose groups change, whole mixtures."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_compile.kernels.grouped_gemm import NARROW, WIDE, GemmTile
from te_compile.ops.grouped_gemm import grouped_gemm_reference, grouped_wgrad_reference
from te_compile.ops.quantize import transposed_reference
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of
from tests.compiling import compiled, relative_error, te_nodes, train_step
from tests.emulation import emulated_experts
from tests.grouped_products import BF16, E5M2, LIMITS, SIZES, codes, drawn_ends, experts_of, number

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device with FP8 tensor cores (compute capability 8.9)",
    ),
]


@pytest.mark.parametrize("tile", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("as_columns", [False, True], ids=["as stored", "transposed copy"])
@pytest.mark.parametrize("accumulation", ["fast", "split"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_row_meets_its_own_expert(
    sizes: tuple[int, int, int, int], accumulation: str, as_columns: bool, tile: GemmTile
) -> None:
    from te_compile.kernels.grouped_gemm import grouped_gemm

    rows, length, columns, experts = sizes
    a, b = codes(rows, length, dtype=E5M2), experts_of(columns, length, experts, as_columns)
    operands = a, b, number(0.03), number(0.7), drawn_ends(rows, experts, 5)
    got = grouped_gemm(*operands, torch.bfloat16, accumulation, tile)
    wanted = grouped_gemm_reference(*operands, torch.float32, accumulation)
    assert relative_error(got, wanted) < LIMITS[accumulation] + BF16
    # Column by column too: a dead one hides in the whole.
    errors = (got.float() - wanted).norm(dim=0) / wanted.norm(dim=0)
    assert float(errors.max()) < 4 * (LIMITS[accumulation] + BF16)
    assert not got[int(operands[-1][-1]) :].any()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_weight_gradient_sums_over_its_own_rows(sizes: tuple[int, int, int, int], out_dtype: torch.dtype) -> None:
    from te_compile.kernels.grouped_gemm import grouped_wgrad

    rows, length, columns, experts = sizes
    dy, x = codes(rows, columns, dtype=E5M2), codes(rows, length)
    ends = drawn_ends(rows, experts, 5)
    operands = transposed_reference(dy), transposed_reference(x), number(0.03), number(0.7), ends
    got = grouped_wgrad(*operands, out_dtype, "split")
    wanted = grouped_wgrad_reference(*operands, torch.float32, "split")
    for part, expected in zip(got, wanted, strict=True):
        assert part.any() == expected.any()
        assert not expected.any() or relative_error(part, expected) < LIMITS["split"] + BF16


def test_a_captured_graph_follows_the_groups() -> None:
    from te_compile.kernels.grouped_gemm import grouped_gemm, grouped_wgrad

    rows, length, columns, experts = 2048, 512, 256, 8
    a, b, dy = codes(rows, length), codes(experts, columns, length), codes(rows, columns, dtype=E5M2)
    turned = transposed_reference(dy), transposed_reference(a)
    scales, ends = (number(0.5), number(2.0)), drawn_ends(rows, experts, 0)
    (
        grouped_gemm(a, b, *scales, ends, torch.float32, "split"),
        grouped_wgrad(*turned, *scales, ends, torch.float32, "split"),
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = grouped_gemm(a, b, *scales, ends, torch.float32, "split")
        dw = grouped_wgrad(*turned, *scales, ends, torch.float32, "split")
    for rest in (0, 900):
        ends.copy_(drawn_ends(rows, experts, rest))
        graph.replay()
        wanted = grouped_gemm_reference(a, b, *scales, ends, torch.float32, "split")
        assert relative_error(y, wanted) < LIMITS["split"]
        assert (
            relative_error(dw, grouped_wgrad_reference(*turned, *scales, ends, torch.float32, "split"))
            < LIMITS["split"]
        )


class Mixture(nn.Module):
    """Gated experts, routed by a fixed choice, so that FP8 cannot change it."""

    def __init__(self, experts: int = 8, width: int = 512, inner: int = 256) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, inner) / inner**0.5)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        gate, up = torch._grouped_mm(x, self.gate_up.mT, offs=ends).chunk(2, dim=-1)
        return torch._grouped_mm(F.silu(gate) * up, self.down.mT, offs=ends)


def emulated_mixture(model: Mixture, x: Tensor, ends: Tensor) -> Tensor:
    """The same by the textbook."""
    gate, up = emulated_experts(x, model.gate_up.mT, ends).chunk(2, dim=-1)
    return emulated_experts(F.silu(gate) * up, model.down.mT, ends)


def exact_mixture(model: Mixture, x: Tensor, ends: Tensor) -> Tensor:
    """The same in fp32, expert by expert."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    parts = zip(x.split(counts), model.gate_up, model.down, strict=True)
    results = []
    for rows, gate_up, down in parts:
        gate, up = (rows @ gate_up.t()).chunk(2, dim=-1)
        results.append((F.silu(gate) * up) @ down.t())
    return torch.cat(results)


# Over a million numbers the error of rounding is known to a few per mille, and what bf16 and the sums add is a tenth of
# it, at right angles.
MORE = 1.05


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_mixture_trains_as_the_textbook_has_it(recipe: str, mode: str | None) -> None:
    model, x = Mixture().cuda().bfloat16(), torch.randn(4096, 512, device="cuda").bfloat16()
    options = {"compiler": "inductor", "recipe": recipe, "cost_model": False, "strict": True}
    fast = compiled(model, **options, **({"mode": mode} if mode else {}))
    ends = drawn_ends(4096, 8, 0)
    with manager.recording() as records:
        for _ in range(4):  # the last ones from a CUDA graph, if there is one
            if recipe == "current":  # a delayed scale is the textbook's as long as the data stay the same
                ends = drawn_ends(4096, 8, 0)
            y, got = train_step(model, fast, x, ends)
            y, got = y.clone(), {name: gradient.clone() for name, gradient in got.items()}
    textbook, textbook_gradients = train_step(model, partial(emulated_mixture, model), x, ends)
    exact, exact_gradients = train_step(model.float(), partial(exact_mixture, model), x.float(), ends)
    assert relative_error(y, exact) < MORE * relative_error(textbook, exact)
    for name, gradient in exact_gradients.items():
        assert relative_error(got[name], gradient) < MORE * relative_error(textbook_gradients[name], gradient), name
    implementation = "cuda" if torch.cuda.get_device_capability() == (9, 0) else "triton"
    for operator in ("grouped_gemm", "grouped_wgrad"):
        nodes = te_nodes(records[0], operator)
        assert nodes and {arguments_of(node)["implementation"] for node in nodes} == {implementation}
