"""The page of a night: one HTML file that needs nothing beside it, no script and no request, readable on a phone.

Values in, HTML out. Every word that comes from data or config goes through gr_core.report.markup, which escapes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gr_core.report.attributed import advice_rows, figure_rows, split, split_rows
from gr_core.report.charts import Point, colour, parts_bar, series
from gr_core.report.markup import DASH, Markup, element, join, number, table
from gr_core.report.next_night import section as next_night
from gr_core.report.nightly_page import NightPage, Past, interval
from gr_core.report.sliced import slice_section
from gr_core.report.status import EVENT_KEYS, ROW_KEYS, SAMPLED_KEYS

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--dim:#5b6570;--page:#fff;--soft:#eef1f4;--run:#2563a8;--good:#18794e;
--warn:#8a5a00;--bad:#b3261e;--c0:#2f7d4f;--c1:#2b8aa8;--c2:#8d4fb0;--c3:#b98900;--c4:#3b62c4;--c5:#8a929b}
@media (prefers-color-scheme:dark){:root{--ink:#e4e8ec;--dim:#9aa5b1;--page:#14181d;--soft:#222930;--run:#6ea8e8;
--good:#5bc48e;--warn:#e0b04a;--bad:#f28b82;--c0:#57b37d;--c1:#57b7d3;--c2:#b98ad6;--c3:#d8ae3c;--c4:#7f9eec;--c5:#7b858f}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:60rem;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:break-word}
h1{font-size:1.5rem;margin:0 0 .5rem}h2{font-size:1.15rem;margin:2rem 0 .5rem}h3{font-size:1rem;margin:1rem 0 .25rem}
p,ul{margin:.25rem 0 .75rem}.dim{color:var(--dim);font-size:.875rem}
.promoted,.completed{color:var(--good)}.held,.warning,.hold,.warn{color:var(--warn)}
.failed,.cancelled,.error,.stop{color:var(--bad)}
.scroll{overflow-x:auto;margin:.5rem 0}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .75rem .25rem 0;text-align:right;white-space:nowrap;border-bottom:1px solid var(--soft)}
th:first-child,td:first-child{text-align:left}.words td{white-space:normal;text-align:left}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:.5rem 1.5rem}
figure{margin:0}figcaption{font-size:.875rem}svg{display:block;width:100%;max-width:30rem;height:auto}
svg text{font-size:11px;fill:var(--dim)}
.grid{stroke:var(--soft)}.run{stroke:var(--run);stroke-width:1.5}.interval{stroke:var(--run);opacity:.6}
.reference{stroke:var(--dim);stroke-dasharray:4 3}
.point{fill:var(--run);stroke:var(--run);stroke-width:1.5}.hollow{fill:var(--page)}
.c0{fill:var(--c0)}.c1{fill:var(--c1)}.c2{fill:var(--c2)}.c3{fill:var(--c3)}.c4{fill:var(--c4)}.c5{fill:var(--c5)}
.key{background:currentColor}.key.c0{color:var(--c0)}.key.c1{color:var(--c1)}.key.c2{color:var(--c2)}
.key.c3{color:var(--c3)}.key.c4{color:var(--c4)}.key.c5{color:var(--c5)}.key{display:inline-block;width:.7rem;height:.7rem;margin-right:.4rem}
"""
_METRICS = ("auc", "ne", "calibration", "ece")
_INTERVALS = (
    "The parent's metrics on each night's new events, which it has not trained on. Bars are 95 % intervals over users "
    "(nights of older releases have none); hollow points are nights that were not promoted, a gap is a night without "
    "enough of either class."
)


def render_page(page: NightPage) -> str:
    """Return the whole file as text, UTF-8 when written; equal values give equal text."""
    title = f"Night {page.key}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(STYLE)),
    )
    sections = [_summary(page, title), _decision(page), _over_nights(page), _metrics(page)]
    sections += [slice_section(page.slices, page.past[-1].figures if page.past else {}), _checkpoints(page)]
    sections += [_data(page), _time(page), _identity(page)]
    return "<!doctype html>\n" + element("html", head, element("body", *sections), lang="en") + "\n"


def _section(title: str, *children: str) -> Markup:
    return element("section", element("h2", title), *children)


def _dim(text: str) -> Markup:
    return element("p", text, class_="dim")


def _summary(page: NightPage, title: str) -> Markup:
    night = page.night
    version = DASH if night["version"] is None else str(night["version"])
    parent = "none" if night["parent"] is None else f"version {night['parent']}"
    line = join(
        [
            element("strong", night["state"], class_=night["state"]),
            ", gate: ",
            element("strong", night["gate"], class_=night["gate"]),
            f", version {version}, parent {parent}, attempts {night['attempts']}",
            f", experiment {night['experiment']}" if night.get("experiment") else "",
            f", {night['mode']}" if night["mode"] != "nightly" else "",
        ]
    )
    return element("header", element("h1", title), element("p", line))


