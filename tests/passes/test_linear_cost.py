"""What FP8 would slow down on a GPU is left alone, each weighed with those that read its input."""

from __future__ import annotations

from typing import Any

import torch

from te_compile.options import Options
from te_compile.passes.linear_cost import by_cost
from tests.selecting import fake_site


def test_a_small_linear_on_a_gpu_is_left_alone_unless_forced() -> None:
    small = fake_site("cuda", tokens=16)
    ((site, reason),) = by_cost([small], Options())
    assert site is small and "16×64×64" in reason and "cost_model=False" in reason
    assert not list(by_cost([small], Options(cost_model=False)))


def test_the_cost_model_is_off_on_a_cpu() -> None:
    assert not list(by_cost([fake_site("cpu", tokens=16)], Options()))


def readers_of_one_input(tokens: int, *features: tuple[int, int], apart: bool = False) -> list[Any]:
    """Linears on a GPU that read the same x; ``apart``: each its own."""
    sites = [fake_site("cuda", tokens=tokens) for _ in features]
    for site, size in zip(sites, features, strict=True):
        site.features, site.x = size, site.x if apart else sites[0].x
    return sites


def goes_to_fp8(sites: list[Any]) -> list[bool]:
    kept = {id(site) for site, _ in by_cost(sites, Options())}
    return [id(site) not in kept for site in sites]


def test_linears_that_read_one_input_share_what_its_fp8_copy_costs() -> None:
    projections = (4096, 4096), (4096, 1024), (4096, 1024)
    assert goes_to_fp8(readers_of_one_input(1024, *projections, apart=True)) == [True, False, False]
    assert goes_to_fp8(readers_of_one_input(1024, *projections)) == [True] * 3
    with torch.no_grad():  # a decoding step, where none would gain by itself
        assert goes_to_fp8(readers_of_one_input(16, *projections, apart=True)) == [False] * 3
        assert goes_to_fp8(readers_of_one_input(16, *projections)) == [True] * 3


def test_of_linears_that_read_one_input_those_that_lose_stay_and_the_others_pay() -> None:
    sites = readers_of_one_input(1024, (4096, 16), (4096, 4096))
    assert goes_to_fp8(sites) == [False, True]
    assert goes_to_fp8(readers_of_one_input(16, (64, 64), (64, 64), (64, 64))) == [False] * 3
