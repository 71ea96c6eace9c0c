"""Data checks: what an ingestion says in figures, compared with what the days before it said. Pure.

In: the figures of past ingestions and of tonight's, and the rules of `source.checks`. Out: findings. A rate is
compared with the median of the past days, so one odd day does not move what is normal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gr_core.checks_config import CheckRule, ChecksConfig, RateRule
from gr_core.errors import DataContractError
from gr_core.lake.commits import Commit
from gr_core.lake.entries import Entry

Figures = Mapping[str, Any]
"""files, read, duplicates, reasons {reason: rows}, rows (that keep the contract), nulls {column: rows},
columns {raw column: its types}; all JSON values, kept in the commit's record."""

_FEW = 1e-9  # shares that differ by rounding are equal
_IDS = {"null_user": "user_id", "null_item": "item_id", "null_id": "event_id", "null_time": "shown_at"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a check found."""

    check: str
    """The key below source.checks."""
    level: str
    """warn, hold or stop."""
    where: str
    """Contract column, raw column or figure."""
    message: str

    def to_json(self) -> dict[str, str]:
        """Return plain JSON values."""
        return asdict(self)


def null_rates(figures: Figures) -> dict[str, float]:
    """Return the share of nulls of each contract column, and of unknowns of each action."""
    rows, read, reasons = figures.get("rows", 0), figures.get("read", 0), figures.get("reasons", {})
    rates = {name: count / rows for name, count in figures.get("nulls", {}).items()} if rows else {}
    ids = {column: reasons.get(reason, 0) / read for reason, column in _IDS.items()} if read else {}
    return {**ids, **rates}


def judge(rules: ChecksConfig, past: Sequence[Figures], tonight: Figures) -> list[Finding]:
    """Compare tonight's figures with those of past ingestions.

    Args:
        rules: Levels and thresholds.
        past: Figures of past ingestions of the same feed, oldest first; days without files count for nothing.
        tonight: The figures of the day. Without files there is nothing to check: `missing_day` decides.

    Returns:
        Findings of the checks that are not off, in the order of the rules.
    """
    before = [figures for figures in past if figures.get("files")][-rules.days :]
    if not tonight.get("files"):
        return []
    found = []
    if len(before) >= rules.min_days:
        found += _volume(rules, before, tonight)
        found += _nulls(rules, before, tonight)
        for name, rule, share in (
            ("duplicate_rate", rules.duplicate_rate, _duplicates),
            ("clock_skew", rules.clock_skew, _skewed),
            ("quarantine_rate", rules.quarantine_rate, _quarantined),
        ):
            found += _rate(name, rule, name, [share(figures) for figures in before], share(tonight))
    if before:
        found += _drift(rules.schema_drift, before[-1].get("columns", {}), tonight.get("columns", {}))
    return [finding for finding in found if finding.level != "off"]


def figures_of(commit: Commit) -> dict[str, Any]:
    """Return the figures of an ingestion as its record tells them, the counts of rows included.

    Rows of days that were read again are no rows of this day; most of them repeat what is known, so they count as such.
    """
    rows, again = commit.rows, commit.restated
    counts = {"read": rows.read - again, "duplicates": max(rows.duplicates - again, 0), "reasons": dict(commit.reasons)}
    return {**commit.figures, **counts}


def past_figures(entries: Iterable[Entry], night: str) -> list[dict[str, Any]]:
    """Return the figures of all other nights' ingestions from the journal, in the order of their commits."""
    told = {e.payload["commit"]: e.payload for e in entries if e.kind == "ingested" and e.night != night}
    return [dict(payload["figures"]) for _, payload in sorted(told.items()) if payload.get("figures")]


@dataclass(frozen=True)
class Approval:
    """Stops an ingestion before anything is written; `EventTable.ingest` calls it with the commit's record."""

    rules: ChecksConfig
    past: Sequence[Figures]

    def __call__(self, commit: Commit) -> None:
        """Raise DataContractError for findings of level stop, as `refuse` does."""
        refuse(judge(self.rules, self.past, figures_of(commit)), commit.night)


def refuse(findings: Iterable[Finding], night: str) -> None:
    """Raise for the findings of level stop.

    Raises:
        DataContractError: Names each check, its value, the past and how to override it.
    """
    stopping = [finding for finding in findings if finding.level == "stop"]
    if not stopping:
        return
    told = "; ".join(finding.message for finding in stopping)
    keys = list(dict.fromkeys(f"source.checks.{finding.check}.level" for finding in stopping))
    override = " ".join(f"--set {key}=warn" for key in keys)
    raise DataContractError(
        f"night {night} stops before anything is committed: {told}; mend the delivery, or take it as it is with {override}",
        where=keys[0],
    )


def _volume(rules: ChecksConfig, before: Sequence[Figures], tonight: Figures) -> list[Finding]:
    rule, reads = rules.volume, [figures["read"] for figures in before]
    usual, read = median(reads), tonight["read"]
    if rule.low * usual <= read <= rule.high * usual:
        return []
    message = (
        f"volume: {read} rows read, the median of the last {_days(len(reads))} is {usual:g} ({min(reads)} to {max(reads)}), "
        f"allowed {rule.low:g} to {rule.high:g} times it"
    )
    return [Finding(check="volume", level=rule.level, where="read", message=message)]


def _nulls(rules: ChecksConfig, before: Sequence[Figures], tonight: Figures) -> list[Finding]:
    past = [null_rates(figures) for figures in before]
    found: list[Finding] = []
    for name, share in null_rates(tonight).items():
        shares = [rates[name] for rates in past if name in rates]
        if len(shares) >= rules.min_days:
            found += _rate("null_rate", rules.null_rate, name, shares, share)
    gone = {name for rates in past for name in rates} - null_rates(tonight).keys() if tonight.get("rows") else set()
    for name in sorted(gone):
        shares = [rates.get(name, 1.0) for rates in past]
        found += _rate("null_rate", rules.null_rate, name, shares, 1.0)
    return found


def _rate(check: str, rule: RateRule, where: str, past: Sequence[float], share: float) -> list[Finding]:
    usual = median(past)
    if share <= usual + rule.max_increase + _FEW:
        return []
    name = check if where == check else f"{check} of {where}"
    message = (
        f"{name}: {share:.1%} of the rows, the median of the last {_days(len(past))} is {usual:.1%} "
        f"({min(past):.1%} to {max(past):.1%}), allowed {rule.max_increase:.1%} more"
    )
    return [Finding(check=check, level=rule.level, where=where, message=message)]


def _drift(rule: CheckRule, was: Mapping[str, str], now: Mapping[str, str]) -> list[Finding]:
    told = [(name, f"raw column {name} vanished (it was {was[name]})") for name in sorted(was.keys() - now.keys())]
    told += [(name, f"raw column {name} appeared ({now[name]})") for name in sorted(now.keys() - was.keys())]
    told += [
        (name, f"raw column {name} changed from {was[name]} to {now[name]}")
        for name in sorted(was.keys() & now.keys())
        if was[name] != now[name]
    ]
    return [
        Finding(check="schema_drift", level=rule.level, where=name, message=f"schema_drift: {message}")
        for name, message in told
    ]


def _duplicates(figures: Figures) -> float:
    return _share(figures, int(figures.get("duplicates", 0)))


def _skewed(figures: Figures) -> float:
    return _share(figures, int(figures.get("reasons", {}).get("clock_skew", 0)))


def _quarantined(figures: Figures) -> float:
    return _share(figures, sum(figures.get("reasons", {}).values()))


def _share(figures: Figures, rows: int) -> float:
    return rows / figures["read"] if figures["read"] else 0.0


def _days(number: int) -> str:
    return f"{number} day{'' if number == 1 else 's'}"
