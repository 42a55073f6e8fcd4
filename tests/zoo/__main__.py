"""Examine the whole zoo and write its table.

    python -m tests.zoo [ARCHITECTURE ...] [--jobs 2] [--recipe delayed] [--out docs/zoo.md] [--rows runs/zoo.jsonl]
    python -m tests.zoo --device cuda [--dtype bfloat16] …

Each finding is a line of ``--rows`` as soon as it is there, and a run continues where one before it stopped. Exits with
1 if anything is wrong. On a GPU Inductor compiles, and models have no dropout.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

import torch
from tqdm import tqdm

from tests.zoo.case import Place
from tests.zoo.examine import SETTINGS, Finding, examine_alone
from tests.zoo.models import ARCHITECTURES
from tests.zoo.table import page


def _kept_rows(path: Path) -> Iterator[Finding]:
    if path.exists():
        yield from (Finding(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description="Examine the whole zoo in FP8.")
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help="all if none is given")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--recipe", default="delayed")
    parser.add_argument("--out", type=Path, help="where the table goes; printed if not given")
    parser.add_argument("--rows", type=Path, help="one finding a line; runs/zoo.jsonl, or of a name with the device")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="bfloat16 on a GPU, else float32")
    given = parser.parse_args()
    given.dtype = given.dtype or ("float32" if given.device == "cpu" else "bfloat16")
    suffix = "" if (given.device, given.dtype) == ("cpu", "float32") else f"-{given.device}-{given.dtype}"
    given.rows = given.rows or Path(f"runs/zoo{suffix}.jsonl")
    unknown = sorted(set(given.architectures) - set(ARCHITECTURES))
    if unknown:
        parser.error(f"unknown architectures {unknown}; choose from {', '.join(ARCHITECTURES)}")
    return given


def main() -> int:
    """Run, write, and say whether all is well."""
    given = _parsed()
    names = given.architectures or list(ARCHITECTURES)
    found = {(each.architecture, each.setting): each for each in _kept_rows(given.rows) if each.architecture in names}
    place = Place(given.device, getattr(torch, given.dtype))
    cells = [(n, s, given.recipe, place) for s in SETTINGS for n in names if (n, str(s)) not in found]
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(given.jobs, maxtasksperchild=40) as pool:
        for finding in tqdm(
            pool.imap_unordered(examine_alone, cells), total=len(cells), unit="setting", file=sys.stderr
        ):
            found[finding.architecture, finding.setting] = finding
            with given.rows.open("a", encoding="utf-8") as rows:
                rows.write(json.dumps(finding.data()) + "\n")
            if finding.outcome == "wrong":
                tqdm.write(f"{finding.architecture}, {finding.setting}: {finding.complaints}", file=sys.stderr)
    ordered = [found[name, str(setting)] for name in names for setting in SETTINGS]
    text = page(ordered, place)
    if given.out is None:
        print(text)
    else:
        given.out.write_text(text, encoding="utf-8")
    return int(any(each.outcome == "wrong" for each in ordered))


if __name__ == "__main__":
    sys.exit(main())
