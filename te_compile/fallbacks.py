"""What Inductor must be told of operators that it calls as they are, before it meets them.

It would find out itself, operator by operator: at the first call of one that it has no lowering for, it makes one, and
notes for its log what the call's arguments are. Up to PyTorch 2.12 that text is written whether anyone reads it or not,
and an argument that an operator computed is told with that operator's own arguments. Where one operator's result goes
straight into the next, and a residual stream enters each layer twice, such a text doubles with every layer: four layers
took over a minute to compile, and a model of 32 would never have been done.

And it would call each operator through PyTorch's dispatcher. On a GPU it is told to call te_compile/direct.py instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from sympy import Basic, Integer
from torch._inductor import config, exc, ir, lowering
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from te_compile.ops.library import NAMESPACE, asking, optional, overwriting
from te_compile.ops.once import ONCE

DIRECT_ON = {"cuda"}
"""The types of device whose operators are called without the dispatcher: where a host's microseconds count."""

_CALLS = "te_calls"  # what generated code calls them by
_EARLY = "early=True"
_sites = itertools.count()
_told: set[OpOverload] = set()
_NOTE = "operator_str"  # of Inductor's, which writes what a call's arguments are


def te_operators() -> Iterator[OpOverload]:
    """Every operator of ours that graphs hold in the end; those that tracing opens up are none of them."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace != NAMESPACE:  # first, for there are thousands
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            packet, _, overload = rest.partition(".")
            yield getattr(getattr(getattr(torch.ops, NAMESPACE), packet), overload or "default")


def tell_inductor() -> None:
    """Have Inductor know every operator of ours as one to call, also where it has met one before and made do."""
    for operator in te_operators():
        if operator not in _told:
            if operator not in lowering.lowerings:
                lowering.make_fallback(operator, warn=False)
            how = _in_memory if operator is ONCE else partial(_called, operator)
            lowering.register_lowering(operator, type_promotion_kind=None)(how)
            _told.add(operator)


class OperatorCall(ir.FallbackKernel):
    """A call of an operator of ours.

    From PyTorch 2.14 on the call is itself the operator's one result, and generated code asks it for its shape and
    place whatever is said of it; before, and where there are several, a result is a node of its own, to be let off.
    """

    skip_size_stride_alignment_checks = False  # Inductor's name for it on those nodes

    def codegen_size_asserts(self, wrapper: Any) -> None:
        """Write what is asked of the result's shape."""
        if not self.skip_size_stride_alignment_checks:
            super().codegen_size_asserts(wrapper)

    def codegen_alignment_asserts(self, wrapper: Any) -> None:
        """Write what is asked of the result's place."""
        if not self.skip_size_stride_alignment_checks:
            super().codegen_alignment_asserts(wrapper)


class DirectCall(OperatorCall):
    """A call that generated Python code for a GPU makes by te_compile/direct.py."""

    site: str | None = None  # its own name in generated code, where shapes are known
    early = False  # may it be played before the code gets to it?

    def get_kernel_name(self) -> str:
        """What the code calls; by ``codegen`` it is there."""
        return self.site or self._function() or super().get_kernel_name()

    def codegen(self, wrapper: Any) -> None:
        """Write the call."""
        function = self._function()
        if function is not None:
            module = wrapper  # a graph within the graph is written into the file of the outermost
            while getattr(module, "parent_wrapper", None) is not None:
                module = module.parent_wrapper
            module.add_import_once(f"from te_compile.direct import CALLS as {_CALLS}")
            if all(map(_has_constant_shape, self.inputs)) and _are_constant((self.constant_args, self.kwargs)):
                self.site = f"te_site_{next(_sites)}"
                self.early = _inputs_stay(V.graph) and all(map(_is_there_early, self.inputs))
                module.add_import_once(f"{self.site} = {function}.site({_EARLY if self.early else ''})")
        super().codegen(wrapper)

    def _function(self) -> str | None:
        """The function to call instead of the dispatcher; None where that one is called."""
        operator = self.op_overload
        if not isinstance(operator, OpOverload) or not _is_called_directly(self.get_device()):
            return None
        return f"{_CALLS}.{operator._schema.name.removeprefix(NAMESPACE + '::')}"


def _has_constant_shape(operand: Any) -> bool:
    return all(isinstance(length, (int, Integer)) for length in (*operand.get_size(), *operand.get_stride()))


