"""What turns the rewritten graph into something that runs: Inductor, or AOTAutograd alone for debugging.

Both run the same passes on the same joint graph. "aot_eager" then executes it operator by operator, which starts in a
fraction of the time and shows each operator in a debugger.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule

from te_compile import __version__
from te_compile.fallbacks import short_texts, tell_inductor
from te_compile.kernels import buffers, native
from te_compile.ops import registry
from te_compile.options import Options
from te_compile.passes import DIRECTION_PASSES, JOINT_PASSES, NOT_IN_CUDA_GRAPHS, TO_SAVE_MEMORY, GraphPass
from te_compile.passes.accumulate_in_products import accumulate_in_products
from te_compile.passes.manager import Compilation
from te_compile.passes.memory import autograd_is_compiled, tags_count
from te_compile.passes.overwrite_logits import keep_read_logits, overwrite_logits
from te_compile.passes.step_cost import asked_of_inductor, replays_cuda_graphs
from te_compile.prepared_kernels import KernelsAhead, TimedTiles

Compiled = Callable[..., Any]
_JOINT, _DIRECTION = "joint_custom_pre_pass", "post_grad_custom_pre_pass"  # where Inductor lets others' passes in


@lru_cache(maxsize=1)
def source_fingerprint() -> str:
    """Hash of every source file of this package: a changed formula must never meet a cached graph of the old one."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for file in sorted(package.rglob("*.py")):
        source = file.read_bytes()
        digest.update(f"{file.relative_to(package)} {len(source)}\n".encode() + source)
    return digest.hexdigest()


class Passes(CustomGraphPass):
    """Passes in the form that keeps Inductor's and AOTAutograd's caches on.

    An equal ``uuid`` lets a cached result stand in for running the passes, so it covers all that the result depends on
    besides the graph: our version and sources, the options, the recipe, and which implementations there are to choose
    from.
    """

    def __init__(self, passes: Sequence[GraphPass], compilation: Compilation, users: Sequence[Any] = ()) -> None:
        """users: passes of the user's own for the same place, which run first."""
        self.passes, self.compilation, self.users = passes, compilation, users

    def __call__(self, graph: Graph) -> None:
        """Run the passes on the graph, in place."""
        for users in self.users:
            users(graph)
        for each in self.passes:
            self.compilation.run(each.__name__, partial(each, graph), graph)

    def __deepcopy__(self, memo: object) -> Passes:
        """Itself: graphs cannot be copied, and Inductor copies its configuration where something is compiled while a
        graph is traced, as PyTorch's ``scan`` does."""
        return self

    def uuid(self) -> Any:
        """What the result depends on besides the graph; None, for "cache nothing", if a user's pass does not say."""
        users = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.users]
        return f"{self._own_uuid()} {users}" if all(users) else None

    def _own_uuid(self) -> str:
        available = f"{registry.offers()} {native.missing(cuda=True)}"
        ours = f"te_fp8 {__version__} {source_fingerprint()}"  # the version for the C++ core, which has no sources here
        asked = f"{self.compilation.recipe} {self.compilation.options} {autograd_is_compiled()}"
        return f"{ours} {available} {asked}"


class JointPasses(Passes):
    """Those for the graph of forward and backward, which reports are about. ``then`` gets the graph after them."""

    def __init__(
        self,
        compilation: Compilation,
        options: Options,
        users: Sequence[Any] = (),
        then: Callable[[Graph], None] | None = None,
    ) -> None:
        super().__init__(joint_passes(options), compilation, users)
        self.then = then

    def __call__(self, graph: Graph) -> None:
        """Run the passes on the joint graph, in place."""
        super().__call__(graph)
        self.compilation.joint = graph
        if self.then is not None:
            self.then(graph)


def captures_cuda_graphs(options: Options) -> bool:
    """Will Inductor replay CUDA graphs, which read their inputs where they were when it captured them?"""
    return options.compiler == "inductor" and replays_cuda_graphs(options)


def joint_passes(options: Options) -> tuple[GraphPass, ...]:
    """The passes for the joint graph, under these options."""
    left_out = set() if options.save_memory else set(TO_SAVE_MEMORY)
    if not options.accumulate_in_products or _asks_nobody(options):
        left_out.add(accumulate_in_products)
    if not options.overwrite_logits or _asks_nobody(options):
        left_out.add(overwrite_logits)
    return tuple(each for each in JOINT_PASSES if each not in left_out)


def direction_passes(options: Options) -> tuple[GraphPass, ...]:
    """The passes for the graph of each direction, under these options."""
    left_out = NOT_IN_CUDA_GRAPHS if captures_cuda_graphs(options) else ()
    return tuple(each for each in DIRECTION_PASSES if each not in left_out)


def _asks_nobody(options: Options) -> bool:
    """Is there no Python in the backward pass to ask if there is a gradient to add to, or memory to write over?

    A replayed CUDA graph asks nobody, and C++ code of Inductor's knows no result that is None or one of its operands.
    """
    writes_cpp = options.compiler == "inductor" and asked_of_inductor(options).get("cpp_wrapper", config.cpp_wrapper)
    return captures_cuda_graphs(options) or bool(writes_cpp)


