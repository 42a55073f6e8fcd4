"""``te_compile.stats``: figures that are right, and a measurement that leaves no trace."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_compile
from te_compile.backend import te_fp8
from te_compile.inspect.statistics import MEASURED, Statistics, TensorStatistics, figures, statistics_of, summed

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Block(nn.Module):
    """A norm, a dropout, batch statistics, two linears and one that is too narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.statistics, self.narrow = nn.BatchNorm1d(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.1, self.training))
        return self.narrow(self.statistics(x + y)).square().sum()


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=te_fp8, options={"compiler": "aot_eager", **options})


def by_tensor(found: Statistics) -> dict[tuple[str, str], TensorStatistics]:
    return {(row.name, row.role): row for row in found.rows}


WEIGHTS = ("up.weight", "down.weight")


# --- one tensor ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "lost"), [(E4M3, 464), (E5M2, 61440)])  # half a step above 448 and 57344
def test_figures_are_those_of_the_cast_itself(dtype: torch.dtype, lost: float) -> None:
    largest = torch.finfo(dtype).max
    x = torch.randn(40, 30) * 10.0 ** torch.randint(-6, 2, (40, 30))
    scale = largest / x.abs().amax() * 2
    found = dict(zip(("amax", *MEASURED), figures(x, scale, dtype).tolist(), strict=True))
    back = (x.double() * scale.double()).clamp(-largest, largest).float().to(dtype).double() / scale.double()
    assert found["amax"] == pytest.approx(float(x.abs().amax()))
    assert found["elements"] == found["nonzero"] == x.numel()
    assert found["underflow"] == int(((back == 0) & (x != 0)).sum())
    assert found["overflow"] == int((x.abs() * scale >= lost).sum()) >= 1
    assert found["error"] == pytest.approx(float((back - x).square().sum()), rel=1e-4)
    assert found["power"] == pytest.approx(float(x.double().square().sum()), rel=1e-4)


def test_rounding_to_the_largest_number_is_no_overflow() -> None:
    x = torch.tensor([448.0, 463.0, 465.0])
    assert figures(x, torch.tensor(1.0), E4M3).tolist()[1 + MEASURED.index("overflow")] == 1


def test_what_is_not_finite_is_not_measured_and_zeros_do_not_underflow() -> None:
    x = torch.tensor([0.0, 1.0, torch.inf, torch.nan])
    values = dict(zip(("amax", *MEASURED), figures(x, torch.tensor(1.0), E4M3).tolist(), strict=True))
    assert (values["amax"], values["elements"], values["nonzero"], values["underflow"]) == (1, 2, 1, 0)


def test_an_exact_tensor_has_no_error_and_an_empty_one_no_shares() -> None:
    row = statistics_of("w", "w", 1.0, 448.0, 0, None, figures(torch.ones(4), torch.tensor(1.0), E4M3))
    assert row.relative_error == 0 and row.sqnr is None and row.headroom == pytest.approx(math.log2(448))
    empty = statistics_of("w", "w", 1.0, 448.0, 0, None, figures(torch.ones(0, 4), torch.tensor(1.0), E4M3))
    assert empty.elements == 0 and empty.underflow == empty.overflow == 0


def test_several_tensors_add_up_as_one() -> None:
    scale, parts = torch.tensor(3.0), [torch.randn(5, 7), torch.randn(9, 7)]
    whole = figures(torch.cat(parts), scale, E4M3)
    torch.testing.assert_close(summed([figures(part, scale, E4M3) for part in parts]), whole)


# --- from the state ------------------------------------------------------------------------------------------------


def test_before_the_first_step_there_is_a_note_and_no_row(fresh_dynamo: None) -> None:
    found = te_compile.stats(Block())
    assert not found.rows and "call the compiled model first" in str(found)
    assert "nothing known" in str(found).partition("\n")[0]
    assert "keeps no state" in str(te_compile.stats(Block(), options={"recipe": "current"}))


