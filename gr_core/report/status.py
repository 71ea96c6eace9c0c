"""`daybreak status`: the one object of example 7, built from journal entries alone, and its table for a person."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from datetime import date as Date
from typing import Any
from zoneinfo import ZoneInfo

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gr_core.lake.entries import Entry
from gr_core.lake.ledger import Champion, NightRecord, champion, nights
from gr_core.report import next_night, retrained

ROW_KEYS = ("read", "committed", "duplicates", "quarantined", "forgotten")
EVENT_KEYS = ("due_events", "supervised_events", "new_events", "holdout_events", "late_events")
SAMPLED_KEYS = ("replayed_events", "sampled_out_events")
"""Counts of nights that sampled: old events trained on again (in no other count), and supervised ones of which no label was
kept (train.replay_fraction, train.negative_fraction)."""
STALE_DAYS = 2  # alerts.stale_champion_days, by default
STAGES = ("ingest", "sequences", "pack", "evaluate", "train", "register", "gate")
_METRIC_KEYS = ("auc", "ne", "count", "positives")
_GATES = {"promote": "promoted", "hold": "held", None: "none"}
_STYLES = {"promoted": "green", "held": "yellow", "failed": "red", "cancelled": "red", "running": "cyan"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """When the night of the day before should be done (nightly.ready_by), and the moment it is asked."""

    ready_by: str
    """HH:MM in the lake's zone."""
    zone: str
    now_us: int


def build_status(
    entries: Sequence[Entry],
    *,
    today: Date | None,
    running: str | None = None,
    retraining: str | None = None,
    supervised: Sequence[str] | None = None,
    promise: Promise | None = None,
    stale_days: int = STALE_DAYS,
) -> dict[str, Any]:
    """Return the object of `daybreak status --json`.

    Args:
        entries: The whole journal, in order.
        today: Today in the lake's zone; the champion's age counts from it. None: days that are not the calendar's, so it
            has none.
        running: Key of the night whose lock is held. A night that the journal left running and that is not this
            one was interrupted: its process is gone, so it is shown as failed.
        retraining: Likewise, key of the full retrain whose lock is held.
        supervised: Names of the supervised actions, so that nights that scored nothing name them too. None: those
            of the newest night's config.
        promise: Set: a missed `ready_by` is a finding.
        stale_days: A champion older than this many days is a finding.

    Returns:
        {"champion": {"version", "date", "age_days"} or null, "findings": [{"level", "where", "message"}],
        "nights": [`night_object`, by date]}; age_days is null where the champion's date is after today, or
        today is None.
    """
    seen = (record for record in nights(entries).values() if not record.is_prepared)
    records = [_seen(record, (running, retraining)) for record in seen]
    # a full retrain after the nights whose events it covers
    records.sort(key=lambda record: (retrained.through(record), record.mode == retrained.MODE, record.opened_us))
    best = champion(entries)
    age = None if best is None or today is None else _age(best, today)
    found = _newest(records, best) + next_night.findings(records, entries) + _data(records) + _evaluation(records)
    found += retrained.drift_findings(records) + retrained.findings(records, retraining)
    if promise is not None and (late := _late(records, promise)) is not None:
        found.append(late)
    if best is not None and age is not None and age > stale_days:
        message = f"champion {best.version} of {best.date} is {_days(age)} old, more than {stale_days}"
        found.append(_finding("warning", "champion", f"{message}; see why later nights were not promoted"))
    return {
        "champion": None if best is None else {"version": best.version, "date": best.date, "age_days": age},
        "findings": found,
        "nights": [night_object(record, supervised) for record in records],
    }


def _age(best: Champion, today: Date) -> int | None:
    age = (today - Date.fromisoformat(best.date)).days
    return age if age >= 0 else None


def _days(number: int) -> str:
    return f"{number} day{'' if number == 1 else 's'}"


def _seen(record: NightRecord, running: Sequence[str | None]) -> NightRecord:
    if record.state != "running" or record.key in running:
        return record
    return dataclasses.replace(record, state="failed", error="interrupted, its process is gone")


def _supervised(record: NightRecord) -> list[str]:
    """Return the supervised actions of a night's config; empty where its opening entry has none."""
    source = (record.opened.get("config") or {}).get("source") or {}
    return [action["name"] for action in source.get("actions", []) if action.get("supervise", True)]


