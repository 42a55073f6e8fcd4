"""Attention modules of torch.nn are opened into linears and attention, exactly; what is unusual stays closed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_compile.passes import manager
from te_compile.passes.open_attention_modules import open_attention_modules
from te_compile.passes.plan import Cause
from te_compile.passes.text import ops_text
from tests.capturing import captured
from tests.compiling import compiled, cosine, train_step
from tests.static_keys import StaticKeys

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH, HEADS = 32, 2


def assert_computes_the_same(model: nn.Module, run: Callable[..., Any], *inputs: Any) -> None:
    """The opened graph of ``run`` gives the results and gradients that ``run`` gives, and has no attention left."""
    gm, examples = captured(run, *inputs)
    assert open_attention_modules(gm.graph) == 1
    gm.graph.lint()
    gm.recompile()
    assert not gm.graph.find_nodes(op="call_function", target=F.multi_head_attention_forward)
    results = []
    for function, arguments in ((gm, examples), (run, inputs)):
        model.zero_grad(set_to_none=True)
        outputs = function(*arguments)
        outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None]
        sum((y * y.detach().cos()).sum() for y in outputs).backward()  # not symmetric: a sum of squares hides swaps
        results.append([y.detach() for y in outputs] + [p.grad.clone() for p in model.parameters()])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def _hides(*shape: int) -> Tensor:
    """A bool mask that is true (hidden) at some places and never in a whole row."""
    mask = torch.rand(shape) < 0.4
    mask[..., random.randrange(shape[-1])] = False
    return mask


BATCH, LENGTH = 3, 5
MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "bool": lambda: {"src_mask": _hides(LENGTH, LENGTH)},
    "float": lambda: {"src_mask": torch.randn(LENGTH, LENGTH)},
    "bool per head": lambda: {"src_mask": _hides(BATCH * HEADS, LENGTH, LENGTH)},
    "padding": lambda: {"src_key_padding_mask": _hides(BATCH, LENGTH)},
    "float padding": lambda: {"src_key_padding_mask": torch.randn(BATCH, LENGTH)},
    "float and padding": lambda: {
        "src_mask": torch.randn(LENGTH, LENGTH), "src_key_padding_mask": torch.randn(BATCH, LENGTH),
    },
    "per head and padding": lambda: {
        "src_mask": torch.randn(BATCH * HEADS, LENGTH, LENGTH), "src_key_padding_mask": torch.randn(BATCH, LENGTH),
    },
    "causal": lambda: {"src_mask": nn.Transformer.generate_square_subsequent_mask(LENGTH), "is_causal": True},
    "causal and padding": lambda: {
        "src_mask": nn.Transformer.generate_square_subsequent_mask(LENGTH),
        "src_key_padding_mask": torch.randn(BATCH, LENGTH),
        "is_causal": True,
    },
}  # fmt: skip


def tokens(batch_first: bool, length: int = LENGTH) -> Tensor:
    """Input for a module of either layout."""
    x = torch.randn(BATCH, length, WIDTH)
    return x if batch_first else x.transpose(0, 1).contiguous()


def encoder_layer(batch_first: bool, **options: Any) -> nn.TransformerEncoderLayer:
    """A small one, in training, without dropout; its biases are not the zeros that torch begins with."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=batch_first, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


@pytest.mark.parametrize(("norm_first", "activation"), ((False, "relu"), (True, "gelu")))
@pytest.mark.parametrize("batch_first", (True, False))
@pytest.mark.parametrize("mask", MASKS)
def test_an_opened_encoder_layer_computes_what_torch_does(
    mask: str, batch_first: bool, norm_first: bool, activation: str
) -> None:
    layer = encoder_layer(batch_first, norm_first=norm_first, activation=activation)
    given = MASKS[mask]()
    assert_computes_the_same(layer, lambda x: layer(x, **given), tokens(batch_first))


