"""Attention with a bias becomes te::biased_attention, whose bias learns; any other call stays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from te_compile import backend
from te_compile.inspect.attentions import AttentionRow
from te_compile.ops.biased_attention import BIASED_ATTENTION
from te_compile.options import Options
from te_compile.passes import biased_attentions as module
from te_compile.passes import manager
from te_compile.passes.bias_kernels import FEWEST_POSITIONS
from te_compile.passes.biased_attentions import biased_attentions
from te_compile.passes.captured_nodes import value_of
from te_compile.passes.find_attentions import find_attentions
from te_compile.passes.plan import Plan
from te_compile.passes.regions import regions_of
from tests.capturing import captured
from tests.compiling import compiled, relative_error, te_nodes
from tests.kernel_order import order_of_kernels

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "an_order_of_kernels_that_nobody_has_changed")

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 72, 16
LOWEST = torch.finfo(torch.bfloat16).min
Run = Callable[..., Tensor]


def heads(length: int = LENGTH, count: int = HEADS) -> Tensor:
    return torch.randn(BATCH, length, count, WIDTH).transpose(1, 2).requires_grad_()


def table(learns: bool = True) -> Tensor:
    """A number for each distance and head, as relative positions have it."""
    return torch.randn(4 * LENGTH, HEADS, requires_grad=learns)


def relative(table: Tensor, queries: int, keys: int) -> Tensor:
    """[1, H, queries, keys], whose elements lie as many apart as there are heads."""
    places = torch.arange(queries, device=table.device)[:, None] - torch.arange(keys, device=table.device)
    return table[places + 2 * LENGTH].permute(2, 0, 1).unsqueeze(0)


def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor, **options: Any) -> Tensor:
    bias = relative(table, q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, **options)


def change(gm: GraphModule, runs: bool = True, **options: Any) -> tuple[int, Plan]:
    """Run the pass as on a device with kernels, if they ``run`` it."""
    regions, left = regions_of(gm)
    plan = Plan()
    find_attentions(regions, left, plan)
    count = biased_attentions(regions, plan, Options.resolve(options), lambda q, k, v, probability: runs)
    gm.graph.lint()
    gm.recompile()
    return count, plan


def passed(run: Run, *inputs: Tensor, **options: Any) -> tuple[int, GraphModule, Plan]:
    """The captured graph of ``run`` after the pass."""
    gm, given = captured(run, *inputs)
    count, plan = change(gm, **options)
    gm.given = given
    return count, gm, plan


def calls_of(gm: GraphModule) -> list[Any]:
    return list(gm.graph.find_nodes(op="call_function", target=BIASED_ATTENTION))


def stays(run: Run, *inputs: Tensor, **options: Any) -> bool:
    count, gm, plan = passed(run, *inputs, **options)
    return count == 0 and not calls_of(gm) and {each.kernel for each in plan.attentions} <= {""}


def gradients(y: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.autograd.grad(y, inputs, torch.randn_like(y))


# ---------------------------------------------------------------------------------------------------------------- fires


@pytest.mark.parametrize(("queries", "keys"), [(LENGTH, LENGTH), (80, 75), (71, 96)])
def test_a_bias_that_learns_has_its_gradient(queries: int, keys: int) -> None:
    inputs = [heads(queries), heads(keys), heads(keys), table()]
    count, gm, plan = passed(partial(attend, scale=0.3), *inputs)
    (call,) = calls_of(gm)
    (attention,) = plan.attentions
    assert count == 1 and (attention.kernel, attention.node) == ("biased", call) and call.args[4:] == (0.0, 0.3)
    assert value_of(call.args[3]).shape == (1, HEADS, queries, -(-keys // 8) * 8)  # once for all rows of the batch
    got, wanted = gm(*gm.given)[0], attend(*inputs, scale=0.3)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    for one, other in zip(gradients(got, inputs), gradients(wanted, inputs), strict=True):
        assert relative_error(one, other) < 1e-4
        assert (one - other).flatten(0, -2).norm(dim=0).max() < 1e-3 * other.flatten(0, -2).norm(dim=0).max()


def test_a_bias_of_layers_is_laid_out_once() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        bias = relative(table, LENGTH, LENGTH).expand(BATCH, -1, -1, -1)
        for _ in range(3):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return q

    inputs = [heads(), heads(), heads(), table()]
    count, gm, _ = passed(run, *inputs)
    laid = {call.args[3] for call in calls_of(gm)}
    assert count == 3 and len(laid) == 1 and value_of(laid.pop()).shape[0] == 1
    for one, other in zip(gradients(gm(*gm.given)[0], inputs), gradients(run(*inputs), inputs), strict=True):
        assert relative_error(one, other) < 1e-4


@pytest.mark.parametrize("dims", [3, 4])
def test_padding_is_a_part_of_the_bias(dims: int) -> None:
    """As transformers has it: a matrix for each row of the batch and in each layer, in which what is not seen is
    lowest. The gradient goes to what rows share."""

    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor, there: Tensor) -> Tensor:
        shared = relative(table, LENGTH, LENGTH)
        for _ in range(2):
            bias = torch.where(there[:, None, None, :], shared if dims == 4 else shared[0], LOWEST)
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.contiguous())
        return q

    there = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    there[0, 30:] = False
    inputs = [heads(), heads(), heads(), table()]
    count, gm, _ = passed(run, *inputs, there)
    assert count == 2
    for call in calls_of(gm):
        bias, learned = value_of(call.args[3]), value_of(call.args[6])
        assert bias.shape == (BATCH, HEADS, LENGTH, LENGTH) and not bias.requires_grad
        assert learned.shape == (1, HEADS, LENGTH, LENGTH) and learned.requires_grad
    torch.testing.assert_close(gm(*gm.given)[0], run(*inputs, there), rtol=1e-4, atol=1e-5)
    for one, other in zip(gradients(gm(*gm.given)[0], inputs), gradients(run(*inputs, there), inputs), strict=True):
        assert relative_error(one, other) < 1e-4
        assert (one - other).flatten(0, -2).norm(dim=0).max() < 1e-3 * other.flatten(0, -2).norm(dim=0).max()


def test_a_bias_of_each_row_keeps_its_own_gradient() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias * 2)

    inputs = [heads(), heads(), heads(), torch.randn(BATCH, HEADS, LENGTH, LENGTH, requires_grad=True)]
    count, gm, _ = passed(run, *inputs)
    assert count == 1 and len(calls_of(gm)[0].args) == 6
    for one, other in zip(gradients(gm(*gm.given)[0], inputs), gradients(run(*inputs), inputs), strict=True):
        assert relative_error(one, other) < 1e-4


def test_a_bias_that_learns_nothing_goes_too() -> None:
    count, gm, _ = passed(attend, heads(), heads(), heads(), table(learns=False))
    assert count == 1 and len(calls_of(gm)) == 1
    with torch.no_grad():
        inputs = [heads(), heads(), heads(), table()]
        count, gm, _ = passed(attend, *inputs)
        torch.testing.assert_close(gm(*gm.given)[0], attend(*inputs), rtol=1e-4, atol=1e-5)
    assert count == 1


def test_heads_that_share_keys() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // 2, 1) for x in (k, v))
        return attend(q, k, v, table)

    inputs = [heads(), heads(count=2), heads(count=2), table()]
    count, gm, plan = passed(run, *inputs)
    (call,) = calls_of(gm)
    assert count == 1 and value_of(call.args[1]).shape[1] == 2 and plan.attentions[0].heads == "undone"
    for one, other in zip(gradients(gm(*gm.given)[0], inputs), gradients(run(*inputs), inputs), strict=True):
        assert relative_error(one, other) < 1e-4


def test_a_dropout_goes_with_it() -> None:
    count, gm, _ = passed(partial(attend, dropout_p=0.25), heads(), heads(), heads(), table())
    assert count == 1 and calls_of(gm)[0].args[4] == 0.25


def test_lengths_that_vary() -> None:
    counts: list[int] = []

    def changed(gm: GraphModule, example_inputs: list[object]) -> Callable[..., object]:
        counts.append(change(gm)[0])
        return gm.forward

    run = torch.compile(attend, backend=changed)
    for length in (72, 75, 91, 104):
        inputs = [heads(length), heads(length), heads(length), table()]
        got, wanted = run(*inputs), attend(*inputs)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        for one, other in zip(gradients(got, inputs), gradients(wanted, inputs), strict=True):
            assert relative_error(one, other) < 1e-4
    assert counts == [1, 1]


# -------------------------------------------------------------------------------------------------------- does not fire


LEFT: dict[str, tuple[Run, int, dict[str, Any]]] = {
    "few positions": (attend, FEWEST_POSITIONS - 1, {}),
    "no kernel": (attend, LENGTH, {"runs": False}),
    "eager mode's draws": (partial(attend, dropout_p=0.1), LENGTH, {"fallback_random": True}),
    "no mask": (lambda q, k, v, table: F.scaled_dot_product_attention(q, k, v) * table.sum(), LENGTH, {}),
    "a mask of booleans": (
        lambda q, k, v, table: F.scaled_dot_product_attention(q, k, v, attn_mask=relative(table, LENGTH, LENGTH) > 0),
        LENGTH,
        {},
    ),
    "one row for all queries": (
        lambda q, k, v, table: F.scaled_dot_product_attention(q, k, v, attn_mask=relative(table, 1, LENGTH)),
        LENGTH,
        {},
    ),
    "a result that is changed in place": (lambda *given: attend(*given).mul_(2), LENGTH, {}),
    "a bias that hides as booleans would": (
        lambda q, k, v, table: F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.zeros(LENGTH, LENGTH).masked_fill(table[0, 0] > torch.randn(LENGTH), -torch.inf)
        ),
        LENGTH,
        {},
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_others_are_left_alone(case: str) -> None:
    run, length, options = LEFT[case]
    assert stays(run, heads(length), heads(length), heads(length), table(), **options)


def test_an_order_of_kernels_that_the_user_has_set_stands() -> None:
    with order_of_kernels([0, 1, 2, 3, 4]):
        assert stays(attend, heads(), heads(), heads(), table())


def test_deterministic_algorithms_are_not_left() -> None:
    try:
        torch.use_deterministic_algorithms(True)
        assert not module.is_run_by_kernels(*(heads().transpose(1, 2),) * 3, 0.0)
    finally:
        torch.use_deterministic_algorithms(False)


# ------------------------------------------------------------------------------------------------------------- numerics


class Block(nn.Module):
    """Attention with a bias that learns, between linears."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn(4 * LENGTH, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in self.qkv(x).unflatten(2, (3, HEADS, -1)).unbind(2))
        return self.out(attend(q, k, v, self.table).transpose(1, 2).flatten(2))