def night_object(record: NightRecord, supervised: Sequence[str] | None = None) -> dict[str, Any]:
    """Return one night of example 7: exactly its keys, and every count always, 0 too.

    Identity, state, gate, reasons and attempts are the journal's own; rows, counts, next_day and seconds are those
    that the finished night wrote. Where there is something to tell besides: action_rows, experiment, next_night
    (what the check of the champion found), and checkpoints (those scored beside training, as
    gr_core.eval.watching.read_results returns them); of a full retrain its windows and `through`, the last day it covers.

    Args:
        record: The night.
        supervised: Actions that next_day names at least; None: those of the night's config.
    """
    figures = record.status or {}
    rows = figures.get("rows") or record.rows or {}
    none = dict.fromkeys(("auc", "ne")) | dict.fromkeys(("count", "positives"), 0)
    scored = figures.get("next_day") or {}
    seconds = figures.get("seconds") or {}
    value: dict[str, Any] = {
        "date": record.date,
        "mode": record.mode,
        "state": record.state,
        "version": record.version,
        "parent": record.parent_version,
        "gate": "none" if record.experiment is not None else _GATES[record.decision],
        "reasons": list(record.reasons) or list(figures.get("reasons") or []),
        "rows": {key: int(rows.get(key, 0)) for key in ROW_KEYS},
        **{key: int(figures.get(key) or 0) for key in EVENT_KEYS},
        "next_day": {
            action: {key: {**none, **scored.get(action, {})}[key] for key in _METRIC_KEYS}
            for action in dict.fromkeys([*(_supervised(record) if supervised is None else supervised), *scored])
        },
        "seconds": {**dict.fromkeys(STAGES, 0.0), **seconds},
        "attempts": record.num_attempts,
    }
    if record.error is not None:
        value["reasons"].append(_trouble(record))
    value |= {key: int(figures[key]) for key in SAMPLED_KEYS if key in figures}
    actions = figures.get("action_rows") or record.action_rows
    if actions is not None:
        value["action_rows"] = actions
    if figures.get("next_night"):
        value["next_night"] = figures["next_night"]
    if figures.get("checkpoints"):
        value["checkpoints"] = figures["checkpoints"]
    if record.windows:
        value["windows"], value["through"] = retrained.windows(record), retrained.through(record)
    if record.experiment is not None:
        value["experiment"] = record.experiment
    return value


def _trouble(record: NightRecord) -> str:
    return f"{record.state}{f' in {record.stage}' if record.stage else ''}: {record.error}"


def _finding(level: str, where: str, message: str) -> dict[str, str]:
    return {"level": level, "where": where, "message": message}


def _newest(records: Sequence[NightRecord], best: Champion | None) -> list[dict[str, str]]:
    """Find a failed, cancelled or held newest night of the main line."""
    newest = next((record for record in reversed(records) if record.is_main), None)
    if newest is None:
        return []
    if newest.state in ("failed", "cancelled"):
        again = f"run `daybreak nightly --date {newest.date}` again, with the same --config and --home"
        return [_finding("error", newest.key, f"night {newest.key} {_trouble(newest)}; {again}")]
    is_champion = best is not None and best.version == newest.version
    if newest.is_finished and newest.decision == "hold" and not is_champion:
        why = "; ".join(newest.reasons)
        return [_finding("warning", newest.key, f"night {newest.key} was held by the gate: {why}")]
    return []


def _data(records: Sequence[NightRecord]) -> list[dict[str, str]]:
    """Tell what the data checks found in the newest night of the main line."""
    newest = next((record for record in reversed(records) if record.is_main), None)
    found = () if newest is None else newest.data_findings
    return [_finding("warning", f"{newest.key} {one['where']}", one["message"]) for one in found if newest is not None]


def _evaluation(records: Sequence[NightRecord]) -> list[dict[str, str]]:
    """Tell what went wrong with the evaluation beside training in the newest night of the main line."""
    newest = next((record for record in reversed(records) if record.is_main), None)
    trouble = None if newest is None else (newest.status or {}).get("evaluation_trouble")
    if newest is None or not trouble:
        return []
    return [_finding("warning", f"{newest.key} evaluation", f"evaluation beside training of {newest.key}: {trouble}")]


def _late(records: Sequence[NightRecord], promise: Promise) -> dict[str, str] | None:
    """Find a missed `ready_by`: the night of the newest day that should be done was not done by then."""
    zone = ZoneInfo(promise.zone)
    now = datetime.fromtimestamp(promise.now_us / 1_000_000, UTC).astimezone(zone)
    clock = time.fromisoformat(promise.ready_by)
    promised = datetime.combine(now.date(), clock, zone)
    if now < promised:
        promised = datetime.combine(now.date() - timedelta(days=1), clock, zone)
    day = (promised.date() - timedelta(days=1)).isoformat()
    done = [r.finished_us for r in records if r.is_main and r.date >= day and r.finished_us is not None]
    if done and min(done) <= promised.timestamp() * 1_000_000:
        return None
    return _finding("warning", day, f"night {day} was not done by {promise.ready_by} (nightly.ready_by)")


