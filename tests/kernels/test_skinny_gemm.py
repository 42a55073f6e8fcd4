"""What products of few rows the C++ core's kernel takes, and the reasons for the others; tests/gpu runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from te_compile.kernels import native, skinny_gemm
from te_compile.ops import registry
from te_compile.ops.gemms import AT_ONCE
from te_compile.ops.registry import Target, Unsupported

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HOPPER = Target("cuda", (9, 0))


@pytest.fixture(autouse=True)
def _a_core_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "missing", lambda cuda=False: "")


def fake(*size: Any, dtype: torch.dtype = E4M3) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(size, dtype=dtype)


def arguments(rows: int = 8, length: int = 64, **changes: Any) -> dict[str, Any]:
    """te::gemm's."""
    one = torch.ones(())
    return {
        "a": fake(rows, length), "b": fake(48, length), "a_scale_inv": one, "b_scale_inv": one, "bias": None,
        "out_dtype": torch.bfloat16, "accumulation": "fast", "addend": None, **changes,
    }  # fmt: skip


@pytest.mark.parametrize("rows", [1, 8, 9, skinny_gemm.MOST_ROWS])
def test_few_rows_are_its_own_with_any_bias_and_addend(rows: int) -> None:
    for bias in (None, fake(48, dtype=torch.float32), fake(48, dtype=torch.float16)):
        given = arguments(rows, bias=bias, addend=fake(rows, 48, dtype=torch.bfloat16))
        assert registry.choose("gemm", HOPPER, given) == ("cuda", [])
    assert registry.choose("gemm", Target("cuda", (8, 9)), arguments(rows))[0] == "cuda"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (arguments(skinny_gemm.MOST_ROWS + 1), "up to 16 rows"),
        (arguments(accumulation="split"), "accumulation is 'split'"),
        (arguments(a=fake(8, 64, dtype=E5M2)), "float8_e4m3fn, not torch.float8_e5m2"),
        (arguments(b=fake(48, 64, dtype=E5M2)), "float8_e4m3fn, not torch.float8_e5m2"),
        (arguments(length=72), "K=72 is not a multiple of 16"),
        (arguments(out_dtype=torch.float64), "not torch.float64"),
        (arguments(bias=fake(48, dtype=torch.float64)), "not torch.float64"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_other_products_are_refused_with_a_reason(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        skinny_gemm.check(HOPPER, given)


def test_older_gpus_and_a_number_of_rows_that_is_not_known_are_refused() -> None:
    with pytest.raises(Unsupported, match="FP8 tensor cores"):
        skinny_gemm.check(Target("cuda", (8, 6)), arguments())
    with pytest.raises(Unsupported, match="CUDA device"):
        skinny_gemm.check(Target("cpu"), arguments())
    seen: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        (a,) = (value for value in values if isinstance(value, torch.Tensor))
        with pytest.raises(Unsupported, match="not known at compile time") as refused:
            skinny_gemm.check(HOPPER, arguments(a=a))
        seen.append(str(refused.value))
        return gm.forward

    x = torch.zeros(8, 64).to(E4M3)
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(lambda x: x.float(), backend=backend)(x)
    assert seen


def test_several_products_are_as_many_as_a_launch_makes() -> None:
    def several(count: int) -> dict[str, Any]:
        given = arguments()
        of_each = {name: [given[name]] * count for name in ("b", "b_scale_inv", "bias")}
        return {**given, **of_each}

    for count in (1, AT_ONCE):
        assert registry.choose("gemms", HOPPER, several(count)) == ("cuda", [])
    for count in (0, AT_ONCE + 1):
        assert registry.choose("gemms", HOPPER, several(count))[0] == "reference"
    mixed = {**several(2), "b": [fake(48, 64), fake(48, 64, dtype=E5M2)]}
    assert registry.choose("gemms", HOPPER, mixed)[0] == "reference"
