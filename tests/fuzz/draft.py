"""A program while it is being written: each step runs at once, so that its shapes are known and nonsense is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.program import NAMES, Input, Step

LARGEST = 20_000  # elements of a tensor: programs are many, so each is small
LARGEST_ON_GPU = 400_000
WILD = 1e4  # a value beyond this makes every comparison about overflow


@dataclass
class Draft:
    """``dtype``: of parameters and inputs. ``scope``: what the variables hold, under the module's own ``self``.
    ``largest``: how many elements a tensor may have."""

    random: random.Random
    dtype: torch.dtype = torch.float32
    largest: int = LARGEST
    inputs: list[Input] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    scope: dict[str, Any] = field(default_factory=lambda: {**NAMES, "self": nn.Module()})
    variables: list[str] = field(default_factory=list)
    linears: list[tuple[str, str, tuple[int, int]]] = field(default_factory=list)
    block: int = 0
    block_kind: str = ""
    named: int = 0

    def fresh(self, prefix: str) -> str:
        """A name that nothing has yet."""
        self.named += 1
        return f"{prefix}{self.named}"

    def add_input(self, shape: Sequence[int], dtype: torch.dtype, **more: Any) -> str:
        """An input of the call."""
        given = Input(self.fresh("x"), tuple(shape), dtype, **more)
        self.inputs.append(given)
        self.scope[given.name] = given.draw().detach()
        if dtype.is_floating_point:
            self.variables.append(given.name)
        return given.name

    def of(self, name: str) -> Tensor:
        """What variable ``name`` holds."""
        value: Tensor = self.scope[name]
        return value

    def pick(self, fits: Callable[[Tensor], bool] = lambda value: True, recent: float = 0.6) -> str | None:
        """A variable that ``fits``; with the chance ``recent`` the newest."""
        names = [name for name in self.variables if fits(self.of(name))]
        if not names:
            return None
        return names[-1] if self.random.random() < recent else self.random.choice(names)

    def partner(self, name: str) -> str | None:
        """Another variable of the same shape, or now and then one that is broadcast to it or it to that one."""
        shape, others = self.of(name).shape, [other for other in self.variables if other != name]
        alike = [other for other in others if self.of(other).shape == shape]
        broadcast = [other for other in others if other not in alike and _is_broadcast(shape, self.of(other).shape)]
        names = broadcast if broadcast and (not alike or self.chance(0.3)) else alike
        return self.random.choice(names) if names else None

    def step(
        self, code: str, *reads: str, init: Sequence[str] = (), makes: int = 1, effect: bool = False
    ) -> tuple[str, ...]:
        """Run a step and keep it; the names that it made, or nothing where it cannot run."""
        if effect and init and self.block_kind == "checkpoint":
            return ()  # a buffer that a checkpointed block writes to is written twice by eager, and not captured
        names = tuple(self.fresh("v") for _ in range(makes))
        added = Step(code, reads, names, tuple(init), effect, self.block)
        try:
            self._run(added)
        except Exception:  # the dice made a step that eager PyTorch refuses
            return ()
        results = [self.scope[name] for name in names]
        if any(not isinstance(r, Tensor) or r.numel() > self.largest or not r.numel() or _is_wild(r) for r in results):
            return ()
        self.steps.append(added)
        self.variables += [n for n in names if self.of(n).is_floating_point() and n not in self.variables]
        return names

    def _run(self, step: Step) -> None:
        module = self.scope["self"]
        for line in step.init:
            if not hasattr(module, line.split(" ")[0].removeprefix("self.")):
                exec(line, self.scope)
        inside = torch.autocast("cpu", torch.bfloat16, enabled=self.block_kind == "autocast")
        if self.block_kind == "no_autocast":
            inside = torch.autocast("cpu", enabled=False)
        with torch.no_grad(), inside if self.block_kind.endswith("autocast") else torch.no_grad():
            exec(step.text(), self.scope)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def one_of(self, *options: Any) -> Any:
        return self.random.choice(options)

    def parameter(self, name: str, *shape: int, scale: str = "", dtype: torch.dtype | None = None) -> list[str]:
        """The line of ``__init__`` that makes a parameter, now and then a frozen one."""
        sizes = ", ".join(map(str, shape))
        chosen = self.dtype if dtype is None else dtype
        kind = "" if chosen == torch.float32 else f", dtype={chosen}"
        frozen = ", requires_grad=False" if self.chance(0.07) else ""
        return [f"self.{name} = nn.Parameter(torch.randn({sizes}{kind}){scale}{frozen})"]

    def module_kind(self) -> str:
        """The dtype argument of a module's constructor."""
        return "" if self.dtype == torch.float32 else f", dtype={self.dtype}"


def _is_broadcast(one: Sequence[int], other: Sequence[int]) -> bool:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def _is_wild(value: Tensor) -> bool:
    return value.is_floating_point() and not bool((value.abs() < WILD).all())
