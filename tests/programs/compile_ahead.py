"""Training steps on a pretended H200: what is compiled ahead, and what is then launched.

    python -m tests.programs.compile_ahead RECIPE JOBS

Run without Triton's interpreter. On the CPU the Triton implementations run as they would on a GPU, but for the launches
themselves, which are noted. JOBS kernels are compiled for the pretended GPU by Inductor's workers. Prints JSON:

    ahead         what rehearsals found for the first step and for later ones: forms of launches, as text
    launched      the forms that were new in each step; the last one has no copies of weights yet, but scales
    hashes        of all that is ahead: by which a worker keeps the kernel
    at launch     and by which Triton looks for it where it is launched
    answers       of JOBS of them, drawn anew: that hash, that of the worker, and what a launch is told to expect
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from triton.runtime import _async_compile
from triton.runtime.cache import get_cache_key

from te_compile import compilers, prepared_kernels, state, weight_cache
from te_compile.kernels import ahead, compile_worker, native, norm_backward
from te_compile.kernels import launch as launching
from te_compile.ops import calibration, registry
from tests.compiling import compiled, know_the_backend

CAPABILITY = (9, 0)
H200 = registry.Target("cuda", CAPABILITY)
STEPS = 3


class Block(nn.Module):
    """Norms, a gate, an activation with a bias: something for every kind of producer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(64), nn.LayerNorm(64)
        self.gate, self.up, self.down = nn.Linear(64, 96, False), nn.Linear(64, 96, False), nn.Linear(96, 64, False)
        self.wide, self.narrow = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        x = x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))


class Model(nn.Module):
    """Two blocks and the loss of a language model; it returns the logits, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.lm_head = nn.Linear(64, 1056, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lm_head(self.blocks(x))
        return nn.functional.cross_entropy(logits.float(), targets), logits


def pretend() -> None:
    """From now on this machine is one with an H200, as far as compiling goes."""
    registry.Target.of = staticmethod(lambda device: H200)  # type: ignore[method-assign]
    norm_backward._device_limits = lambda index: (132, 227 << 10)
    native.missing = lambda cuda=False: "nothing native runs on a pretended GPU"  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY  # type: ignore[assignment]
    pretended = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: compile_worker.target_of(CAPABILITY),
    )
    triton.runtime.driver.set_active(pretended)


def note_launches(seen: dict[Any, Any]) -> None:
    """From now on launches are not made, and each is noted the first time that it has its form."""

    def note(key: Any, kernel: Any, programs: Any, arguments: Any, constants: Any) -> Any:
        launch = ahead.rehearsed(kernel, arguments, constants)
        seen[launch.form] = launch
        found = launching._compiled[key] = SimpleNamespace(), (), kernel
        return found

    launching._compile, launching._run = note, lambda *_: None


def give_workers_another_ptxas() -> None:
    """Inductor's workers take the ptxas that PyTorch brings, where it brings one. Here it is one of another version,
    which compiles nothing."""
    with tempfile.NamedTemporaryFile("w", suffix="ptxas", delete=False) as file:
        file.write("#!/bin/sh\n[ $1 = --version ] && echo release 1.2, V1.2.3\n")
    Path(file.name).chmod(0o755)
    take = f"""
import os, time
from triton.backends.nvidia import compiler
os.environ["TRITON_PTXAS_PATH"] = os.environ["TRITON_PTXAS_BLACKWELL_PATH"] = {file.name!r}
compiler.get_ptxas_version.cache_clear()
assert "V1.2.3" in compiler.get_ptxas_version(90)
time.sleep(0.2)  # so that the other worker takes one of these jobs too
"""
    for job in [AsyncCompile.process_pool().submit(exec, take, {}) for _ in range(6)]:
        job.result(timeout=300)


def hash_of(launch: ahead.Launch) -> str:
    """The hash by which a worker would keep the kernel."""
    source, options = compile_worker.source_of(launch.kernel, launch.arguments, launch.constants, CAPABILITY)
    backend = triton.compiler.make_backend(compile_worker.target_of(CAPABILITY))
    variables = triton.compiler.compiler.get_cache_invalidating_env_vars()
    key = get_cache_key(source, backend, backend.parse_options(options), variables)
    return hashlib.sha256(key.encode()).hexdigest()


class Asked:
    """Stands where Triton compiles at a launch, and is told the key by which it looks for the kernel."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def submit(self, key: str, *_: Any) -> Any:
        self.keys.append(key)
        return SimpleNamespace()


