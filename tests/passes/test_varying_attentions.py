"""Attention of varying size, or left to flash, becomes te::window_attention with no window; anything else stays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from te_compile import backend
from te_compile.inspect.attentions import AttentionRow
from te_compile.ops.window_attention import WINDOW_ATTENTION
from te_compile.options import Options
from te_compile.passes import attention_kernels, manager
from te_compile.passes import varying_attentions as module
from te_compile.passes.find_attentions import find_attentions
from te_compile.passes.plan import Plan
from te_compile.passes.recognise_attention import recognise_attention
from te_compile.passes.regions import regions_of
from te_compile.passes.varying_attentions import is_run_by_the_core, varying_attentions
from tests.capturing import captured
from tests.compiling import compiled, relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LENGTH, WIDTH = 24, 16
OLD_CUDNN = attention_kernels._UNTOUCHED_ORDER


@pytest.fixture(autouse=True)
def a_cudnn_that_pytorch_may_hold_too_old(
    monkeypatch: pytest.MonkeyPatch, an_order_of_kernels_that_nobody_has_changed: None
) -> None:
    monkeypatch.setattr(attention_kernels, "cudnn_version", lambda: (9, 14, 0))
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)


def packed(length: int = LENGTH, dynamic: bool = True, dim: int = 1) -> Tensor:
    """What one projection writes, [B, S, 3 · 4 · D]; ``dim`` is the dynamic one."""
    x = torch.randn(2, length, 3 * 4 * WIDTH)
    if dynamic:
        torch._dynamo.mark_dynamic(x, dim)
    return x


def heads(x: Tensor, shared: int = 4) -> list[Tensor]:
    """q, k and v as views of it, k and v with so many heads: [B, H, S, D]."""
    q, k, v = (each.transpose(1, 2) for each in x.unflatten(2, (3, 4, WIDTH)).unbind(2))
    return [q, k[:, :shared], v[:, :shared]]


def attend(x: Tensor, shared: int = 4, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(*heads(x, shared), **options)


def passed(run: Callable[..., Any], *inputs: Tensor, **options: Any) -> tuple[int, GraphModule, Plan]:
    """``cost_model`` is off unless asked for: the tensors are tiny."""
    gm, _ = captured(run, *inputs)
    recognise_attention(gm.graph)
    regions, left = regions_of(gm)
    plan = Plan()
    find_attentions(regions, left, plan)
    chosen = Options.resolve({"cost_model": False, **options})
    count = varying_attentions(regions, plan, chosen, lambda q, k, v: True)
    gm.graph.lint()
    gm.recompile()
    return count, gm, plan


def stays(run: Callable[..., Any], *inputs: Tensor, **options: Any) -> bool:
    count, gm, _ = passed(run, *inputs, **options)
    return count == 0 and not any(node.target is WINDOW_ATTENTION for node in gm.graph.nodes)


# ---------------------------------------------------------------------------------------------------------------- fires


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shared", [4, 2])
def test_attention_of_a_length_that_varies_goes_to_the_core(causal: bool, shared: int) -> None:
    run = partial(attend, shared=shared, is_causal=causal, scale=0.3, enable_gqa=shared < 4)
    count, gm, plan = passed(run, packed())
    (call,) = (node for node in gm.graph.nodes if node.target is WINDOW_ATTENTION)
    assert count == 1 and call.args[3:] == (-1, 0 if causal else -1, 0.3)
    (attention,) = plan.attentions
    assert attention.kernel == "core" and attention.node is call
    row = AttentionRow("attn", "sdpa", mask=attention.mask, kernel=attention.kernel)
    assert "on te_compile's kernels, which need no plan for each size" in row.detail


def test_attention_of_a_batch_that_varies_goes_to_the_core() -> None:
    count, gm, plan = passed(partial(attend, is_causal=True), packed(dim=0))
    assert count == 1 and [each.kernel for each in plan.attentions] == ["core"]
    assert any(node.target is WINDOW_ATTENTION for node in gm.graph.nodes)


def test_what_would_be_flash_goes_there_whatever_its_length() -> None:
    x = packed(dynamic=False)
    assert stays(attend, x)
    torch._C._set_sdp_priority_order(OLD_CUDNN)
    assert passed(attend, x)[0] == 1


# ---------------------------------------------------------------------------------------------------------------- stays


def test_sizes_that_are_known_stay() -> None:
    assert stays(attend, packed(dynamic=False))


@pytest.mark.parametrize("options", [{"dropout_p": 0.1}, {"scale": -0.3}], ids=str)
def test_other_calls_stay(options: dict[str, float]) -> None:
    assert stays(partial(attend, **options), packed())


def test_what_has_a_mask_stays() -> None:
    def masked(x: Tensor) -> Tensor:
        q, k, _ = heads(x)
        return attend(x, attn_mask=(q @ k.mT) > 0)

    assert stays(masked, packed())


def test_other_queries_than_keys_stay() -> None:
    """A step of decoding, or attention across."""

    def last_of(count: int, x: Tensor) -> Tensor:
        q, k, v = heads(x)
        return F.scaled_dot_product_attention(q[:, :, -count:], k, v)

    def across(x: Tensor, y: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(heads(x)[0], *heads(y)[1:])

    assert stays(partial(last_of, 1), packed()) and stays(across, packed(), packed(length=8))


def test_a_result_that_is_written_to_stays() -> None:

    def writing(x: Tensor) -> Tensor:
        return attend(x).add_(1)

    assert stays(writing, packed().requires_grad_())


def test_who_has_chosen_kernels_keeps_them() -> None:
    def choosing(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attend(x)

    assert stays(choosing, packed())
    torch._C._set_sdp_priority_order([2, 1, 0, 3, 4])
    assert stays(attend, packed())


def test_a_step_that_waits_for_its_host_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for waits in (True, False):
        monkeypatch.setattr(module, "waits_for_host", lambda *_, waits=waits: waits)
        assert stays(attend, packed()) is waits


def test_nobody_but_the_core_is_asked() -> None:
    """PyTorch's flash takes any length as well, and nothing is gained by its name."""
    q = torch.empty(1, LENGTH, 2, 128, dtype=torch.bfloat16)
    assert not is_run_by_the_core(q, q, q)


# ------------------------------------------------------------------------------------------------------------- numerics


class Block(nn.Module):
    """Causal attention with grouped heads between linears."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 128), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, WIDTH)).transpose(1, 2).split([4, 2, 2], 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "sizes", [[(2, 24), (2, 17), (2, 40), (2, 5)], [(2, 24), (3, 24), (7, 24)]], ids=["lengths", "batches"]
)
def test_one_graph_trains_at_every_size(sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "varying_attentions", partial(varying_attentions, runs=lambda q, k, v: True))
    model = Block()
    fast = compiled(model, dynamic=True, exclude=["*"], cost_model=False)
    with manager.recording() as records:
        for size in sizes:
            x = torch.randn(*size, 64)
            got, wanted = fast(x), model(x)
            dy = torch.randn_like(got)
            pairs = zip(*(torch.autograd.grad(y, list(model.parameters()), dy) for y in (got, wanted)), strict=True)
            assert relative_error(got, wanted) < 1e-5 and all(relative_error(one, other) < 1e-4 for one, other in pairs)
    assert [each.kernel for record in records for each in record.plan.attentions] == ["core"]
