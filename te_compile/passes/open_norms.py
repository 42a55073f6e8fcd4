"""Open every norm that no kernel runs, forward or backward, so that Inductor fuses it as it would have without us.

``te::norm_forward`` and ``te::norm_backward`` are opaque. A quantize takes the first along (fuse_norm_quantize.py), and
a kernel may run the second; what is left would be a wall between pointwise neighbours. It is replaced by its reference,
traced to the operators into which Inductor decomposes a LayerNorm and its backward itself.

A norm stays if the registry has something better for it than the reference. That is asked here, before the producers
look for pointwise nodes, and once more at the end, where the answer is written down (choose_implementations.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from te_compile.ops import registry
from te_compile.ops.norm import norm_reference
from te_compile.ops.norm_backward import norm_backward_reference
from te_compile.passes.arguments import arguments_of, is_te, values_of
from te_compile.passes.choose_implementations import best_implementation
from te_compile.passes.traced import put_in_place, traced

_REFERENCES: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "norm_forward": norm_reference,
    "norm_backward": norm_backward_reference,
}


def _name_of(node: Node) -> str | None:
    """Which of ``_REFERENCES`` a node calls, None if none."""
    return next((name for name in _REFERENCES if is_te(node, name)), None)


def _split(node: Node) -> tuple[dict[str, Node], dict[str, Any]]:
    """The arguments of a norm that are nodes, and those of its reference that are not, by name."""
    arguments = arguments_of(node)
    del arguments["implementation"]
    tensors = {name: argument for name, argument in arguments.items() if isinstance(argument, Node)}
    return tensors, {name: argument for name, argument in arguments.items() if name not in tensors}


def _trace(name: str, tensors: dict[str, Tensor], others: dict[str, Any]) -> GraphModule:
    """The reference of ``name`` as a graph whose inputs are ``tensors``, in their order."""

    def reference(*given: Tensor) -> tuple[Tensor, ...]:
        return _REFERENCES[name](**dict(zip(tensors, given, strict=True)), **others)

    return traced(reference, list(tensors.values()))


def _signature(name: str, tensors: dict[str, Tensor], others: dict[str, Any]) -> Any:
    """Equal signatures trace to equal graphs. Symbolic sizes are told apart by their expressions, one tensor given
    twice from two tensors by where each came first."""
    given = list(tensors.values())
    first = [next(i for i, other in enumerate(given) if other is tensor) for tensor in given]
    layouts = ((t.dtype, t.device, str(t.shape), str(t.stride())) for t in given)
    return (name, *tensors, *layouts, *first, *others.items())


def open_norms(graph: Graph) -> int:
    """Replace each norm that no kernel runs by the plain operators of its reference; returns how many."""
    opened: dict[Any, GraphModule] = {}
    count = 0
    for node in list(graph.nodes):
        name = _name_of(node)
        if name is None or best_implementation(node)[0] != registry.REFERENCE:
            continue
        nodes, others = _split(node)
        tensors = values_of(nodes)
        key = _signature(name, tensors, others)
        if key not in opened:
            opened[key] = _trace(name, tensors, others)
        put_in_place(node, opened[key], list(nodes.values()))
        count += 1
    return count
