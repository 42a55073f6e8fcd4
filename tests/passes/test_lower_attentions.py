"""With fp8_dpa=True attention runs in FP8 where it can, and says why where it cannot; without it nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import sqnr
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of
from te_compile.passes.manager import Compilation
from te_compile.passes.plan import Attention
from tests.compiling import compiled, cosine, gradients, te_nodes, train_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HEADS, LENGTH, WIDTH = 4, 40, 64
DELAYED, CURRENT = "delayed fp8_dpa=True", "current fp8_dpa=True"


def heads(count: int = HEADS, length: int = LENGTH, width: int = WIDTH, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[2, count, length, width], in memory as projections write it."""
    return torch.randn(2, length, count, width, dtype=dtype).transpose(1, 2).requires_grad_()


def qkv(**how: Any) -> list[Tensor]:
    return [heads(**how) for _ in range(3)]


def run(function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, list[Compilation]]:
    with manager.recording() as compilations:
        out = compiled(function, **{"recipe": DELAYED, **options})(*inputs)
    return out, compilations


def attentions(function: Callable[..., Any], *inputs: Any, **options: Any) -> list[Attention]:
    _, compilations = run(function, *inputs, **options)
    return [each for compilation in compilations for each in compilation.plan.attentions]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.21)


def spelled_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT * 0.125, dim=-1) @ v


def behind_a_causal_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def with_shared_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


def with_repeated_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :2].repeat_interleave(2, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def recomputed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(lambda *qkv: causal(*qkv) * 2, q, k, v, use_reentrant=False)


def with_one_head_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1])


FIRES = [
    causal, full, scaled, spelled_out, behind_a_causal_mask, with_shared_heads, with_repeated_heads,
    with_one_head_of_keys, recomputed,
]  # fmt: skip


