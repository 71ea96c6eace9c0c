"""Small charts as inline SVG: points with intervals along a line or one below the other, and one bar of parts.

Colours come from the page.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gr_core.report.markup import Markup, element, number

WIDTH, HEIGHT = 360, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 10, 12, 24
_TICKS = 4
_LABELS = 5
_BAR = 26  # height of a bar of parts
NUM_COLOURS = 6
_NAMES = 120  # width left for names one below the other
_LONGEST = 19  # characters that fit there
_LANE = 20  # height of one of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One place along the x axis."""

    label: str
    value: float | None
    """None: not defined, nothing is drawn and the line breaks."""
    spread: float | None = None
    """Half of the interval's width, in the value's unit."""
    hollow: bool = False
    about: str = ""
    """Told where the pointer rests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One value with its interval, beside its name."""

    name: str
    value: float | None
    """None: not defined, only the name is shown."""
    low: float | None = None
    high: float | None = None
    hollow: bool = False
    about: str = ""
    """Told where the pointer rests."""


def lanes(rows: Sequence[Lane], name: str, *, reference: float | None = None) -> Markup:
    """Return values one below the other, each with its interval, on one x axis.

    Args:
        rows: From top to bottom.
        name: What is drawn, for those who hear the page.
        reference: A value marked by a dashed line.
    """
    ends = [end for row in rows for end in (row.value, row.low, row.high) if end is not None and row.value is not None]
    left, right = _ends([*ends, *([] if reference is None else [reference])])
    height = _TOP + _LANE * len(rows) + _BOTTOM

    def across(value: float) -> float:
        return _NAMES + (WIDTH - _NAMES - _RIGHT) * (value - left) / (right - left)

    step = _step(left, right)
    drawn = []
    for tick in (step * n for n in range(math.ceil(left / step), math.floor(right / step) + 1)):
        label = number(tick, _digits(step))
        drawn.append(_line(across(tick), _TOP, across(tick), height - _BOTTOM, class_="grid"))
        drawn.append(element("text", label, x=f"{across(tick):.1f}", y=height - 6, text_anchor="middle"))
    if reference is not None:
        drawn.append(_line(across(reference), _TOP, across(reference), height - _BOTTOM, class_="reference"))
    for place, row in enumerate(rows):
        y = _TOP + _LANE * (place + 0.5)
        short = row.name if len(row.name) <= _LONGEST else row.name[: _LONGEST - 1] + "\u2026"
        marks = [element("title", row.about or row.name), element("text", short, x=0, y=f"{y + 4:.1f}")]
        if row.value is not None and row.low is not None and row.high is not None:
            marks.append(_line(across(row.low), y, across(row.high), y, class_="interval"))
        if row.value is not None:
            kind = "point hollow" if row.hollow else "point"
            marks.append(element("circle", cx=f"{across(row.value):.1f}", cy=f"{y:.1f}", r=4, class_=kind))
        drawn.append(element("g", *marks))
    return element("svg", *drawn, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=name)


