"""Where choices of algorithms are kept: the core's part is under test in tests/csrc."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_compile.kernels import cublaslt, gemm_choices, native

H200 = {"name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132}


class Core:
    """What the core was told."""

    CHOICES_FORMAT = 1
    NativeError = Unsupported = RuntimeError
    cublaslt_gemm = None

    def __init__(self) -> None:
        self.version = 130100
        self.told: list[tuple[int, str]] = []

    def cublaslt_version(self) -> int:
        return self.version

    def cublaslt_keep_choices(self, device: int, path: str) -> None:
        self.told.append((device, path))


@pytest.fixture
def devices() -> list[dict[str, Any]]:
    """Two of a kind."""
    return [dict(H200), dict(H200)]


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, devices: list[dict[str, Any]]) -> Core:
    made = Core()
    monkeypatch.setattr(native, "module", lambda: made)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**devices[index]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(gemm_choices, "cache_dir", lambda: str(tmp_path / "cache"))
    monkeypatch.setattr(gemm_choices, "_seen", set())
    monkeypatch.setattr(gemm_choices, "path_for", gemm_choices.path_for.__wrapped__)
    monkeypatch.delenv("TE_COMPILE_GEMM_CACHE", raising=False)
    return made


def test_devices_of_a_kind_share_a_file_in_inductors_cache(core: Core, tmp_path: Path) -> None:
    path = gemm_choices.path_for(0)
    assert path == gemm_choices.path_for(1)
    assert path == tmp_path / "cache" / "te_compile" / "gemm_choices_v1_NVIDIA-H200_sm90_132_cublaslt130100.txt"


@pytest.mark.parametrize("field, value", [("name", "NVIDIA H100"), ("minor", 1), ("multi_processor_count", 60)])
def test_other_devices_have_their_own(core: Core, devices: list[dict[str, Any]], field: str, value: Any) -> None:
    devices[1][field] = value
    assert gemm_choices.path_for(0) != gemm_choices.path_for(1)


def test_other_libraries_and_formats_have_their_own(core: Core) -> None:
    paths = {gemm_choices.path_for(0)}
    core.version += 1
    paths.add(gemm_choices.path_for(0))
    core.CHOICES_FORMAT += 1
    assert len(paths | {gemm_choices.path_for(0)}) == 3


def test_the_core_is_told_once_a_device(core: Core) -> None:
    for device in (0, 1, 0):
        gemm_choices.keep(device)
    path = gemm_choices.path_for(0)
    assert core.told == [(0, str(path)), (1, str(path))]
    assert path.read_text() == ""


def test_turned_off_nothing_is_read_or_written(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_COMPILE_GEMM_CACHE", "0")
    gemm_choices.keep(0)
    assert core.told == [] and not gemm_choices.path_for(0).parent.exists()
    assert "chooses for itself" in gemm_choices.described()


@pytest.mark.parametrize("candidates, deterministic, kept", [(8, False, True), (1, False, False), (8, True, False)])
def test_products_keep_their_choices_where_there_is_one(
    core: Core, monkeypatch: pytest.MonkeyPatch, candidates: int, deterministic: bool, kept: bool
) -> None:
    happened: list[object] = []
    monkeypatch.setattr(cublaslt, "_epilogues", lambda: {"none": 0})
    monkeypatch.setattr(cublaslt, "_configured_candidates", lambda: candidates)
    monkeypatch.setattr(native, "dtype_codes", lambda: {torch.bfloat16: 2, torch.float8_e4m3fn: 3})
    monkeypatch.setattr(native, "call", lambda *arguments: happened.append(arguments[-2]))
    monkeypatch.setattr(gemm_choices, "keep", lambda device: happened.append("keep"))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    a, one = torch.zeros(16, 32).to(torch.float8_e4m3fn), torch.ones(())
    cublaslt.gemm(a, a, one, one, None, torch.bfloat16, "fast")
    assert happened == (["keep", candidates] if kept else [1])


@pytest.mark.parametrize("text", ["", "2", "yes", "off"])
def test_a_bad_switch_is_named(core: Core, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TE_COMPILE_GEMM_CACHE", text)
    with pytest.raises(ValueError, match=f"TE_COMPILE_GEMM_CACHE='{text}': must be 0 or 1"):
        gemm_choices.keep(0)
    assert "must be 0 or 1" in gemm_choices.described()


def test_a_folder_that_cannot_be_made_is_no_error(core: Core, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with caplog.at_level(logging.INFO, logger="te_compile"):
        for _ in range(2):
            gemm_choices.keep(0)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "not kept" in caplog.text
    assert core.told == [(0, str(gemm_choices.path_for(0)))]


def test_people_are_told_how_many_are_kept_and_where(core: Core, devices: list[dict[str, Any]]) -> None:
    gemm_choices.keep(0)
    path = gemm_choices.path_for(0)
    assert gemm_choices.described() == f"0 in {path}"
    path.write_text("one\ntwo\n")
    devices[1]["name"] = "Other"
    assert gemm_choices.described() == f"2 in {path}; 0 in {gemm_choices.path_for(1)}"
