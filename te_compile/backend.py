"""``torch.compile(model, backend="te_fp8")``: the whole road on one screen.

Dynamo hands over a graph whose parameters are placeholders. It is normalised, its linears are found, selected and
lowered to ``te::`` operators with FP8 state; AOTAutograd traces forward and backward into one joint graph, on which the
fusions run; Inductor compiles what is not ours. At run time the state of each parameter and its FP8 copies are looked
up by the parameter itself, so one compiled graph serves every block that shares its code.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from te_compile.compilers import captures_cuda_graphs, compiler_of
from te_compile.data_parallel import tell_of_cuts
from te_compile.deferred_gradients import attached
from te_compile.options import Options
from te_compile.passes import manager, normalize_passes
from te_compile.passes.attention_kernels import choose_attention_kernels
from te_compile.passes.biased_attentions import biased_attentions
from te_compile.passes.constants_across_cuts import constant_outputs, note_constant_inputs, telling
from te_compile.passes.defer_logits_gradient import defer_logits_gradient
from te_compile.passes.draw_dropouts import draw_dropouts
from te_compile.passes.exact_dropouts import exact_dropouts
from te_compile.passes.find_attentions import find_attentions
from te_compile.passes.find_linears import find_linears
from te_compile.passes.finite_gradients import finite_gradients
from te_compile.passes.fold_masks import fold_masks
from te_compile.passes.lay_out_biases import lay_out_biases
from te_compile.passes.lower import Signature, lower_linears
from te_compile.passes.lower_attentions import lower_attentions
from te_compile.passes.masked_attentions import masked_attentions
from te_compile.passes.move_row_masks import move_row_masks
from te_compile.passes.narrow_masks import narrow_masks
from te_compile.passes.patches_as_products import patches_as_products
from te_compile.passes.plan import Plan
from te_compile.passes.regions import regions_of
from te_compile.passes.select import select_linears
from te_compile.passes.share_one_head import share_one_head
from te_compile.passes.short_attentions import short_attentions
from te_compile.passes.spell_out import spell_out_linears
from te_compile.passes.undo_repeated_heads import undo_repeated_heads
from te_compile.passes.varying_attentions import varying_attentions
from te_compile.passes.widen_heads import widen_heads
from te_compile.passes.window_attentions import window_attentions
from te_compile.runtime import Runner, example_inputs_of


def te_fp8(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a captured graph with its linears in FP8. Registered with torch.compile under the name "te_fp8".

    ``mode`` and ``options`` are those of torch.compile; see :class:`te_compile.options.Options`. Raises OptionError for
    a bad option and StrictError where ``strict`` forbids what would stay in high precision.
    """
    chosen = Options.resolve(options, mode)
    tell_of_cuts()
    gm = _own_copy(gm)
    plan = Plan()
    compilation = manager.begin(plan, chosen.recipe.key(), chosen.key(), chosen.skip_passes)
    note = partial(note_constant_inputs, gm.graph, example_inputs)
    compilation.run("note_constant_inputs", note, gm.graph)
    signature = rewrite(gm, example_inputs, chosen, compilation)
    constants = constant_outputs(gm.graph)
    deferred = _deferred(gm, chosen, compilation)
    added = example_inputs_of(signature, chosen.recipe)
    compiled = compiler_of(chosen)(gm, [*added, *example_inputs], chosen, compilation)
    if deferred:
        compiled = attached(compiled, deferred)
    if constants:
        compiled = telling(compiled, constants)
    if not signature.added:  # nothing in FP8, nothing to look up
        return compiled
    runner = Runner(compiled, signature, gm, chosen.recipe, captures_cuda_graphs(chosen))
    return torch._dynamo.disable(runner.__call__)


