"""The text of generated producers, and the file that it goes to."""

from __future__ import annotations

from pathlib import Path

import pytest

from te_compile.kernels import pointwise_source
from te_compile.ops.pointwise import OPERATIONS, Place
from tests.kernels.test_pointwise import CAST, EVERY_PLACE
from tests.kernels.test_pointwise_pieces import rotation


def test_every_operation_has_a_triton_form() -> None:
    assert set(pointwise_source.FORMS) == set(OPERATIONS)


def test_the_generated_file_shows_the_spec_and_is_named_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pointwise_source, "cache_dir", lambda: str(tmp_path))
    text = pointwise_source.source(EVERY_PLACE)
    assert all(line in text for line in EVERY_PLACE.lines())
    path = pointwise_source.file_of(text)
    assert path.read_text() == text and path == pointwise_source.file_of(text)
    assert pointwise_source.file_of(pointwise_source.source(CAST)) != path
    assert all(file.suffix == ".py" for file in path.parent.iterdir())


def test_a_generated_file_may_be_read_by_whoever_may_read_new_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users may share the folder."""
    monkeypatch.setattr(pointwise_source, "cache_dir", lambda: str(tmp_path))
    path, new = pointwise_source.file_of("# nothing"), tmp_path / "new"
    new.touch()
    assert path.stat().st_mode == new.stat().st_mode


def test_the_generated_file_says_where_columns_come_from() -> None:
    text = pointwise_source.source(rotation(128, 128))
    assert "x0: bfloat16[M, K of a[64:128] + a[0:64]]" in text
    assert "columns_from(x0_column + tl.where(x0_place < 64, 64, -64), k, 64)" in text
    assert all(f"[{given.place.value}" in text for given in rotation(128, 128).inputs if given.place is not Place.FULL)
