"""Keep linears in high precision whose launches cost the step more than FP8 saves: the second half of the cost model.

A step takes what the device needs or what the host needs to launch it, whichever is more. One linear cannot say which
of them waits, so all linears of a graph are weighed together:

    device = products + what stands around them + attention + convolutions
    host   = a step's price + each linear's price

A linear's price is that of a layer's linears with the norms and the attention around them. Where a graph launches more
than that, as routing to experts does, its kernels are counted (``launches``), and each has the price of those.

Linears are let go from those that gain least on the device, as long as the estimate of the whole step falls; those
that read one input go together. Under CUDA graphs the host launches nothing and only the device counts: a step of few
tokens, as in decoding, gains if FP8 saves more on its products than looking after the copies of weights takes. Whether
the GPU waits also decides if a faster kernel for attention is worth choosing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from torch import Tensor
from torch._inductor import config, list_mode_options
from torch._ops import HigherOrderOperator

from te_compile.options import Options
from te_compile.passes import speed
from te_compile.passes.captured_nodes import argument, called, size_hint, value_of
from te_compile.passes.convolution_cost import convolutions_microseconds
from te_compile.passes.efficient_attention import bias_learns
from te_compile.passes.input_readers import gain_of, products_of, readers_of_inputs
from te_compile.passes.launches import launches_of
from te_compile.passes.plan import Attention, Plan, Site


@dataclass(frozen=True)
class Step:
    """Microseconds of one step: what the device and the host need for it."""

    device: float
    host: float

    @property
    def time(self) -> float:
        """What the step takes."""
        return max(self.device, self.host)


@dataclass(frozen=True)
class _Weighed:
    """Linears that read one input: how many are launched, and the microseconds that FP8 saves on the device."""

    readers: list[Site]
    linears: int
    gain: float

    @classmethod
    def of(cls, readers: list[Site], training: bool) -> _Weighed:
        """Those of these linears."""
        return cls(readers, sum(map(products_of, readers)), gain_of(readers, training))

    def of_each(self) -> float:
        """What one linear saves, on average."""
        return self.gain / self.linears


def asked_of_inductor(options: Options) -> dict[str, Any]:
    """The Inductor options of the user's mode, and over them the user's own."""
    return {**(list_mode_options(options.mode) if options.mode else {}), **options.inductor}


def replays_cuda_graphs(options: Options) -> bool:
    """Will Inductor record this compilation's launches once and replay them?"""
    return bool(asked_of_inductor(options).get("triton.cudagraphs", config.triton.cudagraphs))


def _attention_time(attention: Attention, training: bool) -> float:
    """The device's time for one attention; 0 where nobody knows its shape."""
    if attention.status == "stays":
        return _time_spelled_out(attention, training)
    q, k = (value_of(argument(attention.node, place, name)) for place, name in ((0, "query"), (1, "key")))
    if not (isinstance(q, Tensor) and isinstance(k, Tensor)) or q.dim() < 3:
        return 0.0
    *leading, queries, width = map(size_hint, q.shape)
    heads = math.prod(leading)
    keys, causal = size_hint(k.shape[-2]), attention.mask in ("is_causal", "folded_causal")
    if attention.kernel == "window":
        left, right = attention.node.args[3:5]
        keys = min(keys, int(left) + 1 + int(right))  # type: ignore[arg-type]  # numbers, by the operator's schema
    rate = _attention_rate(attention)
    return speed.attention_microseconds(heads, queries, keys, width, rate, causal=causal, training=training)


def _attention_rate(attention: Attention) -> float:
    """FLOPs a microsecond of the kernel that an attention will have."""
    if attention.kernel == "biased":
        return speed.BIASED_ATTENTION_FLOPS_PER_MICROSECOND
    node = attention.node
    if called(node) == "scaled_dot_product_attention":
        if bias_learns(value_of(argument(node, 3, "attn_mask"))):
            return speed.LEARNED_BIAS_ATTENTION_FLOPS_PER_MICROSECOND
        if argument(node, 4, "dropout_p", 0.0):
            return speed.DROPOUT_ATTENTION_FLOPS_PER_MICROSECOND
    return speed.ATTENTION_FLOPS_PER_MICROSECOND


def _time_spelled_out(attention: Attention, training: bool) -> float:
    """The device's time for attention of which the plan knows the softmax or its scores, which it does of no call."""
    scores = value_of(attention.node)
    is_call = isinstance(attention.node.target, HigherOrderOperator) or not isinstance(scores, Tensor)
    if is_call or scores.dim() < 3:
        return 0.0
    return speed.scores_microseconds(math.prod(map(size_hint, scores.shape)), training=training)


