"""What a real compilation tells: log lines, and the graphs in ``TE_COMPILE_DEBUG``."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from te_compile.backend import te_fp8
from te_compile.compilers import joint_passes
from te_compile.options import Options


class Small(nn.Module):
    """A norm and two linears, the second too narrow for FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.narrow = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.relu(self.up(self.norm(x))))


def compile_and_train() -> None:
    fast = torch.compile(Small(), backend=te_fp8, options={"compiler": "aot_eager"})
    fast(torch.randn(16, 16)).sum().backward()


def test_each_graph_is_summed_up_in_one_line(fresh_dynamo: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="te_compile"):
        compile_and_train()
    (line,) = [record.getMessage() for record in caplog.records if "linears in FP8" in record.getMessage()]
    assert re.fullmatch(r"graph \d+: 1 of 2 linears in FP8 \(100% of eligible FLOPs\); kept: narrow: .*16.*", line)


def test_every_pass_of_a_run_is_dumped(fresh_dynamo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_COMPILE_DEBUG", str(tmp_path))
    compile_and_train()
    (directory,) = tmp_path.iterdir()
    texts = {file.name: file.read_text() for file in directory.iterdir()}
    order = [name.removesuffix(".txt").split("_", 1)[1] for name in sorted(texts)]
    joint = [each.__name__ for each in joint_passes(Options())]
    assert order[0] == "captured" and order[-len(joint) :] == joint
    assert "float32[16, 16]" in texts["00_captured.txt"]
    (decided,) = [text for name, text in texts.items() if name.endswith("select_linears.txt")]
    assert "# up  linear 16×16→32  fp8" in decided and "# narrow  linear 16×32→5  kept  " in decided
    assert "te.norm_quantize" in texts[max(texts)]


def test_a_place_that_takes_no_dumps_is_named_with_its_variable(
    fresh_dynamo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TE_COMPILE_DEBUG", str(tmp_path / "file"))
    with pytest.raises(Exception, match=r"TE_COMPILE_DEBUG='.*file': graphs cannot be written there"):
        compile_and_train()


def test_a_graph_in_which_nothing_is_eligible_claims_no_share(
    fresh_dynamo: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="te_compile"):
        torch.compile(Small(), backend=te_fp8, options={"compiler": "aot_eager", "exclude": "*"})(torch.randn(16, 16))
    (line,) = [record.getMessage() for record in caplog.records if "linears in FP8" in record.getMessage()]
    assert "0 of 2 linears in FP8 (none is eligible); kept: up, narrow: exclude pattern '*'; " in line


PROGRAM = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
torch.compile(model, backend="te_fp8", options={"compiler": "aot_eager"})(torch.randn(16, 16)).sum().backward()
"""


def is_installed() -> bool:
    return any(each.name == "te_fp8" for each in importlib.metadata.entry_points(group="torch_dynamo_backends"))


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {name: value for name, value in os.environ.items() if not name.startswith(("TE_COMPILE", "TORCH_LOGS"))}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**given, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.skipif(not is_installed(), reason="te_compile is not installed, so torch cannot find its entry point")
@pytest.mark.parametrize(
    ("setting", "debug", "info"), [("+te_compile", True, True), ("te_compile", False, True), ("", False, False)]
)
def test_torch_logs_turns_the_log_on(setting: str, debug: bool, info: bool) -> None:
    finished = run(PROGRAM, **({"TORCH_LOGS": setting} if setting else {}))
    assert finished.returncode == 0, finished.stderr
    assert ("lower_linears: 2 in" in finished.stderr) == debug
    assert ("2 of 2 linears in FP8" in finished.stderr) == info


def test_importing_the_package_loads_nothing_and_knows_everything() -> None:
    program = (
        "import sys, te_compile; before = 'torch' in sys.modules; names = te_compile.__all__;"
        "assert not before; [getattr(te_compile, name) for name in names];"
        "assert {*names, '__version__'} <= set(dir(te_compile)) and te_compile.__version__"
    )
    finished = run(program)
    assert finished.returncode == 0, finished.stderr
