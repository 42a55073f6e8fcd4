"""The second layout of an activation's gradient is copied from the first, byte by byte, where it is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from te_compile.ops.quantize import transposed_reference
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of
from te_compile.passes.manager import Compilation
from te_compile.passes.set_names_aside import label_of
from te_compile.passes.transpose_late import _transposed
from tests.capturing import traced
from tests.compiling import compiled, joint_of, te_nodes, train_step
from tests.test_save_memory import Gated, Layer

aten = torch.ops.aten


@pytest.mark.parametrize("rows", [16, 48, 7, 30, 1])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_bytes_are_those_of_a_transposed_copy(rows: int, dtype: torch.dtype) -> None:
    """Of every code, NaNs and zeros of both signs among them."""
    q = torch.randint(0, 256, (rows, 32), dtype=torch.uint8).view(dtype)
    gm = traced(lambda q: q.view(torch.uint8), q)
    (codes,) = gm.graph.find_nodes(op="placeholder")
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        output.args = (_transposed(codes, next(iter(codes.users))),)
    gm.recompile()
    got = gm(q)
    assert got.dtype == dtype and got.is_contiguous()
    assert torch.equal(got.view(torch.uint8), transposed_reference(q).view(torch.uint8))


def record_of(model: nn.Module, *shape: int, **options: Any) -> Compilation:
    with manager.recording() as records:
        train_step(model, compiled(model, save_memory=True, **options), torch.randn(shape))
    return records[-1]


def copies(record: Compilation) -> int:
    return next(each.count for each in record.passes if each.name == "transpose_late")


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_backward_of_an_activation_writes_one_layout() -> None:
    record = record_of(Layer(), 2, 24, 64)
    assert copies(record) == 2, "and the norm's, whose pointwise part is a producer's where no kernel runs the norm"
    of_gradients = [node for node in te_nodes(record, "fused_quantize") if node.args[3] == torch.float8_e5m2]
    (activation,) = [node for node in of_gradients if "tanh" in node.args[2]]
    assert (activation.args[4], activation.args[5]) == (True, False)
    copied = [node for node in joint_of(record).nodes if node.target is aten.view.dtype]
    assert [node.args[1] for node in copied] == 2 * [torch.uint8, torch.float8_e5m2]
    readers = [label_of(reader) for node in copied[1::2] for reader in node.users]
    assert readers == ["up wgrad", "proj wgrad"]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_pair_has_both_of_its_gradients_copied() -> None:
    record = record_of(Gated(), 2, 24, 64)
    (pair,) = te_nodes(record, "fused_quantize_pair")
    flags = [value for name, value in arguments_of(pair).items() if name.endswith(("rowwise", "columnwise"))]
    assert flags == [True, False, True, False] and copies(record) == 2


@pytest.mark.usefixtures("fresh_dynamo")
def test_lengths_that_are_symbols_are_left() -> None:
    assert copies(record_of(Layer(), 2, 24, 64, dynamic=True)) == 0
