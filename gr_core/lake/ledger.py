"""What the journal's entries mean: pure folds from entries to nights, versions, champion and bounds; no storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gr_core.lake.entries import Entry, Parent
from gr_core.lake.lineage import Lineage
from gr_core.lake.pruned import Pruned
from gr_core.refs import Bound

MAIN_MODES = ("nightly", "backfill")


@dataclass(frozen=True, kw_only=True, slots=True)
class NightRecord:
    """All that the journal knows of one night."""

    key: str
    date: str
    mode: str
    experiment: str | None = None
    beside: str | None = None
    """Key of the night that an experiment is set beside."""
    parent_version: int | None = None
    parent_checkpoint: str | None = None
    parent_watermark: Bound | None = None
    cutoff_us: int = 0
    seed: int = 0
    fingerprint: str = ""
    """Of the first attempt; a later attempt's stands in its payload."""
    opened_us: int = 0
    updated_us: int = 0
    finished_us: int | None = None
    elapsed_us: int | None = None
    """Of the attempt that finished; nights of older releases have none."""
    finished_seq: int | None = None
    attempts: tuple[dict[str, Any], ...] = ()
    """One payload an attempt: that of `opened`, then those of the `attempt` entries."""
    state: str = "running"
    commit: int | None = None
    delta_version: int | None = None
    rows: dict[str, int] | None = None
    action_rows: dict[str, int] | None = None
    data_findings: tuple[dict[str, str], ...] = ()
    """What the data checks found: check, level, where, message."""
    version: int | None = None
    checkpoint: str | None = None
    watermark: Bound | None = None
    decision: str | None = None
    """promote | hold | None while the gate has not spoken."""
    reasons: tuple[str, ...] = ()
    """The gate's, then what befell the version later."""
    figures: dict[str, Any] = field(default_factory=dict)
    bound: Bound | None = None
    status: dict[str, Any] | None = None
    """As given when the night finished."""
    stage: str | None = None
    error: str | None = None
    windows: tuple[dict[str, Any], ...] = ()  # a full retrain's `window` payloads, those of given-up attempts too

    @property
    def is_finished(self) -> bool:
        """Tell whether the night is over for good (completed or no_data)."""
        return self.finished_us is not None

    @property
    def is_prepared(self) -> bool:
        """Tell whether only an experiment has run the night's stages up to packs, and no start of its own came yet."""
        return "prepared_by" in self.opened and len(self.attempts) == 1 and not self.is_finished

    @property
    def num_attempts(self) -> int:
        """Starts of the night itself."""
        return len(self.attempts) - ("prepared_by" in self.opened)

    @property
    def is_main(self) -> bool:
        """Tell whether the night belongs to the main line: nightly or backfill, no experiment, no named parent."""
        own = self.experiment is None and not self.is_prepared
        return own and self.mode in MAIN_MODES and self.key == self.date

    @property
    def opened(self) -> dict[str, Any]:
        """The payload of the entry that pinned the night."""
        return self.attempts[0]

    @property
    def pinned_parent(self) -> dict[str, Any] | None:
        """The parent as pinned: by the first attempt, or by the one that followed a retraction."""
        return next((attempt["parent"] for attempt in reversed(self.attempts) if "parent" in attempt), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """A registered version."""

    version: int
    night: str
    date: str
    checkpoint: str
    watermark: Bound
    digest: str | None = None
    experiment: str | None = None
    """Name of the experiment that made it: it is never a parent, never a champion, and no alias points at it."""

    def as_parent(self) -> Parent:
        """Return the value of `Opened.parent` for a night that starts from this version."""
        return {"version": self.version, "checkpoint": self.checkpoint, "watermark": self.watermark.to_json()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Champion:
    """The version in use, and the entry that made it so."""

    version: int
    kind: Literal["first", "promoted", "rollback"]
    reasons: tuple[str, ...]
    seq: int
    at_us: int
    model: Version

    @property
    def date(self) -> str:
        """The data day of the champion's night."""
        return self.model.date

    @property
    def checkpoint(self) -> str:
        """The champion's checkpoint URI."""
        return self.model.checkpoint

    @property
    def watermark(self) -> Bound:
        """The champion's watermark."""
        return self.model.watermark

    def as_parent(self) -> Parent:
        """Return the value of `Opened.parent` for a night that starts from the champion."""
        return self.model.as_parent()


def _bound(values: dict[str, Any] | None) -> Bound | None:
    return None if values is None else Bound.from_json(values)


def _parent_fields(payload: dict[str, Any]) -> dict[str, Any]:
    parent = payload.get("parent") or {}
    return {
        "parent_version": parent.get("version"),
        "parent_checkpoint": parent.get("checkpoint"),
        "parent_watermark": _bound(parent.get("watermark")),
    }


def _open(entry: Entry) -> NightRecord:
    payload = entry.payload
    return NightRecord(
        key=entry.night,
        date=payload["date"],
        mode=payload["mode"],
        experiment=payload.get("experiment"),
        beside=payload.get("beside"),
        **_parent_fields(payload),
        cutoff_us=payload["cutoff_us"],
        seed=payload["seed"],
        fingerprint=payload["fingerprint"],
        opened_us=entry.at_us,
        updated_us=entry.at_us,
        attempts=(payload,),
        delta_version=(payload.get("bound") or {}).get("delta_version"),
    )


def _changes(record: NightRecord, entry: Entry) -> dict[str, Any]:
    """Return the fields of an unfinished night that an entry sets."""
    payload = entry.payload
    changes: dict[str, Any] = {}
    match entry.kind:
        case "attempt":
            changes = {"attempts": (*record.attempts, payload), "state": "running", "stage": None, "error": None}
            changes |= _parent_fields(payload) if "parent" in payload else {}
            changes |= {"delta_version": payload["bound"]["delta_version"]} if "bound" in payload else {}
        case "window":
            changes = {"windows": (*record.windows, payload), "delta_version": payload["bound"]["delta_version"]}
        case "ingested":
            changes = {name: payload.get(name) for name in ("commit", "delta_version", "rows", "action_rows")}
            changes["data_findings"] = tuple(payload.get("findings") or ())
        case "registered":
            changes = {name: payload[name] for name in ("version", "checkpoint")}
            changes["watermark"] = _bound(payload["watermark"])
        case "decided":
            changes = {"decision": payload["decision"], "reasons": tuple(payload["reasons"])}
            changes["figures"] = payload.get("figures") or {}
        case "failed" | "cancelled":
            changes = {"state": entry.kind, "stage": payload.get("stage"), "error": payload.get("error")}
        case "finished":
            changes = {"state": payload["state"], "status": payload.get("status") or {}}
            changes["finished_us"] = payload.get("ended_us", entry.at_us)
            changes["elapsed_us"] = payload["ended_us"] - entry.at_us if "ended_us" in payload else None
            changes["finished_seq"] = entry.seq
            changes |= {"bound": _bound(payload.get("bound")), "stage": None, "error": None}
    return changes


def nights(entries: Iterable[Entry]) -> dict[str, NightRecord]:
    """Fold entries into nights, keyed by night, in the order in which they were opened.

    A finished night is immutable: later entries of it (a forced stage) change nothing but the reasons, which
    tell when its version was promoted or rolled back afterwards, and when its rows, or rows that its version was
    trained on, were retracted.
    """
    records: dict[str, NightRecord] = {}
    owners: dict[int, str] = {}
    for entry in entries:
        if entry.kind == "retracted":
            for key, reason in _retraction_reasons(entry, owners).items():
                if key in records:
                    records[key] = dataclasses.replace(records[key], reasons=(*records[key].reasons, reason))
            continue
        if entry.kind in ("promoted", "rollback"):
            owner = owners.get(entry.payload["version" if entry.kind == "promoted" else "previous"])
            if owner is not None:
                reasons = (*records[owner].reasons, str(entry.payload["reason"]))
                records[owner] = dataclasses.replace(records[owner], reasons=reasons)
            continue
        record = records.get(entry.night)
        if record is None:
            if entry.kind == "opened":
                records[entry.night] = _open(entry)
            continue
        if record.is_finished:
            continue
        records[entry.night] = dataclasses.replace(record, updated_us=entry.at_us, **_changes(record, entry))
        if entry.kind == "registered":
            owners[entry.payload["version"]] = entry.night
    return records


def _said(entry: Entry) -> str:
    numbers = ", ".join(str(number) for number in entry.payload["commits"])
    return f"commit {numbers} was retracted: {entry.payload['reason']}"


def _retraction_reasons(entry: Entry, owners: dict[int, str]) -> dict[str, str]:
    """Return what a retraction says of each night: the one of the commit, and those whose version it tainted."""
    payload = entry.payload
    said = _said(entry)
    told = {owners[v]: f"version {v} is tainted, {said}" for v in payload["tainted"] if v in owners}
    own = told.get(entry.night)
    return {**told, entry.night: f"{said}; its version {own.split()[1]} is tainted" if own else said}


def versions(entries: Iterable[Entry]) -> dict[int, Version]:
    """Fold entries into the registered versions, keyed by number; those whose files were pruned are left out."""
    gone = Pruned.of(entries := list(entries)).versions
    return {number: version for number, version in ever_registered(entries).items() if number not in gone}


def ever_registered(entries: Iterable[Entry]) -> dict[int, Version]:
    """Fold entries into all registered versions, keyed by number, also those that have no files any more."""
    opened: dict[str, dict[str, Any]] = {}
    found: dict[int, Version] = {}
    for entry in entries:
        if entry.kind == "opened":
            opened.setdefault(entry.night, entry.payload)
        elif entry.kind == "registered":
            payload, night = entry.payload, opened.get(entry.night, {})
            found[payload["version"]] = Version(
                version=payload["version"],
                night=entry.night,
                date=payload.get("date") or night.get("date", entry.night),
                checkpoint=payload["checkpoint"],
                watermark=Bound.from_json(payload["watermark"]),
                digest=payload.get("digest"),
                experiment=night.get("experiment"),
            )
    return found


def challenger(entries: Iterable[Entry]) -> int | None:
    """Return the version of the newest night that registered one; experiments challenge nobody."""
    made = versions(entries)
    return next((number for number, one in reversed(made.items()) if one.experiment is None), None)


def champions(entries: Sequence[Entry]) -> list[Champion]:
    """Return the stack of champions, the present one last.

    A promotion pushes, a rollback pops down to its version, a retraction takes out what it taints; a tainted version
    is never promoted again. Versions without files, which only earlier champions can be, are left out.
    """
    known = ever_registered(entries)
    last = {entry.night: entry.seq for entry in entries if entry.kind == "decided"}
    lineage = Lineage()
    stack: list[Champion] = []
    for entry in entries:
        payload = entry.payload
        lineage.read(entry)
        if entry.kind == "retracted":
            stack = _retracted(stack, entry, known, lineage.tainted)
            continue
        if entry.kind == "decided" and last[entry.night] != entry.seq:
            continue  # the night was redone before it finished, and decided again
        is_move = entry.kind in ("promoted", "rollback")
        if not is_move and not (entry.kind == "decided" and payload["decision"] == "promote"):
            continue
        version = payload["version"]
        if version not in known or version in lineage.tainted or (stack and stack[-1].version == version):
            continue
        kind: Literal["first", "promoted", "rollback"] = "promoted" if stack else "first"
        if entry.kind == "rollback":
            kind, stack = "rollback", _below(stack, version)
        reasons = (str(payload["reason"]),) if is_move else tuple(payload["reasons"])
        stack.append(_champion(known[version], kind, reasons, entry))
    return [one for one in stack if one.version not in lineage.pruned]


def _champion(
    model: Version, kind: Literal["first", "promoted", "rollback"], reasons: tuple[str, ...], entry: Entry
) -> Champion:
    return Champion(version=model.version, kind=kind, reasons=reasons, seq=entry.seq, at_us=entry.at_us, model=model)


def _below(stack: list[Champion], version: int) -> list[Champion]:
    """Return the champions before a version; none where it never was one."""
    places = [place for place, one in enumerate(stack) if one.version == version]
    return stack[: places[-1]] if places else []


def _retracted(stack: list[Champion], entry: Entry, known: dict[int, Version], tainted: set[int]) -> list[Champion]:
    """Return the stack without what is tainted; where the champion was, its newest untainted ancestor is on top."""
    clean = [one for one in stack if one.version not in tainted]
    if not stack or stack[-1].version not in tainted:
        return clean
    version = entry.payload["next_parent"]
    if version is None or version not in known:
        return []
    return [*_below(clean, version), _champion(known[version], "rollback", (_said(entry),), entry)]


def champion(entries: Sequence[Entry]) -> Champion | None:
    """Return the version in use: the one promoted, or rolled back to, last; None before the first promotion."""
    stack = champions(entries)
    return stack[-1] if stack else None


def previous(entries: Sequence[Entry]) -> Champion | None:
    """Return the champion before the present one: what `rollback` goes to.

    A version that was rolled back from is not it, so that a second rollback goes further back, never forth again.
    """
    stack = champions(entries)
    return stack[-2] if len(stack) > 1 else None


def _main_bounds(entries: Iterable[Entry]) -> list[Bound]:
    done = [(r.finished_seq, r.bound) for r in nights(entries).values() if r.is_main]
    found = [(seq, bound) for seq, bound in done if seq is not None and bound is not None]
    return [bound for _, bound in sorted(found, key=lambda pair: pair[0])]


def _covers(outer: Bound, inner: Bound) -> bool:
    """Tell whether every (event, action) inside `inner` is inside `outer`."""
    return outer.commit >= inner.commit and all(
        action in outer.shown_before_us and outer.shown_before_us[action] >= before
        for action, before in inner.shown_before_us.items()
    )


def finished_bounds(entries: Sequence[Entry]) -> list[Bound]:
    """Return the bounds of finished main-line nights, in order of finishing, without those that another covers.

    What is inside any of them has been new once and is never new again. Experiments and full retrains score no
    new events, so their bounds do not count.
    """
    front: list[Bound] = []
    for bound in _main_bounds(entries):
        if any(_covers(other, bound) for other in front):
            continue
        front = [other for other in front if not _covers(bound, other)] + [bound]
    return front


def bound_nights_ago(entries: Sequence[Entry], k: int) -> Bound | None:
    """Return the bound of the k-th newest finished main-line night; None where there are fewer.

    For a night that is not finished yet, "what came due in the last K nights, this one included" is what is inside
    its bound and not inside `bound_nights_ago(entries, K)`.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1 (the newest finished night), got {k}")
    bounds: list[Bound] = []
    for bound in _main_bounds(entries):
        if not bounds or bound.cutoff_us >= bounds[-1].cutoff_us:
            bounds.append(bound)  # an older day that was backfilled is no night ago: the window would reach back to it
    return bounds[-k] if len(bounds) >= k else None
