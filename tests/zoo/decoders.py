"""Causal language models, dense and with experts."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import HEADS, INNER, LAYERS, VOCABULARY, WIDTH, Architecture, Setting, from_transformers, tokens

LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT2_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_positions": 128, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS,
}  # fmt: skip
_OWN_HEADS = {**LLAMA_LIKE, "head_dim": 16}
_WINDOW = {"sliding_window": 16}
_MULTI_HEAD = {key: value for key, value in LLAMA_LIKE.items() if key != "num_key_value_heads"}


def text(_: Any, setting: Setting) -> dict[str, Any]:
    """Tokens, in training also as labels, and no cache."""
    ids = tokens()
    return {"input_ids": ids, "use_cache": False} | ({"labels": ids.clone()} if setting.train else {})


def _classified(_: Any, setting: Setting) -> dict[str, Any]:
    ids = tokens()
    return {"input_ids": ids, "use_cache": False} | ({"labels": ids[:, 0] % 2} if setting.train else {})


def _causal(name: str, prefix: str, settings: dict[str, Any], kind: str = "decoder", **more: Any) -> Architecture:
    return from_transformers(name, kind, f"{prefix}Config", f"{prefix}ForCausalLM", text, **{**settings, **more})


_DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}

DECODERS = [
    from_transformers("gpt2", "decoder", "GPT2Config", "GPT2LMHeadModel", text, **_GPT2_LIKE),
    _causal(
        "gpt_neo", "GPTNeo", {}, vocab_size=VOCABULARY, max_position_embeddings=128, hidden_size=WIDTH,
        num_layers=LAYERS, attention_types=[[["global", "local"], 1]], num_heads=HEADS, window_size=8,
    ),
    _causal("gpt_bigcode", "GPTBigCode", _GPT2_LIKE),
    _causal(
        "opt", "OPT", {}, vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, ffn_dim=INNER,
        max_position_embeddings=128, num_attention_heads=HEADS, word_embed_proj_dim=WIDTH, pad_token_id=1,
    ),
    _causal("bloom", "Bloom", {}, vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS),
    _causal(
        "falcon", "Falcon", {}, vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
    ),
    _causal("llama", "Llama", LLAMA_LIKE),
    _causal("llama_dynrope", "Llama", LLAMA_LIKE, rope_parameters=_DYNAMIC_ROPE),
    from_transformers(
        "llama_seqcls", "decoder", "LlamaConfig", "LlamaForSequenceClassification", _classified, **LLAMA_LIKE
    ),
    _causal("mistral", "Mistral", LLAMA_LIKE, **_WINDOW),
    _causal("ministral", "Ministral", _OWN_HEADS, **_WINDOW),
    _causal("qwen2", "Qwen2", LLAMA_LIKE),
    _causal("gemma", "Gemma", {**_OWN_HEADS, "num_key_value_heads": 1}),
    _causal("gemma2", "Gemma2", _OWN_HEADS, **_WINDOW),
    from_transformers(
        "gemma3n", "decoder", "Gemma3nTextConfig", "Gemma3nForCausalLM", text,
        **{**_OWN_HEADS, **_WINDOW, "num_hidden_layers": 3, "intermediate_size": [INNER] * 3},
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=16, laurel_rank=16, num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.95, 0.0, 0.0],
    ),
    from_transformers(
        "gemma4", "decoder", "Gemma4TextConfig", "Gemma4ForCausalLM", text, **_OWN_HEADS, **_WINDOW,
        global_head_dim=16, layer_types=["sliding_attention", "full_attention"],
        vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=16, num_kv_shared_layers=0,
    ),
    _causal("phi3", "Phi3", LLAMA_LIKE),
    _causal("stablelm", "StableLm", LLAMA_LIKE),
    _causal("cohere", "Cohere", LLAMA_LIKE),
    _causal("olmo", "Olmo", LLAMA_LIKE),
    _causal("olmo3", "Olmo3", LLAMA_LIKE, **_WINDOW),
    _causal("glm", "Glm", _OWN_HEADS),
    _causal("arcee", "Arcee", _OWN_HEADS),
    _causal("bitnet", "BitNet", LLAMA_LIKE),
    _causal("nanochat", "NanoChat", LLAMA_LIKE),
    _causal("apertus", "Apertus", LLAMA_LIKE),
    _causal("hunyuan_dense", "HunYuanDenseV1", _OWN_HEADS),
    _causal("biogpt", "BioGpt", _MULTI_HEAD),
    _causal("diffllama", "DiffLlama", LLAMA_LIKE),
    _causal("lfm2", "Lfm2", LLAMA_LIKE, layer_types=["conv", "full_attention"], block_multiple_of=16),
    _causal(
        "recurrent_gemma", "RecurrentGemma", {**LLAMA_LIKE, "num_hidden_layers": 3}, lru_width=WIDTH,
        attention_window_size=64,
    ),
    _causal(
        "mamba2", "Mamba2", {}, vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_heads=8,
        head_dim=16, state_size=16, n_groups=1, chunk_size=16, expand=2,
    ),
    from_transformers("ctrl", "decoder", "CTRLConfig", "CTRLLMHeadModel", text, **_GPT2_LIKE, dff=INNER),
    _causal("modernbert_decoder", "ModernBertDecoder", _MULTI_HEAD, cls_token_id=1, sep_token_id=2),
]  # fmt: skip


_FOUR_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_FOUR_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_FOUR_ROUTED_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
_LINEAR_THEN_FULL = {"layer_types": ["linear_attention", "full_attention"]}

EXPERTS = [
    _causal("mixtral", "Mixtral", LLAMA_LIKE, "experts", **_FOUR_LOCAL_EXPERTS),
    _causal(
        "qwen2_moe", "Qwen2Moe", LLAMA_LIKE, "experts", **_FOUR_EXPERTS, moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    _causal(
        "qwen3_next", "Qwen3Next", _OWN_HEADS, "experts", **_FOUR_EXPERTS, moe_intermediate_size=32,
        shared_expert_intermediate_size=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, **_LINEAR_THEN_FULL,
    ),
    _causal(
        "deepseek_v2", "DeepseekV2", {**LLAMA_LIKE, "num_key_value_heads": 4}, "experts", **_FOUR_ROUTED_EXPERTS,
        kv_lora_rank=32, q_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, n_shared_experts=1,
        moe_intermediate_size=32, n_group=1, topk_group=1,
    ),
    _causal("gpt_oss", "GptOss", _OWN_HEADS, "experts", **_FOUR_LOCAL_EXPERTS, **_WINDOW),
    _causal("granitemoe", "GraniteMoe", LLAMA_LIKE, "experts", **_FOUR_LOCAL_EXPERTS),
    _causal("phimoe", "Phimoe", LLAMA_LIKE, "experts", **_FOUR_LOCAL_EXPERTS),
    _causal("glm4_moe", "Glm4Moe", _OWN_HEADS, "experts", **_FOUR_ROUTED_EXPERTS, moe_intermediate_size=32),
    _causal(
        "ernie4_5_moe", "Ernie4_5_Moe", LLAMA_LIKE, "experts", moe_num_experts=4, moe_k=2, moe_intermediate_size=32,
        moe_layer_start_index=1,
    ),
    _causal("minimax", "MiniMax", _OWN_HEADS, "experts", num_local_experts=4, block_size=16, **_LINEAR_THEN_FULL),
]  # fmt: skip
