"""What the user keeps: names, parameters, outputs, memory; and how the backend is found."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from te_compile import state
from te_compile.backend import _own_copy, te_fp8
from te_compile.compilers import JointPasses
from te_compile.options import Options
from te_compile.passes import DIRECTION_PASSES, manager
from tests.backend.models import Attention, Chain, L, Linear
from tests.compiling import BACKEND, compiled, joint_of, te_nodes, train_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Structured(nn.Module):
    """A model with an output of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)
        self.register_buffer("offset", torch.randn(32))

    def forward(self, x: Tensor, *, extra: Tensor | None = None) -> dict[str, Any]:
        y = self.fc(x) + self.offset
        return {"y": y, "parts": (y.sum(), [y.mean(), None]), "extra": extra}


def test_names_parameters_and_output_structure_are_untouched() -> None:
    model = Structured()
    keys, parameters = list(model.state_dict()), dict(model.named_parameters())
    x, extra = torch.randn(4, 32), torch.randn(3)
    expected = model(x, extra=extra)
    got = compiled(model)(x, extra=extra)
    assert torch.utils._pytree.tree_structure(got) == torch.utils._pytree.tree_structure(expected)
    got["parts"][0].backward()
    assert list(model.state_dict()) == keys
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in model.named_parameters())


def test_every_parameter_has_a_gradient_or_none_as_without_us() -> None:
    model = Chain()
    model.b.weight.requires_grad_(False)
    _, expected = train_step(model, model, torch.randn(5, 32))
    _, got = train_step(model, compiled(model), torch.randn(5, 32))
    assert got.keys() == expected.keys()


def test_a_deleted_model_frees_its_state() -> None:
    model = Linear()
    fast = compiled(model)
    train_step(model, fast, torch.randn(4, 32))
    held = weakref.ref(state.existing_state(model.fc.weight, L))
    assert held() is not None
    del model, fast
    torch._dynamo.reset()
    gc.collect()
    assert held() is None


def test_a_model_without_linears_compiles() -> None:
    model = nn.Sequential(nn.LayerNorm(32), nn.GELU())
    x = torch.randn(4, 32)
    got, got_gradients = train_step(model, compiled(model), x)
    expected, expected_gradients = train_step(model, model, x)
    torch.testing.assert_close(got, expected)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(got_gradients[name], gradient)


def test_the_joint_graph_of_inductor_and_of_aot_eager_is_the_same() -> None:
    model = Attention()
    x = torch.randn(4, 32)
    texts = []
    for compiler in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        with manager.recording() as records:
            train_step(model, compiled(model, compiler=compiler), x)
        names = [record.name for record in records[0].passes]
        each = [function.__name__ for function in DIRECTION_PASSES]
        assert (names[-2 * len(each) :] == each * 2) == (compiler == "inductor")  # each direction's own
        texts.append([name for name in names if name not in each])
        counts = {name: len(te_nodes(records[0], name)) for name in ("gemm", "quantize_weights", "update_scales_")}
        texts.append(counts)
        assert joint_of(records[0]) is not None
    assert texts[:2] == texts[2:]


def test_dynamo_may_call_the_backend_again_with_the_graph_that_it_kept() -> None:
    """It does so when it starts a frame over: nothing of the first call may be left in the graph."""
    texts: list[str] = []

    def twice(gm: GraphModule, example_inputs: list[Any]) -> Any:
        for _ in range(2):
            texts.append(str(gm.graph))
            compiled_graph = te_fp8(gm, example_inputs, options={"compiler": "aot_eager"})
        return compiled_graph

    model = Chain()
    x = torch.randn(5, 32)
    with manager.recording() as records:
        _, got = train_step(model, torch.compile(model, backend=twice), x)
    torch._dynamo.reset()
    other = copy.deepcopy(model)
    _, expected = train_step(other, compiled(other), x)
    assert texts[0] == texts[1] and len(records) == 2
    assert all(torch.equal(got[name], gradient) for name, gradient in expected.items())


def test_the_copy_that_is_rewritten_has_what_deepcopy_forgets() -> None:
    """Names come from Dynamo's sources, and CUDA graphs learn from them which inputs stay where they are."""
    copies: list[tuple[GraphModule, GraphModule]] = []

    def keep(gm: GraphModule, example_inputs: list[Any]) -> Any:
        gm._param_name_to_source = {"a": "source"}
        copies.append((gm, _own_copy(gm)))
        return gm.forward

    torch.compile(Chain(), backend=keep)(torch.randn(5, 32))
    ((gm, copied),) = copies
    assert copied is not gm and copied._param_name_to_source == gm._param_name_to_source
    pairs = zip(gm.graph.find_nodes(op="placeholder"), copied.graph.find_nodes(op="placeholder"), strict=True)
    assert all(new is not old and new._dynamo_source == old._dynamo_source is not None for old, new in pairs)


def test_an_installed_package_is_found_by_name_without_an_import() -> None:
    if not any(point.name == BACKEND for point in entry_points(group="torch_dynamo_backends")):
        pytest.skip("te_compile is not installed here, only importable from its checkout")
    program = (
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(32, 32))\n"
        "fast = torch.compile(model, backend='te_fp8', options={'compiler': 'aot_eager'})\n"
        "print(fast(torch.randn(4, 32)).shape)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/", timeout=300)
    assert "torch.Size([4, 32])" in result.stdout, result.stderr


class Noted(CustomGraphPass):
    """A pass of a user's own, which changes nothing."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any) -> None:
        self.graphs += 1

    def uuid(self) -> str:
        return "noted"


@pytest.mark.parametrize("place", ["joint_custom_pre_pass", "post_grad_custom_pre_pass"])
@pytest.mark.parametrize("for_the_process", [False, True])
def test_passes_of_the_users_own_run_as_well(place: str, for_the_process: bool) -> None:
    model, noted = Chain(), Noted()
    options = {} if for_the_process else {place: noted}
    with manager.recording() as records, inductor_config.patch({place: noted} if for_the_process else {}):
        train_step(model, compiled(model, compiler="inductor", **options), torch.randn(5, 32))
    assert noted.graphs == (1 if place == "joint_custom_pre_pass" else 2)
    names = [record.name for record in records[0].passes]
    assert "choose_implementations" in names and names.count("read_scales_in_place") == 2


def test_inductors_configuration_can_be_copied_while_it_holds_our_passes() -> None:
    """As it is where something is compiled while a graph is traced; a compilation holds graphs and fake tensors."""
    with FakeTensorMode():
        compilation: Any = SimpleNamespace(recipe="", options="", tensor=torch.empty(3))
    passes = JointPasses(compilation, Options())
    with inductor_config.patch(joint_custom_pre_pass=passes):
        assert inductor_config.get_config_copy()["joint_custom_pre_pass"] is passes


def test_a_users_pass_that_does_not_say_what_it_is_keeps_the_caches_out() -> None:
    compilation: Any = SimpleNamespace(recipe="", options="")
    known = JointPasses(compilation, Options(), [Noted()]).uuid()
    assert known and known != JointPasses(compilation, Options()).uuid()
    assert JointPasses(compilation, Options(), [print]).uuid() is None
