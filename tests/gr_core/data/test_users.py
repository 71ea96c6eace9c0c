"""Pseudonymous users: keyed hashes from the contract on, and nothing that tells who they were."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from gr_core.config import Config
from gr_core.data import users
from gr_core.errors import ConfigError
from gr_core.hashing import bucket_of
from gr_core.lake import userkey
from gr_core.lake.events import EventTable
from gr_core.stages import ingesting
from tests.feeds import DAY, NOON, make_config, ms, read, rows, write

KEY = "a secret of the test, kept nowhere"
ODD = ["u:7", "Ünï-%s-{x}", "o'neil; --", '"quoted"', "line\nbreak", "9007199254740993"]


def hashed(user: str, key: str = KEY) -> str:
    return hashlib.blake2b(user.encode(), key=key.encode(), digest_size=16).hexdigest()


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DAYBREAK_USER_KEY", KEY)
    return KEY


def secret(root: Path, feed: dict[str, Any] | None = None, **source: Any) -> Config:
    return make_config(root, feed, pseudonymise_users=True, **source)


@pytest.mark.usefixtures("key")
def test_users_are_stored_under_keyed_hashes(tmp_path: Path) -> None:
    """32 hex digits of BLAKE2b under the key; bucket and the order of rows follow the stored id; nulls are quarantined."""
    write(tmp_path, rows({"uid": "u7"}, {"uid": "u8"}, {"uid": "u7"}, {"uid": None}))
    config = secret(tmp_path)
    batch = read(config)

    assert sorted(batch.events["user_id"]) == sorted([hashed("u7"), hashed("u7"), hashed("u8")])
    assert batch.events["bucket"].to_list() == [bucket_of(u, config.lake.num_buckets) for u in batch.events["user_id"]]
    assert batch.reasons == {"null_user": 1}
    assert users.stored_user(config, "u7") == hashed("u7")
    assert users.stored_user(make_config(tmp_path), "u7") == "u7"


@pytest.mark.usefixtures("key")
def test_an_event_id_made_of_the_user_hides_him_too(tmp_path: Path) -> None:
    """Of a key of columns the user's part is the stored id; an actions feed's key gives the same event id."""
    write(tmp_path, rows({"uid": 7, "item": 3}))
    acts = {
        "name": "acts",
        "role": "actions",
        "path": "acts/{date}/*",
        "acted_at": {"column": "at", "unit": "ms"},
        "on": ["who", "what"],
        "actions": {"buy": "kind = 'buy'"},
    }
    log = {"event_id": None, "event_key": ["uid", "item"]}
    base = secret(tmp_path, log).source.feeds[0].model_dump()
    actions = [{"name": "click"}, {"name": "like"}, {"name": "buy", "attribution_window_seconds": 60}]
    config = make_config(tmp_path, log, actions=actions, pseudonymise_users=True)
    both = type(config).model_validate(
        {**config.resolved(), "source": {**config.resolved()["source"], "feeds": [base, acts]}}
    )

    assert read(config).events["event_id"].to_list() == [f"{hashed('7')}:3"]
    raw = pl.DataFrame({"who": [7], "what": [3], "event_id": ["7:3"]})
    assert users.pseudonymised(both, both.source.feeds[1], raw)["event_id"].to_list() == [f"{hashed('7')}:3"]


@pytest.mark.usefixtures("key")
def test_a_side_table_of_users_still_joins(tmp_path: Path) -> None:
    """Its key column is hashed as the feed's is."""
    write(tmp_path, rows({"uid": 7}))
    pl.DataFrame({"who": ["7"], "plan": ["free"]}).write_parquet(tmp_path / "users.parquet")
    table = {"name": "users", "path": "users.parquet", "on": {"user_id": "who"}, "side": {"plan": "plan"}}

    assert read(secret(tmp_path, tables=[table])).events["plan"].to_list() == ["free"]


