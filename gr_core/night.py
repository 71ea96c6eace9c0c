"""A night: what its first attempt pinned, where its files lie, and which stages are already done.

`open_night` writes the journal entry that pins parent, cutoff, config and seed, before any other stage.
`run_stage` is the idempotence of every stage: it returns the manifest that is there when its fingerprint
(input identity, the stage's own config, STAGE_FORMAT) matches, and does the work otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date as Date
from typing import Any

from gr_core import progress
from gr_core.config import Config, parse_config
from gr_core.config_rules import check_lake, config_difference, refuse_full_retrain, trained_with
from gr_core.environment import state_directory
from gr_core.errors import BoundError, UsageError
from gr_core.hashing import fingerprint
from gr_core.lake import space, store
from gr_core.lake.checkpoints import check_readable, check_there
from gr_core.lake.entries import window_folder
from gr_core.lake.events import EventTable
from gr_core.lake.journal import Entry, Journal, JournalMoved, NightRecord, nights, versions
from gr_core.lake.lineage import Lineage
from gr_core.lake.manifests import read_or_warn
from gr_core.lake.moved import rebased
from gr_core.lake.predecessors import start_of
from gr_core.lake.pruned import refuse_night, refuse_version
from gr_core.refs import Bound, Ref, day_end_us, iso

logger = logging.getLogger(__name__)

STAGE_FORMAT = {
    "ingest": 1,
    "sequences": 2,
    "vocabulary": 2,
    "encode": 1,
    "pack": 2,
    "train": 2,
    "evaluate": 4,
    "next_night": 1,
    "register": 2,
    "gate": 3,
    "drift": 1,
    "survey": 1,
}
"""Raised by hand when a stage's output changes; the git revision is never compared."""

