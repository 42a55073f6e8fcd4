"""Convolutions over patches that stay in high precision become products of matrices all the same.

    y[b, n, i, j] = Σ w[n, c, p, q] · x[b, c, iP + p, jQ + q]    =    patches(x)[b, i, j, :] · w[n, :]

Vision transformers cut an image of three channels into patches by a convolution whose stride is its kernel. For so few
channels cuDNN takes a kernel that uses no tensor cores: on an H100 the embedding of DINOv2-large (64 images of 518
pixels, patches of 14, bf16) takes 5.2 ms by ``implicit_convolve_sgemm``. As a product it is 87616×588 times 588×1024,
whose FLOPs take a fraction of a millisecond, and it needs one copy of the images besides.

FP8 spells such a convolution out as it is. Here are those of which the cost model says that FP8 would not pay: they are
a matter of speed alone, and so is this. What the user excluded, and what any other rule keeps, stays as the model wrote
it. So does float32, which convolutions round to TF32 by another setting than products do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from te_compile.passes.captured_nodes import value_of
from te_compile.passes.linear_convolutions import is_of_patches
from te_compile.passes.plan import Cause, Plan, Site
from te_compile.passes.spell_out import spell_out

_TOO_SMALL = "too small to gain: "  # how the cost model's reasons begin, for one linear and for the whole step
_NOTE = " (now a product)"


def is_on_a_gpu(x: Tensor) -> bool:
    """Would cuDNN run a convolution of ``x``?"""
    return x.device.type == "cuda"


def patches_as_products(plan: Plan, gains: Callable[[Tensor], bool] = is_on_a_gpu) -> int:
    """Write each convolution over patches that the cost model keeps in 16 bits as a product; returns how many.

    The plan's linears must have been selected. gains: is the product the faster one for such an input?
    """

    def chosen(site: Site) -> bool:
        return _is_kept_for_speed(site) and is_of_patches(site) and _runs_in_16_bits(site) and gains(value_of(site.x))

    for site in filter(chosen, plan.sites):
        site.reason = _noted(site.reason)
    return spell_out(plan, chosen)


def _is_kept_for_speed(site: Site) -> bool:
    return site.cause is Cause.RULE and site.reason.startswith(_TOO_SMALL)


def _runs_in_16_bits(site: Site) -> bool:
    """Does the convolution? Under autocast its operands may be wider than its result."""
    return value_of(site.node).dtype in (torch.bfloat16, torch.float16)


def _noted(reason: str) -> str:
    """``reason`` with the note where it ends to say what the matter is, before its advice."""
    matter, semicolon, advice = reason.rpartition("; ")
    return f"{matter}{_NOTE}{semicolon}{advice}"
