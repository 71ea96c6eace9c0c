"""The stage from event table to sequences, a bucket each."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import polars as pl

from gr_core.config import Config
from gr_core.data import due, sequences
from gr_core.data.sampling import Replay, kept_labels
from gr_core.errors import FormatError
from gr_core.hashing import file_sha256, fingerprint
from gr_core.lake import store
from gr_core.lake.events import EventTable
from gr_core.lake.history import HistoryStore
from gr_core.night import Night, run_stage
from gr_core.refs import Bound
from gr_core.stages.gathering import REPLAY, ROLES, Gathered, Gatherer, Role, history_columns

logger = logging.getLogger(__name__)

__all__ = ["ROLES", "Role", "build_bucket", "due_scope", "sequence_rules"]

US = 1_000_000


def sequence_rules(config: Config) -> sequences.SequenceRules:
    """Return the sequence rules of a config."""
    features = config.model.features
    types = {name: rule.fallback_by for name, rule in config.vocabulary.items() if rule.fallback_by}
    return sequences.SequenceRules(
        action_names=tuple(config.source.action_names),
        features=features,
        item_features=config.model.item_features,
        max_history=config.sequences.max_history,
        max_targets=config.sequences.max_targets,
        max_age_us=config.sequences.max_age_days * 86_400 * US,
        token_budget=config.segment_tokens,
        time_window_us=config.pack.time_window_seconds and config.pack.time_window_seconds * US,
        fallback_by=tuple((name, types[name]) for name in features if name in types),
        tokens=config.pack.tokens,
        event_weight=config.pack.event_weight,
    )


def build_bucket(night: Night, ingested: dict[str, Any], bucket: int, *, into: Night | None = None) -> dict[str, Any]:
    """Find what is due and new in one bucket; write its sequences of all roles and its dictionaries.

    Args:
        night: The night.
        ingested: What its ingestion returned.
        bucket: The bucket's number.
        into: The same night in another place, where they are written instead, new events of a night without a parent
            too; the night's own home stays as it is.

    Returns:
        uri, digest (of the files), and counts of events: due, train (supervised), due_holdout, next_day (new); where
        something is sampled, replayed and sampled_out (supervised ones of which no label was kept).
    """
    config = night.settings
    bound = Bound.from_json(ingested["bound"])
    scope = due_scope(night, ingested)
    identity = {
        "scope": scope.identity(),
        "bucket": bucket,
        "rules": repr(sequence_rules(config)),
        "vocabulary": {k: v.model_dump(exclude={"ttl_days"}) for k, v in config.vocabulary.items()},
        "supervised": config.source.supervised_mask,
        **_sampled(night),
        **({"counted_after": ingested["counted_after"]} if "counted_after" in ingested else {}),
    }
    place = into or night
    folder = place.uri("sequences", "sequences", f"bucket-{bucket:05d}")

    def work() -> dict[str, Any]:
        history = history_store(night, bucket)
        gathered = Gatherer(
            table=EventTable(night.table_uri, config, up_to=bound.commit),
            history=history,
            scope=scope,
            rules=sequence_rules(config),
            bucket=bucket,
            holdout_fraction=config.lake.holdout_fraction,
            replay=_replay(night),
            whole=night.mode == "full_retrain",
            counted_after=ingested.get("counted_after"),
        ).gather(advance=into is None)
        rows = gathered.rows
        by_role, counts = _targets(night, gathered, has_scorer=night.parent is not None or into is not None)
        built = sequences.build_sequences(rows, by_role, sequence_rules(config), counted=rows["counted"])
        with store.directory(folder) as path:
            sequences.save(built, path)
            digest = folder_digest(path)
        moved = {"history_read": gathered.history_read, "history_written": history.bytes_written}
        sources = {"from_store": gathered.from_store, "from_table": gathered.from_table}
        return {"uri": folder, "counts": counts, "digest": digest, "bytes": moved, "users": sources}

    return run_stage(place, "sequences", identity, work, part=f"{bucket:05d}", intact=folder_intact)


def _replay(night: Night) -> Replay | None:
    fraction = night.settings.train.replay_fraction
    if fraction == 0.0 or night.parent is None:
        return None
    salt = f"{night.seed}:{night.date}"
    return Replay(fraction=fraction, salt=salt, holdout_fraction=night.settings.lake.holdout_fraction)


def _sampled(night: Night) -> dict[str, Any]:
    """Return the part of a bucket's identity that says what is sampled; nothing where nothing is."""
    replay, fraction = _replay(night), night.settings.train.negative_fraction
    labels = {"negatives": [fraction, night.seed]} if fraction < 1.0 else {}
    return labels if replay is None else {"replay": repr(replay), **labels}


def _targets(night: Night, gathered: Gathered, *, has_scorer: bool) -> tuple[dict[str, pl.Series], dict[str, int]]:
    """Return the masks of all targets by role, REPLAY after the roles, and the counts of events."""
    rows, fraction = gathered.rows, night.settings.train.negative_fraction
    # without a parent nobody scores the new events: they are counted, and their tokens not written
    by_role = {str(role): rows[role] * (role != "next_day" or has_scorer) for role in ROLES}
    counts = {name: gathered.counts[name] for name in ("due", "train", "due_holdout", "next_day")}
    trained = ["train"]
    if REPLAY in rows.columns:
        by_role[REPLAY] = rows[REPLAY]
        trained.append(REPLAY)
    if fraction < 1.0:
        by_role |= {role: kept_labels(rows, by_role[role], fraction, str(night.seed)) for role in trained}
        counts["sampled_out"] = counts["train"] - int((by_role["train"] != 0).sum())
    if REPLAY in by_role:
        counts["replayed"] = int((by_role[REPLAY] != 0).sum())
    return by_role, counts


def history_store(night: Night, bucket: int) -> HistoryStore:
    """Return the history store of a bucket of the night's home."""
    rules = sequence_rules(night.settings)
    return HistoryStore(history_uri(night.home), bucket, history_columns(rules), rules.max_history)


def history_uri(home: str) -> str:
    """Return where a home's history store lies: derived from the event table, it may be removed at any time."""
    return store.join(home, "lake", "history")


def folder_digest(folder: Path) -> str:
    """Return a digest of a local folder's files, by name."""
    return fingerprint({path.name: file_sha256(path) for path in folder.iterdir()})


def folder_intact(part: dict[str, Any]) -> bool:
    """Tell whether a stage's folder (uri) is there, with the files that its `digest` was made of."""
    try:
        return bool(folder_digest(store.local_copy(part["uri"])) == part["digest"])
    except (FormatError, FileNotFoundError):
        return False


def due_scope(night: Night, ingested: dict[str, Any]) -> due.DueScope:
    """Collect the bounds that decide what is due, new and held out for a night, as its ingestion found them."""
    config = night.settings
    return due.DueScope(
        now=Bound.from_json(ingested["bound"]),
        parent=night.parent.watermark if night.parent else None,
        earlier=tuple(Bound.from_json(bound) for bound in ingested["earlier"]),
        since=Bound.from_json(ingested["since"]) if ingested["since"] else None,
        context_commits=frozenset(ingested["context_commits"]),
        action_names=tuple(config.source.action_names),
        supervised=config.source.supervised_mask,
    )
