"""The layers of a model, as the names of its linears tell them.

A layer is everything below the first number of a dotted name: ``model.layers.0.mlp.up_proj`` is in ``model.layers.0``,
whatever the model is called inside. A name without a number belongs to its outermost module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from te_compile.inspect.report import Row


def layer_of(name: str) -> str:
    """``h.0`` for ``h.0.attn.qkv``; ``encoder`` for ``encoder.pooler.dense``; "" for ``lm_head``, which is in none."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return parts[0] if len(parts) > 1 else ""


def by_layer(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each layer, layers in the order in which they first occur."""
    layers: dict[str, list[Row]] = {}
    for row in rows:
        layers.setdefault(layer_of(row.name), []).append(row)
    return layers
