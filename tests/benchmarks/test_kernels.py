"""The table of kernels: its rows are right, ours and a peer's, and one that fails leaves the others.

Transformer Engine is not there; what stands in for it takes its arguments and computes what it computes with our
references, so that the rows' checks have something to judge. What our own kernels compute in their rows is a matter of
tests/kernels/test_benchmarked_kernels.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import kernel_peers, kernel_table, kernel_timing, kernels, measure, products
from benchmarks.kernels import Row
from te_compile.ops.quantize import quantize_reference

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here rows are made on the CPU")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shapes on the CPU, and a clock that always says 2 µs."""
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    monkeypatch.setattr(kernels, "SHAPES", ((32, 64),))
    monkeypatch.setattr(kernels, "LOGITS", (16, 300))
    monkeypatch.setattr(kernels, "LAYER", ((32, 64), (64, 32)))
    monkeypatch.setattr(kernels, "replayed", lambda call, replays=12: 0.002)
    monkeypatch.setattr(kernels, "host_microseconds", lambda call, calls=100: 1.0)
    monkeypatch.setattr(kernel_timing, "product_peak", lambda: 100.0)
    monkeypatch.setattr(products, "TOKENS", 32)
    monkeypatch.setattr(products, "LINEARS", {"proj": (64, 48)})


CEILINGS = kernels.Ceilings(copy=4.0)


def test_the_backward_of_gelu_is_that_of_torch() -> None:
    from te_compile.ops.pointwise import Spec, evaluate

    dy, x = torch.randn(2, 16, 32).bfloat16()
    z, _, _ = evaluate(Spec.parse(kernels.SPECS["gelu_backward"]), [dy, x])
    wanted = torch.ops.aten.gelu_backward(dy.float(), x.float(), approximate="tanh")
    torch.testing.assert_close(z.float(), wanted, rtol=1e-2, atol=1e-2)


def test_the_backward_of_a_rotation_is_that_of_autograd() -> None:
    from te_compile.ops.pointwise import Spec, evaluate

    dy, sin, cos = (torch.randn(shape).bfloat16() for shape in ((2, 8, 3, 128), (1, 8, 1, 128), (1, 8, 1, 128)))
    q = torch.randn(2, 8, 3, 128, requires_grad=True)
    low, high = q.chunk(2, dim=3)
    rotated = q * cos.float() + torch.cat([-high, low], dim=3) * sin.float()
    (wanted,) = torch.autograd.grad(rotated, q, dy.float())
    z, _, _ = evaluate(Spec.parse(kernels.rotation_backward(128)), [dy, sin, cos])
    torch.testing.assert_close(z.float().view(wanted.shape), wanted, rtol=1e-2, atol=1e-2)


def test_shares_are_of_the_copy_and_of_the_largest_product() -> None:
    moving = Row("copying", "1", 4_000_000, lambda tile, turn: None, lambda got: True)
    multiplying = Row("product", "1", 1, lambda tile, turn: None, lambda got: True, flops=1e8)
    found = [kernels.measure(row, None, CEILINGS) for row in (moving, multiplying)]
    assert (found[0]["tb_s"], found[0]["share"]) == (2.0, 0.5)
    assert (found[1]["tflop_s"], found[1]["share"]) == (50.0, 0.5)
    assert "tb_s" not in found[1] and "bytes" not in found[1]


def test_only_ours_can_fail_the_run() -> None:
    def broken(by: str, right: bool) -> str:
        row = Row("x", "1", 1, lambda tile, turn: None, lambda got: right, by=by)
        return kernels.judged(row, None, CEILINGS)[1]

    assert "wrong" in broken(kernels.OURS, right=False)
    assert "goal" in broken(kernels.OURS, right=True)
    assert broken(kernel_peers.BY, right=False) == broken("torch", right=True) == ""


