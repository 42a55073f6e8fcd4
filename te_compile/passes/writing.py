"""Write nodes into a captured graph as Dynamo would have: with example values, and where they come from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from te_compile.passes.captured_nodes import size_hint, value_of
from te_compile.passes.memory_order import order_shows

_LOG_OF_REFUSALS = logging.getLogger("torch._subclasses.fake_tensor")

_WHERE = ("nn_module_stack", "source_fn_stack", "stack_trace")


@contextmanager
def refusals_are_expected() -> Iterator[None]:
    """Around nodes that are taken back where an operator refuses its operands, which PyTorch logs as an error."""
    was_disabled = _LOG_OF_REFUSALS.disabled
    _LOG_OF_REFUSALS.disabled = True
    try:
        yield
    finally:
        _LOG_OF_REFUSALS.disabled = was_disabled


class Writer:
    """Writes nodes in front of ``place`` that know their example value and come from the same line of the model, or
    from that of ``line``."""

    def __init__(self, place: Node, line: Node | None = None) -> None:
        self.place, self.line, self.written = place, line or place, list[Node]()

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A call of a function."""
        with self.place.graph.inserting_before(self.place):
            node = self.place.graph.call_function(target, args, kwargs)
        return self._described(node, target)

    def product(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A call of a function that multiplies matrices, in the dtype of ``place``: an autocast that was at work where
        Dynamo traced it is not at work here."""
        node = self.call(target, *args, **kwargs)
        value = value_of(node)
        if value.dtype != value_of(self.place).dtype:
            with value.fake_mode:
                node.meta["example_value"] = value.to(value_of(self.place).dtype)
        return node

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        """A call of a tensor's method; the tensor is the first argument."""
        with self.place.graph.inserting_before(self.place):
            node = self.place.graph.call_method(name, args, kwargs)
        return self._described(node, getattr(Tensor, name))

    def _described(self, node: Node, function: Callable[..., Any]) -> Node:
        self.written.append(node)
        node.meta.update({key: self.line.meta[key] for key in _WHERE if key in self.line.meta})
        args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
        fake = next((each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, FakeTensor)), None)
        if fake is None:  # a number of symbolic sizes
            node.meta["example_value"] = function(*args, **kwargs)
            return node
        # As Dynamo does: operators in C++ do not all take symbolic sizes, and some make constants of their own.
        with fake.fake_mode, enable_python_dispatcher():
            node.meta["example_value"] = function(*args, **kwargs)
        return node

    def laid_out_like(self, node: Node, model: Node) -> Node:
        """``node``, for the users of ``model``: copied if its elements lie in another order than those of ``model`` and
        that shows, as in views that follow."""
        return self.in_order_of(node, model) if order_shows(model, value_of(node)) else node

    def in_order_of(self, node: Node, model: Node) -> Node:
        """``node``, copied if its elements lie in another order than those of ``model``, of the same shape."""
        strides = [size_hint(stride) for stride in value_of(model).stride()]
        order = sorted(range(len(strides)), key=lambda dimension: -strides[dimension])
        back = [order.index(dimension) for dimension in range(len(order))]
        if order == back == list(range(len(order))):
            return self.method("contiguous", node)
        return self.method("permute", self.method("contiguous", self.method("permute", node, *order)), *back)

    def put_in_place(self, result: Node) -> None:
        """Have ``result`` read where ``place`` was, in the order in which its elements lay if that shows, and erase
        ``place``, from which all that was written takes what else is known of it."""
        result = self.laid_out_like(result, self.place)  # views of it may follow
        for new in self.written:
            new.meta.update({key: value for key, value in self.place.meta.items() if key not in new.meta})
        self.place.replace_all_uses_with(result)
        self.place.graph.erase_node(self.place)

    def take_back(self) -> None:
        """Remove everything that was written."""
        for node in reversed(self.written):
            node.graph.erase_node(node)
