"""Which attention the C++ core's kernels take, with dropout and in windows; what they compute is for tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_compile.kernels import native
from te_compile.kernels.native_attention import FEWEST_KEYS, _in_place, check, check_dropout, check_dropout_backward
from te_compile.ops import triton_implementations
from te_compile.ops.registry import Target, Unsupported, choose

HOPPER = Target("cuda", (9, 0))


def arguments(queries: Any = 256, keys: Any = 256, width: int = 128, **others: Any) -> dict[str, Any]:
    def heads(length: int) -> torch.Tensor:
        return torch.empty(2, length, 4, width, device="meta", dtype=torch.bfloat16)

    given = {"q": heads(queries), "k": heads(keys), "v": heads(keys), "probability": 0.1, "causal": False, "scale": 0.1}
    return {**given, **others}


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "missing", lambda cuda=False: "")
    monkeypatch.setattr(triton_implementations, "check_target", lambda target: None)


def test_heads_on_hopper_are_taken() -> None:
    for queries, keys, width in ((256, 256, 128), (64, 384, 96), (192, 128, 80), (64, 384, 64), (512, 512, 48)):
        check_dropout(HOPPER, arguments(queries, keys, width))
        check_dropout_backward(HOPPER, arguments(queries, keys, width))
        for operator in ("dropout_attention_forward", "dropout_attention_backward"):
            assert choose(operator, HOPPER, arguments(queries, keys, width))[0] == "cuda"


@pytest.mark.parametrize(
    ("target", "given", "reason"),
    [
        (Target("cpu"), arguments(), "needs a CUDA device"),
        (Target("cuda", (8, 9)), arguments(), "compute capability 9.0"),
        (Target("cuda", (10, 0)), arguments(), "compute capability 9.0"),
        (HOPPER, arguments(width=32), "a head of 32 features"),
        (HOPPER, arguments(width=60), "a head of 60 features"),
        (HOPPER, arguments(width=136), "a head of 136 features"),
        (HOPPER, arguments(queries=2**36, keys=2**36), "too many tiles"),
    ],
)
def test_others_are_not_and_the_reason_is_said(target: Target, given: dict[str, Any], reason: str) -> None:
    for one in (check, check_dropout_backward):
        with pytest.raises(Unsupported, match=reason):
            one(target, given)


def test_narrow_heads_with_a_dropout_and_few_keys_are_tritons() -> None:
    given = arguments(512, FEWEST_KEYS - 128, 64)
    check(HOPPER, given)
    with pytest.raises(Unsupported, match="heads of 64 features and 256 keys"):
        check_dropout(HOPPER, given)
    for operator in ("dropout_attention_forward", "dropout_attention_backward"):
        assert choose(operator, HOPPER, given)[0] == "triton"


@pytest.mark.parametrize(("queries", "keys"), [(197, 256), (256, 197), (256, 64)])
def test_backward_of_other_lengths_is_tritons_and_forward_is_not(queries: int, keys: int) -> None:
    check(HOPPER, arguments(queries, keys))
    with pytest.raises(Unsupported, match="no multiple of"):
        check_dropout_backward(HOPPER, arguments(queries, keys))
    assert choose("dropout_attention_forward", HOPPER, arguments(queries, keys))[0] == "cuda"
    assert choose("dropout_attention_backward", HOPPER, arguments(queries, keys))[0] == "triton"


def windowed(length: Any = 256, width: int = 128, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    q, k = (torch.empty(2, length, heads, width, device="meta", dtype=dtype) for heads in (4, 2))
    return {"q": q, "k": k, "v": k, "left": 100, "right": 0, "scale": 0.1}


@pytest.fixture
def flash_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


@pytest.mark.usefixtures("flash_is_there")
@pytest.mark.parametrize(
    ("target", "given", "forward", "backward"),
    [
        (HOPPER, windowed(), "cuda", "cuda"),
        (HOPPER, windowed(width=96, dtype=torch.float16), "cuda", "cuda"),
        (HOPPER, windowed(length=197), "cuda", "cuda"),
        (HOPPER, windowed(width=64), "cuda", "cuda"),
        (HOPPER, windowed(width=40), "cuda", "cuda"),
        (HOPPER, windowed(width=32), "flash", "flash"),
        (HOPPER, windowed(width=256), "flash", "flash"),
        (HOPPER, windowed(dtype=torch.float32), "reference", "reference"),
        (Target("cuda", (8, 9)), windowed(), "flash", "flash"),
        (Target("cuda", (10, 0)), windowed(), "flash", "flash"),
        (Target("cpu"), windowed(), "reference", "reference"),
    ],
)
def test_windows_on_hopper_are_taken(target: Target, given: dict[str, Any], forward: str, backward: str) -> None:
    assert choose("window_attention_forward", target, given)[0] == forward
    assert choose("window_attention_backward", target, given)[0] == backward


def masked(
    batch: Any = 2, length: Any = 256, width: int = 64, probability: float = 0.0, **others: Any
) -> dict[str, Any]:
    q, k = (
        torch.empty(batch, length, heads, width, device="meta", dtype=others.get("dtype", torch.bfloat16))
        for heads in (4, 2)
    )
    return {"q": q, "k": k, "v": k, "bits": None, "probability": probability, "scale": 0.1}


@pytest.mark.parametrize(
    ("target", "given", "forward", "backward"),
    [
        (HOPPER, masked(), "cuda", "cuda"),
        (HOPPER, masked(width=128, dtype=torch.float16), "cuda", "cuda"),
        (HOPPER, masked(length=197), "cuda", "cuda"),
        (HOPPER, masked(probability=0.1), "cuda", "cuda"),
        (HOPPER, masked(length=197, probability=0.1), "cuda", "cuda"),
        (HOPPER, masked(probability=1e-9), "reference", "reference"),
        (HOPPER, masked(width=40), "cuda", "cuda"),
        (HOPPER, masked(width=32), "reference", "reference"),
        (HOPPER, masked(width=136), "reference", "reference"),
        (HOPPER, masked(batch=2**16), "reference", "reference"),
        (HOPPER, masked(dtype=torch.float32), "reference", "reference"),
        (Target("cuda", (8, 9)), masked(), "reference", "reference"),
        (Target("cpu"), masked(), "reference", "reference"),
    ],
)
def test_what_is_under_a_mask_on_hopper_is_taken(
    target: Target, given: dict[str, Any], forward: str, backward: str
) -> None:
    assert choose("masked_attention_forward", target, given)[0] == forward
    assert choose("masked_attention_backward", target, given)[0] == backward


def test_a_core_that_was_not_built_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "missing", lambda cuda=False: "the C++ core is not built")
    with pytest.raises(Unsupported, match="not built"):
        check(HOPPER, arguments())


def test_what_cannot_be_read_as_it_lies_is_copied() -> None:
    lies_well = torch.zeros(2, 8, 4, 64, dtype=torch.bfloat16)
    assert _in_place(lies_well) is lies_well and _in_place(lies_well[:, :, :2]).stride(1) == 256
    begins_badly = torch.zeros(lies_well.numel() + 1, dtype=torch.bfloat16)[1:].view(lies_well.shape)
    assert begins_badly.is_contiguous()
    for x in (begins_badly, lies_well.transpose(2, 3), lies_well[:1].expand(2, -1, -1, -1), lies_well[..., 1:]):
        copy = _in_place(x)
        assert copy.data_ptr() % 16 == 0 and copy.is_contiguous() and copy.shape == x.shape