SHARED = ("sequences", "vocabulary", "encode", "pack", "evaluate")
"""Stages whose output an experiment takes from its night, where it would make the same."""
STAGE_NOTE = "stage "  # an error that leaves a stage carries this note with the stage's name
FORCEABLE = ("sequences", "pack", "train", "evaluate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parent(Ref):
    """The checkpoint a night starts from."""

    version: int
    """0: a window of a full retrain, which is not registered."""
    date: str
    checkpoint: str
    vocabulary: str
    watermark: Bound

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Parent:
        """Build from plain JSON values, the watermark included."""
        return cls(**{**values, "watermark": Bound.from_json(values["watermark"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Night(Ref):
    """A pinned night; equal on every attempt but for `config`, `attempt` and `force`."""

    key: str
    """Names the night in the journal and its folder: the date, or date plus attempt name."""
    date: str
    mode: str
    home: str
    config: dict[str, Any]
    """The resolved config of this attempt."""
    parent: Parent | None
    cutoff_us: int
    seed: int
    at_us: int
    """Start of this attempt; stamped on its journal entries, since stages never ask a clock."""
    attempt: int = 1
    force: str | None = None
    """A stage that is repeated although its manifest is there."""
    finished: bool = False
    """The night is immutable: a forced stage writes beside its result."""
    experiment: str | None = None
    """Name of the experiment that this is; None: a night."""
    beside: str | None = None
    """Key of the night that an experiment is set beside: it has that night's pins, ingestion, and outputs of SHARED."""
    window: int | None = None
    """Number of a full retrain's window, which has a folder of its own; None: a night, or the retrain as a whole."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Night:
        """Build from plain JSON values, the parent included."""
        parent = values["parent"]
        return cls(**{**values, "parent": Parent.from_json(parent) if parent else None})

    @property
    def day(self) -> Date:
        """The lake day."""
        return Date.fromisoformat(self.date)

    @property
    def settings(self) -> Config:
        """The config as validated models, with the source's root resolved."""
        return resolve_root(parse_config(self.config), self.home)

    @property
    def journal(self) -> Journal:
        """The home's journal."""
        return Journal(store.join(self.home, "lake", "journal"))

    @property
    def table_uri(self) -> str:
        """URI of the event table."""
        return store.join(self.home, "lake", "events")

    def folder(self, stage: str) -> str:
        """Return the URI a stage writes below: the night's folder, or `forced` beside it."""
        base = store.join(self.home, "nights", self.key)
        if self.window is not None:
            base = store.join(base, window_folder(self.window))
        return store.join(base, "forced") if self.finished and stage == self.force else base

    def uri(self, stage: str, *parts: str) -> str:
        """Return the URI of one of a stage's outputs."""
        return store.join(self.folder(stage), *parts)


def resolve_root(config: Config, home: str) -> Config:
    """Return the config with an embedded world's relative source.root below the home, a remote one's local state."""
    root = config.source.root
    if config.source.world is None or root.startswith("/") or "://" in root:
        return config
    below = home if store.is_local(home) else str(state_directory(home))  # any machine can make a world's files again
    source = config.source.model_copy(update={"root": store.join(below, root)})
    return config.model_copy(update={"source": source})


def night_key(day: Date, parent: int | None = None, experiment: str | None = None) -> str:
    """Return the key of a night; one with a named parent or experiment is a separate attempt."""
    parts = [day.isoformat()]
    if parent is not None:
        parts.append(f"parent-{parent}")
    if experiment is not None:
        parts.append(f"experiment-{experiment}")
    return "+".join(parts)


def open_night(
    config: Config,
    home: str,
    day: Date,
    *,
    at_us: int,
    mode: str = "nightly",
    parent_version: int | None = None,
    force: str | None = None,
    prepared_by: str | None = None,
) -> Night:
    """Pin a night, or take up the pins of its first attempt.

    Args:
        config: The config of this attempt.
        home: URI of the home.
        day: The lake day.
        at_us: The time of the journal entry, microseconds since the epoch.
        mode: nightly or backfill; a backfilled day that is not after the champion's starts from its predecessor's model.
        parent_version: Start from this registered version instead of the champion.
        force: A stage that is repeated.
        prepared_by: Key of an experiment that needs the night's stages up to packs; until a start of its own the night
            counts as not run.

    Returns:
        The pinned night. Nothing has been read from the source yet.

    Raises:
        UsageError: An unknown parent version or stage.
        ConfigError: `lake` differs from the home's, or `model` or `vocabulary` from the parent's.
        BoundError: The day, or its commit, lies before the parent's.
        FormatError: The parent's checkpoint is gone, or of another format.
    """
    if force is not None and force not in FORCEABLE:
        raise UsageError(f"--force knows {', '.join(FORCEABLE)}, got {force!r}", where="force")
    key = night_key(day, parent_version)
    journal = Journal(store.join(home, "lake", "journal"))
    while True:
        entries = journal.entries()
        record = nights(entries).get(key)
        check_lake(config, entries)
        if record is not None:
            if force is not None:
                refuse_night(entries, key, config.lake.rerun_days)
            return _reopen(config, home, record, journal, at_us, force)
        night = Night(
            key=key,
            date=day.isoformat(),
            mode=mode,
            home=home,
            config=config.resolved(),
            parent=parent_of(entries, parent_version, late=day.isoformat() if mode == "backfill" else None),
            cutoff_us=day_end_us(day, config.lake.zone),
            seed=config.pack.seed,
            at_us=at_us,
            force=force,
        )
        check_parent(config, night, entries)
        payload = {**night.to_json(), "fingerprint": config.fingerprint()}
        payload |= {"prepared_by": prepared_by} if prepared_by else {}
        expect = entries[-1].seq if entries else 0
        try:
            journal.append("opened", key, payload, at_us=at_us, expect=expect)
        except JournalMoved:
            continue  # another command wrote first: look again, its entry may pin this very night
        parent = f"parent version {night.parent.version}" if night.parent else "no parent"
        logger.info("night %s opened: %s, cutoff %s", key, parent, iso(night.cutoff_us))
        return night


def _reopen(config: Config, home: str, record: NightRecord, journal: Journal, at_us: int, force: str | None) -> Night:
    """Take up an opened night with its pins; another config is logged as a new attempt.

    An unfinished night whose parent was tainted by a retraction since starts from the newest untainted ancestor.
    """
    opened = {k: v for k, v in record.opened.items() if k in Night.__slots__}
    pinned = Night.from_json({**opened, "parent": record.pinned_parent})
    night = replace(pinned, home=home, config=config.resolved(), at_us=at_us, force=force)
    night = replace(night, attempt=record.num_attempts + 1)
    if record.is_finished:
        return replace(night, finished=True)
    difference = config_difference(pinned.config, night.config)
    entries = journal.entries()
    payload: dict[str, Any] = {"fingerprint": config.fingerprint(), "difference": difference, "config": night.config}
    lineage = Lineage.of(entries)
    if night.parent is not None and night.parent.version in lineage.tainted:
        if record.key != record.date:
            raise _tainted(night.parent.version)
        version = lineage.untainted(night.parent.version)
        night = replace(night, parent=None if version is None else _registered(entries, version))
        payload |= {"parent": night.parent.to_json() if night.parent else None}
        logger.info("night %s: its parent was tainted by a retraction, it starts from %s", record.key, version)
    if night.parent is not None:
        refuse_full_retrain(trained_with(entries, night.parent.version), night.config)
    journal.append("attempt", record.key, payload, at_us=at_us)
    logger.info("night %s taken up again, attempt %d, config difference %s", record.key, night.attempt, difference)
    return night


def parent_of(entries: list[Entry], version: int | None, late: str | None = None) -> Parent | None:
    """Return the named version's checkpoint, else what a night starts from by itself (`start_of`)."""
    wanted = start_of(entries, late) if version is None else version
    if wanted is None:
        return None
    if version is not None and wanted in Lineage.of(entries).tainted:
        raise _tainted(wanted)
    made = versions(entries).get(wanted)
    if made is not None and made.experiment is not None:
        raise UsageError(
            f"--parent {wanted} is of experiment {made.experiment}, and no night starts from an experiment; run a night "
            "with the experiment's settings instead",
            where="parent",
        )
    return _registered(entries, wanted)


def _tainted(version: int) -> UsageError:
    return UsageError(
        f"--parent {version} is tainted: it was trained on retracted rows, or descends from a version that was; name "
        "an older version, or none for the champion",
        where="parent",
    )


def _registered(entries: list[Entry], wanted: int) -> Parent:
    refuse_version(entries, wanted, where="parent")
    for entry in reversed(entries):
        if entry.kind == "registered" and entry.payload["version"] == wanted:
            return Parent.from_json({k: entry.payload[k] for k in Parent.__slots__})
    known = [e.payload["version"] for e in entries if e.kind == "registered"]
    raise UsageError(f"--parent {wanted} is no registered version; there are {known}", where="parent")


def check_parent(config: Config, night: Night, entries: list[Entry]) -> None:
    """Refuse a night whose bound or config does not follow from its parent's, or whose parent is gone; writes nothing."""
    parent = night.parent
    if parent is None:
        return
    check_there(parent.version, parent.checkpoint)
    check_readable(parent.checkpoint)
    mark = parent.watermark
    below = f"below its parent's (version {parent.version}, commit {mark.commit}, cutoff {mark.cutoff}); a bound never moves back"
    if night.cutoff_us < mark.cutoff_us:
        told = f"night {night.date} has cutoff {iso(night.cutoff_us)}, {below}"
        remedy = "choose a later date, an older parent with --parent, or run an earlier day with `daybreak backfill`"
        raise BoundError(f"{told}: {remedy}", where=night.date)
    read = EventTable(night.table_uri, config).find(night.date)
    if read is not None and read.number < mark.commit:
        told = f"night {night.date} was ingested as commit {read.number}, {below}"
        raise BoundError(f"{told}: name an older parent with --parent", where=night.date)
    refuse_full_retrain(trained_with(entries, parent.version), config.resolved())


def stage_fingerprint(name: str, identity: Any) -> str:
    """Return the fingerprint of a stage's output: its name, its format, and whatever the result depends on."""
    return fingerprint({"stage": name, "format": STAGE_FORMAT[name], "identity": identity})


def _nothing_to_repeat(night: Night, name: str) -> str:
    kinds = [entry.kind for entry in night.journal.entries() if entry.kind == "forgotten" or entry.night == night.key]
    if "forgotten" in kinds[len(kinds) - kinds[::-1].index("finished") :]:
        return (
            f"night {night.key} has no output of stage {name} any more: `daybreak forget` removed what held a user; its "
            "result and model stand, but no stage after it can be repeated"
        )
    return f"night {night.key} finished without stage {name}; there is nothing to repeat"


def run_stage(
    night: Night,
    name: str,
    identity: Any,
    work: Callable[[], dict[str, Any]],
    *,
    part: str = "",
    intact: Callable[[dict[str, Any]], bool] = lambda _result: True,
) -> dict[str, Any]:
    """Return a stage's finished manifest, or do the work and write it; a finished night's manifests always stand.

    Args:
        night: The night.
        name: The stage, a key of STAGE_FORMAT.
        identity: Whatever the result depends on: digests of inputs and the stage's own config (JSON values).
        work: Does the stage; returns its result as JSON values.
        part: Distinguishes several manifests of one stage (a bucket, a role).
        intact: Tells whether a result's output is still there and undamaged; if not, it is made again.

    Returns:
        The result, with `seconds` (wall time of the run that made it) and `reused`.

    Raises:
        UsageError: The night is finished and never had this stage.
    """
    wanted = stage_fingerprint(name, identity)
    uri = night.uri(name, "manifests", f"{name}{'-' if part else ''}{part}.json")
    places = [uri] if night.force != name else []
    if places and night.beside is not None and name in SHARED:
        places.append(store.join(night.home, "nights", night.beside, "manifests", uri.rpartition("/")[2]))
    stands = night.finished and night.force != name
    said = f"{name} {part}".rstrip()
    otherwise = "the stage has no result any more" if stands else f"{said} is done again"
    for manifest in filter(None, (rebased(read_or_warn(place, otherwise), night.home) for place in places)):
        same = manifest["fingerprint"] == wanted
        if stands or (same and intact(manifest["result"])):
            logger.info("%s: already done, reused", said)
            return {**manifest["result"], "fingerprint": manifest["fingerprint"], "reused": True}
        if same:
            logger.warning("%s: its output is missing or damaged; it is made again", said)
    if stands:
        raise UsageError(_nothing_to_repeat(night, name), where=name)
    # The work replaces the output: the old manifest must not outlive it (a kill in between would pair them wrongly).
    store.remove(uri)
    started = time.perf_counter()
    try:
        with (
            progress.of_stage(night.home, night.key, name),
            store.answering(night.home),
        ):  # also what Polars or MLflow met there
            result = work()
    except BaseException as error:
        full = space.named(night.home, error)
        (full or error).add_note(f"{STAGE_NOTE}{name}")
        if full is not None:
            raise full from error
        raise
    result["seconds"] = round(time.perf_counter() - started, 3)
    store.write_json(uri, {"fingerprint": wanted, "format": STAGE_FORMAT[name], "result": result})
    return {**result, "fingerprint": wanted, "reused": False}
