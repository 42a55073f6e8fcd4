"""HTML that is escaped by construction.

Names of modules, reasons and graphs are a user's data. Text becomes markup in one place, :func:`element`, which escapes
every string that is not markup already, so no page can forget to.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(name: str, *children: str | None, **attributes: str | int | float | bool | None) -> Markup:
    """``<name attribute="…">children</name>``, all of it escaped but :class:`Markup`.

    An attribute that is None or False is left out, True stands alone; ``class_`` is ``class``, ``data_x`` ``data-x``.
    """
    written = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        plain = key.rstrip("_").replace("_", "-")
        written.append(plain if value is True else f'{plain}="{escape(str(value), quote=True)}"')
    return Markup(f"<{' '.join(written)}>{joined(children)}</{name}>")


def joined(children: Iterable[str | None], between: str = "") -> Markup:
    """Children one after the other, each escaped unless it is markup; None is nothing."""
    return Markup(between.join(_safe(child) for child in children if child is not None))


def breakable(name: str) -> Markup:
    """A name that a narrow column may break after its dots."""
    return joined(name.split("."), f".{element('wbr').removesuffix('</wbr>')}")


def _safe(text: str) -> str:
    return text if isinstance(text, Markup) else escape(text, quote=True)
