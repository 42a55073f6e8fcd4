"""Linears that are judged: small models, and their plans after selection."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from te_compile.options import Options
from te_compile.passes.plan import Plan, Site
from te_compile.passes.select import select_linears
from tests.capturing import regions_and_plan


def planned(run: Callable[..., Any], *inputs: Any, **options: Any) -> Plan:
    """The plan after selection."""
    _, plan = regions_and_plan(run, *inputs)
    select_linears(plan, Options.resolve(options))
    return plan


def verdict(run: Callable[..., Any], *inputs: Any, **options: Any) -> Site:
    """The only site."""
    (site,) = planned(run, *inputs, **options).sites
    return site


class Named(nn.Module):
    """Linears under names of a test's choosing, all applied to one input."""

    def __init__(self, **sizes: tuple[int, int]) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(*size))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [module(x).sin() for module in self.children()]


def fake_site(x_device: str, weight_device: str | None = None, tokens: int = 8192) -> Any:
    """A site whose operands only claim to live somewhere."""

    def node(device: str, *shape: int) -> Any:
        value = SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16, shape=shape)
        return SimpleNamespace(meta={"example_value": value})

    return SimpleNamespace(
        x=node(x_device, tokens, 64), weight=node(weight_device or x_device, 64, 64), tokens=tokens, features=(64, 64),
        padding=(0, 0), linears=1, ends=None, spell=None,
    )  # fmt: skip
