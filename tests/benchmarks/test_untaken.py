"""The benchmark of what was not taken says what it needs; on a GPU its products are what they are said to be."""

from __future__ import annotations

import pytest
import torch

from benchmarks import untaken
from te_compile.kernels import native

HAS_CUBLASLT = torch.cuda.is_available() and not native.missing(cuda=True)


@pytest.mark.skipif(HAS_CUBLASLT, reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert untaken.main([]) == 2
    assert "cuBLASLt is needed" in capsys.readouterr().err


@pytest.mark.skipif(not HAS_CUBLASLT, reason="needs cuBLASLt")
def test_each_variant_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untaken, "TURNS", 2)
    monkeypatch.setattr(untaken, "TOKENS", 256)
    for part, variants in [*untaken.shared((64, 32)), *untaken.epilogues(256, 128, 64)]:
        times = untaken.microseconds(variants)
        assert set(times) == set(variants) and min(times.values()) > 0, part
