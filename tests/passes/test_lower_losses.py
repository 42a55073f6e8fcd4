"""Losses of language models become te::cross_entropy, with the same number and the same gradients; others stay."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from te_compile.ops.cross_entropy import CROSS_ENTROPY
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of
from te_compile.passes.drop_noop_casts import drop_noop_casts
from te_compile.passes.lower_losses import lower_losses
from te_compile.passes.text import ops_text
from tests.capturing import captured
from tests.compiling import compiled, gradients, loss_backwards, te_nodes

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CLASSES = 1030
BF16, FP32 = torch.bfloat16, torch.float32


def lowered(function: Callable[..., Any], *inputs: Any) -> tuple[int, str]:
    """What the pass counts on the graph of ``function``, and the text after it."""
    module, _ = captured(function, *inputs)
    drop_noop_casts(module.graph)
    count = lower_losses(module.graph)
    module.graph.lint()
    for node in module.graph.find_nodes(op="call_function", target=CROSS_ENTROPY):
        assert isinstance(node.meta["example_value"], Tensor)
    return count, ops_text(module.graph)


def inputs(dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    """Logits [B, S, V] and labels [B, S]."""
    return torch.randn(2, 3, CLASSES).to(dtype), torch.randint(0, CLASSES, (2, 3))


def plain(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), **options)


@pytest.mark.usefixtures("loss_kernels")
def test_the_graph_after() -> None:
    def function(logits: Tensor, labels: Tensor) -> Any:
        wide = logits.float()
        return F.cross_entropy(wide.view(-1, CLASSES), labels.view(-1), ignore_index=5, reduction="sum") / 7

    count, text = lowered(function, *inputs())
    assert count == 1
    assert text == textwrap.dedent("""\
        view_1 = .view(l_labels_, -1)
        reshape = .reshape(l_logits_, -1, 1030)
        cross_entropy_1 = te.cross_entropy(reshape, view_1, 5, 'sum', float32)
        truediv = truediv(cross_entropy_1, 7)
        return (truediv,)""")


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "as it is": plain,
    "a sum": lambda x, t: plain(x, t, reduction="sum"),
    "each loss": lambda x, t: plain(x, t, reduction="none"),
    "the module": lambda x, t: nn.CrossEntropyLoss()(x.view(-1, CLASSES), t.view(-1)),
    "cast": lambda x, t: plain(x.float(), t),
    "cast by dtype": lambda x, t: plain(x.to(torch.float32), t),
    "views, then the cast": lambda x, t: F.cross_entropy(x.flatten(0, 1).float(), t.flatten()),
    "views on both sides": lambda x, t: F.cross_entropy(x.flatten(0, 1).float().contiguous(), t.reshape(-1)),
    "logits that are returned": lambda x, t: (plain(x.float(), t), x),
    "logits returned in float32": lambda x, t: (lambda wide: (plain(wide, t), wide))(x.float()),
    "twice": lambda x, t: plain(x.float(), t) + plain(x, t, reduction="sum"),
}


@pytest.mark.usefixtures("loss_kernels")
@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_every_spelling_has_its_number_and_its_gradient(name: str, dtype: torch.dtype) -> None:
    logits, labels = inputs(dtype)
    labels[0, 1] = -100
    assert lowered(SPELLINGS[name], logits, labels)[0] == (2 if name == "twice" else 1)
    torch._dynamo.reset()
    results = []
    for run, given in ((SPELLINGS[name], logits.float()), (compiled(SPELLINGS[name]), logits)):
        leaf = given.clone().requires_grad_()
        result = run(leaf, labels)
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward(torch.full_like(loss, 0.5))
        results.append((loss.detach(), leaf.grad))
    for got, want in zip(results[1], results[0], strict=True):
        assert got is not None and want is not None
        torch.testing.assert_close(got.float(), want, rtol=1e-2 if dtype == BF16 else 1e-5, atol=1e-5)


@pytest.mark.usefixtures("loss_kernels")
def test_a_cast_is_looked_through_and_the_numbers_are_those_of_float32() -> None:
    logits, labels = inputs()
    _, text = lowered(SPELLINGS["views on both sides"], logits, labels)
    assert ".float(" not in text and "te.cross_entropy(flatten" in text
    torch._dynamo.reset()
    results = []
    for run in (SPELLINGS["cast"], compiled(SPELLINGS["cast"])):
        leaf = logits.clone().requires_grad_()
        loss = run(leaf, labels)
        loss.backward()
        results.append((loss, leaf.grad))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-6, atol=1e-6)
    # Sums in fp32 in another order may round to the neighbour in bf16, and to no other number.
    got, want = results[1][1], results[0][1]
    apart = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    assert bool(((apart <= 1) | ((got.double() - want.double()).abs() <= 1e-8)).all())


@pytest.mark.usefixtures("loss_kernels")
def test_the_gradient_of_logits_that_are_returned_in_float32_is_added_as_it_is() -> None:
    head, labels = nn.Linear(16, CLASSES).to(BF16), torch.randint(0, CLASSES, (2, 3))

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        wide = head(x).float()
        return plain(wide, labels), wide

    x = torch.randn(2, 3, 16).to(BF16).requires_grad_()
    results = []
    with manager.recording() as records:
        for run in (function, compiled(function, exclude=["*"])):
            loss, wide = run(x)
            (gradient,) = torch.autograd.grad(loss + wide.square().mean(), [x])
            results.append(gradient.float())
    (backward,) = loss_backwards(records[0], defers=False)
    assert arguments_of(backward)["addend"].meta["val"].dtype == FP32
    torch.testing.assert_close(results[1], results[0], rtol=5e-2, atol=2e-3)


@pytest.mark.usefixtures("loss_kernels")
def test_autocast_keeps_the_dtype_of_its_loss() -> None:
    x, w, labels = torch.randn(6, 16), torch.randn(CLASSES, 16), torch.randint(0, CLASSES, (6,))

    def function(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w), t)

    def within(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return function(x, w, t)

    with torch.autocast("cpu", BF16):
        eager = function(x, w, labels)
        assert lowered(function, x, w, labels)[1].count("te.cross_entropy(linear, l_t_, -100, 'mean', float32)") == 1
        torch._dynamo.reset()
        outside = compiled(function)(x, w, labels)
    torch._dynamo.reset()
    inside = compiled(within)(x, w, labels)
    for got in (outside, inside):
        assert got.dtype == eager.dtype == FP32
        torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-5)


def smoothed(x: Tensor, t: Tensor) -> Tensor:
    return plain(x, t, label_smoothing=0.1)


def written_between(x: Tensor, t: Tensor) -> Tensor:
    x = x * 2
    wide = x.view(-1, CLASSES)
    loss = F.cross_entropy(wide, t.view(-1))
    x.zero_()
    return loss + x.sum()


LEFT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "class weights": lambda x, t: plain(x, t, weight=torch.ones(CLASSES, dtype=x.dtype)),
    "label smoothing": smoothed,
    "probabilities": lambda x, t: F.cross_entropy(x.view(-1, CLASSES), x.view(-1, CLASSES).softmax(-1)),
    "few classes": lambda x, t: F.cross_entropy(x.flatten()[: 6 * 1023].view(6, 1023), t.flatten() % 1023),
    "classes in the middle": lambda x, t: F.cross_entropy(x.transpose(1, 2), t),
    "no rows": lambda x, t: F.cross_entropy(x[0, 0], t[0, 0]),
    "an old option": lambda x, t: plain(x, t, size_average=False),
    "double": lambda x, t: plain(x.double(), t),
    "written to afterwards": written_between,
    "written to before": lambda x, t: plain((x @ torch.eye(CLASSES, dtype=x.dtype)).div_(3).float(), t),
    "shifted": lambda x, t: F.cross_entropy(x[:, :-1].float().reshape(-1, CLASSES), t[:, 1:].flatten()),
    "capped": lambda x, t: plain((x / 30).tanh().mul(30).float(), t),
    "scaled": lambda x, t: plain(x.float() / 2, t),
    "read by another loss": lambda x, t: plain(x.float(), t) + x.float().logsumexp(-1).square().mean(),
    "read by a metric": lambda x, t: (plain(x.float(), t), x.argmax(-1)),
}


@pytest.mark.usefixtures("loss_kernels")
@pytest.mark.parametrize("name", LEFT)
@pytest.mark.filterwarnings("ignore:size_average")
def test_what_stays(name: str) -> None:
    count, text = lowered(LEFT[name], *inputs())
    assert count == 0 and "te.cross_entropy" not in text


def test_without_a_kernel_a_loss_stays_the_models_own() -> None:
    logits, labels = inputs()
    assert lowered(plain, logits, labels)[0] == 0
    with manager.recording() as records:
        compiled(plain)(logits.requires_grad_(), labels).backward()
    assert not te_nodes(records[0], "cross_entropy_forward")


@pytest.mark.usefixtures("loss_kernels")
def test_where_something_is_written_or_switched_between_a_cast_and_the_loss_both_stay() -> None:
    def written(x: Tensor, t: Tensor) -> Tensor:
        x = x @ torch.eye(CLASSES, dtype=x.dtype)
        wide = x.float()
        x.zero_()
        return plain(wide, t) + x.sum()

    def switched(x: Tensor, t: Tensor) -> Tensor:
        with torch.no_grad():
            wide = x.float()
        return plain(wide, t)

    for function in (written, switched):
        count, text = lowered(function, *inputs())
        assert count == 0 and ".float(" in text, text


@pytest.mark.usefixtures("loss_kernels")
def test_inside_a_function_transform_it_stays() -> None:
    def function(x: Tensor, t: Tensor) -> Tensor:
        return torch.func.grad(lambda y: plain(y, t))(x)

    assert lowered(function, *inputs(FP32))[0] == 0


@pytest.mark.usefixtures("loss_kernels")
def test_a_loss_that_is_recomputed() -> None:
    logits, labels = inputs(FP32)

    def function(x: Tensor, t: Tensor) -> Tensor:
        return checkpoint(lambda y: plain(y @ y.mT @ y, t), x / 9, use_reentrant=False)

    results = []
    with manager.recording() as records:
        for run in (function, compiled(function)):
            leaf = logits.clone().requires_grad_()
            loss = run(leaf, labels)
            loss.backward()
            results.append((loss.detach(), leaf.grad))
    assert loss_backwards(records[0], defers=False)
    for got, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("loss_kernels")
@pytest.mark.parametrize("defers", [False, True])
def test_any_number_of_rows_keeps_its_symbol(defers: bool) -> None:
    head = nn.Linear(16, CLASSES)

    def function(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(x)
        return SPELLINGS["cast"](logits, labels), logits

    run = compiled(function, dynamic=True, exclude=["*"], defer_logits=defers)
    with manager.recording() as records:
        for rows in (4, 9, 6):
            x, labels = torch.randn(2, rows, 16, requires_grad=True), torch.randint(0, CLASSES, (2, rows))
            (got,), (want,) = (torch.autograd.grad(each(x, labels)[0], [x]) for each in (run, function))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    (record,) = records
    assert len(te_nodes(record, "cross_entropy_forward")) == 1
    (backward,) = loss_backwards(record, defers)
    assert arguments_of(backward)["ticket" if defers else "addend"] is not None


SIZES = {"vocab_size": CLASSES, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=2)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=CLASSES,
            n_embd=32,
            n_layer=1,
            n_head=2,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
    ),
    "bert": lambda: BertForMaskedLM(
        BertConfig(**SIZES, intermediate_size=64, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    ),
}


@pytest.mark.usefixtures("loss_kernels")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "defers"), [(BF16, True), (BF16, False), (FP32, True)], ids=str)
def test_models_of_hugging_face_train_as_in_eager_mode(
    name: str, compiler: str, dtype: torch.dtype, defers: bool
) -> None:
    model = MODELS[name]().to(dtype)
    ids = torch.randint(0, CLASSES, (2, 9))
    labels = torch.where(torch.rand(2, 9) < 0.3, -100, ids)

    def step(run: Callable[..., Any]) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad(set_to_none=True)
        loss = run(input_ids=ids, labels=labels).loss
        loss.backward()
        return loss.detach(), gradients(model)

    wanted = step(model)
    # Nothing in FP8, so that the loss is all that differs.
    with manager.recording() as records:
        got = step(compiled(model, compiler=compiler, exclude=["*"], defer_logits=defers))
    # In GPT-2 the graph breaks before the loss, which then has only logits to read, and none to return.
    broken = len(records) > 1
    (backward,) = (node for record in records for node in loss_backwards(record, defers and not broken))
    # BERT's head has a bias, whose gradient is the sum of what the loss's backward writes.
    written = pytree.tree_leaves(backward.meta["val"])
    assert [each.dtype for each in written] == [dtype] * (2 if name == "bert" else 1)
    assert defers or (arguments_of(backward)["addend"] is None) == broken
    assert got[0].dtype == wanted[0].dtype
    # On a CPU eager mode adds up losses in bf16 where the model leaves its logits in it.
    torch.testing.assert_close(got[0], wanted[0], rtol=2e-2 if dtype == BF16 else 1e-5, atol=1e-5)
    assert got[1].keys() == wanted[1].keys()
    for parameter, gradient in wanted[1].items():
        difference = (got[1][parameter].double() - gradient.double()).norm()
        assert difference <= (3e-2 if dtype == BF16 else 1e-4) * gradient.double().norm() + 1e-6, parameter


@pytest.mark.usefixtures("loss_kernels")
def test_items_in_a_batch_are_counted_by_the_model() -> None:
    model = MODELS["llama"]()
    ids = torch.randint(0, CLASSES, (2, 9))
    wanted = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(5)).loss
    with manager.recording() as records:
        got = compiled(model, exclude=["*"])(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(5)).loss
    assert te_nodes(records[0], "cross_entropy_forward")
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
