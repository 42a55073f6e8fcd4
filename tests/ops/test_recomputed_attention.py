"""Attention's operators for checkpointed regions: PyTorch's own results, of operands however they are laid out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from te_compile.ops import recomputed_attention
from te_compile.ops.recomputed_attention import RECOMPUTED

ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default


def operands(length: int = 24) -> list[Tensor]:
    return [torch.randn(2, 3, length, 16) for _ in range(3)]


def test_the_one_without_dropout_is_pytorchs() -> None:
    given = operands()
    for got, expected in zip(RECOMPUTED[ON_CPU][0](*given, 0.0, True), ON_CPU(*given, 0.0, True), strict=True):
        assert torch.equal(got, expected)
    torch.library.opcheck(RECOMPUTED[ON_CPU][0], (*given, 0.0, True), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("kernel", RECOMPUTED, ids=lambda kernel: kernel.name())
def test_arguments_and_results_are_pytorchs(kernel: Any) -> None:
    for operator in RECOMPUTED[kernel]:
        assert str(operator._schema).split("(", 1)[1] == str(kernel._schema).split("(", 1)[1]


@pytest.mark.parametrize("expanded", [False, True], ids=["", "expanded"])
@pytest.mark.parametrize("length", [24, 37, 8, 1])
def test_operands_are_laid_out_as_kernels_read_them(length: int, expanded: bool) -> None:
    """Features side by side, and rows of a bias at multiples of eight elements; the numbers are the same."""
    seen: list[Any] = []
    call = recomputed_attention._with_sound_operands(lambda *arguments, **named: seen.extend(arguments))
    q, k, v = operands(length)
    bias = torch.randn(2, 1, 1, length).expand(2, 3, length, length) if expanded else torch.randn(2, 3, length, length)
    for each in (bias, bias.mT):
        seen.clear()
        call(q, k.mT.contiguous().mT, v, each, True)
        assert all(torch.equal(one, other) for one, other in zip(seen, (q, k, v, each), strict=False))
        assert [operand.stride(-1) for operand in seen[:4]] == [1] * 4
        assert all(stride % 8 == 0 for stride in seen[3].stride()[:-1]) and seen[4] is True


def test_sound_operands_are_not_copied() -> None:
    seen: list[Any] = []
    call = recomputed_attention._with_sound_operands(lambda *arguments, **named: seen.extend(arguments))
    packed = torch.randn(2, 24, 3, 3, 16)
    given = *(packed[:, :, index].transpose(1, 2) for index in range(3)), torch.randn(2, 1, 1, 24).expand(2, 3, 24, 24)
    call(*given, True)
    assert all(one is other for one, other in zip(seen, given, strict=False))
