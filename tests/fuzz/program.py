"""A random program as data, and as the Python text of a module that a person can read and a test can keep.

A program is a list of steps. A step reads variables and makes new ones by a line of code in which ``{0}`` stands for
the first variable read and ``{o0}`` for the first one made; what it needs of the module, such as a parameter, it makes
by lines of ``__init__``. Because steps are data, a failing program can lose some of them and still be a program.
"""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, groupby
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

_inline = False


def checkpoint(function: Callable[..., Any], *inputs: Any) -> Any:
    """Activation checkpointing of ``function``, or a plain call inside :func:`inline_checkpoints`."""
    return function(*inputs) if _inline else torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)


@contextmanager
def inline_checkpoints() -> Iterator[None]:
    """Compute nothing twice: an emulation draws its scales as it goes."""
    global _inline
    _inline = True
    try:
        yield
    finally:
        _inline = False


NAMES: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "Tensor": Tensor, "checkpoint": checkpoint}
"""What the code of a step may name besides its variables and ``self``."""

CONTEXTS = {
    "no_grad": "with torch.no_grad():",
    "grad_disabled": "with torch.set_grad_enabled(False):",
    "autocast": 'with torch.autocast("{device}", torch.bfloat16):',
    "no_autocast": 'with torch.autocast("{device}", enabled=False):',
}
"""Blocks of steps that run under a ``with``; the other kind of block is "checkpoint"."""

_NUMBERS = count()


@dataclass(frozen=True)
class Step:
    """One operation. ``effect``: it changes something that is not its result, so it counts even if nobody reads it.

    ``block`` is 0, or the number of the block that it shares with its neighbours.
    """

    code: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    init: tuple[str, ...] = ()
    effect: bool = False
    block: int = 0

    def text(self) -> str:
        """Its code with the names of its variables."""
        return self.code.format(*self.reads, **{f"o{i}": name for i, name in enumerate(self.makes)})


@dataclass(frozen=True)
class Input:
    """A tensor of the call. ``grows``: its first dimension may change from call to call."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    grows: bool = False

    def draw(self, more: int = 0) -> Tensor:
        """Random values; ``more`` rows than usual where it grows."""
        shape = (self.shape[0] + more, *self.shape[1:]) if self.grows else self.shape
        if self.dtype == torch.bool:
            return torch.rand(shape) < 0.8
        if self.dtype == torch.int64:
            return torch.randint(0, 16, shape)
        return torch.randn(shape).to(self.dtype).requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Setting:
    """How a program is run: so many ``calls`` after one another, their gradients added up if they ``accumulate``."""

    recipe: str = "delayed"
    compiler: str = "aot_eager"
    autocast: bool = False
    evaluate: bool = False
    dynamic: bool = False
    device: str = "cpu"
    calls: int = 2
    accumulate: bool = False
    save_memory: bool = False
    cache_weights: bool = True
    skip_passes: tuple[str, ...] = ()
    mode: str | None = None

    def options(self) -> dict[str, Any]:
        """te_fp8's. Programs are too small to gain anything on a GPU; that is not asked."""
        chosen: dict[str, Any] = {"recipe": self.recipe, "compiler": self.compiler, "save_memory": self.save_memory}
        if not self.cache_weights:
            chosen["cache_weights"] = False
        if self.skip_passes:
            chosen["skip_passes"] = self.skip_passes
        if self.mode is not None:
            chosen["mode"] = self.mode
        return chosen if self.device == "cpu" else {**chosen, "cost_model": False}

    def text(self) -> str:
        """The keyword arguments that differ from the defaults."""
        given = {name: value for name, value in vars(self).items() if value != getattr(Setting, name)}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())


