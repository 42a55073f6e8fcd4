"""accumulate_in_products: which gradients products may add to others, which they may not, and what reports say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

from te_compile.backend import te_fp8
from te_compile.inspect.fusions import uses_in
from te_compile.ops.gemm import GEMM
from te_compile.ops.gemm_into_grad import GEMM_INTO_GRAD
from te_compile.passes import manager
from te_compile.passes.accumulate_in_products import accumulate_in_products
from te_compile.passes.arguments import arguments_of
from te_compile.passes.set_names_aside import label_of
from tests.compiling import compiled, joint_of, te_nodes

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
ROWS, WIDTH, INNER = 32, 32, 48


class Two(nn.Module):
    """Two linears, whose weights are inputs of the graph among others."""

    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, inner)
        self.b = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: [M, WIDTH]."""
        return self.b(torch.relu(self.a(x)))


def record_of(model: nn.Module, *inputs: Tensor, dynamic: bool | None = None, **options: Any) -> manager.Compilation:
    """The compilation of one step."""
    with manager.recording() as records:
        compiled(model, dynamic=dynamic, **options)(*inputs).float().square().mean().backward()
    (record,) = records
    return record


def rewritten(record: manager.Compilation) -> dict[str, Tensor]:
    """By its label, the input whose gradient each rewritten product is, as its fake value."""
    inputs = [node for node in joint_of(record).find_nodes(op="placeholder") if node.name.startswith("primals_")]
    found = {}
    for node in te_nodes(record, "gemm_into_grad"):
        arguments = arguments_of(node)
        assert arguments["inputs"] == len(inputs)
        found[label_of(node)] = inputs[arguments["place"]].meta["val"]
    return found


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_weights_gradient_is_a_product_that_may_add_to_another(dtype: torch.dtype, dynamic: bool) -> None:
    record = record_of(Two().to(dtype), torch.randn(ROWS, WIDTH).to(dtype), dynamic=dynamic)
    found = {label: (tuple(given.shape), given.dtype) for label, given in rewritten(record).items()}
    assert found == {"a wgrad": ((INNER, WIDTH), dtype), "b wgrad": ((WIDTH, INNER), dtype)}
    assert not any(label_of(node).endswith("wgrad") for node in te_nodes(record, "gemm"))


def test_under_autocast_it_is_of_the_parameters_dtype() -> None:
    model = Two()

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    record = record_of(step, torch.randn(ROWS, WIDTH))
    assert [given.dtype for given in rewritten(record).values()] == [torch.float32] * 2


class Transposed(nn.Module):
    """A weight that is stored [K, N], as Hugging Face's Conv1D does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, INNER))

    def forward(self, x: Tensor) -> Tensor:
        """x: [M, WIDTH]."""
        return x @ self.weight


class Patches(nn.Module):
    """A convolution that is a linear, with a weight [N, C, 4, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(2, INNER, 4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, 2, 16, 16]."""
        return self.embed(x)


class Viewed(nn.Module):
    """A weight that is stored as a matrix of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * INNER, WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        """x: [M, WIDTH]."""
        return F.linear(x, self.weight.view(INNER, WIDTH))


@pytest.mark.parametrize(
    ("model", "x"), [(Transposed, (ROWS, WIDTH)), (Patches, (2, 2, 16, 16)), (Viewed, (ROWS, WIDTH))]
)
def test_weights_of_other_shapes_get_sums_of_theirs(model: type[nn.Module], x: tuple[int, ...]) -> None:
    module, batches = model(), [torch.randn(x) for _ in range(3)]
    (weight,) = module.parameters()
    start, sums = weight.detach().clone(), []
    for option in (True, False):
        torch._dynamo.reset()
        weight = nn.Parameter(start.clone())
        (name,) = dict(module.named_parameters())
        owner = module.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], weight)
        with manager.recording() as records:
            run = compiled(module, accumulate_in_products=option)
            for each in batches:
                run(each).square().mean().backward()
        assert [given.shape for given in rewritten(records[0]).values()] == ([weight.shape] if option else [])
        sums.append(weight.grad)
    assert torch.equal(*sums)


