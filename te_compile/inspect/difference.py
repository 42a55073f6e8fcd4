"""Two reports beside each other: what an option, a recipe, another version of torch or of the model changed.

Linears and attentions are matched by name; where one name stands for several, those in their order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar

from te_compile.inspect.coverage import percent

if TYPE_CHECKING:
    from te_compile.inspect.attentions import AttentionRow
    from te_compile.inspect.report import Report, Row

    AnyRow = TypeVar("AnyRow", Row, AttentionRow)

_COMPARED = ("status", "reason", "fused", "implementation", "shape", "padding", "form")
_WITH_REASONS = ("precision", "mask", "heads")  # of an attention
_COMPARED_OF_ATTENTION = ("status", "reason", *_WITH_REASONS, *(f"{name}_reason" for name in _WITH_REASONS))
_MOST_NAMES = 3  # in one line of text


@dataclass(frozen=True)
class RowChange:
    """One linear or attention that differs; ``fields`` has (before, after) of what does, as "status" or "fused"."""

    name: str
    fields: Mapping[str, tuple[object, object]]


@dataclass(frozen=True)
class Difference:
    """What changed between two reports. ``print`` shows it; it is false where nothing did.

    rows: linears in both that differ; ``removed`` and ``added``: names of linears in one alone.
    totals: each total that changed, (before, after); ``coverage``: the FP8 share of the eligible FLOPs, likewise.
    passes: what each pass counted over all graphs, where it changed; ``breaks``: graph breaks that went and came.
    attentions, attentions_removed, attentions_added: the same of attentions as of linears.
    setting: what differs in the question: the recipe, training or inference, the model.
    """

    coverage: tuple[float, float]
    rows: tuple[RowChange, ...] = ()
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    totals: Mapping[str, tuple[int, int]] | None = None
    passes: Mapping[str, tuple[int, int]] | None = None
    breaks: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    setting: Mapping[str, tuple[object, object]] | None = None
    attentions: tuple[RowChange, ...] = ()
    attentions_removed: tuple[str, ...] = ()
    attentions_added: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        linears = self.rows or self.removed or self.added
        attentions = self.attentions or self.attentions_removed or self.attentions_added
        return bool(linears or attentions or self.totals or self.passes or any(self.breaks) or self.setting)

    def __str__(self) -> str:
        return "\n".join(_text(self))

    def to_json(self) -> str:
        """Everything as JSON."""
        return json.dumps(asdict(self), indent=1)


def diff(before: Report, after: Report) -> Difference:
    """What changed from one report to another, linear by linear."""
    for each in (before, after):
        if not hasattr(each, "rows"):
            raise TypeError(f"expected two reports of te_compile.explain, not {type(each).__name__}")
    old, new = _by_name(before.rows), _by_name(after.rows)
    found = ((name, _fields(old[name], new[name])) for name in old if name in new)
    old_attentions, new_attentions = _by_name(before.attentions), _by_name(after.attentions)
    changed = (
        (name, _differing(row, new_attentions[name], _COMPARED_OF_ATTENTION))
        for name, row in old_attentions.items()
        if name in new_attentions
    )
    settings = {name: (getattr(before, name), getattr(after, name)) for name in ("model", "recipe", "training")}
    gone = tuple(reason for reason in before.breaks if reason not in after.breaks)
    come = tuple(reason for reason in after.breaks if reason not in before.breaks)
    return Difference(
        coverage=(before.fp8_flops_fraction, after.fp8_flops_fraction),
        rows=tuple(RowChange(name, fields) for name, fields in found if fields),
        removed=tuple(name for name in old if name not in new),
        added=tuple(name for name in new if name not in old),
        totals=_changed(before.totals, after.totals),
        passes=_changed(_pass_counts(before), _pass_counts(after)),
        breaks=(gone, come),
        setting={name: pair for name, pair in settings.items() if pair[0] != pair[1]},
        attentions=tuple(RowChange(name, fields) for name, fields in changed if fields),
        attentions_removed=tuple(name for name in old_attentions if name not in new_attentions),
        attentions_added=tuple(name for name in new_attentions if name not in old_attentions),
    )


def _by_name(rows: Sequence[AnyRow]) -> dict[str, AnyRow]:
    """Each row by a name of its own: the second use of ``fc`` is ``fc (2)``."""
    seen: Counter[str] = Counter()
    named = {}
    for row in rows:
        seen[row.name] += 1
        named[row.name if seen[row.name] == 1 else f"{row.name} ({seen[row.name]})"] = row
    return named


def _fields(before: Row, after: Row) -> dict[str, tuple[object, object]]:
    changed = _differing(before, after, _COMPARED)
    if "status" not in changed:
        return changed
    # A linear that moved has another reason, implementation and fusions by necessity; the reason tells enough.
    return {name: pair for name, pair in changed.items() if name not in ("implementation", "fused")}


def _differing(before: AnyRow, after: AnyRow, names: Sequence[str]) -> dict[str, tuple[object, object]]:
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _pass_counts(report: Report) -> Counter[str]:
    counted: Counter[str] = Counter()
    for passes in report.graphs:
        for each in passes:
            counted[each.name] += each.count
    return counted


def _changed(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    names = dict.fromkeys([*before, *after])
    pairs = {name: (before.get(name, 0), after.get(name, 0)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


# --- as text -------------------------------------------------------------------------------------------------------


def _text(difference: Difference) -> Iterator[str]:
    if not difference:
        yield "no difference"
        return
    for name, (before, after) in (difference.setting or {}).items():
        yield f"{name}: {before} → {after}"
    before_share, after_share = map(percent, difference.coverage)
    same = before_share == after_share
    yield f"in FP8 of the eligible linear FLOPs: {before_share}" + (", unchanged" if same else f" → {after_share}")
    for name, (was, now) in (difference.totals or {}).items():
        if not name.endswith("flops"):
            yield f"  {name.replace('_', ' ')}: {was} → {now}"
    yield from _grouped("", ((row.name, tuple(_row_lines(row))) for row in difference.rows))
    yield from (f"- {name}" for name in difference.removed)
    yield from (f"+ {name}" for name in difference.added)
    yield from _grouped("attention ", ((row.name, tuple(_attention_lines(row))) for row in difference.attentions))
    yield from (f"- attention {name}" for name in difference.attentions_removed)
    yield from (f"+ attention {name}" for name in difference.attentions_added)
    for mark, reasons in zip("-+", difference.breaks, strict=True):
        yield from (f"{mark} graph break: {reason}" for reason in reasons)
    for name, (was, now) in (difference.passes or {}).items():
        yield f"  pass {name}: {was} → {now}"


def _row_lines(row: RowChange) -> Iterator[str]:
    fields = dict(row.fields)
    reason = fields.pop("reason", ("", ""))
    if "status" in fields:
        was, now = fields.pop("status")
        yield f"{was} → {now}: {reason[1] or f'no longer: {reason[0]}'}"
    elif any(reason):
        yield f"kept: {reason[0]} → {reason[1]}"
    for name, (was, now) in fields.items():
        yield f"{name}: {_value(was)} → {_value(now)}"


def _attention_lines(row: RowChange) -> Iterator[str]:
    """Each change with the reason that there is now, or that there is no longer."""
    for name in ("status", *_WITH_REASONS):
        its_reason = "reason" if name == "status" else f"{name}_reason"
        _, why = row.fields.get(its_reason, ("", ""))
        if name in row.fields and row.fields[name][1] == "" and "status" in row.fields:
            continue  # of an attention that stays nothing else is known
        if name in row.fields:
            was, now = map(_value, row.fields[name])
            yield f"{name}: {was} → {now}" + (f": {why}" if why else "")
        elif its_reason in row.fields:
            was, now = map(_value, row.fields[its_reason])
            yield f"{name}: {was} → {now}"


def _value(value: object) -> str:
    if isinstance(value, tuple):
        between = "; " if all(isinstance(each, str) for each in value) else "×"
        return between.join(map(str, value)) or "nothing"
    return str(value) or "nothing"


def _grouped(kind: str, changes: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[str]:
    """Rows that changed alike are told together."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, lines in changes:
        groups.setdefault(lines, []).append(name)
    for lines, names in groups.items():
        yield f"~ {kind}{_some(names)}"
        yield from (f"    {line}" for line in lines)


def _some(names: Sequence[str]) -> str:
    """Names that changed alike, in one line."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
