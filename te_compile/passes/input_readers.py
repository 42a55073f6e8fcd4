"""What FP8 saves on the device, where linears that read one input share its FP8 copy: they are weighed together.

q, k and v of a decoding step would lose one by one, each by a copy of the input of its own, and gain as they are. So
what that copy costs counts once for all of them, and they stay together: none of them pays it for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from te_compile.passes import speed
from te_compile.passes.plan import Site


def readers_of_inputs(sites: Iterable[Site]) -> list[list[Site]]:
    """``sites`` by the input that they read as it is; what is spelled out as products first is by itself."""
    readers: dict[int, list[Site]] = {}
    for site in sites:
        readers.setdefault(id(site) if site.spell or site.linears > 1 else id(site.x), []).append(site)
    return list(readers.values())


def gain_of(readers: Sequence[Site], training: bool) -> float:
    """Microseconds that FP8 saves on the device for all linears that read one input; negative if it loses."""
    return sum(saved_by(site, training) for site in readers) - price_of_input(readers[0], training)


def saved_by(site: Site, training: bool) -> float:
    """Microseconds that FP8 saves on the products of ``site``, if there are FP8 copies of its input."""
    once = speed.gain_microseconds(
        site.tokens, *site.features,
        padding=site.padding, training=training, weights=weights_of(site), shares_input=True,
    )  # fmt: skip
    return once * products_of(site)


def price_of_input(site: Site, training: bool) -> float:
    """Microseconds of the device for the FP8 copies of what the linears of ``site`` read."""
    once = speed.input_microseconds(site.tokens, site.features[0], padding=site.padding[0], training=training)
    return once * products_of(site)


def weights_of(site: Site) -> int:
    """How many weights are quantised: experts that share the rows of x have one each, whoever gets the tokens."""
    return site.linears if site.ends is not None else 1


def products_of(site: Site) -> int:
    """How many linears are launched: experts that share the rows of x are one grouped product."""
    return 1 if site.ends is not None else site.linears
