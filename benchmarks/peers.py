"""What a user would pick instead: torchao and Transformer Engine, where they are installed.

torchao converts a model's ``nn.Linear`` and leaves the rest to torch.compile. Transformer Engine brings modules of its
own: put in the place of each linear and norm, as accelerate does, or of a whole layer, which is a rewrite by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

HAVE_TORCHAO = find_spec("torchao") is not None and torch.cuda.is_available()
HAVE_TRANSFORMER_ENGINE = find_spec("transformer_engine") is not None and torch.cuda.is_available()
TRANSFORMER_ENGINE_RECIPES = ("delayed", "current", "block")

if HAVE_TRANSFORMER_ENGINE:
    import transformer_engine.pytorch as te  # here, for it must load before cuDNN does
    from transformer_engine.common import recipe as te_recipe


def takes_fp8(name: str, linear: nn.Module) -> bool:
    """May a peer convert this linear? All but the projection to logits, like te_fp8's default, and what FP8 fits."""
    if not isinstance(linear, nn.Linear) or "lm_head" in name or "decoder" in name:
        return False
    return linear.in_features % 16 == 0 and linear.out_features % 16 == 0


def torchao_for_training(model: nn.Module, recipe: str) -> nn.Module:
    """``model`` with torchao's FP8 training linears: "tensorwise", "rowwise" or "rowwise_with_gw_hp"."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda each, name: takes_fp8(name, each))


def torchao_for_inference(model: nn.Module, granularity: str) -> nn.Module:
    """``model`` with torchao's FP8 weights and dynamic activations: "tensor" or "row"."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, PerTensor, quantize_

    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow() if granularity == "row" else PerTensor())
    quantize_(model, config, filter_fn=lambda each, name: takes_fp8(name, each))
    return model


def transformer_engine_context(recipe: str) -> Callable[[], AbstractContextManager[Any]]:
    """Transformer Engine's FP8 autocast with one of its recipes."""
    recipes = {
        "delayed": lambda: te_recipe.DelayedScaling(amax_history_len=16, amax_compute_algo="max"),
        "current": te_recipe.Float8CurrentScaling,
        "block": te_recipe.Float8BlockScaling,
    }
    chosen = recipes[recipe]()
    return lambda: te.autocast(enabled=True, recipe=chosen)


def transformer_engine_modules() -> dict[str, Any]:
    """Its LayerNorm and Linear, as ``norm`` and ``linear``."""
    return {"norm": te.LayerNorm, "linear": te.Linear}


def swap_in_transformer_engine(model: nn.Module, dtype: torch.dtype, prefix: str = "") -> nn.Module:
    """``model`` with Transformer Engine's Linear and LayerNorm in place of torch's, in place."""
    for name, child in list(model.named_children()):
        replacement: nn.Module | None = None
        if takes_fp8(prefix + name, child):
            bias = child.bias is not None
            replacement = te.Linear(child.in_features, child.out_features, bias, params_dtype=dtype, device="cuda")
        elif isinstance(child, nn.LayerNorm):
            replacement = te.LayerNorm(child.normalized_shape[0], eps=child.eps, params_dtype=dtype, device="cuda")
        if replacement is None:
            swap_in_transformer_engine(child, dtype, f"{prefix}{name}.")
            continue
        with torch.no_grad():
            for parameter in ("weight", "bias"):
                if getattr(child, parameter, None) is not None:
                    getattr(replacement, parameter).copy_(getattr(child, parameter))
        setattr(model, name, replacement)
    return model


def transformer_engine_layer(
    hidden: int, intermediate: int, heads: int, dtype: torch.dtype, dropout: float, causal: bool
) -> nn.Module:
    """Transformer Engine's own GPT layer."""
    return te.TransformerLayer(
        hidden, intermediate, heads, layernorm_epsilon=1e-5, hidden_dropout=dropout, attention_dropout=dropout,
        fuse_qkv_params=True, attn_input_format="bshd", self_attn_mask_type="causal" if causal else "no_mask",
        activation="gelu", params_dtype=dtype,
    ).cuda()  # fmt: skip


class TransformerEngineLlama(nn.Module):
    """A Llama whose decoder layers are Transformer Engine's, with the embedding and head of a Hugging Face model."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        super().__init__()
        config = model.config
        self.config = config
        self.embedding, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.norm = te.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, params_dtype=dtype, device="cuda")
        self.rope = te.attention.RotaryPositionEmbedding(config.hidden_size // config.num_attention_heads)
        self.layers = nn.ModuleList(self._layer(config, dtype) for _ in range(config.num_hidden_layers))

    @staticmethod
    def _layer(config: Any, dtype: torch.dtype) -> nn.Module:
        return te.TransformerLayer(
            config.hidden_size, config.intermediate_size, config.num_attention_heads,
            num_gqa_groups=config.num_key_value_heads, layernorm_epsilon=config.rms_norm_eps, normalization="RMSNorm",
            activation="swiglu", bias=False, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True,
            attn_input_format="bshd", self_attn_mask_type="causal", params_dtype=dtype, device="cuda",
        )  # fmt: skip

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        """Logits and, given labels, the shifted cross entropy: what Hugging Face's model returns."""
        states = self.embedding(input_ids)
        rotary = self.rope(max_seq_len=states.shape[1]).to(states.device)
        for layer in self.layers:
            states = layer(states, rotary_pos_emb=rotary)
        logits = self.head(self.norm(states))
        if labels is None:
            return SimpleNamespace(loss=None, logits=logits)
        loss = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)
