"""HTML from values by functions: whatever is not Markup already is escaped, so no name of a feed can become a tag."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

DASH = "-"
"""Shown where a figure is not defined."""
_VOID = frozenset({"meta", "br"})


class Markup(str):
    """Text that is HTML already and is not escaped again; only `element` and `join` make it."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: object) -> Markup:
    """Return one element.

    Args:
        name: Of the tag.
        children: Text, which is escaped, or Markup.
        attributes: By name, with `_` for `-` and one at the end ignored (class_); None leaves an attribute out.
    """
    pairs = ((key.removesuffix("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    head = name + "".join(f' {key}="{escape(str(value))}"' for key, value in pairs)
    return Markup(f"<{head}>") if name in _VOID else Markup(f"<{head}>{join(children)}</{name}>")


def join(children: Iterable[str]) -> Markup:
    """Return children one after the other, those that are no Markup escaped."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """Return a table that scrolls by itself where it is wider than the page; all but the first column are figures."""
    top = element("tr", *(element("th", name, scope="col") for name in head))
    lines = (element("tr", *(element("td", cell) for cell in row)) for row in rows)
    whole = element("table", element("thead", top), element("tbody", *lines))
    return element("div", whole, class_="scroll")


def number(value: float | int | None, digits: int = 4) -> str:
    """Return a figure as a person reads it: whole numbers with commas, others with `digits`; a dash for None."""
    if value is None:
        return DASH
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}f}"
