"""Charts as inline SVG: everything drawn lies inside, nothing is drawn for what is not defined."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from gr_core.report.charts import HEIGHT, WIDTH, Lane, Point, lanes, parts_bar, series


def points(*values: float | None, spread: float | None = None) -> list[Point]:
    return [Point(label=f"06-{n + 1:02d}", value=value, spread=spread) for n, value in enumerate(values)]


@pytest.mark.parametrize(
    "values",
    [(0.7, 0.72, 0.69), (0.5,), (0.7, 0.7), (0.0, 0.0), (-1e-6, 1e-6), (1e9, -1e9), (None, None), ()],
    ids=["some", "one", "equal", "zero", "tiny", "huge", "undefined", "none"],
)
def test_whatever_the_values_all_lies_inside(values):
    """Points, intervals, reference and grid are within the view box."""
    drawn = ET.fromstring(series(points(*values, spread=0.01), "AUC", reference=0.6))

    ys = [float(found.get(key)) for found in drawn.iter() for key in ("y", "y1", "y2", "cy") if found.get(key)]
    xs = [float(found.get(key)) for found in drawn.iter() for key in ("x", "x1", "x2", "cx") if found.get(key)]
    assert all(0 <= y <= HEIGHT for y in ys)
    assert all(0 <= x <= WIDTH for x in xs)
    assert len(list(drawn.iter("circle"))) == sum(value is not None for value in values)
    assert len([line for line in drawn.iter("line") if line.get("class") == "grid"]) >= 2


@pytest.mark.parametrize("values", [(0.75, 0.7503), (0.5, 0.9), (10.0, 900.0), (-0.02, 0.01)])
def test_grid_lines_are_told_apart(values):
    """Their labels differ, are round, and rise with the line."""
    drawn = ET.fromstring(series(points(*values), "AUC"))

    labels = [(float(text.get("y")), text.text) for text in drawn.iter("text") if text.get("text-anchor") == "end"]
    numbers = [float(label) for _, label in sorted(labels, reverse=True)]
    assert len(numbers) >= 2
    assert numbers == sorted(set(numbers))


def test_a_gap_breaks_the_line_and_a_higher_value_lies_higher():
    """Four nights, the third undefined: one line, between the first two."""
    drawn = ET.fromstring(series(points(0.6, 0.8, None, 0.7), "AUC"))

    runs = [line for line in drawn.iter("line") if line.get("class") == "run"]
    first, second, last = (float(dot.get("cy")) for dot in drawn.iter("circle"))
    assert [(float(run.get("y1")), float(run.get("y2"))) for run in runs] == [(first, second)]
    assert second < last < first


def test_an_interval_is_as_long_as_its_spread():
    """Twice the spread is twice the line, and a point without one has none."""
    wide, narrow, none = (Point(label="n", value=1.0, spread=spread) for spread in (0.2, 0.1, None))
    drawn = ET.fromstring(series([wide, narrow, none], "NE"))

    bars = [line for line in drawn.iter("line") if line.get("class") == "interval" and line.get("x1") == line.get("x2")]
    lengths = [float(bar.get("y2")) - float(bar.get("y1")) for bar in bars]
    assert len(lengths) == 2
    assert lengths[0] == pytest.approx(2 * lengths[1], abs=0.2)


def test_parts_fill_the_bar():
    """Pieces stand side by side, each as long as its share; nothing measured draws nothing."""
    drawn = ET.fromstring(parts_bar({"forward": 3.0, "data_wait": 1.0}, "split"))

    pieces = [(float(rect.get("x")), float(rect.get("width"))) for rect in drawn.iter("rect")]
    assert pieces == [(0.0, 270.0), (270.0, 90.0)]
    assert [float(r.get("width")) for r in ET.fromstring(parts_bar({"forward": 0.0}, "split")).iter("rect")] == [0.0]


@pytest.mark.parametrize(
    "values",
    [(0.7, 0.72, None), (0.5,), (0.0, 0.0), (-1e-6, 1e6), (None,), ()],
    ids=["some", "one", "zero", "huge", "undefined", "none"],
)
def test_lanes_lie_inside_and_undefined_ones_have_their_name_alone(values):
    """Every value has its lane with name, interval and dot; one without a value only its name, and a long one is cut."""
    rows = [
        Lane(name=f"surface={'x' * 30}{n}", value=value, low=None if value is None else value - 0.01, high=value)
        for n, value in enumerate(values)
    ]
    text = lanes(rows, "AUC", reference=0.6)
    drawn = ET.fromstring(text)

    width, height = map(float, drawn.get("viewBox").split()[2:])
    assert all(
        0 <= float(found.get(key)) <= height for found in drawn.iter() for key in ("y", "y1", "cy") if found.get(key)
    )
    assert all(
        0 <= float(found.get(key)) <= width
        for found in drawn.iter()
        for key in ("x", "x1", "x2", "cx")
        if found.get(key)
    )
    assert len(list(drawn.iter("circle"))) == sum(value is not None for value in values)
    names = [group.find("text").text for group in drawn.iter("g") if group.find("title") is not None]
    assert [len(name) for name in names] == [19] * len(values)
    assert [group.find("title").text for group in drawn.iter("g") if group.find("title") is not None] == [
        r.name for r in rows
    ]
