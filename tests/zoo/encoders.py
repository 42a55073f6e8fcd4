"""Encoders of text, and encoders with decoders."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import (
    BATCH,
    HEADS,
    INNER,
    LAYERS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Architecture,
    Setting,
    from_transformers,
    tokens,
)
from tests.zoo.decoders import LLAMA_LIKE

_BERT_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "max_position_embeddings": 130, "pad_token_id": 1, "type_vocab_size": 2,
}  # fmt: skip
_DEBERTA_LIKE = {
    **_BERT_LIKE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0, "pad_token_id": 0,
}  # fmt: skip


def _filled_in(_: Any, setting: Setting) -> dict[str, Any]:
    ids = tokens()
    return {"input_ids": ids} | ({"labels": ids.clone()} if setting.train else {})


def _masked(name: str, prefix: str, settings: dict[str, Any] = _BERT_LIKE, **more: Any) -> Architecture:
    """``more`` overrides ``settings``; what it gives as None is left out."""
    merged = {key: value for key, value in {**settings, **more}.items() if value is not None}
    return from_transformers(name, "encoder", f"{prefix}Config", f"{prefix}ForMaskedLM", _filled_in, **merged)


ENCODERS = [
    _masked("bert", "Bert"),
    _masked("roberta", "Roberta"),
    _masked("roberta_prelayernorm", "RobertaPreLayerNorm"),
    _masked("xlm_roberta", "XLMRoberta"),
    _masked("camembert", "Camembert"),
    _masked("deberta", "Deberta", _DEBERTA_LIKE),
    _masked(
        "deberta_v2", "DebertaV2", _DEBERTA_LIKE, position_buckets=16, norm_rel_ebd="layer_norm", share_att_key=True
    ),
    _masked("esm", "Esm", type_vocab_size=None, position_embedding_type="rotary", mask_token_id=3),
    _masked("nomic_bert", "NomicBert"),
    _masked("eurobert", "EuroBert", LLAMA_LIKE, mask_token_id=3),
    _masked("convbert", "ConvBert", embedding_size=WIDTH),
    _masked("fnet", "FNet", num_attention_heads=None),
    _masked("squeezebert", "SqueezeBert", embedding_size=WIDTH),
    _masked(
        "funnel", "Funnel", {}, vocab_size=VOCABULARY, block_sizes=[1, 1], d_model=WIDTH, n_head=HEADS, d_head=16,
        d_inner=INNER, num_decoder_layers=1,
    ),
    from_transformers(
        "xlm", "encoder", "XLMConfig", "XLMWithLMHeadModel", _filled_in, vocab_size=VOCABULARY, emb_dim=WIDTH,
        n_layers=LAYERS, n_heads=HEADS, max_position_embeddings=128,
    ),
    from_transformers(
        "xlnet", "encoder", "XLNetConfig", "XLNetLMHeadModel", _filled_in, vocab_size=VOCABULARY, d_model=WIDTH,
        n_layer=LAYERS, n_head=HEADS, d_inner=INNER,
    ),
]  # fmt: skip


def _translated(_: Any, setting: Setting) -> dict[str, Any]:
    target = {"labels" if setting.train else "decoder_input_ids": tokens()}
    return {"input_ids": tokens(), "use_cache": False} | target


def _heard(config: Any, setting: Setting) -> dict[str, Any]:
    spectrum = torch.randn(BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": spectrum, "use_cache": False} | {
        "labels" if setting.train else "decoder_input_ids": tokens(16)
    }


_T5_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 16, "d_ff": INNER, "num_layers": LAYERS, "num_heads": HEADS,
    "decoder_start_token_id": 0,
    "initializer_factor": 0.5,  # T5 divides no scores by √d: at this width the default saturates its softmax
}  # fmt: skip
_LAYERS_OF_BART: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": INNER,
    "decoder_ffn_dim": INNER, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_BART_LIKE = {
    **_LAYERS_OF_BART, "max_position_embeddings": 128, "pad_token_id": 1, "decoder_start_token_id": 2,
}  # fmt: skip
_GEMMA_LIKE = {**LLAMA_LIKE, "head_dim": 16, "sliding_window": 16}


def _sequence_to_sequence(name: str, prefix: str, settings: dict[str, Any], **more: Any) -> Architecture:
    model = f"{prefix}ForConditionalGeneration"
    return from_transformers(name, "encoder and decoder", f"{prefix}Config", model, _translated, **settings, **more)


ENCODER_DECODERS = [
    _sequence_to_sequence("t5", "T5", _T5_LIKE),
    _sequence_to_sequence("t5_v1_1", "T5", _T5_LIKE, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    _sequence_to_sequence("mbart", "MBart", _BART_LIKE),
    from_transformers(
        "marian", "encoder and decoder", "MarianConfig", "MarianMTModel", _translated,
        **{**_BART_LIKE, "decoder_start_token_id": 1},
    ),
    _sequence_to_sequence("m2m_100", "M2M100", _BART_LIKE),
    _sequence_to_sequence("blenderbot", "Blenderbot", _BART_LIKE),
    from_transformers(
        "whisper", "encoder and decoder", "WhisperConfig", "WhisperForConditionalGeneration", _heard,
        **{**_LAYERS_OF_BART, "bos_token_id": 1}, num_mel_bins=16, max_source_positions=LENGTH,
        max_target_positions=64, pad_token_id=0, decoder_start_token_id=1,
    ),
    _sequence_to_sequence(
        "switch_transformers", "SwitchTransformers", _T5_LIKE, num_experts=4, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1, expert_capacity=64,
    ),
    _sequence_to_sequence(
        "t5gemma", "T5Gemma", {}, vocab_size=VOCABULARY, encoder=_GEMMA_LIKE,
        decoder={**_GEMMA_LIKE, "cross_attention_hidden_size": WIDTH},
    ),
]  # fmt: skip
