"""Train two small language models in high precision and in FP8, side by side.

The models are Hugging Face's GPT-2 and Llama, built from a config and left as they are. The text is the source code of
Python's standard library, byte by byte: real text that every machine has. Each variant starts from the same weights and
reads the same batches in the same order, so whatever differs between two loss curves comes from the number format.

The run prints what was rewritten, the losses beside each other and, on a GPU, the speed; it leaves the loss curves and
the rewritten graphs in runs/demo. It exits with 1 if a loss ends further from high precision than ``GOAL``.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import te_compile

GOAL = 0.015
"""How far the mean loss of the last tenth may lie from high precision, as a fraction of it."""

BASELINE = "high precision"
OPTIONS: dict[str, dict[str, Any]] = {"te_fp8 delayed": {"recipe": "delayed"}, "te_fp8 current": {"recipe": "current"}}


@dataclass(frozen=True)
class Size:
    """How large the models are and how long they train."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    sequence: int
    batch: int
    steps: int
    learning_rate: float
    dtype: torch.dtype


# Two cores train all six variants of the small size in a few minutes. With twice its learning rate the comparison would
# mean nothing: GPT-2's loss then turns down in a random step, and FP8 ends 4% below high precision.
SMALL = Size(128, 384, 2, 4, sequence=128, batch=8, steps=200, learning_rate=1e-3, dtype=torch.float32)
# Big enough for FP8 to pay.
LARGE = Size(2048, 5632, 4, 16, sequence=1024, batch=8, steps=200, learning_rate=3e-4, dtype=torch.bfloat16)


