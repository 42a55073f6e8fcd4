"""``python -m te_compile``: what FP8 would do for a model known by its configuration, and facts for a bug report.

python -m te_compile explain config.json --batch 4 --seq 2048 --out report.html
python -m te_compile env
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DTYPES = ("bfloat16", "float16", "float32")
FORMS = (".html", ".json", ".txt")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's; returns the exit status. argparse exits for what it refuses."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command == "env":
        from te_compile.inspect.environment import environment

        print(environment())
        return 0
    return _explain(given, parser)


def _parser() -> argparse.ArgumentParser:
    from te_compile.inspect.from_config import TASKS

    parser = argparse.ArgumentParser(prog="python -m te_compile", description="FP8 for unmodified PyTorch models.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="versions, devices, what is built and what runs here: paste it into a bug report")
    explain = commands.add_parser(
        "explain",
        help="which linears of a Hugging Face model run in FP8, which not, and why",
        description="Reads a configuration alone: no weights are loaded, downloaded or held in memory.",
    )
    explain.add_argument("config", type=Path, help="a config.json, or the directory of a model that holds one")
    explain.add_argument("--task", default="auto", choices=("auto", *TASKS), help="default: the config's architectures")
    explain.add_argument("--batch", type=_positive, default=2, help="sequences or images (default: %(default)s)")
    explain.add_argument("--seq", type=_positive, default=128, help="tokens of a sequence (default: %(default)s)")
    mode = explain.add_mutually_exclusive_group()
    mode.add_argument("--train", action="store_true", default=True, help="forward and backward (default)")
    mode.add_argument("--inference", dest="train", action="store_false", help="forward alone")
    explain.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of the weights (default: %(default)s)")
    explain.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    explain.add_argument("--recipe", help='a recipe, such as "current" or "delayed margin=1"')
    explain.add_argument("--option", type=_option, action="append", default=[], metavar="NAME=VALUE",
                         help="any other option of the backend; may be repeated")  # fmt: skip
    explain.add_argument("--real", action="store_true", help="random weights in memory, for models that need values")
    explain.add_argument("--out", type=_out, help=f"write the report to a file ({', '.join(FORMS)})")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number above 0")
    return int(text)


def _out(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in FORMS:
        raise argparse.ArgumentTypeError(f"{text!r}: must end in {', '.join(FORMS)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no directory {str(path.parent)!r}")
    return path


def _option(text: str) -> tuple[str, Any]:
    """``lm_head=true``; a value that is no Python literal is text."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r}: must be NAME=VALUE")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _require_device(device: str) -> None:
    """Raises ConfigError unless ``device`` is one that te_fp8 runs on and that this machine has."""
    import torch

    from te_compile.inspect.from_config import ConfigError

    kind, _, index = device.partition(":")
    if kind not in ("cuda", "cpu") or (index and not index.isdecimal()):
        raise ConfigError(f"--device {device}: choose cuda, one of several such as cuda:1, or cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: this machine has no CUDA device; leave it out to look on the CPU")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {device}: this machine's last is cuda:{torch.cuda.device_count() - 1}")


def _explain(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    import torch

    from te_compile.inspect.from_config import ConfigError, Request, explain_config
    from te_compile.inspect.table import summary
    from te_compile.options import OptionError, Options

    options = dict(given.option) | ({"recipe": given.recipe} if given.recipe else {})
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    request = Request(
        given.config, given.task, given.batch, given.seq, given.train, getattr(torch, given.dtype), device, given.real
    )
    try:
        _require_device(device)
        Options.resolve(options)
        report = explain_config(request, options)
    except (ConfigError, OptionError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if given.out is None:
        print(report)
    else:
        report.save(given.out)
        print(f"{report.model}: {summary(report)[0].removeprefix('te_fp8: ')}; {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
