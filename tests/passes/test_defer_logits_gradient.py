"""Logits beside a loss are returned detached, with a ticket; others are returned as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.ops.cross_entropy import CROSS_ENTROPY_DEFERRED
from te_compile.passes.defer_logits_gradient import defer_logits_gradient
from te_compile.passes.drop_noop_casts import drop_noop_casts
from te_compile.passes.lower_losses import lower_losses
from te_compile.passes.text import ops_text
from tests.capturing import captured

CLASSES = 1030
pytestmark = pytest.mark.usefixtures("fresh_dynamo", "loss_kernels")


def deferred(function: Callable[..., Any], x: Tensor, labels: Tensor) -> tuple[list[int], str]:
    """What the pass returns for the graph of ``function``, and the text of that after it."""
    module, _ = captured(function, x, labels)
    drop_noop_casts(module.graph)
    lower_losses(module.graph)
    places = defer_logits_gradient(module.graph)
    module.graph.lint()
    assert len(module.graph.find_nodes(op="call_function", target=CROSS_ENTROPY_DEFERRED)) == len(places)
    return places, ops_text(module.graph)


def inputs(wants_gradient: bool = True) -> tuple[Tensor, Tensor]:
    """Hidden states [B, S, K] and labels [B, S]."""
    hidden = torch.randn(2, 3, 16, dtype=torch.bfloat16, requires_grad=wants_gradient)
    return hidden, torch.randint(0, CLASSES, (2, 3))


def head(x: Tensor) -> Tensor:
    """Logits [B, S, V]."""
    return x @ torch.ones(16, CLASSES, dtype=x.dtype)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().view(-1, CLASSES), labels.view(-1))


def test_the_graph_after() -> None:
    def function(x: Tensor, labels: Tensor) -> Any:
        logits = head(x)
        return loss_of(logits, labels), logits

    places, text = deferred(function, *inputs())
    assert places == [1]
    assert "te.cross_entropy_deferred(reshape, view_1, -100, 'mean', float32)" in text
    assert "detach = .detach(logits)" in text
    assert text.splitlines()[-1].endswith("return (getitem, detach, getitem_1)"), text


@pytest.mark.parametrize("shape", [(-1, CLASSES), (6, CLASSES), (2, 3, CLASSES)], ids=str)
def test_logits_in_another_shape_count(shape: tuple[int, ...]) -> None:
    def function(x: Tensor, labels: Tensor) -> Any:
        logits = (head(x)).view(shape)
        return logits, F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))

    places, _ = deferred(function, *inputs())
    assert places == [0]


def not_returned(x: Tensor, labels: Tensor) -> Any:
    return loss_of(head(x), labels)


def something_else_returned(x: Tensor, labels: Tensor) -> Any:
    logits = head(x)
    return loss_of(logits, labels), logits + 1


def returned_in_another_dtype(x: Tensor, labels: Tensor) -> Any:
    logits = head(x)
    wide = logits.float()
    return loss_of(wide, labels), wide


def some_returned(x: Tensor, labels: Tensor) -> Any:
    logits = head(x)
    return loss_of(logits, labels), logits[:, :2]


def returned_detached(x: Tensor, labels: Tensor) -> Any:
    logits = head(x)
    return loss_of(logits, labels), logits.detach()


@pytest.mark.parametrize(
    "function", [not_returned, something_else_returned, returned_in_another_dtype, some_returned, returned_detached]
)
def test_other_outputs_stay(function: Callable[..., Any]) -> None:
    places, text = deferred(function, *inputs())
    assert places == [] and "deferred" not in text


def test_logits_without_a_gradient_stay() -> None:
    def function(x: Tensor, labels: Tensor) -> Any:
        logits = head(x)
        return loss_of(logits, labels), logits

    assert deferred(function, *inputs(wants_gradient=False))[0] == []