@pytest.mark.parametrize("averaged", (True, False))
@pytest.mark.parametrize("mask", MASKS)
def test_attention_weights_are_those_of_torch(mask: str, averaged: bool) -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=random.random() < 0.5)
    given = {name.replace("src_key", "key").replace("src", "attn"): value for name, value in MASKS[mask]().items()}

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return model(x, x, x, need_weights=True, average_attn_weights=averaged, **given)

    assert_computes_the_same(model, run, tokens(model.batch_first))


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("batch_first", (True, False))
def test_cross_attention_with_a_packed_weight_is_opened(batch_first: bool, bias: bool) -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=batch_first)

    def run(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return model(x, k, v, need_weights=False)[0]

    assert_computes_the_same(model, run, tokens(batch_first), tokens(batch_first, 7), tokens(batch_first, 7))


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("batch_first", (True, False))
def test_cross_attention_with_three_weights_is_opened(batch_first: bool, bias: bool) -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS, kdim=16, vdim=48, bias=bias, batch_first=batch_first)
    key, value = torch.randn(BATCH, 7, 16), torch.randn(BATCH, 7, 48)
    if not batch_first:
        key, value = key.transpose(0, 1), value.transpose(0, 1)

    def run(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return model(x, k, v, need_weights=False)[0]

    assert_computes_the_same(model, run, tokens(batch_first), key, value)


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("batch_first", (True, False))
def test_cross_attention_with_a_packed_weight_takes_its_rows(batch_first: bool, bias: bool) -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=batch_first)
    if bias:
        nn.init.normal_(model.in_proj_bias)
    other = torch.randn(BATCH, 7, WIDTH) if batch_first else torch.randn(7, BATCH, WIDTH)

    def of_one_source(x: Tensor, memory: Tensor) -> Tensor:
        return model(x, memory, memory, need_weights=False)[0]

    def of_two_sources(x: Tensor, memory: Tensor) -> Tensor:
        return model(x, memory, memory * 2.0, need_weights=False)[0]

    def with_own_values(x: Tensor, memory: Tensor) -> Tensor:
        return model(x, x, x + 1.0, need_weights=False)[0]

    for run, products in ((of_one_source, 2), (of_two_sources, 3), (with_own_values, 2)):
        gm, _ = captured(run, tokens(batch_first), other)
        open_attention_modules(gm.graph)
        assert len(gm.graph.find_nodes(op="call_function", target=F.linear)) == products + 1
        assert_computes_the_same(model, run, tokens(batch_first), other)


def test_the_projections_of_a_batch_first_module_read_what_is_before_its_transposition() -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    gm, _ = captured(lambda x: x + layer(x, x, x, need_weights=False)[0], tokens(True))
    open_attention_modules(gm.graph)
    gm.graph.eliminate_dead_code()
    packed, out = gm.graph.find_nodes(op="call_function", target=F.linear)
    assert packed.args[0].op == "placeholder"
    assert "scaled_dot_product_attention" in ops_text(gm.graph) and tuple(out.meta["example_value"].shape) == (
        BATCH, LENGTH, WIDTH,
    )  # fmt: skip


@pytest.mark.parametrize("need_weights", (True, False))
@pytest.mark.parametrize("batch_first", (True, False))
@pytest.mark.parametrize("read", (
    lambda y: y, lambda y: y.transpose(0, 1), lambda y: y.transpose(0, 1).flatten(1), lambda y: y.relu() * 2,
    lambda y: torch.zeros(1, 1, WIDTH).expand(y.shape) + y,
))  # fmt: skip
def test_results_lie_in_memory_as_those_of_torch_do(
    read: Callable[[Tensor], Tensor], batch_first: bool, need_weights: bool
) -> None:
    """Also where it is the model that transposes, before the module and behind it."""
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)

    def run(x: Tensor) -> Tensor:
        given = x if batch_first else x.transpose(0, 1)
        return read(layer(given, given, given, need_weights=need_weights)[0])

    gm, examples = captured(run, tokens(True))
    assert open_attention_modules(gm.graph) == 1
    gm.recompile()
    got, expected = gm(*examples)[0], run(tokens(True))
    assert got.stride() == expected.stride()
    fast = compiled(run)(tokens(True))
    assert fast.stride() == expected.stride()


@pytest.mark.parametrize("need_weights", (True, False))
@pytest.mark.parametrize("batch_first", (True, False))
def test_a_view_of_a_result_works_where_it_does_in_torch(batch_first: bool, need_weights: bool) -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)

    def run(x: Tensor) -> Tensor:
        given = x if batch_first else x.transpose(0, 1)
        y = layer(given, given, given, need_weights=need_weights)[0]
        return (y.transpose(0, 1) if batch_first else y).view(-1, WIDTH)

    assert_computes_the_same(layer, run, tokens(True))
    _, got = train_step(layer, compiled(run), tokens(True))
    assert got.keys() == dict(layer.named_parameters()).keys()


