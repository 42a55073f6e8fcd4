"""Attention in a window: the references are SDPA under the mask, heads may be shared, and gradients are autograd's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.registry import Target
from te_compile.ops.window_attention import (
    FLASH,
    WINDOW_ATTENTION,
    WINDOW_ATTENTION_BACKWARD,
    WINDOW_ATTENTION_FORWARD,
    visible_within,
    window_attention_backward_reference,
    window_attention_reference,
)
from tests.compiling import relative_error

LENGTH, WIDTH, SCALE = 23, 8, 0.3
WINDOWS = [(0, 0), (4, 0), (3, 5), (0, 2), (100, 3), (7, 100)]


def drawn(heads: int = 4, keys: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k and v [B, S, H, D], as views of [B, H, S, D]."""
    return [torch.randn(2, count, LENGTH, WIDTH, dtype=dtype).transpose(1, 2) for count in (heads, keys, keys)]


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, left: int, right: int) -> Tensor:
    mask = visible_within(LENGTH, left, right, q.device)
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=SCALE, enable_gqa=True).transpose(1, 2)


def test_a_query_sees_so_many_keys_before_and_behind_its_place() -> None:
    shown = visible_within(4, 1, 2, torch.device("cpu")).int().tolist()
    assert shown == [[1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize("keys", [4, 2, 1])
@pytest.mark.parametrize("window", WINDOWS)
def test_the_references_are_sdpa_under_the_mask(window: tuple[int, int], keys: int) -> None:
    operands = drawn(keys=keys)
    leaves = [x.detach().requires_grad_() for x in operands]
    wanted = by_sdpa(*leaves, *window)
    grad = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, leaves, grad)
    out, logsumexp = window_attention_reference(*operands, *window, SCALE)
    assert out.is_contiguous() and logsumexp.shape == (2, 4, LENGTH) and logsumexp.dtype == torch.float32
    assert relative_error(out, wanted) < 1e-6
    got = window_attention_backward_reference(grad, *operands, out, logsumexp, *window, SCALE)
    for one, operand, expected in zip(got, operands, gradients, strict=True):
        assert one.shape == operand.shape and one.dtype == operand.dtype and one.is_contiguous()
        assert (one - expected).abs().max() < 2e-5 * grad.abs().max()


def test_the_composite_has_these_gradients_and_lies_in_rows() -> None:
    leaves = [x.float().transpose(1, 2).detach().requires_grad_() for x in drawn(keys=2)]
    out = WINDOW_ATTENTION(*leaves, 5, 1, SCALE)
    assert out.transpose(1, 2).is_contiguous()
    wanted = by_sdpa(*(x.transpose(1, 2) for x in leaves), 5, 1).transpose(1, 2)
    grad = torch.randn_like(wanted)
    got, expected = (torch.autograd.grad(y, leaves, grad) for y in (out, wanted))
    assert relative_error(out, wanted) < 1e-5
    assert all(relative_error(one, other) < 1e-5 for one, other in zip(got, expected, strict=True))


def test_what_wants_no_gradient_gets_none() -> None:
    q, k, v = (x.transpose(1, 2) for x in drawn(dtype=torch.float32))
    k.requires_grad_()
    WINDOW_ATTENTION(q, k, v, 3, 0, SCALE).sum().backward()
    assert k.grad is not None and q.grad is None and v.grad is None


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8)])
def test_empty_ones_run(shape: tuple[int, ...]) -> None:
    q = torch.randn(shape).bfloat16()
    out, logsumexp = window_attention_reference(q, q, q, 2, 0, 1.0)
    assert out.shape == shape and logsumexp.shape == (shape[0], shape[2], shape[1])
    gradients = window_attention_backward_reference(q, q, q, q, out, logsumexp, 2, 0, 1.0)
    assert [each.shape for each in gradients] == [shape] * 3


def test_the_operators_are_what_pytorch_asks_of_operators() -> None:
    q, k, v = drawn(keys=2, dtype=torch.float32)
    given = (q, k, v, 3, 1, SCALE)
    torch.library.opcheck(WINDOW_ATTENTION_FORWARD, given)
    out, logsumexp = WINDOW_ATTENTION_FORWARD(*given)
    torch.library.opcheck(WINDOW_ATTENTION_BACKWARD, (torch.randn_like(out), q, k, v, out, logsumexp, 3, 1, SCALE))


HOPPER, TURING, CPU = Target("cuda", (9, 0)), Target("cuda", (7, 5)), Target("cpu")


@pytest.mark.parametrize(
    ("target", "operand", "reason"),
    [
        (CPU, {}, "CUDA"),
        (TURING, {}, "8.0"),
        (HOPPER, {"dtype": torch.float32}, "16 bits"),
        (HOPPER, {"width": 12}, "multiple of 8"),
        (HOPPER, {"width": 264}, "up to 256"),
        (HOPPER, {"value_width": 32}, "several widths"),
    ],
)
def test_what_flash_does_not_take_goes_to_the_reference(
    target: Target, operand: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    width, dtype = operand.get("width", 64), operand.get("dtype", torch.bfloat16)
    q = torch.empty(1, 4, 2, width, dtype=dtype)
    arguments = {"q": q, "k": q, "v": torch.empty(1, 4, 2, operand.get("value_width", width), dtype=dtype)}
    for operator in ("window_attention_forward", "window_attention_backward"):
        chosen, skipped = registry.choose(operator, target, arguments)
        assert chosen == registry.REFERENCE and reason in str(skipped)
    assert (
        registry.choose(
            "window_attention_forward", HOPPER, {name: q.new_empty(1, 4, 2, 256).bfloat16() for name in "qkv"}
        )[0]
        == FLASH
    )
