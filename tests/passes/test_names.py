"""What linears are called, from Dynamo's paths to the user's own names."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from te_compile.backend import te_fp8
from te_compile.parameter_names import unwrapped
from te_compile.passes import manager
from te_compile.passes.names import KnownNames, dotted, module_name, name_of_use, owner


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self']._modules['model']._modules['layers']._modules['0']._parameters['weight']", "model.layers.0.weight"),
        ("L['self'].layers[0].weight", "layers.0.weight"),
        ('L["self"].layers["first"].weight', "layers.first.weight"),
        ("L['self']._modules['blocks']._modules['a b']._parameters['weight']", "blocks.a b.weight"),
        ("L['self'].__dict__['_modules']['h']._parameters['weight']", "h.weight"),
        ("L['self']._orig_mod._modules['h']._orig_mod._modules['fc']._parameters['weight']", "h.fc.weight"),
        ("L['self']._fsdp_wrapped_module._modules['h']._checkpoint_wrapped_module.fc.weight", "h.fc.weight"),
        ("L['model']._modules['h']._parameters['weight']", "h.weight"),
        ("L['fn']._modules['1']._parameters['weight']", "1.weight"),
        ("G['encoder']._modules['fc']._parameters['weight']", "encoder.fc.weight"),
        ("G['__import_my_dot_file'].fc.weight", "fc.weight"),
        ("L['f'].__closure__[0].cell_contents._modules['fc']._parameters['weight']", "f.fc.weight"),
        ("L['parameters']['k'][1]", "parameters.k.1"),
        ("L['self']", ""),
    ],
)
def test_a_path_of_dynamos_becomes_the_users_name(path: str, name: str) -> None:
    assert dotted(path) == name


@pytest.mark.parametrize("forward", ["forward", "_old_forward"])
def test_the_object_of_a_method_that_a_module_holds_is_the_module(forward: str) -> None:
    """``module.forward = …`` is how wrappers get between a module and its call, accelerate's among them."""
    assert dotted(f"L['self'].{forward}.__self__._modules['fc']._parameters['weight']") == "fc.weight"
    inner = f"_modules['layers']._modules['0'].__dict__['{forward}'].__self__"
    assert dotted(f"L['self'].{forward}.__self__.{inner}.fc.weight") == "layers.0.fc.weight"


@pytest.mark.parametrize("reserved", ["module", "self", "model", "fn", "L", "G"])
def test_modules_that_are_really_called_so_keep_their_names(reserved: str) -> None:
    assert dotted(f"L['self']._modules['{reserved}']._parameters['weight']") == f"{reserved}.weight"
    assert dotted(f"L['self'].{reserved}.{reserved}.weight") == f"{reserved}.{reserved}.weight"


@pytest.mark.parametrize("path", ["getattr(L['self'], 'x')", "list(dict.values(L['d']))[0]", "weight", ""])
def test_a_source_that_is_no_path_has_no_name(path: str) -> None:
    assert dotted(path) == ""


def test_the_frames_own_module_is_left_out_whatever_it_is_called() -> None:
    assert dotted("L['this'].fc.weight", own="this") == "fc.weight"
    assert dotted("L['other'].fc.weight", own="this") == "other.fc.weight"
    assert dotted("L['args'][0]._modules['fc']._parameters['weight']", own="args.0") == "fc.weight"
    assert (
        dotted("L['args'][0]", own="args.0") == ""
        and dotted("L['args'][1].fc.weight", own="args.0") == "args.1.fc.weight"
    )


def test_a_weight_is_named_by_its_module_and_other_parameters_by_themselves() -> None:
    assert owner("attn.q.weight") == "attn.q"
    assert owner("attn.in_proj_weight") == "attn.in_proj_weight"
    assert owner("weight") == "weight"
    assert owner("attn.q.parametrizations.weight.original1") == "attn.q"
    assert owner("attn.parametrizations.in_proj_weight.original") == "attn.in_proj_weight"


def test_a_weight_used_outside_of_its_module_is_named_by_where_it_is_used() -> None:
    assert name_of_use("lm_head", ["embed.weight"]) == "lm_head"
    assert name_of_use("lm_head", ["embed.weight", "lm_head.weight"]) == "lm_head"
    assert name_of_use("attn", ["attn.q.weight"]) == "attn.q"
    assert name_of_use(None, ["embed.weight"]) == "embed"
    assert name_of_use("head", ["headless.weight"]) == "head"


