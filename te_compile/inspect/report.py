"""What ``explain`` found out, as plain data: rows, passes, graph breaks, totals, and JSON of it all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from te_compile.inspect.attentions import AttentionRow
from te_compile.inspect.difference import Difference, diff
from te_compile.inspect.notebook import fragment
from te_compile.inspect.page import page
from te_compile.inspect.table import plain_text, report_text


@dataclass(frozen=True)
class Row:
    """One linear.

    name: its module in the user's model, or its weight where a module has several.
    shape: (tokens, in, out), tokens being the rows of x over all batch dimensions.
    padding: features (in, out) added inside so that FP8 products can address them; zeros, they change no result.
    form: how the model writes it: "linear", "conv1d", "matmul" …
    status, reason: "fp8", or "kept" in high precision and why.
    fused: what its quantizes were merged with: "x: norm (rms), shared by 3", "dy: mul·sigmoid, bias gradient".
    recipe: "delayed", "current"; empty for a row that is kept, as is
    implementation: "gemm cublaslt, quantize triton".
    cause: for a row that is kept "user", "rule" or "unsupported": an option, a rule of te_fp8's, want of support.
    """

    name: str
    shape: tuple[int, int, int]
    form: str
    status: str
    reason: str = ""
    fused: tuple[str, ...] = ()
    recipe: str = ""
    implementation: str = ""
    padding: tuple[int, int] = (0, 0)
    cause: str = ""

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward product as the model asks for it, two for each multiply-add."""
        tokens, features_in, features_out = self.shape
        return 2 * tokens * features_in * features_out


@dataclass(frozen=True)
class GraphPass:
    """One run of one pass: the graph before and after it as text, what it counted, and its time."""

    name: str
    before: str
    after: str
    count: int
    milliseconds: float


@dataclass(frozen=True)
class Report:
    """What te_fp8 makes of a model. ``print`` shows it as a table; the attributes have everything behind it.

    attentions: what became of each attention, its mask and its key heads.
    graphs: for each captured graph, the passes that ran over it in their order.
    breaks: why the model was not captured as one graph.
    totals: numbers of linears ("linears", "fp8", "kept" and, by cause, "kept_by_user", "kept_by_rule",
        "kept_unsupported"), of "graphs", and of forward floating-point operations: "linear_flops" of all linears,
        "eligible_flops" of those that FP8 is meant for, "fp8_flops" of those that run in it.
    implementations: {"te::gemm": {"cublaslt": 12}}; ``declined`` says why better ones were not taken.
    skipped: {"fc.weight": {"x": 0, "w": 0, "gradient": 2}}: amaxes that were not finite in the real runs so far.
    notes: anything else a reader should know.
    model: what was looked at, by the name of its class or function.
    """

    rows: tuple[Row, ...]
    recipe: str
    training: bool
    totals: Mapping[str, int]
    graphs: tuple[tuple[GraphPass, ...], ...] = ()
    breaks: tuple[str, ...] = ()
    implementations: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    declined: tuple[str, ...] = ()
    skipped: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    model: str = ""
    attentions: tuple[AttentionRow, ...] = ()

    @property
    def fp8_flops_fraction(self) -> float:
        """Share of the eligible linear FLOPs that run in FP8; linears kept by rule or by the user are not eligible."""
        eligible = self.totals["eligible_flops"]
        return self.totals["fp8_flops"] / eligible if eligible else 1.0

    def __str__(self) -> str:
        return report_text(self)

    def to_json(self) -> str:
        """Everything as JSON, which :meth:`from_json` reads back."""
        return json.dumps(asdict(self), indent=1)

    def to_html(self) -> str:
        """The report as one HTML page without any outside resources: coverage, linears, graphs before and after."""
        return page(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as the suffix of ``path`` says: .html, .json or .txt; ValueError for another."""
        path = Path(path)
        forms = {".html": self.to_html, ".json": self.to_json, ".txt": lambda: plain_text(self)}
        if path.suffix.lower() not in forms:
            given = f"the suffix {path.suffix!r}" if path.suffix else "a name without suffix"
            raise ValueError(f"{path}: {given} says no form; choose one of {', '.join(forms)}")
        path.write_text(forms[path.suffix.lower()]() + "\n", encoding="utf-8")

    def diff(self, other: Report) -> Difference:
        """What changed from this report to ``other``: see :func:`te_compile.diff`."""
        return diff(self, other)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return fragment(self)

    @staticmethod
    def from_json(text: str) -> Report:
        """The report that :meth:`to_json` wrote; ValueError for another text."""
        data: Any = json.loads(text)
        wanted = {each.name for each in fields(Report) if each.default is each.default_factory is MISSING}
        if not isinstance(data, dict) or not wanted <= data.keys() <= {each.name for each in fields(Report)}:
            raise ValueError("this JSON is no report of te_compile.explain")
        try:
            data["rows"] = tuple(_row(**row) for row in data["rows"])
            data["attentions"] = tuple(AttentionRow(**row) for row in data.get("attentions", ()))
            data["graphs"] = tuple(tuple(GraphPass(**each) for each in passes) for passes in data.get("graphs", ()))
            for name in ("breaks", "declined", "notes"):
                data[name] = tuple(data.get(name, ()))
        except TypeError as error:  # no sequence, no mapping, or one of other names
            raise ValueError(f"this JSON is no report of te_compile.explain: {error}") from None
        return Report(**data)


def _row(*, shape: list[int], fused: list[str], padding: list[int] | tuple[int, int] = (0, 0), **others: Any) -> Row:
    """A row as JSON holds it; a report of an older version has no padding."""
    (tokens, features_in, features_out), (added_in, added_out) = shape, padding
    return Row(shape=(tokens, features_in, features_out), fused=tuple(fused), padding=(added_in, added_out), **others)
