"""One GPT layer, forward and backward: the layer of Transformer Engine's quickstart in plain PyTorch.

Hidden 4096, feed-forward 16384, 32 heads, 4 x 2048 tokens; LayerNorm, fused qkv, attention, tanh GELU, no final norm.
One row per variant: a training step (forward and backward, gradients dropped before), a forward without gradients, peak
memory. te_fp8's rows also say how far its output and gradients lie from the same weights in high precision.

One process times one variant after the other, and what ran before shows. ``--turns`` builds all variants, lets them
take turns and gives each the best of its medians.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import measure, peers
from benchmarks.measure import DEVICE, Context, Runnable, Variant

OUTPUT_DB, GRADIENT_DB = 20.0, 14.0
"""How many decibels of signal over error te_fp8's output and each of its gradients must keep."""

SAVING: dict[str, dict[str, Any]] = {
    "te_fp8_uncached": {"cache_weights": False},
    "te_fp8_save_memory": {"save_memory": True},
    "te_fp8_current_save_memory": {"recipe": "current", "save_memory": True},
}
"""Variants of te_fp8 that take less memory, and their options."""


@dataclass(frozen=True)
class Work:
    """The layer's shape and options."""

    hidden: int = 4096
    intermediate: int = 16384
    heads: int = 32
    sequence: int = 2048
    batch: int = 4
    attn: str = "sdpa"
    dtype: str = "bf16"
    dropout: float = 0.0
    micro_batches: int = 1
    autocast: bool = False

    @property
    def stored(self) -> torch.dtype:
        """The dtype of parameters, of x and of dy: under autocast that of products is another."""
        return torch.float32 if self.autocast else measure.DTYPES[self.dtype]


def within(work: Work, context: Context = nullcontext) -> Context:
    """``context``, and autocast around it if the work is done under one."""

    @contextmanager
    def both() -> Iterator[None]:
        with torch.autocast(DEVICE.type, measure.DTYPES[work.dtype]), context():
            yield

    return both if work.autocast else context


class Attention(nn.Module):
    """Causal SDPA, or matmul, softmax, matmul over the full matrix as the quickstart spells it."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v: [batch, sequence, heads, width]; returns [batch, sequence, hidden]."""
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        dropout = self.work.dropout if self.training else 0.0
        if self.work.attn == "sdpa":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        else:
            weights = torch.softmax(q @ k.transpose(-1, -2) / q.size(-1) ** 0.5, dim=-1)
            mixed = F.dropout(weights, dropout, self.training) @ v
        return mixed.transpose(1, 2).flatten(2)


class Layer(nn.Module):
    """The layer; ``norm`` and ``linear`` let a peer put in its own modules."""

    def __init__(self, work: Work, norm: Any = nn.LayerNorm, linear: Any = nn.Linear) -> None:
        super().__init__()
        self.heads, width = work.heads, work.hidden
        self.ln1, self.qkv = norm(width, eps=1e-5), linear(width, 3 * width)
        self.attention, self.proj = Attention(work), linear(width, width)
        self.dropout = nn.Dropout(work.dropout)
        self.ln2, self.fc1 = norm(width, eps=1e-5), linear(width, work.intermediate)
        self.fc2 = linear(work.intermediate, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, sequence, hidden]."""
        batch, sequence, width = x.shape
        heads = self.qkv(self.ln1(x)).view(batch, sequence, self.heads, 3 * width // self.heads)
        x = x + self.dropout(self.proj(self.attention(*heads.chunk(3, dim=-1))))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


def plain(work: Work, **modules: Any) -> nn.Module:
    """The layer on its device, in its dtype."""
    return Layer(work, **modules).to(DEVICE, work.stored)


def eager(work: Work) -> Runnable:
    """The layer as it is."""
    layer = plain(work)
    return Runnable(layer, layer, within(work))


def compiled(work: Work, **arguments: Any) -> Runnable:
    """The layer under torch.compile."""
    layer = plain(work)
    return Runnable(torch.compile(layer, **arguments), layer, within(work))


def variants(work: Work) -> Iterator[Variant]:
    """Every variant that this machine can run."""
    yield Variant("eager", partial(eager, work))
    yield Variant("compile", partial(compiled, work))
    yield Variant("compile_autotune", partial(compiled, work, mode="max-autotune-no-cudagraphs"))
    if peers.HAVE_TORCHAO:
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
            yield Variant(f"torchao_{recipe}", partial(torchao, work, recipe))
    if peers.HAVE_TRANSFORMER_ENGINE:
        yield Variant("te_linear_bf16", partial(transformer_engine_modules, work, None))
        yield Variant("te_linear_delayed", partial(transformer_engine_modules, work, "delayed"))
        yield Variant("te_layer_bf16", partial(transformer_engine_layer, work, None))
        for recipe in peers.TRANSFORMER_ENGINE_RECIPES:
            yield Variant(f"te_layer_{recipe}", partial(transformer_engine_layer, work, recipe))
    yield Variant("te_fp8", partial(compiled, work, backend="te_fp8"), ours=True)
    current = partial(compiled, work, backend="te_fp8", options={"recipe": "current"})
    yield Variant("te_fp8_current", current, ours=True)
    for name, options in SAVING.items():
        yield Variant(name, partial(compiled, work, backend="te_fp8", options=options), ours=True)


def torchao(work: Work, recipe: str) -> Runnable:
    """torchao's linears under torch.compile."""
    layer = peers.torchao_for_training(plain(work), recipe)
    return Runnable(torch.compile(layer), layer, within(work))


def transformer_engine_modules(work: Work, recipe: str | None) -> Runnable:
    """The same layer from Transformer Engine's LayerNorm and Linear."""
    layer = plain(work, **peers.transformer_engine_modules())
    return Runnable(layer, layer, within(work, peers.transformer_engine_context(recipe) if recipe else nullcontext))


