"""What Triton 3.6, which PyTorch 2.11 brings, cannot read in a kernel, though later ones and the interpreter can."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "te_compile" / "kernels"


def nested_targets(source: str) -> list[str]:
    """Assignments in kernels that take tuples of tuples apart, which Triton 3.6 fails on with an unhashable list."""
    kernels = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list)
    ]
    return [
        ast.unparse(node)
        for kernel in kernels
        for node in ast.walk(kernel)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Tuple) and any(isinstance(each, ast.Tuple) for each in target.elts)
    ]


@pytest.mark.parametrize("file", sorted(KERNELS.glob("*.py")), ids=lambda file: file.stem)
def test_no_kernel_takes_tuples_of_tuples_apart(file: Path) -> None:
    assert nested_targets(file.read_text(encoding="utf-8")) == []


def test_tuples_of_tuples_are_found() -> None:
    kernel = "@triton.jit\ndef kernel(x):\n    (a, b), c = x\n    d, e = a\n"
    assert nested_targets(kernel) == ["(a, b), c = x"] or nested_targets(kernel) == ["((a, b), c) = x"]
    assert nested_targets(kernel.replace("@triton.jit\n", "")) == []
