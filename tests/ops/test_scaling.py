"""``te::snapshot`` and ``te::update_scales_``: the state is read before it changes, in compiled graphs too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from te_compile.ops.quantize import QUANTIZE
from te_compile.ops.scaling import SNAPSHOT, UPDATE_SCALES
from te_compile.recipe import DelayedScaling, Float8CurrentScaling, Format, ScaleRule, remember

RULE = ScaleRule().text()
E4M3 = torch.float8_e4m3fn


def key(**parameters: Any) -> str:
    return remember(DelayedScaling(**{"amax_history_len": 4, **parameters}))


def test_a_snapshot_is_a_copy() -> None:
    states = [torch.rand(2, 6), torch.rand(1, 6)]
    scales = SNAPSHOT(states)
    before = [states[0][0, 0].item(), states[0][1, 0].item(), states[1][0, 0].item()]
    for state in states:
        state.zero_()
    assert scales.tolist() == before


def test_amaxes_come_as_scalars_or_as_rows() -> None:
    one, two = [torch.zeros(2, 6), torch.zeros(1, 6)], [torch.zeros(2, 6), torch.zeros(1, 6)]
    seen = torch.rand(3) + 0.1
    UPDATE_SCALES(one, list(seen.unbind(0)), "forward", key())
    UPDATE_SCALES(two, [seen[:2], seen[2:]], "forward", key())
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    assert torch.equal(one[0][:, 0], torch.full((2,), 448.0) / seen[:2])


@pytest.mark.parametrize(
    ("direction", "fp8_format", "fp8_max"),
    [("forward", Format.HYBRID, 448.0), ("backward", Format.HYBRID, 57344.0), ("backward", Format.E4M3, 448.0)],
)
def test_each_direction_has_the_range_of_its_type(direction: str, fp8_format: Format, fp8_max: float) -> None:
    state = [torch.zeros(1, 6)]
    UPDATE_SCALES(state, [torch.tensor(2.0)], direction, key(fp8_format=fp8_format))
    assert state[0][0, 0] == fp8_max / 2


def test_bad_amaxes_are_counted_zero_is_ignored_and_the_rest_recorded() -> None:
    state = torch.zeros(4, 6)
    state[:, 0] = 5.0
    UPDATE_SCALES([state], [torch.tensor([torch.nan, torch.inf, 0.0, 4.0])], "forward", key())
    assert state[:, 0].tolist() == [5.0, 5.0, 5.0, 112.0]
    assert state[:, 1].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert state[:, 2].tolist() == [0.0, 0.0, 0.0, 4.0] and not state[:, 3:].any()


def test_functions_of_the_users_decide_where_the_recipe_has_them() -> None:
    recipe = key(
        amax_compute_algo=lambda history: history.sum(0),
        scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: amax + fp8_max,
    )
    state = torch.zeros(1, 6)
    for amax in (1.0, 2.0, 4.0):
        UPDATE_SCALES([state], [torch.tensor(amax)], "forward", recipe)
    assert state[0].tolist() == [455.0, 0.0, 4.0, 2.0, 1.0, 0.0]


def test_all_ranks_take_the_largest_amax_in_one_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = torch.tensor([0.5, 8.0, torch.inf])
    calls: list[Any] = []

    def all_reduce(tensor: Tensor, op: Any, group: Any) -> None:
        assert group is None
        calls.append(op)
        tensor.copy_(torch.maximum(tensor, elsewhere))

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    here = [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)]
    states = [torch.zeros(2, 6), torch.zeros(1, 6)]
    UPDATE_SCALES(states, here, "forward", key())
    assert calls == [torch.distributed.ReduceOp.MAX]
    assert states[0][:, 0].tolist() == [448.0, 56.0] and states[1][0, :2].tolist() == [0.0, 1.0]
    assert [amax.item() for amax in here] == [1.0, 2.0, 3.0]
    UPDATE_SCALES(states, here, "forward", key(reduce_amax=False))
    assert len(calls) == 1


def test_mistakes_are_named() -> None:
    state = [torch.zeros(2, 6)]
    with pytest.raises(ValueError, match="1 amaxes for 2 rows"):
        UPDATE_SCALES(state, [torch.tensor(1.0)], "forward", key())
    with pytest.raises(ValueError, match="sideways"):
        UPDATE_SCALES(state, [torch.ones(2)], "sideways", key())
    with pytest.raises(ValueError, match="keeps no state"):
        UPDATE_SCALES(state, [torch.ones(2)], "forward", remember(Float8CurrentScaling()))
    assert not state[0].any()


def test_schemas_and_fakes_tell_the_truth() -> None:
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(SNAPSHOT, ([torch.rand(2, 6), torch.rand(1, 6)],), test_utils=checks)
    arguments = ([torch.rand(2, 6), torch.rand(1, 6)], [torch.rand(2), torch.rand(1)], "forward", key())
    torch.library.opcheck(UPDATE_SCALES, arguments, test_utils=checks)


class _Scaled(torch.autograd.Function):
    """x through FP8 and back, its gradient too; both states are updated where a lowered graph does it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_state: Tensor, backward_state: Tensor, recipe: str) -> Tensor:
        scales = SNAPSHOT([forward_state, backward_state])
        q, _, amax, scale_inv = QUANTIZE(x, scales[0], E4M3, True, False, RULE)
        UPDATE_SCALES([forward_state], [amax], "forward", recipe)
        ctx.save_for_backward(q, scale_inv, scales, backward_state)
        ctx.recipe = recipe
        return q.float() * scale_inv

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        q, scale_inv, scales, backward_state = ctx.saved_tensors
        dq, _, amax, dy_scale_inv = QUANTIZE(dy, scales[1], torch.float8_e5m2, True, False, RULE)
        UPDATE_SCALES([backward_state], [amax], "backward", ctx.recipe)
        return dq.float() * dy_scale_inv + q.float() * scale_inv * scales[0], None, None, None


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_compiled_step_reads_the_old_scale_and_leaves_the_new_one(compiler: str) -> None:
    recipe = key()

    def step(x: Tensor, forward_state: Tensor, backward_state: Tensor) -> Tensor:
        return _Scaled.apply(torch.relu(x), forward_state, backward_state, recipe).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=compiler, fullgraph=True)
    eager_states = [torch.zeros(1, 6), torch.zeros(1, 6)]
    states = [state.clone() for state in eager_states]
    for round_ in range(4):
        x = torch.randn(16, 32) * 3.0**round_
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        step(inputs[0], *eager_states).backward()
        compiled(inputs[1], *states).backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-6, atol=1e-6)
        for state, wanted in zip(states, eager_states, strict=True):
            assert torch.equal(state, wanted)
    assert states[0][0, 0] > 0 and states[1][0, 0] > 0
