"""One step beside the real ones, in which every tensor that is quantised is measured.

The model is captured and its linears are lowered as in a real compilation, but nothing is fused and nothing compiled:
each graph runs operator by operator, where every x, w and gradient is a tensor that a dispatch mode can look at just
when ``te::quantize`` does. The scales are those of the model's FP8 state, as they are at this moment. The mode swallows
``te::update_scales_``, so the state does not change; gradients are taken with ``torch.autograd.grad``, so nobody's
``.grad`` does; and all that a forward leaves behind is put back, as ``explain`` does. Compiled code knows nothing of
it: without a measurement there is nothing to pay for.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from te_compile import state
from te_compile.backend import rewrite
from te_compile.flat_parameters import has_flat_parameters
from te_compile.inspect.statistics import figures
from te_compile.inspect.target import fresh, modules_of, uncompiled, undisturbed
from te_compile.ops.gemm import GEMM
from te_compile.ops.grouped_gemm import GROUPED_GEMM, GROUPED_WGRAD
from te_compile.ops.linear import weight_padding
from te_compile.ops.quantize import QUANTIZE
from te_compile.ops.scaling import HISTORY, UPDATE_SCALES
from te_compile.options import Options
from te_compile.passes import manager
from te_compile.passes.lower import Signature
from te_compile.passes.plan import Plan
from te_compile.runtime import history_length, new_token

_PRODUCTS = (GEMM, GROUPED_GEMM, GROUPED_WGRAD)  # alike in the place of their operands and of their label

Key = tuple[nn.Parameter, str, str]
"""A tensor that is measured: its linear's weight, what the captured graph calls the linear, and the role."""


class Measuring(TorchDispatchMode):
    """Looks at each quantize while it is on, and lets no scale change.

    ``te::quantize`` does not know its linear, but the product that follows it does, by its label. Whose weight it
    is in this call tells the scale of x or w, a tensor that forward and backward have in common.
    """

    supports_higher_order_operators = True  # their bodies are left in high precision and run unseen

    def __init__(self) -> None:
        super().__init__()
        self.changed: list[nn.Parameter] = []  # what the forward pass wrote to
        self.found: dict[tuple[int, str, str], list[Tensor]] = {}
        self.scales: dict[tuple[int, str, str], Tensor] = {}
        self.parameters: dict[int, nn.Parameter] = {}
        self.running: dict[str, nn.Parameter] = {}  # by linear, of the graph that runs forward now
        self.places: dict[int, nn.Parameter] = {}  # every one that ran, by its place: what recomputes tells no graph
        self._owner: dict[tuple[str, int], nn.Parameter] = {}
        self._held: list[Tensor] = []  # whose places tell owners: backward frees them, and none may be given away
        self._last = threading.local()  # autograd has a thread for each device

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, and note what it quantised."""
        if func is UPDATE_SCALES:
            return None
        out = func(*args, **(kwargs or {}))
        if func is QUANTIZE:
            x, _, dtype = args[:3]
            scale = out[3].reciprocal()
            self._last.quantized = [*self._waiting()[-1:], (figures(x, scale, dtype), scale, x.data_ptr())]
        elif func in _PRODUCTS:
            self._note(args)
        return out

    def _waiting(self) -> list[tuple[Tensor, Tensor, int]]:
        """Figures, scale and place of the last two that were quantised and are in no product yet."""
        return getattr(self._last, "quantized", [])

    def _note(self, args: tuple[Any, ...]) -> None:
        a_scale_inv, b_scale_inv, label = args[2], args[3], args[7]
        name, _, product = label.rpartition(" ")
        waiting, self._last.quantized = self._waiting(), []
        if not waiting:  # the second product of one gradient
            return
        measured, scale, _ = waiting[-1]
        if product != "forward":
            owners = (self._owner.get((name, each.data_ptr())) for each in (a_scale_inv, b_scale_inv))
            weight = next((each for each in owners if each is not None), None)
            self._add(weight, name, "gradient", measured, scale)
            return
        quantized, weight_scale, place = waiting[0]  # what the product reads, which may be computed from the parameter
        weight = self.places.get(place, self.running.get(name))
        if weight is None:
            return
        for each in (a_scale_inv, b_scale_inv):
            self._owner[name, each.data_ptr()] = weight
            self._held.append(each)
        self._add(weight, name, "x", measured, scale)
        self._add(weight, name, "w", _without_padding(quantized, weight), weight_scale)

    def _add(self, weight: nn.Parameter | None, name: str, role: str, measured: Tensor, scale: Tensor) -> None:
        if weight is not None:
            key = (id(weight), name, role)
            self.parameters[id(weight)] = weight
            self.found.setdefault(key, []).append(measured)
            known = self.scales.get(key, scale)
            self.scales[key] = torch.minimum(known, scale)  # the largest amax of several tensors has the smallest


def _without_padding(found: Tensor, weight: nn.Parameter) -> Tensor:
    """The figures of a weight that was quantised whole: of the zeros around it only their number shows, as elements."""
    if weight.dim() < 2:
        return found
    rows, columns = weight_padding(weight)
    whole = weight[..., :1, :1].numel() * (weight.shape[-2] + rows) * (weight.shape[-1] + columns)
    added = torch.where(found[1] == whole, whole - weight.numel(), 0)
    return torch.cat([found[:1], found[1:2] - added, found[2:]])


class _Graph:
    """A lowered graph that is called with the states of this call's parameters, or with empty ones, and no others."""

    def __init__(self, gm: GraphModule, signature: Signature, chosen: Options, mode: Measuring, plan: Plan) -> None:
        self.gm, self.signature, self.mode = gm, signature, mode
        self.history, self.gradient_max = history_length(chosen.recipe), chosen.recipe.fp8_format.backward_max
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.positions = [placeholders.index(weight) - signature.added for weight in signature.weights]
        self.stateful = signature.states > 0
        self.owners = {
            site.name: signature.weights.index(site.root_weight) for site in plan.selected if site.root_weight
        }

    def __call__(self, *args: Any) -> Any:
        """Run operator by operator, as the lowered graph stands."""
        weights = [args[position] for position in self.positions]
        self.mode.running = {name: weights[index] for name, index in self.owners.items()}
        self.mode.places.update((each.data_ptr(), each) for each in self.mode.running.values())
        with self.mode:  # here and in backward alone: Dynamo captures nothing under a mode
            return self.gm(*self._states(weights), *args)

    def _states(self, weights: list[nn.Parameter]) -> list[Tensor]:
        if not self.stateful:
            return []
        found = [state.existing_state(weight, self.history) for weight in weights]
        pairs = [
            (each.forward, each.backward_for(self.gradient_max)) if each is not None else self._empty(weight)
            for weight, each in zip(weights, found, strict=True)
        ]
        states = [forward for forward, _ in pairs]
        if self.signature.training:
            states += [backward for _, backward in pairs]
            states.append(new_token(self.signature.slots, weights[0].device))
        return states

    def _empty(self, weight: nn.Parameter) -> tuple[Tensor, Tensor]:
        columns = HISTORY + self.history
        forward, backward = (
            torch.zeros(rows, columns, dtype=torch.float32, device=weight.device)
            for rows in (state.FORWARD_ROWS, state.BACKWARD_ROWS)
        )
        return forward, backward


