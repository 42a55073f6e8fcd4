"""Run one architecture in one setting with and without te_fp8, and write down what differs."""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from te_compile.passes import manager
from te_compile.passes.plan import Cause, Site
from tests.compiling import compiled, cosine, gradients, know_the_backend
from tests.fuzz.emulation import Fp8Products, Scales, statuses_of
from tests.zoo.case import Architecture, Case, NotSupportedError, Place, Setting, loss_of
from tests.zoo.models import ARCHITECTURES

LOSS_TOLERANCE = 0.02
LEAST_LOSS = 1e-4  # of logits of some hundreds, whose sums in fp32 are no more exact than a hundredth of it
LEAST_COSINE = 0.97
SIZE_TOLERANCE = 0.1  # of a gradient's norm
CLOSE = 0.01  # two runs in FP8 differ by so much where a last bit moved numbers to the next code
LEAST_SHARE = 0.98
NEGLIGIBLE = 0.01  # of the largest gradient's norm: what is below carries no direction worth comparing
EMULATIONS = 5

SETTINGS = [
    Setting(train, attention, checkpointed)
    for attention in ("sdpa", "eager")
    for train, checkpointed in ((True, False), (True, True), (False, False))
]


@dataclass
class Finding:
    """``outcome``: "ok", "wrong" (see ``complaints``), or "not run" for what fails without te_fp8 too (``detail``).

    ``cosine`` is the least of a matrix's gradient with that of high precision (in inference: of the output), and
    ``textbook`` the least that textbook FP8 reaches there, where it was asked. ``loss_error`` is that of the mean
    square where the call has no labels; ``labelled_loss_error`` is that of the model's own loss in inference, where it
    has one. ``kept`` counts linears by reason. ``rewrites`` counts what each pass changed.
    """

    architecture: str
    kind: str
    setting: str
    outcome: str = "ok"
    detail: str = ""
    complaints: list[str] = field(default_factory=list)
    loss_error: float = 0.0
    labelled_loss_error: float | None = None
    cosine: float = 1.0
    textbook: float | None = None
    linears: int = 0
    in_fp8: int = 0
    share: float = 1.0
    kept: dict[str, int] = field(default_factory=dict)
    rewrites: dict[str, int] = field(default_factory=dict)
    graphs: int = 0
    seconds: float = 0.0

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass
class Step:
    """What one call gave. The gradients are empty in inference."""

    output: Any
    loss: Tensor
    gradients: dict[str, Tensor]


def step(case: Case, run: Callable[..., Any], train: bool, seed: int) -> Step:
    """One call, with its backward pass in training; dropout draws from ``seed``."""
    case.model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with torch.set_grad_enabled(train):
        output = run(**case.inputs)
        loss = loss_of(output)
    if train:
        loss.backward()
    return Step(output, loss.detach().float(), gradients(case.model))


def first_tensor(output: Any) -> Tensor:
    """The output, or its first member."""
    return output if isinstance(output, Tensor) else output[0]


def fp8_share(sites: list[Site]) -> float:
    """Of the FLOPs of all eligible linears, the part that runs in FP8."""
    eligible = sum(site.flops for site in sites if site.cause in (None, Cause.UNSUPPORTED))
    return sum(site.flops for site in sites if site.status == "fp8") / eligible if eligible else 1.0


def compared(expected: dict[str, Tensor]) -> list[str]:
    """The matrix parameters whose gradient is not negligible."""
    largest = max((float(gradient.norm()) for gradient in expected.values()), default=0.0)
    return [name for name, g in expected.items() if g.dim() >= 2 and float(g.norm()) > NEGLIGIBLE * largest]


