"""What every test gets: fresh data under a seed that a failure shows, a fresh Dynamo, one thread, the backend's name,
and no compiled graph from an earlier run.

Random data is drawn anew on each run, so that tests are about the sentence in their name and not about one lucky
tensor. A failure prints its seed; ``TEST_SEED=<seed>`` runs it again.
"""

from __future__ import annotations

import datetime
import gc
import os
import random
import zlib
from collections.abc import Iterator

# Before torch reads them. A result that an earlier run left in the caches would stand in for the passes under test;
# tests/test_cache.py turns them on for directories of its own.
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

import torch

if not torch.cuda.is_available():
    # Before anything imports Triton: without a GPU its kernels run in the interpreter (tests/kernels).
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

SEED_VARIABLE = "TEST_SEED"
SLOW_PARTS = 4
PART_VARIABLE = "TEST_SLOW_PART"  # how the test processes of one run agree on the part, also past midnight


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow",
        choices=("all", "part", "none"),
        default="all",
        help=f"which tests marked slow to run; part: one in {SLOW_PARTS}, others each day ({PART_VARIABLE} chooses)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow tests that ``--slow`` does not want; the summary counts them as deselected."""
    wanted = config.getoption("--slow")
    if wanted == "all":
        return
    part = int(os.environ[PART_VARIABLE]) % SLOW_PARTS if wanted == "part" else None
    out = [
        item
        for item in items
        if item.get_closest_marker("slow") and zlib.crc32(item.nodeid.encode()) % SLOW_PARTS != part
    ]
    config.hook.pytest_deselected(items=out)
    left_out = set(out)
    items[:] = [item for item in items if item not in left_out]


def pytest_report_header(config: pytest.Config) -> str:
    """Say which slow tests run."""
    part = f", part {os.environ[PART_VARIABLE]}" if config.getoption("--slow") == "part" else ""
    return f"slow tests: {config.getoption('--slow')}{part}"


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(PART_VARIABLE, str(datetime.date.today().toordinal() % SLOW_PARTS))
    config.addinivalue_line("markers", "slow: takes more than some ten seconds on two cores")
    config.addinivalue_line("markers", "gpu: needs a CUDA device with FP8 tensor cores")
    torch.set_num_threads(1)
    # Structured traces of every compilation would bury what a failure has to say.
    config.option.log_level = config.option.log_level or "INFO"


@pytest.fixture(autouse=True)
def seed() -> int:
    """The seed of this test's random data; shown with the captured output where the test fails."""
    chosen = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(2**31))
    print(f"{SEED_VARIABLE}={chosen}")
    random.seed(chosen)
    torch.manual_seed(chosen)
    return chosen


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """No compiled code from before, none left behind, and the backend known by its name."""
    from tests.compiling import know_the_backend

    know_the_backend()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No state waits for its scales: those of other tests, which may have died without one, do not count here."""
    from te_compile import state
    from te_compile.ops import calibration

    gc.collect()
    monkeypatch.setattr(calibration, "_waiting", set())
    monkeypatch.setattr(state, "_waiting", {})
    monkeypatch.setattr(state, "_looks", {})