def test_the_state_tells_amax_scale_and_headroom_of_every_tensor(fresh_dynamo: None) -> None:
    model, x = Block(), torch.randn(16, 16)
    fast = compiled(model, recipe={"name": "delayed", "margin": 1})
    fast(x).backward()
    found = te_compile.stats(fast, options={"recipe": {"name": "delayed", "margin": 1}})
    rows = by_tensor(found)
    assert rows.keys() == {(name, role) for name in WEIGHTS for role in ("x", "w", "gradient")}
    assert not found.measured
    for (name, role), row in rows.items():
        assert row.headroom == pytest.approx(1.0, abs=1e-3), (name, role)  # the margin
        assert (row.sqnr is not None) == (role == "w")
    normed = F.layer_norm(x, (16,), model.norm.weight, model.norm.bias)
    assert rows["up.weight", "x"].amax == pytest.approx(float(normed.detach().abs().amax()), rel=1e-5)
    assert rows["down.weight", "w"].amax == pytest.approx(float(model.down.weight.detach().abs().amax()))


def test_the_state_knows_which_format_its_gradients_have(fresh_dynamo: None) -> None:
    model, x = Block().eval(), torch.randn(16, 16)  # no dropout: the measured step has the numbers of the first
    compiled(model, recipe="delayed fp8_format=E4M3")(x).backward()
    assert all(row.headroom == pytest.approx(0.0, abs=1e-3) for row in te_compile.stats(model).rows)
    measured = te_compile.stats(model, x, options={"recipe": "delayed fp8_format=E4M3"})
    assert all(row.overflow == 0 for row in measured.rows)
    kept, hybrid = by_tensor(te_compile.stats(model)), by_tensor(te_compile.stats(model, x))
    for key, row in hybrid.items():
        times = torch.finfo(E5M2).max / torch.finfo(E4M3).max if key[1] == "gradient" else 1
        assert row.scale == pytest.approx(kept[key].scale * times), "measured with the other format"
        if key != ("up.weight", "gradient"):  # larger, maybe, by E5M2's rounding behind it
            assert row.overflow == 0, key
        assert row.headroom == pytest.approx(0, abs=0.5), key


def test_skipped_amaxes_are_counted(fresh_dynamo: None) -> None:
    model = Block().eval()
    fast = compiled(model)
    fast(torch.randn(16, 16)).backward()
    fast(torch.full((16, 16), torch.inf)).backward()
    assert by_tensor(te_compile.stats(model))["up.weight", "x"].skipped == 1


# --- measured ------------------------------------------------------------------------------------------------------


def test_a_measured_step_covers_every_tensor_with_the_scales_of_the_state(fresh_dynamo: None) -> None:
    model, x = Block(), torch.randn(16, 16)
    fast = compiled(model)
    fast(x).backward()
    found = te_compile.stats(fast, x)
    rows, kept = by_tensor(found), by_tensor(te_compile.stats(fast))
    assert found.measured and rows.keys() == kept.keys()
    for key, row in rows.items():
        assert row.scale == pytest.approx(kept[key].scale), key
        assert row.elements > 0 and row.sqnr is not None and 15 < row.sqnr < 60, key
    assert rows["up.weight", "x"].elements == 16 * 16 and rows["up.weight", "gradient"].elements == 16 * 32
    assert rows["up.weight", "w"].sqnr == pytest.approx(kept["up.weight", "w"].sqnr)


def test_a_scale_that_is_too_large_shows_as_overflow(fresh_dynamo: None) -> None:
    model, x = Block().eval(), torch.randn(16, 16)
    fast = compiled(model)
    fast(x).backward()
    with torch.no_grad():
        model.norm.weight.mul_(1000)
    row = by_tensor(te_compile.stats(fast, x))["up.weight", "x"]
    assert row.headroom == pytest.approx(-math.log2(1000), abs=0.2)
    assert row.overflow is not None and row.overflow > 0.5


def test_measuring_leaves_no_trace(fresh_dynamo: None) -> None:
    model, x = Block(), torch.randn(16, 16)
    fast = compiled(model)
    fast(x).backward()

    def everything() -> list[Any]:
        values = [*model.state_dict().values(), *te_compile.state_dict(model).values(), torch.get_rng_state()]
        return [each.tolist() for each in [*values, *(p.grad for p in model.parameters())]]

    before = everything()
    te_compile.stats(fast, x)
    assert everything() == before


def test_a_model_that_never_ran_is_calibrated_and_gets_no_state(fresh_dynamo: None) -> None:
    model = Block()
    rows = by_tensor(te_compile.stats(model, torch.randn(16, 16)))
    assert len(rows) == 6 and all(row.headroom == pytest.approx(0, abs=1e-3) for row in rows.values())
    assert not te_compile.state_dict(model)