def _are_constant(arguments: Any) -> bool:
    """Is no size that differs from call to call among what the operator is given beside tensors?"""
    return not any(map(_is_symbolic, pytree.tree_leaves(arguments)))


def _is_symbolic(argument: Any) -> bool:
    if isinstance(argument, Basic):
        return bool(argument.free_symbols)
    return isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_there_early(operand: Any) -> bool:
    """Is ``operand`` given to the graph, or made by a call that may be played early?

    A name of Inductor's stands for one value; what is written over it later has another.
    """
    name = operand.get_name()
    if name in V.graph.graph_inputs:
        return True
    made = V.graph.name_to_buffer.get(name)
    maker = made.inputs[0] if isinstance(made, ir.MultiOutput) else made
    return isinstance(maker, DirectCall) and maker.early


def _inputs_stay(graph: Any) -> bool:
    """Does a graph that Inductor has scheduled write into none of its inputs, but for the FP8 states at its end?"""
    known = getattr(graph, "te_inputs_stay", None)
    if known is None:  # asked for every operator
        calls = [each for each in graph.operations if isinstance(each, DirectCall)]
        updates = [each for each in calls if each.op_overload is torch.ops.te.update_scales_.default]
        states = {name for each in updates for state in each.mutation_outputs for name in state.get_mutation_names()}
        known = graph.te_inputs_stay = not set(graph.mutated_inputs) - states
    return known


def _is_called_directly(device: torch.device | None) -> bool:
    """Does the host's time for each call count? Not where it is C++ that calls."""
    return device is not None and device.type in DIRECT_ON and not V.graph.cpp_wrapper


def _in_memory(x: Any) -> Any:
    """``te::once``: a buffer of what is computed, which readers load from."""
    x.realize()
    return x


def _called(operator: OpOverload, *arguments: Any, **named: Any) -> Any:
    """Inductor's node for a call of ``operator``."""
    # CUDA graphs replay without a word from the host, and Inductor's own way is the one that they are tested with.
    name = operator._schema.name.removeprefix(NAMESPACE + "::")
    if name in overwriting:  # else Inductor could put something into memory that it has freed and the result is in
        arguments[0].realize()
        V.graph.never_reuse_buffers.add(arguments[0].get_name())
    kernel = OperatorCall if config.triton.cudagraphs or name in asking else DirectCall
    results = kernel.create(operator, *arguments, **named)
    for result in pytree.tree_leaves(results) if name in optional else ():
        result.skip_size_stride_alignment_checks = True
    return pytree.tree_map(_boxed, results)


def _boxed(result: Any) -> Any:
    if not isinstance(result, ir.IRNode):
        return result
    if not config.triton.cudagraphs:
        # Inductor expects the worst where an operand begins anywhere, as one scale among many does, and its kernels
        # would then read what comes of it element by element. Our results are fresh memory.
        V.graph.unaligned_buffers.discard(result.get_name())
        if isinstance(result, (ir.MultiOutput, OperatorCall)) and _is_called_directly(result.get_device()):
            result.skip_size_stride_alignment_checks = True  # two questions a result, of what kernels are tested for
    return ir.TensorBox.create(result)


@contextmanager
def short_texts() -> Iterator[None]:
    """In here what Inductor notes about a call names the kinds of its arguments, and not all that they come from."""
    before = exc.OperatorIssue.__dict__[_NOTE]
    # Set by name, for PyTorch offers no other way to say what is noted.
    setattr(exc.OperatorIssue, _NOTE, staticmethod(_kinds_of_arguments))
    try:
        yield
    finally:
        setattr(exc.OperatorIssue, _NOTE, before)


def _kinds_of_arguments(target: Any, args: list[Any], kwargs: dict[str, Any]) -> str:
    named = [*((f"args[{index}]", value) for index, value in enumerate(args)), *kwargs.items()]
    lines = [f"target: {target}", *(f"{name}: {_short(value)}" for name, value in named)]
    return "\n".join(f"  {line}" for line in lines)


def _short(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_short, value))}]"
    try:
        return f"{type(value).__name__} {list(value.get_size())}"
    except (AttributeError, NotImplementedError, TypeError):  # no tensor, but a graph or a generator
        return type(value).__name__
