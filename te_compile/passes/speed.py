"""How long linears take in high precision and in FP8, in microseconds: the numbers behind ``cost_model=True``.

On the device a product takes what its FLOPs or its bytes take, whichever is more. In FP8 it also pays for reading its
operands and writing their FP8 copies, and for the launches of the kernels that do. On the host every linear and every
step have a fixed price, which does not shrink with the tensors: below some size the GPU waits for the host, and what
FP8 saves on the device is lost. ``step_cost`` weighs the two.

All constants but five were measured on an H200 by ``python -m benchmarks.constants``, which measures them on the
machine at hand and prints them as they stand here. Other GPUs differ in scale more than in ratio, and the model only
has to find the sign.
"""

from __future__ import annotations

from dataclasses import dataclass

from te_compile.kernels.tiles import alone

BF16_FLOPS_PER_MICROSECOND = 688e6
FP8_FLOPS_PER_MICROSECOND = 1320e6
ATTENTION_FLOPS_PER_MICROSECOND = 429e6
DROPOUT_ATTENTION_FLOPS_PER_MICROSECOND = 180e6
BIASED_ATTENTION_FLOPS_PER_MICROSECOND = 150e6
LEARNED_BIAS_ATTENTION_FLOPS_PER_MICROSECOND = 50e6
"""Of kernels that draw or read bits, of ours that add a bias, and of PyTorch's one that has a gradient for it: by what
attention takes in ``python -m benchmarks.survey --only roberta --only "bert, padded" --only t5 --only beit --kernels
20``."""
CONVOLUTION_FLOPS_PER_MICROSECOND = 300e6
FEW_CHANNELS_CONVOLUTION_FLOPS_PER_MICROSECOND = 39e6
"""Of convolutions that are no linears, and of those of fewer than FEW_CHANNELS. Neither was measured over many shapes:
the first is the lower end of what cuDNN reaches in networks like ResNet, and the second what it makes of BEiT's
patches, 16 × 16 of 64 images of 224 pixels and 3 channels, by 768 features, which take 381 µs."""
FEW_CHANNELS = 8  # for each element of the result: with fewer, cuDNN has no kernel of today's tensor cores
BYTES_PER_MICROSECOND = 3.4e6
LAUNCH_MICROSECONDS = 2.5
KEPT_COPIES_MICROSECONDS = 16.0
"""The device's time in a call without gradients to see that kept copies are still those of the weights, and what scales
there are: by ``python -m benchmarks.models --models llama8b --works decode --only te_fp8_graphs --profile``."""


@dataclass(frozen=True)
class HostCost:
    """Microseconds that the host needs for a step of a compiled graph, and more for each linear with what is around."""

    step: float
    linear: float

    def of(self, linears: int) -> float:
        """A step with so many linears, all of one kind."""
        return self.step + self.linear * linears


# Those of a cloud machine with an H200, means of three runs on it while nothing else ran. One differs from the next: a
# layer of four linears by up to a sixth from the mean, and more in what counts as the step's, what as a linear's. Hosts
# differ by a factor of two, but in both columns alike.
HIGH_PRECISION_TRAINING = HostCost(step=950.0, linear=188.0)
FP8_TRAINING = HostCost(step=1090.0, linear=188.0)
HIGH_PRECISION_INFERENCE = HostCost(step=98.0, linear=53.0)
FP8_INFERENCE = HostCost(step=146.0, linear=46.0)

LAUNCHES_OF_A_LINEAR = 2
"""How many kernels of a forward the price of a linear pays for: in the layer that was measured two norms, attention and
an activation stand beside four linears."""

LEAST_GAIN = 0.05
"""What a whole step must gain by estimate before it is touched: an estimate is not better than that."""


def host_costs(training: bool) -> tuple[HostCost, HostCost]:
    """What the host needs in high precision and in FP8."""
    return (HIGH_PRECISION_TRAINING, FP8_TRAINING) if training else (HIGH_PRECISION_INFERENCE, FP8_INFERENCE)


def _product(rows: int, columns: int, length: int, flops_per_microsecond: float, operand_bytes: float) -> float:
    """[rows, length] · [length, columns] with a 16-bit result: bound by its FLOPs or by its bytes."""
    computing = 2.0 * rows * columns * length / flops_per_microsecond
    moved = operand_bytes * (rows * length + length * columns) + 2.0 * rows * columns
    return max(computing, moved / BYTES_PER_MICROSECOND)


def _products(
    tokens: int, rows: int, columns: int, flops_per_microsecond: float, operand_bytes: float, training: bool
) -> float:
    """Forward, and in training dgrad and wgrad."""
    shapes = [(tokens, columns, rows), (tokens, rows, columns), (rows, columns, tokens)][: 3 if training else 1]
    return sum(_product(*shape, flops_per_microsecond, operand_bytes) for shape in shapes)


def high_precision_microseconds(tokens: int, in_features: int, out_features: int, *, training: bool) -> float:
    """The device's time for one linear of ``tokens`` × ``in_features`` → ``out_features`` in 16 bits."""
    return _products(tokens, in_features, out_features, BF16_FLOPS_PER_MICROSECOND, 2.0, training)