@dataclass(frozen=True)
class Program:
    """``blocks`` maps the numbers of blocks to their kinds; ``seed`` draws the values of parameters and inputs."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    setting: Setting = Setting()
    blocks: tuple[tuple[int, str], ...] = ()
    seed: int = 0

    def source(self, name: str = "Model") -> str:
        """The text of an nn.Module that runs the steps."""
        kinds = dict(self.blocks)
        methods: list[str] = []
        body: list[str] = []
        done = 0
        for block, members in groupby(self.steps, lambda step: step.block):
            steps = list(members)
            done += len(steps)
            lines = [line for step in steps for line in step.text().splitlines()]
            kind = kinds.get(block) if block else None
            if kind == "checkpoint":
                taken, given = self._crossing(steps, self.steps[done:])
                arguments, results = ", ".join(taken), ", ".join(given)
                head = f"def block_{block}(self, {arguments}):"
                methods.append("\n".join([head, textwrap.indent("\n".join([*lines, f"return {results}"]), "    ")]))
                body.append(f"{results} = checkpoint(self.block_{block}, {arguments})")
            elif kind is not None:
                body += [CONTEXTS[kind].format(device=self.setting.device), *(f"    {line}" for line in lines)]
            else:
                body += lines
        init = ["super().__init__()", *dict.fromkeys(line for step in self.steps for line in step.init)]
        arguments = ", ".join(each.name for each in self.inputs)
        result = self.outputs[0] if len(self.outputs) == 1 else f"({', '.join(self.outputs)})"
        forward = "\n".join([f"def forward(self, {arguments}):", _indented([*body, f"return {result}"])])
        parts = ["\n".join(["def __init__(self):", _indented(init)]), *methods, forward]
        return f"class {name}(nn.Module):\n" + textwrap.indent("\n\n".join(parts), "    ") + "\n"

    def _crossing(self, steps: list[Step], after: tuple[Step, ...]) -> tuple[list[str], list[str]]:
        """What a block reads from before it, and what of it is read behind it."""
        made = {name for step in steps for name in step.makes}
        taken = dict.fromkeys(name for step in steps for name in step.reads if name not in made)
        wanted = {name for step in after for name in step.reads} | set(self.outputs)
        given = dict.fromkeys(name for step in steps for name in step.makes if name in wanted)
        return list(taken), list(given) or [steps[-1].makes[0]]

    def build(self) -> nn.Module:
        """The module, with parameters drawn from the seed."""
        text, file = self.source(), f"<random program {next(_NUMBERS)}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # Dynamo and tracebacks read it
        scope = dict(NAMES)
        exec(compile(text, file, "exec"), scope)
        torch.manual_seed(self.seed)
        model: nn.Module = scope["Model"]()
        return model

    def draw_inputs(self, more: int = 0) -> tuple[Tensor, ...]:
        """The inputs of a call, from the seed."""
        torch.manual_seed(self.seed + 1)
        return tuple(each.draw(more) for each in self.inputs)

    def without_dead_steps(self) -> Program:
        """Without the steps that nothing depends on, and the inputs that nobody reads."""
        wanted, kept = set(self.outputs), []
        for step in reversed(self.steps):
            if step.effect or wanted & set(step.makes):
                kept.append(step)
                wanted |= set(step.reads)
        inputs = tuple(each for each in self.inputs if each.name in wanted)
        return replace(self, steps=tuple(reversed(kept)), inputs=inputs)

    def renamed(self, old: str, new: str) -> Program:
        """With ``new`` read wherever ``old`` was."""
        steps = tuple(replace(s, reads=tuple(new if r == old else r for r in s.reads)) for s in self.steps)
        return replace(self, steps=steps, outputs=tuple(new if o == old else o for o in self.outputs))

    def test_text(self, name: str = "test_found") -> str:
        """A test that runs it, to be kept in test_found.py."""
        drawn = ", ".join(_drawn(each) for each in self.inputs)
        setting = self.setting.text()
        call = f"check(Case(Model, lambda more: ({drawn},){f', Setting({setting})' if setting else ''}))"
        return f"def {name}() -> None:\n" + textwrap.indent(f"{self.source()}\n{call}\n", "    ")


def _indented(lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines), "    ")


def _drawn(each: Input) -> str:
    first, *others = map(str, each.shape)
    sizes = ", ".join([f"{first} + more" if each.grows else first, *others])
    if each.dtype == torch.bool:
        return f"torch.rand({sizes}) < 0.8"
    if each.dtype == torch.int64:
        return f"torch.randint(0, 16, ({sizes},))"
    arguments = [sizes]
    if each.dtype != torch.float32:
        arguments.append(f"dtype={each.dtype}")
    if each.requires_grad:
        arguments.append("requires_grad=True")
    return f"torch.randn({', '.join(arguments)})"
