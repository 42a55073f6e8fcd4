"""What every test of this folder starts from."""

from __future__ import annotations

import pytest

from te_compile.kernels import buffers


@pytest.fixture(autouse=True)
def _no_cuda_graphs_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has compiled for CUDA graphs lends no memory and replays no calls any more, nor would the tests
    that come after the one that did."""
    monkeypatch.setitem(buffers._lending, "stopped", False)
    monkeypatch.setitem(buffers._keeping, "stopped", False)