@pytest.mark.parametrize(
    ("feed", "source", "named"),
    [
        ({"side": {"who": "upper(uid)"}}, {}, r"source\.feeds\[log\]\.side\.who"),
        ({"columns": {"user_id": "uid", "item_id": "uid"}}, {}, r"columns\.item_id"),
        (
            {},
            {"tables": [{"name": "t", "path": "t", "on": {"user_id": "who"}, "side": {"w": "who"}}]},
            r"source\.tables\[t\]\.side\.w",
        ),
    ],
)
@pytest.mark.usefixtures("key")
def test_a_column_that_would_keep_the_id_is_refused(
    tmp_path: Path, feed: dict[str, Any], source: dict[str, Any], named: str
) -> None:
    """Before any state changes, by its dotted key."""
    write(tmp_path / "raw", rows({}))
    with pytest.raises(ConfigError, match=named):
        ingesting.preflight(secret(tmp_path / "raw", feed, **source), str(tmp_path / "home"), DAY)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("value", "told"), [(None, "is not set"), ("short", "has 5 bytes"), ("x" * 65, "has 65 bytes")]
)
def test_a_missing_or_unusable_key_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, told: str
) -> None:
    """It names the variable, never the key; nothing is made."""
    monkeypatch.delenv("DAYBREAK_USER_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("DAYBREAK_USER_KEY", value)
    write(tmp_path / "raw", rows({}))

    with pytest.raises(ConfigError, match=f"DAYBREAK_USER_KEY, which {told}") as got:
        ingesting.preflight(secret(tmp_path / "raw"), str(tmp_path / "home"), DAY)
    assert value is None or value not in got.value.message
    assert not (tmp_path / "home").exists()


def test_a_lake_keeps_to_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another key, none, or a key for a lake of plain ids is refused; what the lake keeps is no key and no user's id."""
    monkeypatch.setenv("DAYBREAK_USER_KEY", KEY)
    config, plain, home = secret(tmp_path), make_config(tmp_path), str(tmp_path / "home")
    userkey.remember(config, home, started=False)
    userkey.remember(config, home, started=True)
    kept = (tmp_path / "home" / "lake" / "user_key.json").read_text()
    assert KEY not in kept
    assert json.loads(kept)["check"] != hashed("")

    with pytest.raises(ConfigError, match="holds pseudonyms"):
        userkey.check(plain, home, started=True)
    with pytest.raises(ConfigError, match="by their own ids"):
        userkey.check(config, str(tmp_path / "other"), started=True)
    userkey.check(plain, str(tmp_path / "other"), started=True)
    monkeypatch.setenv("DAYBREAK_USER_KEY", KEY + "?")
    with pytest.raises(ConfigError, match="is not the key that the lake"):
        userkey.check(config, home, started=True)


def odd_day(root: Path, *, pseudonymise: bool) -> Config:
    """Write a csv day with odd ids in good, quarantined, capped and unreadable rows; returns its config."""
    lines = ["id,uid,item,ts,clicked,liked,mail"]
    for number, user in enumerate(ODD):
        quoted = '"' + user.replace('"', '""') + '"'
        for place, item in enumerate(("i", "i", "")):
            lines.append(f"{number}-{place},{quoted},{item},{ms(NOON)},1,0,{quoted}")
        lines.append(f"{number}-x,{quoted},i,{ms(NOON)},often,0,{quoted}")
        lines.append(f"{number}-y,{quoted},i,{ms(NOON)},1,0,{quoted},more,fields")
    folder = root / f"dt={DAY}"
    folder.mkdir(parents=True)
    (folder / "a.csv").write_text("\n".join(lines) + "\n")
    types = {"id": "string", "uid": "string", "ts": "int64", "clicked": "int32", "liked": "int32"}
    feed = {"path": "dt={date}/*", "format": "csv", "types": types}
    return make_config(root, feed, daily_cap=1, pseudonymise_users=pseudonymise)


def ingest_at_debug(config: Config, folder: Path, caplog: pytest.LogCaptureFixture) -> EventTable:
    with caplog.at_level(logging.DEBUG):
        ingesting.preflight(config, str(folder / "home"), DAY)
        table = EventTable(str(folder / "home" / "lake" / "events"), config)
        table.ingest(str(DAY), read(config), parent=None)
    assert caplog.records
    return table


@pytest.mark.usefixtures("key")
def test_nothing_that_is_kept_names_a_pseudonymous_user(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Events, quarantine (broken, capped, unreadable rows) and logs: the stored ids, and no raw one."""
    config = odd_day(tmp_path / "raw", pseudonymise=True)
    table = ingest_at_debug(config, tmp_path, caplog)
    commit = table.find(str(DAY))
    assert commit is not None
    assert commit.reasons == {"bad_row": 6, "bad_value": 6, "null_item": 6, "over_daily_cap": 6}
    events, bad = table.read(commit.delta_version), table.quarantine(commit.number)
    assert set(events["user_id"]) == {hashed(user) for user in ODD}
    assert sum(bad["row"].str.contains(hashed(ODD[0]))) == 3

    kept = json.dumps(events.to_dicts(), default=str) + "".join(bad["row"]) + caplog.text
    for user in ODD:
        assert user not in kept
        assert json.dumps(user)[1:-1] not in kept


def test_no_log_line_names_a_user(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the lake keeps plain ids: at DEBUG, with rows quarantined for every reason."""
    ingest_at_debug(odd_day(tmp_path / "raw", pseudonymise=False), tmp_path, caplog)

    for user in ODD:
        assert user not in caplog.text
        assert repr(user)[1:-1] not in caplog.text


@pytest.mark.parametrize("form", ["csv", "ndjson", "parquet"])
def test_no_error_about_a_damaged_file_names_a_user(tmp_path: Path, form: str) -> None:
    """A reader's own words may quote what it could not read; ours do not pass them on."""
    folder = tmp_path / f"dt={DAY}"
    folder.mkdir()
    content = {
        "csv": f'id,uid,item,ts,clicked,liked\ne,"secret-user,i,{ms(NOON)},1,0\n',
        "ndjson": '{"id": "secret-user",\n"secret-user"\n',
        "parquet": "PAR1 secret-user PAR1",
    }
    (folder / f"a.{form}").write_text(content[form])
    types = {"id": "string", "uid": "string", "item": "string", "ts": "int64", "clicked": "int32", "liked": "int32"}
    config = make_config(tmp_path, {"path": "dt={date}/*", "format": form, "types": types})

    with pytest.raises(Exception, match=f"cannot be read as {form}|none of the") as got:
        read(config)
    assert "secret" not in str(got.value)
