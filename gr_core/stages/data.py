"""Stages from raw files to packs: ingest, sequences (a bucket each), vocabulary, pack."""

from __future__ import annotations

import hashlib
import logging
from datetime import date as Date
from pathlib import Path
from typing import Any, Literal

import polars as pl

from gr_core.config import Config
from gr_core.config import VocabularyTable as VocabularyRule
from gr_core.data import contract, due, packfile, packing, sequences, vocabulary
from gr_core.errors import ConfigError, FormatError
from gr_core.hashing import file_sha256, fingerprint, is_holdout, short
from gr_core.lake import source, store
from gr_core.lake.events import EventTable
from gr_core.lake.journal import bound_nights_ago, finished_bounds
from gr_core.night import Night, resolve_root, run_stage, stage_fingerprint
from gr_core.refs import Bound, PackRef

logger = logging.getLogger(__name__)

Role = Literal["train", "next_day", "holdout"]
ROLES: tuple[Role, ...] = ("train", "next_day", "holdout")
BOOTSTRAP = "bootstrap"
US = 1_000_000
DEEP_CHECK_BYTES = 256 * 2**20  # larger days are not read twice: damage inside a file then shows at ingestion


def preflight(config: Config, home: str, day: Date) -> list[source.SourceFile]:
    """Check a day's raw files before any state changes.

    An embedded world writes its missing files first: they are the source, not the state.

    Raises:
        DataContractError: A missing day, an unreadable file, a missing or mistyped column. Days up to
            DEEP_CHECK_BYTES are read whole, so that damage inside a file is found here too.
        ConfigError: A setting that this release cannot honour.
    """
    _check_supported(config)
    config = resolve_root(config, home)
    if config.source.world is not None:
        from gr_core.data import synthetic

        synthetic.ensure_day(store.local_path(config.source.root), config.source.world, day)
    table = EventTable(store.join(home, "lake", "events"), config)
    first = config.source.feed("bootstrap") is not None and table.find(BOOTSTRAP) is None
    files = source.preflight(config, day, bootstrap=first)
    feed = config.source.feed("events")
    if (
        feed is not None
        and table.find(day.isoformat()) is None
        and sum(file.size for file in files) <= DEEP_CHECK_BYTES
    ):
        contract.read_day(config, day, files, feed=feed)
    return files


def _check_supported(config: Config) -> None:
    """Refuse settings that this release cannot honour, before anything is written."""
    if config.attention.require == "fa3":
        raise ConfigError(
            "attention.require = 'fa3': no FlashAttention 3 path runs on this machine, attention is length-bucketed SDPA; "
            "set attention.require = 'none'",
            where="attention.require",
        )
    if config.pack.tokens != "targets":
        raise ConfigError(
            f"pack.tokens = {config.pack.tokens!r} cannot be trained by this release; set pack.tokens = 'targets'",
            where="pack.tokens",
        )


def ingest(night: Night) -> dict[str, Any]:
    """Commit the day's raw events to the event table, the bootstrap history first.

    Returns:
        bound (Bound of this night), rows, reasons, labels_changed_after_supervision, bootstrap (its rows or null),
        and what decides what is new and judged: earlier (bounds of finished nights), since, context_commits.
    """
    config = night.settings
    table = EventTable(night.table_uri, config)
    journal = night.journal
    parent = night.parent.watermark if night.parent else None
    entries = journal.entries()
    earlier = [bound.to_json() for bound in finished_bounds(entries)]
    since = bound_nights_ago(entries, config.gate.nights)
    scope = {"earlier": earlier, "since": since.to_json() if since else None}

    def work() -> dict[str, Any]:
        bootstrap = config.source.feed("bootstrap")
        if bootstrap is not None and table.find(BOOTSTRAP) is None:
            files = source.list_files(config, night.day, bootstrap)
            table.ingest(BOOTSTRAP, contract.read_day(config, night.day, files, feed=bootstrap), parent=None)
        commit = table.find(night.date)
        if commit is None:
            feed = config.source.feed("events")
            assert feed is not None
            files = source.list_files(config, night.day, feed)
            commit = table.ingest(night.date, contract.read_day(config, night.day, files, feed=feed), parent=parent)
        first = table.find(BOOTSTRAP) if bootstrap is not None else None
        bound = due.make_bound(config, commit.number, night.cutoff_us, commit.delta_version, parent)
        if parent is not None:
            due.check_not_behind(bound, parent)
        return {
            "bound": bound.to_json(),
            "rows": commit.rows.to_json(),
            "reasons": commit.reasons,
            "labels_changed_after_supervision": commit.labels_changed_after_supervision,
            "bootstrap": first.rows.to_json() if first else None,
            **scope,
            "context_commits": [first.number] if first and bootstrap and not bootstrap.due else [],
        }

    result = run_stage(night, "ingest", {"night": night.key, "scope": scope}, work)
    if not result["reused"]:
        payload = {"commit": result["bound"]["commit"], "delta_version": result["bound"]["delta_version"]}
        payload |= {key: result[key] for key in ("rows", "reasons")}
        journal.append("ingested", night.key, payload, at_us=night.at_us)
    return result


