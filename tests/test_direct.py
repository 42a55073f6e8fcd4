"""te:: operators as generated code calls them: the same results as by the dispatcher, where nothing can be replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from te_compile import direct
from te_compile.ops.library import implementations
from te_compile.recipe import DelayedScaling

E4M3 = torch.float8_e4m3fn


def fp8(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns).to(E4M3)


def at(name: str, place: bool) -> Any:
    operator = getattr(direct.CALLS, name)
    return operator.site() if place else operator


def test_every_operator_has_its_call() -> None:
    assert vars(direct.CALLS).keys() == implementations.keys()


@pytest.mark.parametrize("place", [False, True])
def test_scales_are_updated(place: bool) -> None:
    recipe = DelayedScaling(amax_history_len=4).key()
    update, ours = at("update_scales_", place), [torch.zeros(2, 6), torch.zeros(1, 6)]
    wanted = [state.clone() for state in ours]
    for _ in range(4):
        shared = torch.rand(())
        amaxes = [shared, shared, torch.rand(1)]
        assert update(ours, amaxes, "backward", recipe, implementation="reference") is None
        torch.ops.te.update_scales_(wanted, amaxes, "backward", recipe)
        assert all(map(torch.equal, ours, wanted))
    update(ours, [], "backward", recipe, implementation="reference")  # a direction that quantised nothing
    assert all(map(torch.equal, ours, wanted))
    with pytest.raises(ValueError, match="2 amaxes for 3 rows of 2 states"):
        update(ours, [shared, shared], "backward", recipe, implementation="reference")


@pytest.mark.parametrize("place", [False, True])
def test_a_gradient_that_nobody_has_yet_is_returned(place: bool) -> None:
    a, b, one = fp8(8, 16), fp8(24, 16), torch.ones(())
    given = (a, b, one, one, torch.float32, "split", "fc wgrad", [8, 24], 0, 1)
    got = at("gemm_into_grad", place)(*given, implementation="reference")
    assert torch.equal(got, torch.ops.te.gemm(a, b, one, one, None, torch.float32, "split", "fc wgrad"))