def measure(
    model: nn.Module | Callable[..., Any],
    chosen: Options,
    loss: Callable[[Any], Tensor] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Measuring:
    """Run one step of ``model`` and return what was seen. Gradients are taken where they are enabled."""
    target, _ = uncompiled(model)
    _require_whole(target)
    mode = Measuring()
    chosen = replace(chosen, cache_weights=False)  # each graph quantises what it is called with

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        gm, plan = _with_sources(gm), Plan()
        compilation = manager.begin(plan, chosen.recipe.key(), chosen.key(), chosen.skip_passes)
        signature = rewrite(gm, example_inputs, chosen, compilation)
        return torch._dynamo.disable(_Graph(gm, signature, chosen, mode, plan).__call__)

    with undisturbed(target, backend, args, kwargs, mode.changed) as (own_args, own_kwargs):
        compiled = torch.compile(fresh(target), backend=backend)
        out = compiled(*own_args, **own_kwargs)
        if torch.is_grad_enabled():
            value = _scalar(out, loss)
            given = [*tree_leaves((own_args, own_kwargs)), *mode.parameters.values()]
            owners = [each for module in modules_of(target, own_args, own_kwargs) for each in module.parameters(False)]
            with mode:
                _backward(value, [*owners, *given])
    return mode


def _require_whole(target: Callable[..., Any]) -> None:
    """A step of one rank alone would wait for the others' shards."""
    owner = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    named = owner.named_parameters() if isinstance(owner, nn.Module) else ()
    is_flat = isinstance(owner, nn.Module) and has_flat_parameters(owner)
    sharded = next((name for name, parameter in named if is_flat or hasattr(parameter, "device_mesh")), None)
    if sharded is not None:
        raise ValueError(
            f"the parameter {sharded} is sharded over ranks, and a step is measured on a whole model; "
            "stats without an example call reads the FP8 state"
        )


def _with_sources(gm: GraphModule) -> GraphModule:
    """A copy to rewrite, with the sources by which linears are named: deepcopy forgets them."""
    copied = copy.deepcopy(gm)
    pairs = zip(gm.graph.find_nodes(op="placeholder"), copied.graph.find_nodes(op="placeholder"), strict=True)
    for old, new in pairs:
        new._dynamo_source = getattr(old, "_dynamo_source", None)
    return copied


def _scalar(out: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """What to take gradients of."""
    value = loss(out) if loss is not None else getattr(out, "loss", out)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    origin = "loss= returned" if loss is not None else "the model returned"
    raise ValueError(
        f"{origin} {what}, and gradients are measured from one number: give loss=lambda output: …, "
        "or call stats under torch.no_grad() to measure the forward alone"
    )


def _backward(value: Tensor, inputs: Sequence[Any]) -> None:
    """Run the backward pass for what it quantises; nobody's ``.grad`` changes and no hook on one fires."""
    wanted = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
    wanted = list({id(each): each for each in wanted}.values())
    lent = any(each.grad_fn is not None for each in wanted)  # the graph behind it is the caller's and must outlive this
    if value.requires_grad and wanted:
        with _without_hooks(wanted):
            torch.autograd.grad(value, wanted, allow_unused=True, retain_graph=lent)


@contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside, no hook on the gradients of ``tensors`` fires: autograd.grad calls those of what it is asked for."""
    hooks = [each._backward_hooks for each in tensors if each._backward_hooks]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, before in zip(hooks, kept, strict=True):
            each.update(before)
