"""compute-sanitizer over the kernels' tests: memory errors (memcheck) and races in shared memory (racecheck).

    python -m benchmarks.sanitize                          up to ten minutes on a GPU machine of 16 cores
    python -m benchmarks.sanitize --only racecheck --cases norm,weights

It takes the tests that are small by design: tests/kernels, which run in Triton's interpreter elsewhere, and those of
the C++ kernels. First they run as they are, which compiles their kernels; then once under each tool, several processes
at a time, each with a time limit. Kernels of PyTorch and of libraries are not instrumented: they are not ours, and
would take most of the time. One row per tool and file; a run that ends without a summary of the tool counts as failed,
as does a limit that was reached, whatever was seen until then.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import measure

CHECKOUT = Path(__file__).parent.parent
TOOLS = ("memcheck", "racecheck")
TOO_LARGE = "not billion and not million and not 8192 and not 8191 and not 4097 and not 16384"
CAPTURES = "not captured and not cuda_graph"  # memory without PyTorch's cache cannot be allocated during a capture
NOT_OURS = ("2at6native", "2at4cuda", "3cub", "cutlass", "xmma", "nvjet", "cublas", "triton_")


@dataclass(frozen=True)
class Case:
    """One file of tests, and which of them, in pytest's words."""

    name: str
    path: str
    chosen: str = ""
    tools: tuple[str, ...] = TOOLS

    def expression(self, tool: str) -> str:
        """What pytest is to select for ``tool``."""
        parts = [TOO_LARGE, *([f"({self.chosen})"] if self.chosen else []), *([CAPTURES] if tool == "memcheck" else [])]
        return " and ".join(parts)


CASES = (
    Case("quantize", "tests/kernels/test_quantize.py"),
    Case("alone", "tests/kernels/test_alone.py"),
    Case("norm", "tests/kernels/test_norm.py"),
    Case("norm_rows", "tests/kernels/test_norm_rows.py"),
    Case("norm_backward", "tests/kernels/test_norm_backward.py"),
    Case("column_sums", "tests/kernels/test_column_sums.py"),
    Case("gather_backward", "tests/kernels/test_gather_backward.py"),
    Case("cross_entropy", "tests/kernels/test_cross_entropy.py"),
    Case("weights", "tests/kernels/test_weights.py"),
    # The model's products are cuBLASLt's, which racecheck does not bear.
    Case("weight_refresh", "tests/kernels/test_weight_refresh.py", "not a_model_reads"),
    Case("pointwise", "tests/kernels/test_pointwise.py"),
    Case("pointwise_pieces", "tests/kernels/test_pointwise_pieces.py"),
    Case("scale_update", "tests/kernels/test_scale_update.py"),
    Case("grouped_gemm", "tests/kernels/test_grouped_gemm.py"),
    Case("native_grouped_gemm", "tests/gpu/test_native_grouped_gemm.py", "integers or not_finite"),
    Case("fp8_attention", "tests/kernels/test_fp8_attention.py"),
    Case("dropout_mask", "tests/kernels/test_dropout_masks.py"),
    Case("dropout_attention", "tests/kernels/test_dropout_attention.py"),
    Case("native_dropout_attention", "tests/gpu/test_native_dropout_attention.py", "definition or strides"),
    Case("native_attention", "tests/gpu/test_native_attention.py", "hidden or see_them_all"),
    Case("mask_tiles", "tests/kernels/test_mask_tiles.py"),
    Case("masked_attention", "tests/gpu/test_masked_attention.py", "definition or dropout_too"),
    Case("biased_attention", "tests/gpu/test_biased_attention.py", "dropout_too or sees_nothing"),
    Case("skinny_gemm", "tests/gpu/test_skinny_gemm.py", "integers or rounding or badly or refused"),
    Case("native_kernels", "tests/gpu/test_native_kernels.py"),
    Case("norm_few_rows", "tests/gpu/test_norm_few_rows.py", "wider or apart or bad_value or rule"),
    # Under racecheck the twenty repetitions of a large norm would take longer than all the others together.
    Case(
        "native_norm",
        "tests/gpu/test_native_norm.py",
        "not repeat_bit_by_bit and not every_kind_and_shape and not bad_value",
    ),
    Case("native_norm_bad_values", "tests/gpu/test_native_norm.py", "bad_value"),
    Case("native_norm_shapes", "tests/gpu/test_native_norm.py", "every_kind_and_shape"),
    # The kernels are cuBLASLt's, so there are no races of ours to find; and with racecheck beside them, though they are
    # not instrumented, they reach for memory that is not theirs.
    Case("cublaslt", "tests/gpu/test_cublaslt.py", "bias or epilogue or rows or scales or fp8_result", ("memcheck",)),
)


