"""Statistics as a picture: headroom, error and underflow of every tensor, in the order of the model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from te_compile.state import ROLES

if TYPE_CHECKING:
    from te_compile.inspect.statistics import Statistics

_PANELS = (
    ("headroom", "headroom, powers of two", 0.0),
    ("sqnr", "SQNR, dB", None),
    ("underflow", "share of underflow", None),
)


def draw(statistics: Statistics, path: str | os.PathLike[str]) -> None:
    """Write the picture to ``path``, in the format of its suffix. ImportError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "plotting needs matplotlib: pip install 'te-compile[plot]', or pip install matplotlib"
        ) from None
    names = list(dict.fromkeys(row.name for row in statistics.rows))
    places = {name: place for place, name in enumerate(names)}
    figure = Figure(figsize=(min(8 + 0.14 * len(names), 40), 9), layout="constrained")
    panels = figure.subplots(len(_PANELS), 1, sharex=True)
    for panel, (field, title, line) in zip(panels, _PANELS, strict=True):
        for role in ROLES:
            points = [(places[row.name], getattr(row, field)) for row in statistics.rows if row.role == role]
            known = [(place, value) for place, value in points if value is not None]
            panel.plot([place for place, _ in known], [value for _, value in known], "o", markersize=4, label=role)
        panel.set_ylabel(title)
        panel.grid(alpha=0.25)
        if line is not None:
            panel.axhline(line, color="tab:red", linewidth=1)
    panels[0].legend(ncols=len(ROLES), title=f"recipe {statistics.recipe}")
    panels[-1].set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    figure.savefig(os.fspath(path))
