"""Products without the names of their linears: who finds them still, and that equal layers are compiled once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_compile.ops.gemm import GEMM
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of
from te_compile.passes.set_names_aside import label_of, set_names_aside
from tests.capturing import traced
from tests.compiling import compiled, gemm_labels, products, train_step

ROOT = Path(__file__).parents[2]


def product(a: Tensor, b: Tensor, one: Tensor) -> Any:
    return GEMM(a, b, one, one, None, torch.bfloat16, "fast", "blocks.0.fc1 forward").sin()


def test_the_name_goes_to_the_metadata_and_what_is_computed_stays() -> None:
    codes = torch.randn(16, 32).to(torch.float8_e4m3fn)
    graph = traced(product, codes, codes, torch.ones(())).graph
    assert set_names_aside(graph) == 1
    (gemm,) = graph.find_nodes(op="call_function", target=GEMM)
    assert arguments_of(gemm)["label"] == "forward" and label_of(gemm) == "blocks.0.fc1 forward"
    assert set_names_aside(graph) == 1 and label_of(gemm) == "blocks.0.fc1 forward"


def test_a_graph_without_products_is_left_alone() -> None:
    graph = traced(lambda x: x.sin().cos(), torch.randn(3)).graph
    assert set_names_aside(graph) == 0 and not any(map(label_of, graph.nodes))


@pytest.mark.usefixtures("fresh_dynamo")
def test_reports_find_the_names_in_a_finished_graph() -> None:
    net = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    with manager.recording() as records:
        train_step(net, compiled(net), torch.randn(8, 32, requires_grad=True))
    assert {arguments_of(node)["label"] for node in products(records[0])} == {"forward", "dgrad", "wgrad"}
    expected = {f"{i} {product}" for i in (0, 2) for product in ("forward", "dgrad", "wgrad")}
    assert gemm_labels(records[0]) == dict.fromkeys(expected, 1)


@pytest.mark.slow
def test_equal_layers_of_a_graph_that_is_cut_are_compiled_once(tmp_path: Path, seed: int) -> None:
    """Each forward and each backward of three layers, of which two are found."""
    command = [sys.executable, "-m", "tests.programs.equal_layers", str(tmp_path), str(seed)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stderr[-2000:]
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["graphs"] == 3 and (told["hits"], told["misses"]) == (4, 2)
    assert told["names"] == sorted(f"{i}.{name}" for i in range(3) for name in ("up", "down"))
    assert told["error"] < 0.1
