"""Training steps and forwards of many architectures, of sizes between a laptop's and a cluster's, as users run them.

Hidden sizes of 768 to 2304, two to six layers, some thousands of tokens: where neither the device's time nor the host's
decides alone. Dropouts are those of each configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import DEVICE
from benchmarks.models import TINY, Model, right_padding

VOCABULARY = 16000
DTYPE = torch.bfloat16
_SMALLER = {
    **TINY, "decoder_start_token_id": 0, "num_experts": 4, "moe_intermediate_size": 64, "rotary_dim": 16,
    "embed_dim": 32, "depths": [1, 1, 1, 1], "ffn_dim": 256, "n_heads": 4, "n_layers": 2, "window_size": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A model's class, its config's and what that says, and the batch.

    length: of a row, in tokens, pixels a side, or samples; for speech that of what is said.
    """

    model: str
    config: str
    rows: int
    length: int
    parameters: dict[str, Any] = field(default_factory=dict)
    takes: str = "tokens"
    """"tokens", "images", "features" of speech, or "waves" of sound."""
    attn: str = "sdpa"
    padded: bool = False
    dynamic: bool | None = None
    checkpointed: bool = False
    autocast: bool = False

    def build(self) -> nn.Module:
        """The model on its device, the same weights each time."""
        torch.manual_seed(0)
        vocabulary = {"vocab_size": VOCABULARY} if self.takes in ("tokens", "features") else {}
        parameters, images = {**vocabulary, **self.parameters}, self.takes == "images"
        described = Model(self.model, self.config, parameters, (0, 0), (0, 0), images=images)
        smaller = {name: size for name, size in _SMALLER.items() if type(size) is type(parameters.get(name))}
        if parameters.get("num_key_value_heads", 0) == parameters.get("num_attention_heads"):
            smaller["num_key_value_heads"] = smaller["num_attention_heads"]  # some know no other number
        config = described.configured(self.attn, smaller if DEVICE.type == "cpu" else {})
        with DEVICE:
            model = described.built(config)
        if self.checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]  # no method of nn.Module's
        return model if self.autocast else model.to(DTYPE)

    def context(self) -> Callable[[], AbstractContextManager[Any]]:
        """What a forward runs in."""
        return partial(torch.autocast, DEVICE.type, DTYPE) if self.autocast else nullcontext

    def inputs(self) -> dict[str, Tensor]:
        """The keyword arguments of a call, with labels."""
        rows, length = self.rows, self.length
        if DEVICE.type == "cpu":
            rows, length = 2, {"tokens": 32, "features": 16, "images": 64, "waves": 4000}[self.takes]
        dtype = torch.float32 if self.autocast else DTYPE
        highest = TINY["vocab_size"] if DEVICE.type == "cpu" else VOCABULARY
        ids = torch.randint(0, highest, (rows, length if self.takes in ("tokens", "features") else 1), device=DEVICE)
        if self.takes == "images":
            pixels = torch.randn(rows, 3, length, length, device=DEVICE, dtype=dtype)
            return {"pixel_values": pixels, "labels": ids[:, 0] % 2}
        if self.takes == "waves":
            return {"input_values": torch.randn(rows, length, device=DEVICE, dtype=dtype), "labels": ids[:, 0] % 2}
        if self.takes == "features":
            return {"input_features": torch.randn(rows, 80, 3000, device=DEVICE, dtype=dtype), "labels": ids}
        mask = {"attention_mask": right_padding(rows, length)} if self.padded else {}
        return {"input_ids": ids, "labels": ids, **mask}


def _wide(
    hidden: int, heads: int, layers: int, feed_forward: int, keys: int | None = None, **more: Any
) -> dict[str, Any]:
    """Sizes as most configurations call them. keys: how many heads have keys, where the configuration asks."""
    shared = {} if keys is None else {"num_key_value_heads": keys}
    sizes = {"hidden_size": hidden, "intermediate_size": feed_forward, "num_attention_heads": heads}
    return {**sizes, "num_hidden_layers": layers, **shared, **more}


