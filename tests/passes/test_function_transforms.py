"""Function transforms of torch.func inside a model: what they surround stays as it is, what stands outside does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from te_compile.passes import manager
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.plan import Cause
from te_compile.passes.regions import regions_of
from te_compile.passes.text import ops_text
from tests.capturing import captured, regions_and_plan
from tests.compiling import compiled, cosine, train_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Transformed(nn.Module):
    """``function`` of a norm, a linear and the input; then a norm and a linear of its own."""

    def __init__(self, function: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))
        self.outside = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(x + self.function(lambda row: self.inside(row), x))


def energy(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x).square().sum()


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "vmap": lambda f, x: torch.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(energy(f))(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x)[0],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x[0, 0]) @ x[0, 0],
    "gradients of each sample": lambda f, x: torch.vmap(torch.func.grad(energy(f)))(x),
    "vmap in a checkpoint": lambda f, x: checkpoint(lambda rows: torch.vmap(f)(rows), x, use_reentrant=False),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_model_with_a_transform_inside_trains(name: str) -> None:
    model = Transformed(TRANSFORMS[name])
    x = torch.randn(4, 6, 32)
    y, expected = train_step(model, model, x)
    with manager.recording() as records:
        got_y, got = train_step(model, compiled(model), x)
    (record,) = records
    causes = {site.name: site.cause for site in record.plan.sites}
    assert causes == {"inside.1": Cause.UNSUPPORTED, "outside.1": None}
    assert cosine(got_y, y) > 0.99 and got.keys() == expected.keys()
    assert all(cosine(got[key], gradient) > 0.97 for key, gradient in expected.items() if gradient.dim() > 1)


def test_the_reason_names_the_transform() -> None:
    _, plan = regions_and_plan(Transformed(TRANSFORMS["vmap"]), torch.randn(4, 6, 32))
    (reason,) = (site.reason for site in plan.sites if site.cause)
    assert reason.startswith("inside a function transform of torch.func (vmap)")


def test_what_stands_between_entering_and_leaving_is_inside() -> None:
    gm, _ = captured(Transformed(TRANSFORMS["vmap"]), torch.randn(4, 6, 32))
    inside = transforms_around(gm.graph)
    norms = gm.graph.find_nodes(op="call_function", target=F.layer_norm)
    assert [norm in inside for norm in norms] == [True, False], ops_text(gm.graph)


def test_a_graph_without_transforms_has_nothing_inside_one() -> None:
    gm, _ = captured(Transformed(lambda f, x: f(x)), torch.randn(4, 6, 32))
    assert not transforms_around(gm.graph)


def test_a_checkpointed_body_inside_is_not_entered() -> None:
    """Eager mode cannot recompute it; torch.compile can."""
    model = Transformed(lambda f, x: torch.vmap(lambda row: checkpoint(f, row, use_reentrant=False))(x))
    gm, _ = captured(model, torch.randn(4, 6, 32))
    regions, left = regions_of(gm)
    assert len(regions) == 1 and [each.operator for each in left] == ["tag_activation_checkpoint"]


def test_norms_and_attention_inside_keep_their_spelling() -> None:
    def attend(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        def one(row: Tensor) -> Tensor:
            h = f(row)
            return torch.softmax(h @ h.transpose(-1, -2) / 32**0.5, -1) @ h

        return torch.vmap(one)(x)

    model = Transformed(attend)
    x = torch.randn(3, 2, 6, 32)
    with manager.recording() as records:
        compiled(model)(x)
    counts = {each.name: each.count for each in records[0].passes}
    assert (counts["recognise_norms"], counts["recognise_attention"]) == (1, 0)


def test_a_weight_that_leaves_a_transform_is_kept() -> None:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.fc = nn.Parameter(torch.randn(4, 32, 32)), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            members = torch.vmap(lambda w: F.linear(x, w))(self.weight)
            turned = torch.vmap(lambda w: w.t() * 2.0)(self.weight)[0]
            return self.fc(members.mean(0)) + F.linear(x, turned)

    model = Ensemble()
    x = torch.randn(5, 32)
    with manager.recording() as records:
        y = compiled(model)(x)
    assert [site.status for site in records[0].plan.sites] == ["kept", "fp8", "kept"]
    assert cosine(y, model(x)) > 0.999


def test_a_product_of_two_tensors_that_are_batched_is_looked_at_without_a_level() -> None:
    def run(x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row @ row.T)(x)

    x = torch.randn(4, 6, 8, requires_grad=True)
    torch.testing.assert_close(compiled(run)(x), run(x))
