"""From a failing program to a small one that fails in the same way.

Greedy: simpler programs are tried, the boldest cut first, and the first that still fails is taken. A step goes by
putting something in the place of its results, an earlier variable of the same shape or a new input of the call; what
it alone needed goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tests.fuzz.check import Case, Failure, NotOurs, check
from tests.fuzz.program import Input, Program, Setting, Step

MOST_CHECKS = 250


def failure_of(program: Program) -> Failure | None:
    """How the program fails, None if it does not or cannot run; it is known already that Inductor does not."""
    try:
        check(Case.of(program), theirs=("aot_eager",))
    except Failure as failure:
        return failure
    except NotOurs:
        return None
    return None


def shrink(program: Program, fails: Callable[[Program], bool], most_checks: int = MOST_CHECKS) -> Program:
    """The smallest program that was found for which ``fails`` still holds."""
    left = most_checks
    smaller: Program | None = program
    while smaller is not None:
        program, smaller = smaller, None
        for candidate in _simpler(program):
            left -= 1
            if left < 0:
                return program
            if fails(candidate):
                smaller = candidate
                break
    return program


def fails_alike(failure: Failure) -> Callable[[Program], bool]:
    """Does a program fail in the same way?"""

    def fails(program: Program) -> bool:
        other = failure_of(program)
        return other is not None and other.kind == failure.kind

    return fails


def _simpler(program: Program) -> Iterator[Program]:
    for output in program.outputs if len(program.outputs) > 1 else ():
        yield replace(program, outputs=(output,)).without_dead_steps()
    yield from _without_steps(program)
    for number, _ in program.blocks:
        steps = tuple(replace(s, block=0) if s.block == number else s for s in program.steps)
        if steps != program.steps:
            yield replace(program, steps=steps)
    for name, default in vars(Setting()).items():
        if getattr(program.setting, name) != default:
            yield replace(program, setting=replace(program.setting, **{name: default}))
    for each in program.inputs:
        if each.requires_grad:
            inputs = tuple(replace(i, requires_grad=i.requires_grad and i != each) for i in program.inputs)
            yield replace(program, inputs=inputs)


def _without_steps(program: Program) -> Iterator[Program]:
    values = _values(program)
    for step in reversed(program.steps) if values else ():
        rest = replace(program, steps=tuple(s for s in program.steps if s is not step))
        for stand_in in _stand_ins(step, values, program):
            cut = rest
            for old, new in stand_in.items():
                if isinstance(new, Input):
                    cut = replace(cut, inputs=(*cut.inputs, new))
                    new = new.name
                cut = cut.renamed(old, new)
            cut = cut.without_dead_steps()
            if cut.steps and len(cut.steps) < len(program.steps) and set(cut.outputs) & _made(cut):
                yield cut


def _stand_ins(step: Step, values: dict[str, Tensor], program: Program) -> Iterator[dict[str, str | Input]]:
    """For the results of ``step``: earlier variables, or new inputs."""
    first = step.makes[0]
    if first in program.outputs and step.reads and values[step.reads[0]].is_floating_point():
        yield dict.fromkeys(step.makes, step.reads[0])
    names = [*[each.name for each in program.inputs], *step.reads]
    alike = [n for n in names if values[n].shape == values[first].shape and values[n].dtype == values[first].dtype]
    if len(step.makes) == 1:
        for name in dict.fromkeys(alike):
            yield {first: name}
    if all(values[name].is_floating_point() for name in step.makes):
        yield {n: Input(f"x_{n}", tuple(values[n].shape), values[n].dtype, values[n].requires_grad) for n in step.makes}


def _made(program: Program) -> set[str]:
    return {name for step in program.steps for name in step.makes}


def _values(program: Program) -> dict[str, Tensor]:
    """What each variable holds in eager PyTorch; nothing if it does not run."""
    names = tuple(dict.fromkeys(name for step in program.steps for name in step.makes))
    program = replace(program, setting=replace(program.setting, device="cpu"))
    model = replace(program, outputs=names).build().train(not program.setting.evaluate)
    inputs = program.draw_inputs()
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=program.setting.autocast):
            results = model(*inputs)
    except Exception:
        return {}
    results = results if isinstance(results, tuple) else (results,)
    given = {each.name: value for each, value in zip(program.inputs, inputs, strict=True)}
    return {**given, **dict(zip(names, results, strict=True))}
