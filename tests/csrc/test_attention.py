"""What te_cuda_attention does not take, before it asks a GPU for anything."""

from __future__ import annotations

from typing import Any

import pytest

from te_compile.kernels import native

pytestmark = pytest.mark.skipif(bool(native.missing(cuda=True)), reason="needs the C++ core with CUDA")

ADDRESS, STRIDES = 1 << 20, (256 * 4 * 128, 4 * 128, 128)

MASKED = {"bits": 0, "growth": 1.0, "mask": ADDRESS, "tiles": ADDRESS}
BIASED = {"sizes": (2, 4, 4, 256, 250, 64), "bias": ADDRESS, "bias_sizes": (1, 4, 256)}


def arguments(**changed: Any) -> list[Any]:
    """Those of a sound request but for its addresses, which nothing gets as far as to read."""
    core = native.module()
    given: dict[str, Any] = {
        "device": 0, "dtype": core.BFLOAT16, "left": -1, "right": -1, "sizes": (2, 4, 4, 256, 256, 128), "scale": 0.1,
        "growth": 1.1,
        "q": ADDRESS, "q_strides": STRIDES, "k": ADDRESS, "k_strides": STRIDES, "v": ADDRESS, "v_strides": STRIDES,
        "bits": ADDRESS, "bit_sizes": (8, 256), "mask": 0, "tiles": 0, "mask_batches": 1,
        "bias": 0, "bias_sizes": (1, 1, 0), "out": ADDRESS, "logsumexp": ADDRESS, "stream": 0,
    }  # fmt: skip
    assert changed.keys() <= given.keys()
    return list({**given, **changed}.values())


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"sizes": (2, 4, 4, 0, 256, 128)}, "there must be a query and a key"),
        ({"sizes": (2, 4, 4, 256, 256, 136)}, "a multiple of 8 features, up to 128"),
        ({"sizes": (2, 4, 4, 256, 256, 100)}, "a multiple of 8 features, up to 128"),
        ({"sizes": (2, 4, 4, 256, 128, 128), "right": 0}, "causal, or in a window, with other keys than queries"),
        ({"sizes": (2, 4, 4, 256, 128, 128), "left": 5}, "causal, or in a window, with other keys than queries"),
        ({"sizes": (2, 4, 3, 256, 256, 128), "bits": 0, "growth": 1.0}, "heads must be a multiple of key_heads"),
        ({"sizes": (2, 4, 0, 256, 256, 128), "bits": 0, "growth": 1.0}, "heads must be a multiple of key_heads"),
        ({"sizes": (2, 4, 2, 256, 256, 128)}, "each head must have keys of its own"),
        ({"bits": 0}, "where none is dropped growth must be 1"),
        ({"bit_sizes": (7, 256)}, "bits must be those of all keys and queries"),
        ({"bit_sizes": (8, 255)}, "bits must be those of all keys and queries"),
        ({"left": 5}, "weights are dropped from all keys, from causal ones, or under a mask"),
        ({"right": 5}, "weights are dropped from all keys, from causal ones, or under a mask"),
        ({**MASKED, "tiles": 0}, "a mask has tiles, and is aligned to 16 bytes"),
        ({**MASKED, "mask": 0}, "a mask has tiles, and is aligned to 16 bytes"),
        ({**MASKED, "mask": ADDRESS + 8}, "a mask has tiles, and is aligned to 16 bytes"),
        ({**MASKED, "right": 0}, "under a mask there is no window"),
        ({**MASKED, "left": 5}, "under a mask there is no window"),
        ({**MASKED, "mask_batches": 3}, "a mask for each batch, or one for all"),
        ({**BIASED, **MASKED}, "with a bias there is no window, and no mask but in the bias"),
        ({**BIASED, "sizes": (2, 4, 4, 256, 256, 64), "right": 0}, "with a bias there is no window"),
        ({**BIASED, "bias": ADDRESS + 8}, "a bias must be aligned to 16 bytes, its rows a multiple of 8"),
        ({**BIASED, "bias_sizes": (1, 4, 248)}, "its rows a multiple of 8 of at least as many as keys"),
        ({**BIASED, "bias_sizes": (1, 4, 252)}, "its rows a multiple of 8 of at least as many as keys"),
        ({**BIASED, "bias_sizes": (3, 4, 256)}, "a bias for each batch, or one for all, and for each head"),
        ({**BIASED, "bias_sizes": (2, 2, 256)}, "a bias for each batch, or one for all, and for each head"),
        ({"dtype": 0}, "TE_FLOAT16 or TE_BFLOAT16"),
        ({"out": 0}, "out or logsumexp is null"),
        ({"logsumexp": 0}, "out or logsumexp is null"),
        ({"q": 0}, "q must be aligned"),
        ({"k": ADDRESS + 2}, "k must be aligned to 16 bytes"),
        ({"v_strides": (512, 0, 128)}, "v must be aligned to 16 bytes, its strides positive multiples of 8"),
        ({"q_strides": (512, 131, 128)}, "q must be aligned to 16 bytes, its strides positive multiples of 8"),
    ],
)
def test_bad_requests_are_said(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        native.module().cuda_attention(*arguments(**changed))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"bit_sizes": (10, 256)}, "bits must be those of a multiple of 64 queries and of 128 keys"),
        ({"bit_sizes": (8, 260)}, "bits must be those of a multiple of 64 queries and of 128 keys"),
        ({"sizes": (2, 4, 4, 250, 250, 128)}, "grad must be aligned"),
        ({"sizes": (2, 4, 4, 250, 250, 128), "mask": ADDRESS, "tiles": ADDRESS}, "grad must be aligned"),
        (BIASED, "grad must be aligned"),
    ],
)
def test_bits_are_read_by_whole_tiles_backward(changed: dict[str, Any], reason: str) -> None:
    """Lengths may be any: the last requests are sound but for their gradient."""
    with pytest.raises(ValueError, match=reason):
        native.module().cuda_attention_backward(*backward_arguments(0, 0, 0, **changed))


def backward_arguments(grad: int, ds: int, ds_row: int, **changed: Any) -> list[Any]:
    *given, stream = arguments(**changed)
    behind = (ADDRESS, ADDRESS, ADDRESS, ADDRESS)  # workspace, dq, dk, dv
    return [*given, grad, STRIDES, *behind, ds, ds_row, stream]


@pytest.mark.parametrize(
    ("ds", "ds_row", "changed"),
    [(ADDRESS, 256, {}), (ADDRESS + 8, 256, BIASED), (ADDRESS, 248, BIASED), (ADDRESS, 260, BIASED)],
)
def test_the_gradient_of_a_bias_lies_in_aligned_rows(ds: int, ds_row: int, changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ds is of a bias, aligned to 16 bytes, its rows a multiple of 8"):
        native.module().cuda_attention_backward(*backward_arguments(ADDRESS, ds, ds_row, **changed))


def test_more_tiles_than_blocks_are_unsupported() -> None:
    with pytest.raises(native.module().Unsupported, match="more tiles than a launch has blocks"):
        given = {"sizes": (2**20, 2**10, 2**10, 2**10, 2**10, 128), "bit_sizes": (2**5, 2**10)}
        native.module().cuda_attention(*arguments(**given))
