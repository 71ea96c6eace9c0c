"""`daybreak check`: what a night would make of a day, said without writing anything."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import tests.tiny as tiny
from gr_core.config import Config, load_config
from gr_core.errors import DataContractError
from gr_core.lake import rawfile
from gr_core.lake.journal import Journal
from gr_core.report.status import STAGES
from gr_core.stages import checking, ingesting
from tests.feeds import DAY, NOON, make_config, ms, rows, write
from tests.plain import run

DAYS = [tiny.FIRST_DAY + timedelta(days=n) for n in range(5)]


def look(folder: Path, feed: dict[str, Any] | None = None, **source: Any) -> dict[str, Any]:
    value = checking.check(make_config(folder / "raw", feed, **source), str(folder / "home"), DAY)
    assert list(folder.iterdir()) == [folder / "raw"]
    return value


def messages(value: dict[str, Any], level: str) -> list[str]:
    return [found["message"] for found in value["findings"] if found["level"] == level]


def test_a_good_day_is_ok_and_nothing_is_written(tmp_path: Path) -> None:
    """Each contract column with its SQL, raw columns, types, nulls and examples; users are masked."""
    write(tmp_path / "raw", rows({"uid": 7654321, "surface": "tv"}, {"uid": 7654321, "surface": None}))
    value = look(tmp_path, {"side": {"place": "upper(surface)"}})

    assert value["ok"]
    assert value["would_run"] == list(STAGES)
    columns = {column["column"]: column for column in value["columns"]}
    assert columns["place"] == {
        "feed": "log",
        "column": "place",
        "sql": "upper(surface)",
        "raw": {"surface": "String"},
        "becomes": "text",
        "nulls": 0.5,
        "examples": ["TV"],
    }
    assert columns["shown_at"]["raw"] == {"ts": "Int64"}
    assert columns["shown_at"]["examples"] == ["2025-06-01 12:00:00.000Z"]
    assert columns["user_id"]["examples"] == ["***"]
    assert set(columns) == {"user_id", "item_id", "event_id", "click", "like", "place", "shown_at"}
    assert "7654321" not in json.dumps(value)
    assert value["sample"][0] == {
        "feed": "log",
        "files": 1,
        "rows": 2,
        "rows_exact": True,
        "sampled_rows": 2,
        "reasons": {},
        "unknown_columns": {},
    }


def test_every_unusable_file_and_column_is_named(tmp_path: Path) -> None:
    """One error a file or column, exit status 2, and no stage would run; equal files are told once."""
    write(tmp_path / "raw", rows({}), rows({}).drop("item"), rows({}).drop("item"), rows({}, ts=pl.String))
    (tmp_path / "raw" / f"dt={DAY}" / "part-9.parquet").write_bytes(b"PAR1 broken")
    value = look(tmp_path)

    assert not value["ok"]
    assert value["would_run"] == []
    told = messages(value, "error")
    assert [
        name for name in ("part-0", "part-1", "part-2", "part-3", "part-9") if any(name in text for text in told)
    ] == [
        "part-1",
        "part-3",
        "part-9",
    ]
    assert len(told) == 3
    assert {found["where"].rsplit("/", 1)[-1] for found in value["findings"] if found["level"] == "error"} == {
        "part-1.parquet",
        "part-3.parquet",
        "part-9.parquet",
    }


def test_broken_rows_are_counted_and_shown_without_their_user(tmp_path: Path) -> None:
    """The reason, how many, the column, the file and the first row."""
    write(tmp_path / "raw", rows({"uid": 7654321}, {"uid": 7654321, "item": None}, {"uid": 7654321, "item": None}))
    value = look(tmp_path)

    (found,) = [found for found in value["findings"] if found["level"] == "warning" and "null_item" in found["message"]]
    assert found["where"].endswith("part-0.parquet row 1")
    assert "null_item: 2 of 3 sampled rows (column item)" in found["message"]
    assert '"item": null, "uid": "***"' in found["message"]
    assert value["ok"]
    assert value["sample"][0]["reasons"] == {"null_item": 2}


@pytest.mark.parametrize(("unit", "number", "likely"), [("ms", ms(NOON) // 1000, "s"), ("s", ms(NOON), "ms")])
def test_a_wrong_unit_is_told(tmp_path: Path, unit: str, number: int, likely: str) -> None:
    """Case C12: seconds declared as milliseconds are no usable day, and the message says what they look like."""
    write(tmp_path / "raw", rows({"ts": number}, {"ts": number + 60}))
    value = look(tmp_path, {"shown_at": {"column": "ts", "unit": unit}})

    assert not value["ok"]
    (text, rest) = messages(value, "error")
    assert f'read as unit "{likely}" they are times such as 2025-06-01 12:0' in text
    assert f'declared is "{unit}"' in text
    assert "none of the 2 sampled rows is usable" in rest


def test_a_value_that_is_not_of_its_type_names_its_column(tmp_path: Path) -> None:
    """Of a csv the declared column whose text does not fit; a line that is no record is counted and not shown."""
    folder = tmp_path / "raw" / f"dt={DAY}"
    folder.mkdir(parents=True)
    good = rows({}).write_csv()
    bad = f"x,secret,7,{good.splitlines()[1].split(',')[3]},often,0"
    header = good.splitlines()[0]
    assert header == "id,uid,item,ts,clicked,liked"
    (folder / "a.csv").write_text(good + bad + "\nz,secret,7,1,2,3,4,5,6\n")
    types = {"id": "string", "ts": "int64", "clicked": "int32", "liked": "int32"}
    value = look(tmp_path, {"path": "dt={date}/*", "format": "csv", "types": types})

    told = messages(value, "warning")
    assert any("bad_value: 1 of 3 sampled rows (column clicked)" in text and '"often"' in text for text in told)
    assert any(text.startswith("bad_row: 1 of 3 sampled rows; the first is row 2") for text in told)
    assert "secret" not in json.dumps(value)


def test_unknown_columns_are_told_and_change_nothing(tmp_path: Path) -> None:
    """Case C2: with the number of files that have them."""
    write(tmp_path / "raw", rows({}), rows({"id": "f", "spare": 1}))
    value = look(tmp_path)

    assert value["ok"]
    assert "raw column spare (1 of 2 files) is neither read nor declared" in messages(value, "info")


def test_a_missing_day_is_an_error_or_a_warning_as_configured(tmp_path: Path) -> None:
    """missing_day decides."""
    (tmp_path / "raw").mkdir()
    assert not look(tmp_path)["ok"]
    value = look(tmp_path, missing_day="warn")
    assert value["ok"]
    assert messages(value, "warning") == ["feed log has no file for 2025-06-01; the night goes on without it"]
    assert value["gate_power"]["standard_error"] is None


def test_settings_that_a_night_would_refuse_are_told(tmp_path: Path) -> None:
    """A home made with another lake, and a side feature that would keep a pseudonymised id."""
    config = tiny.make(tmp_path, days=1)
    run(config, tmp_path / "home", DAYS[0], stop_after="ingest")
    told = checking.check(load_config(config, ["lake.num_buckets=4"]), str(tmp_path / "home"), DAYS[0])
    assert not told["ok"]
    assert any("lake.num_buckets never changes" in text for text in messages(told, "error"))


def test_side_tables_are_checked_and_described(tmp_path: Path) -> None:
    """A table without its column is an error; a good one tells what its features are made of."""
    write(tmp_path / "raw", rows({}))
    table = {"name": "items", "path": "items.parquet", "on": {"item_id": "vid"}, "side": {"tag": "lower(tag)"}}
    pl.DataFrame({"vid": [7]}).write_parquet(tmp_path / "raw" / "items.parquet")
    assert any("column tag is missing" in text for text in messages(look(tmp_path, tables=[table]), "error"))

    pl.DataFrame({"vid": [7], "tag": ["A"]}).write_parquet(tmp_path / "raw" / "items.parquet")
    (told,) = [column for column in look(tmp_path, tables=[table])["columns"] if column["feed"] == "table:items"]
    assert (told["column"], told["raw"], told["examples"]) == ("tag", {"tag": "String"}, ["a"])


def test_what_would_run_follows_what_is_done(tmp_path: Path) -> None:
    """After the ingestion the rest; a finished night nothing."""
    config, home = tiny.make(tmp_path, days=1), tmp_path / "home"
    assert checking.check(load_config(config), str(home), DAYS[0])["would_run"] == list(STAGES)
    night, _ = run(config, home, DAYS[0], stop_after="ingest")
    before = sorted(home.rglob("*"))
    assert checking.check(load_config(config), str(home), DAYS[0])["would_run"] == list(STAGES[1:])
    assert sorted(home.rglob("*")) == before

    night.journal.append("finished", night.key, {"state": "no_data", "bound": None, "status": {}}, at_us=2)
    assert checking.check(load_config(config), str(home), DAYS[0])["would_run"] == []


def test_the_day_is_compared_with_the_days_before(tmp_path: Path) -> None:
    """A thin day is a warning; where the check would stop the night it is an error."""
    config, home = tiny.make(tmp_path, days=4), tmp_path / "home"
    for day in DAYS[:3]:
        run(config, home, day, stop_after="ingest")
    assert not [
        f for f in checking.check(load_config(config), str(home), DAYS[3])["findings"] if "checks" in f["where"]
    ]
    tiny.write_day(tmp_path / "raw", DAYS[3], rows=60)

    told = checking.check(load_config(config), str(home), DAYS[3])
    assert told["ok"]
    assert [f["where"] for f in told["findings"] if "checks" in f["where"]] == ["source.checks.volume"]
    assert not checking.check(load_config(config, ["source.checks.volume.level=stop"]), str(home), DAYS[3])["ok"]


def test_of_many_rows_a_sample_is_read_and_projected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a long text file are estimated from its head; the figures are those of the sample, scaled."""
    monkeypatch.setattr(checking, "SAMPLED_ROWS", 1000)
    folder = tmp_path / "raw" / f"dt={DAY}"
    folder.mkdir(parents=True)
    frame = pl.concat([rows({})] * 60_000).with_columns(pl.int_range(pl.len()).cast(pl.String).alias("id"))
    frame = frame.with_columns(pl.col("id").str.zfill(60), uid=pl.int_range(pl.len()) % 5000)
    frame.write_csv(folder / "a.csv")
    types = {"id": "string", **dict.fromkeys(("uid", "item", "ts", "clicked", "liked"), "int64")}
    monkeypatch.setattr(rawfile, "_COUNTED_ROWS", 1000)
    value = look(tmp_path, {"path": "dt={date}/*", "format": "csv", "types": types}, checks={"days": 1, "min_days": 1})

    (seen,) = value["sample"]
    assert (seen["sampled_rows"], seen["rows_exact"]) == (1000, False)
    assert seen["rows"] == pytest.approx(60_000, rel=0.02)
    assert value["gate_power"]["users"] > 0


