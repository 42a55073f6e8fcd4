"""What tests of several passes start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from te_compile.passes import attention_kernels


@pytest.fixture
def an_order_of_kernels_that_nobody_has_changed() -> Iterator[None]:
    """That of a process with a newer cuDNN."""
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(attention_kernels._CUDNN_FIRST)
    yield
    torch._C._set_sdp_priority_order(before)