def _decision(page: NightPage) -> Markup:
    """Return what the gate said, why, and on which figures."""
    figures = page.past[-1].figures if page.past else {}
    reasons = element("ul", *(element("li", reason) for reason in page.night["reasons"] or ["no reason given"]))
    checked = next_night(page.night.get("next_night"))
    rows = [
        (name, *(number(figures.get(f"{key}_{side}")) for side in ("challenger", "champion")))
        for key, name in (("ne", "NE"), ("auc", "AUC"), ("calibration", "calibration"))
    ]
    if not figures:
        return _section("Decision", reasons, _dim("The gate has decided nothing."), *checked)
    compared = [_dim(_on_what(figures)), table(("holdout", "challenger", "champion"), rows)]
    compared += [element("p", text) for text in _differences(figures)]
    decided = [
        Point(
            label=one.date[5:],
            value=one.figures.get("difference"),
            spread=interval(one.figures.get("standard_error")),
            hollow=one.gate != "promoted",
            about=f"{one.date}, {one.gate}: {number(one.figures.get('difference'))}",
        )
        for one in page.past
    ]
    if any(point.value is not None for point in decided):
        name = "NE of challenger against champion, relative, over nights"
        drawn = series(decided, name, reference=figures.get("margin"))
        caption = f"{name}: below 0 the challenger is better; dashed, the margin; bars, 95 % intervals"
        compared.append(_figure(drawn, caption))
    return _section("Decision", reasons, *compared, *checked)


def _on_what(figures: Mapping[str, Any]) -> str:
    counts = (
        f"{key} {number(figures[key])}" for key in ("count", "positives", "users") if figures.get(key) is not None
    )
    return f"On {figures.get('action', 'the gate action')}: {', '.join(counts)}"


def _differences(figures: Mapping[str, Any]) -> list[str]:
    """Return sentences on the challenger against champion, last full retrain, and what the registry serves."""
    said = []
    if figures.get("difference") is not None:
        keys = (("standard_error", "standard error"), ("upper_bound", "upper bound"), ("margin", "margin"))
        told = [f"{name} {figures[key]:.2%}" for key, name in keys if figures.get(key) is not None]
        said.append(", ".join([f"NE differs by {figures['difference']:+.2%}", *told]))
    if figures.get("cumulative_difference") is not None:
        said.append(
            f"From the last full retrain, version {figures.get('full_retrain')}, NE differs by "
            f"{figures['cumulative_difference']:+.2%}, upper bound {figures['cumulative_upper_bound']:.2%}, margin "
            f"{figures['cumulative_margin']:.2%}"
        )
    if figures.get("artifact_difference") is not None:
        apart = f"{figures['artifact_difference']:.1g}"
        said.append(
            f"The registered model, loaded in a fresh process, scores within {apart} of the night's own evaluation"
        )
    return said


def _figure(drawn: Markup, caption: str) -> Markup:
    return element("figure", element("figcaption", caption), drawn)


def _over_nights(page: NightPage) -> Markup:
    """Return AUC, NE and calibration of each action over the nights up to this one."""
    actions = list(dict.fromkeys(action for one in page.past for action in one.next_day))
    parts: list[Markup] = []
    for action in actions:
        charts = [
            _figure(series([_point(one, action, key) for one in page.past], f"{name} of {action} over nights"), name)
            for key, name in (("auc", "AUC"), ("ne", "NE"))
        ]
        known = [_point(one, action, "calibration") for one in page.past]
        drawn = series(known, f"calibration of {action} over nights", reference=1.0)
        charts.append(_figure(drawn, "calibration, predicted over observed; dashed, 1"))
        parts += [element("h3", action), element("div", *charts, class_="charts")]
    rows = [
        (
            f"{one.date} {action}",
            one.gate,
            *(_with_interval(one, action, key) for key in ("auc", "ne")),
            *(number(one.next_day[action].get(key)) for key in ("calibration", "count", "positives")),
        )
        for one in page.past
        for action in actions
        if action in one.next_day
    ]
    head = ("night, action", "gate", "AUC", "NE", "calibration", "count", "positives")
    figures = element("details", element("summary", "The figures"), table(head, rows))
    return _section("Over nights", _dim(_INTERVALS), *parts, figures)


def _point(past: Past, action: str, key: str) -> Point:
    found = past.next_day.get(action, {})
    value = found.get(key)
    count = f"count {number(found.get('count', 0))}, positives {number(found.get('positives', 0))}"
    about = f"{past.date}, {past.gate}: {_with_interval(past, action, key)}, {count}"
    spread = past.spread.get(action, {}).get(key)
    return Point(label=past.date[5:], value=value, spread=spread, hollow=past.gate != "promoted", about=about)