def judged(config: Config, home: Path, *figures: dict[str, float]) -> None:
    """Write nights that a gate has compared, one a day, to a home's journal."""
    journal = Journal(str(home / "lake" / "journal"))
    for n, one in enumerate(figures):
        day = str(date(2025, 5, 1) + timedelta(days=n))
        opened = {"date": day, "mode": "nightly", "parent": None, "cutoff_us": 1, "seed": 0, "fingerprint": "f"}
        journal.append("opened", day, {**opened, "config": config.resolved()}, at_us=1)
        decided = {"decision": "hold", "reasons": [], "version": 1, "previous": None, "figures": one}
        journal.append("decided", day, decided, at_us=2)


def test_the_power_is_that_of_past_gates_where_there_are_some(tmp_path: Path) -> None:
    """Users and standard error are what the newest comparison measured."""
    write(tmp_path / "raw", rows(*({"uid": n} for n in range(200))))
    config, home = make_config(tmp_path / "raw", lake={"holdout_fraction": 0.25}), tmp_path / "home"
    fresh = checking.check(config, str(home), DAY)["gate_power"]
    judged(config, home, {"users": 400, "positives": 90, "standard_error": 0.004})
    value = checking.check(config, str(home), DAY)

    assert 100 < fresh["users"] < 200
    assert value["gate_power"]["users"] == 1200
    assert value["gate_power"]["standard_error"] == pytest.approx(0.004 / 3**0.5)
    assert any("as past gates measured" in found["message"] for found in value["findings"])


