"""What tests of several passes start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel_order import CUDNN_FIRST, order_of_kernels


@pytest.fixture
def an_order_of_kernels_that_nobody_has_changed() -> Iterator[None]:
    """That of a process with a newer cuDNN."""
    with order_of_kernels(CUDNN_FIRST):
        yield
