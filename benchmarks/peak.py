"""Estimate the peak memory of a training step without a GPU, from Inductor's own schedules at real sizes.

Models are built of fake tensors, which have shapes and no memory, and compiled as far as a schedule: then Inductor
accounts for what is alive at each of its steps, as it does to choose their order. Nothing runs. Kernels are chosen
as on a Hopper GPU, while code is scheduled for a CPU, which fuses much the same. Workspaces of libraries come on top of
every estimate.

One row per variant, in GiB: the peaks of forward and backward with all that the caller holds, and what waits between.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch._inductor.memory as inductor_memory
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._ordered_set import OrderedSet

from benchmarks.layer import SAVING, Layer, Work
from benchmarks.measure import Rows, add_out, known
from benchmarks.models import MODELS
from te_compile import compilers
from te_compile.backend import te_fp8
from te_compile.inspect.from_config import _make_fake
from te_compile.kernels import cublaslt, native, norm_backward
from te_compile.ops import registry
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of
from te_compile.passes.overwrite_logits import LOSS_BACKWARDS

GIB = 2**30
VARIANTS: dict[str, dict[str, Any] | None] = {"compile": None, "te_fp8": {}, **SAVING}
"""The options of te_fp8; None for torch.compile."""
DEPTHS = ("num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers")  # as configs call it


@dataclass
class Schedule:
    """What Inductor says of one direction, in bytes: the most that is alive, and what waits for it as it begins."""

    peak: int
    saved: int


class _EnoughError(Exception):
    """The schedule is known; no code is wanted."""


def schedule_of(scheduler: Scheduler) -> Schedule:
    """The account of a finished schedule. Parameters and inputs of the forward, which the caller holds, are not in."""
    inputs, outputs = OrderedSet(V.graph.graph_inputs), OrderedSet(V.graph.get_output_names())
    named = scheduler.name_to_buf, scheduler.name_to_fused_node
    _, freeable = inductor_memory.prepare_planning_info(scheduler.nodes, *named, inputs, outputs)
    saved = sum(each.mpi_buffer.size_free for each in freeable.values())
    for node in scheduler.nodes:
        _forget_what_is_local(node, outputs)
        _forget_what_is_overwritten(node, freeable)
    peak, _ = inductor_memory.estimate_peak_memory(scheduler.nodes, freeable, outputs)
    return Schedule(peak, saved)


def _forget_what_is_local(node: BaseSchedulerNode, outputs: OrderedSet[str]) -> None:
    """What one kernel computes and reads is never in memory, which the account does not know."""
    inside = {each.get_name() for each in node.get_nodes()}
    for buffer in node.get_outputs():
        is_local = all(user.get_name() in inside for user in buffer.users)
        if is_local and len(inside) > 1 and buffer.get_name() not in outputs:
            buffer.mpi_buffer.size_alloc = buffer.mpi_buffer.size_free = 0


def _forget_what_is_overwritten(node: BaseSchedulerNode, freeable: dict[str, Any]) -> None:
    """The gradient of logits lies where they did, so of the two the gradient alone counts: from here on, which is where
    there is the most. The caller drops the logits."""
    made_of = node.node.get_origins() if isinstance(node.node, ir.FallbackKernel) else ()
    if any(each.target in LOSS_BACKWARDS and arguments_of(each)["overwrite"] for each in made_of):
        freeable[node.node.inputs[0].get_name()].mpi_buffer.size_free = 0


@contextmanager
def scheduling(found: dict[bool, Schedule]) -> Iterator[Callable[..., Any]]:
    """Gives a compile_fx that stops at schedules and notes them in ``found``, by whether they are a backward's."""

    def stop(scheduler: Scheduler) -> None:
        if V.graph.is_backward in found:
            raise ValueError("the model was captured in several graphs, whose peaks are not those of one")
        found[V.graph.is_backward] = schedule_of(scheduler)
        raise _EnoughError

    def inner(gm: Any, inputs: Any, **given: Any) -> Any:
        with mock.patch.object(Scheduler, "codegen", stop):
            try:
                compile_fx_inner(gm, inputs, **given)
            except Exception as error:
                if not _is_enough(error):
                    raise
        (results,) = gm.graph.output_node().args
        values = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in results]

        def run(arguments: list[Any]) -> list[Any]:
            arguments.clear()
            return [torch.empty_like(each) if isinstance(each, Tensor) else each for each in values]

        run._boxed_call = True  # type: ignore[attr-defined]  # a mark that functions carry
        return run

    with ExitStack() as stack:
        stack.enter_context(inductor_config.patch(force_disable_caches=True))
        hopper = staticmethod(lambda device: registry.Target("cuda", (9, 0)))
        stack.enter_context(mock.patch.object(registry.Target, "of", hopper))
        # An H200's processors and the shared memory of each: how many partial sums a norm's backward leaves.
        stack.enter_context(mock.patch.object(norm_backward, "_device_limits", lambda index: (132, 227 << 10)))
        # What the C++ core would run, whether it is built here or not; its library cannot be asked without a GPU.
        stack.enter_context(mock.patch.object(native, "missing", lambda cuda=False: ""))
        stack.enter_context(mock.patch.object(cublaslt, "_refused", lambda *_: ""))
        compile_to_schedule = partial(compile_fx, inner_compile=inner)
        stack.enter_context(mock.patch.object(compilers, "compile_fx", compile_to_schedule))
        yield compile_to_schedule


