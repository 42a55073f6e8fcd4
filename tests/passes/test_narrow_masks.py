"""A mask of float32 is rounded where cuDNN would misread it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from te_compile.passes import manager
from te_compile.passes.find_attentions import find_attentions
from te_compile.passes.narrow_masks import narrow_masks
from te_compile.passes.plan import Plan
from te_compile.passes.regions import regions_of
from tests.capturing import captured
from tests.compiling import relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "an_order_of_kernels_that_nobody_has_changed")

LENGTH = 24


def heads(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(2, 4, LENGTH, 16, dtype=dtype, requires_grad=True)


def bias(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, LENGTH, LENGTH, dtype=dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def change(gm: GraphModule, misread: bool = True) -> int:
    regions, left = regions_of(gm)
    plan = Plan()
    find_attentions(regions, left, plan)
    count = narrow_masks(regions, plan, lambda _: misread)
    gm.graph.lint()
    gm.recompile()
    return count


def masks_dtype(gm: GraphModule) -> torch.dtype:
    """As the call reads it."""
    (call,) = gm.graph.find_nodes(op="call_function", target=torch._C._nn.scaled_dot_product_attention)
    dtype: torch.dtype = call.kwargs["attn_mask"].meta["example_value"].dtype
    return dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_becomes_one_of_16_bits(dtype: torch.dtype) -> None:
    gm, _ = captured(attend, heads(dtype), heads(dtype), heads(dtype), bias())
    assert change(gm) == 1 and masks_dtype(gm) == dtype
    inputs = [heads(dtype), heads(dtype), heads(dtype), bias()]
    assert relative_error(gm(*inputs)[0], attend(*(x.double() for x in inputs))) < 1e-2


@pytest.mark.parametrize(
    ("operands", "mask"),
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.bool)],
)
def test_others_stay(operands: torch.dtype, mask: torch.dtype) -> None:
    gm, _ = captured(attend, *(heads(operands) for _ in range(3)), bias().to(mask))
    assert change(gm) == 0 and masks_dtype(gm) == mask


def test_so_does_one_that_an_autocast_casts() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attend(q, k, v, mask)

    gm, _ = captured(run, *(heads(torch.float32) for _ in range(3)), bias())
    assert change(gm) == 0


def test_so_does_one_that_is_read_as_it_is() -> None:
    gm, _ = captured(attend, heads(), heads(), heads(), bias())
    assert change(gm, misread=False) == 0 and masks_dtype(gm) == torch.float32


def test_on_a_cpu_nothing_changes() -> None:
    with manager.recording() as records:
        torch.compile(attend, backend="te_fp8", options={"compiler": "aot_eager"})(heads(), heads(), heads(), bias())
    (record,) = records
    assert {each.name: each.count for each in record.passes}["narrow_masks"] == 0