def find_sanitizer() -> Path | None:
    """The program: named by COMPUTE_SANITIZER, on the path, in a CUDA toolkit, or in a package that pip installed."""
    named = os.environ.get("COMPUTE_SANITIZER")
    if named:
        return Path(named)
    if found := shutil.which("compute-sanitizer"):
        return Path(found)
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    homes += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    places = [home / part for home in homes for part in ("bin", "compute-sanitizer", "extras/compute-sanitizer")]
    packages = [Path(each) / "nvidia" for each in sys.path if each]
    places += [place.parent for each in packages if each.is_dir() for place in each.rglob("compute-sanitizer")]
    return next((place / "compute-sanitizer" for place in places if (place / "compute-sanitizer").is_file()), None)


def options(tool: str, manual: str) -> list[str]:
    """The sanitizer's options for ``tool``; those that its ``manual`` does not know are left out, for they changed."""
    given = ["--tool", tool]
    if "--target-processes" in manual:
        given += ["--target-processes", "application-only"]
    if "--print-limit" in manual:
        given += ["--print-limit", "20"]
    if tool == "memcheck" and "--report-api-errors" in manual:
        given += ["--report-api-errors", "no"]  # PyTorch asks questions whose answer is an error
    exclude = next((each for each in ("--kernel-name-exclude", "--kernel-regex-exclude") if each in manual), "")
    if exclude:
        given += [part for name in NOT_OURS for part in (exclude, f"kns={name}")]
    return given


def environment(tool: str) -> dict[str, str]:
    """One thread, kernels loaded as they are used, and for memcheck an allocation for each tensor: in PyTorch's cache a
    write past the end of one meets the next and no error."""
    ours = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_MODULE_LOADING": "LAZY", "PYTHONUNBUFFERED": "1"}
    ours["TE_COMPILE_GEMM_CANDIDATES"] = "2"
    if tool == "memcheck":
        ours["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    return ours


def summary_of(tool: str, output: str) -> dict[str, Any]:
    """What the tool and pytest say at their end; ``errors`` is absent where the tool says nothing."""
    found: dict[str, Any] = {}
    pattern = {
        "memcheck": r"ERROR SUMMARY: (?P<errors>\d+) error",
        "racecheck": r"RACECHECK SUMMARY: (?P<hazards>\d+) hazards? displayed "
        r"\((?P<errors>\d+) errors?, (?P<warnings>\d+) warnings?\)",
    }.get(tool)
    if pattern and (matched := re.search(pattern, output)):
        found |= {name: int(value) for name, value in matched.groupdict().items()}
    for word in ("passed", "failed", "skipped"):
        if matched := re.search(rf"(\d+) {word}\b[^\n]* in [\d.]+s", output):
            found[word] = int(matched[1])
    return found


def verdict(tool: str, row: dict[str, Any]) -> str:
    """What is wrong with a row; "" if nothing is."""
    if row.get("timed_out"):
        return f"not finished in {row['seconds']:.0f} s"
    if row.get("failed") or not row.get("passed"):
        return f"{row.get('failed', 0)} tests failed, {row.get('passed', 0)} passed"
    if tool == "plain":
        return ""
    if "errors" not in row:
        return f"{tool} gave no summary"
    count = row["errors"] + row.get("warnings", 0)
    return f"{tool} found {count} error(s)" if count else ""


_running: set[subprocess.Popen[bytes]] = set()


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the sanitizer and the Python that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_with_us() -> None:
    """Runs have sessions of their own, so whoever ends this program would leave them at work on the GPU."""

    def ended(number: int, _frame: object) -> None:
        for process in list(_running):
            stop(process)
        os._exit(128 + number)  # no thread may begin another run

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ended)


