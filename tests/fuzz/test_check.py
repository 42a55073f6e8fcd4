"""The check can fail: wrong formulas are put into te_fp8, and random programs show them. And what fails gets small."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_compile.ops import linear, pointwise
from te_compile.passes import find_linears
from tests.fuzz.campaign import Campaign
from tests.fuzz.check import Case, Failure, NotOurs, check
from tests.fuzz.emulation import Fp8Products, Scales
from tests.fuzz.generate import generate
from tests.fuzz.program import Input, Program, Setting, Step
from tests.fuzz.shrink import fails_alike, failure_of, shrink

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ENOUGH = 40  # programs among which a wrong formula shows: nine in ten have a linear in FP8

GEMM = linear.GEMM
Product = Callable[..., Tensor]


def _changed(label_end: str, change: Callable[[Product, list[Any]], Tensor]) -> Product:
    """The product, but for those whose label ends so."""

    def product(*arguments: Any) -> Tensor:
        return change(GEMM, [*arguments]) if str(arguments[-1]).endswith(label_end) else GEMM(*arguments)

    return product


def _without_bias(product: Product, arguments: list[Any]) -> Tensor:
    arguments[4] = None
    return product(*arguments)


def _with_a_transposed_weight(product: Product, arguments: list[Any]) -> Tensor:
    weight = arguments[1]
    arguments[1] = weight.t().contiguous() if weight.shape[0] == weight.shape[1] else weight
    return product(*arguments)


WRONG_PRODUCTS: dict[str, Product] = {
    "the weight's gradient is doubled": _changed("wgrad", lambda product, a: product(*a) * 2),
    "the weight's gradient is a third too large": _changed("wgrad", lambda product, a: product(*a) * 1.33),
    "the bias is dropped": _changed("forward", _without_bias),
    "the input's gradient has the wrong sign": _changed("dgrad", lambda product, a: -product(*a)),
    "the weight is transposed": _changed("forward", _with_a_transposed_weight),
    "the input's gradient misses a column": _changed("dgrad", lambda product, a: F.pad(product(*a)[:, :-1], (0, 1))),
}


def first_failure() -> tuple[Failure, Program]:
    """Of random programs."""
    campaign = Campaign(theirs=("aot_eager",))
    for seed in random.sample(range(2**31), ENOUGH):
        campaign.run([seed])
        if campaign.found:
            [(_, failure, program)] = campaign.found
            return failure, program
    raise AssertionError(f"nothing found: {campaign.summary()}")


@pytest.mark.parametrize("wrong", WRONG_PRODUCTS)
def test_random_programs_show_a_wrong_product(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "GEMM", WRONG_PRODUCTS[wrong])
    failure, _ = first_failure()
    assert failure.kind == "numbers", failure


def test_random_programs_show_a_wrong_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that became a difference in what is fused before a quantize."""
    forms = pointwise.OPERATIONS
    monkeypatch.setitem(forms, "add", forms["sub"])
    failure, _ = first_failure()
    assert failure.kind == "numbers", failure


def test_random_programs_show_a_linear_that_no_report_knows_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_linears, "_FORMS", ())
    failure, _ = first_failure()
    assert failure.kind == "unreported", failure


class Wrapped(nn.Module):
    """A linear whose result goes through ``function``."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(32, 32), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.fc(x))


@pytest.mark.parametrize(("dimensions", "kind"), [(1, torch.nn.Conv1d), (2, torch.nn.Conv2d), (3, torch.nn.Conv3d)])
def test_the_textbook_rounds_convolutions_of_any_dimensions(dimensions: int, kind: type[torch.nn.Module]) -> None:
    model, x = torch.nn.Sequential(kind(32, 32, 1)), torch.randn(2, 32, *[4] * dimensions)
    with Fp8Products(model, {"0": [True]}, Scales(None, delayed=False)):
        rounded = model(x)
    assert 1e-3 < float((rounded - model(x)).norm() / model(x).norm()) < 0.1


def test_the_textbook_reads_a_linear_by_the_names_of_its_operands() -> None:
    fc = nn.Linear(32, 32)
    model, x = nn.Sequential(fc), torch.randn(5, 32)
    with Fp8Products(model, {"0": [True]}, Scales(None, delayed=False)):
        by_place, by_name = model(x), F.linear(input=x, bias=fc.bias, weight=fc.weight)
    assert torch.equal(by_name, by_place) and not torch.equal(by_name, model(x))


def test_a_program_that_eager_refuses_is_no_failure() -> None:
    with pytest.raises(NotOurs, match="eager"):
        check(Case(lambda: Wrapped(lambda y: y @ y), lambda more: (torch.randn(5, 32),)))


def test_a_program_that_torch_compile_changes_by_itself_is_no_failure() -> None:
    def other_when_compiled(y: Tensor) -> Tensor:
        return y * 2 if torch.compiler.is_compiling() else y

    with pytest.raises(NotOurs, match="aot_eager as well: numbers"):
        check(Case(lambda: Wrapped(other_when_compiled), lambda more: (torch.randn(5, 32),)))


def test_a_failing_program_is_made_as_small_as_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "GEMM", WRONG_PRODUCTS["the weight's gradient is doubled"])
    made = ("self.w = nn.Parameter(torch.randn(32, 32) / 32**0.5)",)
    steps = (
        Step("{o0} = F.silu({0})", ("x",), ("a",)),
        Step("{o0} = F.linear({0}, self.w)", ("a",), ("b",), made, block=1),
        Step("{o0} = {0} + {1}", ("b", "a"), ("c",), block=1),
        Step("{o0} = torch.tanh({0})", ("c",), ("d",)),
        Step("{o0} = {0}.t()", ("d",), ("e",)),
    )
    inputs = (Input("x", (5, 32), torch.float32, requires_grad=True),)
    program = Program(inputs, steps, ("e", "a"), Setting(recipe="current"), ((1, "checkpoint"),), seed=3)
    failure = failure_of(program)
    assert failure is not None and failure.kind == "numbers"
    small = shrink(program, fails_alike(failure))
    [step] = small.steps
    assert "F.linear" in step.code and small.setting == Setting() and failure_of(small) is not None
    assert "checkpoint" not in small.test_text() and "requires_grad" not in small.test_text()


def test_a_seed_is_always_the_same_program_with_the_same_values() -> None:
    seed = random.randrange(2**31)
    one, other = generate(seed), generate(seed)
    assert one == other
    parameters = zip(one.build().parameters(), other.build().parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in parameters)
