"""te::gemms: each of its products is te::gemm's of the same operands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.ops.gemm import gemm_reference
from te_compile.ops.gemms import GEMMS, joined, labels_in

E4M3 = torch.float8_e4m3fn
LENGTH = 48


def codes(rows: int, length: int = LENGTH) -> Tensor:
    return torch.randn(rows, length).to(E4M3)


def drawn(widths: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Weights, and a scale for each."""
    return [codes(width) for width in widths], [torch.rand(()) + 0.1 for _ in widths]


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_each_product_has_a_scale_and_a_bias_of_its_own(out_dtype: torch.dtype, seed: int) -> None:
    a, scale, widths = codes(5), torch.rand(()) + 0.1, (32, 16, 64)
    b, scales = drawn(widths)
    biases = [torch.randn(32), None, torch.randn(64, dtype=torch.bfloat16)]
    made = GEMMS(a, b, scale, scales, biases, out_dtype, "fast", "q forward | k forward | v forward")
    assert [tuple(y.shape) for y in made] == [(5, width) for width in widths]
    for y, each, of_it, bias in zip(made, b, scales, biases, strict=True):
        assert torch.equal(y, gemm_reference(a, each, scale, of_it, bias, out_dtype, "fast"))


def test_what_is_computed_is_known_without_computing_it() -> None:
    b, scales = drawn((32, 16))
    given = (codes(3), b, torch.ones(()), scales, [None, None], torch.float32, "fast", "q | k")
    torch.library.opcheck(GEMMS, given, test_utils="test_faketensor")


def test_another_contraction_is_an_error_that_names_both() -> None:
    with pytest.raises(RuntimeError, match=r"contracts 48 with 32 \(q forward \| k forward\)"):
        torch.compile(GEMMS, backend="eager", fullgraph=True)(
            codes(3), [codes(16), codes(16, 32)], torch.ones(()), [torch.ones(())] * 2, [None] * 2, torch.float32,
            "fast", "q forward | k forward",
        )  # fmt: skip


def test_labels_come_back_one_by_one() -> None:
    labels = ["layers.0.q forward", "layers.0.k forward"]
    assert labels_in(joined(labels)) == labels and labels_in(labels[0]) == labels[:1]
