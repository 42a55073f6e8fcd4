"""Models of pictures and sound, and of pictures with text."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tests.zoo.case import (
    BATCH,
    HEADS,
    INNER,
    LAYERS,
    VOCABULARY,
    WIDTH,
    Architecture,
    Case,
    Setting,
    from_transformers,
    images,
    tokens,
)
from tests.zoo.decoders import LLAMA_LIKE

VIT_LIKE: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "num_channels": 3, "hidden_size": WIDTH, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
}  # fmt: skip
PATCHES = (32 // 8) ** 2


def _labelled(inputs: dict[str, Any], setting: Setting) -> dict[str, Any]:
    return inputs | ({"labels": torch.randint(0, 2, (BATCH,))} if setting.train else {})


def _pictures(_: Any, setting: Setting) -> dict[str, Any]:
    return _labelled({"pixel_values": images()}, setting)


def _sound(_: Any, setting: Setting) -> dict[str, Any]:
    return _labelled({"input_values": torch.randn(BATCH, 1600)}, setting)


def _spectra(config: Any, setting: Setting) -> dict[str, Any]:
    return _labelled({"input_values": torch.randn(BATCH, config.max_length, config.num_mel_bins)}, setting)


def _classifier(name: str, prefix: str, **settings: Any) -> Architecture:
    model = f"{prefix}ForImageClassification"
    return from_transformers(name, "vision", f"{prefix}Config", model, _pictures, **settings)


VISION = [
    _classifier("vit", "ViT", **VIT_LIKE),
    _classifier("beit", "Beit", **VIT_LIKE, vocab_size=VOCABULARY),
    _classifier(
        "swinv2", "Swinv2", image_size=32, patch_size=2, num_channels=3, embed_dim=32, depths=[1, 2], num_heads=[2, 4],
        window_size=4, mlp_ratio=2.0,
    ),
    _classifier(
        "dinov2", "Dinov2", **{key: value for key, value in VIT_LIKE.items() if key != "intermediate_size"}, mlp_ratio=2
    ),
    from_transformers(
        "dinov3_vit", "vision", "DINOv3ViTConfig", "DINOv3ViTModel", lambda *_: {"pixel_values": images()}, **VIT_LIKE
    ),
    _classifier("siglip_cls", "Siglip", vision_config=VIT_LIKE),
    _classifier(
        "segformer", "Segformer", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[32, WIDTH],
        patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=32,
    ),
    _classifier("ijepa", "IJepa", **VIT_LIKE),
    from_transformers(
        "ast", "vision", "ASTConfig", "ASTForAudioClassification", _spectra, hidden_size=WIDTH, intermediate_size=INNER,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, patch_size=8, max_length=32, num_mel_bins=16,
        frequency_stride=8, time_stride=8,
    ),
    from_transformers(
        "wav2vec2", "vision", "Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", _sound, vocab_size=32,
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        conv_dim=[32, 32], conv_kernel=[10, 3], conv_stride=[5, 2], num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, classifier_proj_size=32, apply_spec_augment=False, layerdrop=0.0,
    ),
]  # fmt: skip


# --- pictures and text ---------------------------------------------------------------------------------------------

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "max_position_embeddings": 16, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2,
}  # fmt: skip
_PICTURE, _VIDEO, _START, _END, _VISION = range(120, 125)  # tokens that stand for something else


def _pairs(_: Any, setting: Setting) -> dict[str, Any]:
    # A contrastive loss over two pairs has hardly a gradient; over sixteen it has.
    return {"input_ids": tokens(16, batch=16), "pixel_values": images(batch=16)} | (
        {"return_loss": True} if setting.train else {}
    )


def _answered(ids: Tensor, inputs: dict[str, Any], setting: Setting) -> dict[str, Any]:
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False} | inputs
    return inputs | ({"labels": ids.clone()} if setting.train else {})


def _text_with_patches(config: Any, setting: Setting) -> dict[str, Any]:
    """One picture of 4 × 4 patches a text; 2 × 2 of them become a token."""
    vision = config.vision_config
    channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
    features = channels * vision.temporal_patch_size * vision.patch_size**2
    ids = tokens()
    ids[:, 3], ids[:, 4:8] = config.vision_start_token_id, config.image_token_id
    patches = {
        "pixel_values": torch.randn(BATCH * 16, features),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }
    return _answered(ids, patches, setting)


def _qwen_vl(name: str, prefix: str, **vision: Any) -> Architecture:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    return from_transformers(
        name, "several inputs", f"{prefix}Config", f"{prefix}ForConditionalGeneration", _text_with_patches,
        text_config={**LLAMA_LIKE, "rope_parameters": rope, "layer_types": ["full_attention"] * LAYERS},
        vision_config={
            "depth": LAYERS, "num_heads": HEADS, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "in_channels": 3, "in_chans": 3, **vision,
        },
        image_token_id=_PICTURE, video_token_id=_VIDEO, vision_start_token_id=_START, vision_end_token_id=_END,
        vision_token_id=_VISION,
    )  # fmt: skip


def _text_with_picture(setting: Setting) -> tuple[Tensor, dict[str, Any]]:
    ids = tokens()
    ids[:, 1 : 1 + PATCHES] = _PICTURE
    return ids, {"pixel_values": images()}


def _llava(setting: Setting) -> Case:
    vision = transformers.CLIPVisionConfig(**VIT_LIKE)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**LLAMA_LIKE), image_token_index=_PICTURE,
        image_token_id=_PICTURE, vision_feature_layer=-2, image_seq_length=PATCHES,
    )  # fmt: skip
    config._attn_implementation = setting.attention
    ids, inputs = _text_with_picture(setting)
    return Case(transformers.LlavaForConditionalGeneration(config), _answered(ids, inputs, setting))


def _paligemma(setting: Setting) -> Case:
    text = transformers.GemmaConfig(**{**LLAMA_LIKE, "head_dim": 16, "num_key_value_heads": 1})
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**VIT_LIKE), text_config=text, image_token_index=_PICTURE,
        image_token_id=_PICTURE, projection_dim=WIDTH, hidden_size=WIDTH,
    )  # fmt: skip
    config._attn_implementation = setting.attention
    ids, inputs = _text_with_picture(setting)
    inputs["token_type_ids"] = (ids == _PICTURE).long()
    return Case(transformers.PaliGemmaForConditionalGeneration(config), _answered(ids, inputs, setting))


SEVERAL_INPUTS = [
    from_transformers(
        "siglip", "several inputs", "SiglipConfig", "SiglipModel", _pairs,
        text_config={**_TEXT, "projection_size": WIDTH}, vision_config=VIT_LIKE,
    ),
    _qwen_vl("qwen2_vl", "Qwen2VL", embed_dim=32, hidden_size=WIDTH, mlp_ratio=2),
    _qwen_vl(
        "qwen2_5_vl", "Qwen2_5_VL", hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=WIDTH,
        window_size=16, fullatt_block_indexes=[1],
    ),
    Architecture("llava", "several inputs", _llava),
    Architecture("paligemma", "several inputs", _paligemma),
]  # fmt: skip
