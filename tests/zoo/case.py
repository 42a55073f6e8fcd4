"""A small model with random weights and one call of it: what the whole-model tests train and evaluate.

Nothing is downloaded. Every width is a multiple of 16 unless the architecture forbids it, so that FP8 really runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map

VOCABULARY, WIDTH, INNER, LAYERS, HEADS = 128, 64, 128, 2, 4
BATCH, LENGTH = 2, 32


@dataclass(frozen=True)
class Setting:
    """How a model is built and called. ``attention``: "sdpa" or "eager"; ``checkpointed``: activations, in training."""

    train: bool = True
    attention: str = "sdpa"
    checkpointed: bool = False

    def __str__(self) -> str:
        what = "train, checkpointed" if self.checkpointed else "train" if self.train else "inference"
        return f"{what}, {self.attention}"


@dataclass(frozen=True)
class Place:
    """Where a model runs, and in what precision before FP8.

    On a CPU operators run one by one, and dropout draws the same numbers with te_fp8 as without. On a GPU Inductor
    compiles them and attention takes whatever kernel it likes, so dropout is off.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    @property
    def options(self) -> dict[str, Any]:
        """How te_fp8 is asked to compile there. Small models gain nothing on a GPU; that is not asked here."""
        if self.device == "cpu":
            return {"compiler": "aot_eager"}
        return {"compiler": "inductor", "cost_model": False, "fallback_random": True}

    def __str__(self) -> str:
        return "a CPU" if self.device == "cpu" else f"a GPU, in {self.dtype}".replace("torch.", "")


@dataclass
class Case:
    """A model and one call of it."""

    model: nn.Module
    inputs: dict[str, Any]

    def at(self, place: Place) -> Case:
        """The same there; the model is moved, the inputs are copied."""
        if place.device != "cpu":
            _without_dropout(self.model)

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(place.device, place.dtype if value.is_floating_point() else value.dtype)

        # Not model.to(dtype), which makes real numbers of complex ones.
        return Case(self.model._apply(moved), tree_map(moved, self.inputs))


def _without_dropout(model: nn.Module) -> None:
    """Set every probability of dropping to 0, in modules and in the configurations that they keep."""
    holders = [*model.modules(), *{id(c): c for m in model.modules() if (c := getattr(m, "config", None))}.values()]
    for holder in holders:
        for name, value in list(vars(holder).items()):
            if isinstance(value, float) and ("drop" in name or (isinstance(holder, nn.Dropout) and name == "p")):
                setattr(holder, name, 0.0)


class NotSupportedError(Exception):
    """The architecture has no such setting."""


@dataclass(frozen=True)
class Architecture:
    """A model of a kind ("decoder", "experts" …) that is built for each setting anew."""

    name: str
    kind: str
    build: Callable[[Setting], Case]

    def case(self, setting: Setting) -> Case:
        """The model in ``setting``, and its inputs."""
        case = self.build(setting)
        case.model.train(setting.train)
        if setting.checkpointed:
            if not getattr(case.model, "supports_gradient_checkpointing", False):
                raise NotSupportedError("it has no gradient checkpointing")
            case.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return case

    def with_labels(self, case: Case, setting: Setting) -> Case | None:
        """``case`` called as in training, where the model then returns a loss of its own; None where it does not."""
        labelled = self.build(replace(setting, train=True)).inputs
        return Case(case.model, labelled) if labelled.keys() != case.inputs.keys() else None


def from_transformers(
    name: str, kind: str, config: str, model: str, inputs: Callable[[Any, Setting], dict[str, Any]], **settings: Any
) -> Architecture:
    """An architecture of transformers by the names of its two classes and the settings of its configuration."""

    def build(setting: Setting) -> Case:
        configuration = getattr(transformers, config)(**settings)
        configuration._attn_implementation = setting.attention
        try:
            made = getattr(transformers, model)(configuration)
        except (ValueError, ImportError) as error:
            if "attention" in str(error):
                raise NotSupportedError(f"it has no attention of the kind {setting.attention}") from None
            raise
        return Case(made, inputs(configuration, setting))

    return Architecture(name, kind, build)


def loss_of(output: Any) -> Tensor:
    """The model's own loss if it gives one, else the mean square of its first result."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    if isinstance(output, tuple) and isinstance(output[-1], Tensor) and output[-1].dim() == 0:
        return output[-1]
    first = output if isinstance(output, Tensor) else output[0]
    return first.float().square().mean()


def tokens(length: int = LENGTH, batch: int = BATCH) -> Tensor:
    """Random text without the special tokens at the vocabulary's ends."""
    return torch.randint(3, VOCABULARY - 10, (batch, length))


def images(batch: int = BATCH) -> Tensor:
    """Random pictures."""
    return torch.randn(batch, 3, 32, 32)
