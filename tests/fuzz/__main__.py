"""``python -m tests.fuzz --cases 2000``: random programs, as many as the night is long.

``--seed S`` runs programs S, S + 1, …; a failure names its own, so ``--seed S --cases 1`` runs that one again.
``--device cuda`` runs them on a GPU, half of them with more numbers than fit into one tile of a kernel.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import warnings

os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
if not any(each.endswith("cuda") for each in sys.argv):  # before anything imports Triton, which reads it then
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from tests.compiling import know_the_backend
from tests.fuzz.campaign import Campaign, progress_line


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="how many programs")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="of the first program")
    parser.add_argument("--inductor", type=float, default=0.02, help="the share that Inductor compiles, slowly")
    parser.add_argument("--shrink", type=int, default=10, help="how many failures to make small")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    know_the_backend()
    print(f"seed {given.seed}", flush=True)
    campaign = Campaign(given.inductor, given.device)
    campaign.run(range(given.seed, given.seed + given.cases), progress_line(given.cases))
    print(campaign.summary())
    print(campaign.failures_text(given.shrink))
    return 1 if campaign.found else 0


if __name__ == "__main__":
    sys.exit(main())