def sequence_rules(config: Config) -> sequences.SequenceRules:
    """Return the sequence rules of a config."""
    by = {rule.fallback_by for rule in config.vocabulary.values() if rule.fallback_by}
    return sequences.SequenceRules(
        action_names=tuple(config.source.action_names),
        features=config.model.features,
        item_features=config.model.item_features,
        max_history=config.sequences.max_history,
        max_targets=config.sequences.max_targets,
        max_age_us=config.sequences.max_age_days * 86_400 * US,
        token_budget=config.pack.token_budget,
        time_window_us=config.pack.time_window_seconds and config.pack.time_window_seconds * US,
        carry=tuple(sorted(by - set(config.model.features))),
        tokens=config.pack.tokens,
    )


def build_bucket(night: Night, ingested: dict[str, Any], bucket: int) -> dict[str, Any]:
    """Find what is due and new in one bucket; write its sequences for each role and its id counts.

    Returns:
        uri, digest, and counts of events: due, train (supervised), due_holdout, next_day (new).
    """
    config = night.settings
    bound = Bound.from_json(ingested["bound"])
    scope = due_scope(night, ingested)
    identity = {
        "scope": scope.identity(),
        "bucket": bucket,
        "rules": repr(sequence_rules(config)),
        "vocabulary": {k: v.model_dump() for k, v in config.vocabulary.items()},
        "supervised": config.source.supervised_mask,
    }
    folder = night.uri("sequences", "sequences", f"bucket-{bucket:05d}")

    def work() -> dict[str, Any]:
        events = EventTable(night.table_uri, config).read(bound.delta_version, buckets=[bucket])
        holdout = _holdout_users(events, config.lake.holdout_fraction)
        masks = scope.masks(events, holdout)
        written: dict[str, pl.DataFrame] = {}
        with store.directory(folder) as path:
            for role in ROLES:
                users = events.filter(masks[role] != 0)["user_id"].unique()
                inside = events["user_id"].is_in(users.implode())
                built = sequences.build_sequences(
                    events.filter(inside), masks[role].filter(inside), sequence_rules(config)
                )
                written |= {f"{role}.tokens": built.tokens, f"{role}.segments": built.segments}
            fresh = events.filter(
                (pl.col("commit") > scope.parent_commit) & (pl.col("commit") <= bound.commit) & ~holdout
            )
            counted = vocabulary.count_ids(fresh, config.model.features, config.vocabulary)
            written |= {f"{name}.counts": frame for name, frame in counted.items()}
            for name, frame in written.items():
                frame.write_ipc(path / f"{name}.arrow", compression="uncompressed")
        counts = {name: int((masks[name] != 0).sum()) for name in ("due", "train", "due_holdout", "next_day")}
        digest = fingerprint({name: _frame_digest(frame) for name, frame in written.items()})
        return {"uri": folder, "counts": counts, "digest": digest, "files": _folder_digest(folder)}

    return run_stage(night, "sequences", identity, work, part=f"{bucket:05d}", intact=_bucket_intact)


def _frame_digest(frame: pl.DataFrame) -> str:
    """Return a digest of values and order; a file's bytes may differ for equal frames (what lies under nulls)."""
    return hashlib.sha256(frame.hash_rows().to_numpy().tobytes()).hexdigest()


def _folder_digest(uri: str) -> str:
    folder = store.local_path(uri)
    return fingerprint([file_sha256(path) for path in sorted(folder.iterdir())] if folder.is_dir() else None)


def _bucket_intact(part: dict[str, Any]) -> bool:
    return bool(_folder_digest(part["uri"]) == part["files"])


def _vocabulary_intact(words: dict[str, Any]) -> bool:
    try:
        return vocabulary.load(store.local_path(words["uri"])).version == str(words["version"])
    except (FormatError, OSError, ValueError):
        return False


def _pack_intact(pack: dict[str, Any]) -> bool:
    folder = store.local_path(pack["uri"])
    try:
        index = store.read_json(store.join(pack["uri"], packfile.INDEX_FILE))
        found = {name: file_sha256(folder / name) for name in index["sha256"]}
    except (OSError, ValueError, KeyError):
        return False
    return bool(found == index["sha256"] and fingerprint(found) == pack["digest"])


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


