"""Two reports beside each other: what an option, a recipe, another version of torch or of the model changed.

Linears are matched by name; where a weight is used several times, its uses in their order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from te_compile.inspect.coverage import percent

if TYPE_CHECKING:
    from te_compile.inspect.report import Report, Row

_COMPARED = ("status", "reason", "fused", "implementation", "shape", "padding", "form")
_MOST_NAMES = 3  # in one line of text


@dataclass(frozen=True)
class RowChange:
    """One linear that differs; ``fields`` has (before, after) of whatever does, such as "status" or "fused"."""

    name: str
    fields: Mapping[str, tuple[object, object]]


@dataclass(frozen=True)
class Difference:
    """What changed between two reports. ``print`` shows it; it is false where nothing did.

    rows: linears in both that differ; ``removed`` and ``added``: names of linears in one alone.
    totals: each total that changed, (before, after); ``coverage``: the FP8 share of the eligible FLOPs, likewise.
    passes: what each pass counted over all graphs, where it changed; ``breaks``: graph breaks that went and came.
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

    def __bool__(self) -> bool:
        return bool(
            self.rows or self.removed or self.added or self.totals or self.passes or any(self.breaks) or self.setting
        )

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
    both = [name for name in old if name in new]
    found = ((name, _fields(old[name], new[name])) for name in both)
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
    )


def _by_name(rows: Sequence[Row]) -> dict[str, Row]:
    """Each row by a name of its own: the second use of ``fc`` is ``fc (2)``."""
    seen: Counter[str] = Counter()
    named = {}
    for row in rows:
        seen[row.name] += 1
        named[row.name if seen[row.name] == 1 else f"{row.name} ({seen[row.name]})"] = row
    return named


def _fields(before: Row, after: Row) -> dict[str, tuple[object, object]]:
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in _COMPARED}
    changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if "status" not in changed:
        return changed
    # A linear that moved has another reason, implementation and fusions by necessity; the reason tells enough.
    return {name: pair for name, pair in changed.items() if name not in ("implementation", "fused")}


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
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in difference.rows:
        groups.setdefault(tuple(_row_lines(row)), []).append(row.name)
    for lines, names in groups.items():
        yield f"~ {_some(names)}"
        yield from (f"    {line}" for line in lines)
    yield from (f"- {name}" for name in difference.removed)
    yield from (f"+ {name}" for name in difference.added)
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


def _value(value: object) -> str:
    if isinstance(value, tuple):
        between = "; " if all(isinstance(each, str) for each in value) else "×"
        return between.join(map(str, value)) or "nothing"
    return str(value) or "nothing"


def _some(names: Sequence[str]) -> str:
    """Names that changed alike, in one line."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
