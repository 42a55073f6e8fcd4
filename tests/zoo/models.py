"""Small models of nineteen architectures with random weights, no downloads: what the acceptance tests train.

Every width is a multiple of 16, so that FP8 really runs; dropout is off, so that two runs can be compared. Each builder
returns a :class:`Case`; ``train`` adds what makes the model return a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, INNER, LAYERS, HEADS = 128, 64, 128, 2, 4
BATCH, LENGTH = 2, 24


@dataclass
class Case:
    """A model and one call of it."""

    model: nn.Module
    inputs: dict[str, Tensor]


BUILDERS: dict[str, Callable[[bool], Case]] = {}


def builder(function: Callable[[bool], Case]) -> Callable[[bool], Case]:
    """Enter ``function`` in BUILDERS under its own name."""
    BUILDERS[function.__name__] = function
    return function


def loss_of(output: Any) -> Tensor:
    """The model's own loss if it gives one, else the mean square of its first result."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    if isinstance(output, tuple) and isinstance(output[-1], Tensor) and output[-1].dim() == 0:
        return output[-1]
    first = output if isinstance(output, Tensor) else output[0]
    return first.float().square().mean()


def tokens(length: int = LENGTH, batch: int = BATCH) -> Tensor:
    """Random text without the special tokens at the vocabulary's ends."""
    return torch.randint(3, VOCABULARY - 1, (batch, length))


def images(batch: int = BATCH) -> Tensor:
    """Random pictures."""
    return torch.randn(batch, 3, 32, 32)


# --- decoders ------------------------------------------------------------------------------------------------------


def _causal(name: str, train: bool, length: int = LENGTH, **settings: Any) -> Case:
    """A causal language model of transformers by the prefix of its classes."""
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    ids = tokens(length)
    return Case(model, {"input_ids": ids, "use_cache": False} | ({"labels": ids} if train else {}))


_LLAMA_LIKE = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@builder
def llama(train: bool) -> Case:
    return _causal("Llama", train, **_LLAMA_LIKE)


@builder
def mistral(train: bool) -> Case:
    return _causal("Mistral", train, **_LLAMA_LIKE, sliding_window=16)


@builder
def qwen2(train: bool) -> Case:
    return _causal("Qwen2", train, **_LLAMA_LIKE)


@builder
def phi3(train: bool) -> Case:
    return _causal("Phi3", train, **_LLAMA_LIKE)


@builder
def gemma2(train: bool) -> Case:
    return _causal("Gemma2", train, **_LLAMA_LIKE, head_dim=16, sliding_window=16, attn_implementation="eager")


@builder
def opt(train: bool) -> Case:
    return _causal(
        "OPT", train, hidden_size=WIDTH, ffn_dim=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=64, word_embed_proj_dim=WIDTH, dropout=0.0, pad_token_id=1,
    )  # fmt: skip


@builder
def gpt2(train: bool) -> Case:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    ids = tokens()
    return Case(transformers.GPT2LMHeadModel(config), {"input_ids": ids} | ({"labels": ids} if train else {}))


# --- mixtures of experts -------------------------------------------------------------------------------------------

_EXPERTS, _CHOSEN = 4, 2
_MANY_TOKENS = 64  # of a row: a token that FP8 sends to another expert must not be much of either's gradient


def _mixture(name: str, train: bool, **settings: Any) -> Case:
    return _causal(name, train, length=_MANY_TOKENS, **_LLAMA_LIKE | settings)


@builder
def mixtral(train: bool) -> Case:
    return _mixture("Mixtral", train, num_local_experts=_EXPERTS, num_experts_per_tok=_CHOSEN)


@builder
def qwen2_moe(train: bool) -> Case:
    return _mixture(
        "Qwen2Moe", train, num_experts=_EXPERTS, num_experts_per_tok=_CHOSEN, moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    )  # fmt: skip


@builder
def deepseek_v2(train: bool) -> Case:
    return _mixture(
        "DeepseekV2", train, num_key_value_heads=HEADS, kv_lora_rank=32, q_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16, n_routed_experts=_EXPERTS, n_shared_experts=1, moe_intermediate_size=32,
        first_k_dense_replace=1, num_experts_per_tok=_CHOSEN, n_group=1, topk_group=1,
    )  # fmt: skip


@builder
def gpt_oss(train: bool) -> Case:
    return _mixture(
        "GptOss", train, head_dim=16, num_local_experts=_EXPERTS, num_experts_per_tok=_CHOSEN, sliding_window=16,
        attn_implementation="eager",
    )  # fmt: skip


# --- encoders, and encoders with decoders --------------------------------------------------------------------------

_BERT_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 1,
}


def _masked(name: str, train: bool) -> Case:
    config = getattr(transformers, f"{name}Config")(**_BERT_LIKE)
    ids = tokens()
    model = getattr(transformers, f"{name}ForMaskedLM")(config)
    return Case(model, {"input_ids": ids} | ({"labels": ids} if train else {}))


@builder
def bert(train: bool) -> Case:
    return _masked("Bert", train)


@builder
def roberta(train: bool) -> Case:
    return _masked("Roberta", train)


@builder
def t5(train: bool) -> Case:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=INNER, num_layers=LAYERS, num_heads=HEADS, dropout_rate=0.0,
        decoder_start_token_id=0,
        initializer_factor=0.5,  # T5 divides no scores by √d: at this width the default saturates its softmax
    )  # fmt: skip
    target = {"labels" if train else "decoder_input_ids": tokens(16)}
    return Case(transformers.T5ForConditionalGeneration(config), {"input_ids": tokens(), "use_cache": False} | target)


@builder
def whisper(train: bool) -> Case:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=16, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=INNER, decoder_ffn_dim=INNER,
        max_source_positions=32, max_target_positions=32, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    target = {"labels" if train else "decoder_input_ids": tokens(16)}
    inputs = {"input_features": torch.randn(BATCH, 16, 64), "use_cache": False}
    return Case(transformers.WhisperForConditionalGeneration(config), inputs | target)


# --- vision --------------------------------------------------------------------------------------------------------

_VIT_LIKE = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}


@builder
def vit(train: bool) -> Case:
    config = transformers.ViTConfig(
        **_VIT_LIKE, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    labels = {"labels": torch.randint(0, 10, (BATCH,))} if train else {}
    return Case(transformers.ViTForImageClassification(config), {"pixel_values": images()} | labels)


@builder
def siglip(train: bool) -> Case:
    text = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "max_position_embeddings": 16, "projection_size": WIDTH,
        "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    config = transformers.SiglipConfig(text_config=text, vision_config=_VIT_LIKE)
    # A contrastive loss over two pairs has hardly a gradient; over sixteen it has.
    inputs = {"input_ids": tokens(16, batch=16), "pixel_values": images(batch=16)}
    return Case(transformers.SiglipModel(config), inputs | ({"return_loss": True} if train else {}))


# --- written by hand -----------------------------------------------------------------------------------------------


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over [B, T, C], heads inside."""
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class _GptBlock(nn.Module):
    """LayerNorm before, packed q k v, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(_attend(*self.qkv(self.norm_1(x)).split(WIDTH, dim=-1)))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


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


@builder
def nano_gpt(train: bool) -> Case:
    return Case(_Gpt(), {"ids": tokens()} | ({"targets": tokens()} if train else {}))


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


@builder
def hand_rms_swiglu(train: bool) -> Case:
    return Case(nn.Sequential(_RmsSwiglu(), _RmsSwiglu()), {"input": torch.randn(BATCH, LENGTH, WIDTH)})