def hash_at_launch(launch: ahead.Launch) -> str:
    """The hash by which ``kernel[grid](…)`` looks for what it launches, for tensors like those of the launch."""
    arguments = [
        torch.zeros(64, dtype=each.dtype)[0 if each.aligned else 1 :]
        if isinstance(each, compile_worker.Pointer)
        else each
        for each in launch.arguments
    ]
    asked = Asked()
    token = _async_compile.active_mode.set(asked)
    try:
        launch.kernel.warmup(*arguments, grid=(1,), **launch.constants)
    finally:
        _async_compile.active_mode.reset(token)
    return hashlib.sha256(asked.keys[0].encode()).hexdigest()


def main(recipe: str, jobs: int) -> None:
    """Take the steps and say what happened."""
    torch.set_num_threads(1)
    know_the_backend()
    pretend()
    expected: dict[bool, dict[Any, ahead.Launch]] = {True: {}, False: {}}

    class Noting(compilers.JointPasses):
        def __call__(self, graph: Any) -> None:
            super().__call__(graph)
            kernels = prepared_kernels.KernelsAhead(self.compilation, SimpleNamespace(recipe=chosen))
            for missing, forms in expected.items():
                forms.update({launch.form: launch for launch in kernels._launches(graph, missing)})

    from te_compile.options import Options

    chosen = Options.resolve({"recipe": recipe}, None).recipe
    compilers.JointPasses = Noting  # type: ignore[misc]
    model = Model().to(torch.bfloat16)
    run = compiled(model, recipe=recipe, cost_model=False)
    x, targets = torch.randn(128, 64, dtype=torch.bfloat16), torch.randint(0, 1056, (128,))
    launched: list[dict[Any, ahead.Launch]] = []
    for step in range(STEPS + 1):
        if step == STEPS:  # as in a training that goes on from a saved state: scales are there, and no copies
            weight_cache.forget_copies(model.parameters())
        launched.append({})
        note_launches(launched[-1])
        run(x, targets)[0].backward()
        for waiting in (calibration._waiting, state._waiting):
            waiting.clear()  # all scales are known, though no launch has written them
    both = {**expected[True], **expected[False]}
    hashes = {form: hash_of(launch) for form, launch in both.items()}
    if jobs:
        give_workers_another_ptxas()
    some = random.sample(list(both.items()), min(jobs, len(both)))
    answers = [(hashes[form], *ordered(launch)) for form, launch in some]
    print(
        json.dumps(
            {
                "ahead": [sorted(map(text, forms.values())) for forms in expected.values()],
                "launched": [sorted(map(text, forms.values())) for forms in launched],
                "hashes": list(hashes.values()),
                "at launch": [hash_at_launch(launch) for launch in both.values()],
                "answers": answers,
                "statistics": vars(ahead.statistics),
            }
        )
    )


def ordered(launch: ahead.Launch) -> tuple[str | None, str | None]:
    """What a launch finds that was ordered, the first time and the second."""
    ahead.compile_ahead([launch])
    future = ahead._orders.pop(launch.form)
    answer = future.result(timeout=300)
    ahead._orders[launch.form] = future
    arguments = [
        torch.zeros(64, dtype=each.dtype)[0 if each.aligned else 1 :]
        if isinstance(each, compile_worker.Pointer)
        else each
        for each in launch.arguments
    ]
    return answer.hash, ahead.awaited(launch.kernel, arguments, launch.constants)


def text(launch: ahead.Launch) -> str:
    """The form of a launch, to read."""
    return f"{launch.kernel.fn.__module__}.{launch.kernel.fn.__name__}{launch.form[2:]}"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