def _holdout_users(events: pl.DataFrame, fraction: float) -> pl.Series:
    """Return a boolean per row: its user is evaluated only."""
    users = events["user_id"].unique()
    held = pl.Series([user for user in users if is_holdout(user, fraction)], dtype=pl.String)
    return events["user_id"].is_in(held.implode())


def grow_vocabulary(night: Night, buckets: list[dict[str, Any]]) -> dict[str, Any]:
    """Grow the parent's vocabulary by what the buckets counted.

    Returns:
        uri, version, and {table: rows}.
    """
    config = night.settings
    rules = {name: config.vocabulary.get(name, VocabularyRule()) for name in config.model.features}
    identity = {
        "parent": night.parent.vocabulary if night.parent else None,
        "buckets": [_part_identity(part) for part in buckets],
        "rules": {name: rule.model_dump() for name, rule in rules.items()},
    }
    folder = night.uri("vocabulary", f"vocabulary-{short(stage_fingerprint('vocabulary', identity))}")

    def work() -> dict[str, Any]:
        parent = None
        if night.parent is not None:
            parent = vocabulary.load(store.local_path(night.parent.vocabulary))
        counts = {
            name: vocabulary.merge_counts(
                [pl.read_ipc(store.local_path(part["uri"]) / f"{name}.counts.arrow") for part in buckets]
            )
            for name in config.model.features
        }
        grown = vocabulary.grow(parent, counts, rules)
        with store.directory(folder) as path:
            vocabulary.save(grown, path)
        return {"uri": folder, "version": grown.version, "rows": {n: t.rows for n, t in grown.tables.items()}}

    return run_stage(night, "vocabulary", identity, work, intact=_vocabulary_intact)


def _part_identity(part: dict[str, Any]) -> dict[str, Any]:
    return {key: part[key] for key in ("counts", "digest", "fingerprint")}


def write_pack(
    night: Night, ingested: dict[str, Any], buckets: list[dict[str, Any]], words: dict[str, Any], role: Role
) -> dict[str, Any]:
    """Write one role's pack: the buckets' segments, encoded by the night's own vocabulary and batched.

    Returns:
        The PackRef as JSON.
    """
    return encode_pack(night, ingested, buckets, words, role, name=role)


def encode_pack(
    night: Night,
    ingested: dict[str, Any],
    buckets: list[dict[str, Any]],
    words: dict[str, Any],
    role: Role,
    *,
    name: str,
) -> dict[str, Any]:
    """Write one role's pack with a vocabulary (uri, version), which need not be the night's own.

    Returns:
        The PackRef as JSON.
    """
    config = night.settings
    bound = Bound.from_json(ingested["bound"])
    identity = {
        "buckets": [_part_identity(part) for part in buckets],
        "vocabulary": words["version"],
        "pack": config.pack.model_dump(),
        "seed": night.seed,
        "role": role,
    }
    folder = night.uri("pack", "packs", name)

    def work() -> dict[str, Any]:
        table = vocabulary.load(store.local_path(words["uri"]))
        parts = [_read_sequences(store.local_path(part["uri"]), role) for part in buckets]
        features, items = config.model.features, config.model.item_features
        segments = packfile.concat_segments([packing.to_segments(part, table, features, items) for part in parts])
        meta = packfile.PackMeta(
            role=role,
            features=features,
            actions=tuple(config.source.action_names),
            supervised=config.source.supervised_mask,
            tokens=config.pack.tokens,
            layout=config.pack.layout,
            grouping=config.pack.grouping,
            token_budget=config.pack.token_budget,
            seed=night.seed,
            vocabulary=words["version"],
            bound=bound,
            fingerprint=fingerprint(identity),
        )
        with store.directory(folder) as path:
            index = packfile.write_pack(path, segments, meta)
        return PackRef(
            uri=folder,
            role=role,
            num_tokens=index["num_tokens"],
            num_segments=index["num_segments"],
            num_supervised=index["num_supervised"],
            num_batches=len(index["batch_tokens"]),
            digest=fingerprint(index["sha256"]),
        ).to_json()

    return run_stage(night, "pack", identity, work, part=name, intact=_pack_intact)


def _read_sequences(folder: Path, role: str) -> sequences.Sequences:
    return sequences.Sequences(
        tokens=pl.read_ipc(folder / f"{role}.tokens.arrow"),
        segments=pl.read_ipc(folder / f"{role}.segments.arrow"),
    )
