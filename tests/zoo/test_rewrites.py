"""The passes take the graphs of every architecture: none fails, with blocks that are checkpointed and without.

What comes out of them is compiled and held against high precision elsewhere (``test_acceptance``, ``make zoo``), which
takes five times as long.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

pytest.importorskip("transformers", reason="the zoo is made of Hugging Face models")

from te_compile import backend
from te_compile.passes import manager
from tests.compiling import know_the_backend
from tests.conftest import ORDER_VARIABLE
from tests.zoo.case import Architecture, Case, NotSupportedError, Setting
from tests.zoo.models import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _trained(architecture: Architecture, attention: str) -> Case:
    """In training, with this kind of attention and with checkpoints, or as near to that as it can be."""
    other = "eager" if attention == "sdpa" else "sdpa"
    for kind, checkpointed in ((attention, True), (other, True), (attention, False), (other, False)):
        try:
            return architecture.case(Setting(True, kind, checkpointed))
        except NotSupportedError:
            pass
    raise AssertionError(f"{architecture.name} trains in no setting")


def _todays_attention() -> list[tuple[str, str]]:
    draw = random.Random(os.environ.get(ORDER_VARIABLE))
    return [(name, draw.choice(["sdpa", "eager"])) for name in ARCHITECTURES]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "attention"), _todays_attention())
def test_the_passes_take_every_architecture(architecture: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any) -> Callable[..., Any]:
        return lambda *_: None

    def rewritten(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        backend.te_fp8(gm, example_inputs)
        return gm.forward  # the graph as it was, for the rest of the model

    know_the_backend()
    case = _trained(ARCHITECTURES[architecture], attention)
    monkeypatch.setattr(backend, "compiler_of", lambda _: nothing)
    with manager.recording() as records:
        torch.compile(case.model, backend=rewritten)(**case.inputs)
    assert any(record.plan.sites for record in records)