class _Examination:
    """One model, one setting."""

    def __init__(self, architecture: Architecture, setting: Setting, recipe: str, place: Place) -> None:
        self.setting, self.recipe, self.place, self.seed = setting, recipe, place, random.randrange(2**31)
        self.found = Finding(architecture.name, architecture.kind, str(setting))
        case = architecture.case(setting)
        labelled = None if setting.train else architecture.with_labels(case, setting)
        self.case = case.at(place)
        self.labelled = None if labelled is None else labelled.at(place)
        self.statuses: dict[str, list[bool]] = {}
        self.known: set[str] | None = None

    def run(self) -> Finding:
        expected = self._step(self.case.model)
        before, values = self._names_and_parameters(), _values(self.case.model)
        torch._dynamo.reset()
        with manager.recording() as records:
            try:
                fast = compiled(self.case.model, recipe=self.recipe, **self.place.options)
                # The second step of delayed scaling runs with the scales that the first one left.
                steps = [self._step(fast) for _ in range(2)]
            except Exception as error:
                if self._without_us() is None:
                    return self._not_run(f"torch.compile fails too: {_first_line(error)}")
                return self._wrong(f"fails: {_first_line(error)}")
        sites = [site for record in records for site in record.plan.sites]
        self.statuses = statuses_of(sites, self.case.model)
        self._describe(sites, records)
        for got in steps:
            self._compare(expected, got)
        if self.labelled is not None:
            self._evaluate(self.labelled, fast)
        if self._names_and_parameters() != before:
            self._wrong("the model has other parameters, or its state_dict other names")
        elif changed := [name for name, value in _values(self.case.model).items() if not _same(value, values[name])]:
            self._wrong(f"parameters have other values, and nobody took a step: {changed}")
        return self.found

    def _names_and_parameters(self) -> tuple[list[str], dict[str, int]]:
        model = self.case.model
        return list(model.state_dict()), {name: id(parameter) for name, parameter in model.named_parameters()}

    def _step(self, run: Callable[..., Any], case: Case | None = None) -> Step:
        return step(case or self.case, run, self.setting.train, self.seed)

    def _wrong(self, complaint: str) -> Finding:
        self.found.outcome = "wrong"
        self.found.complaints.append(complaint)
        return self.found

    def _not_run(self, why: str) -> Finding:
        self.found.outcome, self.found.detail = "not run", why
        return self.found

    def _without_us(self) -> Step | None:
        """The second step under torch.compile without te_fp8; None where that fails."""
        torch._dynamo.reset()
        plain = torch.compile(self.case.model, backend=self.place.options["compiler"])
        try:
            self._step(plain)
            return self._step(plain)
        except Exception:
            return None

    def _describe(self, sites: list[Site], records: list[manager.Compilation]) -> None:
        found = self.found
        found.graphs, found.linears = len(records), len(sites)
        found.in_fp8, found.share = sum(site.status == "fp8" for site in sites), fp8_share(sites)
        found.kept = dict(Counter(site.reason for site in sites if site.status == "kept"))
        counts: Counter[str] = Counter()
        for record in records:
            counts.update({each.name: each.count for each in record.passes})
        found.rewrites = {name: count for name, count in counts.items() if count}
        if found.share < LEAST_SHARE:
            lacking = {site.reason for site in sites if site.cause is Cause.UNSUPPORTED}
            self._wrong(f"{found.share:.1%} of eligible FLOPs in FP8: {sorted(lacking)}")
        if any(not site.reason for site in sites if site.status == "kept"):
            self._wrong("a linear is kept without a reason")

    def _compare(self, expected: Step, got: Step) -> None:
        found = self.found
        error = _loss_error(got, expected)
        found.loss_error = max(found.loss_error, error)
        kinds = [(type(each), list(getattr(each, "keys", list)())) for each in (got.output, expected.output)]
        if kinds[0] != kinds[1]:
            self._wrong(f"the output is a {kinds[0]}, not a {kinds[1]}")
        if lost := _not_finite(got) - _not_finite(expected):  # which no comparison below would see
            self._wrong(f"not finite, other than in high precision: {sorted(lost)}")
            return
        other = got.gradients.keys() ^ expected.gradients.keys()
        # Behind a graph break torch.compile gives zeros to what eager mode gives nothing.
        if other and ((plain := self._without_us()) is None or got.gradients.keys() != plain.gradients.keys()):
            self._wrong(f"other parameters have gradients: {sorted(other)}")
            return
        reached, sizes = self._cosines(expected, got), self._sizes(expected, got)
        if self.place.dtype != torch.float32 and (_low(reached) or _odd(sizes)):
            known = self._known_in_16_bits(expected)
            reached, sizes = ({name: each[name] for name in each if name in known} for each in (reached, sizes))
        found.cosine = min([found.cosine, *reached.values()])
        low, odd = _low(reached), _odd(sizes)
        if low or odd or error > LOSS_TOLERANCE:
            self._ask_the_textbook(expected, got, error, low, odd)

    def _known_in_16_bits(self, expected: Step) -> set[str]:
        """What eager mode gives in 16 bits as in fp32. The rest is rounding: the mean square of what a layer norm gives
        has no gradient, and in 16 bits one of random direction."""
        if self.known is None:
            wide = Case(deepcopy(self.case.model), self.case.inputs).at(Place(self.place.device, torch.float32))
            exact = step(wide, wide.model, self.setting.train, self.seed)
            same, sizes = self._cosines(expected, exact), self._sizes(expected, exact)
            self.known = same.keys() - _low(same).keys() - _odd(sizes).keys()
        return self.known

    def _evaluate(self, case: Case, fast: Callable[..., Any]) -> None:
        """Compare the loss with labels, which the results of a call without them say little about."""
        expected = self._step(case.model, case)
        with manager.recording() as records:
            try:
                error = _loss_error(self._step(fast, case), expected)
            except Exception as failure:
                self._wrong(f"fails with labels: {_first_line(failure)}")
                return
        self.found.labelled_loss_error = error
        if error > LOSS_TOLERANCE:
            # What keeps its precision because it goes into the loss did not have to in the call without one.
            self.statuses = statuses_of([site for record in records for site in record.plan.sites], case.model)
            emulated = [self._emulated(number, case) for number in range(EMULATIONS)]
            self._judge_loss("loss with labels", error, [_loss_error(each, expected) for each in emulated])

    def _cosines(self, expected: Step, got: Step, names: Iterable[str] | None = None) -> dict[str, float]:
        """Of the result of inference, or of the gradients by ``names``, by default all that are worth comparing."""
        if not self.setting.train:
            return {"output": cosine(first_tensor(got.output), first_tensor(expected.output))}
        names = compared(expected.gradients) if names is None else names
        return {name: cosine(got.gradients[name], expected.gradients[name]) for name in names}

    def _sizes(self, expected: Step, got: Step) -> dict[str, float]:
        """How long each matrix's gradient is beside that of high precision; a cosine does not tell."""
        names = compared(expected.gradients)
        return {name: float(got.gradients[name].norm() / expected.gradients[name].norm()) for name in names}

    def _ask_the_textbook(
        self, expected: Step, got: Step, error: float, low: dict[str, float], odd: dict[str, float]
    ) -> None:
        """Where FP8 itself falls short of the bounds, it sets them: emulations that each round on another grid."""
        emulated = [self._emulated(number) for number in range(EMULATIONS)]
        reached = [self._cosines(expected, textbook) for textbook in emulated]
        same_grid = self._cosines(emulated[0], got, low)
        self.found.textbook = min([self.found.textbook or 1.0, *(each[name] for each in reached for name in low)])
        for name, ours in low.items():
            theirs = [each[name] for each in reached]
            spread = max(theirs) - min(theirs)
            if ours < min(theirs) - max(CLOSE, spread) and same_grid[name] < 1 - CLOSE:
                self._wrong(f"cosine of {name}: {ours:.4f}, textbook FP8 {min(theirs):.4f} to {max(theirs):.4f}")
        emulated_sizes = [self._sizes(expected, textbook) for textbook in emulated]
        for name, ours in odd.items():
            theirs = [each[name] for each in emulated_sizes]
            if not min(theirs) - SIZE_TOLERANCE <= ours <= max(theirs) + SIZE_TOLERANCE:
                self._wrong(f"size of {name}: {ours:.3f}, textbook FP8 {min(theirs):.3f} to {max(theirs):.3f}")
        self._judge_loss("loss", error, [_loss_error(each, expected) for each in emulated])

    def _judge_loss(self, what: str, error: float, textbook: list[float]) -> None:
        if error > max(LOSS_TOLERANCE, max(textbook) + (max(textbook) - min(textbook))):
            self._wrong(f"{what} off by {error:.2%}, textbook FP8 {max(textbook):.2%}")

    def _emulated(self, number: int, case: Case | None = None) -> Step:
        """A step in textbook FP8; number 0 rounds on the grid that just fits, as te_fp8 does."""
        if self.setting.checkpointed:  # what is recomputed would be without the emulation
            self.case.model.gradient_checkpointing_disable()
        scales = Scales(random.Random(number) if number else None, delayed=False)
        mode = Fp8Products(self.case.model, self.statuses, scales)

        def run(**inputs: Any) -> Any:
            with mode:
                return self.case.model(**inputs)

        return self._step(run, case)


