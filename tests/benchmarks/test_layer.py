"""The benchmark of one layer: what a step is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import layer
from benchmarks.measure import Rows, Runnable, Variant

SMALL = layer.Work(hidden=64, intermediate=128, heads=2, sequence=16, batch=2)


def test_gradients_of_micro_batches_add_up() -> None:
    model = layer.plain(SMALL)
    runnable, (x, dy) = Runnable(model, model), layer.data(SMALL)
    layer.train_step(runnable, x, dy)
    of_one = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    assert x.grad is not None
    of_input = x.grad.clone()
    for micro_batches in (1, 2):
        layer.train_step(runnable, x, dy, micro_batches)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, micro_batches * of_one[name])
        torch.testing.assert_close(x.grad, of_input)


def test_under_autocast_parameters_are_wider_than_products() -> None:
    work = replace(SMALL, autocast=True)
    runnable, (x, dy) = layer.eager(work), layer.data(work)
    seen: list[torch.dtype] = []
    handle = runnable.model.fc1.register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    out = layer.train_step(runnable, x, dy)
    handle.remove()
    assert seen == [torch.bfloat16] and out.dtype == torch.float32
    assert {each.grad.dtype for each in runnable.model.parameters() if each.grad is not None} == {torch.float32}
    with layer.within(SMALL)():
        assert not torch.is_autocast_enabled(layer.DEVICE.type)


def test_variants_that_take_turns_have_rows_with_both_times(capsys: pytest.CaptureFixture[str]) -> None:
    """More of them than Dynamo compiles of one function unless it is told to."""

    def build() -> Runnable:
        model = layer.plain(SMALL)
        return Runnable(torch.compile(model, backend="eager"), model)

    rows = Rows()
    layer.in_turns([Variant(f"v{number}", build) for number in range(6)], SMALL, rows, {"what": "layer"}, 2)
    shown = capsys.readouterr().out.splitlines()
    assert rows.exit_status() == 0 and len(shown) == 6
    for number, line in enumerate(shown):
        assert f'"turns": true, "name": "v{number}", "step_ms": ' in line and '"fwd_nograd_ms": ' in line
