"""The `source` section of a config: where raw events come from, as data and not as code.

Feeds, side tables, actions and times by declaration. `gr_core.config` holds the rest and reads the file.
"""

from __future__ import annotations

import math
import re
from datetime import date as Date
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gr_core.checks_config import ChecksConfig
from gr_core.schema import PACK_COLUMNS, action_time, event_schema
from gr_core.section import Days, Seconds, Section, Seed

MAX_ACTIONS = 31  # the masks are int32, and bit 31 is the sign
RESERVED = frozenset([*event_schema((), ()).names, *PACK_COLUMNS])  # columns of the table and of packs
_KEYS = frozenset(["user_id", "item_id", "request_id", "event_id"])  # text, by which a side table can be joined
NAME_PATTERN = r"^[a-z][a-z0-9_]*$"
MAX_NAME = 40
Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=MAX_NAME)]


def _delay(value: Any) -> Any:
    if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
        raise ValueError("must be a finite number of seconds, at least 0, or SQL over the impression row")
    return value


def _below_root(path: str) -> str:
    parts = path.split("/")
    if not set(parts) - {"", "."} or path.startswith("/") or "://" in path or ".." in parts:
        raise ValueError(
            "must be a path below source.root, such as dt={date}/*.parquet: not empty, not absolute, without '..'; "
            "name another place by source.root"
        )
    if any("**" in part and part != "**" for part in parts):
        raise ValueError("must have ** alone between slashes, such as dt={date}/**/*.parquet")
    return path


Delay = Annotated[float | str, BeforeValidator(_delay)]
FilePath = Annotated[str, AfterValidator(_below_root)]


class TimeColumn(Section):
    """A time by declaration: raw column with its unit (numbers) or format (text), and its zone."""

    column: str
    """Raw column that holds the time."""
    unit: Literal["s", "ms", "us", "ns"] | None = None
    """Unit of an integer column; leave out for timestamps and text."""
    format: str | None = None
    """strptime format of a text column, for example %Y-%m-%d %H:%M:%S."""
    zone: str = "UTC"
    """Zone of times that carry none."""


class ActionConfig(Section):
    """One action: its bit number is its place in the list, which is append only."""

    name: Name
    """The action's name, used in metric keys."""
    attribution_window_seconds: Seconds = 0
    """From shown_at on, how long the label may still change; 0: final in the row."""
    supervise: bool = True
    """False: read as input, never trained or evaluated."""


class FeedConfig(Section):
    """One raw feed."""

    name: Name
    """The feed's name, used in messages and quarantine."""
    role: Literal["events", "bootstrap", "actions"] = "events"
    """events: impressions; bootstrap: bulk history read once as the first commit; actions: joined by key."""
    path: FilePath
    """Glob below source.root; {date} stands for the day as YYYY-MM-DD."""
    format: Literal["parquet", "csv", "ndjson"] = "parquet"
    """File format; csv and ndjson may be gzip-compressed (.gz)."""
    ignore: tuple[str, ...] = ("_*", ".*")
    """File names (globs) that are not data."""
    types: dict[str, str] = Field(default_factory=dict)
    """Declared raw column types; needed for csv and ndjson: string, int32, int64, float64, bool."""
    event_id: str | None = None
    """Raw column with the feed's own event id."""
    event_key: tuple[str, ...] = ()
    """Raw columns that together identify an event where the feed has no id; joined with ':'."""
    shown_at: TimeColumn | None = None
    """When the impression was made."""
    acted_at: TimeColumn | None = None
    """When the action was taken (role actions)."""
    on: tuple[str, ...] = ()
    """Key columns of an actions feed, in the order of the events feed's event_key."""
    due: bool = True
    """Bootstrap only. True: supervised by the first night; false: context only."""
    visibility_delay_seconds: Delay | None = None
    """This feed's own visibility delay; unset: source.visibility_delay_seconds."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Contract column (user_id, item_id, request_id) = SQL over raw columns."""
    actions: dict[str, str] = Field(default_factory=dict)
    """Action = boolean SQL; null means unknown; an action left out is unknown."""
    action_times: dict[str, TimeColumn] = Field(default_factory=dict)
    """Action = raw column with the time it was taken, where the row knows it."""
    side: dict[str, str] = Field(default_factory=dict)
    """Side feature = SQL; only what was known when shown, never an outcome."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.role == "actions":
            return self._complete_actions()
        if self.on or self.acted_at:
            raise ValueError("on and acted_at belong to a feed with role actions")
        missing = {"user_id", "item_id"} - set(self.columns)
        if missing:
            raise ValueError(f"columns must map {sorted(missing)}")
        if self.shown_at is None:
            raise ValueError("shown_at must be declared")
        if bool(self.event_id) == bool(self.event_key):
            raise ValueError("give event_id or event_key, one of the two")
        unknown = set(self.columns) - {"user_id", "item_id", "request_id"}
        if unknown:
            raise ValueError(f"columns knows user_id, item_id, request_id, not {sorted(unknown)}")
        return self

    def _complete_actions(self) -> Self:
        if not (self.acted_at and self.on and self.actions):
            raise ValueError("an actions feed needs acted_at, on and actions")
        names = ("event_id", "event_key", "shown_at", "visibility_delay_seconds", "columns", "action_times", "side")
        foreign = [name for name in names if getattr(self, name) not in (None, (), {})]
        if foreign:
            raise ValueError(f"an actions feed has no {foreign}: its rows are found by on and timed by acted_at")
        return self


class TableConfig(Section):
    """A side table, joined at ingestion."""

    name: Name
    """The table's name, used in messages."""
    path: FilePath
    """Path below source.root; with {date}: one snapshot a day, joined as of shown_at."""
    format: Literal["parquet", "csv", "ndjson"] = "parquet"
    """File format."""
    types: dict[str, str] = Field(default_factory=dict)
    """Declared raw column types; needed for csv and ndjson."""
    on: dict[str, str] = Field(min_length=1)
    """Contract column (user_id, item_id, request_id, event_id, a side feature) = raw key column of the table."""
    snapshot_lag_days: Days = 1
    """Days until a snapshot counts as complete (only with {date})."""
    missing: Literal["unknown", "quarantine"] = "unknown"
    """An event without a row: null side features, counted; or quarantined."""
    side: dict[str, str]
    """Side feature = SQL over the table's raw columns."""