def rewrite(
    gm: GraphModule, example_inputs: Sequence[Any], chosen: Options, compilation: manager.Compilation
) -> Signature:
    """The passes on Dynamo's graph: normalise, fold masks, find, select, spell out, lower. Changes ``gm`` in place."""
    plan, graph = compilation.plan, gm.graph
    regions, left = regions_of(gm)

    def run(function: Callable[..., int], *given: Any, on: Graph = graph) -> None:
        named = function.func if isinstance(function, partial) else function  # some of its arguments may be bound
        compilation.run(named.__name__, partial(function, *given), on)

    for normalize in normalize_passes(chosen):
        for region in regions:
            run(normalize, region.graph, on=region.graph)
    run(fold_masks, regions)
    for region in regions:  # after the masks: only attention without one takes heads as they are
        for each in (move_row_masks, undo_repeated_heads, share_one_head):
            run(each, region.graph, on=region.graph)
    run(find_attentions, regions, left, plan)
    if chosen.recipe.fp8_dpa:  # after the masks: FP8 attention takes none
        run(lower_attentions, regions, plan, chosen)
    run(window_attentions, regions, plan)
    run(widen_heads, regions, plan, chosen)  # after the windows, whose kernels take heads and guards as they are
    run(biased_attentions, regions, plan, chosen)
    run(lay_out_biases, regions, plan, chosen)
    run(short_attentions, regions, plan, chosen)
    run(find_linears, regions, left, example_inputs, plan)
    run(select_linears, plan, chosen)
    run(choose_attention_kernels, regions, plan, chosen)
    run(varying_attentions, regions, plan, chosen)
    run(masked_attentions, regions, plan, chosen)
    run(narrow_masks, regions, plan)
    run(exact_dropouts, regions, plan)
    run(finite_gradients, regions, plan, chosen)
    run(draw_dropouts, regions, plan, chosen)
    if chosen.strict:
        plan.require_all_supported()
    run(patches_as_products, plan)
    run(spell_out_linears, plan)
    signature = Signature()

    def lower() -> int:
        nonlocal signature
        signature = lower_linears(graph, plan, chosen.recipe, torch.is_grad_enabled(), chosen.cache_weights)
        return len(plan.selected)

    compilation.run("lower_linears", lower, graph)
    for region in reversed(regions):
        region.graph.lint()
        region.module.recompile()
    return signature


def _deferred(gm: GraphModule, chosen: Options, compilation: manager.Compilation) -> list[int]:
    """Have the graph return logits detached, with tickets for their gradients; returns which outputs they are."""
    # A replayed CUDA graph asks nobody for a gradient.
    if not (chosen.defer_logits and torch.is_grad_enabled()) or captures_cuda_graphs(chosen):
        return []
    places: list[int] = []

    def defer() -> int:
        places.extend(defer_logits_gradient(gm.graph))
        return len(places)

    compilation.run("defer_logits_gradient", defer, gm.graph)
    gm.recompile()
    return places


def _of_the_user(gm: GraphModule) -> Iterator[Any]:
    """The tensors that ``gm`` and the graphs in it hold as attributes, and the modules without a graph in them."""
    for module in gm.modules():
        if not any(isinstance(each, GraphModule) for each in module.modules()):
            yield module
        held = itertools.chain(vars(module).values(), module._parameters.values(), module._buffers.values())
        yield from (each for each in held if isinstance(each, Tensor))


def _own_copy(gm: GraphModule) -> GraphModule:
    """A copy to rewrite, for Dynamo reads its own graph again; with what deepcopy forgets and CUDA graphs need.

    Of graphs alone: tensors, an optimizer's parameters for one, and the modules that a graph calls are the user's own.
    """
    copied = copy.deepcopy(gm, {id(each): each for each in _of_the_user(gm)})
    if hasattr(gm, "_param_name_to_source"):
        copied._param_name_to_source = gm._param_name_to_source
    placeholders = zip(gm.graph.find_nodes(op="placeholder"), copied.graph.find_nodes(op="placeholder"), strict=True)
    for old, new in placeholders:
        new._dynamo_source = getattr(old, "_dynamo_source", None)
    return copied
