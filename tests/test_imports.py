"""Imports point one way, as CONTRIBUTING.md says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import te_compile

ROOT = Path(te_compile.__file__).parent
ABOVE = {  # what each room must not know
    "passes": {"backend", "runtime", "inspect"},
    "ops": {"passes", "backend", "runtime", "inspect"},
    "kernels": {"passes", "backend", "runtime", "inspect"},
}
WITHOUT_TRITON = {"recording", "tiles"}  # of the kernels: what ops may know before they are asked to run one


def imports(path: Path, anywhere: bool = True) -> Iterator[list[str]]:
    """The parts behind ``te_compile`` of each module of ours that a file imports, or one at its top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if anywhere else tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "te_compile":
            yield from ([*node.module.split(".")[1:], each.name] for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name.split(".")[1:] for each in node.names if each.name.startswith("te_compile."))


def test_the_files_are_found() -> None:
    assert ["ops", "registry"] in list(imports(ROOT / "passes" / "choose_implementations.py"))


@pytest.mark.parametrize("room", ABOVE)
def test_no_room_knows_those_above(room: str) -> None:
    files = list((ROOT / room).glob("*.py"))
    wrong = [(path.name, each) for path in files for each in imports(path) if each and each[0] in ABOVE[room]]
    assert len(files) > 20 and not wrong


def test_only_the_face_of_the_package_knows_the_reports() -> None:
    others = [path for path in ROOT.rglob("*.py") if path.parent.name != "inspect"]
    knows = {path.name for path in others for each in imports(path) if each[:1] == ["inspect"]}
    assert knows <= {"__init__.py", "__main__.py"}


def test_operators_know_kernels_when_they_run_them() -> None:
    early = (each for path in (ROOT / "ops").glob("*.py") for each in imports(path, anywhere=False))
    assert {each[1] for each in early if each[:1] == ["kernels"]} <= WITHOUT_TRITON


def test_a_recipe_knows_nothing_of_what_is_made_of_it() -> None:
    assert [each[0] for each in imports(ROOT / "recipe.py")] == ["function_keys"]
    assert not list(imports(ROOT / "function_keys.py"))