class WorldConfig(Section):
    """The embedded world: a seeded source of raw daily files (gr_core.data.synthetic)."""

    seed: Seed = 0
    """Seed of the world; another seed is another world."""
    start: Date
    """The world's first day."""
    num_users: int = Field(default=2000, ge=10)
    """Users of the world."""
    num_items: int = Field(default=400, ge=20)
    """Items alive at any time."""
    sessions_per_user_day: float = Field(default=1.0, gt=0)
    """Mean sessions of a user and day (at most 4 are held)."""
    bot_events: int = Field(default=400, ge=0)
    """Impressions of the one bot a day; above source.daily_cap to be cut."""
    taste_shift_day: int = Field(default=0, ge=0)
    """From this day of the world on (1: the first) users want another category than before, to measure how fast a lineage
    follows; 0: they never change."""


class SourceConfig(Section):
    """Where raw events come from. Nothing about a feed is code."""

    root: str
    """URI or path of the raw files; a relative path is below the working directory."""
    visibility_delay_seconds: Delay = 0.0
    """From shown_at until the event is history: seconds, or SQL over the impression row."""
    lateness_seconds: Seconds = 0
    """Added to every attribution window before a label is final."""
    max_clock_skew_seconds: Seconds = 7200
    """Rows shown later than the end of their feed day by more than this go to quarantine."""
    daily_cap: int = Field(default=1000, ge=1, le=10**9)
    """Events of a user and lake day beyond it go to quarantine, over all commits."""
    missing_day: Literal["stop", "warn"] = "stop"
    """No file for the day: stop with an error, or warn and go on with what is due."""
    restate: Literal["update", "replace"] = "update"
    """A restated day: rows update the ones they repeat, or replace the whole day: what is not delivered again goes."""
    restate_days: int = Field(default=0, ge=0, le=3650)
    """Feed days back whose files are compared with what was read of them; those that changed are read again. 0: none."""
    dedup_days: Days = 30
    """Days back within which a repeated event_id is found, also when its shown_at was restated."""
    pseudonymise_users: bool = False
    """Keep users by a keyed hash of their ids; never changes in a home."""
    user_key_variable: str = Field(default="DAYBREAK_USER_KEY", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable with the key (16 to 64 bytes) of pseudonymise_users."""
    checks: ChecksConfig = ChecksConfig()
    """Data checks of each ingestion against the last days."""
    actions: tuple[ActionConfig, ...] = Field(min_length=1, max_length=MAX_ACTIONS)
    """Actions; the bit number is the place in this list."""
    feeds: tuple[FeedConfig, ...] = Field(min_length=1)
    """Raw feeds."""
    tables: tuple[TableConfig, ...] = ()
    """Side tables."""
    world: WorldConfig | None = None
    """Set: raw files of a day that are missing are generated by the embedded world."""

    @model_validator(mode="after")
    def _restates(self) -> Self:
        if self.restate == "replace" and self.restate_days == 0:
            raise ValueError(
                "source.restate = 'replace' needs source.restate_days above 0: how many days back a changed delivery is read"
            )
        return self

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [action.name for action in self.actions]
        owners = (("feeds", [f.name for f in self.feeds]), ("tables", [t.name for t in self.tables]))
        for kind, listed in (("actions", names), *owners):
            if len(set(listed)) != len(listed):
                raise ValueError(f"source.{kind}: a name stands twice in {listed}")
        for feed in self.feeds:
            unknown = (set(feed.actions) | set(feed.action_times)) - set(names)
            if unknown:
                raise ValueError(
                    f"source.feeds[{feed.name}]: actions {sorted(unknown)} are not in source.actions {names}"
                )
        if sum(feed.role == "events" for feed in self.feeds) != 1:
            raise ValueError("source.feeds must have exactly one feed with role events")
        for feed in self.feeds:
            if feed.role == "actions":
                self._check_actions_feed(feed)
        for name in names:
            if action_time(name) in RESERVED:
                raise ValueError(
                    f"source.actions: {name} must have another name, {action_time(name)} is a contract column"
                )
        sides = [(f"source.feeds[{feed.name}].side", name) for feed in self.feeds for name in feed.side]
        sides += [(f"source.tables[{table.name}].side", name) for table in self.tables for name in table.side]
        for key, name in sides:
            _check_side(f"{key}.{name}", name, names)
        return self

    @model_validator(mode="after")
    def _table_keys(self) -> Self:
        for table in self.tables:
            unknown = set(table.on) - _KEYS - set(self.side_features)
            if unknown:
                raise ValueError(
                    f"source.tables[{table.name}].on: {sorted(unknown)} are neither {sorted(_KEYS)} nor side features "
                    f"{self.side_features}, by which tables are joined"
                )
        return self

    def _check_actions_feed(self, feed: FeedConfig) -> None:
        """Check that an actions feed's rows can meet an impression: equally long keys, and windows to meet in."""
        events = next(feed for feed in self.feeds if feed.role == "events")
        key = events.event_key or (events.event_id or "",)
        if len(feed.on) != len(key):
            raise ValueError(
                f"source.feeds[{feed.name}].on must have one column for each of the events feed's id {list(key)}, "
                f"in that order, got {list(feed.on)}"
            )
        endless = [a.name for a in self.actions if a.name in feed.actions and a.attribution_window_seconds == 0]
        if endless:
            raise ValueError(
                f"source.actions: {endless} must have attribution_window_seconds above 0, since the actions feed "
                f"{feed.name} brings them after the impression: 0 says that the label is final in the row"
            )

    @property
    def fed_mask(self) -> int:
        """Bit mask of the actions that an actions feed brings; 0 where the labels stand in the impressions' rows."""
        fed = {name for feed in self.feeds if feed.role == "actions" for name in feed.actions}
        return sum(1 << bit for bit, action in enumerate(self.actions) if action.name in fed)

    @property
    def action_names(self) -> list[str]:
        """Names of all actions in bit order."""
        return [action.name for action in self.actions]

    @property
    def supervised_mask(self) -> int:
        """Bit mask of the actions that are trained and evaluated."""
        return sum(1 << bit for bit, action in enumerate(self.actions) if action.supervise)

    @property
    def side_features(self) -> list[str]:
        """Names of all side features, feeds first, in config order, each once."""
        owners = [*(f.side for f in self.feeds), *(t.side for t in self.tables)]
        return list(dict.fromkeys(name for owner in owners for name in owner))

    def feed(self, role: str) -> FeedConfig | None:
        """Return the first feed with this role."""
        return next((feed for feed in self.feeds if feed.role == role), None)


def _check_side(key: str, name: str, actions: list[str]) -> None:
    """Check a side feature's name, which becomes a column of the event table, a table and a file."""
    if name.lower() in RESERVED:
        rule = "may not be a contract column"
    elif name.lower() in {action_time(action) for action in actions}:
        rule = "may not be the column of an action's time"
    elif name.lower() == "seen" or name.lower().endswith("_new"):
        rule = "may not be seen or end in _new, which joins of the lake use"
    elif not re.fullmatch(NAME_PATTERN, name) or len(name) > MAX_NAME:
        rule = f"must be lower-case letters, digits and _, first a letter, at most {MAX_NAME} of them"
    else:
        return
    raise ValueError(f"{key}: the name of a side feature {rule}, got {name!r}; give it another name")
