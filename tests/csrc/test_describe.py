"""A checkout on PYTHONPATH has the package's metadata, so that torch.compile finds the backend there."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="reading pyproject.toml needs Python 3.11")


def _described(folder: Path) -> list[Distribution]:
    subprocess.run([sys.executable, ROOT / "csrc" / "describe.py", folder], check=True)
    return list(MetadataPathFinder.find_distributions(DistributionFinder.Context(path=[str(folder)])))


def test_backend_is_found_in_a_folder_on_the_path(tmp_path: Path) -> None:
    (found,) = _described(tmp_path)
    assert found.metadata["Name"] == "te-compile"
    (backend,) = found.entry_points.select(group="torch_dynamo_backends")
    assert backend.name == "te_fp8"
    assert callable(backend.load())


def test_describing_again_replaces(tmp_path: Path) -> None:
    _described(tmp_path)
    (found,) = _described(tmp_path)
    assert [entry.name for entry in found.entry_points] == ["te_fp8"]