def series(points: Sequence[Point], name: str, *, reference: float | None = None) -> Markup:
    """Return points in order, joined by a line, each with its interval.

    Args:
        points: From left to right, evenly spaced.
        name: What is drawn, for those who hear the page.
        reference: A value marked by a dashed line.
    """
    low, high = _range(points, reference)
    inside = WIDTH - _LEFT - _RIGHT

    def across(place: int) -> float:
        return _LEFT + inside * (place + 0.5) / max(len(points), 1)

    def down(value: float) -> float:
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low)

    step = _step(low, high)
    drawn = [_grid(step * n, down(step * n), step) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    if reference is not None:
        drawn.append(_line(_LEFT, down(reference), WIDTH - _RIGHT, down(reference), class_="reference"))
    drawn += _joined([(across(n), None if p.value is None else down(p.value)) for n, p in enumerate(points)])
    for place, point in enumerate(points):
        if point.value is not None:
            drawn += _mark(point, across(place), down)
    drawn += [
        element("text", points[n].label, x=f"{across(n):.1f}", y=HEIGHT - 6, text_anchor="middle")
        for n in _labelled(len(points))
    ]
    return element("svg", *drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=name)


def parts_bar(parts: Mapping[str, float], name: str) -> Markup:
    """Return one bar whose pieces are as long as their share; the n-th piece has colour n of the page.

    Args:
        parts: Name to size, none negative.
        name: What is drawn, for those who hear the page.
    """
    whole = sum(parts.values()) or 1.0
    drawn: list[Markup] = []
    left = 0.0
    for place, (part, size) in enumerate(parts.items()):
        wide = WIDTH * size / whole
        about = element("title", f"{part}: {size / whole:.1%}")
        shape = element("rect", x=f"{left:.2f}", y=0, width=f"{wide:.2f}", height=_BAR, class_=colour(place))
        drawn.append(element("g", about, shape))
        left += wide
    return element("svg", *drawn, viewBox=f"0 0 {WIDTH} {_BAR}", role="img", aria_label=name)


def colour(place: int) -> str:
    """Return the class of the n-th colour."""
    return f"c{place % NUM_COLOURS}"


def _range(points: Sequence[Point], reference: float | None) -> tuple[float, float]:
    """Return the ends of the y axis: all values with their intervals and the reference, and a little room."""
    ends = [] if reference is None else [reference]
    for point in points:
        if point.value is not None:
            ends += [point.value - (point.spread or 0.0), point.value + (point.spread or 0.0)]
    return _ends(ends)


def _ends(ends: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis that holds these values, and a little room."""
    if not ends:
        return 0.0, 1.0
    room = 0.08 * (max(ends) - min(ends)) or 0.05 * abs(ends[0]) or 0.05
    return min(ends) - room, max(ends) + room


def _step(low: float, high: float) -> float:
    """Return a round distance of grid lines between two values, for about as many lines as there is room."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= rough * 0.999)


def _labelled(count: int) -> list[int]:
    """Return the places whose labels fit: evenly spaced, the last one always."""
    step = max(1, math.ceil(count / _LABELS))
    return [n for n in range(count) if (count - 1 - n) % step == 0]


def _line(x1: float, y1: float, x2: float, y2: float, *, class_: str) -> Markup:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return element("line", **{key: f"{value:.1f}" for key, value in ends.items()}, class_=class_)


def _grid(tick: float, y: float, step: float) -> Markup:
    label = element("text", number(tick, _digits(step)), x=_LEFT - 5, y=f"{y + 4:.1f}", text_anchor="end")
    return element("g", _line(_LEFT, y, WIDTH - _RIGHT, y, class_="grid"), label)


def _digits(step: float) -> int:
    """Return as many digits as tell neighbours apart."""
    return max(0, math.ceil(-math.log10(step) - 1e-9))


def _joined(places: Sequence[tuple[float, float | None]]) -> list[Markup]:
    """Return lines through neighbours that both have a value."""
    pairs = itertools.pairwise(places)
    return [_line(x1, y1, x2, y2, class_="run") for (x1, y1), (x2, y2) in pairs if y1 is not None and y2 is not None]


def _mark(point: Point, x: float, down: Callable[[float], float]) -> list[Markup]:
    """Return a point and its interval."""
    value = point.value or 0.0
    found = []
    if point.spread:
        top, bottom = down(value + point.spread), down(value - point.spread)
        found = [_line(x, top, x, bottom, class_="interval")]
        found += [_line(x - 3, y, x + 3, y, class_="interval") for y in (top, bottom)]
    kind = "point hollow" if point.hollow else "point"
    dot = element("circle", cx=f"{x:.1f}", cy=f"{down(value):.1f}", r=4, class_=kind)
    return [*found, element("g", element("title", point.about or f"{point.label}: {number(value)}"), dot)]