def render_status(status: Mapping[str, Any]) -> RenderableType:
    """Return the table that a person reads: champion, one line a night, findings.

    Args:
        status: The object of `build_status`; `nights` may be any subset, `champion` may be None.
    """
    best = status.get("champion")
    findings = status.get("findings", [])
    styles = {"error": "bold red", "warning": "yellow"}
    found = [Text(f"{f['level']}: {f['message']}", styles.get(f["level"], "")) for f in findings]
    if best is None and not status["nights"]:
        return Group(Text("no night yet; run daybreak nightly"), *found)
    head = _head(best) if best else None
    actions = list(dict.fromkeys(name for night in status["nights"] for name in night.get("next_day", {})))
    table = Table(title=head, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("date", "state", "gate"):
        table.add_column(name, no_wrap=True)
    for name in ("version", "parent", "rows", "due/superv./new", *(f"{action} AUC / NE" for action in actions)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    for night in status["nights"]:
        table.add_row(*_cells(night, actions))
    lines: list[RenderableType] = [table]
    for night in _explained(status["nights"]):
        reasons = [reason for reason in night["reasons"] if not _told(night, reason, findings)]
        lines += [Text(f"{_name(night)}: {'; '.join(reasons)}", "dim")] if reasons else []
    lines += [Text(_running(night), "cyan") for night in status["nights"] if night.get("running")]
    lines += [Text(line, "dim") for line in _scored(status["nights"])]
    return Group(*lines, *found)


def _running(night: Mapping[str, Any]) -> str:
    """Tell what a night that runs is doing (`gr_core.report.running.under_way`)."""
    running = night["running"]
    doing = " and ".join(running["stages"]) or "between two stages"
    steps = f", step {running['step']} of {running['steps']}" if "steps" in running else ""
    return f"{night['date']} is running: {doing}{steps}, for {running['seconds']:.0f} s"


def _head(best: Mapping[str, Any]) -> str:
    age = best["age_days"]
    return f"champion: version {best['version']} of {best['date']}" + ("" if age is None else f", {_days(age)} old")


def _told(night: Mapping[str, Any], reason: str, findings: Sequence[Mapping[str, str]]) -> bool:
    """Tell whether a finding about this night (of the main line, so no experiment) says the reason already."""
    own = [f["message"] for f in findings if f["where"] == night["date"] and "experiment" not in night]
    return any(reason in message for message in own)


def _explained(shown: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the nights whose reasons say more than that the gate passed."""
    plain: tuple[list[str], ...] = (["gate passed"], ["first model"], [])
    return [night for night in shown if list(night.get("reasons") or []) not in plain]


def _scored(shown: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tell of the newest night's checkpoints that were scored beside its training, NE by action in step order."""
    scored = next((night for night in reversed(shown) if night.get("checkpoints")), None)
    if scored is None:
        return []
    checkpoints = scored["checkpoints"]
    early = sum(1 for one in checkpoints if one["scored_during_training"])
    number = "1 checkpoint" if len(checkpoints) == 1 else f"{len(checkpoints)} checkpoints"
    head = f"{scored['date']}: {number} scored on the holdout, {early} before training ended; NE"
    found = [
        f"{action} " + " ".join(_fixed(one["holdout"][action]["ne"]) for one in checkpoints)
        for action in checkpoints[-1]["holdout"]
    ]
    return [f"{head} {', '.join(found)}"]


def _cells(night: Mapping[str, Any], actions: Sequence[str]) -> list[RenderableType]:
    """Return one night's line; an unfinished or foreign night may lack any figure."""
    rows, seconds = night.get("rows") or {}, night.get("seconds") or {}
    counts = "/".join(f"{night.get(key) or 0:,}" for key in EVENT_KEYS[:3])
    state, gate = str(night.get("state", "")), str(night.get("gate", "none"))
    metrics = [night.get("next_day", {}).get(action) or {} for action in actions]
    return [
        _name(night),
        Text(state, _STYLES.get(state, "")),
        Text(gate, _STYLES.get(gate, "dim")),
        _number(night.get("version")),
        _number(night.get("parent")),
        f"{rows.get('read', 0):,}",
        counts,
        *(f"{_fixed(values.get('auc'))} / {_fixed(values.get('ne'))}" for values in metrics),
        f"{sum(seconds.values()):.1f}",
    ]


def _name(night: Mapping[str, Any]) -> str:
    """Return what a line calls a night: its day, and whether it is an experiment or a full retrain.

    A full retrain that caught up stands under the last day that it covers, with the day that it was asked for.
    """
    day = str(night.get("date", ""))
    last = str(night.get("through", day))
    retrain = "full retrain" if last == day else f"full retrain of {day}"
    kind = night.get("experiment") or (retrain if night.get("mode") == retrained.MODE else None)
    return last + (f" ({kind})" if kind else "")


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _fixed(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