def _is_enough(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, _EnoughError):
        error = error.__cause__ or error.__context__ or getattr(error, "inner_exception", None)
    return error is not None


def estimated(variant: str, model: nn.Module, step: Callable[[Any], None], held: int) -> dict[str, Any]:
    """A row. ``step`` runs the compiled model forward and backward; held: bytes that the caller has all the time."""
    found: dict[bool, Schedule] = {}
    options = VARIANTS[variant]
    torch._dynamo.reset()
    with manager.recording() as records, scheduling(found) as schedule:
        if options is None:
            step(torch.compile(model, backend=lambda gm, inputs: schedule(gm, inputs)))
        else:
            step(torch.compile(model, backend=te_fp8, options={"cost_model": False, **options}))
    held += sum(2 * rows * columns for each in records for g in each.plan.groups for rows, columns in g.layout.copies)
    forward, backward = (found[is_backward].peak + held for is_backward in (False, True))
    row = {"forward_gib": forward, "backward_gib": backward, "peak_gib": max(forward, backward)}
    return {"name": variant, **{k: v / GIB for k, v in row.items()}, "saved_gib": found[True].saved / GIB}


Estimated = tuple[nn.Module, Callable[[Any], None], int]
"""A model, what runs it forward and backward when it is compiled, and the bytes that the caller has all the time."""


def layer(work: Work) -> Estimated:
    """benchmarks.layer's model and step, and what its caller holds: weights, x and, in backward, y."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        model = Layer(work).to(torch.bfloat16)
    _make_fake(model, fake, "cpu")
    with fake:
        shape = (work.batch, work.sequence, work.hidden)
        x, dy = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    return model, lambda run: run(x).backward(dy), _bytes_of(model) + 2 * x.nbytes


def whole(name: str, layers: int | None = None, checkpointed: bool = False) -> Estimated:
    """A training step of one of benchmarks.models' models, with so many layers a side, and what its caller holds.

    checkpointed: layers are recomputed in the backward pass.
    """
    fake, of = FakeTensorMode(allow_non_fake_inputs=True), MODELS[name]
    depth = {} if layers is None else dict.fromkeys(DEPTHS, layers)
    with torch.device("meta"):
        model = of.built(of.configured("sdpa", depth)).to(torch.bfloat16).train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _make_fake(model, fake, "cpu")
    rows, size = of.train
    with fake:
        if of.images:
            pixels = torch.empty(rows, 3, size, size, dtype=torch.bfloat16)
            given = {"pixel_values": pixels, "labels": torch.zeros(rows, dtype=torch.int64)}
        else:
            ids = torch.zeros(of.train, dtype=torch.int64)
            given = {"input_ids": ids, "labels": ids}
    held = _bytes_of(model) + sum(tensor.nbytes for tensor in given.values() if tensor.is_floating_point())
    return model, lambda run: run(**given).loss.backward(), held


def _bytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def main() -> int:
    """Estimate every chosen variant; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--work",
        choices=("layer", *MODELS),
        default="layer",
        metavar="WORK",
        help=f"layer, or a model of benchmarks.models: {', '.join(MODELS)} (%(default)s)",
    )
    parser.add_argument("--hidden", type=int, default=Work.hidden, help="of the layer (%(default)s)")
    parser.add_argument("--sequence", type=int, default=Work.sequence, help="of the layer (%(default)s)")
    parser.add_argument("--layers", type=int, help="of the model, in place of those that benchmarks.models gives it")
    parser.add_argument("--checkpointed", action="store_true", help="the model's layers are recomputed in backward")
    parser.add_argument("--only", default=",".join(VARIANTS), help="(%(default)s)")
    add_out(parser)
    given = parser.parse_args()
    rows = Rows(given.out)
    for variant in known("--only", given.only, VARIANTS):
        size = {"hidden": given.hidden, "intermediate": 4 * given.hidden, "sequence": given.sequence}
        is_layer = given.work == "layer"
        made = layer(replace(Work(), **size)) if is_layer else whole(given.work, given.layers, given.checkpointed)
        rows.write(what=given.work, **estimated(variant, *made))
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
