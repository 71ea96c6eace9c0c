"""Stages from raw files to the event table: the check before anything is written, and the day's one commit."""

from __future__ import annotations

import logging
from datetime import date as Date
from datetime import timedelta
from typing import Any

from gr_core.config import AttentionConfig, Config, FeedConfig
from gr_core.data import actions, checks, contract, due
from gr_core.lake import manifests, source, store, tombstones, userkey
from gr_core.lake.commits import Commit
from gr_core.lake.events import EventTable
from gr_core.lake.journal import bound_nights_ago, finished_bounds
from gr_core.night import Night, resolve_root, run_stage
from gr_core.stages.budgeting import check_budget

logger = logging.getLogger(__name__)

BOOTSTRAP = "bootstrap"
DEEP_CHECK_BYTES = 256 * 2**20  # larger days are not read twice: damage inside a file then shows at ingestion


def preflight(config: Config, home: str, day: Date) -> list[source.SourceFile]:
    """Check a day's raw files before any state changes.

    An embedded world writes its missing files first: they are the source, not the state.

    Raises:
        DataContractError: A missing day, an unreadable file, a missing or mistyped column. Days up to
            DEEP_CHECK_BYTES are read whole, so that damage inside a file is found here too.
        ConfigError: A setting that this release cannot honour.
    """
    check_supported(config)
    config = resolve_root(config, home)
    if config.source.world is not None:
        from gr_core.data import synthetic

        synthetic.ensure_day(store.local_path(config.source.root), config.source.world, day)
    table = EventTable(store.join(home, "lake", "events"), config)
    userkey.check(config, home, started=table.exists())
    first = config.source.feed("bootstrap") is not None and table.find(BOOTSTRAP) is None
    files = source.preflight(config, day, bootstrap=first)
    feed = config.source.feed("events")
    if (
        feed is not None
        and table.find(day.isoformat()) is None
        and sum(file.size for file in files) <= DEEP_CHECK_BYTES
    ):
        contract.read_day(config, day, files, feed=feed)
        read_actions(config, [(day, files)])
    return files


def read_actions(
    config: Config, deliveries: list[tuple[Date, list[source.SourceFile]]], cutoff_us: int = 0
) -> actions.ActionBatch | None:
    """Read the files of all actions feeds.

    Args:
        config: The run's config.
        deliveries: Feed days with their files; those of other feeds are passed over.
        cutoff_us: The night's cutoff.

    Returns:
        The batch; None where the source has no actions feed.

    Raises:
        DataContractError: As `actions.read_actions`.
    """
    feeds = [feed for feed in config.source.feeds if feed.role == "actions"]
    if not feeds:
        return None
    parts = (actions.read_actions(config, day, files, feed=feed) for day, files in deliveries for feed in feeds)
    return actions.concat(parts, cutoff_us)


def _action_files(config: Config, day: Date) -> list[source.SourceFile]:
    feeds = [feed for feed in config.source.feeds if feed.role == "actions"]
    return [file for feed in feeds for file in source.list_files(config, day, feed)]


def restated(
    config: Config, table: EventTable, day: Date, feed: FeedConfig
) -> list[tuple[Date, list[source.SourceFile]]]:
    """Find the feed days of the last `source.restate_days` whose files are not those that were ingested, oldest first.

    A day that no night ingested, or that has no file now, is not restated.

    Args:
        config: The run's config.
        table: The event table.
        day: The night's own feed day.
        feed: The events feed; the files of the actions feeds belong to a day's delivery.
    """
    found = []
    for back in range(config.source.restate_days, 0, -1):
        earlier = day - timedelta(days=back)
        was, numbers = table.delivered(earlier.isoformat())
        if not numbers:
            continue
        files = source.list_files(config, earlier, feed)
        if not files:
            continue
        files += _action_files(config, earlier)
        if contract.identity(files) != was:
            logger.info("feed day %s was delivered again, %d files: night %s reads it again", earlier, len(files), day)
            found.append((earlier, files))
    return found


