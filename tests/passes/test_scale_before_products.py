"""A power of two that logits are scaled by goes to what their product reads, and no bit changes; other factors stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM, PreTrainedModel

from te_compile.passes import manager
from te_compile.passes.scale_before_products import scale_before_products
from te_compile.passes.text import ops_text
from tests.capturing import captured
from tests.compiling import compiled, loss_backwards

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ROWS, FEATURES, CLASSES = 6, 16, 48
Run = Callable[[Tensor, Tensor], Any]


def inputs(dtype: torch.dtype = torch.bfloat16, classes: int = CLASSES) -> list[Tensor]:
    """x and a weight."""
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in ((2, ROWS, FEATURES), (classes, FEATURES))]


def by_method(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).div(2.0)


FOUND: dict[str, Run] = {
    "multiplied": lambda x, w: F.linear(x, w) * 0.0625,
    "divided": lambda x, w: F.linear(x, w) / 8,
    "enlarged": lambda x, w: 4 * F.linear(x, w),
    "by function": lambda x, w: torch.mul(F.linear(x, w), 0.25),
    "by method": by_method,
    "with one reader behind": lambda x, w: (F.linear(x, w) / 16).float().log_softmax(-1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", FOUND)
def test_no_bit_changes(case: str, dtype: torch.dtype) -> None:
    given = inputs(dtype)
    gm, examples = captured(FOUND[case], *given)
    assert scale_before_products(gm.graph) == 1
    gm.graph.lint()
    gm.recompile()
    linear = next(node for node in gm.graph.nodes if node.target is F.linear)
    assert linear.args[0].meta["example_value"].shape == (2, ROWS, FEATURES)
    results = []
    for y in (gm(*examples)[0], FOUND[case](*given)):
        grad = torch.arange(y.numel()).view(y.shape).remainder(7).to(y.dtype)
        results.append([y, *torch.autograd.grad(y, given, grad)])
    assert all(torch.equal(got, wanted) for got, wanted in zip(*results, strict=True))


LEFT: dict[str, Run] = {
    "no power of two": lambda x, w: F.linear(x, w) / 6,
    "negative": lambda x, w: F.linear(x, w) * -0.5,
    "zero": lambda x, w: F.linear(x, w) * 0,
    "by far": lambda x, w: F.linear(x, w) * 2.0**-40,
    "a tensor": lambda x, w: F.linear(x, w) * x.sum(),
    "the other way round": lambda x, w: 2 / F.linear(x, w),
    "another reader": lambda x, w: (y := F.linear(x, w)) / 2 + y,
    "with a bias": lambda x, w: F.linear(x, w, w[:, 0]) / 2,
    "rounded": lambda x, w: torch.div(F.linear(x, w), 2, rounding_mode="floor"),
    "in place": lambda x, w: F.linear(x, w).mul_(2),
    "no product": lambda x, w: x.sin() * 2 + w.sum(),
}


@pytest.mark.parametrize("case", LEFT)
def test_others_are_left_alone(case: str) -> None:
    gm, _ = captured(LEFT[case], *inputs())
    before = ops_text(gm.graph)
    assert scale_before_products(gm.graph) == 0 and ops_text(gm.graph) == before


@pytest.mark.parametrize(("dtype", "classes"), [(torch.float16, CLASSES), (torch.bfloat16, FEATURES)])
def test_where_it_is_not_exact_or_gains_nothing(dtype: torch.dtype, classes: int) -> None:
    assert scale_before_products(captured(FOUND["divided"], *inputs(dtype, classes))[0].graph) == 0


def test_an_input_that_changes_in_between() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        x = x.detach().clone()
        y = F.linear(x, w)
        x.zero_()
        return y * 0.5

    assert scale_before_products(captured(run, *inputs())[0].graph) == 0


def test_functions_that_are_transformed_stay() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        return torch.vmap(FOUND["divided"], (0, None))(x, w)

    assert scale_before_products(captured(run, *(each.detach() for each in inputs()))[0].graph) == 0


_SIZES = {
    "vocab_size": 1040, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "cohere": lambda: CohereForCausalLM(CohereConfig(**_SIZES, logit_scale=0.0625, pad_token_id=0)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**_SIZES, logits_scaling=8.0)),
}


@pytest.mark.usefixtures("loss_kernels")
@pytest.mark.parametrize("name", MODELS)
def test_a_loss_of_scaled_logits_is_one_operator(name: str) -> None:
    model, ids = MODELS[name]().to(torch.bfloat16), torch.randint(1, 1040, (2, 16))
    with manager.recording() as records:
        result = compiled(model)(input_ids=ids, labels=ids)
    expected = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(result.loss, expected.loss, rtol=2e-2, atol=0)
    assert result.logits.shape == expected.logits.shape and result.logits.dtype == expected.logits.dtype
    result.loss.backward()
    assert any(loss_backwards(record, defers) for record in records for defers in (True, False))
