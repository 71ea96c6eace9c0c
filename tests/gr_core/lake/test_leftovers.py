"""Quarantine and waiting actions of a forgotten user: found as the contract finds him, and nobody else."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from gr_core.config import Config
from gr_core.data.joining import WAITING
from gr_core.lake import leftovers, pending, quarantine
from tests.feeds import make_config


def rows(*texts: Any, feed: str = "log") -> pl.DataFrame:
    """Return quarantined rows; a dict stands as its JSON."""
    listed = [text if isinstance(text, str) else json.dumps(text) for text in texts]
    blank = dict.fromkeys(("reason", "file"), ["x"] * len(listed))
    return pl.DataFrame({**blank, "feed": [feed] * len(listed), "row": listed}).select(quarantine.SCHEMA.names())


def found(config: Config, frame: pl.DataFrame, user: str) -> list[bool]:
    return leftovers.quarantined(config, frame, user).to_list()


def test_raw_rows_are_found_by_the_column_of_the_users_id(tmp_path: Path) -> None:
    """Another column with the same value is not the user."""
    config = make_config(tmp_path)
    frame = rows({"uid": 7, "item": 1}, {"uid": "7"}, {"uid": 7.0}, {"uid": 77, "item": 7}, {"uid": None}, {"item": 7})

    assert found(config, frame, "7") == [True, True, True, False, False, False]


def test_neighbours_among_large_ids_are_told_apart(tmp_path: Path) -> None:
    """Ids above 2**53 that are one as floats are two users."""
    frame = rows({"uid": 2**53 + 1}, {"uid": 2**53}, {"uid": str(2**53)}, {"uid": f"00{2**53 + 1}"}, {"uid": "x"})

    assert found(make_config(tmp_path), frame, str(2**53 + 1)) == [True, False, False, True, False]


def test_contract_rows_are_found_by_user_id(tmp_path: Path) -> None:
    """Rows over the daily cap, and retracted ones, stand in the contract's own columns."""
    frame = rows({"user_id": "u7", "event_id": "e"}, {"user_id": "u8", "item_id": "u7"})

    assert found(make_config(tmp_path), frame, "u7") == [True, False]


def test_an_id_made_by_sql_is_worked_out(tmp_path: Path) -> None:
    """The feed's expression decides, over the row's own columns."""
    config = make_config(tmp_path, {"columns": {"user_id": "CONCAT(region, uid)", "item_id": "item"}})
    frame = rows({"region": "eu", "uid": "7"}, {"region": "us", "uid": "7"}, {"region": "e", "uid": "u7"})

    assert found(config, frame, "eu7") == [True, False, True]


def test_text_that_is_no_row_is_found_by_the_word(tmp_path: Path) -> None:
    """A line that could not be read has no columns: the id counts where it stands as a word of its own."""
    frame = rows("7,3,oops", '{"uid": 7, "it', "77,3,oops", "[7]", "a7")

    assert found(make_config(tmp_path), frame, "7") == [True, True, False, True, False]


def test_rows_of_a_feed_that_the_config_no_longer_has_are_looked_at(tmp_path: Path) -> None:
    """What can be told is told: the contract's own column."""
    frame = rows({"user_id": "u7"}, {"uid": "u7"}, feed="gone")

    assert found(make_config(tmp_path), frame, "u7") == [True, False]


@pytest.mark.parametrize(
    ("event_id", "his"), [("u7:i:1", True), ("i:u7:1", False), ("u77:i:1", False), ("u7:a:b:1", True)]
)
def test_waiting_actions_are_found_by_their_key(tmp_path: Path, event_id: str, his: bool) -> None:  # noqa: FBT001
    """The place of the user's column in the key decides; where a colon shifts places, any does."""
    config = make_config(tmp_path, {"event_id": None, "event_key": ["uid", "item", "ts"]})
    frame = pl.DataFrame({"event_id": [event_id]})

    assert leftovers.waiting(config, frame, "u7").to_list() == [his]


def test_quarantined_actions_are_found_by_their_key(tmp_path: Path) -> None:
    """An action row that met no impression stands in quarantine by its key alone."""
    config = make_config(tmp_path, {"event_id": None, "event_key": ["uid", "item", "ts"]})
    frame = rows({"event_id": "u7:i:1", "actions": 1}, {"event_id": "u8:u7:1", "actions": 1}, feed="actions")

    assert found(config, frame, "u7") == [True, False]


def test_waiting_actions_whose_key_names_nobody_stay(tmp_path: Path) -> None:
    """A feed with ids of its own does not say whose an action is."""
    assert leftovers.waiting(make_config(tmp_path), pl.DataFrame({"event_id": ["u7"]}), "u7").to_list() == [False]


def test_files_are_rewritten_without_him_and_others_left_alone(tmp_path: Path) -> None:
    """Counts removed rows; a second time there is nothing to do, and no file is touched."""
    config = make_config(tmp_path, {"event_id": None, "event_key": ["uid", "item", "ts"]})
    lake = str(tmp_path / "lake")
    own, other = rows({"uid": "u7"}, {"uid": "u8"}), rows({"uid": "u8"})
    paths = [quarantine.write(f"{lake}/quarantine", number, "n", frame) for number, frame in ((1, own), (2, other))]
    waits = pl.DataFrame({"event_id": ["u7:i:1", "u8:i:1"]}).with_columns(
        pl.lit(None, dtype).alias(name) for name, dtype in WAITING.items() if name != "event_id"
    )
    path = pending.write(f"{lake}/pending", 1, "n", waits)
    untouched = (tmp_path / "lake" / "quarantine" / paths[1]).stat().st_mtime_ns

    assert leftovers.clean(config, lake, "u7") == 2
    assert leftovers.clean(config, lake, "u7") == 0

    assert quarantine.read(f"{lake}/quarantine", paths[0])["row"].to_list() == ['{"uid": "u8"}']
    assert pending.read(f"{lake}/pending", path)["event_id"].to_list() == ["u8:i:1"]
    assert (tmp_path / "lake" / "quarantine" / paths[1]).stat().st_mtime_ns == untouched


def test_a_kill_while_rewriting_leaves_the_old_file_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's rows are lost; the next run finishes."""
    config, lake = make_config(tmp_path), str(tmp_path / "lake")
    path = quarantine.write(f"{lake}/quarantine", 1, "n", rows({"uid": "u7"}, {"uid": "u8"}))

    def killed(*_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("gr_core.lake.store.write_bytes", killed)
        with pytest.raises(KeyboardInterrupt):
            leftovers.clean(config, lake, "u7")
    content = io.BytesIO((tmp_path / "lake" / "quarantine" / path).read_bytes())
    assert pl.read_parquet(content).height == 2
    assert leftovers.clean(config, lake, "u7") == 1