def check_supported(config: Config) -> None:
    """Refuse settings that this release cannot honour, before anything is written."""
    if config.attention != AttentionConfig():
        check_attention(config)
    if config.train.kernels != "auto":
        import torch

        from gr_core.train.compute import check_kernels

        check_kernels(config.train, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    check_budget(config)
    if config.train.compile != "off":
        import torch

        from gr_core.model.execution import check_compiler

        check_compiler(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def check_attention(config: Config) -> None:
    """Refuse an attention path that cannot run on this machine, where training will run too."""
    import torch  # which a config of defaults need not wait for

    from gr_core.model.attention import Circumstances, choose_attention

    choose_attention(
        config.attention,
        Circumstances(
            model=config.model,
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            pack_layout=config.pack.layout,
            time_window=config.pack.time_window_seconds is not None,
            token_budget=config.segment_tokens,
            half_precision=config.train.precision == "bf16",
        ),
    )


def ingest(night: Night) -> dict[str, Any]:
    """Commit the day's raw events to the event table, the bootstrap history first.

    Returns:
        bound (Bound of this night), rows, action_rows (null without an actions feed), reasons, action_reasons,
        labels_changed_after_supervision, bootstrap (its rows or null), figures and findings of the data checks,
        unknown_columns, and what decides what is new and judged: earlier (bounds of finished nights), since,
        context_commits.

    Raises:
        DataContractError: A data check of level stop; nothing was committed.
    """
    if night.beside is not None:
        return _shared_ingestion(night)
    config = night.settings
    table = EventTable(night.table_uri, config)
    journal = night.journal
    parent = night.parent.watermark if night.parent else None
    entries = journal.entries()
    earlier = [bound.to_json() for bound in finished_bounds(entries)]
    since = bound_nights_ago(entries, config.gate.nights)
    past, rules = checks.past_figures(entries, night.key), config.source.checks
    scope = {"earlier": earlier, "since": since.to_json() if since else None}
    removed = table.erasures()
    # rows left since an unfinished night ingested, or its parent was tainted: its bound is made again, and what follows
    changed = {"erasures": removed, "parent": parent.to_json() if parent else None} if removed else {}

    def work() -> dict[str, Any]:
        userkey.remember(config, night.home, started=table.exists())
        first = _commit_history(night, table)
        commit = table.find(night.date) or _commit_day(night, table, checks.Approval(rules, past))
        table.check_rows()
        bound = due.make_bound(config, commit.number, night.cutoff_us, table.pin(commit), parent)
        if parent is not None:
            due.check_not_behind(bound, parent)
        return {
            "bound": bound.to_json(),
            "rows": commit.rows.to_json(),
            "action_rows": commit.action_rows.to_json() if commit.action_rows else None,
            "action_reasons": commit.action_reasons,
            "reasons": commit.reasons,
            "labels_changed_after_supervision": commit.labels_changed_after_supervision,
            "bootstrap": first.rows.to_json() if first else None,
            "figures": checks.figures_of(commit),
            "findings": [found.to_json() for found in checks.judge(rules, past, checks.figures_of(commit))],
            "unknown_columns": commit.unknown_columns,
            **scope,
            "context_commits": context(config, first),
        }

    result = run_stage(night, "ingest", {"night": night.key, "scope": scope, **changed}, work)
    if not result["reused"]:
        payload = {"commit": result["bound"]["commit"], "delta_version": result["bound"]["delta_version"]}
        payload |= {
            key: result[key] for key in ("rows", "action_rows", "reasons", "figures", "findings", "unknown_columns")
        }
        journal.append("ingested", night.key, payload, at_us=night.at_us)
    return result


def _shared_ingestion(night: Night) -> dict[str, Any]:
    """Return the ingestion of the night that an experiment is set beside: a day has one, and both read the same rows."""
    uri = store.join(night.home, "nights", str(night.beside), "manifests", "ingest.json")
    manifest = manifests.recorded(
        uri,
        f"night {night.beside} has no record of its ingestion, which experiment {night.experiment} reads; choose another "
        "night",
    )
    return {**manifest["result"], "fingerprint": manifest["fingerprint"], "reused": True}


def _commit_history(night: Night, table: EventTable) -> Commit | None:
    """Commit the bootstrap history where the source has one and the table does not; return its commit."""
    feed = night.settings.source.feed("bootstrap")
    if feed is None:
        return None
    found = table.find(BOOTSTRAP)
    if found is not None:
        return found
    files = source.list_files(night.settings, night.day, feed)
    stones = tombstones.load(table.lake)
    batch = contract.read_day(night.settings, night.day, files, feed=feed, tombstones=stones)
    return table.ingest(BOOTSTRAP, batch, parent=None)


def _commit_day(night: Night, table: EventTable, approve: checks.Approval) -> Commit:
    """Commit the night's own feed day, with the earlier days that were delivered again and the rows of actions feeds."""
    config = night.settings
    feed = config.source.feed("events")
    assert feed is not None
    files = source.list_files(config, night.day, feed) + _action_files(config, night.day)
    again = restated(config, table, night.day, feed)
    stones = tombstones.load(table.lake)
    batch = contract.read_day(config, night.day, files, feed=feed, tombstones=stones, restated=again)
    acted = read_actions(config, [*again, (night.day, files)], night.cutoff_us)
    parent = night.parent.watermark if night.parent else None
    return table.ingest(night.date, batch, parent=parent, approve=approve, actions=acted)


def context(config: Config, history: Commit | None) -> list[int]:
    """Return the commits that are context only: a bootstrap that is not due."""
    feed = config.source.feed("bootstrap")
    return [history.number] if history is not None and feed is not None and not feed.due else []
