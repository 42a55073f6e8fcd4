"""What te_fp8 is measured beside: every variant is offered wherever its peer is installed, and none is lost unseen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import layer, models, peers
from benchmarks.models import Task


@pytest.fixture
def with_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are installed, as far as choosing goes; nothing of theirs is built."""
    monkeypatch.setattr(peers, "HAVE_TORCHAO", True)
    monkeypatch.setattr(peers, "HAVE_TRANSFORMER_ENGINE", True)


OURS = ["te_fp8", "te_fp8_current"]
SAVING = ["te_fp8_uncached", "te_fp8_save_memory", "te_fp8_current_save_memory"]
LAYER = ["eager", "compile", "compile_autotune", "torchao_tensorwise", "torchao_rowwise", "torchao_rowwise_with_gw_hp"]
LAYER += ["te_linear_bf16", "te_linear_delayed", "te_layer_bf16", "te_layer_delayed", "te_layer_current"]
LAYER += ["te_layer_block"]
SWAPPED = ["te_swap_delayed", "te_swap_current"]
BY_HAND = ["te_layers_delayed", "te_layers_current"]


def offered(model: str, work: str) -> list[str]:
    return [variant.name for variant in models.variants(Task(model, work, "sdpa", torch.bfloat16))]


@pytest.mark.usefixtures("with_peers")
def test_the_layer_stands_beside_every_form_of_both_peers() -> None:
    assert [variant.name for variant in layer.variants(layer.Work())] == [*LAYER, *OURS, *SAVING]


@pytest.mark.usefixtures("with_peers")
@pytest.mark.parametrize("model", list(models.MODELS))
def test_training_stands_beside_swapped_modules_and_llama_beside_a_rewrite_by_hand(model: str) -> None:
    rewritten = BY_HAND if model == "llama8b" else []
    expected = ["eager", "compile", "torchao_tensorwise", "torchao_rowwise", *SWAPPED, *rewritten, *OURS, *SAVING]
    assert offered(model, "train") == expected


@pytest.mark.usefixtures("with_peers")
def test_inference_stands_beside_quantised_weights_and_decoding_beside_cuda_graphs() -> None:
    prefill = ["eager", "compile", "torchao_tensor", "torchao_row", *SWAPPED, *BY_HAND, *OURS]
    assert offered("llama8b", "prefill") == prefill
    graphs = {"compile_graphs", "torchao_row_graphs", "te_fp8_graphs"}
    assert set(offered("llama8b", "decode")) == {*prefill, *graphs}


def test_without_peers_ours_still_stands_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "HAVE_TORCHAO", False)
    monkeypatch.setattr(peers, "HAVE_TRANSFORMER_ENGINE", False)
    assert offered("bert_large", "train") == ["eager", "compile", *OURS, *SAVING]


def test_only_ours_must_run_and_be_right() -> None:
    found = models.variants(Task("llama8b", "decode", "sdpa", torch.bfloat16))
    assert all(variant.ours == variant.name.startswith("te_fp8") for variant in found)


@pytest.mark.parametrize(
    ("name", "module", "taken"),
    [
        ("model.layers.0.mlp.up_proj", nn.Linear(64, 32), True),
        ("lm_head", nn.Linear(64, 32), False),
        ("cls.predictions.decoder", nn.Linear(64, 32), False),
        ("odd", nn.Linear(64, 33), False),
        ("norm", nn.LayerNorm(64), False),
    ],
)
def test_peers_convert_what_te_fp8_would(name: str, module: nn.Module, taken: bool) -> None:
    assert peers.takes_fp8(name, module) is taken
