"""What FP8 products do not take is left alone and named: sizes, dtypes, devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_compile.ops.registry import Target
from te_compile.options import Options
from te_compile.passes.fp8_support import by_device
from te_compile.passes.plan import Cause
from tests.compiling import compiled
from tests.selecting import Named, fake_site, verdict

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("size", [(33, 48), (32, 50), (17, 131)])
def test_any_size_from_sixteen_up_is_taken(size: tuple[int, int]) -> None:
    site = verdict(Named(proj=size), torch.randn(5, size[0]))
    assert site.status == "fp8"
    assert all((had + added) % 16 == 0 and added < 16 for had, added in zip(size, site.padding, strict=True))


@pytest.mark.parametrize(("size", "what"), [((8, 48), "in_features=8"), ((32, 2), "out_features=2"), ((4, 4), "in")])
def test_what_would_be_mostly_padding_stays_in_high_precision_by_rule(size: tuple[int, int], what: str) -> None:
    site = verdict(Named(proj=size), torch.randn(5, size[0]), cost_model=False)
    assert site.cause is Cause.RULE and "narrow" in site.reason and what in site.reason


def test_the_number_of_tokens_may_be_anything() -> None:
    assert verdict(Named(proj=(32, 48)), torch.randn(7, 32)).status == "fp8"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_training_dtype_is_taken(dtype: torch.dtype) -> None:
    assert verdict(Named(proj=(32, 48)).to(dtype), torch.randn(5, 32, dtype=dtype)).status == "fp8"


@pytest.mark.parametrize("form", [F.linear, lambda x, w: x @ w.T])
def test_what_pytorch_would_not_multiply_is_not_multiplied(form: Callable[..., Tensor]) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(48, 32, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return form(x, self.weight).float()

    x = torch.randn(5, 32)
    for fast in (Mixed(), compiled(Mixed())):
        with pytest.raises(RuntimeError, match="same dtype"):
            fast(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(Mixed())(x).shape == (5, 48)


def test_a_dtype_that_is_not_taken_is_named() -> None:
    site = verdict(Named(proj=(32, 48)).double(), torch.randn(5, 32).double())
    assert site.cause is Cause.UNSUPPORTED and "float64" in site.reason


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_other_accelerators_are_named_in_the_reason(device: str) -> None:
    cause, reason = by_device(fake_site(device), Options())
    assert cause is Cause.UNSUPPORTED and repr(device) in reason


@pytest.mark.parametrize(("capability", "taken"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_without_fp8_is_left_alone(
    capability: tuple[int, int], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "of", staticmethod(lambda device: Target("cuda", capability)))
    found = by_device(fake_site("cuda"), Options())
    assert (found is None) is taken
    if found is not None:
        assert ".".join(map(str, capability)) in found[1]


def test_amds_gpus_are_named_in_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    cause, reason = by_device(fake_site("cuda"), Options())
    assert cause is Cause.UNSUPPORTED and "'rocm'" in reason


def test_operands_on_two_devices_are_left_alone() -> None:
    cause, reason = by_device(fake_site("cuda:0", "cuda:1"), Options())
    assert cause is Cause.UNSUPPORTED and "cuda:0" in reason and "cuda:1" in reason