def test_a_call_that_raises_leaves_a_row_with_the_error() -> None:
    def refuse(tile: Any, turn: int) -> None:
        raise RuntimeError("not on this GPU")

    for by, told in ((kernels.OURS, True), (kernel_peers.BY, False)):
        result, wrong = kernels.judged(Row("x", "1", 1, refuse, lambda got: True, by=by), None, CEILINGS)
        assert "not on this GPU" in result["error"] and result["kernel"] == "x" and bool(wrong) is told


def test_a_family_that_cannot_be_made_leaves_a_row_and_the_next_one_comes(tmp_path: Path) -> None:
    def vanished() -> Iterator[Row]:
        yield Row("first", "1", 1, lambda tile, turn: None, lambda got: True)
        raise ImportError("gone")

    out = measure.Rows(tmp_path / "rows.jsonl")
    assert [row.name for row in kernels.rows_of(vanished, out)] == ["first"]
    (told,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert told["kernel"] == "vanished" and "gone" in told["error"] and out.exit_status() == 1


# --- products ------------------------------------------------------------------------------------------------------


def multiplied(a: Tensor, b: Tensor, accumulation: str) -> Tensor:
    return (a.float() @ b.float().t()).bfloat16()


def test_products_are_the_three_of_a_linear_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "scaled_mm", multiplied)
    found = [kernels.measure(row, None, CEILINGS) for row in products.rows() if row.by == "torch"]
    assert [row["shape"] for row in found[::2]] == ["32x48x64", "32x64x48", "48x64x32"]
    assert all(row["right"] and row["flops"] == 2 * 32 * 48 * 64 for row in found)


def test_a_wrong_product_is_seen() -> None:
    a, b = next(products.products()).operands()
    right = multiplied(a, b, "fast")
    wrong = right.clone()
    wrong[:, 3] = 0
    assert products.close(right, a, b) and not products.close(wrong, a, b)
    assert not products.close(torch.full_like(right, float("nan")), a, b)


# --- Transformer Engine --------------------------------------------------------------------------------------------


class PretendExtension:
    """Transformer Engine's functions, with its arguments and results, by our references, which round once."""

    @staticmethod
    def quantize(x: Tensor, how: Any) -> Any:
        q, qt, *_ = quantize_reference(x, how.given, how.dtype, True, True, kernels.RULE)
        return SimpleNamespace(
            _data=q.view(torch.uint8), _transpose=qt.view(torch.uint8) if how.columnwise else None, value=q.float()
        )

    def layernorm_fwd(self, x, weight, bias, eps, out, how, otype, sm_margin, zero_centered_gamma) -> Any:
        assert (out, sm_margin, zero_centered_gamma) == (None, 0, False)
        y = F.layer_norm(x.float(), x.shape[1:], weight.float(), bias.float(), eps)
        return [self.quantize(y if how.given is not None else y.to(otype), how), None, None]

    def rmsnorm_fwd(self, x, weight, eps, out, how, otype, sm_margin, zero_centered_gamma) -> Any:
        y = x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + eps) * weight.float()
        return [self.quantize(y if how.given is not None else y.to(otype), how), None]

    def gelu(self, x, how) -> Any:
        return self.quantize(F.gelu(x.float(), approximate="tanh"), how)

    def swiglu(self, x, how) -> Any:
        gate, up = x.float().chunk(2, dim=1)
        return self.quantize(F.silu(gate) * up, how)

    def dbias_dgelu(self, grad, x, how) -> Any:
        dx = torch.ops.aten.gelu_backward(grad.float(), x.float(), approximate="tanh")
        return [dx.sum(0), self.quantize(dx, how)]

    def dbias_dsrelu(self, grad, x, how) -> Any:
        dx = grad.float() * 2 * x.float().relu()
        return [dx.sum(0), self.quantize(dx, how)]

    def multi_tensor_quantize(self, tensors, hows) -> Any:
        return [self.quantize(x, how) for x, how in zip(tensors, hows, strict=True)]

    def fused_amax_and_scale_update_after_reduction(self, amaxes, histories, scales, algorithm, dtype, margin) -> None:
        assert len(amaxes) == sum(scale.numel() for scale in scales) and algorithm == "max"