class InHeads(nn.Module):
    """A linear that reads its input's rows in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        """x: [M, 2 · WIDTH]."""
        return self.fc(x.unflatten(-1, (2, WIDTH)))


def test_an_input_that_is_read_as_a_matrix_of_another_shape() -> None:
    model, sums = InHeads(), []
    start, batches = torch.randn(ROWS, 2 * WIDTH), [torch.randn(ROWS, 2, INNER) for _ in range(3)]
    for option in (True, False):
        torch._dynamo.reset()
        x = start.clone().requires_grad_()
        with manager.recording() as records:
            run = compiled(copy.deepcopy(model), accumulate_in_products=option)
            for each in batches:
                run(x).backward(each)
        assert ("fc dgrad" in rewritten(records[0])) == option
        sums.append(x.grad)
    assert torch.equal(*sums)


class Tied(nn.Module):
    """One weight for two linears, whose gradients the graph sums."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """x: [M, WIDTH]."""
        return F.linear(torch.relu(F.linear(x, self.weight)), self.weight)


class Sliced(Tied):
    """Two linears whose weights are parts of one parameter."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [M, WIDTH]."""
        return F.linear(x, self.weight[:16]) + F.linear(x, self.weight[16:])


class Scaled(Tied):
    """A weight that is computed from a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [M, WIDTH]."""
        return F.linear(x, 2 * self.weight)


@pytest.mark.parametrize("model", [Tied, Sliced, Scaled])
def test_what_is_not_all_of_a_gradient_stays(model: type[nn.Module]) -> None:
    record = record_of(model(), torch.randn(ROWS, WIDTH))
    wgrads = [node for node in te_nodes(record, "gemm") if label_of(node).endswith("wgrad")]
    assert wgrads and not rewritten(record)


def test_a_product_that_is_padded_is_cut_first_and_stays() -> None:
    found = rewritten(record_of(Two(inner=40), torch.randn(ROWS, WIDTH)))
    assert not found


def test_a_frozen_weight_and_inference_have_no_gradient() -> None:
    model = Two()
    model.b.weight.requires_grad_(False)
    assert list(rewritten(record_of(model, torch.randn(ROWS, WIDTH)))) == ["a wgrad"]
    with manager.recording() as records, torch.no_grad():
        compiled(model)(torch.randn(ROWS, WIDTH))
    assert not te_nodes(records[0], "gemm_into_grad")


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, True),
        ({"accumulate_in_products": False}, False),
        ({"compiler": "inductor", "triton.cudagraphs": True}, False),
        ({"compiler": "inductor", "mode": "reduce-overhead"}, False),
        ({"compiler": "inductor", "cpp_wrapper": True}, False),
    ],
)
def test_where_nobody_can_be_asked_the_pass_does_not_run(
    options: dict[str, Any], passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Two(), torch.randn(ROWS, WIDTH)
    ran: list[tuple[Any, ...]] = []

    def noted(gm: torch.fx.GraphModule, inputs: Any, chosen: Any, compilation: manager.Compilation) -> Any:
        from te_compile import compilers

        ran.append(compilers.joint_passes(chosen))
        return gm.forward

    monkeypatch.setattr("te_compile.compilers.COMPILERS", {"inductor": noted, "aot_eager": noted})
    with torch.no_grad():
        torch.compile(model, backend=te_fp8, options={"compiler": "aot_eager", **options})(x)
    assert [accumulate_in_products in each for each in ran] == [passes]


def joint(gradient_of: list[int | None], tangents: int = 1) -> Graph:
    """A joint graph by hand: its inputs are a [N, K] of bf16 each, its gradients products or none."""
    graph = Graph()
    matrix = torch.empty(16, 16, dtype=torch.bfloat16, device="meta")
    codes = torch.empty(16, 32, device="meta").to(torch.float8_e4m3fn)
    scale = torch.empty((), device="meta")
    names = [f"primals_{i + 1}" for i in range(len(gradient_of))] + [f"tangents_{i + 1}" for i in range(tangents)]
    inputs = [graph.placeholder(name) for name in names]
    for node in inputs:
        node.meta["val"] = matrix
    operands = []
    for value in (codes, scale):
        operands.append(graph.call_function(torch.empty, (1,)))
        operands[-1].meta["val"] = value
    products = []
    for index in range(max([each for each in gradient_of if each is not None], default=-1) + 1):
        a, s = operands
        node = graph.call_function(GEMM, (a, a, s, s, None, torch.bfloat16, "split", f"{index} wgrad"))
        node.meta["val"] = matrix
        products.append(node)
    graph.output([inputs[0], *(None if each is None else products[each] for each in gradient_of)])
    return graph


def count_of(graph: Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=GEMM_INTO_GRAD))