def test_a_model_trains_in_fp8_as_without_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    x, results = torch.randn(BATCH, LENGTH, 64, dtype=torch.bfloat16), []
    model = Block().to(torch.bfloat16)
    for runs in (False, True):
        fires = partial(biased_attentions, runs=lambda q, k, v, probability, runs=runs: runs)
        fires.__name__ = "biased_attentions"  # type: ignore[attr-defined]
        monkeypatch.setattr(backend, "biased_attentions", fires)
        torch._dynamo.reset()  # or it would run what it has compiled
        with manager.recording() as records:
            y = compiled(model)(x)
        results.append([y, *gradients(y, list(model.parameters()))])
        assert len(te_nodes(records[0], "biased_attention_forward")) == runs
    for one, other in zip(*results, strict=True):
        assert relative_error(one, other) < 0.05


class Padded(Block):
    """The same under a mask of padding, in a checkpointed region or not."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed

    def attended(self, x: Tensor, bias: Tensor, there: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in self.qkv(x).unflatten(2, (3, HEADS, -1)).unbind(2))
        seen = torch.where(there[:, None, None, :], bias, torch.finfo(x.dtype).min)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.contiguous())
        return x + self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        bias = relative(self.table, LENGTH, LENGTH)
        for _ in range(2):
            given = (x, bias, there)
            x = checkpoint(self.attended, *given, use_reentrant=False) if self.checkpointed else self.attended(*given)
        return x


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_padded_model_trains_as_without_the_pass(checkpointed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, results = torch.randn(BATCH, LENGTH, 64, dtype=torch.bfloat16), []
    there = torch.arange(LENGTH) < torch.tensor([[40], [LENGTH]])
    model = Padded(checkpointed).to(torch.bfloat16)
    for runs in (False, True):
        fires = partial(biased_attentions, runs=lambda q, k, v, probability, runs=runs: runs)
        fires.__name__ = "biased_attentions"  # type: ignore[attr-defined]
        monkeypatch.setattr(backend, "biased_attentions", fires)
        torch._dynamo.reset()
        with manager.recording() as records:
            y = compiled(model, exclude=["*"])(x, there)
        results.append([y, *gradients(y, list(model.parameters()))])
        assert len(te_nodes(records[0], "sum_of_shared")) == 2 * runs
    for one, other in zip(*results, strict=True):
        assert relative_error(one, other) < 0.02


def test_a_report_says_so() -> None:
    _, _, plan = passed(attend, heads(), heads(), heads(), table())
    (attention,) = plan.attentions
    row = AttentionRow("attn", "sdpa", mask=attention.mask, mask_reason="why", kernel=attention.kernel)
    assert row.detail == "mask kept: why; on te_compile's kernels, to which its bias is added"
