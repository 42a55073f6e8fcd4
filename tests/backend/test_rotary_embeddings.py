"""Models with rotary embeddings: whose gradients are rotated back as they are quantised, with the numbers of before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from te_compile.inspect.fusions import operations_text
from te_compile.ops.pointwise import Spec
from te_compile.passes import index_space, manager
from te_compile.passes.arguments import arguments_of
from tests.compiling import compiled, gradients, relative_error, te_nodes

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 64,
}


def model_of(name: str) -> nn.Module:
    if name == "gptj":
        config = transformers.GPTJConfig(vocab_size=64, n_embd=128, n_layer=1, n_head=2, rotary_dim=64, n_positions=32)
        return transformers.GPTJForCausalLM(config)
    if name.startswith("llama"):
        shared = 2 if name == "llama" else 4
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=shared))
    if name == "phi":
        sizes = {**SIZES, "num_attention_heads": 2, "partial_rotary_factor": 0.5}
        return transformers.PhiForCausalLM(transformers.PhiConfig(**sizes))
    sizes = {**SIZES, "num_attention_heads": 2, "rotary_pct": 0.5}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes))


def trained(model: nn.Module, tokens: Tensor, **options: Any) -> tuple[Tensor, dict[str, Tensor], list[str]]:
    """The loss and gradients of the second of two steps, whose scales are known; and the specs that move columns."""
    torch._dynamo.reset()
    with manager.recording() as compilations:
        fast = compiled(model, **options)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            loss = fast(tokens, labels=tokens, use_cache=False).loss
            loss.backward()
    specs = [
        arguments_of(node)["spec"] for compilation in compilations for node in te_nodes(compilation, "fused_quantize")
    ]
    return loss.detach(), gradients(model), [spec for spec in specs if " of a[" in spec]


def compared(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[str], float]:
    """The specs that rotate, and how far loss and gradients are from those of a pipeline whose producers do not."""
    model = model_of(name).to(dtype)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    tokens = torch.randint(0, 64, (2, 24))
    loss, found, specs = trained(model, tokens, **options)
    again = model_of(name).to(dtype)
    again.load_state_dict(weights)
    with monkeypatch.context() as patch:
        patch.setattr(index_space, "seat_in", lambda *arguments: None)
        expected_loss, expected, none = trained(again, tokens, **options)
    assert none == [] and found.keys() == expected.keys()
    pairs = [(loss, expected_loss), *((found[key], expected[key]) for key in found)]
    return specs, max(relative_error(a, b) for a, b in pairs if b.any())


@pytest.mark.parametrize(("name", "producers"), [("llama", 2), ("phi", 2), ("neox", 1)])
def test_gradients_of_rotated_heads_are_quantised_as_they_are_rotated_back(
    name: str, producers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, error = compared(name, torch.float32, monkeypatch)
    assert len(specs) == producers and error == 0
    half = 32 if name == "llama" else 16
    assert all(f"a[{half}:{2 * half}] + a[0:{half}]" in spec for spec in specs)


def test_explain_calls_a_rotation_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    specs, _ = compared("llama of equal heads", torch.float32, monkeypatch, recipe="delayed fp8_dpa=True")
    texts = [
        operations_text(Spec.parse(spec), which) for spec, which in zip(specs, ("x", "x", "dy", "dy"), strict=True)
    ]
    assert texts == ["rotation", "rotation", "rotation backward", "rotation backward"]


def test_in_16_bits_nothing_is_rounded_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager nodes round each result to bf16; a producer, as Inductor, the last one alone."""
    specs, error = compared("llama", torch.bfloat16, monkeypatch)
    assert len(specs) == 2 and all(spec.count("= bfloat16(") == 1 for spec in specs)
    assert error < 0.1


@pytest.mark.parametrize("save_memory", [False, True])
def test_attention_in_fp8_rotates_as_it_quantises(save_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"recipe": "delayed fp8_dpa=True", "save_memory": save_memory}
    specs, error = compared("llama of equal heads", torch.float32, monkeypatch, **options)
    assert len(specs) == 4 and error == 0  # q and k, and their gradients


def test_neighbours_that_are_rotated_stay_inductors(monkeypatch: pytest.MonkeyPatch) -> None:
    specs, error = compared("gptj", torch.float32, monkeypatch)
    assert specs == [] and error == 0
