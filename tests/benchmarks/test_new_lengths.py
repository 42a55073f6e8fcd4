"""The cost of new lengths: what is timed, and that a machine without a GPU says so."""

from __future__ import annotations

from functools import partial

import pytest
from torch.nn.attention import SDPBackend

from benchmarks import new_lengths
from benchmarks.measure import DEVICE


def test_both_directions_are_timed() -> None:
    row = new_lengths.medians(partial(new_lengths.held_to, SDPBackend.MATH), (16, 32))
    assert row.keys() == {"forward_ms", "backward_ms"} and all(each > 0 for each in row.values())


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there it measures")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert new_lengths.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