WORLD = [
    (181, 0.0111, -0.101),
    (190, 0.0073, -0.077),
    (192, 0.0053, -0.020),
    (194, 0.0045, -0.013),
    (191, 0.0046, -0.017),
]
"""Users, standard error and difference of the embedded world's nights 2 to 6."""


@pytest.mark.parametrize(
    ("nights", "level", "words"),
    [
        ([], "warning", ["chance 0.", "by a rule of thumb", "a larger lake.holdout_fraction"]),
        (WORLD, "info", ["chance 0.70 (as past gates measured)", "better than their champions by 1.7%", "chance 1.00"]),
        (
            [(191, 0.0046, 0.0)] * 4,
            "warning",
            ["chance 0.70 (as past gates measured); gate.nights = 6 would reach 80%"],
        ),
        ([(191, 0.0046, 0.003)] * 4, "warning", ["chance 0.70", "a larger lake.holdout_fraction"]),
        ([(191, 0.0038, 0.003)] * 4, "info", ["chance 0.84 (as past gates measured); gate.nights = 4 would reach 80%"]),
    ],
)
def test_the_gates_power_is_a_warning_where_challengers_to_come_may_be_held(
    tmp_path: Path, nights: list[tuple[int, float, float]], level: str, words: list[str]
) -> None:
    """Below four in five for an equal one, unless the last challengers were so much better that one like them passes."""
    write(tmp_path / "raw", rows(*({"uid": n} for n in range(200))))
    config = make_config(tmp_path / "raw", lake={"holdout_fraction": 0.25})
    config = config.model_copy(update={"gate": config.gate.model_copy(update={"nights": 4})})
    first = [{"users": 140, "positives": 500}] if nights else []  # a first model is compared with none
    told = [{"users": u, "positives": 500, "standard_error": se, "difference": d} for u, se, d in nights]
    judged(config, tmp_path / "home", *first, *told)
    found = checking.check(config, str(tmp_path / "home"), DAY)["findings"]

    ((said, message),) = [(one["level"], one["message"]) for one in found if one["where"] == "gate"]
    assert said == level
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("feed", "key"),
    [
        ({"columns": {"user_id": "CAST(secret AS INT)", "item_id": "item"}}, "columns.user_id"),
        ({"actions": {"click": "secret::int = 1"}}, "actions.click"),
        ({"side": {"place": "1.0 / (uid - 1)"}}, "side.place"),
        ({"visibility_delay_seconds": "CAST(secret AS DOUBLE)"}, "visibility_delay_seconds"),
    ],
)
def test_sql_that_some_values_break_is_named_without_them(tmp_path: Path, feed: dict[str, Any], key: str) -> None:
    """An expression that fits the columns and not what a row holds: the check says so, and the night before it writes."""
    write(tmp_path / "raw", rows({"secret": "12"}, {"secret": "ada@example.org"}))
    (told,) = messages(look(tmp_path, feed), "error")
    assert key in told
    assert "TRY_CAST" in told
    assert "ada" not in told

    with pytest.raises(DataContractError, match=key):
        ingesting.preflight(make_config(tmp_path / "raw", feed), str(tmp_path / "home"), DAY)
    assert not (tmp_path / "home").exists()


def test_side_tables_sql_that_some_values_break_is_named(tmp_path: Path) -> None:
    """The same of a side table, whose rows the check reads as well."""
    write(tmp_path / "raw", rows({}))
    table = {"name": "items", "path": "items.parquet", "on": {"item_id": "vid"}, "side": {"tag": "CAST(tag AS INT)"}}
    pl.DataFrame({"vid": [7], "tag": ["A"]}).write_parquet(tmp_path / "raw" / "items.parquet")
    (told,) = messages(look(tmp_path, tables=[table]), "error")
    assert "source.tables[items].side.tag" in told
