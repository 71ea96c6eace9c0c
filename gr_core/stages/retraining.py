"""Stages of a full retrain around those of a night: its vocabulary, its windows, and its word at the gate.

A window is a night value with a folder of its own (`retrain.window_night`), so sequences, encoding, packs and training
are the nights' own stages. Nothing that nights write is touched: history store, aliases and the main line's bounds stay.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from datetime import date as Date
from typing import Any
from zoneinfo import ZoneInfo

import polars as pl

from gr_core.config import VocabularyTable as VocabularyRule
from gr_core.data import eviction, vocabulary
from gr_core.eval import progressive
from gr_core.hashing import is_holdout, short
from gr_core.lake import store
from gr_core.lake.entries import WINDOW, window_folder
from gr_core.lake.events import EventTable
from gr_core.lake.journal import bound_nights_ago, nights
from gr_core.night import Night, Parent, run_stage, stage_fingerprint
from gr_core.refs import Bound, Rows, day_end_us
from gr_core.retrain import Retrain, Window, describe, newest_checkpoint
from gr_core.stages import ingesting, judging
from gr_core.stages.packing import vocabulary_intact

logger = logging.getLogger(__name__)

_DAY_US = 86_400_000_000
COUNTS = ("due", "train", "due_holdout")


def survey(retrain: Retrain) -> dict[str, Any]:
    """Count the ids of the pinned version anew, without those that `ttl_days` evicts, and find the oldest event.

    Events of trained users count, as in nights; one bucket is in memory at a time.

    Returns:
        uri and version of the vocabulary, {table: rows}, {table: evicted ids}, and first, the oldest event's lake day
        (None: there is no event).
    """
    night, config, bound = retrain.night, retrain.night.settings, retrain.bound
    rules = {name: config.vocabulary.get(name, VocabularyRule()) for name in config.model.features}
    identity = {
        "bound": bound.to_json(),
        "recipe": retrain.recipe,
        "rules": {name: rule.model_dump() for name, rule in rules.items()},
    }
    folder = night.uri("vocabulary", f"vocabulary-{short(stage_fingerprint('survey', identity))}")

    def work() -> dict[str, Any]:
        seen, first_us = _seen(night, bound, rules)
        counts, evicted = {}, {}
        for name, rule in rules.items():
            since = None if rule.ttl_days is None else bound.cutoff_us - rule.ttl_days * _DAY_US
            counts[name] = eviction.surviving(seen[name], since)
            evicted[name] = 0
            if since is not None:
                evicted[name] = eviction.surviving(seen[name], None)["id"].n_unique() - counts[name]["id"].n_unique()
        grown = vocabulary.grow(None, counts, rules)
        with store.directory(folder) as path:
            vocabulary.save(grown, path)
        first = None if first_us is None else _lake_day(first_us, config.lake.zone).isoformat()
        rows = {name: table.rows for name, table in grown.tables.items()}
        return {"uri": folder, "version": grown.version, "rows": rows, "evicted": evicted, "first": first}

    return run_stage(night, "survey", identity, work, intact=vocabulary_intact)


def _seen(
    night: Night, bound: Bound, rules: dict[str, VocabularyRule]
) -> tuple[dict[str, list[pl.DataFrame]], int | None]:
    """Return each bucket's ids by feature, and when the oldest event was shown (us)."""
    config = night.settings
    types = {rule.fallback_by for rule in rules.values() if rule.fallback_by}
    columns = list(dict.fromkeys(["user_id", "shown_at", *rules, *sorted(types)]))
    table = EventTable(night.table_uri, config, up_to=bound.commit)
    seen: dict[str, list[pl.DataFrame]] = {name: [] for name in rules}
    oldest: list[int] = []
    for bucket in range(config.lake.num_buckets):
        rows = table.read(bound.delta_version, buckets=[bucket], columns=columns)
        if len(rows):
            oldest.append(int(rows["shown_at"].dt.timestamp("us").min()))  # type: ignore[arg-type]  # not empty
        held = [user for user in rows["user_id"].unique() if is_holdout(user, config.lake.holdout_fraction)]
        trained = rows.filter(~pl.col("user_id").is_in(pl.Series(held, dtype=pl.String).implode()))
        for name, rule in rules.items():
            seen[name].append(eviction.seen_ids(trained, name, rule.fallback_by))
    return seen, min(oldest, default=None)