def test_the_last_outputs_are_the_gradients_of_the_inputs_in_order() -> None:
    graph = joint([None, 0, None, 1])
    assert accumulate_in_products(graph) == count_of(graph) == 2
    graph.lint()
    places = [arguments_of(n)["place"] for n in graph.find_nodes(op="call_function", target=GEMM_INTO_GRAD)]
    assert places == [1, 3]


def test_sizes_among_the_inputs_have_no_edge() -> None:
    graph = joint([None, 0])
    next(iter(graph.nodes)).meta["val"] = 7
    assert accumulate_in_products(graph) == 1
    (node,) = graph.find_nodes(op="call_function", target=GEMM_INTO_GRAD)
    assert (arguments_of(node)["place"], arguments_of(node)["inputs"]) == (0, 1)


def test_one_product_for_two_gradients_stays() -> None:
    assert accumulate_in_products(joint([0, 0])) == 0


@pytest.mark.parametrize("read", ["nothing", "the view", "the product"])
def test_a_gradient_that_somebody_else_reads_in_any_shape_stays(read: str) -> None:
    """Where the operator has added it there is none to read."""
    graph = joint([None, 0])
    output = graph.output_node()
    *others, product = output.args[0]
    with graph.inserting_before(output):
        view = graph.call_function(torch.ops.aten.view.default, (product, [16, 16]))
        view.meta["val"] = product.meta["val"]
        if read != "nothing":
            others.insert(0, graph.call_function(torch.relu, (view if read == "the view" else product,)))
    output.args = ([*others, view],)
    assert accumulate_in_products(graph) == count_of(graph) == (read == "nothing")
    graph.lint()


@pytest.mark.parametrize("which", ["no tangents", "another input", "another shape", "no list", "fewer"])
def test_where_it_is_not_certain_whose_gradient_it_is_nothing_changes(which: str) -> None:
    graph = joint([None, 0], tangents=0 if which == "no tangents" else 1)
    first = next(iter(graph.nodes))
    match which:
        case "another input":
            with graph.inserting_before(first):
                graph.placeholder("fwd_seed_1")
        case "another shape":
            list(graph.nodes)[1].meta["val"] = torch.empty(16, 8, device="meta")
        case "no list":
            graph.output_node().args = (graph.output_node().args[0][-1],)
        case "fewer":
            graph.output_node().args = (graph.output_node().args[0][-1:],)
    assert accumulate_in_products(graph) == count_of(graph) == 0


def test_reports_tell_of_it() -> None:
    uses = uses_in(joint_of(record_of(Two(), torch.randn(ROWS, WIDTH))))
    assert all("dw: adds to .grad" in use.fused for (use,) in uses.values())
    torch._dynamo.reset()
    uses = uses_in(joint_of(record_of(Two(), torch.randn(ROWS, WIDTH), accumulate_in_products=False)))
    assert not any("dw: adds to .grad" in use.fused for (use,) in uses.values())
