"""`daybreak prune`: removes what no night, no rollback and no repeat needs any more, and says why the rest stays.

The journal is told first, so that a run that was killed half way is taken up by the next one: whatever is still there
and not kept goes. Records stay: the journal's, the registry's (tagged), each night's manifests and page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gr_core import environment
from gr_core.config import Config
from gr_core.config_rules import check_lake
from gr_core.errors import UsageError
from gr_core.lake import keeping, store
from gr_core.lake.events import EventTable
from gr_core.lake.journal import Entry, Journal, nights
from gr_core.lake.keeping import Keep
from gr_core.lake.ledger import ever_registered
from gr_core.lake.lock import alone
from gr_core.lake.pruned import Pruned
from gr_core.refs import iso
from gr_core.registry.base import ModelStore
from gr_core.stages import aliases

logger = logging.getLogger(__name__)

RETENTION_HOURS = 24  # files of the event table that left it since then stay, whoever reads them
RECORDS = ("manifests", "page.html")
"""What stays of every night."""
_UNFINISHED = (".tmp-", ".old-")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Removal:
    """One line of what goes."""

    what: str
    bytes: int
    remove: Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What goes, and what stays."""

    versions: list[int] = field(default_factory=list)
    nights: list[str] = field(default_factory=list)
    removals: list[_Removal] = field(default_factory=list)
    kept: list[dict[str, str]] = field(default_factory=list)

    def told(self, *, dry_run: bool) -> dict[str, Any]:
        """Return the object of example 7."""
        removed = [{"what": one.what, "bytes": one.bytes} for one in self.removals]
        return {"dry_run": dry_run, "removed": removed, "kept": self.kept}


def prune(
    config: Config,
    home: str,
    *,
    at_us: int,
    keep: int | None = None,
    dry_run: bool = False,
    retention_hours: int = RETENTION_HOURS,
) -> dict[str, Any]:
    """Remove files of versions and nights that nothing needs, and of old versions of the event table.

    Args:
        config: The run's config; prune.keep_versions and lake.rerun_days say how much stays beside what must.
        home: URI of the home.
        at_us: The time of the journal entry, microseconds since the epoch.
        keep: Instead of prune.keep_versions.
        dry_run: Only say what would go; nothing is written, and no lock taken.
        retention_hours: Files that left the event table within so many hours stay.

    Returns:
        dry_run, removed ([{"what", "bytes"}]), kept ([{"what", "why"}]).

    Raises:
        UsageError: `keep` below 1, or a night is running; nothing has changed.
        ConfigError: The config's lake is not the home's; nothing has changed.
        StoreUnavailable: Storage did not answer; run it again to go on.
    """
    number = config.prune.keep_versions if keep is None else keep
    if number < 1:
        raise UsageError(f"--keep takes a number of versions from 1 on, got {number}", where="keep")
    journal = Journal(store.join(home, "lake", "journal"))
    entries = journal.entries()
    check_lake(config, entries)
    if dry_run or not entries:
        return _plan(config, home, entries, number, retention_hours).told(dry_run=dry_run)
    with alone(home, "prune"):
        aliases.repair_if_moved(config, home)
        store.remove_leftovers(home)
        entries = journal.entries()
        plan = _plan(config, home, entries, number, retention_hours, tags={"pruned": iso(at_us)})
        _announce(journal, entries, plan, number, at_us)
        for one in plan.removals:
            one.remove()
            logger.info("pruned %s, %d bytes", one.what, one.bytes)
    return plan.told(dry_run=False)


def _announce(journal: Journal, entries: Sequence[Entry], plan: _Plan, keep: int, at_us: int) -> None:
    """Tell the journal what goes, before anything does; what it knows already is not told again."""
    before = Pruned.of(entries)
    versions = [version for version in plan.versions if version not in before.versions]
    keys = [key for key in plan.nights if key not in before.nights]
    if versions or keys:
        payload = {"versions": versions, "nights": keys, "keep": keep}
        journal.append("pruned", "prune", payload, at_us=at_us, expect=entries[-1].seq)


def _plan(
    config: Config,
    home: str,
    entries: Sequence[Entry],
    keep_versions: int,
    retention_hours: int,
    tags: dict[str, str] | None = None,
) -> _Plan:
    rerun_days = config.lake.rerun_days
    kept = keeping.kept(entries, keep_versions=keep_versions, rerun_days=rerun_days)
    plan = _Plan(versions=sorted(set(ever_registered(entries)) - kept.versions.keys()))
    _plan_nights(plan, home, entries, kept)
    _plan_models(plan, config, home, entries, tags or {})
    _plan_table(plan, config, home, entries, retention_hours)
    return plan


