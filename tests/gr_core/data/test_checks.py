"""Data checks: figures of a day against those of the days before it."""

from __future__ import annotations

from typing import Any

import pytest

from gr_core.checks_config import ChecksConfig
from gr_core.data.checks import judge, null_rates, refuse
from gr_core.errors import DataContractError


def figures(**changes: Any) -> dict[str, Any]:
    """Return an ordinary day's figures with a test's changes."""
    plain = {"files": 2, "read": 100, "rows": 90, "duplicates": 2, "reasons": {"null_user": 1}}
    return {**plain, "nulls": {"surface": 9, "action:click": 0}, "columns": {"id": "String", "ts": "Int64"}, **changes}


def judged(tonight: dict[str, Any], *, past: int = 3, **rules: Any) -> list[tuple[str, str, str]]:
    found = judge(ChecksConfig.model_validate(rules), [figures()] * past, tonight)
    return [(one.check, one.level, one.where) for one in found]


def test_an_ordinary_day_has_no_findings() -> None:
    """Small changes of every figure are within the default thresholds."""
    tonight = figures(read=200, duplicates=15, rows=170, nulls={"surface": 25, "action:click": 3})
    assert judged(tonight) == []


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"read": 29}, ("volume", "warn", "read")),
        ({"read": 301}, ("volume", "warn", "read")),
        ({"nulls": {"surface": 20}}, ("null_rate", "warn", "surface")),
        ({"nulls": {"surface": 9, "action:click": 10}}, ("null_rate", "warn", "action:click")),
        ({"nulls": {"action:click": 0}}, ("null_rate", "warn", "surface")),
        ({"duplicates": 13}, ("duplicate_rate", "warn", "duplicate_rate")),
        ({"reasons": {"clock_skew": 3}}, ("clock_skew", "warn", "clock_skew")),
        ({"reasons": {"bad_value": 7}}, ("quarantine_rate", "warn", "quarantine_rate")),
        ({"columns": {"id": "String"}}, ("schema_drift", "warn", "ts")),
        ({"columns": {"id": "String", "ts": "Int64", "new": "Int64"}}, ("schema_drift", "warn", "new")),
        ({"columns": {"id": "Int64", "ts": "Int64"}}, ("schema_drift", "warn", "id")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_each_check_finds_its_change(changes: dict[str, Any], found: tuple[str, str, str]) -> None:
    """One figure beyond its threshold is the check's finding; one that vanished counts as all null."""
    assert found in judged(figures(**changes))


def test_an_id_that_is_suddenly_null_is_found() -> None:
    """Rows quarantined for a null id are the null rate of that id."""
    assert null_rates(figures())["user_id"] == 0.01
    assert ("null_rate", "warn", "user_id") in judged(figures(reasons={"null_user": 12}))


def test_too_few_past_days_compare_only_the_schema() -> None:
    """A median of two days says nothing; a column that vanished does."""
    assert judged(figures(read=1, columns={}), past=2) == [
        ("schema_drift", "warn", "id"),
        ("schema_drift", "warn", "ts"),
    ]
    assert judged(figures(read=1), past=0) == []


def test_days_without_files_are_neither_judged_nor_compared_with() -> None:
    """missing_day decides about them."""
    empty = figures(files=0, read=0, columns={})
    assert judged(empty) == []
    rules = ChecksConfig(days=3)
    assert judge(rules, [figures()] * 3 + [empty] * 5, figures()) == []
    assert [
        one.check for one in judge(rules, [figures()] * 3 + [empty], figures(read=10, duplicates=0, reasons={}))
    ] == ["volume"]


def test_levels_come_from_the_config() -> None:
    """Off is silent; hold and stop stand in the finding."""
    thin = figures(read=1, duplicates=0, reasons={})
    assert judged(thin, volume={"level": "off"}) == []
    assert judged(thin, volume={"level": "hold"}) == [("volume", "hold", "read")]
    assert judged(figures(read=29), volume={"level": "stop", "low": 0.2}) == []


def test_a_stop_names_check_value_past_and_override() -> None:
    """Warnings do not stop; the error tells what was found, what is usual, and the key that lets it pass."""
    rules = ChecksConfig.model_validate({"volume": {"level": "stop"}})
    refuse(judge(rules, [figures()] * 3, figures(duplicates=90)), "2025-06-04")

    with pytest.raises(DataContractError) as got:
        refuse(judge(rules, [figures(read=n) for n in (90, 100, 120)], figures(read=12)), "2025-06-04")

    assert got.value.where == "source.checks.volume.level"
    assert "12 rows read, the median of the last 3 days is 100 (90 to 120)" in got.value.message
    assert "--set source.checks.volume.level=warn" in got.value.message
