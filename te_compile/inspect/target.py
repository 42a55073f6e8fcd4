"""What a look runs: the user's model or function without what compiles it, and as if nobody had looked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from te_compile.inspect.tensor_values import tensor_values
from te_compile.inspect.untouched import compiler_state, module_state, own_arguments, random_numbers
from te_compile.parameter_names import unwrapped
from te_compile.passes.names import KnownNames


def uncompiled(model: Any) -> tuple[Callable[..., Any], KnownNames | None]:
    """What the user handed to torch.compile, and the names in it if it is a module."""
    if isinstance(model, nn.Module):
        model = unwrapped(model)
        return model, KnownNames(model)
    if not callable(model):
        raise TypeError(f"expected a module or a function, not {type(model).__name__}")
    function = inspect.unwrap(model, stop=lambda each: not hasattr(each, "_torchdynamo_orig_callable"))
    function = getattr(function, "_torchdynamo_orig_callable", function)
    owner = getattr(function, "__self__", None)
    return function, KnownNames(owner) if isinstance(owner, nn.Module) else None


def _calling(self: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)  # a variable of this name, because a module's names start below it

    return call


def fresh(target: Callable[..., Any]) -> Callable[..., Any]:
    """``target`` as a function with code of its own, so that Dynamo keeps nothing on the user's."""
    if isinstance(target, MethodType) and isinstance(target.__func__, FunctionType):
        return MethodType(_copied(target.__func__), target.__self__)
    if isinstance(target, FunctionType):
        return _copied(target)
    call = _calling(target)
    assert isinstance(call, FunctionType)
    return _copied(call)


def _copied(function: FunctionType) -> FunctionType:
    parts = (function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copied = FunctionType(function.__code__.replace(), *parts)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def modules_of(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[nn.Module]:
    """Every module that a call of ``target`` can reach in an ordinary way."""
    waiting, seen, found = [target, *args, *kwargs.values(), *_held_by(target)], set[int](), dict[int, nn.Module]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, nn.Module):
            found.update((id(module), module) for module in each.modules())
        elif isinstance(each, list | tuple | set):
            waiting += each
        elif isinstance(each, dict):
            waiting += each.values()
    return list(found.values())


def _held_by(target: Any) -> Iterator[Any]:
    """What a call of ``target`` can read: what a partial is given, a method's own object, what a function closes over
    and what a callable object holds."""
    while isinstance(target, partial):
        yield from (*target.args, *target.keywords.values(), target.func)
        target = target.func
    own = getattr(target, "__self__", None)
    function = inspect.unwrap(getattr(target, "__func__", target))
    if isinstance(function, FunctionType):
        closed = inspect.getclosurevars(function)
        yield from (own, *closed.nonlocals.values(), *closed.globals.values())
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for each in (target, own):
        if not isinstance(each, nn.Module | FunctionType | MethodType) and hasattr(each, "__dict__"):
            yield from vars(each).values()


@contextmanager
def undisturbed(
    target: Callable[..., Any],
    backend: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    changed: list[nn.Parameter],
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Inside, ``target`` may be compiled with ``backend`` and run on what is yielded; afterwards all is as it was.

    Parameters that were written to all the same, which are too large to copy, go to ``changed``.
    """
    modules = modules_of(target, args, kwargs)
    parameters = [each for module in modules for each in module._parameters.values() if each is not None]
    if any(is_lazy(each) for each in parameters):
        raise ValueError("the model has parameters without a shape, as nn.LazyLinear makes them: call it once before")
    tensors: list[Tensor] = []
    own_args, own_kwargs = own_arguments(args, tensors), own_arguments(dict(kwargs), tensors)
    with ExitStack() as stack:
        stack.enter_context(random_numbers())
        stack.enter_context(module_state(modules, changed))
        stack.enter_context(tensor_values(tensors))
        stack.enter_context(compiler_state(backend))
        yield own_args, own_kwargs


def notes_on_writes(changed: Iterable[nn.Parameter], names: KnownNames | None) -> list[str]:
    """What a report says of parameters that the forward pass writes to."""
    aliases = {} if names is None else names.aliases
    called = [aliases.get(id(each), [f"of shape {tuple(each.shape)}"])[0] for each in changed]
    return [f"the forward pass writes to the parameter {name}; this run did, too" for name in called]
