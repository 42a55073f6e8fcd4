"""Is a program under te_fp8 still the program? Compared with eager PyTorch, to what textbook FP8 allows.

What must be equal: the structure, shapes, dtypes and requires_grad of the outputs, which gradients there are, what is
finite. What may differ, and by how much: FP8 moves every number behind a linear. The measure is the error that textbook
FP8 itself makes on this very program (tests/fuzz/emulation.py), tensor by tensor. A few emulations decide most cases;
where te_fp8 seems worse, many more are run, each with another rounding grid, and te_fp8 must not be ``WORST`` times
worse than the worst of them.

A failure that torch.compile shares without te_fp8 is PyTorch's own and raises ``NotOurs``; so does a program that eager
PyTorch refuses.
"""

from __future__ import annotations

import copy
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from te_compile.passes import manager
from te_compile.passes.plan import Site
from tests.compiling import BACKEND
from tests.fuzz.emulation import Fp8Products, Scales
from tests.fuzz.program import Program, Setting, inline_checkpoints

FEW, MANY = 3, 24
WORST = 2.0
ROUNDINGS = 4  # of the coarsest dtype in the program, relative to a tensor's norm: what reordered arithmetic may do


class Failure(AssertionError):
    """te_fp8 did something to the program that it must not do; ``kind`` is one word for the summary."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class NotOurs(Exception):
    """The program does not run in eager PyTorch, or torch.compile fails on it without te_fp8."""


@dataclass
class Case:
    """``inputs(more)`` draws the inputs, with ``more`` rows than usual in dimensions that may grow."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    setting: Setting = field(default_factory=Setting)
    seed: int = 0

    @staticmethod
    def of(program: Program) -> Case:
        return Case(program.build, program.draw_inputs, program.setting, program.seed)


@dataclass
class Run:
    """What one call left behind: each tensor by a name, and what is to be equal."""

    numbers: dict[str, Tensor] = field(default_factory=dict)
    exact: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """For summaries: the linears, and the largest error in units of textbook FP8's."""

    sites: list[Site]
    ratio: float = 0.0


def check(case: Case, inference: bool = True, theirs: tuple[str, ...] = ("aot_eager", "inductor")) -> Outcome:
    """Raise Failure if te_fp8 changes what the program means; NotOurs if there is nothing to compare with.

    ``theirs``: the backends of PyTorch that a failure is tried on; Inductor, which is slow, for wrong numbers alone.
    """
    outcome = Outcome([])
    for training in (True, False) if inference else (True,):
        _Comparison(case, training and not case.setting.evaluate, training, outcome, theirs).run()
    return outcome