def _taken(asked: dict[str, Any], name: str) -> list[Any]:
    """The passes that the user has at ``name``, by an option of this call or for the process, out of ``asked``."""
    passes = asked.pop(name, getattr(config, name))
    return list(passes) if isinstance(passes, (list, tuple)) else [] if passes is None else [passes]


def inductor(gm: GraphModule, inputs: Sequence[Any], options: Options, compilation: Compilation) -> Compiled:
    """Compile with Inductor, under the user's mode and Inductor options."""
    patches = asked_of_inductor(options)
    tiles, kernels = TimedTiles(compilation, options, inputs), KernelsAhead(compilation, options)

    def then(graph: Graph) -> None:
        tiles.time(graph)
        kernels.order(graph)

    patches[_JOINT] = JointPasses(compilation, options, _taken(patches, _JOINT), then)
    if options.save_memory:
        buffers.stop_keeping_workspaces()
    if captures_cuda_graphs(options):
        buffers.stop_lending()
    patches[_DIRECTION] = Passes(direction_passes(options), compilation, _taken(patches, _DIRECTION))
    tell_inductor()
    with short_texts(), tags_count():
        compiled: Any = compile_fx(gm, list(inputs), config_patches=patches)
    kernels.order_later()
    return compiled


def aot_eager(gm: GraphModule, inputs: Sequence[Any], options: Options, compilation: Compilation) -> Compiled:
    """Trace with AOTAutograd and run the passes, then execute the graphs as they are."""
    passes = JointPasses(compilation, options)

    def partition(joint: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        passes(joint.graph)
        _return_no_views(joint.graph)
        joint.recompile()
        return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)

    def inference(graph_module: GraphModule, _: Sequence[Any]) -> Compiled:
        passes(graph_module.graph)
        _return_no_views(graph_module.graph)
        _require_no_gradients(graph_module.graph)
        graph_module.recompile()
        return make_boxed_func(graph_module.forward)

    def backward(graph_module: GraphModule, _: Sequence[Any]) -> Compiled:
        keep_read_logits(graph_module.graph)
        graph_module.recompile()
        return make_boxed_func(graph_module.forward)

    compiler = aot_autograd(
        fw_compiler=lambda graph_module, _: make_boxed_func(graph_module.forward),
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=_drawing_as_eager_does(),
        keep_inference_input_mutations=True,
    )
    with tags_count():
        return compiler(gm, list(inputs))


def _return_no_views(graph: Graph) -> None:
    """Return what passes made a view of a result as a tensor of its own, as Inductor does.

    Autograd lets nobody change a view in place that a function returns, or that was made under ``no_grad``. AOTAutograd
    makes those that the model returns itself, outside of the graph, and knows nothing of others: a sum that its
    product's view took the place of, a view that the model detached.
    """
    returns = graph.output_node()
    returned = set(returns.all_input_nodes)
    for result in returns.all_input_nodes:
        seen = result
        while seen.target is torch.ops.aten.alias.default:
            seen = seen.all_input_nodes[0]
        if seen.target is not torch.ops.aten.view.default:
            continue
        # Two results must not become one tensor: one of both may be detached.
        if result is seen or seen not in returned:
            seen.target = torch.ops.aten._unsafe_view.default
            returns.replace_input_with(result, seen)
            returned.add(seen)


def _require_no_gradients(graph: Graph) -> None:
    """Cast by ATen where no gradients are wanted: PyTorch's own code of its primitive for casts makes a tensor that
    requires a gradient of one that does, under ``no_grad`` as well."""
    for cast in graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default):
        source, dtype = cast.args
        cast.target, cast.args, cast.kwargs = torch.ops.aten._to_copy.default, (source,), {"dtype": dtype}


def _drawing_as_eager_does() -> dict[Any, Callable[..., Any]]:
    """Inductor's decompositions but for random operators: under one seed, eager mode's own draw the same numbers.

    Dropout's backward draws none, and is decomposed: of a transposed gradient the operator makes other strides on a CPU
    than PyTorch's fake of it says, and a view that was traced of it would fail.
    """
    with config.patch(fallback_random=True):
        table = dict(select_decomp_table())
    table.pop(torch.ops.aten.native_dropout.default, None)
    return table


COMPILERS: dict[str, Callable[[GraphModule, Sequence[Any], Options, Compilation], Compiled]] = {
    "inductor": inductor,
    "aot_eager": aot_eager,
}
"""By the name that the option ``compiler`` takes."""

_ONLY_TRACED: ContextVar[bool] = ContextVar("te_compile_only_traced", default=False)


@contextmanager
def only_traced() -> Iterator[None]:
    """In here graphs are traced and rewritten as their options say, Inductor's among them, and compiled by nobody."""
    token = _ONLY_TRACED.set(True)
    try:
        yield
    finally:
        _ONLY_TRACED.reset(token)


def compiler_of(options: Options) -> Callable[[GraphModule, Sequence[Any], Options, Compilation], Compiled]:
    """What makes something that runs, under these options."""
    return aot_eager if _ONLY_TRACED.get() else COMPILERS[options.compiler]