def test_without_gradients_the_forward_alone_is_measured(fresh_dynamo: None) -> None:
    with torch.no_grad():
        rows = by_tensor(te_compile.stats(Block(), torch.randn(16, 16), options={"recipe": "current"}))
    assert {role for _, role in rows} == {"x", "w"}


class Inner(nn.Module):
    """One linear, in a frame of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Repeated(nn.Module):
    """Linears that share one graph, with ``factor**index`` after each."""

    def __init__(self, blocks: int, factor: float) -> None:
        super().__init__()
        self.h, self.factor = nn.ModuleList(Inner() for _ in range(blocks)), factor

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.h):
            x = block(x) * self.factor**index
            torch._dynamo.graph_break()
        return x.sum()


def test_blocks_that_share_one_graph_are_told_apart(fresh_dynamo: None) -> None:
    x = torch.randn(16, 16)
    rows = by_tensor(te_compile.stats(Repeated(3, 10.0), x))
    assert {name for name, _ in rows} == {f"h.{index}.fc.weight" for index in range(3)}
    assert rows["h.0.fc.weight", "x"].amax == pytest.approx(float(x.abs().amax()))
    assert rows["h.0.fc.weight", "gradient"].amax != rows["h.2.fc.weight", "gradient"].amax
    assert rows["h.2.fc.weight", "gradient"].amax == pytest.approx(100)


def test_a_gradient_is_its_own_block_s_when_backward_has_freed_those_before(fresh_dynamo: None) -> None:
    rows = by_tensor(te_compile.stats(Repeated(30, 1.0), torch.randn(16, 16)))  # ever some, where places are reused
    assert {name: row.elements for (name, role), row in rows.items() if role == "gradient"} == {
        f"h.{index}.fc.weight": 16 * 16 for index in range(30)
    }


class Computed(nn.Module):
    """Two linears by slices of one parameter, one of them scaled up, and one by a masked parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.masked = nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(16, 16))
        self.mask: Tensor
        self.register_buffer("mask", (torch.rand(16, 16) > 0.5) * 100.0)
        self.both.data[16:] *= 1000

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.both[:16]) + F.linear(x, self.both[16:])
        return F.linear(y, self.masked * self.mask).square().sum()


def test_a_weight_that_is_computed_is_measured_as_it_is_quantised(fresh_dynamo: None) -> None:
    model = Computed()
    rows = by_tensor(te_compile.stats(model, torch.randn(16, 16), options={"recipe": "current"}))
    assert rows["masked", "w"].amax == pytest.approx(float((model.masked * model.mask).abs().amax()))
    assert rows["both", "w"].amax == pytest.approx(float(model.both.abs().amax()))
    for name in ("both", "masked"):  # by a scale of its own each
        row = rows[name, "w"]
        assert row.sqnr is not None and row.sqnr > 28 and row.overflow == 0, row


def test_padding_of_a_weight_is_not_measured(fresh_dynamo: None) -> None:
    rows = by_tensor(te_compile.stats(nn.Linear(20, 24), torch.randn(16, 20), loss=lambda out: out.sum()))
    assert rows["weight", "w"].elements == 20 * 24


