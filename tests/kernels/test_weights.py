"""The multi-tensor weight kernel against the reference, and its tables."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

from te_compile.kernels import device_tables
from te_compile.kernels import weights as weights_kernel
from te_compile.kernels.device_tables import address_table, device_table
from te_compile.ops import calibration
from te_compile.ops.quantize import padded
from te_compile.ops.triton_implementations import quantize_weights
from te_compile.ops.weights import column_places, quantize_weights_reference, row_places
from te_compile.recipe import ScaleRule

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(48, 160), (130, 272), (16, 16), (256, 128)]
RAGGED = [(37, 50), (1, 1), (131, 7), (20, 260)]


@pytest.fixture
def uncalibrated() -> object:
    calibration.expect(-1)
    yield None
    calibration.settle(-1)


def drawn(shapes: list[tuple[int, int]], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Weights whose magnitudes differ from one to the next."""
    return [torch.randn(shape, device=device).mul_(10.0**-i).to(dtype) for i, shape in enumerate(shapes)]


def agrees(
    weights: list[Tensor], scales: Tensor | None, dtype: torch.dtype, rowwise: list[bool], columnwise: list[bool]
) -> None:
    """Assert equal bytes for each part that was asked for, padding included, and equal amax and multipliers."""
    got = quantize_weights(weights, scales, dtype, rowwise, columnwise, ScaleRule())
    wanted = quantize_weights_reference(weights, scales, dtype, rowwise, columnwise, ScaleRule())
    sizes = [w.numel() for w in weights], [w.shape[1] * padded(w.shape[0]) for w in weights]
    for flat, expected, (starts, _), lengths in zip(
        got[:2], wanted[:2], (row_places(weights, rowwise), column_places(weights, columnwise)), sizes, strict=True
    ):
        assert flat.shape == expected.shape and flat.dtype == expected.dtype
        for start, length in zip(starts, lengths, strict=True):
            if start is not None:
                part, expected_part = flat[start : start + length], expected[start : start + length]
                alike = part.view(torch.uint8) == expected_part.view(torch.uint8)  # one NaN is as good as another
                assert bool((alike | (part.float().isnan() & expected_part.float().isnan())).all())
    assert torch.equal(got[2], wanted[2]) and torch.equal(got[3], wanted[3])


@pytest.mark.parametrize("shapes", [SHAPES, RAGGED], ids=["aligned", "ragged"])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_all_weights_get_the_bytes_of_the_reference(
    shapes: list[tuple[int, int]], x_dtype: torch.dtype, device: str
) -> None:
    weights = drawn(shapes, x_dtype, device)
    everywhere = [True] * len(weights)
    agrees(weights, torch.rand(len(weights), device=device) * 100 + 1, E4M3, everywhere, everywhere)
    agrees(weights, None, E5M2, everywhere, everywhere)


def test_scales_of_zero_are_measured_and_others_are_kept(uncalibrated: object, device: str) -> None:
    weights = drawn(SHAPES, torch.bfloat16, device)
    scales = torch.tensor([0.0, 3.5, 0.0, 700.0], device=device)
    agrees(weights, scales, E4M3, [True] * 4, [True] * 4)


def test_only_the_layouts_asked_for_take_space(device: str) -> None:
    weights = drawn(SHAPES, torch.bfloat16, device)
    agrees(weights, None, E4M3, [True, False, True, False], [False, True, True, False])
    agrees(weights, None, E4M3, [True] * 4, [False] * 4)
    agrees(weights, None, E4M3, [False] * 4, [False] * 4)


def test_a_transposed_weight_and_a_shared_one_are_right_too(device: str) -> None:
    first, second, *_ = drawn(SHAPES, torch.bfloat16, device)
    agrees([first, second.t(), first], None, E4M3, [True] * 3, [True] * 3)


def test_one_bad_weight_leaves_the_others_alone(device: str) -> None:
    weights = drawn(SHAPES, torch.bfloat16, device)
    weights[1][77, 200] = torch.inf
    agrees(weights, torch.ones(4, device=device), E4M3, [True] * 4, [True] * 4)


def test_new_values_at_the_same_address_are_seen(device: str) -> None:
    weights = drawn(SHAPES, torch.bfloat16, device)
    agrees(weights, None, E4M3, [True] * 4, [True] * 4)
    for weight in weights:
        weight.copy_(torch.randn_like(weight))
    agrees(weights, None, E4M3, [True] * 4, [True] * 4)


def test_a_table_is_copied_to_the_device_once(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    weights = drawn(SHAPES, torch.bfloat16, device)
    agrees(weights, None, E4M3, [True] * 4, [True] * 4)

    def forbidden(*_: object) -> Tensor:
        raise AssertionError("a table that should have been found was copied again")

    monkeypatch.setattr(device_tables, "_add_table", forbidden)
    agrees(weights, None, E4M3, [True] * 4, [True] * 4)


@pytest.mark.parametrize("count", [1, weights_kernel.FEW, weights_kernel.FEW + 1])
def test_a_few_or_many_weights_get_the_bytes_of_the_reference(count: int, device: str) -> None:
    weights = drawn([(16 * (1 + at % 3), 32) for at in range(count)], torch.bfloat16, device)
    everywhere = [True] * count
    agrees(weights, torch.rand(count, device=device) * 100 + 1, E4M3, everywhere, everywhere)


def test_a_few_weights_that_lie_elsewhere_each_time_need_no_table(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """As those that FSDP gathers do: a table is copied by a thread, which waits for the GPU."""
    agrees(drawn(SHAPES, torch.bfloat16, device), None, E4M3, [True] * 4, [True] * 4)

    def forbidden(*_: object) -> Tensor:
        raise AssertionError("a table was made for a few weights")

    monkeypatch.setattr(device_tables, "_add_table", forbidden)
    keep = []
    for _ in range(3):
        keep.append(drawn(SHAPES, torch.bfloat16, device))
        agrees(keep[-1], None, E4M3, [True] * 4, [True] * 4)


def test_tables_are_told_apart_by_contents_and_old_ones_go(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(device_tables, "ENTRIES", 2)
    monkeypatch.setattr(device_tables, "_tables", type(device_tables._tables)())
    where = torch.empty(0, device=device).device
    tables = [address_table((i, 2 * i), where) for i in range(5)]
    assert [table.tolist() for table in tables] == [[i, 2 * i] for i in range(5)]
    assert len(device_tables._tables) == 2
    assert address_table((4, 8), where) is tables[4]
    assert device_table("other", lambda: torch.tensor([1]), where).tolist() == [1]


def test_a_table_that_another_thread_drops_while_it_is_found_serves_all_the_same(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    class Dropping(OrderedDict[Any, torch.Tensor]):
        def get(self, key: Any, default: Any = None) -> Any:
            return self.pop(key, default)

    monkeypatch.setattr(device_tables, "_tables", Dropping())
    where = torch.empty(0, device=device).device
    assert [address_table((3, 4), where).tolist() for _ in range(2)] == [[3, 4]] * 2


def test_tables_are_built_on_the_host_whatever_the_default_device_is(device: str) -> None:
    """A capture may not wait for what is built elsewhere."""
    with torch.device("meta"):
        weights = drawn(SHAPES, torch.bfloat16, device)
        agrees(weights, torch.ones(4, device=device), E4M3, [True] * 4, [True] * 4)
        table = address_table((11, 13), torch.empty(0, device=device).device)
    assert table.tolist() == [11, 13]