def _values(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _not_finite(step: Step) -> set[str]:
    """The gradients, and the loss, that hold a number that is none."""
    values = {**step.gradients, "the loss": step.loss}
    return {name for name, value in values.items() if not bool(value.isfinite().all())}


def _low(cosines: dict[str, float]) -> dict[str, float]:
    return {name: each for name, each in cosines.items() if each < LEAST_COSINE}


def _odd(sizes: dict[str, float]) -> dict[str, float]:
    return {name: each for name, each in sizes.items() if abs(each - 1) > SIZE_TOLERANCE}


def _loss_error(got: Step, expected: Step) -> float:
    return abs(float(got.loss - expected.loss)) / max(abs(float(expected.loss)), LEAST_LOSS)


def _first_line(error: Exception) -> str:
    """The kind of error and the first line that says something: torch.compile puts a line about the backend before."""
    text = str(error).strip()
    if isinstance(error, BackendCompilerFailed):
        text = text.partition("\n")[2]
    return f"{type(error).__name__}: {text.splitlines()[0][:200] if text else ''}"


def examine(
    architecture: Architecture, setting: Setting, recipe: str = "delayed", place: Place | None = None
) -> Finding:
    """The finding for one setting, on a CPU unless said otherwise; every failure becomes a part of it."""
    know_the_backend()
    start = time.perf_counter()
    nothing = Finding(architecture.name, architecture.kind, str(setting), "not run")
    try:
        examination = _Examination(architecture, setting, recipe, place or Place())
        examination._step(examination.case.model)
    except NotSupportedError as why:
        nothing.detail = str(why)
        return nothing
    except Exception as error:
        nothing.detail = f"eager mode fails: {_first_line(error)}"
        return nothing
    finding = examination.run()
    finding.seconds = time.perf_counter() - start
    return finding


def examine_alone(cell: tuple[str, Setting, str, Place]) -> Finding:
    """``examine`` an architecture by its name, with random data of its own, in a process that does nothing else."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    random.seed()
    torch.seed()
    name, setting, recipe, place = cell
    return examine(ARCHITECTURES[name], setting, recipe, place)