class Thrice(Inner):
    """One linear for tensors of three sizes."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) + self.fc(100 * x) + self.fc(x / 100)).square().sum()


def test_the_scale_of_several_tensors_is_that_of_the_largest(fresh_dynamo: None) -> None:
    x = torch.randn(16, 16)
    row = by_tensor(te_compile.stats(Thrice(), x, options={"recipe": "current"}))["fc.weight", "x"]
    assert row.amax == pytest.approx(100 * float(x.abs().amax()))
    assert row.scale == pytest.approx(448 / row.amax) and row.headroom == pytest.approx(0, abs=1e-5)


def test_gradients_of_a_function_are_measured(fresh_dynamo: None) -> None:
    model, x = Inner(), torch.randn(16, 16)

    def step(x: Tensor) -> Tensor:
        return model(x).sum() * 3

    rows = te_compile.stats(step, x).rows
    assert [row.amax for row in rows if row.role == "gradient"] == [3]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_that_pass_frozen_linears_are_measured(fresh_dynamo: None) -> None:
    before = nn.Linear(16, 16)
    x = before(torch.randn(16, 16)).exp()  # whose graph is the caller's
    rows = by_tensor(te_compile.stats(Inner().requires_grad_(False), x, loss=lambda out: out.sum() * 3))
    assert rows["fc.weight", "gradient"].amax == 3
    x.sum().backward()
    assert before.weight.grad is not None


class Recomputed(Repeated):
    """The same, each block checkpointed in a graph of its own."""

    def __init__(self, blocks: int, factor: float) -> None:
        super().__init__(blocks, factor)
        self.h = nn.ModuleList(Checkpointed() for _ in range(blocks))


class Checkpointed(Inner):
    """A linear that backward runs again."""

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(super().forward, x, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out


def test_a_gradient_of_what_is_recomputed_is_its_own_block_s(fresh_dynamo: None) -> None:
    rows = by_tensor(te_compile.stats(Recomputed(3, 10.0), torch.randn(16, 16)))
    assert {name: row.elements for (name, role), row in rows.items() if role == "gradient"} == {
        f"h.{index}.fc.weight": 16 * 16 for index in range(3)
    }
    assert rows["h.2.fc.weight", "gradient"].amax == pytest.approx(100)


class Branching(Inner):
    """A linear, and behind it a choice that the values make."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (y,)).sum()


def test_a_model_with_control_flow_is_measured(fresh_dynamo: None) -> None:
    rows = by_tensor(te_compile.stats(Branching(), torch.randn(16, 16)))
    assert set(rows) == {("fc.weight", role) for role in ("x", "w", "gradient")}


def test_hooks_on_gradients_hear_nothing_of_a_measurement(fresh_dynamo: None) -> None:
    model, x, heard = Inner(), torch.randn(16, 16, requires_grad=True), []
    for name, tensor in (("weight", model.fc.weight), ("x", x)):
        tensor.register_hook(lambda grad, name=name: heard.append(name))
    te_compile.stats(model, x, loss=lambda out: out.sum())
    assert heard == []
    model(x).sum().backward()
    assert sorted(heard) == ["weight", "x"]


def test_a_result_without_a_loss_needs_one(fresh_dynamo: None) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(16, 16)
    with pytest.raises(ValueError, match=r"shape \[16, 16\].*give loss="):
        te_compile.stats(model, x)
    rows = by_tensor(te_compile.stats(model, x, loss=lambda out: out.square().mean()))
    assert ("0.weight", "gradient") in rows


def test_a_sharded_model_is_not_measured(fresh_dynamo: None) -> None:
    model = Block()
    model.up.weight.device_mesh = "of a DTensor"  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"up\.weight is sharded over ranks"):
        te_compile.stats(model, torch.randn(16, 16))


def test_only_a_module_has_figures_without_a_call() -> None:
    with pytest.raises(TypeError, match="module"):
        te_compile.stats(lambda x: x)
    with pytest.raises(TypeError, match="give an example call"):
        te_compile.stats(Block(), loss=Tensor.sum)


# --- as text, JSON and picture -------------------------------------------------------------------------------------


def example() -> Statistics:
    rows = (
        TensorStatistics("fc.weight", "x", 3.5, 128.0, -0.00001, 2, 64, 0.01, 0.0, 0.001, 30.0),
        TensorStatistics("fc.weight", "gradient", None, None, None, 0),
    )
    return Statistics(rows, "delayed", True, ("a note",))


def test_the_text_is_a_table() -> None:
    text = str(example())
    for expected in ("fc.weight", "gradient", "+0.0 bit", "30.0 dB", "1%", "–", "note: a note"):
        assert expected in text


def test_statistics_are_json() -> None:
    data = json.loads(example().to_json())
    assert data["rows"][0]["sqnr"] == 30.0 and data["rows"][1]["scale"] is None and data["measured"] is True


def test_a_plot_is_drawn_where_matplotlib_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    example().plot(tmp_path / "stats.png")
    assert (tmp_path / "stats.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"te-compile\[plot\]"):
        example().plot(tmp_path / "stats.png")


def test_a_loss_that_is_no_function_is_named() -> None:
    with pytest.raises(TypeError, match="loss=5: must be a function of what the model returns"):
        te_compile.stats(nn.Linear(32, 32), torch.randn(4, 32), loss=5)  # type: ignore[arg-type]
