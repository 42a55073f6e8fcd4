"""The registry: the best that fits, chosen once, and only a typed "unsupported" lets the next one try."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_compile.ops import registry
from te_compile.ops.registry import (
    Target,
    Unsupported,
    are_run_by_kernels,
    choose,
    function_of,
    implementations,
    register,
)


@pytest.fixture
def operator() -> Iterator[str]:
    """A name under which nothing is registered, and nothing stays."""
    name = "an_operator_of_this_test"
    yield name
    for key in [key for key in registry._TABLE if key[0] == name]:
        del registry._TABLE[key]


def fits(*capabilities: tuple[int, int]) -> Any:
    """A check that accepts these compute capabilities."""

    def check(target: Target, arguments: dict[str, Any]) -> None:
        if target.capability not in capabilities:
            raise Unsupported(f"not for {target.capability}")

    return check


def takes_three(target: Target, arguments: dict[str, Any]) -> None:
    """A check that accepts x = 3."""
    if arguments["x"] != 3:
        raise Unsupported("not 3")


def test_the_highest_priority_that_fits_wins(operator: str) -> None:
    register(operator, "reference")(lambda: 0)
    register(operator, "good", priority=5)(lambda: 1)
    register(operator, "best", priority=9, check=fits((9, 0)))(lambda: 2)
    assert choose(operator, Target("cuda", (9, 0)), {}) == ("best", [])
    assert choose(operator, Target("cuda", (8, 9)), {}) == ("good", ["best: not for (8, 9)"])
    assert [entry.name for entry in implementations(operator)] == ["best", "good", "reference"]


def test_operators_are_run_by_kernels_if_each_has_something_better_than_its_reference(operator: str) -> None:
    register(operator, "reference")(lambda: 0)
    assert not are_run_by_kernels([operator], torch.device("cpu"), {})
    register(operator, "better", priority=1, check=takes_three)(lambda: 1)
    assert are_run_by_kernels([operator], torch.device("cpu"), {"x": 3})
    assert not are_run_by_kernels([operator], torch.device("cpu"), {"x": 4})
    assert not are_run_by_kernels([operator, "snapshot"], torch.device("cpu"), {"x": 3, "states": []})


def test_a_check_sees_the_arguments(operator: str) -> None:
    seen = []
    register(operator, "any", check=lambda target, arguments: seen.append((target, arguments)))(lambda: 0)
    choose(operator, Target("cpu"), {"x": 3})
    assert seen == [(Target("cpu"), {"x": 3})]


def test_an_error_that_is_not_unsupported_is_not_swallowed(operator: str) -> None:
    def broken(target: Target, arguments: dict[str, Any]) -> None:
        raise KeyError("a bug")

    register(operator, "reference")(lambda: 0)
    register(operator, "broken", priority=1, check=broken)(lambda: 1)
    with pytest.raises(KeyError, match="a bug"):
        choose(operator, Target("cpu"), {})


def test_nothing_that_fits_is_an_error_with_every_reason(operator: str) -> None:
    register(operator, "a", priority=1, check=fits((9, 0)))(lambda: 0)
    register(operator, "b", check=fits((10, 0)))(lambda: 0)
    with pytest.raises(LookupError, match=r"a: not for \(8, 0\); b: not for"):
        choose(operator, Target("cuda", (8, 0)), {})
    with pytest.raises(LookupError, match="none registered"):
        choose("no_such_operator", Target("cpu"), {})


def test_a_name_on_a_node_finds_its_code_and_an_unknown_one_the_known_names(operator: str) -> None:
    def code() -> int:
        return 7

    register(operator, "mine")(code)
    assert function_of(operator, "mine") is code
    with pytest.raises(KeyError, match="mine"):
        function_of(operator, "yours")


def test_a_target_is_read_off_a_device() -> None:
    assert Target.of(torch.device("cpu")) == Target("cpu")
    assert Target.of(torch.device("meta")).device == "meta"


def test_a_gpu_of_amd_is_no_cuda_device_whatever_pytorch_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert Target.of(torch.device("cuda", 0)) == Target("rocm")


@pytest.mark.parametrize("name", ["quantize", "gemm", "quantize_weights", "update_scales_"])
def test_every_operator_runs_everywhere_by_its_reference(name: str) -> None:
    assert choose(name, Target("cpu"), {"a": torch.empty(0), "b": torch.empty(0)})[0] == registry.REFERENCE
    assert implementations(name)[-1].name == registry.REFERENCE
