"""Selection: what the user says comes first, and strict mode objects to missing support alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from te_compile.options import Options
from te_compile.passes.plan import Cause, StrictError
from te_compile.passes.select import select_linears
from tests.capturing import regions_and_plan
from tests.selecting import Named, planned, verdict

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_a_plain_linear_goes_to_fp8() -> None:
    site = verdict(Named(proj=(32, 48)), torch.randn(5, 32))
    assert (site.status, site.reason, site.cause) == ("fp8", "", None)


def test_the_count_is_that_of_the_selected() -> None:
    _, plan = regions_and_plan(Named(a=(32, 48), b=(32, 8), c=(32, 16)), torch.randn(5, 32))
    assert select_linears(plan, Options.resolve({})) == 2 == len(plan.selected)


# --- the user ------------------------------------------------------------------------------------------------------


def test_exclude_and_include_decide_by_module_name() -> None:
    model, x = Named(a=(32, 48), b=(32, 48)), torch.randn(5, 32)
    excluded = {site.name: site.cause for site in planned(model, x, exclude=["a"]).sites}
    included = {site.name: site.cause for site in planned(model, x, include=["a"]).sites}
    assert excluded == {"a": Cause.USER, "b": None}
    assert included == {"a": None, "b": Cause.USER}


def test_a_function_may_look_at_the_site() -> None:
    model, x = Named(narrow=(32, 16), wide=(32, 64)), torch.randn(5, 32)
    plan = planned(model, x, exclude=lambda name, site: site.features[1] < 32)
    assert {site.name: site.status for site in plan.sites} == {"narrow": "kept", "wide": "fp8"}


def test_what_the_user_excluded_says_so_whatever_else_is_wrong_with_it() -> None:
    site = verdict(Named(odd=(32, 20)).double(), torch.randn(5, 32).double(), exclude=["odd"])
    assert site.cause is Cause.USER and "odd" in site.reason


# --- readers -------------------------------------------------------------------------------------------------------


def test_what_nobody_reads_is_not_computed_for_its_scales() -> None:
    model, x = Named(unread=(32, 48), read=(32, 16)), torch.randn(5, 32)

    def run(x: Tensor) -> Tensor:
        model.unread(x)
        return model.read(x)

    _, plan = regions_and_plan(run, x)
    select_linears(plan, Options.resolve({"strict": True}))
    unread, read = plan.sites
    assert (unread.status, unread.reason) == ("kept", "nobody reads its result; nothing to do: it is not computed")
    assert (read.status, read.reason) == ("fp8", "")


class HeadForNobody(nn.Module):
    """A linear, and a pooling head behind it whose result ``forward`` throws away."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.values = nn.Linear(32, 64), nn.Linear(64, 64)
        self.norm, self.dropout = nn.LayerNorm(64), nn.Dropout(0.1)
        self.fc1, self.fc2 = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        pooled = F.scaled_dot_product_attention(y[:, :1], y, self.values(y))
        self.fc2(self.dropout(self.fc1(self.norm(pooled)).relu()))
        return y.sin()


def test_nor_is_what_only_such_results_are_made_of() -> None:
    plan = planned(HeadForNobody().eval(), torch.randn(2, 5, 32))
    reasons = {site.name: site.reason.partition(";")[0] for site in plan.sites}
    of_others = "nobody reads what is made of its result"
    assert reasons == {"body": "", "values": of_others, "fc1": of_others, "fc2": "nobody reads its result"}


def test_what_a_dropout_reads_is_computed_for_what_it_draws() -> None:
    plan = planned(HeadForNobody().train(), torch.randn(2, 5, 32))
    assert [site.name for site in plan.sites if site.status == "kept"] == ["fc2"]


# --- strict --------------------------------------------------------------------------------------------------------


class WithWideOne(Named):
    """Linears of one input, and one named ``odd`` in a dtype that has no FP8 copy."""

    def __init__(self, **sizes: tuple[int, int]) -> None:
        super().__init__(**sizes)
        self.odd.double()

    def forward(self, x: Tensor) -> list[Tensor]:
        return [module(x.to(module.weight.dtype)).sin() for module in self.children()]


def test_strict_objects_to_missing_support_alone() -> None:
    model, x = WithWideOne(odd=(32, 20), lm_head=(32, 48), narrow=(32, 2), other=(32, 16)), torch.randn(5, 32)
    with pytest.raises(StrictError, match=r"(?s)1 linear.*odd.*20.*float64"):
        planned(model, x).require_all_supported()
    planned(model, x, exclude=["odd"]).require_all_supported()


def test_strict_does_not_object_to_what_a_rule_would_keep_anyway() -> None:
    model, x = WithWideOne(odd=(32, 2)), torch.randn(5, 32)
    planned(model, x).require_all_supported()


@pytest.mark.parametrize("features", [(64, 1), (1, 64)])
def test_what_only_the_model_takes_part_in_is_not_told_to_be_wider(features: tuple[int, int]) -> None:
    sites = planned(spectral_norm(nn.Linear(*features)), torch.randn(5, features[0])).sites
    reasons = [site.reason for site in sites if site.form == "mv"]
    assert reasons and all("belongs to the model" in reason for reason in reasons)


def test_the_fp8_share_leaves_out_what_rules_and_users_keep() -> None:
    model, x = WithWideOne(a=(32, 48), odd=(32, 20), lm_head=(32, 1600)), torch.randn(5, 32)
    assert planned(model, x).fp8_flops_fraction == pytest.approx(48 / (48 + 20))
    assert planned(model, x, exclude=["odd"]).fp8_flops_fraction == 1.0