def transformer_engine_layer(work: Work, recipe: str | None) -> Runnable:
    """Transformer Engine's fused layer."""
    shape, causal = (work.hidden, work.intermediate, work.heads), work.attn == "sdpa"
    layer = peers.transformer_engine_layer(*shape, work.stored, work.dropout, causal)
    return Runnable(layer, layer, within(work, peers.transformer_engine_context(recipe) if recipe else nullcontext))


def data(work: Work) -> tuple[Tensor, Tensor]:
    """The layer's input, which wants a gradient, and the gradient of its output."""
    shape = (work.batch, work.sequence, work.hidden)
    x, dy = (torch.randn(shape, device=DEVICE, dtype=work.stored) for _ in range(2))
    return x.requires_grad_(), dy


def train_step(runnable: Runnable, x: Tensor, dy: Tensor, micro_batches: int = 1) -> Tensor:
    """Forward and backward, with the gradients of the step before dropped; those of further micro-batches are added."""
    runnable.model.zero_grad(set_to_none=True)
    for _ in range(micro_batches):
        x.grad = None
        with runnable.context():
            y = runnable.call(x)
        y.backward(dy)
    return y.detach()


def results(runnable: Runnable, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """One step's output and all its gradients, by name."""
    output = train_step(runnable, x, dy)
    assert x.grad is not None
    return {"output": output, "input": x.grad.clone(), **measure.gradients(runnable.model)}


def check(runnable: Runnable, work: Work) -> dict[str, Any]:
    """Compare output and gradients with the same weights in eager high precision. Returns columns of the row.

    The third step counts: its scales come from the history, as in training; the first step measures its own data.
    """
    x, dy = data(work)
    expected = results(Runnable(runnable.model, runnable.model), x, dy)
    for _ in range(2):
        train_step(runnable, x, dy)
    found = results(runnable, x, dy)
    quality = {name: measure.sqnr(expected[name], found[name]) for name in expected}
    output_db = quality.pop("output")
    judged = measure.telling({name: expected[name] for name in quality})
    worst = min(judged, key=lambda name: -math.inf if math.isnan(quality[name]) else quality[name])
    row: dict[str, Any] = {"output_db": output_db, "gradient_db": quality[worst], "worst_gradient": worst}
    if not (output_db >= OUTPUT_DB and quality[worst] >= GRADIENT_DB):  # NaN is wrong too
        row["wrong"] = f"output {output_db:.1f} dB, gradient of {worst} {quality[worst]:.1f} dB"
    return row


def measure_variant(variant: Variant, work: Work, arguments: argparse.Namespace) -> dict[str, Any]:
    """Build, check if it is ours, time. Returns the columns of the row."""
    quality: dict[str, Any] = {}
    if variant.ours:  # dropout draws other masks in another graph, so it is off while comparing
        checked = next(each for each in variants(replace(work, dropout=0.0)) if each.name == variant.name)
        quality = check(checked.build(), work)
        measure.fresh_start()
    runnable = variant.build()
    x, dy = data(work)

    def forward() -> Any:
        with torch.no_grad(), runnable.context():
            return runnable.call(x)

    def step() -> Any:
        return train_step(runnable, x, dy, work.micro_batches)

    for _ in range(3):  # compiles, and lets caches and scales settle before memory is counted
        step()
    with measure.Memory() as memory:
        step_ms = measure.median_ms(step, arguments.iters, warmup=6)
    if arguments.profile:
        measure.print_kernels(step)
    forward_ms = measure.median_ms(forward, arguments.iters, warmup=6)
    return {"step_ms": step_ms, "fwd_nograd_ms": forward_ms, **memory.row(), **quality}


def in_turns(variants: Sequence[Variant], work: Work, rows: measure.Rows, what: dict[str, Any], most: int) -> None:
    """Write a row for each variant, timed in turns."""
    x, dy = data(work)

    def forward(each: Runnable) -> Any:
        with torch.no_grad(), each.context():
            return each.call(x)

    columns = {"step_ms": lambda each: train_step(each, x, dy, work.micro_batches), "fwd_nograd_ms": forward}
    measure.rows_in_turns(variants, columns, rows, what, most)


def main() -> int:
    """Measure every chosen variant; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    measure.add_arguments(parser, iterations=30)
    parser.add_argument("--dropout", type=float, help="0.1 with --attn eager, as in the quickstart, else 0")
    parser.add_argument("--autocast", action="store_true", help="parameters in fp32, products in --dtype")
    parser.add_argument("--micro-batches", type=int, default=1, help="whose gradients a step adds up (%(default)s)")
    arguments = parser.parse_args()
    if arguments.micro_batches < 1:
        parser.error(f"--micro-batches {arguments.micro_batches}: at least 1")
    dropout = arguments.dropout if arguments.dropout is not None else (0.1 if arguments.attn == "eager" else 0.0)
    given = {name: getattr(arguments, name) for name in ("attn", "dtype", "micro_batches", "autocast")}
    work = Work(dropout=dropout, **given)
    if DEVICE.type == "cpu":
        work = replace(work, hidden=256, intermediate=1024, heads=4, sequence=64, batch=2)
        arguments.iters = min(arguments.iters, 3)
    rows = measure.Rows(arguments.out)
    measure.describe_device(rows)
    what, chosen = {"what": "layer", **asdict(work)}, measure.chosen(variants(work), arguments.only)
    if arguments.turns:
        in_turns(chosen, work, rows, what, arguments.iters)
    else:
        for variant in chosen:
            measure.attempt(variant, rows, what, lambda each: measure_variant(each, work, arguments))
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
