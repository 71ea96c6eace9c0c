"""Nights of a pseudonymised source: one key for a lake, and a raw id that is forgotten by its stored one."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from pathlib import Path

import pytest

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.errors import ConfigError
from gr_core.lake.events import EventTable
from gr_core.stages import checking, erasing, ingesting
from tests.plain import run

KEY = "the key of a test, 32 bytes long"
ON = "source.pseudonymise_users=true"
DAYS = [tiny.FIRST_DAY + timedelta(days=n) for n in range(2)]


def test_a_lake_has_one_key_and_forgets_by_the_raw_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table holds stored ids alone; another key changes nothing and is refused, by `check` too; forget takes user 7."""
    monkeypatch.setenv("DAYBREAK_USER_KEY", KEY)
    config, home = tiny.make(tmp_path, days=2), tmp_path / "home"
    settings = load_config(config, [ON])
    night, _ = run(config, home, DAYS[0], ON, stop_after="ingest")
    table = EventTable(night.table_uri, settings)
    users = set(table.read(table.delta_version())["user_id"])
    own = hashlib.blake2b(b"7", key=KEY.encode(), digest_size=16).hexdigest()
    assert len(users) == 40
    assert own in users
    assert all(len(user) == 32 for user in users)

    before = sorted(home.rglob("*"))
    monkeypatch.setenv("DAYBREAK_USER_KEY", KEY[::-1])
    with pytest.raises(ConfigError, match="is not the key that the lake"):
        ingesting.preflight(settings, str(home), DAYS[1])
    assert not checking.check(settings, str(home), DAYS[1])["ok"]
    with pytest.raises(ConfigError, match="holds pseudonyms"):
        ingesting.preflight(load_config(config), str(home), DAYS[1])
    with pytest.raises(ConfigError, match="is not the key that the lake"):
        erasing.forget(settings, str(home), "7", at_us=2)
    assert sorted(home.rglob("*")) == before

    monkeypatch.setenv("DAYBREAK_USER_KEY", KEY)
    told = erasing.forget(settings, str(home), "7", at_us=3)
    assert told["rows"]["events"] > 0
    assert own not in set(table.read(table.delta_version())["user_id"])
    assert table.check_rows() == table.read(table.delta_version()).height
