"""`daybreak compare A B`: two registered versions beside each other: metrics on the same rows, config, data.

Both versions score the holdout of one night, that of the later one where its pack is still there: holdout users are
trained on by nobody. The night's files are only read; a version whose ids are numbered differently gets its own encoding
of the same events in a temporary folder. Where no common rows can be scored, what each night's gate measured is shown
without a difference, since different rows tell nothing about it.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gr_core.config import Config
from gr_core.config_rules import check_lake, config_difference
from gr_core.data import vocabulary
from gr_core.errors import FormatError, UsageError
from gr_core.eval import pairing, scoring, slicing
from gr_core.eval.metrics import metric_keys
from gr_core.eval.slices import Slicing
from gr_core.lake import store
from gr_core.lake.journal import Entry, Journal, NightRecord, Version, nights, versions
from gr_core.lake.lineage import Lineage
from gr_core.lake.pruned import refuse_version
from gr_core.night import Night
from gr_core.report.status import EVENT_KEYS, night_object
from gr_core.stages import judging, packing, rescoring, rivals
from gr_core.stages import slicing as cohorts

logger = logging.getLogger(__name__)

_SHOWN = 10  # numbers that a message names


@dataclass(frozen=True, kw_only=True, slots=True)
class _Side:
    """One of the two versions, and what the journal tells of it."""

    version: Version
    record: NightRecord
    payload: dict[str, Any]


def compare(config: Config, home: str, a: int, b: int, *, tell: Callable[[str], None] = logger.debug) -> dict[str, Any]:
    """Compare two registered versions; only reads.

    Args:
        config: The run's config; its gate's confidence and resamples are used.
        home: URI of the home.
        a: One version.
        b: The other; differences are b - a.
        tell: Is told what is being done, a sentence each: loading and scoring take a while.

    Returns:
        a, b; metrics {key: {"a", "b", "delta", "low", "high"}}, of the holdout and of the night that each version was
        scored on as a parent; slices, the holdout's by lake day and as evaluation.slices part it; config {dotted.key: [a, b]}; data {"a", "b"}: each
        version's night, date, bound, counts and parents, and on what rows the holdout metrics were scored.

    Raises:
        UsageError: One version twice, or no such version.
        ConfigError: The config's lake is not the home's.
    """
    if a == b:
        raise UsageError(f"compare takes two different versions, got {a} twice", where="version")
    entries = Journal(store.join(home, "lake", "journal")).entries()
    check_lake(config, entries)
    sides = (_side(entries, a), _side(entries, b))
    scored = _scored(config, home, entries, sides, tell)
    data = [_data(entries, side) for side in sides]
    if scored is None:
        metrics, slices = _measured_apart(home, sides), []
    else:
        on, first, second = scored
        names, supervised = on.settings.source.action_names, on.settings.source.supervised_mask
        tell(f"comparing {len(first.labels):,} events, {config.gate.num_resamples} resamples of their users")
        found = pairing.pair(first, second, names, supervised, config.gate, seed=on.seed)
        metrics = pairing.flat("holdout", found)
        parts = [slicing.by_day(first.time, config.lake.zone), *_slicings(config, on, first)]
        tell(f"comparing slices: by day, {', '.join(one.name for one in config.evaluation.slices) or 'nothing else'}")
        slices = pairing.by_slice(first, second, names, supervised, config.gate, parts, seed=on.seed)
        for one in data:
            one["holdout"] = {"night": on.key, "rows": first.digest, "events": len(first.labels)}
    return {
        "a": a,
        "b": b,
        "metrics": {**metrics, **_next_day(entries, sides, data)},
        "slices": slices,
        "config": config_difference(sides[0].payload.get("config") or {}, sides[1].payload.get("config") or {}),
        "data": {"a": data[0], "b": data[1]},
    }


def _slicings(config: Config, night: Night, scored: scoring.Scored) -> list[Slicing]:
    """Part the holdout of a night as the config says; not at all where that night's rows cannot be read any more."""
    try:
        return cohorts.of(night, rescoring.recorded(night, "pack", "holdout"), scored, config)
    except (FormatError, FileNotFoundError) as error:
        logger.warning("night %s's holdout is compared by day alone, its slices cannot be read: %s", night.key, error)
        return []


def _side(entries: list[Entry], version: int) -> _Side:
    refuse_version(entries, version)
    known = versions(entries)
    if version not in known:
        there = ", ".join(map(str, sorted(known)[-_SHOWN:])) or "none"
        raise UsageError(
            f"compare: version {version} is no registered version; the newest are {there}", where="version"
        )
    record = nights(entries)[known[version].night]
    return _Side(version=known[version], record=record, payload=judging.registered(entries, version))


