"""The numbers that tensors of a graph are, and those that they are made from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from te_compile.passes.mask_numbers import is_zero_or_hidden, may_hide, number_in, numbers_behind
from tests.capturing import captured

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Make = Callable[[Tensor], Tensor]


def made(make: Make) -> Node:
    """The node of what ``make`` returns for a tensor [4]."""
    gm, _ = captured(lambda x: (make(x) * x).sum(), torch.randn(4, requires_grad=True))
    *_, product = (node for node in gm.graph.nodes if "mul" in str(node.target))
    result = product.args[0]
    assert isinstance(result, Node)
    return result


def written(x: Tensor) -> Tensor:
    copy = torch.zeros(1).repeat(4)
    copy[2] = 1.0
    return copy


@pytest.mark.parametrize(("make", "number"), [
    (lambda x: torch.ones(4).view(2, 2).flatten(), 1.0),
    (lambda x: torch.full((4,), -1e9).to(torch.float16), float("-inf")),
    (lambda x: torch.full((4,), 0.3, dtype=torch.bfloat16).float(), 0.30078125),
    (lambda x: torch.full((4,), 2.7).to(torch.int64), 2.0),
    (lambda x: torch.tensor(3).expand(4).float(), 3.0),
    (written, None),
    (lambda x: torch.arange(4).float(), None),
    (lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0]), None),
])  # fmt: skip
def test_the_number_that_all_elements_are(make: Make, number: float | None) -> None:
    assert number_in(made(make)) == number


@pytest.mark.parametrize(("make", "numbers"), [
    (lambda x: (x > 0).float() * -1e9, [-1e9]),
    (lambda x: (x > 0) * 10**9, [1e9]),
    (lambda x: torch.tensor([0.0, -1e30])[(x > 0).long()], [-1e30]),
    (lambda x: torch.where(x > 0, 0.0, -10_000_000), [-1e7]),
    (lambda x: (torch.arange(20000)[:4] + x.detach()) * 0.5, []),
    (lambda x: torch.softmax(x * 1e9, -1), []),
])  # fmt: skip
def test_the_numbers_that_could_hide(make: Make, numbers: list[float]) -> None:
    node = made(make)
    assert list(numbers_behind(node, {})) == numbers and may_hide(node, {}) == bool(numbers)


def test_what_is_zero_or_hides() -> None:
    assert is_zero_or_hidden(made(lambda x: torch.where(x > 0, torch.zeros(()), -1e9)), {})
    assert is_zero_or_hidden(made(lambda x: torch.zeros(4).masked_fill(x > 0, float("-inf"))), {})
    assert not is_zero_or_hidden(made(lambda x: torch.where(x > 0, 0.0, -5.0)), {})
    assert not is_zero_or_hidden(made(lambda x: written(x).masked_fill(x > 0, float("-inf"))), {})