def run(case: Case, tool: str, command: Sequence[str], limit: float, folder: Path) -> dict[str, Any]:
    """Run one file's tests under ``command``; all it says goes to a file in ``folder``."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", case.path]
    start = time.monotonic()
    ended: dict[str, Any] = {}
    log = folder / f"{tool}_{case.name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *pytest, "-k", case.expression(tool)], cwd=CHECKOUT, env=environment(tool), stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        _running.add(process)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            stop(process)
            ended["timed_out"] = True
        finally:
            _running.discard(process)
    return {"seconds": time.monotonic() - start, **ended, **summary_of(tool, log.read_text()), "log": str(log)}


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TOOLS), help="tools (%(default)s)")
    parser.add_argument("--cases", default=",".join(names), help="files of tests (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time (%(default)s)")
    parser.add_argument("--limit", type=float, default=600, help="seconds that one run may take (%(default)s)")
    parser.add_argument("--logs", type=Path, default=Path("runs/sanitize"), help="what each run said (%(default)s)")
    measure.add_out(parser)
    arguments = parser.parse_args(given)
    for argument, known in (("only", TOOLS), ("cases", names)):
        chosen = [each for each in getattr(arguments, argument).split(",") if each]
        unknown = [each for each in chosen if each not in known]
        if unknown:
            parser.error(f"--{argument}: unknown {', '.join(unknown)}; choose from {', '.join(known)}")
        setattr(arguments, argument, chosen)
    return arguments


def main(given: Sequence[str] | None = None) -> int:
    """Run the tools; returns the exit status: 2 where there is nothing to run them on, or with."""
    arguments = parsed(given)
    if measure.DEVICE.type != "cuda":
        print("benchmarks.sanitize needs a CUDA device; there is none here", file=sys.stderr)
        return 2
    sanitizer = find_sanitizer()
    if sanitizer is None or not sanitizer.is_file():  # COMPUTE_SANITIZER may name what does not exist
        where = f"{sanitizer} is no file" if sanitizer else "it is neither on the path nor in a CUDA toolkit"
        print(f"no compute-sanitizer: {where}; COMPUTE_SANITIZER=/path/to/it names one", file=sys.stderr)
        return 2
    asked = subprocess.run([sanitizer, "--help"], capture_output=True, text=True)
    manual = asked.stdout + asked.stderr
    arguments.logs.mkdir(parents=True, exist_ok=True)
    rows = measure.Rows(arguments.out)
    measure.describe_device(rows)
    cases = [case for case in CASES if case.name in arguments.cases]
    # All plain runs first: what they compile, the others find.
    for tools in (["plain"], arguments.only):
        with ThreadPoolExecutor(arguments.jobs) as pool:
            commands = {tool: [] if tool == "plain" else [str(sanitizer), *options(tool, manual)] for tool in tools}
            runs = {
                (tool, case): pool.submit(run, case, tool, commands[tool], arguments.limit, arguments.logs)
                for tool in tools
                for case in cases
                if tool == "plain" or tool in case.tools
            }
            for (tool, case), result in runs.items():
                row = result.result()
                wrong = verdict(tool, row)
                rows.write(what="sanitize", name=tool, case=case.name, **row, **({"wrong": wrong} if wrong else {}))
                if wrong:
                    rows.fail(f"{tool} {case.name}", wrong)
    print("clean" if not rows.failures else f"{len(rows.failures)} of the runs are not clean", file=sys.stderr)
    return rows.exit_status()


if __name__ == "__main__":
    end_with_us()
    sys.exit(main())