def pretend_gemm(weight, x, out_dtype, layout, use_split_accumulator, grad) -> Any:
    left = x.value.t() if layout[1] == "T" else x.value
    right = weight.value.t() if layout[0] == "T" else weight.value
    assert use_split_accumulator == grad == (layout != "TN")
    return [(left @ right).to(out_dtype), None, None, None]


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def quantizer(scale: Tensor | None, dtype: torch.dtype = kernels.E4M3, columnwise: bool = True) -> Any:
        return SimpleNamespace(given=scale, scale=scale, dtype=dtype, columnwise=columnwise)

    monkeypatch.setattr(kernel_peers, "extension", PretendExtension)
    monkeypatch.setattr(kernel_peers, "quantizer", quantizer)
    monkeypatch.setattr(kernel_peers, "general_gemm", lambda: pretend_gemm)
    monkeypatch.setattr(kernel_peers, "_dtype_code", lambda dtype: dtype)


def of_peers() -> list[Row]:
    shape = (32, 64)
    families = [kernel_peers.at(shape, each) for each in (kernel_peers.quantize_rows, kernel_peers.norm_rows)]
    families += [kernel_peers.at(shape, kernel_peers.activation_rows), kernel_peers.weight_rows]
    families += [kernel_peers.update_rows, kernel_peers.product_rows]
    return [row for family in families for row in family()]


@pytest.mark.usefixtures("transformer_engine")
def test_a_peer_that_computes_the_same_is_right_in_every_row() -> None:
    for row in of_peers():
        assert kernels.measure(row, None, CEILINGS)["right"], row.name


@pytest.mark.usefixtures("transformer_engine")
def test_every_job_of_a_peer_is_one_of_ours() -> None:
    families = [kernels.quantize_rows, kernels.norm_rows, kernels.weight_rows, kernels.update_rows, kernels.fused_rows]
    families.append(products.rows)
    ours = {(row.name.removesuffix(", Triton"), row.shape, row.bytes) for family in families for row in family()}
    peers = {(row.name, row.shape, row.bytes) for row in of_peers()}
    assert peers and peers <= ours


@pytest.mark.usefixtures("transformer_engine")
def test_a_peer_that_forgets_the_transpose_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in of_peers() if row.name == "quantize")
    got = row.call(None, 0)
    got._transpose = None
    assert not row.check(got)
    got = row.call(None, 0)
    got._data = got._data.flip(0)
    assert not row.check(got)


# --- the table -----------------------------------------------------------------------------------------------------


def a_row(by: str, ms: float, **more: Any) -> dict[str, Any]:
    row = {"kernel": "quantize", "shape": "8x8", "tile": "chosen", "bytes": 2**20, "share": 0.9, "right": True}
    return {**row, "by": by, "ms": ms, **more}


def test_the_table_has_a_line_per_job_and_compares() -> None:
    rows = [a_row(kernels.OURS, 0.01), a_row(kernel_peers.BY, 0.02), a_row(kernels.OURS, 0.001, tile="64x64 4 warps")]
    text = kernel_table.table(rows)
    assert "| quantize | 8x8 | 1.0 MiB | 10.0 µs, 90% | 20.0 µs, 90% | 2.00× |" in text
    assert len(text.splitlines()) == 3


def test_without_peers_the_table_has_no_column_for_them() -> None:
    assert "Transformer" not in kernel_table.table([a_row(kernels.OURS, 0.01)])


def test_failed_and_wrong_rows_say_so() -> None:
    failed = {**a_row(kernel_peers.BY, 0.0), "error": "x"}
    del failed["ms"], failed["share"], failed["right"]
    text = kernel_table.table([a_row(kernels.OURS, 0.01, right=False), failed])
    assert "WRONG" in text and "| failed | – |" in text