def high_precision_step(plan: Plan, training: bool) -> Step:
    """The step with no linear in FP8."""
    graphs, linears = {site.node.graph for site in plan.sites}, {site.node for site in plan.sites}
    device = sum(_attention_time(attention, training) for attention in plan.attentions)
    device += convolutions_microseconds(graphs, linears, training)
    for site in plan.sites:
        in_high_precision, around = (
            time(site.tokens, *site.features, training=training)
            for time in (speed.high_precision_microseconds, speed.around_microseconds)
        )
        device += products_of(site) * (in_high_precision + around)
    return Step(device, _host_time(plan, training))


def _host_time(plan: Plan, training: bool) -> float:
    """What the host needs to launch it all: by its linears or by its kernels, whichever are more."""
    price, _ = speed.host_costs(training)
    forward, _ = speed.host_costs(training=False)
    kernels = launches_of({site.node.graph for site in plan.sites})
    counted = (price.linear * kernels.with_gradient + forward.linear * kernels.without) / speed.LAUNCHES_OF_A_LINEAR
    return max(price.of(sum(map(products_of, plan.sites))), price.step + counted)


def waits_for_host(plan: Plan, options: Options, training: bool) -> bool:
    """Would the GPU wait for the host, with the selected linears in FP8 and attention as PyTorch runs it?"""
    if not options.cost_model or replays_cuda_graphs(options):
        return False
    step = with_fp8(high_precision_step(plan, training), plan.selected, training)
    return step.host > step.device


def with_fp8(step: Step, sites: list[Site], training: bool) -> Step:
    """``step`` with the linears of ``sites`` in FP8."""
    saved = sum(gain_of(readers, training) for readers in readers_of_inputs(sites))
    return _changed(step, sum(map(products_of, sites)), saved, training)


def _changed(step: Step, linears: int, saved: float, training: bool) -> Step:
    """``step`` with so many linears in FP8, which save so many microseconds on the device."""
    if not linears:
        return step
    before, after = speed.host_costs(training)
    looking = 0.0 if training else speed.KEPT_COPIES_MICROSECONDS
    # A host that is spared something is no gain to count on: the costs are those of layers whose scales are known, and
    # of one kind of layer. A decoding step of Llama, all launches, would gain by them, and takes longer in FP8.
    more = max(0.0, after.step - before.step) + linears * max(0.0, after.linear - before.linear)
    return Step(step.device - saved + looking, step.host + more)


def too_dear_to_launch(plan: Plan, options: Options, training: bool) -> tuple[list[Site], str]:
    """Which of the selected linears to keep in high precision after all, and why.

    Those that gain the same, as in a stack of equal layers, stay together.
    """
    replays = replays_cuda_graphs(options)
    if not plan.selected or (replays and training):
        return [], ""

    weighed = [_Weighed.of(readers, training) for readers in readers_of_inputs(plan.selected)]
    weighed.sort(key=_Weighed.of_each, reverse=True)
    counts = [0, *accumulate(len(list(alike)) for _, alike in groupby(weighed, key=_Weighed.of_each))]
    linears, saved = ([0, *accumulate(of)] for of in zip(*((each.linears, each.gain) for each in weighed), strict=True))
    as_it_is = high_precision_step(plan, training)
    steps = {count: _changed(as_it_is, linears[count], saved[count], training) for count in counts}
    if replays:
        steps = {count: Step(step.device, 0.0) for count, step in steps.items()}
    best = min(counts, key=lambda count: (steps[count].time, -count))
    if steps[best].time > (1 - speed.LEAST_GAIN) * steps[0].time:
        best = 0
    kept = [site for each in weighed[best:] for site in each.readers]
    return kept, _reason(steps[len(weighed)], steps[best])


def _reason(asked: Step, chosen: Step) -> str:
    """Why the linears between the two stay in high precision, in one line."""
    by_host = asked.host >= asked.device
    bound = "the host" if by_host else "the GPU"
    times = f"with every eligible linear in FP8 {bound} would need about {asked.time:.0f} µs a step"
    spared = "mode='reduce-overhead' (CUDA graphs) spares the host, " if by_host else ""
    return f"too small to gain: {times}, against {chosen.time:.0f} µs like this; {spared}cost_model=False forces it"