@pytest.mark.parametrize("unpacked", (True, False))
@pytest.mark.parametrize("mask", MASKS)
def test_weights_that_nobody_reads_keep_no_attention_from_one_call(mask: str, unpacked: bool) -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=random.random() < 0.5)
    given = {name.replace("src_key", "key").replace("src", "attn"): value for name, value in MASKS[mask]().items()}

    def run(x: Tensor) -> Tensor:
        results = layer(x, x, x, **given)
        if unpacked:
            y, _weights = results
            return y
        return results[0]

    assert_computes_the_same(layer, run, tokens(layer.batch_first))
    with manager.recording() as records:
        train_step(layer, compiled(run), tokens(layer.batch_first))
    assert [attention.status for attention in records[0].plan.attentions] == ["recognised"]


def test_dropout_is_that_of_the_call() -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.25)
    for training, expected in ((True, 0.25), (False, 0.0)):
        layer.train(training)
        gm, _ = captured(lambda x: layer(x, x, x, need_weights=False)[0], tokens(False).requires_grad_())
        assert open_attention_modules(gm.graph) == 1
        (attention,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        assert attention.kwargs["dropout_p"] == expected
    layer.train()
    gm, _ = captured(lambda x: layer(x, x, x)[0], tokens(False))
    open_attention_modules(gm.graph)
    (dropout,) = gm.graph.find_nodes(op="call_function", target=F.dropout)
    assert dropout.kwargs == {"p": 0.25}


def _attention(**options: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(WIDTH, HEADS, **options)


LAYER = _attention()


def trained(
    model: nn.Module, run: Callable[..., Any], *inputs: Tensor
) -> tuple[list[manager.Compilation], Tensor, dict[str, Tensor]]:
    """One step of ``run`` under the backend: its compilations, its result and the gradients of ``model``."""
    with manager.recording() as compilations:
        y, grads = train_step(model, compiled(run), *inputs)
    return compilations, y, grads


def test_an_attention_of_keys_that_are_made_already_stays_closed_and_says_why() -> None:
    model, x = StaticKeys(WIDTH, HEADS), tokens(False)
    gm, _ = captured(model, x)
    before = ops_text(gm.graph)
    assert open_attention_modules(gm.graph) == 0 and ops_text(gm.graph) == before
    (compilation,), _, _ = trained(model, model, x)
    assert {site.cause for site in compilation.plan.sites} == {Cause.UNSUPPORTED}
    assert all("static_k" in site.reason for site in compilation.plan.sites)


OWN_KEYS = ({"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True})


@pytest.mark.parametrize("need_weights", (True, False))
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("own", OWN_KEYS, ids=lambda own: " ".join(own))
def test_keys_of_its_own_are_behind_the_others(own: dict[str, bool], mask: str, need_weights: bool) -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=random.random() < 0.5, **own)
    given = {name.replace("src_key", "key").replace("src", "attn"): value for name, value in MASKS[mask]().items()}

    def run(x: Tensor) -> Any:
        return model(x, x, x, need_weights=need_weights, **given)

    assert_computes_the_same(model, run, tokens(model.batch_first))


ONE_SEQUENCE: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "float": lambda: {"attn_mask": torch.randn(LENGTH, LENGTH)},
    "bool per head": lambda: {"attn_mask": _hides(HEADS, LENGTH, LENGTH)},
    "padding": lambda: {"key_padding_mask": _hides(LENGTH)},
    "both": lambda: {"attn_mask": torch.randn(LENGTH, LENGTH), "key_padding_mask": torch.randn(LENGTH)},
}


@pytest.mark.parametrize("averaged", (True, False, None))
@pytest.mark.parametrize("mask", ONE_SEQUENCE)
@pytest.mark.parametrize("own", ({}, *OWN_KEYS), ids=lambda own: " ".join(own) or "plain")
def test_one_sequence_is_a_batch_of_one(own: dict[str, bool], mask: str, averaged: bool | None) -> None:
    model, given = nn.MultiheadAttention(WIDTH, HEADS, batch_first=random.random() < 0.5, **own), ONE_SEQUENCE[mask]()

    def run(x: Tensor, y: Tensor) -> Any:
        weights = {"need_weights": averaged is not None, "average_attn_weights": bool(averaged)}
        return model(x, y, y, **weights, **given)

    assert_computes_the_same(model, run, torch.randn(LENGTH + 2 if mask == "none" else LENGTH, WIDTH),
                             torch.randn(LENGTH, WIDTH))  # fmt: skip


@pytest.mark.parametrize("shape", ((BATCH, LENGTH, WIDTH), (LENGTH, WIDTH)), ids=("batch", "one sequence"))
@pytest.mark.parametrize("dynamic", (True, None))
def test_an_attention_with_keys_of_its_own_trains_in_fp8(shape: tuple[int, ...], dynamic: bool | None) -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=True, add_zero_attn=True)

    def run(x: Tensor) -> Tensor:
        return model(x, x, x, need_weights=False)[0]

    # A margin, so that the second batch fits into scales of the first, whatever is drawn.
    fast = compiled(run, dynamic=dynamic, strict=True, recipe={"name": "delayed", "margin": 1})
    for length in (0, 3):
        x = torch.randn(*shape[:-2], shape[-2] + length, WIDTH)
        (y, found), (exact, wanted) = (train_step(model, each, x) for each in (fast, run))
        assert cosine(y, exact) > 0.99
        assert all(cosine(found[name], wanted[name]) > 0.97 for name in wanted)


def test_an_attention_whose_tuple_is_taken_whole_stays_closed() -> None:
    gm, _ = captured(lambda x: LAYER(x, x, x)[0], tokens(False))
    (attention,) = gm.graph.find_nodes(op="call_function", target=F.multi_head_attention_forward)
    with gm.graph.inserting_after(attention):
        gm.graph.call_function(len, (attention,))
    assert open_attention_modules(gm.graph) == 0


def test_autocast_inside_the_graph_keeps_it_closed_and_leaves_no_trace() -> None:
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return LAYER(x, x, x)[0]

    gm, _ = captured(run, tokens(False))
    before = ops_text(gm.graph)
    assert open_attention_modules(gm.graph) == 0 and ops_text(gm.graph) == before


def test_autocast_around_the_call_is_the_dtype_of_the_opened_linears() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        gm, _ = captured(lambda x: LAYER(x, x, x, need_weights=False)[0], tokens(False))
        assert open_attention_modules(gm.graph) == 1
    linears = gm.graph.find_nodes(op="call_function", target=F.linear)
    assert [linear.meta["example_value"].dtype for linear in linears] == [torch.bfloat16] * 2


@pytest.mark.parametrize("batch_first", (True, False))
def test_an_encoder_layer_trains_in_fp8(batch_first: bool) -> None:
    layer = encoder_layer(batch_first, norm_first=True)
    x = tokens(batch_first, 16)
    (compilation,), y, grads = trained(layer, layer, x)
    assert compilation.plan.fp8_flops_fraction >= 0.9
    assert [site.name for site in compilation.plan.selected] == [
        "self_attn.in_proj_weight", "self_attn.out_proj", "linear1", "linear2",
    ]  # fmt: skip
    exact_y, exact = train_step(layer, layer, x)
    assert cosine(y, exact_y) > 0.99
    assert min(cosine(grads[name], exact[name]) for name in exact) > 0.97


def test_a_checkpointed_encoder_is_opened_inside_its_bodies() -> None:
    layer = encoder_layer(True)
    (compilation,), _, _ = trained(layer, lambda x: checkpoint(layer, x, use_reentrant=False), tokens(True))
    assert len(compilation.plan.selected) == 4


@pytest.mark.parametrize("need_weights", (True, False))
@pytest.mark.parametrize("dynamic", (True, None))
def test_a_changing_length_is_opened_too(dynamic: bool | None, need_weights: bool) -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return model(x, x, x, key_padding_mask=mask, need_weights=need_weights)[0]

    run = compiled(attend, dynamic=dynamic, strict=True)
    for length in (5, 9, 14):
        x, mask = tokens(True, length), _hides(BATCH, length)
        assert cosine(run(x, mask), attend(x, mask)) > 0.97


def test_dropout_that_is_a_number_of_the_graph_is_still_dropout() -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5, batch_first=True)
    run = compiled(lambda x: model(x, x, x, need_weights=False)[0], dynamic=True, strict=True)
    x = tokens(True)
    assert cosine(run(x), run(x)) < 0.999


def test_a_decoder_layer_runs_both_of_its_attentions_in_fp8() -> None:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
    memory, x = torch.randn(BATCH, 7, WIDTH), tokens(True, 16)
    (compilation,), y, grads = trained(layer, layer, x, memory)
    # Of the cross-attention: queries, keys with values, and the way out.
    assert sum(site.name.startswith("multihead_attn") for site in compilation.plan.sites) == 3
    # The packed projection of the self-attention and its way out, those three, the MLP.
    assert [site.status for site in compilation.plan.sites] == ["fp8"] * (2 + 3 + 2)
    exact_y, exact = train_step(layer, layer, x, memory)
    assert cosine(y, exact_y) > 0.99
    assert min(cosine(grads[name], exact[name]) for name in exact if name.endswith("weight")) > 0.97
