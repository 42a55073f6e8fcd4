"""The part of a bias that learns and is one for a batch: found where its gradient is the sum of the whole's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.passes.captured_nodes import argument, value_of
from te_compile.passes.shared_biases import shared_part
from tests.capturing import captured

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH, HEADS, LENGTH = 3, 2, 6
LOWEST = torch.finfo(torch.float32).min
Made = Callable[[Tensor, Tensor], Tensor]


def shared(*sizes: int) -> Tensor:
    return torch.randn(*sizes, HEADS, LENGTH, LENGTH, requires_grad=True)


def there() -> Tensor:
    """[B, Sk]; each row sees some keys."""
    return torch.arange(LENGTH)[None] <= torch.arange(BATCH)[:, None]


def found(make: Made, bias: Tensor, seen: Tensor) -> Tensor | None:
    """The value of the part that is found in what ``make`` makes of a bias and of which keys are there."""

    def run(q: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=make(bias, seen))

    gm, _ = captured(run, torch.randn(BATCH, HEADS, LENGTH, 4), bias, seen)
    (node,) = (each for each in gm.graph.nodes if each.target is F.scaled_dot_product_attention)
    part = shared_part(argument(node, 3, "attn_mask"), {})
    return None if part is None else value_of(part)


def of_rows(seen: Tensor) -> Tensor:
    return seen[:, None, None, :]


FOUND: dict[str, tuple[Made, tuple[int, ...]]] = {
    "chosen": (lambda bias, seen: torch.where(of_rows(seen), bias, LOWEST).contiguous(), (1,)),
    "chosen the other way": (lambda bias, seen: torch.where(~of_rows(seen), -torch.inf, bias), (1,)),
    "of three dimensions": (lambda bias, seen: torch.where(of_rows(seen), bias, -torch.inf), ()),
    "filled": (lambda bias, seen: bias.masked_fill(~of_rows(seen), LOWEST), (1,)),
    "filled, of tensors": (lambda bias, seen: bias.masked_fill(~of_rows(seen), torch.tensor(LOWEST)), (1,)),
    "added": (lambda bias, seen: bias + (1 - of_rows(seen).float()) * -100.0, (1,)),
    "added twice": (lambda bias, seen: of_rows(seen).log() + (bias + torch.ones(BATCH, 1, 1, LENGTH)), (1,)),
    "added to what is hidden for good": (
        lambda bias, seen: torch.where(of_rows(seen), bias, -torch.inf) + of_rows(seen).float(),
        (1,),
    ),
    "hidden in a sum": (lambda bias, seen: torch.where(of_rows(seen), bias + of_rows(seen).float(), LOWEST), (1,)),
    "expanded and cast": (
        lambda bias, seen: torch.where(of_rows(seen), bias.expand(BATCH, -1, -1, -1).double(), LOWEST).float(),
        (1,),
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_a_part_has_the_sum_of_the_gradient(case: str) -> None:
    make, sizes = FOUND[case]
    bias, seen = shared(*sizes), there()
    part = found(make, bias, seen)
    assert part is not None and part.shape == bias.shape and part.requires_grad
    added = make(bias, seen)
    q = torch.randn(BATCH, HEADS, LENGTH, 4)
    grad, out = torch.randn_like(q), F.scaled_dot_product_attention(q, q, q, attn_mask=added)
    whole, wanted = torch.autograd.grad(out, [added, bias], grad)
    torch.testing.assert_close(whole.sum(0).view_as(bias), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "hides_for_good"), [(torch.bfloat16, True), (torch.float16, False)])
def test_the_lowest_number_of_sixteen_bits(dtype: torch.dtype, hides_for_good: bool) -> None:
    def make(bias: Tensor, seen: Tensor) -> Tensor:
        return torch.where(of_rows(seen), bias.to(dtype), torch.finfo(dtype).min).float()

    assert (found(make, shared(1), there()) is not None) == hides_for_good


def written_later(bias: Tensor, seen: Tensor) -> Tensor:
    whole = torch.where(of_rows(seen), bias, LOWEST)
    whole[:, :, 0] *= 2
    return whole


LEFT: dict[str, Made] = {
    "it has no matrix for each row": lambda bias, seen: bias,
    "scaled": lambda bias, seen: torch.where(of_rows(seen), bias * 2, LOWEST) * 0.5,
    "hidden by a small number": lambda bias, seen: torch.where(of_rows(seen), bias, -100.0),
    "hidden, and then added to": lambda bias, seen: torch.where(of_rows(seen), bias, LOWEST) + of_rows(seen).float(),
    "two that learn": lambda bias, seen: torch.where(of_rows(seen), bias, bias.mT),
    "two that learn, added": lambda bias, seen: of_rows(seen) * bias + bias,
    "hidden by what is not known": lambda bias, seen: torch.where(of_rows(seen), bias, seen.sum().float()),
    "written to in place": written_later,
    "filled in place": lambda bias, seen: (bias + 0 * of_rows(seen)).masked_fill_(~of_rows(seen), LOWEST),
    "added with a factor": lambda bias, seen: torch.add(of_rows(seen).float(), bias, alpha=2),
    "a row for all queries": lambda bias, seen: bias[:, :, :1] + of_rows(seen).float().expand(-1, -1, LENGTH, -1),
}


@pytest.mark.parametrize("case", LEFT)
def test_others_have_none(case: str) -> None:
    assert found(LEFT[case], shared(1), there()) is None


def test_one_that_learns_nothing_has_no_part() -> None:
    make = FOUND["chosen"][0]
    assert found(make, shared(1).detach(), there()) is None
    with torch.no_grad():
        assert found(make, shared(1), there()) is None