def _lake_day(at_us: int, zone: str) -> Date:
    return datetime.fromtimestamp(at_us // 1_000_000, UTC).astimezone(ZoneInfo(zone)).date()


def start_window(retrain: Retrain, window: Window) -> dict[str, Any]:
    """Write to the journal that a window starts, once, and return what its stages take for an ingestion.

    Nothing in it is new, since nights have scored it, and nothing is held out: the gate's rows come at the end.
    """
    entries = retrain.entries()
    known = [one for one in nights(entries)[retrain.night.key].windows if one["recipe"] == retrain.recipe]
    if all(one["number"] != window.number for one in known):
        payload = {**_window(retrain, window), "state": "started"}
        retrain.night.journal.append("window", retrain.night.key, payload, at_us=retrain.night.at_us)
    logger.info("full retrain %s: %s", retrain.night.key, describe(window))
    now = window.bound.to_json()
    before = window.parent.watermark.commit if window.parent else 0
    after = window.bound.commit if window.is_planned else before  # ids of the planned windows are counted already
    return {**_inputs(retrain, window.bound), "since": now, "counted_after": after}


def _window(retrain: Retrain, window: Window) -> dict[str, Any]:
    return {
        "number": window.number,
        "of": window.of,
        "through": window.through.isoformat(),
        "recipe": retrain.recipe,
        "bound": window.bound.to_json(),
    }


def _inputs(retrain: Retrain, bound: Bound) -> dict[str, Any]:
    """Return what stages read of an ingestion, for rows that were ingested by nights."""
    night = retrain.night
    first = EventTable(night.table_uri, night.settings).find(ingesting.BOOTSTRAP)
    return {
        "bound": bound.to_json(),
        "earlier": [bound.to_json()],
        "context_commits": ingesting.context(night.settings, first),
        "rows": Rows().to_json(),
        "bootstrap": None,
        "findings": [],
        "seconds": 0.0,
    }


def end_window(
    retrain: Retrain, window: Window, parts: Sequence[dict[str, Any]], made: dict[str, Any] | None
) -> dict[str, Any]:
    """Write to the journal that a window is trained, and remove the files that only it needed.

    Args:
        retrain: The full retrain.
        window: The window.
        parts: What its buckets returned.
        made: trained and words (what training and the vocabulary returned), seconds by stage; None: nothing was due.

    Returns:
        The entry's payload.
    """
    counts = {name: sum(part["counts"][name] for part in parts) for name in COUNTS}
    payload = {**_window(retrain, window), "state": "trained", "counts": counts}
    if made is not None:
        payload |= {"checkpoint": made["trained"]["uri"], "digest": made["trained"]["digest"]}
        payload |= {"vocabulary": made["words"]["uri"], "seconds": made["seconds"]}
    retrain.night.journal.append("window", retrain.night.key, payload, at_us=retrain.night.at_us)
    tidy_windows(retrain)
    return payload


def tidy_windows(retrain: Retrain) -> None:
    """Remove the folders of windows that nothing needs: all but those with the newest checkpoint, and a window under way."""
    home = store.join(retrain.night.home, "nights", retrain.night.key)
    done = retrain.trained(retrain.entries())
    needed = {window_folder(len(done) + 1)}
    newest = newest_checkpoint(done)
    for uri in (newest.checkpoint, newest.vocabulary) if newest else ():
        needed |= {part for part in uri.split("/") if part.startswith(WINDOW)}
    found = {one.name.split("/")[0] for one in store.listing(home)}
    for name in sorted(found):
        if name.startswith(WINDOW) and name not in needed and done:
            store.remove_tree(store.join(home, name))


def holdout_inputs(retrain: Retrain, last: Parent) -> tuple[Night, dict[str, Any]]:
    """Return the night value and the ingestion of the gate's rows: holdout events due in the last nights, nothing else."""
    night, entries = retrain.night, retrain.entries()
    since = bound_nights_ago(entries, night.settings.gate.nights + 1)
    inputs = {**_inputs(retrain, last.watermark), "since": since.to_json() if since else None}
    inputs["counted_after"] = last.watermark.commit
    judged = replace(
        night, date=last.date, parent=last, cutoff_us=day_end_us(Date.fromisoformat(last.date), _zone(night))
    )
    # recorded as a night's ingestion is, so that `compare` finds what the rows were
    recorded = run_stage(judged, "ingest", inputs, lambda: dict(inputs))
    return judged, {**inputs, "fingerprint": recorded["fingerprint"]}


def _zone(night: Night) -> str:
    return night.settings.lake.zone


def trained_result(retrain: Retrain) -> dict[str, Any] | None:
    """Return what training returned for the newest checkpoint, as its registration needs it; None: nothing was due."""
    done = retrain.trained(retrain.entries())
    newest = newest_checkpoint(done)
    if newest is None:
        return None
    uri = newest.checkpoint
    state = store.read_json(store.join(uri, "state.json"))
    return {
        "uri": uri,
        "digest": state["digest"],
        "step": state["step"],
        "watermark": state["watermark"],
        "metrics": state["metrics"],
        "newest_supervised_us": state["newest_supervised_us"],
        "attention": state.get("attention"),
        "advice": state.get("advice", []),
        "seconds": sum((one.get("seconds") or {}).get("train", 0.0) for one in done),
    }


def root_night(judged: Night) -> Night:
    """Return the night value that registers and is judged: a version without a parent, the root of its lineage."""
    return replace(judged, parent=None)


def unscored(retrain: Retrain) -> dict[str, Any]:
    """Return the evaluation of a full retrain: it scores no new events, since its lineage has read what nights scored."""
    source = retrain.night.settings.source
    return {**progressive.unscored(0, source.action_names, source.supervised_mask), "seconds": 0.0}


def finish(retrain: Retrain, judged: Night, results: dict[str, Any]) -> dict[str, Any]:
    """Write the full retrain's status object to the journal, with what its windows counted and took, and project it.

    Args:
        retrain: The full retrain.
        judged: The night value that was registered.
        results: train, register and gate; empty where nothing was due.

    Returns:
        The full retrain as in `daybreak status --json`.
    """
    done = retrain.trained(retrain.entries())
    counts = {name: sum(one["counts"][name] for one in done) for name in COUNTS}
    seconds = {name: sum((one.get("seconds") or {}).get(name, 0.0) for one in done) for name in ("sequences", "pack")}
    bound = Bound.from_json(done[-1]["bound"]) if done else retrain.bound
    whole = {
        "ingest": _inputs(retrain, bound),
        "sequences": [{"counts": {**counts, "next_day": 0}, "seconds": seconds["sequences"]}],
        "pack": {"seconds": seconds["pack"]},
        "evaluate": unscored(retrain),
        **results,
    }
    return judging.finish(judged, whole)
