"""What every test gets: fresh data under a seed that a failure shows, a fresh Dynamo, one thread, the backend's name,
and no compiled graph and no timed product from an earlier run.

Random data is drawn anew on each run, so that tests are about the sentence in their name and not about one lucky
tensor. A failure prints its seed; ``TEST_SEED=<seed>`` runs it again.
"""

from __future__ import annotations

import datetime
import gc
import math
import os
import random
import time
from collections.abc import Iterator

# Before torch reads them. A result that an earlier run left in the caches would stand in for the passes under test;
# tests/test_cache.py turns them on for directories of its own.
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
# Nor do tests fill the user's file with the shapes that they draw, or find timed what an earlier run drew.
os.environ["TE_COMPILE_GEMM_CACHE"] = "0"

import torch
import torch._functorch.config

if not torch.cuda.is_available():
    # Before anything imports Triton: without a GPU its kernels run in the interpreter (tests/kernels).
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

SEED_VARIABLE = "TEST_SEED"
ORDER_VARIABLE = "TEST_SLOW_ORDER"  # how the test processes of one run agree on the order, also past midnight
START_VARIABLE = "TEST_STARTED"  # and on when the run began: seconds since the epoch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-minutes",
        type=float,
        default=math.inf,
        help="skip a test marked slow that would start later than this after the run began; which ones come first "
        f"changes daily ({ORDER_VARIABLE} chooses)",
    )
    parser.addoption(
        "--minutes",
        type=float,
        default=math.inf,
        help="skip any test that would start later than this after the run began, where a run must end in time",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slow tests last, in the order of the day, so that a busy machine leaves out others each time."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    random.Random(os.environ[ORDER_VARIABLE]).shuffle(slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")] + slow


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start no slow test after its time, and none at all after the run's."""
    minutes = (time.time() - float(os.environ[START_VARIABLE])) / 60
    if item.get_closest_marker("slow") and minutes > item.config.getoption("--slow-minutes"):
        pytest.skip("slow, and the time for slow tests is used up (--slow-minutes)")
    if minutes > item.config.getoption("--minutes"):
        pytest.skip("the time for tests is used up (--minutes)")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(ORDER_VARIABLE, str(datetime.date.today().toordinal()))
    if not hasattr(config, "workerinput"):  # the first process; those that pytest-xdist starts get its environment
        os.environ[START_VARIABLE] = str(time.time())
    config.addinivalue_line("markers", "slow: takes more than some ten seconds on two cores")
    config.addinivalue_line("markers", "gpu: needs a CUDA device with FP8 tensor cores")
    torch.set_num_threads(1)
    # PyTorch only warns of an operator whose results share memory, unless it finds itself in a CI.
    torch._functorch.config.error_on_custom_op_aliasing = True
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
def one_rank() -> Iterator[DeviceMesh]:
    """A mesh of this process alone: parameters become DTensors on it as on any other."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.fixture
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No state waits for its scales: those of other tests, which may have died without one, do not count here."""
    from te_compile import state
    from te_compile.ops import calibration

    gc.collect()
    monkeypatch.setattr(calibration, "_waiting", set())
    monkeypatch.setattr(state, "_waiting", {})
    monkeypatch.setattr(state, "_looks", {})


@pytest.fixture
def norm_backward_kernel() -> Iterator[None]:
    """For a norm's backward something better than the reference, which is the reference: the CPU has none."""
    from te_compile.ops import norm_backward, registry

    registry.register("norm_backward", "fast", priority=1000)(norm_backward.norm_backward_reference)
    yield
    del registry._TABLE["norm_backward", "fast"]


@pytest.fixture
def loss_kernels() -> Iterator[None]:
    """For the operators of losses something better than the references, which are the references: the CPU has none."""
    from te_compile.ops import cross_entropy, registry

    references = {
        "cross_entropy_forward": cross_entropy.cross_entropy_forward_reference,
        "cross_entropy_backward": cross_entropy.cross_entropy_backward_reference,
        "cross_entropy_backward_deferred": cross_entropy.cross_entropy_backward_reference,
        "cross_entropy_backward_with_sums": cross_entropy.cross_entropy_backward_with_sums_reference,
        "cross_entropy_backward_deferred_with_sums": cross_entropy.cross_entropy_backward_with_sums_reference,
    }
    for name, reference in references.items():
        registry.register(name, "fast", priority=1000)(reference)
    yield
    for name in references:
        del registry._TABLE[name, "fast"]


@pytest.fixture
def mask_kernels() -> Iterator[None]:
    """For the mask of a dropout something better than the reference, which is the reference: the CPU has none."""
    from te_compile.ops import dropout_masks, registry

    registry.register("dropout_mask", "fast", priority=1000)(dropout_masks.dropout_mask_reference)
    yield
    del registry._TABLE["dropout_mask", "fast"]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every gradient that a product has added to, in order."""
    from te_compile import accumulated_gradients
    from te_compile.ops import gemm_into_grad

    found: list[torch.Tensor] = []

    def noted(gradient: torch.Tensor) -> None:
        found.append(gradient)
        accumulated_gradients.added_to(gradient)

    monkeypatch.setattr(gemm_into_grad, "added_to", noted)
    return found
