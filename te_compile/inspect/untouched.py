"""Run a user's model for a look at it, and leave everything as it was.

Looking at a model means to run it once: what stands behind a graph break is captured only if the part before it runs.
A run leaves traces in the model (buffers of batch norm, attributes that a forward sets), in its arguments (KV caches),
in the random number generators and in torch.compile (cache entries on the model's own functions, counters, what it
remembers of sizes). Here is what puts each of them back.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.eval_frame import OptimizedModule, cached_backends
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.pgo import get_code_state
from torch._dynamo.utils import counters

from te_compile.inspect.tensor_values import tensor_values

_ENOUGH = 1 << 30  # compilations per function: a limit that the user's own have reached must not stop a look


@contextmanager
def random_numbers() -> Iterator[None]:
    """Put back the generators of torch, Python and, where it is in use, numpy."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@contextmanager
def module_state(modules: Iterable[nn.Module], changed: list[nn.Parameter]) -> Iterator[None]:
    """Put back attributes, buffers and hooks of ``modules``; parameters that changed, too many to copy, go to
    ``changed``.

    Of what attributes hold, lists, dicts, sets and tensors are put back, too; other objects stay as a look leaves them.
    So do numbers, truths and texts where a parameter changed: a model that scales its weights once notes that it has.
    Inside, none of the modules is compiled: a part that the user has compiled by itself is looked at, not run by him.
    """
    modules = list(modules)
    # What TorchScript holds is not Python's to put back; the values of buffers are.
    scripted = [module for module in modules if isinstance(module, torch.jit.ScriptModule)]
    modules = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    attributes = [(module, dict(module.__dict__)) for module in modules]
    # Children, tensors, and hooks, which a forward may add to parts of the model as it sets attributes.
    owned = (each for module in modules for name, each in module.__dict__.items() if name in _OF_EVERY_MODULE)
    stores = [(store, dict(store)) for store in owned if isinstance(store, dict)]
    written = [buffer for module in modules for buffer in module._buffers.values()]
    written += [buffer for module in scripted for buffer in module.buffers(recurse=False)]
    _own_containers(modules, written)
    values = tensor_values(written)
    parameters = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    versions = [(parameter, _version(parameter)) for parameter in parameters.values()]
    for module in modules:
        if module.__dict__.get("_compiled_call_impl") is not None:
            module.__dict__["_compiled_call_impl"] = None
        for name, child in module._modules.items():
            if isinstance(child, OptimizedModule):
                module._modules[name] = child._orig_mod
    try:
        with values:
            yield
    finally:
        changed += [parameter for parameter, version in versions if _version(parameter) != version]
        for module, before in attributes:
            _put_back(module.__dict__, before | _notes_in(module, before) if changed else before)
        for store, held in stores:
            _put_back(store, held)


_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


def _own_containers(modules: list[nn.Module], tensors: list[Tensor | None]) -> None:
    """Give ``modules`` copies of the containers that their attributes hold, one for each; the tensors are noted."""
    copies: dict[int, Any] = {}

    def own(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
        if type(value) not in (list, tuple, dict, set):
            return value
        if id(value) not in copies:
            copied = copies[id(value)] = type(value)()  # known before its items are, one of which may hold it
            if type(value) is dict:
                copied.update((key, own(item)) for key, item in value.items())
            elif type(value) is list:
                copied.extend(map(own, value))
            else:
                copies[id(value)] = type(value)(map(own, value))
        return copies[id(value)]

    for module in modules:
        for name, value in list(module.__dict__.items()):
            if name not in _OF_EVERY_MODULE:
                module.__dict__[name] = own(value)


def _notes_in(module: nn.Module, before: dict[str, Any]) -> dict[str, Any]:
    """The attributes of ``module`` that are numbers, truths or texts, and were something of that kind before."""
    return {
        name: value
        for name, value in module.__dict__.items()
        if name not in _OF_EVERY_MODULE and all(isinstance(each, _UNCHANGEABLE) for each in (value, before.get(name)))
    }


def has_compiled_parts(model: nn.Module) -> bool:
    """Is a module inside ``model`` compiled by itself?"""
    return any(
        module is not model and (isinstance(module, OptimizedModule) or module._compiled_call_impl is not None)
        for module in model.modules()
    )


def _put_back(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Make ``now`` equal to ``before``, untouched if it is."""
    if now.keys() != before.keys() or any(now[name] is not before[name] for name in before):
        now.clear()
        now.update(before)


def _version(tensor: Tensor) -> int | None:
    """How often ``tensor`` was written to; an inference tensor does not count."""
    return None if tensor.is_inference() else tensor._version


_UNCHANGEABLE = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device, torch.Size)


def own_arguments(value: Any, tensors: list[Tensor]) -> Any:
    """``value`` with its containers and other objects (a KV cache) copied, and its tensors as they are, noted.

    Tensors stay themselves because their identity means something: a parameter's name, a mark for dynamic sizes.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return value
    if type(value) in (list, tuple):
        return type(value)(own_arguments(item, tensors) for item in value)
    if type(value) is dict:
        return {key: own_arguments(item, tensors) for key, item in value.items()}
    if isinstance(value, (*_UNCHANGEABLE, nn.Module)) or callable(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:
        return value  # an object that cannot be copied, such as a generator, has to be taken as it is


@contextmanager
def compiler_state(backend: Callable[..., Any]) -> Iterator[None]:
    """Take back what compiling with ``backend`` leaves in Dynamo.

    The entries that others made on the same functions stay: nothing of the user's is compiled again.
    """
    codes: list[CodeType] = []
    before = {name: Counter(counter) for name, counter in counters.items()}
    sizes = get_code_state()  # what functions were called with; a later call with another size would turn dynamic
    sizes_before = copy.deepcopy(dict(sizes))
    settings = {"recompile_limit": _ENOUGH, "accumulated_recompile_limit": _ENOUGH, "automatic_dynamic_shapes": False}
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(settings))
        hook = register_bytecode_hook(lambda code, _: codes.append(code))
        stack.callback(hook.remove)
        try:
            yield
        finally:
            for code in {id(code): code for code in codes}.values():  # Dynamo's own may have no hash
                _drop_entries(code, backend)
            _drop_backend(backend)
            sizes.clear()
            sizes.update(sizes_before)
            counters.clear()
            counters.update(before)


def _drop_entries(code: CodeType, backend: Callable[..., Any]) -> None:
    for entry in _debug_get_cache_entry_list(code):
        of_code = entry.guard_manager.extra_state
        if of_code is not None and getattr(entry.backend, "compiler_fn", entry.backend) is backend:
            of_code.invalidate(entry, DeletedGuardManagerWrapper("te_compile.explain has finished"))


def _drop_backend(backend: Callable[..., Any]) -> None:
    """Dynamo holds every backend for the sake of its next reset, and one that looks at a model holds that model."""
    for key, each in list(cached_backends.items()):
        if getattr(each, "compiler_fn", each) is backend:
            del cached_backends[key]
