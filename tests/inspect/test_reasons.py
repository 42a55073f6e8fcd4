"""Every reason in a report can be acted on: what the matter is, then what to change, or that nothing helps and why.

Small models reach the reasons through ``explain``, as a user does; those that need a device that is not there are asked
for directly. What a reason advises is held against what exists: an option that it names must be one, with that value.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import te_compile
from te_compile.inspect import Report
from te_compile.options import Options
from te_compile.passes import fp8_support, step_cost
from te_compile.passes.linear_cost import by_cost
from tests.selecting import fake_site
from tests.static_keys import StaticKeys

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH, LENGTH = 32, 8
VERBS = (
    "add", "begin", "build", "call", "cast", "compile", "expand", "give", "leave", "load", "make", "move", "multiply",
    "pass", "return", "scale", "set", "take", "unpack", "use", "write",
)  # fmt: skip
OTHERS = {  # settings that reasons may name and that are none of our options, with what can be said of them
    "dynamic": ("False",), "is_causal": ("True",), "output_attentions": ("False",), "need_weights": ("False",),
    "enable_gqa": ("True",), "attn_implementation": ("'flex_attention'",),
}  # fmt: skip
LONGEST = 220


def faults(reason: str) -> list[str]:
    """What is wrong with a reason; nothing, for one that a user can act on."""
    found = []
    matter, _, advice = reason.rpartition("; ")
    if not matter.strip() or not advice.strip():
        return ["it does not say both what the matter is and what to do"]
    if reason != reason.strip() or reason.endswith((".", ";", ":", ",")) or "\n" in reason:
        found.append("it ends, or breaks, as no other does")
    if len(reason) > LONGEST:
        found.append(f"it has {len(reason)} characters")
    settings = re.findall(r"\b([a-z_]+)=('[^']*'|\w+)", advice)
    first = advice.split()[0]
    if not (
        re.match(r"nothing to do: \w", advice) or first in VERBS or any(first.startswith(f"{s}=") for s, _ in settings)
    ):
        found.append(f"{advice!r} is no advice")
    for name, value in settings:
        if name in OTHERS:
            known = value in OTHERS[name]
        else:
            Options.resolve({name: {"True": True, "False": False}.get(value, value.strip("'"))})  # raises otherwise
            known = True
        if not known:
            found.append(f"nobody knows {name}={value}")
    return found


def reasons_in(report: Report) -> Iterator[str]:
    """Every reason of ``report``; that of a kept linear and of an attention that stays even where it is empty."""
    yield from (row.reason for row in report.rows if row.status == "kept")
    for each in report.attentions:
        if each.status == "stays":
            yield each.reason
        told = ((each.mask, each.mask_reason), (each.heads, each.heads_reason), (each.precision, each.precision_reason))
        yield from (why for what, why in told if what in ("kept", "copied"))


class With(nn.Module):
    """``function(module, x, …)`` with a linear, a weight [2 WIDTH, WIDTH] and a buffer of that shape at hand."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
        self.register_buffer("matrix", torch.randn(2 * WIDTH, WIDTH))
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, x: Tensor, *others: Any) -> Any:
        return self.function(self, x, *others)


def rows() -> Tensor:
    return torch.randn(LENGTH, WIDTH)


def by_a_bilinear(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, F.bilinear(m.weight, m.weight, m.weight[:WIDTH, None] * m.weight[:WIDTH]))


def codes() -> nn.Buffer:
    return nn.Buffer(torch.randint(-128, 128, (2 * WIDTH, WIDTH), dtype=torch.int8))


def by_codes(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.codes.to(x.dtype) * m.matrix[:, :1])


def routed(m: Any, x: Tensor) -> Tensor:
    return m.fc(x).softmax(-1).topk(2).values


