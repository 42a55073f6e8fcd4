"""What te_fp8 does to a model takes as long for each layer as for the one before it.

Time is not measured: a busy machine would decide. Every line of the package that runs is counted instead, by function
and for three depths. What grows evenly adds the same for each layer; what looks at all layers from each of them adds
more and more.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import te_compile
from te_compile.backend import rewrite
from te_compile.options import Options
from te_compile.passes import JOINT_PASSES, manager
from te_compile.passes.manager import Compilation
from te_compile.passes.plan import Plan
from tests.compiling import relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PACKAGE = str(Path(te_compile.__file__).parent)
HIDDEN, HEADS, TOKENS = 32, 2, 16
DEPTHS = (3, 6, 9)
EVEN = 1.2  # how much more the last layers may add than those before them


class Attention(nn.Module):
    """Spelled out, with its slice of a mask that all layers share, or with heads of keys repeated for SDPA."""

    def __init__(self, spelled: bool) -> None:
        super().__init__()
        self.spelled = spelled
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        if self.spelled:
            scores = q @ k.transpose(2, 3) * 0.25 + mask[:, :, :, : x.shape[1]]
            out = F.softmax(scores, dim=-1) @ v
        else:
            k, v = (each[:, :1, None].expand(-1, 1, HEADS, -1, -1).reshape(q.shape) for each in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, :, :, : x.shape[1]])
        return self.o(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, spelled: bool) -> None:
        super().__init__()
        self.attention = Attention(spelled)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norms[0](x), mask), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), 0.1, self.training)


class Stack(nn.Module):
    """Layers under a mask that the call decides, all of them in one checkpoint if that is asked for."""

    def __init__(self, depth: int, spelled: bool = True, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(spelled) for _ in range(depth))
        self.checkpointed = checkpointed

    def body(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        mask = torch.where(padding[:, None, None, :], 0.0, torch.finfo(x.dtype).min)
        mask = mask.expand(-1, 1, x.shape[1], -1)
        return checkpoint(self.body, x, mask, use_reentrant=False) if self.checkpointed else self.body(x, mask)


def passed_on(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A decorator of forward whose frame has the module as the first of a tuple, as Hugging Face's are."""

    @functools.wraps(method)
    def wrapper(*args: Any) -> Tensor:
        return method(*args)

    return wrapper


class Decorated(Stack):
    """Layers whose forward is decorated."""

    forward = passed_on(Stack.forward)


class Perceptron(nn.Module):
    """A residual stream whose sums dropout keeps out of the products: one chain of pointwise nodes, end to end."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(HIDDEN, 2 * HIDDEN) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(2 * HIDDEN, HIDDEN) for _ in range(depth))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + F.dropout(down(F.gelu(up(x))), 0.1, self.training)
        return x


def functional(depth: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Linears of a function that calls no module."""
    weights = [nn.Parameter(torch.randn(HIDDEN, HIDDEN) / HIDDEN) for _ in range(4 * depth)]

    def run(x: Tensor, padding: Tensor) -> Tensor:
        for weight in weights:
            x = x + F.gelu(F.linear(x, weight))
        return x

    return run


def inputs() -> tuple[Tensor, Tensor]:
    padding = torch.ones(2, TOKENS, dtype=torch.bool)
    padding[0, -4:] = False
    return torch.randn(2, TOKENS, HIDDEN), padding


@contextmanager
def counting(lines: Counter[str]) -> Iterator[None]:
    """Count the lines of the package that run inside, by file and function."""

    def each_line(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if event == "line":
            lines[f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_firstlineno} {code.co_name}"] += 1
        return each_line

    def each_call(frame: FrameType, event: str, argument: Any) -> Any:
        return each_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(each_call)
    try:
        yield
    finally:
        sys.settrace(before)


def lines_of_rewriting(run: Callable[..., Tensor]) -> Counter[str]:
    """What the passes on Dynamo's graph run."""
    lines: Counter[str] = Counter()

    def backend(gm: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        chosen = Options.resolve({"cost_model": False})
        with counting(lines):
            rewrite(gm, examples, chosen, manager.begin(Plan(), chosen.recipe.key(), chosen.key()))
        raise Seen

    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="Seen"):
        torch.compile(run, backend=backend)(*inputs())
    return lines


class Seen(Exception):
    """Enough was seen: what follows would take most of the time and is not counted."""


def lines_of_joint_passes(run: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What the passes on the joint graph run."""
    lines: Counter[str] = Counter()
    whole = Compilation.run

    def counted(compilation: Compilation, name: str, *given: Any) -> int:
        with counting(lines):
            changed = whole(compilation, name, *given)
        if name == JOINT_PASSES[-1].__name__:
            raise Seen
        return changed

    torch._dynamo.reset()
    with monkeypatch.context() as patch:
        patch.setattr(Compilation, "run", counted)
        with pytest.raises(BackendCompilerFailed, match="Seen"):
            torch.compile(run, backend="te_fp8", options={"compiler": "aot_eager", "cost_model": False})(*inputs())
    return lines


def uneven(counts: Sequence[Counter[str]]) -> dict[str, tuple[int, ...]]:
    """The functions of which the last layers run more lines than those before them did, with all their counts."""
    small, middle, large = counts
    return {
        name: (small[name], middle[name], large[name])
        for name in large
        if large[name] - middle[name] > EVEN * (middle[name] - small[name]) + 20
    }


MODELS: dict[str, Callable[[int], Callable[..., Tensor]]] = {
    "spelled-out attention": Stack,
    "repeated heads": lambda depth: Stack(depth, spelled=False),
    "layers in one checkpoint": lambda depth: Stack(depth, checkpointed=True),
    "a decorated method": Decorated,
    "a function": functional,
}


@pytest.mark.parametrize("kind", MODELS)
def test_rewriting_takes_the_same_for_every_layer(kind: str) -> None:
    assert uneven([lines_of_rewriting(MODELS[kind](depth)) for depth in DEPTHS]) == {}


def test_the_joint_passes_take_the_same_for_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert uneven([lines_of_joint_passes(Perceptron(depth), monkeypatch) for depth in DEPTHS]) == {}


def test_a_deep_model_trains_as_in_high_precision() -> None:
    """Four times as deep as any other model of these tests."""
    model = Perceptron(24).eval()
    x, padding = inputs()
    expected = model(x, padding)
    gradients = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    compiled = torch.compile(model, backend="te_fp8", options={"compiler": "aot_eager", "cost_model": False})
    got = compiled(x, padding)
    assert relative_error(got, expected) < 0.1
    for ours, theirs in zip(torch.autograd.grad(got.square().sum(), list(model.parameters())), gradients, strict=True):
        assert relative_error(ours, theirs) < 0.25