def fp8_microseconds(
    tokens: int,
    in_features: int,
    out_features: int,
    *,
    padding: tuple[int, int] = (0, 0),
    training: bool,
    weights: int = 1,
    shares_input: bool = False,
) -> float:
    """The same in FP8, with what making the FP8 copies takes.

    padding: the (in, out) features that are added for FP8. weights: how many there are, each for some of the tokens.
    shares_input: without making that of the input (:func:`input_microseconds`).
    """
    more_in, more_out = padding
    rows, columns = in_features + more_in, out_features + more_out
    # Each operand is read once in 16 bit and written twice (both layouts) in FP8. In inference the copies of weights
    # are kept from call to call.
    elements = weights * rows * columns + tokens * columns if training else 0
    launches = 2 if training else 0
    # A result cut to size is written once more, by a kernel that does what stands around it too; and its gradient. The
    # padded weight, and its gradient, are copied by kernels of their own.
    written = (2 if training else 1) * 2 * tokens * (out_features if more_out else 0)
    copied = 2 * 4 * weights * in_features * out_features if training and (more_in or more_out) else 0
    quantizing = (elements * 4 + written + copied) / BYTES_PER_MICROSECOND
    products = _products(tokens, rows, columns, FP8_FLOPS_PER_MICROSECOND, 1.0, training)
    of_input = 0.0 if shares_input else input_microseconds(tokens, in_features, padding=more_in, training=training)
    return products + quantizing + launches * LAUNCH_MICROSECONDS + of_input


def input_microseconds(tokens: int, in_features: int, *, padding: int = 0, training: bool) -> float:
    """What the FP8 copy of an input costs, which all linears that read it share. padding: features added for FP8."""
    # Written once (inference) or twice (both layouts). In a model that never trained, or with current scaling, it is
    # measured before, unless one program does both; those launches are counted where a step may be so short that they
    # show.
    copies, launches = (2, 1) if training else (1, 1 if alone(tokens, in_features + padding) else 2)
    # What is padded is written once more, by a kernel that does what stands around it too; and so is its gradient.
    written = (2 if training else 1) * 2 * tokens * (in_features if padding else 0)
    bytes_moved = tokens * (in_features + padding) * (2 + copies) + written
    return bytes_moved / BYTES_PER_MICROSECOND + launches * LAUNCH_MICROSECONDS


def gain_microseconds(
    tokens: int,
    in_features: int,
    out_features: int,
    *,
    padding: tuple[int, int] = (0, 0),
    training: bool,
    weights: int = 1,
    shares_input: bool = False,
) -> float:
    """Device time that FP8 saves on one linear; negative if it loses. Arguments are those of fp8_microseconds."""
    in_fp8 = fp8_microseconds(
        tokens, in_features, out_features,
        padding=padding, training=training, weights=weights, shares_input=shares_input,
    )  # fmt: skip
    return high_precision_microseconds(tokens, in_features, out_features, training=training) - in_fp8


def around_microseconds(tokens: int, in_features: int, out_features: int, *, training: bool) -> float:
    """The device's time for what stands around a linear (norms, activations, sums): its input and its result are read
    and written once in 16 bits, and twice more by the backward pass."""
    return 2 * 2.0 * tokens * (in_features + out_features) * (3 if training else 1) / BYTES_PER_MICROSECOND


def convolution_microseconds(flops: float, moved: float, of_weight: float, *, channels: int, gradients: int) -> float:
    """The device's time for a convolution that is no linear, and for what stands around it.

    flops: of the forward. moved: the bytes of its input and of its result. of_weight: those of its weight. channels:
    how many each element of the result is summed over. gradients: how many it has, of the input and of the weight.
    """
    rate = CONVOLUTION_FLOPS_PER_MICROSECOND
    if channels < FEW_CHANNELS:
        rate = FEW_CHANNELS_CONVOLUTION_FLOPS_PER_MICROSECOND
    product = max(flops / rate, (moved + of_weight) / BYTES_PER_MICROSECOND)
    around = 2 * moved * (3 if gradients else 1) / BYTES_PER_MICROSECOND  # as around a linear
    return (1 + gradients) * product + around


def attention_microseconds(
    heads: int,
    queries: int,
    keys: int,
    width: int,
    flops_per_microsecond: float = ATTENTION_FLOPS_PER_MICROSECOND,
    *,
    causal: bool,
    training: bool,
) -> float:
    """The device's time for scaled dot products of ``heads`` heads, those of all sequences together."""
    flops = 4.0 * heads * queries * keys * width * (0.5 if causal else 1.0)
    return flops * (3.5 if training else 1.0) / flops_per_microsecond


def scores_microseconds(scores: int, *, training: bool) -> float:
    """The device's time for attention that is spelled out: so many scores are written and read in 16 bits by softmax
    and by both products, and with their gradients by five kernels more."""
    return 2.0 * scores * (11 if training else 4) / BYTES_PER_MICROSECOND
