"""What a linear gains in FP8, in microseconds: the cost model behind ``cost_model=True``.

A GEMM gains the difference of the two tensor-core rates; it pays for writing and reading the FP8 copies and for the
launches of its quantize kernels. Rates are those of an H200 in steady state, from the project's own benchmarks; other
GPUs differ in scale more than in ratio, and the model only has to find the sign.
"""

from __future__ import annotations

BF16_FLOPS_PER_MICROSECOND = 650e6
FP8_FLOPS_PER_MICROSECOND = 1200e6
BYTES_PER_MICROSECOND = 3.2e6
LAUNCH_MICROSECONDS = 4.0


def gain_microseconds(
    tokens: int,
    in_features: int,
    out_features: int,
    *,
    padding: tuple[int, int] = (0, 0),
    training: bool,
    weights: int = 1,
) -> float:
    """Time that FP8 saves on one linear of ``tokens`` × ``in_features`` → ``out_features``; negative if it loses.

    padding: the (in, out) features that are added for FP8. weights: how many there are, each for some of the tokens.
    """
    products = 3 if training else 1
    more_in, more_out = padding
    rows, columns = in_features + more_in, out_features + more_out
    flops = 2.0 * tokens * products
    before = flops * in_features * out_features / BF16_FLOPS_PER_MICROSECOND
    saved = before - flops * rows * columns / FP8_FLOPS_PER_MICROSECOND
    # Each operand is read once in 16 bit and written once (inference) or twice (both layouts) in FP8.
    copies = 2 if training else 1
    elements = tokens * rows + weights * rows * columns + (tokens * columns if training else 0)
    launches = 3 if training else 1
    # A padded activation or a result cut to size is written once more, by a kernel that does what stands around it too;
    # and its gradient. The padded weight, and its gradient, are copied by kernels of their own.
    passes = 2 if training else 1
    written = 2 * tokens * ((in_features if more_in else 0) + (out_features if more_out else 0))
    copied = 4 * weights * in_features * out_features if more_in or more_out else 0
    extra_bytes = passes * (written + copied)
    return saved - (elements * (2 + copies) + extra_bytes) / BYTES_PER_MICROSECOND - launches * LAUNCH_MICROSECONDS