@pytest.mark.parametrize("recipe", [DELAYED, CURRENT])
@pytest.mark.parametrize("function", FIRES, ids=lambda f: f.__name__)
def test_attention_becomes_fp8_with_its_scales_in_the_graph(function: Callable[..., Tensor], recipe: str) -> None:
    inputs = qkv()
    got, (compilation,) = run(function, *inputs, recipe=recipe)
    (node,) = te_nodes(compilation, "fp8_attention")
    (attention,) = compilation.plan.attentions
    assert (attention.precision, attention.precision_reason) == ("fp8", "")
    quantizes = te_nodes(compilation, "quantize")
    assert len(quantizes) == 3 and len(te_nodes(compilation, "attention_backward")) == 1
    for name in ("q_scale_inv", "k_scale_inv", "v_scale_inv"):
        assert arguments_of(node)[name].args[0] in quantizes
    wanted = function(*inputs)
    assert got.dtype == wanted.dtype and got.stride() == wanted.stride()
    assert sqnr(wanted, got) >= 20
    weights = torch.randn(wanted.shape)
    pairs = zip(*(torch.autograd.grad((y * weights).sum(), inputs) for y in (got, wanted)), strict=True)
    for ours, theirs in pairs:
        assert sqnr(theirs, ours) >= 15


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_without_the_option_nothing_changes(recipe: str) -> None:
    inputs = qkv()
    got, (compilation,) = run(causal, *inputs, recipe=recipe)
    assert torch.equal(got, causal(*inputs))
    assert "lower_attentions" not in {record.name for record in compilation.passes}
    (attention,) = compilation.plan.attentions
    assert (attention.precision, attention.precision_reason) == ("", "")
    assert not te_nodes(compilation, "fp8_attention") and not te_nodes(compilation, "quantize")


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def per_example(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.vmap(lambda q, k, v: full(q[None], k[None], v[None])[0])(q, k, v)


def changed_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = full(q, k, v).transpose(1, 2)
    out *= 3
    return out


def soft_capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(torch.tanh(q @ k.mT), dim=-1) @ v


@pytest.mark.parametrize(("function", "inputs", "reason"), [
    (masked, lambda: [*qkv(), torch.rand(2, 1, LENGTH, LENGTH) > 0.2], "no mask but a causal one"),
    (with_dropout, qkv, "no dropout, and its own is 0.1"),
    (full, lambda: qkv(width=32), "32 features; make them a multiple of 16 from 64 to 128"),
    (full, lambda: qkv(width=72), "72 features"),
    (full, lambda: qkv(width=256), "256 features"),
    (full, lambda: [heads(), heads(), heads(width=128)], "128 features a head, its queries 64"),
    (full, lambda: qkv(dtype=torch.float64), "its query is torch.float64"),
    (full, lambda: [heads()[0], heads(1)[0], heads(1)[0]], "3 dimensions"),  # which broadcast: others are given four
    (causal, lambda: [heads(), heads(length=50), heads(length=50)], "gradients of causal attention with more or fewer"),
    (per_example, qkv, "inside a function transform"),
    (full, lambda: [heads(1), heads(), heads()], "1 heads of queries cannot share 4 of keys"),
    (full, lambda: [heads()[:1], heads(), heads()], "broadcast, or not known to agree"),
])  # fmt: skip
def test_attention_that_fp8_cannot_stand_for_stays_and_says_why(
    function: Callable[..., Tensor], inputs: Callable[[], list[Tensor]], reason: str
) -> None:
    given = inputs()
    with torch.random.fork_rng():
        got, (compilation,) = run(function, *given)
    (attention,) = compilation.plan.attentions
    assert attention.precision == "kept" and reason in attention.precision_reason
    assert not te_nodes(compilation, "fp8_attention")
    torch.testing.assert_close(got, function(*given))


def test_a_result_that_is_changed_in_place_stays_where_its_gradients_need_it() -> None:
    """PyTorch's fused kernels raise an error then; the one that stores all scores does not read it again."""
    inputs = qkv()
    with sdpa_kernel(SDPBackend.MATH):
        got, (compilation,) = run(changed_in_place, *inputs)
        (attention,) = compilation.plan.attentions
        assert attention.precision == "kept" and "changed in place" in attention.precision_reason
        torch.testing.assert_close(got, changed_in_place(*inputs))
        got.sum().backward()
    with torch.no_grad():
        torch._dynamo.reset()
        got, (compilation,) = run(changed_in_place, *inputs)
        assert [each.precision for each in compilation.plan.attentions] == ["fp8"]
        assert sqnr(changed_in_place(*inputs), got) >= 20


def test_attention_as_the_model_wrote_it_has_its_own_reason() -> None:
    (attention,) = attentions(soft_capped, *qkv())
    assert attention.status == "stays" and (attention.precision, attention.precision_reason) == ("", "")


def test_inference_takes_more_keys_than_queries_and_counts_from_the_first() -> None:
    inputs = [heads(length=9), heads(length=30), heads(length=30)]
    with torch.no_grad():
        got, (compilation,) = run(causal, *inputs)
        assert sqnr(causal(*inputs), got) >= 20
    (quantized_values,) = [node for node in te_nodes(compilation, "quantize") if arguments_of(node)["columnwise"]]
    assert len(te_nodes(compilation, "fp8_attention")) == 1
    assert not arguments_of(quantized_values)["rowwise"], "only backward reads values as they lie"


def test_one_graph_serves_all_lengths() -> None:
    function = compiled(causal, recipe=DELAYED, dynamic=True)
    with manager.recording() as compilations:
        for length in (32, 45, 61):  # multiples of 16, by 2 sequences, and others
            inputs = qkv(length=length)
            out = function(*inputs)
            wanted = causal(*inputs)
            assert sqnr(wanted, out) >= 20
            for ours, theirs in zip(
                torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(wanted.sum(), inputs), strict=True
            ):
                assert ours.shape == theirs.shape and cosine(ours, theirs) > 0.97
    assert sum(each.joint is not None for each in compilations) == 1


@pytest.mark.parametrize("recipe", [DELAYED, CURRENT])
def test_under_autocast_the_result_has_the_dtype_that_it_had(recipe: str) -> None:
    """Queries and keys in fp32, as rotations leave them, and values that a linear has made bf16."""
    q, k, v = heads(dtype=torch.float32), heads(dtype=torch.float32), heads()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = causal(q, k, v)
        got, (compilation,) = run(causal, q, k, v, recipe=recipe)
    assert [each.precision for each in compilation.plan.attentions] == ["fp8"]
    assert got.dtype == wanted.dtype == torch.bfloat16 and sqnr(wanted, got) >= 20
    pairs = zip(*(torch.autograd.grad(y.float().square().sum(), [q, k, v]) for y in (got, wanted)), strict=True)
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype and sqnr(theirs, ours) >= 15


def test_a_model_may_view_a_result_as_the_layout_that_it_had_allows() -> None:
    """One head, so that batch and positions are neighbours in memory either way; and heads outermost."""

    def run_on(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return full(q, k, v).view(2 * HEADS, LENGTH, WIDTH)

    inputs = [x.detach().contiguous() for x in qkv(dtype=torch.float32)]
    try:
        wanted = run_on(*inputs)
    except RuntimeError:
        pytest.skip("this PyTorch lays the result out otherwise")
    assert sqnr(wanted, run(run_on, *inputs)[0]) >= 20


class Attending(nn.Module):
    """Two attentions between linears; ``causal`` and 64 features a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = OneAttention(), OneAttention()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class OneAttention(nn.Module):
    """Self-attention with one projection for q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 64)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(causal(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("options", "precisions"), [
    ({}, ["fp8", "fp8"]),
    ({"exclude": "first"}, ["kept", "fp8"]),
    ({"include": ["*.qkv", "second"]}, ["kept", "fp8"]),
    ({"exclude": lambda name, info: info.features[0] > 0}, ["fp8", "fp8"]),
])  # fmt: skip
def test_patterns_choose_attentions_by_module_and_functions_are_not_asked(
    options: dict[str, Any], precisions: list[str]
) -> None:
    found = attentions(Attending(), torch.randn(2, 16, 128), **options)
    assert [each.name for each in found] == ["first", "second"]
    assert [each.precision for each in found] == precisions
    reasons = [each.precision_reason for each in found if each.precision == "kept"]
    assert all("pattern 'first'" in reason or "not matched by include" in reason for reason in reasons)


def test_half_as_many_bytes_of_q_k_and_v_are_saved_for_backward() -> None:
    sizes: dict[str, int] = {}
    model, x = Attending().bfloat16(), torch.randn(2, 64, 128, dtype=torch.bfloat16)
    for recipe in ("current", CURRENT):
        saved: dict[int, int] = {}

        def keep(t: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        torch._dynamo.reset()
        function = compiled(model, recipe=recipe)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            function(x)
        sizes[recipe] = sum(saved.values())
    codes = 2 * 3 * x.numel()  # one byte each, of two attentions
    assert sizes["current"] - sizes[CURRENT] > codes // 2


@pytest.mark.parametrize("recomputing", [False, True], ids=["saved", "recomputed"])
def test_checkpointing_changes_no_bit_of_the_gradients(recomputing: bool) -> None:
    model, x = Attending(), torch.randn(2, 16, 128)
    found = []
    for forward in (model, lambda x: checkpoint(model, x, use_reentrant=False) if recomputing else model(x)):
        torch._dynamo.reset()
        model.zero_grad()
        compiled(forward, recipe=CURRENT)(x).square().mean().backward()
        found.append(gradients(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


SMALL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 128}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, **SMALL,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=256, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **SMALL
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT])
@pytest.mark.parametrize("build", [llama, gpt2])
def test_whole_models_lose_no_more_than_fp8_linears_do(build: Callable[[], nn.Module], recipe: str) -> None:
    model = build()
    ids = torch.randint(3, 128, (2, 64))

    def step(function: Callable[..., Any]) -> tuple[float, dict[str, Tensor]]:
        model.zero_grad(set_to_none=True)
        loss = function(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return float(loss), gradients(model)

    loss, wanted = step(model)
    cosines = {}
    for name in (recipe.split()[0], recipe):
        torch._dynamo.reset()
        with manager.recording() as compilations:
            fp8_loss, got = step(compiled(model, recipe=name))
        assert abs(fp8_loss / loss - 1) < 0.02
        cosines[name] = {each: cosine(got[each], wanted[each]) for each in wanted if wanted[each].dim() > 1}
    precisions = [each.precision for compilation in compilations for each in compilation.plan.attentions]
    assert precisions == ["fp8", "fp8"]
    linears, attention = cosines.values()
    assert all(attention[each] >= min(0.97, linears[each] - 0.01) for each in attention), (linears, attention)


@pytest.mark.slow
def test_inductor_compiles_it() -> None:
    model, x = Attending().bfloat16(), torch.randn(2, 24, 128, dtype=torch.bfloat16)
    by_operator, wanted = train_step(model, compiled(model, recipe=CURRENT), x)
    torch._dynamo.reset()
    got, found = train_step(model, compiled(model, recipe=CURRENT, compiler="inductor"), x)
    assert sqnr(by_operator, got) >= 30
    assert all(cosine(found[name], wanted[name]) > 0.99 for name in wanted if wanted[name].dim() > 1)