LINEARS: dict[str, tuple[str, Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "excluded": ("exclude pattern", lambda: (nn.Sequential(nn.Linear(WIDTH, WIDTH)), rows()), {"exclude": "0"}),
    "not included": ("include", lambda: (nn.Sequential(nn.Linear(WIDTH, WIDTH)), rows()), {"include": "1"}),
    "head": ("logits", lambda: (With(lambda m, x: m.lm_head(x), lm_head=nn.Linear(WIDTH, WIDTH)), rows()), {}),
    "router": ("router", lambda: (With(routed), rows()), {}),
    "narrow": ("narrow", lambda: (nn.Sequential(nn.Linear(WIDTH, 8)), rows()), {}),
    "float64": ("float64", lambda: (nn.Sequential(nn.Linear(WIDTH, WIDTH)).double(), rows().double()), {}),
    "wrapped": ("TwoTensor", lambda: (With(lambda m, x: m.fc(x)), TwoTensor(rows(), rows())), {}),
    "handed in": ("not a parameter", lambda: (With(lambda m, x, w: F.linear(x, w)), rows(), rows().repeat(2, 1)), {}),
    "buffer": ("not a parameter", lambda: (With(lambda m, x: F.linear(x, m.matrix)), rows()), {}),
    "codes": ("codes of torch.int8", lambda: (With(by_codes, codes=codes()), rows()), {}),
    "from the call": ("the call", lambda: (With(lambda m, x: F.linear(x, m.weight * x.mean())), rows()), {}),
    "product": ("another product", lambda: (With(by_a_bilinear), rows()), {}),
    "makes a weight": ("a weight", lambda: (With(lambda m, x: F.linear(x, m.weight @ m.fc.weight)), rows()), {}),
    "with itself": ("with itself", lambda: (With(lambda m, x: m.fc(x) + (m.weight.T @ m.weight).sum()), rows()), {}),
    "bilinear": ("bilinear", lambda: (nn.Sequential(Twice(nn.Bilinear(WIDTH, WIDTH, WIDTH))), rows()), {}),
    "einsum": ("einsum", lambda: (With(lambda m, x: torch.einsum("ij,ij->i", x, m.weight[:LENGTH])), rows()), {}),
    "addmm": ("addmm", lambda: (With(lambda m, x: torch.addmm(m.fc.bias, x, m.fc.weight, beta=0)), rows()), {}),
    "vmap": ("vmap", lambda: (With(lambda m, x: torch.vmap(m.fc)(x)), rows()), {}),
    "experts": ("65 experts", lambda: (With(lambda m, x: x @ m.all, all=experts(65)), torch.randn(65, 4, WIDTH)), {}),
    "static keys": ("static_k", lambda: (nn.Sequential(StaticKeys(WIDTH, 2)), rows()[None]), {}),
}  # fmt: skip


class Twice(nn.Module):
    """A module of two inputs, given one for both."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x, x)


def experts(count: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(count, WIDTH, WIDTH))


@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_that_is_kept_says_what_to_do(name: str) -> None:
    expected, made, options = LINEARS[name]
    model, *inputs = made()
    reasons = [*reasons_in(te_compile.explain(model, *inputs, options=options))]
    assert any(expected in reason for reason in reasons), reasons
    assert {reason: found for reason in reasons if (found := faults(reason))} == {}


def heads(count: int = 2, dtype: torch.dtype = torch.bfloat16, width: int = 16) -> Tensor:
    return torch.randn(2, count, LENGTH, width, dtype=dtype)


def qkv(**changes: Any) -> list[Tensor]:
    return [heads(**changes) for _ in range(3)]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.25


def sdpa(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **given)


def shared(k: Tensor) -> Tensor:
    return k.repeat_interleave(2, 1)


def weights_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = scores(q, k).softmax(-1)
    return weights @ v, weights


def scores_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    product = q @ k.mT
    return (product * 0.5).softmax(-1) @ v, product


def some_scores_written_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    product = scores(q, k)
    product[..., 1:, 1:] += q[..., 1:, :1]
    return product.softmax(-1) @ v


def result_written_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    result = scores(q, k).softmax(-1) @ v
    return result.flatten(1, 2).mul_(0.5)


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(LENGTH)
    return sdpa(q, k, v, attn_mask=(at[:, None] >= at) & (at[:, None] - at < 3))


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(LENGTH)
    return sdpa(q, k, v, attn_mask=(at[:, None] - at).to(q.dtype))


def far_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, attn_mask=torch.full((LENGTH, LENGTH), -1e4).triu(1).to(q.dtype))


DPA = {"recipe": "current fp8_dpa=True"}
ATTENTIONS: dict[str, tuple[str, Callable[..., Any], Callable[[], list[Tensor]], dict[str, Any]]] = {
    "soft cap": ("tanh", lambda q, k, v: scores(q, k).tanh().softmax(-1) @ v, qkv, {}),
    "weights read": ("weights are read", weights_returned, qkv, {}),
    "scores read": ("scores are read", scores_returned, qkv, {}),
    "some scores written": ("some of its scores", some_scores_written_to, qkv, {}),
    "weights alone": ("leave the graph", lambda q, k, v: scores(q, k).softmax(-1), qkv, {}),
    "shared queries": ("same for all", lambda q, k, v: torch.matmul(q[0, 0], k.mT).softmax(-1) @ v, qkv, {}),
    "head mask": ("go through mul", lambda q, k, v: (scores(q, k).softmax(-1) * q[:, :, :1, :1]) @ v, qkv, {}),
    "in place": ("in place", result_written_to, qkv, {}),
    "no scores": ("no product", lambda q, k, v: torch.softmax(q, -1) @ v.mT, qkv, {}),
    "window": ("sliding window", window, qkv, {}),
    "bias": ("it is a bias", biased, qkv, {}),
    "far below": ("only while no other", far_below, qkv, {}),
    "mask given": ("depends on", lambda q, k, v, mask: sdpa(q, k, v, attn_mask=mask),
                   lambda: [*qkv(), torch.rand(LENGTH, LENGTH) > 0.5], {}),
    "shared in float32": ("torch.float32", lambda q, k, v: sdpa(q, shared(k), shared(v)),
                          lambda: [heads(4, torch.float32), *(heads(2, torch.float32) for _ in range(2))], {}),
    "shared under a mask": ("with a mask", lambda q, k, v: window(q, shared(k), shared(v)),
                            lambda: [heads(4), heads(), heads()], {}),
    "FP8, masked": ("no mask but", window, lambda: qkv(width=64), DPA),
    "FP8, dropped": ("no dropout", lambda *x: sdpa(*x, dropout_p=0.5), lambda: qkv(width=64), DPA),
    "FP8, narrow": ("16 features", sdpa, qkv, DPA),
    "FP8, float64": ("float64", sdpa, lambda: qkv(width=64, dtype=torch.float64), DPA),
    "FP8, in vmap": ("vmap", lambda *x: torch.vmap(lambda *x: sdpa(*x))(*x), lambda: qkv(width=64), DPA),
    "FP8, excluded": ("exclude", sdpa, lambda: qkv(width=64), {**DPA, "exclude": "*"}),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_attention_that_keeps_something_says_what_to_do(name: str) -> None:
    expected, run, made, options = ATTENTIONS[name]
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in made()]
    reasons = [*reasons_in(te_compile.explain(With(lambda m, *x: run(*x)), *inputs, options=options))]
    assert any(expected in reason for reason in reasons), reasons
    assert {reason: found for reason in reasons if (found := faults(reason))} == {}


def test_a_mask_that_the_model_holds_says_that_it_may_hold_anything() -> None:
    model = With(lambda m, q, k, v: sdpa(q, k, v, attn_mask=m.causal))
    model.register_buffer("causal", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    (reason,) = reasons_in(te_compile.explain(model, *qkv()))
    assert "buffer or attribute causal" in reason and not faults(reason)


def test_a_mask_that_is_learned_is_called_a_bias() -> None:
    model = With(lambda m, q, k, v: sdpa(q, k, v, attn_mask=m.weight[:LENGTH, :LENGTH].to(q.dtype)))
    (reason,) = reasons_in(te_compile.explain(model, *qkv()))
    assert "made from weight" in reason and "a bias and no mask" in reason and not faults(reason)


def test_a_learned_bias_that_a_buffer_orders_is_called_one() -> None:
    def run(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        offsets = m.places[:, None] - m.places  # a window's, nearer to the bias than what is learned
        table = F.linear(m.places.float()[:, None].expand(-1, WIDTH), m.weight).sigmoid()
        return sdpa(q, k, v, attn_mask=(table[offsets.abs(), 0] * m.amounts).to(q.dtype))

    model = With(run)
    model.register_buffer("places", torch.arange(LENGTH))
    model.register_buffer("amounts", torch.ones(LENGTH))
    (reason,) = reasons_in(te_compile.explain(model, *qkv()))
    assert "made from weight" in reason and "a bias and no mask" in reason and not faults(reason)


def test_a_mask_that_a_learned_choice_made_is_no_bias() -> None:
    def run(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        best = m.weight[:LENGTH, :LENGTH].topk(4, dim=-1).indices
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).scatter(-1, best, False)
        return sdpa(q, k, v, attn_mask=torch.zeros(LENGTH, LENGTH, dtype=q.dtype).masked_fill(hidden, float("-inf")))

    (reason,) = reasons_in(te_compile.explain(With(run), *qkv()))
    assert "picked by numbers made with weight" in reason and not faults(reason)


def test_a_mask_from_before_a_graph_break_says_so() -> None:
    def run(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        torch._dynamo.graph_break()
        return sdpa(q, k, v, attn_mask=mask)

    (reason,) = reasons_in(te_compile.explain(With(run), *qkv()))
    assert "before a graph break" in reason and not faults(reason)


def test_what_devices_decide_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(device="cuda", capability=(8, 0))
    verdicts = [
        fp8_support.by_device(fake_site("xpu"), Options()),
        fp8_support.by_device(fake_site("cuda:0", "cuda:1"), Options()),
    ]
    monkeypatch.setattr(fp8_support.Target, "of", lambda device: old)
    verdicts.append(fp8_support.by_device(fake_site("cuda"), Options()))
    reasons = [verdict[1] for verdict in verdicts if verdict is not None]
    reasons += [reason for _, reason in by_cost([fake_site("cuda", tokens=16)], Options())]
    assert len(reasons) == len(verdicts) + 1 and not any(map(faults, reasons)), reasons


@pytest.mark.parametrize(("device", "host"), [(100.0, 400.0), (400.0, 100.0)], ids=["host", "device"])
def test_what_the_step_decides_says_what_to_do(device: float, host: float) -> None:
    reason = step_cost._reason(step_cost.Step(device, host), step_cost.Step(50.0, 60.0))
    assert not faults(reason) and ("mode='reduce-overhead'" in reason) == (host > device)


@pytest.mark.parametrize(
    "reason",
    (
        "",
        "something is the matter",
        "something is the matter; it is a pity",
        "something is the matter; nothing to do",
        "something is the matter; use another.",
        "; use another",
        "something is the matter; set dynamic=True",
        f"something is the matter; use {'x' * LONGEST}",
    ),
)
def test_a_reason_that_helps_nobody_is_found(reason: str) -> None:
    assert faults(reason)


def test_an_option_that_does_not_exist_is_found() -> None:
    with pytest.raises(te_compile.OptionError):
        faults("projection to logits; lm_haed=True puts it in FP8")


_REASONS = ("NotAWeightError", "NotAttentionError", "UnusualScoresError")


def _given_as_reasons(tree: ast.AST) -> Iterator[ast.expr]:
    """What is raised as a reason, handed to ``keep`` or returned by a function that says why."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        says_why = "why" in function.name or function.name.startswith("by_")
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in _REASONS:
                yield node.args[0]
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "keep":
                yield node.args[-1]
            elif isinstance(node, ast.Return) and says_why and node.value is not None:
                yield node.value.elts[-1] if isinstance(node.value, ast.Tuple) else node.value


def _without_advice(source: str) -> list[str]:
    """The texts in ``source`` that are reasons and have no second half."""
    written = [each for each in _given_as_reasons(ast.parse(source)) if isinstance(each, (ast.Constant, ast.JoinedStr))]
    return [text for each in written if (text := ast.unparse(each)) not in ("''", "None") and "; " not in text]


@pytest.mark.parametrize("file", sorted(Path(fp8_support.__file__).parent.glob("*.py")), ids=lambda file: file.stem)
def test_reasons_that_no_model_here_reaches_have_advice_too(file: Path) -> None:
    assert not _without_advice(file.read_text())


def test_a_reason_in_the_source_without_advice_is_found() -> None:
    assert len(_without_advice('def by_mood(site):\n    return Cause.RULE, f"it is {site.mood}"\n')) == 1
    assert len(_without_advice('def f(site):\n    site.keep(Cause.RULE, "no")\n    raise NotAWeightError("no")\n')) == 2