class _Comparison:
    """One way of running a program: trained twice, or under no_grad."""

    def __init__(self, case: Case, training: bool, gradients: bool, outcome: Outcome, theirs: tuple[str, ...]) -> None:
        self.case, self.gradients, self.outcome, self.theirs = case, gradients, outcome, theirs
        torch.manual_seed(case.seed)
        self.model = case.build().to(case.setting.device).train(training)
        setting = case.setting
        number = setting.calls if gradients or setting.dynamic else setting.calls // 2
        torch.manual_seed(case.seed + 1)
        self.inputs = [_drawn(case, call) for call in range(number)]

    def run(self) -> None:
        try:
            expected = self.runs(self.model_copy())
        except Exception as error:
            raise NotOurs(f"eager: {error}") from error
        torch._dynamo.reset()
        try:
            got, records = self._compiled(BACKEND)
            self._compare(expected, got, records)
        except Failure as failure:
            self._require_ours(expected, failure)
            raise

    def model_copy(self) -> nn.Module:
        return copy.deepcopy(self.model)

    def _compiled(self, backend: str) -> tuple[list[Run], list[manager.Compilation]]:
        setting, model = self.case.setting, self.model_copy()
        options = setting.options() if backend == BACKEND else None
        fast = torch.compile(model, backend=backend, options=options, dynamic=True if setting.dynamic else None)
        try:
            with manager.recording() as records:
                return self.runs(model, fast), records
        except Exception as error:
            raise Failure("crash", f"{error}\n{traceback.format_exc()}") from error

    def _require_ours(self, expected: list[Run], failure: Failure) -> None:
        if "CppCompileError" in str(failure):
            raise NotOurs("inductor wrote C++ that does not compile") from failure
        for backend in self.theirs:
            if backend == "inductor" and failure.kind != "numbers" and self.case.setting.compiler != "inductor":
                continue
            torch._dynamo.reset()
            try:
                got, _ = self._compiled(backend)
                self._compare(expected, got, [])
            except Failure as other:
                raise NotOurs(f"{backend} as well: {other} (te_fp8: {failure.kind})") from other

    def runs(self, model: nn.Module, call: Callable[..., Any] | None = None) -> list[Run]:
        setting = self.case.setting
        autocast = torch.autocast(setting.device, torch.bfloat16, enabled=setting.autocast)
        with torch.set_grad_enabled(self.gradients), autocast:
            return [self._one(model, model if call is None else call, inputs) for inputs in self.inputs]

    def _one(self, model: nn.Module, call: Callable[..., Any], given: tuple[Tensor, ...]) -> Run:
        run = Run()
        if not self.case.setting.accumulate:
            model.zero_grad(set_to_none=True)
        if self.case.setting.mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
        output = call(*inputs)
        flat, structure = pytree.tree_flatten(output)
        run.exact["structure"] = structure
        for i, tensor in enumerate(flat):
            run.exact[f"output {i}"] = (tensor.dtype, tuple(tensor.shape), tensor.requires_grad)
            run.numbers[f"output {i}"] = tensor.detach().clone()
        if self.gradients:
            self._backward([t for t in flat if t.requires_grad])
        leaves = {**{f"input {i}": t for i, t in enumerate(inputs)}, **dict(model.named_parameters())}
        for name, leaf in leaves.items():
            run.exact[f"gradient of {name}"] = None if leaf.grad is None else (leaf.grad.dtype, leaf.grad.shape)
            if leaf.grad is not None:
                run.numbers[f"gradient of {name}"] = leaf.grad.detach().clone()
            run.numbers[f"{name} afterwards"] = leaf.detach().clone()
        for name, buffer in model.named_buffers():
            run.numbers[f"buffer {name}"] = buffer.detach().clone()
        return run

    def _backward(self, outputs: list[Tensor]) -> None:
        """Gradients of random size for each output, equal in every run."""
        generator = torch.Generator().manual_seed(self.case.seed)
        cotangents = [torch.randn(t.shape, generator=generator).to(t.device, t.dtype) for t in outputs]
        if outputs:
            with torch.autocast(self.case.setting.device, enabled=False):
                torch.autograd.backward(outputs, cotangents)

    # --- the comparison --------------------------------------------------------------------------------------------

    def _compare(self, expected: list[Run], got: list[Run], records: list[manager.Compilation]) -> None:
        sites = [site for record in records for site in record.plan.sites]
        self.outcome.sites += sites
        for step, (one, other) in enumerate(zip(expected, got, strict=True)):
            for what, value in one.exact.items():
                if other.exact.get(what) != value:
                    raise Failure("form", f"step {step}: {what} is {other.exact.get(what)}, in eager {value}")
        emulator = _Emulator(self, _statuses(records))
        few = [emulator.runs(i) for i in range(FEW)]
        suspicious = self._beyond(expected, got, few, few[:1], emulator.epsilon)
        if records and emulator.unreported:
            raise Failure("unreported", f"the plan says nothing of {sorted(emulator.unreported)}")
        if suspicious:
            many = few + [emulator.runs(i) for i in range(FEW, MANY)]
            alike = few[:1] + emulator.unrounded()
            for step, what, error, noise in self._beyond(expected, got, many, alike, emulator.epsilon):
                fp8 = ", ".join(f"{site.name}: {site.status}" for site in sites)
                raise Failure(
                    "numbers", f"step {step}: {what}: error {error:.3g}, textbook FP8 at most {noise:.3g} ({fp8})"
                )

    def _beyond(
        self,
        expected: list[Run],
        got: list[Run],
        emulated: list[list[Run]],
        alike: list[list[Run]],
        epsilon: float,
    ) -> list[tuple[int, str, float, float]]:
        """(step, tensor, te_fp8's relative error, the emulations' worst) wherever te_fp8 is too far off.

        ``alike``: emulations that round as te_fp8 does; it is right to be as near to one of them as they all are to
        high precision. For what they do to a near tie, te_fp8 may do as well, however rarely others do.
        """
        found = []
        for step, (right, ours) in enumerate(zip(expected, got, strict=True)):
            largest = _largest_gradient(right)
            for what, tensor in right.numbers.items():
                others, own = ([runs[step].numbers[what] for runs in each] for each in (emulated, alike))
                floor = epsilon * largest / 8
                measured = self._measure(tensor, ours.numbers[what], others, own, floor, epsilon)
                found += [(step, what, *measured)] if measured else []
        return found

    def _measure(
        self, right: Tensor, ours: Tensor, others: list[Tensor], own: list[Tensor], floor: float, epsilon: float
    ) -> tuple[float, float] | None:
        """te_fp8's relative error and the worst of the emulations, if it is too far off."""
        if not right.is_floating_point():
            return None if torch.equal(right, ours) else (1.0, 0.0)
        # Where textbook FP8 overflows or divides by nothing, te_fp8 may.
        usable = right.isfinite() & torch.stack([t.isfinite() for t in others]).all(0)
        if not bool(ours[usable].isfinite().all()):
            return float("inf"), 0.0
        error = _distance(ours, right, usable)
        noise = max(_distance(t, right, usable) for t in others)
        size = _distance(right, torch.zeros_like(right), usable)
        floor += ROUNDINGS * epsilon * size + 1e-30
        self.outcome.ratio = max(self.outcome.ratio, error / (noise + floor))
        if min(error / WORST, *(_distance(ours, t, usable) for t in own)) <= noise + floor:
            return None
        return error / (size + 1e-30), noise / (size + 1e-30)


