"""Keys of functions: equal in another process, and changed by whatever changes what the function computes."""

from __future__ import annotations

import functools

import pytest
import torch

from te_compile.function_keys import callable_key

GLOBAL_FACTOR = 2.0


def scaled_by_global(history: torch.Tensor) -> torch.Tensor:
    return history.amax(0) * GLOBAL_FACTOR


def test_a_changed_formula_changes_the_key_wherever_the_change_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_closure(factor: float) -> object:
        return lambda history: history.amax(0) * factor

    def with_default(factor: float) -> object:
        return lambda history, factor=factor: history.amax(0) * factor

    for make in (with_closure, with_default, functools.partial(functools.partial, torch.mul)):
        assert callable_key(make(2.0)) == callable_key(make(2.0))
        assert callable_key(make(2.0)) != callable_key(make(3.0))
    before = callable_key(scaled_by_global)
    assert before.startswith(f"{__name__}.scaled_by_global#")
    monkeypatch.setitem(scaled_by_global.__globals__, "GLOBAL_FACTOR", 3.0)
    assert callable_key(scaled_by_global) != before
    assert callable_key(lambda h: h.amax(0)) != callable_key(lambda h: h.amin(0))
    assert callable_key(lambda h: h * 2) != callable_key(lambda h: h * 3)


def test_an_object_that_is_called_is_keyed_by_its_attributes() -> None:
    class Power:
        def __init__(self, exponent: float) -> None:
            self.exponent = exponent

        def __call__(self, history: torch.Tensor) -> torch.Tensor:
            return history.amax(0) ** self.exponent

    assert callable_key(Power(1.5)) == callable_key(Power(1.5)) != callable_key(Power(2.5))


def factorial(number: int) -> int:
    return number * factorial(number - 1) if number else 1


def test_a_recursive_function_has_a_key_without_spaces() -> None:
    assert " " not in callable_key(factorial)
