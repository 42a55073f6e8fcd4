"""A vector that is added to a linear's result becomes its bias; anything else that is added stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BartConfig, BartForConditionalGeneration

from te_compile.passes import manager
from te_compile.passes.captured_nodes import argument, value_of
from te_compile.passes.join_biases import join_biases
from te_compile.passes.text import ops_text
from tests.capturing import captured, rewritten
from tests.compiling import compiled, loss_backwards, relative_error, train_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ROWS, FEATURES, RESULTS = 6, 16, 24
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs(*of_bias: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, a weight and a bias."""
    sizes = ((2, ROWS, FEATURES), (RESULTS, FEATURES), of_bias or (RESULTS,))
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


def added(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w) + b


def in_place(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w)
    y += b
    return y


FOUND: dict[str, tuple[Run, tuple[int, ...]]] = {
    "a vector": (added, (RESULTS,)),
    "a row": (added, (1, RESULTS)),
    "a row of three dimensions": (added, (1, 1, RESULTS)),
    "on the left": (lambda x, w, b: b + F.linear(x, w), (1, RESULTS)),
    "by function": (lambda x, w, b: torch.add(F.linear(x, w), b), (RESULTS,)),
    "by method": (lambda x, w, b: F.linear(x, w, None).add(b), (RESULTS,)),
    "in place": (in_place, (RESULTS,)),
    "a bias that is computed": (lambda x, w, b: F.linear(x, w) + b.cos(), (RESULTS,)),
    "two of them": (lambda x, w, b: F.linear((F.linear(x, w) + b).sin(), w.mT) + x[0, 0].detach(), (RESULTS,)),
}


@pytest.mark.parametrize("case", FOUND)
def test_the_result_and_gradients_are_the_same(case: str) -> None:
    run, of_bias = FOUND[case]
    count, graph = rewritten(join_biases, run, *inputs(*of_bias))
    linears = list(graph.find_nodes(op="call_function", target=F.linear))
    assert count == len(linears) == (2 if case == "two of them" else 1)
    assert all(value_of(argument(node, 2, "bias")).dim() == 1 for node in linears)
    assert "add" not in ops_text(graph)


LEFT: dict[str, Run] = {
    "it has one": lambda x, w, b: F.linear(x, w, b) + b,
    "more than a vector": lambda x, w, b: F.linear(x, w) + b.expand(ROWS, -1),
    "one number": lambda x, w, b: F.linear(x, w) + b.sum(),
    "a scalar": lambda x, w, b: F.linear(x, w) + 1.0 + b.sum(),
    "with a factor": lambda x, w, b: torch.add(F.linear(x, w), b, alpha=2),
    "another reader": lambda x, w, b: (y := F.linear(x, w)) + b - y.sin(),
    "of another dtype": lambda x, w, b: F.linear(x, w) + b.double(),
    "through a view": lambda x, w, b: F.linear(x, w).flatten(0, 1) + b,
    "two vectors": lambda x, w, b: F.linear(x[0, 0], w) + b[None],
}


@pytest.mark.parametrize("case", LEFT)
def test_others_are_left_alone(case: str) -> None:
    gm, _ = captured(LEFT[case], *inputs())
    before = ops_text(gm.graph)
    assert join_biases(gm.graph) == 0 and ops_text(gm.graph) == before


def test_operands_that_change_in_between() -> None:
    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = F.linear(x, w)
        with torch.no_grad():
            w.zero_()
        return y + b

    def written(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        x = x.detach().clone()
        y = F.linear(x, w)
        x.zero_()
        return y + b

    for function in (run, written):
        assert join_biases(captured(function, *(each.detach() for each in inputs()))[0].graph) == 0


def test_gradients_that_are_switched_off_for_one_of_both() -> None:
    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            y = F.linear(x, w)
        return y + b

    assert join_biases(captured(run, *inputs())[0].graph) == 0


def test_an_autocast_adds_in_the_dtype_of_the_bias() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert join_biases(captured(added, *inputs())[0].graph) == 0
        assert join_biases(captured(added, *inputs(dtype=torch.bfloat16))[0].graph) == 1


def test_functions_that_are_transformed_stay() -> None:
    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.vmap(added, (0, None, None))(x, w, b)

    assert join_biases(captured(run, *inputs())[0].graph) == 0


class Apart(nn.Module):
    """Linears whose biases stand beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)
        self.of_up, self.of_down = nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(1, 1, 32))

    def block(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x) + self.of_up)) + self.of_down

    def forward(self, x: Tensor) -> Tensor:
        y: Any = checkpoint(self.block, self.block(x), use_reentrant=False)
        return y


def test_a_model_trains_as_one_that_has_its_biases() -> None:
    apart, x = Apart(), torch.randn(2, 16, 32)
    compiled_model = compiled(apart, strict=True)
    y, got = train_step(apart, compiled_model, x)
    wanted_y, wanted = train_step(apart, apart, x)
    assert relative_error(y, wanted_y) < 0.1
    assert all(relative_error(got[name], wanted[name]) < 0.2 for name in wanted)


@pytest.mark.usefixtures("loss_kernels")
def test_the_loss_of_a_head_with_its_bias_apart_is_one_operator() -> None:
    config = BartConfig(
        vocab_size=1040, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32, dropout=0.0,
    )  # fmt: skip
    model, ids = BartForConditionalGeneration(config), torch.randint(3, 1040, (2, 16))
    model.final_logits_bias.normal_()
    with manager.recording() as records:
        loss = compiled(model)(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, model(input_ids=ids, labels=ids).loss, rtol=2e-2, atol=0)
    loss.backward()
    assert any(loss_backwards(record, defers) for record in records for defers in (True, False))
