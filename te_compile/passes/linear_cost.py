"""Keep linears in high precision that FP8 makes slower on the device: the first half of the cost model.

Each is compared by itself, but for the FP8 copy of its input, which all share that read it. What the whole step gains
is the second half (``step_cost``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from te_compile.options import Options
from te_compile.passes.captured_nodes import value_of
from te_compile.passes.input_readers import price_of_input, readers_of_inputs, saved_by, weights_of
from te_compile.passes.plan import Site
from te_compile.passes.speed import fp8_microseconds, high_precision_microseconds


def by_cost(sites: Sequence[Site], options: Options) -> Iterator[tuple[Site, str]]:
    """On a GPU, those of ``sites`` that FP8 would make slower, and why; off on a CPU, where FP8 is about meaning and
    never about speed.

    Linears that read one input share its FP8 copy: together they gain if what they save is more than that takes.
    """
    if not options.cost_model:
        return
    training = torch.is_grad_enabled()
    for readers in readers_of_inputs(site for site in sites if value_of(site.x).device.type == "cuda"):
        saved = [saved_by(site, training) for site in readers]
        together = sum(each for each in saved if each > 0) >= price_of_input(readers[0], training)
        for site, each in zip(readers, saved, strict=True):
            if not together or each <= 0:
                yield site, _too_small(site, training, shares_input=together)


def _too_small(site: Site, training: bool, *, shares_input: bool) -> str:
    in_fp8 = fp8_microseconds(
        site.tokens, *site.features,
        padding=site.padding, training=training, weights=weights_of(site), shares_input=shares_input,
    )  # fmt: skip
    as_it_is = high_precision_microseconds(site.tokens, *site.features, training=training)
    shape = f"{site.tokens}×{site.features[0]}×{site.features[1]}"
    times = f"{shape} would take about {in_fp8:.0f} µs in FP8 against {as_it_is:.0f} µs"
    return f"too small to gain: {times}; cost_model=False forces it"
