"""The findings of a run over the whole zoo as a Markdown page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.zoo.case import Place
from tests.zoo.examine import LEAST_COSINE, LEAST_SHARE, LOSS_TOLERANCE, SETTINGS, Finding

_HEAD = f"""# The zoo

Small models with random weights of {{architectures}} architectures, unmodified, each {{settings}} ways, on
{{place}}. Written by `make zoo`: {{outcomes}}.

A cell is "ok" if the loss is within {LOSS_TOLERANCE:.0%} of high precision, the gradient of every matrix parameter (in
inference: the output) has a cosine of at least {LEAST_COSINE} with that of high precision, and at least
{LEAST_SHARE:.0%} of the FLOPs of the eligible linears run in FP8; or, for loss and cosine, if textbook per-tensor FP8
emulated on the same model comes no closer. In inference the loss is that of a call with labels; a model that takes none
gives the mean square of its output, in training as well. The loss of a classifier of two images is near chance, and a
mean square near zero for some: their relative errors are large. {{dropout}}

Cosine and loss error are the worst of the row; in brackets what the emulation reaches, where it was asked. "Masks"
counts attentions that lost a mask proven to be causal or empty, "attention" products and softmaxes that became scaled
dot product attention.
"""
_COLUMNS = "architecture | linears in FP8 | of eligible FLOPs | cosine | loss error | masks | attention"


_ON_A_CPU = (
    "a CPU, where the reference operators define the numerics",
    "Dropout is on, and draws the same numbers with te_fp8\nas without.",
)
_ON_A_GPU = ("{place}, where kernels run and Inductor compiles the rest", "Dropout is off.")


def page(findings: Sequence[Finding], place: Place | None = None) -> str:
    """The whole page, of findings on a CPU unless said otherwise."""
    outcomes = Counter(finding.outcome for finding in findings)
    names = list(dict.fromkeys(finding.architecture for finding in findings))
    said = ", ".join(f"{outcomes[each]} {each}" for each in ("ok", "wrong", "not run"))
    settings = [str(setting) for setting in SETTINGS]
    where, dropout = _ON_A_CPU if place is None or place.device == "cpu" else _ON_A_GPU
    head = {"architectures": len(names), "settings": len(settings), "outcomes": said, "dropout": dropout}
    lines = [_HEAD.format(place=where.format(place=place), **head)]
    for kind in dict.fromkeys(finding.kind for finding in findings):
        lines += [f"\n## {kind.capitalize()}\n", f"| {_COLUMNS} | {' | '.join(settings)} |"]
        lines.append("|" + " --- |" * (len(_COLUMNS.split("|")) + len(settings)))
        members = [finding for finding in findings if finding.kind == kind]
        lines += [_row(name, [each for each in members if each.architecture == name]) for name in names_of(members)]
    return "\n".join([*lines, *_wrong(findings), *_kept(findings), *_not_run(findings)]) + "\n"


def names_of(findings: Sequence[Finding]) -> list[str]:
    """Each architecture once."""
    return list(dict.fromkeys(finding.architecture for finding in findings))


def _row(name: str, findings: list[Finding]) -> str:
    run = [finding for finding in findings if finding.outcome != "not run"]
    outcomes = {finding.setting: finding.outcome for finding in findings}
    cells = [outcomes.get(str(setting), "") for setting in SETTINGS]
    if not run:
        return f"| {name} | | | | | | | {' | '.join(cells)} |"
    largest = max(run, key=lambda finding: finding.linears)
    textbook = [finding.textbook for finding in run if finding.textbook is not None]
    cosine = f"{min(finding.cosine for finding in run):.3f}" + (f" ({min(textbook):.3f})" if textbook else "")
    masks, attention = (
        max(finding.rewrites.get(each, 0) for finding in run) for each in ("fold_masks", "recognise_attention")
    )
    numbers = [
        f"{largest.in_fp8} of {largest.linears}", f"{min(finding.share for finding in run):.1%}", cosine,
        f"{max(map(_loss_error, run)):.2%}", str(masks or ""), str(attention or ""),
    ]  # fmt: skip
    return f"| {' | '.join([name, *numbers, *cells])} |"


def _loss_error(finding: Finding) -> float:
    return finding.loss_error if finding.labelled_loss_error is None else finding.labelled_loss_error


def _wrong(findings: Sequence[Finding]) -> list[str]:
    wrong = [finding for finding in findings if finding.outcome == "wrong"]
    lines = ["\n## Wrong\n"] if wrong else []
    return lines + [f"- {f.architecture}, {f.setting}: {'; '.join(dict.fromkeys(f.complaints))}" for f in wrong]


def _kept(findings: Sequence[Finding]) -> list[str]:
    """Every reason for which a linear stays in high precision, and whose."""
    whose: dict[str, set[str]] = {}
    for finding in findings:
        for reason in finding.kept:
            whose.setdefault(reason, set()).add(finding.architecture)
    lines = ["\n## What stays in high precision, and why\n"] if whose else []
    ordered = sorted(whose.items(), key=lambda entry: -len(entry[1]))
    return lines + [f"- {reason}: {', '.join(sorted(names))}" for reason, names in ordered]


def _not_run(findings: Sequence[Finding]) -> list[str]:
    """What does not run without te_fp8 either."""
    settings: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        if finding.outcome == "not run":
            settings.setdefault((finding.architecture, finding.detail), []).append(finding.setting)
    lines = ["\n## Not run\n", "Neither runs without te_fp8.\n"] if settings else []
    return lines + [f"- {name} ({'; '.join(which)}): {detail}" for (name, detail), which in settings.items()]
