"""One run of a model whose graphs go through te_fp8 and then run as they were captured.

The model is captured as ``torch.compile(model, backend="te_fp8")`` captures it, and each graph goes through the backend
itself. What is kept is what the passes recorded, and why Dynamo ended a graph where it did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from traceback import FrameSummary
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.utils import CompilationMetrics, counters
from torch.fx import GraphModule, Node

from te_compile.backend import te_fp8
from te_compile.compilers import only_traced
from te_compile.flat_parameters import parameter_of
from te_compile.inspect.failed_frames import failed_frames
from te_compile.inspect.target import fresh, undisturbed
from te_compile.passes import manager
from te_compile.passes.captured_nodes import argument
from te_compile.passes.linear_convolutions import is_convolution
from te_compile.passes.manager import Compilation
from te_compile.passes.plan import Site


@dataclass(frozen=True)
class CapturedGraph:
    """One graph: what the passes recorded, and the break that ended it, if one did."""

    compilation: Compilation
    ended_by: str
    convolved: frozenset[str] = frozenset()  # the placeholders that weights of convolutions are made from
    runs: list[dict[str, nn.Parameter]] = field(default_factory=list)  # the parameters of each run by placeholder

    def parameters(self) -> list[dict[str, nn.Parameter]]:
        """Each set of parameters that the graph ran with, once: equal blocks may share one graph."""
        captured = {node.name: parameter for node, parameter in self.compilation.plan.parameters.items()}
        distinct = {tuple(map(id, each.values())): each for each in [captured, *self.runs]}
        return list(distinct.values())

    def read(self) -> Iterator[nn.Parameter]:
        """The parameters that the graph had, in all of its runs."""
        yield from (parameter for run in self.parameters() for parameter in run.values())

    def multiplied(self) -> Iterator[nn.Parameter]:
        """The parameters of all runs that a product reads, or may read where the passes do not say which it is of.

        A convolution is one, too: some models convolve with the weight of a linear, of which no site may come.
        """
        read = self.convolved.union(*map(_placeholders_of, self.compilation.plan.sites))
        for run in self.parameters():
            yield from (parameter for name, parameter in run.items() if name in read)


@dataclass
class Look:
    """One run of the model with a backend of its own that keeps the passes' records."""

    options: dict[str, Any]
    captured: list[CapturedGraph] = field(default_factory=list)
    breaks: dict[str, None] = field(default_factory=dict)
    changed: list[nn.Parameter] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _pending: list[CapturedGraph] = field(default_factory=list)
    _counted: Counter[str] = field(default_factory=Counter)

    def backend(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Take the graph through te_fp8, remember what happened and run it as it is."""
        convolved = _placeholders_behind([argument(n, 1, "weight") for n in gm.graph.nodes if is_convolution(n)])
        with manager.recording() as compilations, only_traced():
            te_fp8(gm, example_inputs, options=self.options)
        inputs = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        captured = CapturedGraph(compilations[-1], self._ended_by(gm), convolved)
        self._pending.append(captured)

        def run(*args: Any) -> Any:
            named = zip(inputs, args, strict=True)
            parameters = ((name, parameter_of(each)) for name, each in named if isinstance(each, Tensor))
            captured.runs.append({name: each for name, each in parameters if each is not None})
            return gm.forward(*args)

        return run

    def run(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call ``target`` once, and leave behind nothing but the records."""
        backend = self.backend  # bound once: its identity marks our cache entries
        with ExitStack() as stack:
            args, kwargs = stack.enter_context(undisturbed(target, backend, args, kwargs, self.changed))
            counters["graph_break"].clear()
            failed: list[CompilationMetrics] = []
            stack.callback(self._keep_reasons, failed)
            stack.enter_context(failed_frames(failed))
            hook = register_bytecode_hook(self._accept)
            stack.callback(hook.remove)
            torch.compile(fresh(target), backend=backend)(*args, **kwargs)

    def _accept(self, code: CodeType, new_code: CodeType) -> None:
        """A frame is compiled. Dynamo may have begun it more than once; the last graph is the one that runs."""
        self.captured += self._pending[-1:]
        self._pending.clear()

    def _ended_by(self, gm: GraphModule) -> str:
        """Why the graph ends where it does, and where that is in the user's source; "" at the end of a function."""
        new = counters["graph_break"] - self._counted
        self._counted = Counter(counters["graph_break"])
        reason = getattr(gm, "compile_subgraph_reason", None)
        if reason is None or not reason.graph_break:
            return ""
        text = reason.reason
        if text.startswith("step_unsupported") and new:  # Dynamo's word for "see what was counted"
            text = next(iter(new))
        return _gist(text) + (f", at {_place(reason.user_stack[-1])}" if reason.user_stack else "")

    def _keep_reasons(self, failed: list[CompilationMetrics]) -> None:
        located = [each.ended_by for each in self.captured if each.ended_by]
        for text in map(_given_up, failed):
            if not any(each.startswith(text) for each in located):
                located.append(text)
        self.breaks.update(dict.fromkeys(located))
        for gist in map(_gist, counters["graph_break"]):
            if not any(each.startswith(gist) for each in located):
                self.breaks[gist] = None


def _gist(reason: str) -> str:
    """The explanation in a reason of Dynamo's, with the exception it met and the setting of its that would change it.

    The rest is a headline that says less, and advice in general.
    """
    first, *others = (line.strip() for line in reason.splitlines())
    if first.startswith("generic_jump"):
        return "a branch on the value of a tensor"
    explained = next(_said(others, "Explanation:"), first)
    setting = next((hint for hint in _said(others, "Hint:") if "torch._dynamo.config." in hint), "")
    raised = next(_said(others, "Developer debug context: raised exception"), "")
    return explained + (f": {raised}" if raised else "") + (f" (Dynamo's hint: {setting})" if setting else "")


def _said(lines: list[str], what: str) -> Iterator[str]:
    """What stands behind ``what`` in each line that begins so and goes on."""
    for line in lines:
        if line.startswith(what) and (said := line.removeprefix(what).strip().rstrip(".")):
            yield said


def _given_up(frame: CompilationMetrics) -> str:
    """Why Dynamo gave up on a function as a whole, and where in what it calls that is."""
    where = frame.fail_user_frame_filename
    return _gist(frame.fail_reason or "") + (f", at {_short(where)}:{frame.fail_user_frame_lineno}" if where else "")


def _place(frame: FrameSummary) -> str:
    """``transformers/models/gpt2/modeling_gpt2.py:700 in forward``."""
    return f"{_short(frame.filename)}:{frame.lineno} in {frame.name}"


def _short(file: str) -> str:
    """Where ``file`` is in its package, or from here."""
    file = file.rpartition("site-packages/")[2]
    return str(Path(file).relative_to(Path.cwd())) if Path(file).is_relative_to(Path.cwd()) else file


def _placeholders_behind(nodes: list[Node]) -> frozenset[str]:
    """The inputs of the graph that ``nodes`` are, or are made from."""
    waiting, seen = [*nodes], set[Node]()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return frozenset(node.name for node in seen if node.op == "placeholder")


def _placeholders_of(site: Site) -> set[str]:
    """The inputs of the graph that the weight of a product is, or is made from."""
    if site.root_weight is not None:
        return {site.root_weight.name}
    waiting, seen = [(site.weight or site.node, site.region)], set[Node]()
    while waiting:
        node, region = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder" and region.parent is not None and region.call is not None:
            waiting.append((region.call, region.parent))
        waiting += [(each, region) for each in node.all_input_nodes]
    return {node.name for node in seen if node.op == "placeholder"}
