"""Metrics by slice on the page of a night, and as rows of text for the Prefect table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gr_core.report.charts import Lane, lanes
from gr_core.report.markup import DASH, Markup, element, number, table

_ALL = "all"
_NORMAL = 1.959964  # of a two-sided 95 % interval
_COLUMNS = {
    "auc": "AUC",
    "ne": "NE",
    "calibration": "calibration",
    "gauc_user_mean": "GAUC, user mean",
    "gauc_impression_weighted": "GAUC, impression weighted",
    "count": "count",
    "positives": "positives",
    "users": "users",
}
_ROLES = {"next_day": "next day, by the parent", "holdout": "holdout, by the challenger"}
_ABOUT = (
    "Slices are those of evaluation.slices. GAUC is AUC within users: the mean over users, and weighted by their "
    "impressions; users with one class only are in neither. A dash is a metric that is not defined: look at the counts "
    "beside it. Intervals are 95 %, over users, and wide where few users are."
)
_GATE = (
    "NE of challenger against champion by slice, relative: below 0 the challenger is better. Bars are the gate's interval, "
    "each end one-sided at gate.confidence; a slice whose bar lies wholly beyond the dashed line, gate.slice_margin, holds "
    "the challenger"
)


def slice_section(rows: Sequence[Mapping[str, Any]], figures: Mapping[str, Any]) -> Markup:
    """Return the page's section on slices.

    Args:
        rows: `NightPage.slices`.
        figures: The gate's; empty where it has not spoken.
    """
    shown = [row for row in rows if row["role"] != "holdout" or row["model"] == _challenger(rows)]
    if not any(row["slice"] != _ALL for row in shown):
        return element("section", element("h2", "Slices"), element("p", "No slice was measured.", class_="dim"))
    first = figures.get("action") or shown[0]["action"]
    parts: list[Markup] = [
        element("p", _ABOUT, class_="dim"),
        element("div", *_charts(shown, figures, first), class_="charts"),
    ]
    if figures.get("slices"):
        parts.append(_verdicts(figures))
    actions = sorted(dict.fromkeys(row["action"] for row in shown), key=lambda action: action != first)
    for action in actions:
        tables = [part for role in _ROLES for part in _table(shown, role, action)]
        parts.append(element("details", element("summary", f"The figures of {action}"), *tables))
    return element("section", element("h2", "Slices"), *parts)


def _challenger(rows: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the version that the gate judged: its rows stand before the champion's."""
    return next((row["model"] for row in rows if row["role"] == "holdout"), None)


def _charts(rows: Sequence[Mapping[str, Any]], figures: Mapping[str, Any], action: str) -> list[Markup]:
    found = []
    scored = next((role for role in _ROLES if any(row["role"] == role for row in rows)), "holdout")
    for key, name in (("auc", "AUC"), ("ne", "NE")):
        drawn = [_lane(row, key) for row in rows if row["role"] == scored and row["action"] == action]
        caption = f"{name} of {action} by slice, {_ROLES[scored]}"
        found.append(_figure(lanes(drawn, caption), caption))
    judged = [_judged(one) for one in figures.get("slices") or [] if one["difference"] is not None]
    if judged:
        found.append(_figure(lanes(judged, "NE difference by slice", reference=figures.get("slice_margin")), _GATE))
    return found


def _lane(row: Mapping[str, Any], key: str) -> Lane:
    value, error = row[key], row.get(f"{key}_error")
    half = None if value is None or error is None else _NORMAL * error
    about = f"{row['slice']}: {_with_error(row, key)}, {_counts(row)}"
    ends = {} if half is None else {"low": value - half, "high": value + half}
    return Lane(name=row["slice"], value=value, about=about, hollow=row["slice"] == _ALL, **ends)


def _judged(one: Mapping[str, Any]) -> Lane:
    about = f"{one['slice']}: {one['difference']:+.2%}, {one['verdict']}, {_counts(one)}"
    return Lane(
        name=one["slice"],
        value=one["difference"],
        low=one["lower"],
        high=one["upper"],
        about=about,
        hollow=one["verdict"] != "veto",
    )


def _counts(row: Mapping[str, Any]) -> str:
    return f"count {number(row['count'])}, positives {number(row['positives'])}, users {number(row['users'])}"


def _figure(drawn: Markup, caption: str) -> Markup:
    return element("figure", element("figcaption", caption), drawn)


def _verdicts(figures: Mapping[str, Any]) -> Markup:
    rows = [
        (
            one["slice"],
            one["verdict"].replace("_", " "),
            *(DASH if one[key] is None else f"{one[key]:+.2%}" for key in ("difference", "lower", "upper")),
            *(number(one[key]) for key in ("positives", "count", "users")),
        )
        for one in figures["slices"]
    ]
    head = ("slice", "gate", "NE difference", "lower", "upper", "positives", "count", "users")
    return element("details", element("summary", "What the gate found by slice"), table(head, rows))


def _table(rows: Sequence[Mapping[str, Any]], role: str, action: str) -> list[Markup]:
    own = [row for row in rows if row["role"] == role and row["action"] == action]
    if not own:
        return []
    cells = [(row["slice"], *(_with_error(row, key) for key in _COLUMNS)) for row in own]
    return [element("h3", f"{action}, {_ROLES[role]}"), table(("slice", *_COLUMNS.values()), cells)]


def _with_error(row: Mapping[str, Any], key: str) -> str:
    error = row.get(f"{key}_error")
    return number(row[key]) + (
        "" if row[key] is None or error is None else f" \N{PLUS-MINUS SIGN} {_NORMAL * error:.4f}"
    )


def slice_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return measured slices as rows of text for people: one a (role, model, slice, action)."""
    return [
        {
            "events": row["role"],
            "model": str(row["model"]),
            "action": row["action"],
            "slice": row["slice"],
            **{name: number(row[key]) for key, name in _COLUMNS.items()},
        }
        for row in rows
    ]
