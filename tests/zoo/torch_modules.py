"""Models without transformers: torch.nn's own Transformer layers, and what people write in one file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.case import BATCH, HEADS, INNER, LAYERS, LENGTH, VOCABULARY, WIDTH, Architecture, Case, Setting, tokens

# --- torch.nn ------------------------------------------------------------------------------------------------------


class _Encoder(nn.Module):
    """nn.TransformerEncoder and a head."""

    def __init__(self, norm_first: bool, activation: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, INNER, 0.1, activation, batch_first=True, norm_first=norm_first
        )
        norm = nn.LayerNorm(WIDTH) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, LAYERS, norm=norm, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class _Decoder(nn.Module):
    """nn.TransformerDecoderLayers under a causal mask, with cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerDecoderLayer(WIDTH, HEADS, INNER, 0.1, "gelu", batch_first=True) for _ in range(LAYERS)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            x = layer(x, memory, tgt_mask=mask, tgt_is_causal=True)
        return self.head(x)


class _Attention(nn.Module):
    """nn.MultiheadAttention behind a norm."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.norm, self.need_weights = nn.LayerNorm(WIDTH), need_weights
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attention(h, h, h, need_weights=self.need_weights)[0]


# --- written by hand -----------------------------------------------------------------------------------------------


def _attend(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Causal attention over [B, T, C], heads inside."""
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
    result = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    return result.transpose(1, 2).flatten(-2)


class _GptBlock(nn.Module):
    """LayerNorm before, packed q k v, GELU, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x)).split(WIDTH, dim=-1)
        x = x + self.dropout(self.out(_attend(*heads, 0.1 if self.training else 0.0)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class _Gpt(nn.Module):
    """A GPT as people write it in one file: logits tied to the embedding, (logits, loss) returned."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([_GptBlock() for _ in range(LAYERS)])
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _RmsSwiglu(nn.Module):
    """RMSNorm, packed projections, SwiGLU from one packed linear."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        x = input + self.out(_attend(*self.qkv(self.norm_1(input)).chunk(3, dim=-1)))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _of(name: str, model: Callable[[], nn.Module], inputs: Callable[[Setting], dict[str, Any]]) -> Architecture:
    return Architecture(name, "torch", lambda setting: Case(model(), inputs(setting)))


def _vectors(*names: str) -> Callable[[Setting], dict[str, Any]]:
    return lambda _: {name: torch.randn(BATCH, LENGTH, WIDTH) for name in names}


def _targets(setting: Setting) -> dict[str, Any]:
    return {"ids": tokens()} | ({"targets": tokens()} if setting.train else {})


TORCH = [
    _of("nn_encoder_post_relu", lambda: _Encoder(False, "relu"), _vectors("x")),
    _of("nn_encoder_pre_gelu", lambda: _Encoder(True, "gelu"), _vectors("x")),
    _of("nn_decoder_post", _Decoder, _vectors("x", "memory")),
    _of("nn_mha_weights", lambda: _Attention(True), _vectors("x")),
    _of("nn_mha_noweights", lambda: _Attention(False), _vectors("x")),
    _of("nano_gpt", _Gpt, _targets),
    _of("hand_rms_swiglu", lambda: nn.Sequential(_RmsSwiglu(), _RmsSwiglu()), _vectors("input")),
]
