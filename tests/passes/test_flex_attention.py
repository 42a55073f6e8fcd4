"""``flex_attention`` between linears: these run in FP8, it runs as it is, and the report tells of it.

On a CPU PyTorch refuses its gradients before the compiler sees them, though the operator has a backward; where a test
trains, that refusal is taken away, and the joint graph is run operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from te_compile.backend import te_fp8
from te_compile.passes import manager
from te_compile.passes.manager import Compilation
from te_compile.passes.plan import Attention
from tests.compiling import compiled, cosine, joint_of, train_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HEADS, LENGTH, WIDTH = 2, 16, 32


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Layer(nn.Module):
    """Attention between two linears; its scores are capped and get a bias of each key, and its mask is causal."""

    def __init__(self, attention: Callable[..., Tensor] | None = None, recomputed: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.randn(LENGTH))
        self.mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
        self.attention = attention or self.flex
        self.recomputed = recomputed

    def flex(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def capped(score: Tensor, b: Tensor, h: Tensor, q_at: Tensor, k_at: Tensor) -> Tensor:
            return 2 * torch.tanh(score / 2) + self.bias[k_at]

        return flex_attention(q, k, v, score_mod=capped, block_mask=self.mask)

    def _layer(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(self.attention(q, k, v).transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._layer, x, use_reentrant=False) if self.recomputed else self._layer(x)


def textbook(layer: Layer, x: Tensor) -> Tensor:
    """The layer in high precision, from the formula."""
    q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in layer.qkv(x).chunk(3, -1))
    scores = 2 * torch.tanh(q @ k.mT / (WIDTH // HEADS) ** 0.5 / 2) + layer.bias
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return layer.out((weights @ v).transpose(1, 2).flatten(-2))


def ran(layer: Layer, x: Tensor, **options: Any) -> tuple[Tensor, Compilation]:
    with manager.recording() as records, torch.no_grad():
        y = compiled(layer, **options)(x)
    (record,) = records
    return y, record


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, LENGTH, WIDTH)


@pytest.mark.parametrize("recomputed", [False, True])
def test_it_stays_between_linears_in_fp8_and_is_told(recomputed: bool, x: Tensor) -> None:
    layer = Layer(recomputed=recomputed)
    y, record = ran(layer, x)
    assert [(site.name, site.status) for site in record.plan.sites] == [("qkv", "fp8"), ("out", "fp8")]
    (attention,) = record.plan.attentions
    assert (attention.status, attention.mask, attention.heads) == ("stays", "", "")
    assert "flex_attention kernel" in attention.reason
    assert cosine(y, textbook(layer, x)) > 0.99


def test_without_linears_in_fp8_it_computes_what_it_did(x: Tensor) -> None:
    layer = Layer()
    y, _ = ran(layer, x, exclude="*")
    torch.testing.assert_close(y, textbook(layer, x))


@pytest.mark.parametrize("recomputed", [False, True])
def test_its_gradients_go_on_into_linears_in_fp8(recomputed: bool, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch.nn.attention.flex_attention, "_validate_device"):
        pytest.skip("this PyTorch refuses gradients on a CPU in another place")
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *operands: None)
    layer = Layer(recomputed=recomputed)
    wanted, expected = train_step(layer, lambda x: textbook(layer, x), x)
    with manager.recording() as records:
        y, got = train_step(layer, compiled(layer), x)
    (record,) = records
    names = [str(node.target) for node in joint_of(record).nodes]
    assert {"flex_attention", "flex_attention_backward"} <= set(names)
    assert [site.status for site in record.plan.sites] == ["fp8", "fp8"]
    assert cosine(y, wanted) > 0.99 and all(cosine(got[name], expected[name]) > 0.98 for name in expected)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.12", reason="on a CPU PyTorch 2.11 wants q, k and v in memory of their own")
def test_inductor_compiles_it(x: Tensor) -> None:
    layer = Layer()
    y, _ = ran(layer, x, compiler="inductor")
    assert cosine(y, textbook(layer, x)) > 0.99


def test_what_is_done_to_its_scores_and_its_mask_is_left_as_it_is(x: Tensor) -> None:
    compared: list[tuple[list[str], list[str]]] = []

    def bodies(gm: GraphModule) -> list[str]:
        return [str(body.graph) for _, body in gm.named_children() if isinstance(body, GraphModule)]

    def backend(gm: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        before = bodies(gm)
        run = te_fp8(gm, examples, options={"compiler": "aot_eager"})
        compared.append((before, bodies(gm)))
        return run

    with torch.no_grad():
        torch.compile(Layer(), backend=backend)(x)
    ((before, after),) = compared
    assert before == after and len(before) == 2 and "tanh" in before[0]


def attentions_of(layer: Layer, x: Tensor, **options: Any) -> list[Attention]:
    return ran(layer, x, **options)[1].plan.attentions


def test_a_recipe_with_fp8_attention_leaves_it(x: Tensor) -> None:
    (attention,) = attentions_of(Layer(), x, recipe="current fp8_dpa=True")
    assert (attention.status, attention.precision) == ("stays", "")


def test_another_attention_is_not_told_so(x: Tensor) -> None:
    (attention,) = attentions_of(Layer(sdpa), x)
    assert attention.status == "sdpa" and not attention.reason
