"""The rows of benchmarks/kernels.py call our kernels rightly: their own checks say so, on small shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from benchmarks import kernels
from benchmarks.kernels import Row


@pytest.fixture(autouse=True)
def small(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that an interpreter gets through, and no clock."""
    monkeypatch.setattr(kernels, "DEVICE", device)
    monkeypatch.setattr(kernels, "SHAPES", ((32, 64),))
    monkeypatch.setattr(kernels, "LOGITS", (16, 300))
    monkeypatch.setattr(kernels, "LAYER", ((32, 64), (64, 32)))


def right(family: Callable[[], Iterator[Row]]) -> dict[str, bool]:
    return {row.name: row.check(row.call(None, 0)) for row in family()}


@pytest.mark.parametrize(
    "family",
    [
        kernels.quantize_rows,
        kernels.norm_rows,
        kernels.pair_rows,
        kernels.loss_rows,
        kernels.weight_rows,
        kernels.update_rows,
    ],
)
def test_every_row_is_right(family: Callable[[], Iterator[Row]]) -> None:
    found = right(family)
    assert found and all(found.values()), found


@pytest.mark.parametrize("name", list(kernels.SPECS))
def test_generated_producers_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SPECS", {name: kernels.SPECS[name]})
    assert right(kernels.fused_rows) == {f"fused {name}": True}