def _plan_nights(plan: _Plan, home: str, entries: Sequence[Entry], kept: Keep) -> None:
    known, root = ever_registered(entries), store.join(home, "nights")
    there = _folders(root)
    for version, why in sorted(kept.versions.items()):
        _stays(plan, f"version {version} of {known[version].night}", why)
    for key, record in nights(entries).items():
        sizes = there.pop(key, {})
        if key in kept.nights:
            _stays(plan, f"night {key}", kept.nights[key])
        for (_, folder), why in ((place, why) for place, why in kept.folders.items() if place[0] == key):
            if folder in sizes and not all(one.startswith("version ") for one in why):
                _stays(plan, f"{folder} of night {key}", why)
        if key in kept.nights and not record.is_finished:
            continue  # somebody may be writing there
        left = [name for name in sizes if name.rpartition("/")[2].startswith(_UNFINISHED)]
        if key in kept.nights:
            gone = left
        else:
            plan.nights.append(key)
            gone = [name for name in sizes if name not in RECORDS and (key, name) not in kept.folders]
        if gone:
            what = f"night {key}: {', '.join(sorted({name.partition('-')[0] for name in gone}))}"
            _goes(plan, what, sum(sizes[name] for name in gone), _remover(home, key, gone))
    for key in sorted(there):
        _stays(plan, f"folder {key} of nights", ["the journal does not know it"])


def _plan_models(plan: _Plan, config: Config, home: str, entries: Sequence[Entry], tags: dict[str, str]) -> None:
    """Add the registered files of versions that go; a version that the registry tagged has none, nor one that it lost."""
    if not plan.versions:
        return
    from gr_core.registry.mlflow_store import MlflowStore  # costs a second, and most runs find nothing

    models: ModelStore = MlflowStore(environment.tracking_uri(home), environment.artifact_root(home), config.name)
    known = ever_registered(entries)
    for version in plan.versions:
        try:
            if "pruned" in models.version(version).tags:
                continue
        except UsageError:
            logger.warning("the registry has no version %d of the journal; there is nothing to prune in it", version)
            continue

        def drop(version: int = version) -> None:
            models.drop_model(version, tags)

        with store.answering(environment.artifact_root(home)):
            size = models.model_bytes(version)
        _goes(plan, f"version {version} of {known[version].night}: registered model files", size, drop)


def _plan_table(plan: _Plan, config: Config, home: str, entries: Sequence[Entry], retention_hours: int) -> None:
    """Add the files of event table versions that nobody reads."""
    needed = keeping.delta_versions(entries, config.lake.rerun_days)
    for version, keys in needed.items():
        _stays(plan, f"event table version {version}", [f"read by {', '.join(keys)}"])
    table = EventTable(store.join(home, "lake", "events"), config)
    stale = table.stale_files(keep_versions=needed, retention_hours=retention_hours)
    if stale:
        what = f"event table: {len(stale)} files of old versions"
        _goes(
            plan,
            what,
            sum(stale.values()),
            lambda: table.maintain(keep_versions=needed, retention_hours=retention_hours),
        )


def _folders(root: str) -> dict[str, dict[str, int]]:
    """Return the bytes of every folder or file of every night: {night: {name: bytes}}, one listing."""
    found: dict[str, dict[str, int]] = {}
    for one in store.listing(root):
        night, _, rest = one.name.partition("/")
        parts = rest.split("/")
        # what a killed process left lies beside what it was to become, at any depth
        deep = next((place for place, part in enumerate(parts) if part.startswith(_UNFINISHED)), 0)
        name = "/".join(parts[: deep + 1]) if deep else parts[0]
        sizes = found.setdefault(night, {})
        sizes[name] = sizes.get(name, 0) + one.size
    return found


def _remover(home: str, key: str, names: Sequence[str]) -> Callable[[], None]:
    def remove() -> None:
        for name in names:
            uri = store.join(home, "nights", key, name)
            if not store.is_local(uri) or store.local_path(uri).is_dir():
                store.remove_tree(uri)
            store.remove(uri)
        if not store.is_local(home):  # what training had written before it was uploaded
            store.remove_tree(str(environment.state_directory(home) / "nights" / key))

    return remove


def _goes(plan: _Plan, what: str, size: int, remove: Callable[[], object]) -> None:
    plan.removals.append(_Removal(what=what, bytes=size, remove=remove))


def _stays(plan: _Plan, what: str, why: Sequence[str]) -> None:
    plan.kept.append({"what": what, "why": "; ".join(dict.fromkeys(why))})