def _with_interval(past: Past, action: str, key: str) -> str:
    value, spread = past.next_day.get(action, {}).get(key), past.spread.get(action, {}).get(key)
    return number(value) + ("" if value is None or spread is None else f" ± {spread:.4f}")


def _metrics(page: NightPage) -> Markup:
    """Return this night's metrics on each set of events, undefined ones as a dash beside their count."""
    rows = [
        (f"{name}: {action}", *(number(found.get(key)) for key in (*_METRICS, "count", "positives")))
        for name, by_action in page.metrics.items()
        for action, found in by_action.items()
    ]
    if not rows:
        return _section("Metrics", _dim("Nothing was scored or trained."))
    return _section("Metrics", table(("events", "AUC", "NE", "calibration", "ECE", "count", "positives"), rows))


def _checkpoints(page: NightPage) -> Markup:
    """Return the holdout NE of the checkpoints that were scored while training went on."""
    found: Sequence[Mapping[str, Any]] = page.night.get("checkpoints") or []
    if not found:
        return _section("Checkpoints", _dim("None was scored while training went on."))
    actions = list(found[-1]["holdout"])
    charts = [
        _figure(
            series(
                [Point(label=str(one["step"]), value=one["holdout"][action]["ne"], hollow=True) for one in found],
                f"holdout NE of {action} by step",
            ),
            f"{action}: NE on the holdout by step",
        )
        for action in actions
    ]
    rows = [
        (
            f"{one['step']}{' (final)' if one['final'] else ''}",
            "yes" if one["scored_during_training"] else "no",
            *(number(one["holdout"][action][key]) for action in actions for key in ("auc", "ne")),
            *(number(one["holdout"][action].get("count")) for action in actions[:1]),
        )
        for one in found
    ]
    columns = [f"{action} {name}" for action in actions for name in ("AUC", "NE")]
    head = ("step", "before training ended", *columns, *(["count"] if actions else []))
    return _section("Checkpoints", element("div", *charts, class_="charts"), table(head, rows))


def _data(page: NightPage) -> Markup:
    """Return the counts of rows and events, and what the data checks found."""
    night = page.night
    rows = [(key, number(night["rows"][key])) for key in ROW_KEYS]
    rows += [(f"{key} (actions)", number(value)) for key, value in night.get("action_rows", {}).items()]
    events = [(key.removesuffix("_events"), number(night[key])) for key in (*EVENT_KEYS, *SAMPLED_KEYS) if key in night]
    parts = [table(("rows", "number"), rows), table(("events", "number"), events)]
    if page.quarantined:
        counted = sorted(page.quarantined.items(), key=lambda item: (-item[1], item[0]))
        parts.append(table(("quarantined by reason", "rows"), [(reason, number(count)) for reason, count in counted]))
    told = (element("p", f"{one.get('level')}: {one.get('message')}", class_=one.get("level")) for one in page.findings)
    return _section("Data", element("div", *parts, class_="charts"), *told)


def _time(page: NightPage) -> Markup:
    """Return the seconds of each stage, where a training step's time goes, padding and what would make it cheaper."""
    seconds = page.night["seconds"]
    parts = [table(("stage", "seconds"), [(name, number(float(value), 1)) for name, value in seconds.items()])]
    measured = figure_rows({"perf": page.perf})
    if measured:
        parts.append(table(("training", "value"), [(row["figure"], row["value"]) for row in measured]))
    value = page.training
    if value is None:
        return _section("Time", element("div", *parts, class_="charts"), _dim("No training step was measured."))
    drawn = parts_bar(split(value), "where a training step's time goes")
    rows = [
        (join([element("span", class_=f"key {colour(place)}"), row["part"]]), row["ms_a_step"], row["share"])
        for place, row in enumerate(split_rows(value))
    ]
    step = [element("h3", f"A training step, mean of {value['steps']}"), drawn]
    step.append(table(("part", "ms a step", "share"), rows))
    advice = [(row["action"], row["expected_saving"]) for row in advice_rows(value)]
    if advice:
        step.append(element("div", table(("advice", "saves about"), advice), class_="words"))
    return _section("Time", element("div", *parts, class_="charts"), *step)


def _identity(page: NightPage) -> Markup:
    rows = list(page.pins.items())
    parts = [element("div", table(("what the night was pinned to", ""), rows), class_="words")]
    if page.missing:
        parts.append(_dim(f"No result was left by: {', '.join(page.missing)}."))
    return _section("Identity", *parts)
