"""Where Triton kernels are offered and where they say why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_compile.kernels import native
from te_compile.ops import registry, triton_implementations
from te_compile.ops.norm import KINDS
from te_compile.ops.registry import Target
from te_compile.recipe import DelayedScaling, remember

HOPPER = Target("cuda", (9, 0))
X = torch.empty(32, 64, dtype=torch.bfloat16)
E4M3 = torch.float8_e4m3fn
ARGUMENTS: dict[str, dict[str, Any]] = {
    "quantize": {"x": X, "dtype": E4M3},
    "norm_quantize": {"x": X, "weight": X[0], "bias": None, "kind": KINDS[0], "scale": X[0, 0], "dtype": E4M3},
    "norm_backward": {
        **{"dy": X, "x": X, "weight": X[0], "residual": X, "kind": KINDS[0]},
        **{"wants_dx": True, "wants_dw": True, "bias_dtype": torch.bfloat16},
    },
    "cross_entropy_forward": {"logits": X},
    "cross_entropy_backward": {"logits": X, "addend": X.float()},
    "cross_entropy_backward_with_sums": {"logits": X, "addend": None, "sums_dtype": torch.bfloat16},
    "cross_entropy_backward_deferred_with_sums": {"logits": X, "sums_dtype": torch.float32},
    "quantize_weights": {"weights": [X, X], "dtype": E4M3},
    "snapshot": {"states": [X]},
    "dropout_mask": {"size": X.shape, "probability": 0.1},
    "update_scales_": {"recipe": DelayedScaling().key()},
}


@pytest.mark.parametrize("operator", ARGUMENTS)
def test_hopper_gets_the_kernel(operator: str) -> None:
    wanted = "cuda" if operator == "norm_quantize" and not native.missing(cuda=True) else "triton"
    assert registry.choose(operator, HOPPER, ARGUMENTS[operator])[0] == wanted


def test_experts_in_one_tensor_are_weights_like_others() -> None:
    for operator in ("quantize_weights", "refresh_weights"):
        arguments = {"weights": [X.view(2, 16, 64), X], "dtype": E4M3}
        assert registry.choose(operator, HOPPER, arguments)[0] == "triton"


def test_rows_alone_are_one_pass_of_triton() -> None:
    chosen, reasons = registry.choose("norm_quantize", HOPPER, {**ARGUMENTS["norm_quantize"], "columnwise": False})
    assert chosen == "triton"
    assert native.missing(cuda=True) or "rows alone" in reasons[0]


@pytest.mark.parametrize("operator", ARGUMENTS)
@pytest.mark.parametrize(
    ("target", "reason"), [(Target("cpu"), "not cpu"), (Target("cuda", (8, 0)), "8.9")], ids=["cpu", "ampere"]
)
def test_other_devices_get_the_reference_and_the_reason(operator: str, target: Target, reason: str) -> None:
    name, declined = registry.choose(operator, target, ARGUMENTS[operator])
    assert name == "reference"
    assert any(line.startswith("triton: ") and reason in line for line in declined)


def test_without_triton_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_implementations, "_triton_is_installed", lambda: False)
    name, declined = registry.choose("quantize", HOPPER, ARGUMENTS["quantize"])
    assert name == "reference" and "Triton is not installed" in declined[-1]


@pytest.mark.parametrize(
    ("operator", "change", "reason"),
    [
        ("quantize", {"x": X.double()}, "float64"),
        ("quantize", {"dtype": torch.float8_e8m0fnu}, "e8m0"),
        ("norm_quantize", {"weight": X[0].double()}, "float64"),
        ("norm_quantize", {"kind": "batch"}, "batch"),
        ("norm_backward", {"dy": X.double()}, "float64"),
        ("norm_backward", {"residual": X.int()}, "int32"),
        ("norm_backward", {"bias_dtype": torch.float64}, "float64"),
        ("norm_backward", {"kind": "batch"}, "batch"),
        ("norm_backward", {"x": X[:1].repeat(1, 257)}, "K=16448"),
        ("norm_backward", {"x": X[:1].repeat(1, 129), "dy": X.float()[:1].repeat(1, 129)}, "8192"),
        ("cross_entropy_forward", {"logits": X.double()}, "float64"),
        ("cross_entropy_backward", {"addend": X.double()}, "float64"),
        ("cross_entropy_backward_with_sums", {"addend": X.double()}, "float64"),
        ("cross_entropy_backward_with_sums", {"sums_dtype": torch.float64}, "float64"),
        ("cross_entropy_backward_with_sums", {"logits": X[:, 1:].contiguous()}, "126 bytes"),
        ("quantize_weights", {"weights": [X, X.float()]}, "differ"),
        ("quantize_weights", {"weights": [X.int()]}, "int32"),
        ("dropout_mask", {"probability": 1e-9}, "drops none or all"),
        ("dropout_mask", {"probability": 1 - 1e-9}, "drops none or all"),
    ],
)
def test_what_a_kernel_cannot_do_it_says(operator: str, change: dict[str, Any], reason: str) -> None:
    name, declined = registry.choose(operator, HOPPER, {**ARGUMENTS[operator], **change})
    assert name == "reference" and any(reason in line for line in declined)


def test_recipes_with_functions_are_updated_by_the_reference() -> None:
    for parameters in (
        {"amax_compute_algo": lambda history: history[0]},
        {"scaling_factor_compute_algo": lambda amax, scale, fp8_max, recipe: fp8_max / amax},
    ):
        recipe = remember(DelayedScaling(**parameters))
        name, declined = registry.choose("update_scales_", HOPPER, {"recipe": recipe})
        assert name == "reference" and "is a function" in declined[-1]


def test_rows_of_any_length_are_summed_over_where_no_dx_is_wanted() -> None:
    arguments = {**ARGUMENTS["norm_backward"], "x": X[:1].repeat(1, 1000), "residual": None, "wants_dx": False}
    assert registry.choose("norm_backward", HOPPER, arguments)[0] == "triton"
