"""`daybreak check`: what a night of a day would make of its raw files, said before anything is written.

In: the config, the home and a day. Out: the one object of example 7, with what each column would become. It reads every
file's columns, a sample of the rows, and what the home knows; it writes nothing, not even the home.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from datetime import date as Date
from pathlib import Path
from typing import Any

import polars as pl

from gr_core import grouping
from gr_core.config import Config, FeedConfig
from gr_core.data import checks, expressions, preview
from gr_core.data.figures import described
from gr_core.data.users import refuse_clear_ids
from gr_core.errors import DaybreakError
from gr_core.eval import power
from gr_core.hashing import is_holdout
from gr_core.lake import rawfile, source, store, userkey
from gr_core.lake.events import EventTable
from gr_core.lake.journal import Entry, Journal, nights
from gr_core.lake.source import SourceFile
from gr_core.night import resolve_root
from gr_core.stages import ingesting, opening

SAMPLED_FILES = 32  # of a feed, evenly spread over its names
SAMPLED_ROWS = 100_000  # of a feed, an equal share of each of those files
_LEAST_ROWS = 500  # of a file
_LISTED = 5  # findings of one kind

Files = list[tuple[SourceFile, dict[str, pl.DataType]]]


@dataclass(kw_only=True)
class Sampled:
    """What was seen of one feed."""

    feed: FeedConfig
    files: int
    rows: int
    """Rows of the day, projected where `exact` is false."""
    exact: bool
    preview: preview.Preview
    unknown: dict[str, int]
    columns: dict[str, str]

    @property
    def scale(self) -> float:
        """Rows of the day for each sampled one."""
        return self.rows / self.preview.rows if self.preview.rows else 1.0

    @property
    def whole(self) -> bool:
        """Whether the sample is the day."""
        return self.exact and self.rows == self.preview.rows


@dataclass
class Findings:
    """Findings in the order in which they were found."""

    found: list[dict[str, str]] = field(default_factory=list)

    def add(self, level: str, where: str, message: str) -> None:
        """Add one: error (the night would not run), warning or info."""
        self.found.append({"level": level, "where": where, "message": message})

    @property
    def ok(self) -> bool:
        """Whether no error was found."""
        return all(one["level"] != "error" for one in self.found)

    def __enter__(self) -> Findings:
        """Turn an error of ours within the block into a finding."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        """Swallow a DaybreakError, now a finding; all others pass."""
        if isinstance(error, DaybreakError):
            self.add("error", error.where or type(error).__name__, error.message)
        return isinstance(error, DaybreakError)


def check(given: Config, home: str, day: Date) -> dict[str, Any]:
    """Check a day without running it.

    Args:
        given: The run's config.
        home: URI of the home, which need not be there.
        day: The lake day.

    Returns:
        ok, findings, would_run and gate_power as in example 7; and date, columns (what each contract column is made of,
        its type, its share of nulls, examples with users masked), sample (rows, sampled rows and reasons of each feed).
    """
    with tempfile.TemporaryDirectory() as scratch:
        config = _rooted(given, home, day, Path(scratch))
        findings, entries = Findings(), Journal(store.join(home, "lake", "journal")).entries()
        _settings(config, home, day, findings)
        feeds = _feeds(config, home, day, findings) if findings.ok else []
        sampled = [one for feed in feeds if (one := _sample(config, day, feed, findings)) is not None]
        tables = _tables(config, day, findings)
        events = next((one for one in sampled if one.feed.role == "events"), None)
        if events is not None:
            _against_past(config, day, events, entries, findings)
        acted = [one for one in sampled if one.feed.role == "actions"]
        gate = _power(config, events, acted, entries, findings)
        return {
            "ok": findings.ok,
            "findings": [
                _where_it_will_be(found, scratch, resolve_root(given, home).source.root) for found in findings.found
            ],
            "would_run": opening.would_run(config, home, day, entries) if findings.ok else [],
            "gate_power": gate.to_json(),
            "date": day.isoformat(),
            "columns": [{"feed": one.feed.name, **column} for one in sampled for column in one.preview.columns]
            + tables,
            "sample": [_told(one) for one in sampled],
        }


def _where_it_will_be(found: dict[str, str], scratch: str, root: str) -> dict[str, str]:
    """Name a file that an embedded world has not written yet as it will be named."""
    return {key: text.replace(scratch, root) for key, text in found.items()}


def _told(one: Sampled) -> dict[str, Any]:
    seen = {"files": one.files, "rows": one.rows, "rows_exact": one.exact, "sampled_rows": one.preview.rows}
    return {"feed": one.feed.name, **seen, "reasons": one.preview.reasons, "unknown_columns": one.unknown}


def _rooted(config: Config, home: str, day: Date, scratch: Path) -> Config:
    """Return the config with its root resolved; a day that an embedded world still has to write goes to scratch."""
    resolved = resolve_root(config, home)
    feed = config.source.feed("events")
    if config.source.world is None or feed is None or source.list_files(resolved, day, feed):
        return resolved
    from gr_core.data import synthetic

    synthetic.ensure_day(scratch, config.source.world, day)
    return config.model_copy(update={"source": config.source.model_copy(update={"root": str(scratch)})})


def _settings(config: Config, home: str, day: Date, findings: Findings) -> None:
    """Find settings, and a day, that a night would refuse."""
    with findings:
        ingesting.check_supported(config)
    with findings:
        opening.refuse(config, home, day)
    with findings:
        refuse_clear_ids(config)
    with findings:
        userkey.check(config, home, started=_table(config, home).exists())
    with findings:
        uncompared = grouping.warning(config, home)
        if uncompared is not None:
            findings.add("warning", "pack.grouping", uncompared)
    running = opening.running(home, day)
    if running is not None:
        findings.add("warning", "night", running)


def _table(config: Config, home: str) -> EventTable:
    return EventTable(store.join(home, "lake", "events"), config)


def _feeds(config: Config, home: str, day: Date, findings: Findings) -> list[FeedConfig]:
    """Return the feeds that a night would read."""
    feeds = [feed for feed in config.source.feeds if feed.role != "bootstrap"]
    bootstrap = config.source.feed("bootstrap")
    with findings:
        if bootstrap is not None and _table(config, home).find(ingesting.BOOTSTRAP) is None:
            feeds.insert(0, bootstrap)
    return feeds


def _sample(config: Config, day: Date, feed: FeedConfig, findings: Findings) -> Sampled | None:
    """Look at one feed's files; None where there is nothing to look at."""
    with findings:
        files = source.list_files(config, day, feed)
        if not files:
            source.missing(config, day, feed)
            findings.add("warning", feed.name, f"feed {feed.name} has no file for {day}; the night goes on without it")
            return None
        usable = _usable(feed, files, config, findings)
        if not usable:
            return None
        counts = [rawfile.count_rows(file.uri, feed.format, file.size) for file, _ in usable]
        step = max(1, -(-len(usable) // SAMPLED_FILES))
        chosen = usable[::step]
        head = max(_LEAST_ROWS, SAMPLED_ROWS // len(chosen))
        seen = preview.look(config, day, feed, chosen, head)
        facts = described(
            config,
            feed,
            [one for one, _ in usable],
            [two for _, two in usable],
            preview.null_counts(config, seen),
            head,
        )
        one = Sampled(
            feed=feed,
            files=len(files),
            rows=sum(rows for rows, _ in counts),
            exact=all(exact for _, exact in counts),
            preview=seen,
            unknown=facts["unknown_columns"],
            columns=facts["figures"]["columns"],
        )
        _rows(one, findings)
        return one
    return None


def _usable(feed: FeedConfig, files: list[SourceFile], config: Config, findings: Findings) -> Files:
    """Return the files that can be read with usable columns; the others are findings. Equal columns are checked once."""
    readable: list[SourceFile] = []
    schemas: list[dict[str, pl.DataType]] = []
    told = 0
    for file in files:
        try:
            schemas.append(rawfile.read_schema(file.uri, feed.format, feed.types, f"source.feeds[{feed.name}]"))
            readable.append(file)
        except DaybreakError as error:
            told += 1
            if told <= _LISTED:
                findings.add("error", error.where or file.uri, error.message)
    if told > _LISTED:
        findings.add("error", feed.name, f"{told - _LISTED} more files of feed {feed.name} cannot be read")
    judged: dict[tuple[tuple[str, str], ...], bool] = {}
    usable: Files = []
    for file, schema in zip(readable, source.completed(feed, schemas), strict=True):
        key = tuple(sorted((name, str(dtype)) for name, dtype in schema.items()))
        if key not in judged:
            judged[key] = _columns_usable(config, feed, file, schema, findings)
        if judged[key]:
            usable.append((file, schema))
    return usable


def _columns_usable(
    config: Config, feed: FeedConfig, file: SourceFile, schema: dict[str, pl.DataType], findings: Findings
) -> bool:
    before = len(findings.found)
    for key, time in expressions.feed_times(feed).values():
        with findings:
            expressions.check_time(time, key, schema, file.uri, feed)
    for value in expressions.feed_values(config.source, feed):
        with findings:
            expressions.check_value(value, schema, file.uri, feed)
    return len(findings.found) == before


def _rows(one: Sampled, findings: Findings) -> None:
    """Tell which sampled rows break the contract, and what the files have that nobody reads."""
    seen, feed = one.preview, one.feed
    nothing = sum(broken.rows for broken in seen.broken if broken.reason != "no_action") == seen.rows > 0
    for broken in seen.broken:
        level = "error" if nothing else "info" if broken.reason == "no_action" else "warning"
        about = f" (column {', '.join(broken.columns)})" if broken.columns else ""
        hint = f"; {broken.hint}" if broken.hint else ""
        shown = f": {broken.text}" if broken.text else ""
        message = (
            f"{broken.reason}: {broken.rows} of {seen.rows} sampled rows{about}{hint}; the first is row {broken.row}"
        )
        findings.add(level, f"{broken.file} row {broken.row}", message + shown)
    if nothing:
        findings.add(
            "error",
            f"source.feeds[{feed.name}]",
            f"feed {feed.name}: none of the {seen.rows} sampled rows is usable; mend the files, or what "
            f"source.feeds[{feed.name}] declares of them",
        )
    for name, files in one.unknown.items():
        message = f"raw column {name} ({files} of {one.files} files) is neither read nor declared"
        findings.add("info", f"source.feeds[{feed.name}]", message)


def _tables(config: Config, day: Date, findings: Findings) -> list[dict[str, Any]]:
    """Find what is wrong with the side tables' columns, and describe what their features are made of."""
    described: list[dict[str, Any]] = []
    for table in config.source.tables:
        with findings:
            columns: list[dict[str, Any]] = []
            for file in source.table_files(config, day, table):
                schema = rawfile.read_schema(file.uri, table.format, table.types, f"source.tables[{table.name}]")
                for value in expressions.table_values(table):
                    expressions.check_value(value, schema, file.uri, table)
                columns = columns or preview.table_columns(table, file, schema, _LEAST_ROWS)
            described += [{"feed": f"table:{table.name}", **column} for column in columns]
    return described


def _against_past(config: Config, day: Date, one: Sampled, entries: list[Entry], findings: Findings) -> None:
    """Judge the sample, scaled to the day, as the night would judge the day."""
    ids = pl.concat([part.select("event_id") for part in one.preview.events])
    counted = preview.null_counts(config, one.preview)
    figures = {
        "files": one.files,
        "columns": one.columns,
        "read": one.rows,
        "duplicates": round((ids.height - ids.n_unique()) * one.scale),
        "reasons": {reason: round(rows * one.scale) for reason, rows in one.preview.reasons.items()},
        "rows": round(counted.rows * one.scale),
        "nulls": {name: round(rows * one.scale) for name, rows in counted.figures()["nulls"].items()},
    }
    about = "" if one.whole else "; projected from a sample"
    for found in checks.judge(config.source.checks, checks.past_figures(entries, day.isoformat()), figures):
        level = "error" if found.level == "stop" else "warning"
        findings.add(level, f"source.checks.{found.check}", found.message + about)


def _power(
    config: Config, one: Sampled | None, acted: list[Sampled], entries: list[Entry], findings: Findings
) -> power.GatePower:
    """Work out the gate's power from past gates where there are some, else from the day's users."""
    past = [record.figures for record in nights(entries).values() if record.is_main and record.figures]
    compared = [(min(n + 1, config.gate.nights), f) for n, f in enumerate(past) if f.get("standard_error")]
    # a home's first windows are shorter than gate.nights, and say little of whole ones
    whole = [figures for number, figures in compared if number == config.gate.nights] or [f for _, f in compared]
    spread = power.measured_spread(whole)
    users, positives = (0.0, 0.0) if one is None else _holdout(config, one, acted)
    if spread is not None:
        number, newest = compared[-1]
        users, positives = newest["users"] / number, newest["positives"] / number
    gate = power.gate_power(users, config.gate, spread)
    if one is None and spread is None:
        return gate
    level, message = power.outlook(users, config.gate, spread, power.measured_difference(whole))
    findings.add(level, "gate", message)
    expected = round(positives * config.gate.nights)
    if expected < config.gate.min_positives:
        findings.add(
            "warning",
            "gate.min_positives",
            f"about {expected} positives of {config.gate.action} in {gate.nights} nights, fewer than gate.min_positives = "
            f"{config.gate.min_positives}: insufficient_data, so {config.gate.insufficient_data}",
        )
    return gate


def _holdout(config: Config, one: Sampled, acted: list[Sampled]) -> tuple[float, float]:
    """Return the day's holdout users and their positives of the gate's action, projected from the sample.

    Of rows of an actions feed, which name no user, they have the share that they have of the impressions.
    Of a part of the day the users are at most those that Chao's estimate knows: seen + once^2 / (2 * twice).
    """
    bit = 1 << config.source.action_names.index(config.gate.action)
    rows = pl.concat([part.select("user_id", "actions") for part in one.preview.events])
    counts = rows.group_by("user_id").agg(pl.len(), positives=((pl.col("actions") & bit) != 0).sum())
    fraction = config.lake.holdout_fraction
    held = counts.filter(pl.Series([is_holdout(user, fraction) for user in counts["user_id"]], dtype=pl.Boolean))
    positives = float(held["positives"].sum()) * one.scale
    for feed in acted:
        taken = pl.concat([part.filter((pl.col("actions") & bit) != 0)["event_id"] for part in feed.preview.events])
        positives += taken.n_unique() * feed.scale * float(held["len"].sum()) / max(rows.height, 1)
    if one.whole or counts.is_empty():
        return float(held.height), positives
    once, twice = (int((counts["len"] == n).sum()) for n in (1, 2))
    unseen = once * once / (2 * max(twice, 1))
    return min(counts.height * one.scale, counts.height + unseen) * fraction, positives