def _both(hidden: int, heads: int, layers: int, feed_forward: int, **more: Any) -> dict[str, Any]:
    """The same of an encoder and a decoder, as BART and Whisper call them."""
    sides = {"attention_heads": heads, "layers": layers, "ffn_dim": feed_forward}
    return {
        "d_model": hidden,
        **{f"{side}_{name}": sides[name] for side in ("encoder", "decoder") for name in sides},
        **more,
    }


def _gpt2(hidden: int, heads: int, layers: int, **more: Any) -> dict[str, Any]:
    return {"n_embd": hidden, "n_head": heads, "n_layer": layers, **more}


_T5 = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12, "num_layers": 3, "decoder_start_token_id": 0}
_IMAGE = {"image_size": 224}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_POSITIONS = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
_SOUND = {"mask_time_prob": 0.0, "layerdrop": 0.0}
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4}

WORKS = {
    "gpt2, spelled out": Work("GPT2LMHeadModel", "GPT2Config", 16, 1024, _gpt2(768, 12, 3), attn="eager"),
    "gpt2, few tokens": Work("GPT2LMHeadModel", "GPT2Config", 8, 384, _gpt2(768, 12, 4)),
    "gpt_neox": Work("GPTNeoXForCausalLM", "GPTNeoXConfig", 4, 2048, _wide(2048, 16, 2, 8192)),
    "opt": Work(
        "OPTForCausalLM", "OPTConfig", 4, 1024,
        {"hidden_size": 2048, "ffn_dim": 8192, "num_attention_heads": 32, "num_hidden_layers": 2},
    ),
    "bloom": Work(
        "BloomForCausalLM", "BloomConfig", 4, 1024, {"hidden_size": 1536, "n_head": 16, "n_layer": 3}, attn="eager"
    ),
    "gptj": Work("GPTJForCausalLM", "GPTJConfig", 4, 1024, _gpt2(1536, 16, 2, rotary_dim=64), attn="eager"),
    "mpt": Work("MptForCausalLM", "MptConfig", 4, 1024, {"d_model": 1536, "n_heads": 16, "n_layers": 3}, attn="eager"),
    "llama, lengths vary": Work("LlamaForCausalLM", "LlamaConfig", 4, 1536, _wide(2048, 32, 2, 8192, 8), dynamic=True),
    "llama, checkpointed": Work(
        "LlamaForCausalLM", "LlamaConfig", 4, 2048, _wide(2048, 32, 3, 5632, 4), checkpointed=True
    ),
    "llama, padded": Work("LlamaForCausalLM", "LlamaConfig", 8, 960, _wide(2048, 16, 3, 5632, 8), padded=True),
    "llama, autocast": Work("LlamaForCausalLM", "LlamaConfig", 4, 2048, _wide(2048, 16, 2, 5632, 16), autocast=True),
    "llama, spelled out": Work("LlamaForCausalLM", "LlamaConfig", 4, 1024, _wide(1536, 12, 3, 4096, 12), attn="eager"),
    "qwen2": Work("Qwen2ForCausalLM", "Qwen2Config", 8, 2048, _wide(896, 14, 4, 4864, 2)),
    "qwen3": Work("Qwen3ForCausalLM", "Qwen3Config", 8, 2048, _wide(1024, 16, 4, 3072, 8, head_dim=128)),
    "gemma2": Work(
        "Gemma2ForCausalLM", "Gemma2Config", 4, 1024, _wide(2304, 8, 2, 9216, 4, head_dim=256), attn="eager"
    ),
    "olmo2": Work("Olmo2ForCausalLM", "Olmo2Config", 4, 2048, _wide(2048, 16, 2, 8192, 16)),
    "phi3": Work("Phi3ForCausalLM", "Phi3Config", 4, 2048, _wide(2048, 32, 2, 8192, 32, sliding_window=1024)),
    "cohere": Work("CohereForCausalLM", "CohereConfig", 4, 1024, _wide(2048, 16, 2, 6144, 16)),
    "starcoder2": Work("Starcoder2ForCausalLM", "Starcoder2Config", 4, 1024, _wide(1536, 12, 3, 6144, 2)),
    "stablelm": Work("StableLmForCausalLM", "StableLmConfig", 4, 1024, _wide(2048, 32, 2, 5632, 32)),
    "olmoe": Work("OlmoeForCausalLM", "OlmoeConfig", 4, 1024, _wide(1024, 16, 2, 1024, 16, **_EXPERTS)),
    "qwen3_moe": Work(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", 8, 1024,
        _wide(1024, 16, 2, 3072, 4, head_dim=64, moe_intermediate_size=768, **_EXPERTS),
    ),
    "bert, padded": Work("BertForMaskedLM", "BertConfig", 64, 320, _wide(768, 12, 4, 3072), padded=True),
    "bert, spelled out, padded, no dropout": Work(
        "BertForMaskedLM", "BertConfig", 64, 320, _wide(768, 12, 4, 3072, **_NO_DROPOUT), attn="eager", padded=True
    ),
    "roberta": Work("RobertaForMaskedLM", "RobertaConfig", 32, 256, _wide(1024, 16, 3, 4096)),
    "deberta_v2": Work(
        "DebertaV2ForMaskedLM", "DebertaV2Config", 16, 256, _wide(1024, 16, 2, 4096, **_POSITIONS), attn="eager"
    ),
    "modernbert, padded": Work(
        "ModernBertForMaskedLM", "ModernBertConfig", 16, 1024,
        _wide(768, 12, 4, 1152, cls_token_id=1, sep_token_id=2), padded=True,
    ),
    "t5": Work("T5ForConditionalGeneration", "T5Config", 32, 320, _T5),
    "bart, padded": Work("BartForConditionalGeneration", "BartConfig", 32, 512, _both(768, 12, 2, 3072), padded=True),
    "vit": Work("ViTForImageClassification", "ViTConfig", 64, 224, _wide(768, 12, 6, 3072, **_IMAGE), takes="images"),
    "dinov2": Work(
        "Dinov2ForImageClassification", "Dinov2Config", 48, 224,
        {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 4, **_IMAGE}, takes="images",
    ),
    "beit": Work(
        "BeitForImageClassification", "BeitConfig", 64, 224,
        _wide(768, 12, 4, 3072, use_relative_position_bias=True, **_IMAGE), takes="images",
    ),
    "swin": Work(
        "SwinForImageClassification", "SwinConfig", 64, 224,
        {"embed_dim": 128, "depths": [2, 2, 4, 2], "num_heads": [4, 8, 16, 32], "window_size": 7, **_IMAGE},
        takes="images",
    ),
    "whisper": Work(
        "WhisperForConditionalGeneration", "WhisperConfig", 8, 448, _both(768, 12, 3, 3072, decoder_start_token_id=0),
        takes="features",
    ),
    "wav2vec2": Work(
        "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", 8, 160000, _wide(1024, 16, 3, 4096, **_SOUND),
        takes="waves",
    ),
    "wav2vec2, base": Work(
        "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", 8, 160000, _wide(768, 12, 3, 3072, **_SOUND),
        takes="waves",
    ),
    "distilbert, padded": Work(
        "DistilBertForMaskedLM", "DistilBertConfig", 64, 256,
        {"dim": 768, "n_heads": 12, "hidden_dim": 3072, "n_layers": 4}, padded=True,
    ),
    "albert": Work("AlbertForMaskedLM", "AlbertConfig", 32, 384, _wide(1024, 16, 4, 4096, embedding_size=128)),
    "electra, autocast": Work(
        "ElectraForMaskedLM", "ElectraConfig", 32, 512, _wide(768, 12, 4, 3072, embedding_size=768), autocast=True
    ),
    "esm, padded": Work(
        "EsmForMaskedLM", "EsmConfig", 16, 768,
        _wide(1280, 20, 3, 5120, position_embedding_type="rotary", pad_token_id=1, mask_token_id=32), padded=True,
    ),
    "mpnet": Work("MPNetForMaskedLM", "MPNetConfig", 32, 384, _wide(768, 12, 4, 3072), attn="eager"),
    "gemma3": Work(
        "Gemma3ForCausalLM", "Gemma3TextConfig", 4, 2048,
        _wide(1152, 4, 4, 6912, 1, head_dim=256, sliding_window=512),
    ),
    "mistral, padded": Work(
        "MistralForCausalLM", "MistralConfig", 4, 2048, _wide(2048, 16, 3, 7168, 4, sliding_window=1024), padded=True
    ),
    "falcon": Work(
        "FalconForCausalLM", "FalconConfig", 4, 1024,
        {"hidden_size": 2304, "num_attention_heads": 36, "num_hidden_layers": 3, "multi_query": True},
    ),
    "phi": Work("PhiForCausalLM", "PhiConfig", 4, 2048, _wide(2560, 32, 2, 10240, 32, partial_rotary_factor=0.4)),
    "granite, spelled out": Work(
        "GraniteForCausalLM", "GraniteConfig", 4, 1024, _wide(2048, 32, 3, 8192, 8), attn="eager"
    ),
    "mixtral": Work("MixtralForCausalLM", "MixtralConfig", 4, 1024, _wide(1024, 16, 2, 3584, 4, num_local_experts=8)),
    "deepseek_v3": Work(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", 4, 2048,
        _wide(
            2048, 16, 2, 6144, 16, q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
            v_head_dim=128, first_k_dense_replace=2,
        ),
    ),
    "glm4": Work("Glm4ForCausalLM", "Glm4Config", 4, 2048, _wide(2048, 16, 2, 6848, 2, head_dim=128)),
    "nemotron": Work("NemotronForCausalLM", "NemotronConfig", 4, 2048, _wide(2048, 16, 3, 8192, 8)),
    "gpt_oss": Work(
        "GptOssForCausalLM", "GptOssConfig", 4, 1024,
        _wide(1440, 16, 2, 1440, 4, head_dim=64, num_local_experts=16), attn="eager",
    ),
    "t5, padded": Work("T5ForConditionalGeneration", "T5Config", 32, 320, _T5, padded=True),
    "t5, spelled out": Work("T5ForConditionalGeneration", "T5Config", 32, 256, _T5, attn="eager"),
    "gpt2, checkpointed, padded": Work(
        "GPT2LMHeadModel", "GPT2Config", 8, 1024, _gpt2(1280, 20, 3), padded=True, checkpointed=True
    ),
    "bert, lengths vary": Work(
        "BertForMaskedLM", "BertConfig", 32, 448, _wide(1024, 16, 3, 4096), dynamic=True, padded=True
    ),
    "llama, narrow heads": Work("LlamaForCausalLM", "LlamaConfig", 8, 1000, _wide(1152, 18, 4, 3072, 6)),
    "deit": Work(
        "DeiTForImageClassification", "DeiTConfig", 64, 384, _wide(768, 12, 3, 3072, image_size=384), takes="images"
    ),
    "convnextv2": Work(
        "ConvNextV2ForImageClassification", "ConvNextV2Config", 64, 224,
        {"hidden_sizes": [128, 256, 512, 1024], "depths": [2, 2, 6, 2], **_IMAGE}, takes="images", attn="eager",
    ),
    "segformer": Work(
        "SegformerForImageClassification", "SegformerConfig", 32, 256,
        {"hidden_sizes": [64, 128, 320, 512], "depths": [2, 2, 4, 2], "decoder_hidden_size": 768}, takes="images",
    ),
    "hubert": Work(
        "HubertForSequenceClassification", "HubertConfig", 8, 160000, _wide(1024, 16, 3, 4096, **_SOUND), takes="waves"
    ),
    "wavlm": Work(
        "WavLMForSequenceClassification", "WavLMConfig", 4, 160000, _wide(1024, 16, 2, 4096, **_SOUND), takes="waves",
        attn="eager",
    ),
}  # fmt: skip
