"""What stands in the journal: an entry and the payload of each of its kinds.

An entry is (seq, at_us, kind, night, payload). `night` is the night's key: its date, or the name of a separately
named attempt (an experiment, a full retrain). The payload of each kind is the TypedDict of that name below; a
writer may add keys of its own:

    opened      Opened       pins a night, before any other stage; the first one of a night counts
    attempt     Attempt      a retry or re-run of an unfinished night, or a forced stage
    ingested    Ingested     the night's commit in the event table
    registered  Registered   the challenger is in the registry, before the gate
    decided     Decided      the gate's word; promote makes the version the champion
    promoted    Moved        an operator made a version the champion
    rollback    Moved        an operator or the next-night check went back to an earlier version
    retracted   Retracted    a commit's rows were taken back; versions trained on them are tainted, never used again
    forgotten   Forgotten    a user's rows were erased; who it was stands nowhere
    pruned      Pruned       files of versions and nights that nothing needs are removed from here on
    finished    Finished     the night is over and immutable from here on
    failed      Failed       the attempt ended with an error
    cancelled   Failed       the attempt was stopped by an operator
    window      Window       a full retrain starts a window, or has trained it
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

KINDS = (
    "opened",
    "attempt",
    "ingested",
    "registered",
    "decided",
    "promoted",
    "rollback",
    "retracted",
    "forgotten",
    "pruned",
    "finished",
    "failed",
    "cancelled",
    "window",
)
WINDOW = "window-"  # begins the folder of a full retrain's window, below the retrain's own
Mode = Literal["nightly", "backfill", "full_retrain"]


def window_folder(number: int) -> str:
    """Return the name of the folder of a full retrain's window."""
    return f"{WINDOW}{number:03d}"


class Parent(TypedDict):
    """The model a night starts from."""

    version: int | None  # None: a checkpoint that has no version
    checkpoint: str  # URI
    watermark: dict[str, Any]  # Bound.to_json()
    date: NotRequired[str]
    vocabulary: NotRequired[str]  # URI


class Opened(TypedDict):
    """Payload of `opened`: all that re-runs must not resolve again."""

    date: str  # lake day, YYYY-MM-DD
    mode: Mode
    parent: Parent | None
    cutoff_us: int
    fingerprint: str  # of the resolved config
    seed: int
    experiment: NotRequired[str | None]
    beside: NotRequired[str | None]  # key of the night that an experiment is set beside
    prepared_by: NotRequired[str]  # key of the experiment that opened the night; its own first start is an attempt
    config: NotRequired[dict[str, Any]]  # resolved
    bound: NotRequired[dict[str, Any]]  # of a full retrain: Bound.to_json() of all that it trains on first
    erasures: NotRequired[int]  # of a full retrain: of the event table when the bound was pinned


class Attempt(TypedDict):
    """Payload of `attempt`."""

    fingerprint: str
    difference: dict[str, list[Any]]  # dotted key -> [before, now]; empty for a plain retry
    reason: NotRequired[str]  # for example "retry", "force train"
    parent: NotRequired[Parent | None]  # pinned anew, since the one pinned before was tainted by a retraction
    bound: NotRequired[dict[str, Any]]  # of a full retrain, pinned anew since rows were removed from the table
    erasures: NotRequired[int]


class Ingested(TypedDict):
    """Payload of `ingested`."""

    commit: int
    delta_version: int
    rows: dict[str, int]  # Rows.to_json()
    action_rows: NotRequired[dict[str, int]]
    figures: NotRequired[dict[str, Any]]  # data.checks: what later days are compared with
    findings: NotRequired[list[dict[str, str]]]  # data.checks: Finding.to_json()


class Registered(TypedDict):
    """Payload of `registered`."""

    version: int
    checkpoint: str  # URI
    watermark: dict[str, Any]  # Bound.to_json()
    digest: NotRequired[str]
    date: NotRequired[str]
    vocabulary: NotRequired[str]  # URI
    config: NotRequired[dict[str, Any]]  # resolved


class Decided(TypedDict):
    """Payload of `decided`."""

    decision: Literal["promote", "hold"]
    reasons: list[str]
    version: int
    previous: int | None  # champion before the decision
    figures: NotRequired[dict[str, Any]]


class Moved(TypedDict):
    """Payload of `promoted` and `rollback`: the champion is moved outside a night's gate."""

    version: int  # champion from now on
    previous: int | None  # champion until now
    reason: str  # for example "rolled back by an operator"


class Retracted(TypedDict):
    """Payload of `retracted`; the entry's night is the one that the commit names."""

    commits: list[int]  # numbers whose rows were removed
    date: str | None  # lake day, where the operator named one
    reason: str
    rows: int  # moved to quarantine
    restored: int  # events of earlier commits whose content from before the commit is back
    kept: int  # events that the commit had changed and that stay as they are
    tainted: list[int]  # versions trained on the rows, by number
    previous: int | None  # champion until now
    next_parent: int | None  # champion from now on: the newest untainted ancestor; None: the next night is a first one


class Forgotten(TypedDict):
    """Payload of `forgotten`."""

    rows: dict[str, int]  # removed: events, sequences, packs


class Pruned(TypedDict):
    """Payload of `pruned`, written before the first file goes."""

    versions: list[int]  # without checkpoint, vocabulary and registered files; never used again
    nights: list[str]  # keys: without what their stages wrote
    keep: int  # prune.keep_versions of that run


class Finished(TypedDict):
    """Payload of `finished`."""

    state: Literal["completed", "no_data"]
    bound: dict[str, Any] | None  # Bound.to_json(); counts as scored, so its events are never new again
    status: dict[str, Any]  # the night's figures or its whole status object (example 7)
    ended_us: NotRequired[int]  # the entry's own time is that of the attempt's start


class Window(TypedDict):
    """Payload of `window`: one stretch of days of a full retrain, warm-started from the one before."""

    number: int  # from 1 on
    of: int  # windows that are planned; those after them catch up
    through: str  # its last lake day
    recipe: str  # fingerprint of what decides the weights; windows of another one are not gone on from
    bound: dict[str, Any]  # Bound.to_json(), pinned when the window starts
    state: Literal["started", "trained"]
    checkpoint: NotRequired[str]  # URI, once trained
    vocabulary: NotRequired[str]  # URI
    digest: NotRequired[str]
    counts: NotRequired[dict[str, int]]  # events: due, train, due_holdout
    seconds: NotRequired[dict[str, float]]  # by stage


class Failed(TypedDict):
    """Payload of `failed` and `cancelled`."""

    stage: str
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One journal entry."""

    seq: int
    """1, 2, 3, ...: the order of the truth."""
    at_us: int
    kind: str
    night: str
    payload: dict[str, Any] = field(default_factory=dict)