class Block(nn.Module):
    """Linears in the places that modules keep them, under names that wrappers use too."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(16, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.by_name = nn.ModuleDict({"self": nn.Linear(16, 16)})
        self.own = nn.Parameter(torch.randn(16, 16))
        self.several = nn.ParameterList([nn.Parameter(torch.randn(16, 16))])

    def forward(this, x: Tensor) -> Tensor:
        x = this.module(x)
        for layer in this.layers:
            x = layer(x)
        x = this.by_name["self"](x)
        return F.linear(F.linear(x, this.own), this.several[0])


NAMES = ["module", "layers.0", "layers.1", "by_name.self", "own", "several.0"]


def captured_names(target: object, known: KnownNames | None = None) -> list[str]:
    """What the linears of each captured graph are called."""
    found: list[str] = []

    def backend(gm: GraphModule, example_inputs: list[Tensor]) -> object:
        placeholders = gm.graph.find_nodes(op="placeholder")
        parameters = dict(zip(placeholders, example_inputs, strict=True))
        for node in gm.graph.find_nodes(op="call_function", target=F.linear):
            weight = node.args[1]
            name = known.name(node, parameters.get(weight)) if known else module_name(node, weight)
            found.append(str(name))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(target, backend=backend)(torch.randn(4, 16))
    return found


def test_linears_bear_the_names_of_their_modules() -> None:
    class Model(Block):
        def forward(self, x: Tensor) -> Tensor:
            return Block.forward(self, x)

    assert captured_names(Model()) == NAMES


def test_a_closures_model_gives_no_prefix() -> None:
    model = Block()
    assert captured_names(lambda x: model(x)) == NAMES


def passed_on(method: Any) -> Any:
    """What decorators do that know nothing of a method's arguments."""

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return wrapper


class Decorated(Block):
    """The same, but what Dynamo captures is the decorator's frame."""

    forward = passed_on(Block.forward)


def test_a_method_that_a_decorator_wraps_gives_no_prefix() -> None:
    assert captured_names(Decorated()) == NAMES


def test_an_exclusion_knows_the_linears_of_a_method_that_a_decorator_wraps() -> None:
    options = {"compiler": "aot_eager", "exclude": [NAMES[1]]}
    with manager.recording() as records:
        torch.compile(Decorated(), backend=te_fp8, options=options)(torch.randn(4, 16))
    assert {site.name for site in records[0].plan.sites if site.status != "fp8"} == {NAMES[1]}


def test_the_modules_of_a_functions_list_are_told_apart() -> None:
    models = Block(), Block()

    def run(*parts: Any) -> Tensor:
        return models[0](*parts) + models[1](*parts)

    def both(*parts: Any) -> Tensor:
        return parts[0](parts[2]) + parts[1](parts[2])

    assert len(set(captured_names(run))) == 2 * len(NAMES)
    assert len(set(captured_names(lambda x: both(*models, x)))) == 2 * len(NAMES)


def test_two_modules_of_a_function_are_told_apart() -> None:
    encoder, decoder = nn.Linear(16, 16), nn.Linear(16, 16)
    assert captured_names(lambda x: decoder(encoder(x))) == ["encoder", "decoder"]


def test_a_compiled_part_gives_no_prefix() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(Block(), backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    assert captured_names(Outer()) == [f"inner.{name}" for name in NAMES]


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.lm_head = nn.Linear(16, 32, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.embed((x[:, 0] * 0).long()))


def test_a_tied_head_is_called_the_head() -> None:
    assert captured_names(Tied()) == ["lm_head"]
    model = Tied()
    assert captured_names(model, KnownNames(model)) == ["lm_head"]


def test_with_the_model_at_hand_names_are_whole_after_a_graph_break() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                torch._dynamo.graph_break()
            return x

    model = Broken()
    whole = [f"blocks.{i}.{name}" for i in range(2) for name in NAMES]
    assert captured_names(model, KnownNames(model)) == whole
    assert set(captured_names(model)) == {name.split(".", 2)[2] for name in whole}


def test_wrappers_are_taken_off_and_a_module_called_module_is_not() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    model = Holder()
    assert unwrapped(torch.compile(model, backend="eager")) is model
    assert unwrapped(nn.DataParallel(model)) is model
    assert unwrapped(model) is model