@dataclass
class Curve:
    """The losses of one variant, and the seconds each step took."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def final(self) -> float:
        """Mean loss of the last tenth of the steps."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :])

    @property
    def step_ms(self) -> float:
        """Median step time without the first fifth, which compiles and warms up."""
        return 1e3 * statistics.median(self.seconds[len(self.seconds) // 5 :])


def standard_library_text(limit: int = 4 << 20) -> Tensor:
    """The first ``limit`` bytes of the standard library's top-level modules, in the order of their names: uint8 [n]."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise SystemExit(f"{folder} holds no .py files: this Python comes without its standard library's source")
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batches(text: Tensor, size: Size, seed: int = 0) -> Iterator[Tensor]:
    """``size.steps`` batches of byte ids, [batch, sequence] int64, from random places; the same seed gives the same."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(size.sequence)
    for _ in range(size.steps):
        starts = torch.randint(len(text) - size.sequence + 1, (size.batch, 1), generator=generator)
        yield text[starts + window].long()


def build_gpt2(size: Size) -> nn.Module:
    """GPT-2 over bytes. No dropout: random masks would differ between the variants and hide what FP8 does."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256, n_embd=size.hidden, n_layer=size.layers, n_head=size.heads, n_positions=size.sequence,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def build_llama(size: Size) -> nn.Module:
    """Llama over bytes, with grouped-query attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=size.hidden, intermediate_size=size.intermediate, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.heads // 2, max_position_embeddings=size.sequence,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS: dict[str, Callable[[Size], nn.Module]] = {"GPT-2": build_gpt2, "Llama": build_llama}


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[float], None]]:
    """Yield a function that takes the loss after each step: a bar on a terminal, else a line per quarter of the way."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        rich_installed = False
    else:
        rich_installed = sys.stdout.isatty()
    if rich_installed:
        columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}")) as bar:
            task = bar.add_task(title, total=total, loss=float("nan"))
            yield lambda loss: bar.update(task, advance=1, loss=loss)
        return
    done = 0

    def line(loss: float) -> None:
        nonlocal done
        done += 1
        if done % max(1, total // 4) == 0:
            print(f"{title:<24} step {done:>4}/{total}  loss {loss:.4f}", flush=True)

    yield line


def learning_rate(step: int, size: Size) -> float:
    """Linear warm-up over the first tenth, then linear decay to a tenth of the peak."""
    warmup = max(1, size.steps // 10)
    if step < warmup:
        return size.learning_rate * (step + 1) / warmup
    return size.learning_rate * (1 - 0.9 * (step - warmup) / max(1, size.steps - warmup))


def train(model: nn.Module, forward: Callable[..., Any], text: Tensor, size: Size, title: str) -> Curve:
    """Train ``model`` through ``forward``, its compiled form, and record every loss and step time."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    curve = Curve()
    with progress(title, size.steps) as advance:
        for step, ids in enumerate(batches(text, size)):
            ids = ids.to(device)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, size)
            start = time.perf_counter()
            loss = forward(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            curve.losses.append(loss.item())  # reads the loss back, so the step has ended when the clock is read
            curve.seconds.append(time.perf_counter() - start)
            advance(curve.losses[-1])
    return curve


def compile_as(variant: str, model: nn.Module) -> Callable[..., Any]:
    """The callable that trains ``model`` as ``variant``.

    On a GPU Inductor compiles the rest of the graph in all variants alike. On a CPU speed is not the point, so high
    precision runs eagerly and te_fp8 runs its rewritten graph without Inductor: that saves minutes of C++ compilation.
    """
    on_gpu = next(model.parameters()).is_cuda
    if variant == BASELINE:
        return torch.compile(model) if on_gpu else model
    compiler = "inductor" if on_gpu else "aot_eager"
    return torch.compile(model, backend="te_fp8", options={**OPTIONS[variant], "compiler": compiler})


def show_rewrite(name: str, model: nn.Module, ids: Tensor, folder: Path) -> None:
    """Print what te_fp8 rewrites in ``model``; write the graph, as captured and after each change, into ``folder``."""
    report = te_compile.explain(model, input_ids=ids, labels=ids)
    print(report)
    path = folder / f"{name}-graph.txt"
    with path.open("w") as file:
        for passes in report.graphs:
            file.write(f"==== captured ====\n{passes[0].before}\n\n")
            changes = (each for each in passes if each.after != each.before)
            file.writelines(f"==== {each.name}: {each.count} ====\n{each.after}\n\n" for each in changes)
    print(f"graph after each change: {path}\n")


def show_losses(name: str, curves: dict[str, Curve], on_gpu: bool) -> bool:
    """Print the losses side by side and the verdict; is every FP8 variant within ``GOAL`` of high precision?"""
    baseline = curves[BASELINE]
    last = len(baseline.losses) - 1
    print(f"\n{name:<16}" + "".join(f"{variant:>18}" for variant in curves))
    for step in sorted({round(last * tenth / 10) for tenth in range(11)}):
        print(f"step {step + 1:<11}" + "".join(f"{curve.losses[step]:>18.4f}" for curve in curves.values()))
    print(f"{'last tenth':<16}" + "".join(f"{curve.final:>18.4f}" for curve in curves.values()))
    differences = {variant: curve.final / baseline.final - 1 for variant, curve in curves.items()}
    print(f"{'difference':<16}" + "".join(f"{difference:>18.2%}" for difference in differences.values()))
    if on_gpu:
        print(f"{'ms per step':<16}" + "".join(f"{curve.step_ms:>18.1f}" for curve in curves.values()))
        print(f"{'speed':<16}" + "".join(f"{baseline.step_ms / curve.step_ms:>17.2f}x" for curve in curves.values()))
    return all(abs(difference) <= GOAL for difference in differences.values())


def plot(results: dict[str, dict[str, Curve]], path: Path) -> None:
    """Draw every loss curve, one panel per model; without matplotlib say so and go on."""
    try:
        import matplotlib
    except ImportError:
        print("no loss curves drawn: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(results), figsize=(6 * len(results), 4), squeeze=False)
    for panel, (name, curves) in zip(panels[0], results.items(), strict=True):
        for variant, curve in curves.items():
            panel.plot(curve.losses, label=variant, linewidth=1)
        panel.set(title=name, xlabel="step", ylabel="loss (nats per byte)")
        panel.grid(alpha=0.3)
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"loss curves: {path}")


def run(name: str, size: Size, device: torch.device, text: Tensor, folder: Path) -> dict[str, Curve]:
    """Train every variant of model ``name`` from the same weights."""
    torch.manual_seed(0)
    initial = MODELS[name](size).to(device, size.dtype)
    millions = sum(parameter.numel() for parameter in initial.parameters()) / 1e6
    print(f"\n{name}: {millions:.1f} million parameters, {size.steps} steps of {size.batch} x {size.sequence} bytes\n")
    show_rewrite(name, copy.deepcopy(initial), next(batches(text, size)).to(device), folder)
    curves = {}
    for variant in (BASELINE, *OPTIONS):
        torch._dynamo.reset()
        model = copy.deepcopy(initial)
        curves[variant] = train(model, compile_as(variant, model), text, size, f"{name} {variant}")
    return curves


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked before minutes of training; argparse exits for what it refuses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="which of %(default)s")
    parser.add_argument("--steps", type=int, help="training steps for each variant")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    arguments = parser.parse_args(given)
    arguments.models = arguments.models.split(",")
    unknown = [name for name in arguments.models if name not in MODELS]
    if unknown:
        parser.error(f"--models: unknown {', '.join(map(repr, unknown))}; choose from {', '.join(MODELS)}")
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: must be 1 or more")
    kind = arguments.device.partition(":")[0]
    if kind not in ("cuda", "cpu") or (kind == "cuda" and not torch.cuda.is_available()):
        parser.error(f"--device {arguments.device}: choose cuda, where there is one, or cpu")
    return arguments


def main(given: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    arguments = parsed(given)
    device = torch.device(arguments.device)
    size = LARGE if device.type == "cuda" else SMALL
    if arguments.steps is not None:
        size = Size(**{**vars(size), "steps": arguments.steps})
    arguments.out.mkdir(parents=True, exist_ok=True)

    text = standard_library_text()
    start = time.perf_counter()
    results, good = {}, []
    for name in arguments.models:
        results[name] = run(name, size, device, text, arguments.out)
        good.append(show_losses(name, results[name], device.type == "cuda"))
    print()
    plot(results, arguments.out / "loss.png")
    verdict = "within" if all(good) else "NOT within"
    print(f"every FP8 loss is {verdict} {GOAL:.1%} of high precision; {time.perf_counter() - start:.0f} s")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
