"""What is told of the next-night check: a sentence, a table, a finding of `status`, a part of a night's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gr_core.lake.entries import Entry
from gr_core.lake.ledger import NightRecord, champion
from gr_core.report.markup import DASH, Markup, element, number, table

_METRICS = (("ne", "NE"), ("auc", "AUC"), ("calibration", "calibration"))
_FIGURES = ("count", "positives", "users", "difference", "lower_bound", "upper_bound", "margin", "rows_champion")


def sentence(checked: Mapping[str, Any]) -> str:
    """Return the check in one sentence: who was compared with whom, what came of it, and why."""
    if str(checked["reason"]).startswith("not checked"):
        return str(checked["reason"])
    two = f"champion {checked['champion']} against {checked['previous']}, the one before it"
    word = "not worse" if not checked["worse"] else "worse"
    then = ", rolled back" if checked.get("rolled_back") else ", not rolled back" if checked["worse"] else ""
    return f"{two}: {word}{then}; {checked['reason']}"


def rows(checked: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the check's figures as rows of text: figure, champion, previous; those of both stand under champion."""
    figures = checked.get("figures") or {}
    found = [{"figure": "version", "champion": _text(checked["champion"]), "previous": _text(checked["previous"])}]
    for key, name in _METRICS:
        values = {side: _text(figures.get(f"{key}_{side}")) for side in ("champion", "previous")}
        found += [{"figure": name, **values}] if figures else []
    found += [{"figure": key, "champion": _text(figures[key]), "previous": ""} for key in _FIGURES if key in figures]
    told = {"worse": checked["worse"], "rolled back": checked.get("rolled_back", False), "reason": checked["reason"]}
    return found + [{"figure": key, "champion": str(value), "previous": ""} for key, value in told.items()]


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def findings(records: Sequence[NightRecord], entries: Sequence[Entry]) -> list[dict[str, str]]:
    """Return the findings of `status`: the champion stands because a check rolled back to it, or is worse and stands.

    Args:
        records: The nights by date.
        entries: The whole journal.
    """
    best = champion(entries)
    move = next((e for e in entries if best is not None and e.seq == best.seq), None)
    if best is not None and move is not None and move.kind == "rollback" and move.payload.get("checked_by"):
        night, bad = move.payload["checked_by"], move.payload["previous"]
        message = (
            f"the champion is version {best.version} again: version {bad} was {move.payload['reason']}; models that "
            f"started from version {bad} are held, the next night starts from version {best.version} and covers what it "
            f"has not learned; `daybreak promote {bad}` brings it back"
        )
        return [{"level": "warning", "where": f"{night} next-night check", "message": message}]
    newest = next((record for record in reversed(records) if record.is_main), None)
    told = {} if newest is None else (newest.status or {}).get("next_night") or {}
    if newest is not None and best is not None and told.get("worse") and told["champion"] == best.version:
        message = (
            f"champion {told['champion']} is worse than version {told['previous']} before it and was not rolled back "
            f"(next_night.rollback): {told['reason']}; `daybreak rollback` goes back"
        )
        return [{"level": "warning", "where": f"{newest.key} next-night check", "message": message}]
    return []


def section(checked: Mapping[str, Any] | None) -> list[Markup]:
    """Return what a night's page shows of its check; nothing for a night of a release without one."""
    if not checked:
        return []
    figures = checked.get("figures") or {}
    head = element("h3", "The champion on its first new events")
    told = element("p", sentence(checked), class_="held" if checked["worse"] else "dim")
    if not figures:
        return [head, told]
    lines = [
        (name, *(number(figures.get(f"{key}_{side}")) for side in ("champion", "previous"))) for key, name in _METRICS
    ]
    versions = [DASH if checked[side] is None else f"version {checked[side]}" for side in ("champion", "previous")]
    return [head, told, table(("new events, all users", *versions), lines)]
