"""Inductor's and AOTAutograd's caches: on for us in a second process, and never one formula old.

Each step is a process of its own, tests/programs/cached_step.py, over one cache directory.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from te_compile import compilers
from te_compile.compilers import JointPasses, source_fingerprint
from te_compile.kernels import native
from te_compile.ops import registry
from te_compile.options import Options
from te_compile.passes import manager
from te_compile.passes.plan import Plan

CHECKOUT = Path(__file__).parent.parent


@dataclass
class Step:
    """What one process saw."""

    hits: int
    misses: int
    bypassed: int
    gradient: Tensor


class Cache:
    """A cache directory and one set of random data, with which processes run one after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.seed = directory, random.randrange(2**31)

    def step(self, change: str = "nothing", **options: Any) -> Step:
        """Run one process."""
        arguments = [str(self.directory), str(self.seed), json.dumps(options), change]
        command = [sys.executable, "-m", "tests.programs.cached_step", *arguments]
        result = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=800)
        assert result.returncode == 0, result.stderr
        told = json.loads(result.stdout.splitlines()[-1])
        hits, misses = told["fx hits"] + told["autograd hits"], told["fx misses"] + told["autograd misses"]
        return Step(hits, misses, told["bypassed"], torch.tensor(told["gradient"]))


@pytest.mark.slow
def test_a_second_process_finds_everything_and_a_changed_formula_or_recipe_finds_nothing(tmp_path: Path) -> None:
    """One test, because each process takes seconds and the first ones serve all the others."""
    cache = Cache(tmp_path)
    first = cache.step()
    assert first.bypassed == 0 and first.hits == 0 and first.misses > 0

    second = cache.step()
    assert second.bypassed == 0 and second.misses == 0 and second.hits > 0
    assert torch.equal(second.gradient, first.gradient)

    changed = cache.step("formula")
    assert changed.hits == 0 and changed.misses > 0
    torch.testing.assert_close(changed.gradient, 2 * first.gradient)

    for options in ({"recipe": "current"}, {"recipe": {"name": "delayed", "margin": 1}}):
        other = cache.step(**options)
        assert other.hits == 0 and other.misses > 0, options


@pytest.mark.slow
def test_without_the_fingerprint_the_cache_would_serve_the_old_gradient(tmp_path: Path) -> None:
    """The trap itself, so that the test above is known to test something."""
    cache = Cache(tmp_path)
    first = cache.step()
    stale = cache.step("formula in secret")
    assert stale.misses == 0 and torch.equal(stale.gradient, first.gradient)


# --- the key -------------------------------------------------------------------------------------------------------


def key_of(**options: Any) -> str:
    """The part of the cache key that is ours."""
    chosen = Options.resolve({"compiler": "aot_eager", **options})
    return JointPasses(manager.begin(Plan(), chosen.recipe.key(), chosen.key()), chosen).uuid()


def test_equal_options_have_equal_keys() -> None:
    assert key_of(recipe="current", exclude="*head") == key_of(recipe="current", exclude=["*head"])


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "current"},
        {"recipe": {"name": "delayed", "margin": 1}},
        {"recipe": {"name": "delayed", "amax_history_len": 16}},
        {"exclude": "*head"},
        {"lm_head": True},
    ],
)
def test_options_that_change_the_graph_change_the_key(options: dict[str, Any]) -> None:
    assert key_of(**options) != key_of()


def test_the_key_changes_with_what_there_is_to_choose_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached graph names the implementation of every node; one that is gone must not be called."""
    keys = [key_of()]
    monkeypatch.setattr(native, "missing", lambda cuda=False: "the C++ core went away")
    keys.append(key_of())
    monkeypatch.setitem(registry._TABLE, ("gemm", "new"), registry.Implementation("gemm", "new", print, 5, print))
    keys.append(key_of())
    assert len(set(keys)) == 3


def test_the_key_changes_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of()
    monkeypatch.setattr(compilers, "__version__", "another")
    assert key_of() != before


def test_the_key_changes_with_any_source_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Editing, adding and renaming a file of the package each give another fingerprint."""
    package = tmp_path / "package"
    (package / "ops").mkdir(parents=True)
    (package / "compilers.py").write_text("a = 1\n")
    (package / "ops" / "linear.py").write_text("b = 1\n")
    monkeypatch.setattr(compilers, "__file__", str(package / "compilers.py"))

    def fingerprint() -> str:
        source_fingerprint.cache_clear()
        return source_fingerprint()

    seen = [fingerprint()]
    (package / "ops" / "linear.py").write_text("b = 2\n")
    seen.append(fingerprint())
    (package / "ops" / "gemm.py").write_text("")
    seen.append(fingerprint())
    (package / "ops" / "gemm.py").rename(package / "ops" / "product.py")
    seen.append(fingerprint())
    source_fingerprint.cache_clear()
    assert len(set(seen)) == 4, "one of an edit, a new file and a new name went unnoticed"


def test_the_joint_passes_are_what_torch_caches_by() -> None:
    compilation = manager.begin(Plan(), "delayed", "")
    passes = JointPasses(compilation, Options())
    assert isinstance(passes, CustomGraphPass)
    graph = Graph()
    graph.output(())
    passes(graph)
    assert compilation.joint is graph