def _data(entries: list[Entry], side: _Side) -> dict[str, Any]:
    """Return what a version was trained on: its night, how far it read, what was due, and its ancestors."""
    lineage, parents = Lineage.of(entries), []
    parent = lineage.parents.get(side.version.version)
    while parent is not None:
        parents.append(parent)
        parent = lineage.parents.get(parent)
    told, bound = night_object(side.record), side.version.watermark
    return {
        "night": side.version.night,
        "date": side.version.date,
        "parent": parents[0] if parents else None,
        "parents": parents,
        "commit": bound.commit,
        "cutoff": bound.cutoff,
        "delta_version": bound.delta_version,
        "rows": told["rows"],
        **{key: told[key] for key in EVENT_KEYS},
        "gate": told["gate"],
        "tainted": side.version.version in lineage.tainted,
        "holdout": None,
        "next_day": None,
    }


def _scored(
    config: Config, home: str, entries: list[Entry], sides: tuple[_Side, _Side], tell: Callable[[str], None]
) -> tuple[Night, scoring.Scored, scoring.Scored] | None:
    """Score one night's holdout by both versions; None where neither night's can be."""
    newest = sorted(sides, key=lambda side: (side.version.date, side.version.version), reverse=True)
    for own in newest:
        other = sides[1] if own is sides[0] else sides[0]
        night = rescoring.pinned(own.record, home)
        try:
            pack, words = rescoring.recorded(night, "pack", "holdout"), rescoring.recorded(night, "vocabulary")
            if not pack["num_supervised"] or not packing.pack_intact(pack):
                raise FormatError(f"the holdout pack of night {night.key} is empty, gone or damaged", where=night.key)
            tell(
                f"version {own.version.version} scores the {pack['num_supervised']:,} holdout events of night {night.key}"
            )
            mine = judging.score(night, own.version.checkpoint, pack, words, num_threads=2)
            tell(f"version {other.version.version} scores them")
            theirs = rivals.aligned(_score_other(night, entries, own, other, pack, words), mine)
        except (FormatError, FileNotFoundError) as error:
            logger.warning("night %s's holdout is not scored by both: %s", night.key, error)
            continue
        if theirs.digest == mine.digest:
            return (night, mine, theirs) if own is sides[0] else (night, theirs, mine)
        logger.warning("night %s: the two versions were scored on different rows; they are not compared", night.key)
    return None


def _score_other(
    night: Night, entries: list[Entry], own: _Side, other: _Side, pack: dict[str, Any], words: dict[str, Any]
) -> scoring.Scored:
    """Score a night's holdout by a version of another night: as it is where the ids' numbers are the same, else encoded."""
    lineage = Lineage.of(entries)
    if own.version.version in lineage.descendants([other.version.version]):
        return judging.score(night, other.version.checkpoint, pack, words, num_threads=2)
    uri = other.payload["vocabulary"]
    words_of_other = vocabulary.load(store.local_copy(uri))
    missing = set(night.settings.model.features) - words_of_other.tables.keys()
    if missing:
        raise FormatError(
            f"version {other.version.version} knows no ids of {sorted(missing)}, which night {night.key} encodes; models "
            "of different features share no rows",
            where=uri,
        )
    theirs = {"uri": uri, "version": words_of_other.version}
    buckets = [rescoring.recorded(night, "sequences", f"{n:05d}") for n in range(night.settings.lake.num_buckets)]
    with tempfile.TemporaryDirectory(prefix="daybreak-compare-") as folder:
        # the same night in another place: what it lacks there is made there, and the home stays as it is
        scratch = replace(night, home=folder, finished=False)
        rows = packing.encode_pack(
            scratch, rescoring.recorded(night, "ingest"), buckets, theirs, "holdout", name="compared"
        )
        return judging.score(night, other.version.checkpoint, rows, theirs, num_threads=2)


def _measured_apart(home: str, sides: tuple[_Side, _Side]) -> dict[str, pairing.Paired]:
    """Return what each night's gate measured; without differences, since the rows are not the same."""
    found: list[Mapping[str, Any]] = []
    for side in sides:
        try:
            told = rescoring.recorded(rescoring.pinned(side.record, home), "gate")["holdout"]
        except FormatError as error:
            logger.warning("version %d: %s", side.version.version, error)
            told = {}
        found.append(metric_keys("holdout", told))
    keys = dict.fromkeys([*found[0], *found[1]])
    return {key: pairing.beside(found[0].get(key), found[1].get(key), same_rows=False) for key in keys}


def _next_day(
    entries: list[Entry], sides: tuple[_Side, _Side], data: list[dict[str, Any]]
) -> dict[str, pairing.Paired]:
    """Return how each version did on the first day after it, as that night's parent; the days are named in `data`."""
    found: list[Mapping[str, Any]] = []
    for side, told in zip(sides, data, strict=True):
        scored = [
            record
            for record in nights(entries).values()
            if record.is_main
            and record.parent_version == side.version.version
            and (record.status or {}).get("next_day")
        ]
        first = min(scored, key=lambda record: record.date, default=None)
        told["next_day"] = first.key if first else None
        found.append(metric_keys("next_day", (first.status or {})["next_day"]) if first else {})
    same = data[0]["next_day"] is not None and data[0]["next_day"] == data[1]["next_day"]
    keys = dict.fromkeys([*found[0], *found[1]])
    return {key: pairing.beside(found[0].get(key), found[1].get(key), same_rows=same) for key in keys}