def _distance(one: Tensor, other: Tensor, usable: Tensor) -> float:
    return float((one[usable].double() - other[usable].double()).norm())


def _largest_gradient(run: Run) -> float:
    """The norm of the largest gradient: what is tiny beside it may be all rounding."""
    norms = [float(t[t.isfinite()].double().norm()) for n, t in run.numbers.items() if n.startswith("gradient")]
    return max(norms, default=0.0)


def _drawn(case: Case, call: int) -> tuple[Tensor, ...]:
    """The inputs of one call, a little smaller than those of the one before: what is left over from that shows."""
    torch.manual_seed(case.seed + 1)
    drawn, device = case.inputs(call % 2 if case.setting.dynamic else 0), case.setting.device
    factor = 1 - 0.1 * call

    def moved(each: Tensor) -> Tensor:
        there = each.detach().to(device)
        there = there * factor if there.is_floating_point() else there
        return there.requires_grad_(each.requires_grad)

    return tuple(map(moved, drawn))


def _statuses(records: list[manager.Compilation]) -> dict[str, list[bool]]:
    """For each linear by name, in order, whether it runs in FP8."""
    found: dict[str, list[bool]] = {}
    for record in records:
        for site in record.plan.sites:
            found.setdefault(site.name, []).append(site.status == "fp8")
    return found


def _move(tensors: Sequence[Tensor], generator: torch.Generator) -> None:
    """Change each number by about a rounding, to see what rounding does to the program."""
    with torch.no_grad():
        for t in tensors:
            if t.is_floating_point():
                t.mul_(1 + torch.randn(t.shape, generator=generator).to(t.device) * torch.finfo(t.dtype).eps / 2)


class _Emulator:
    """Runs the program in textbook FP8. Number 0 has the scales that just fit; each other one has scales of its own,
    and parameters and inputs moved by a rounding."""

    def __init__(self, comparison: _Comparison, statuses: dict[str, list[bool]]) -> None:
        self.comparison, self.statuses = comparison, statuses
        self.unreported: set[str] = set()
        self.epsilon = 0.0

    def unrounded(self) -> list[list[Run]]:
        """The program in fp32 but for FP8, if it runs so: te_fp8 does not round between two operations that it fuses,
        and a number that eager rounds to a limit may then lie beside it."""
        model = self.comparison.model_copy().float()
        mode = Fp8Products(model, self.statuses, Scales(None, self.comparison.case.setting.recipe == "delayed"))

        def call(*inputs: Tensor) -> Any:
            mode.next_step()
            with mode:
                return model(*(t.float() if t.is_floating_point() else t for t in inputs))

        try:
            with inline_checkpoints():
                return [self.comparison.runs(model, call)]
        except RuntimeError:  # a dtype that the program names meets fp32
            return []

    def runs(self, number: int) -> list[Run]:
        dice = random.Random(number) if number else None
        model = self.comparison.model_copy()
        generator = torch.Generator().manual_seed(number)
        if number:
            _move([*model.parameters()], generator)
        scales = Scales(dice, delayed=self.comparison.case.setting.recipe == "delayed")
        mode = Fp8Products(model, self.statuses, scales)

        def call(*inputs: Tensor) -> Any:
            if number:
                _move(inputs, generator)
            mode.next_step()
            with mode:
                return model(*inputs)

        with inline_checkpoints():
            runs = self.comparison.runs(model, call)
        self.unreported |= mode.unreported
        self.epsilon = max(self.epsilon, mode.epsilon)
        return runs
