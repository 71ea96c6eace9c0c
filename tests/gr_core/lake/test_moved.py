"""Homes that were moved: URIs below a home's nights follow it, and nothing else changes."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from gr_core.lake.moved import rebased
from gr_core.registry import relocating


@pytest.mark.parametrize("home", ["/new/home", "s3://bucket/new"])
@pytest.mark.parametrize("was", ["/old/home", "s3://other/old", "/old/nights/home"])
def test_uris_below_nights_follow_the_home(was: str, home: str) -> None:
    """At any depth, in lists too; what lies in this home stays, and so does everything that is no such URI."""
    values = {
        "checkpoint": f"{was}/nights/2025-06-01/checkpoint-1",
        "parent": {"uris": [f"{was}/nights/2025-06-01/vocabulary-1", f"{home}/nights/x/y"]},
        "config": {"source": {"root": "/data/nights/raw"}},
        "difference": {"source.root": ["/a/nights/raw", "/b/nights/raw"]},
        "error": f"it broke: {was}/nights/2025-06-01 is damaged",
        "name": "a/nights/b",
        "version": 3,
    }

    found = rebased(values, home)

    assert found["checkpoint"] == f"{home}/nights/2025-06-01/checkpoint-1"
    assert found["parent"]["uris"] == [f"{home}/nights/2025-06-01/vocabulary-1", f"{home}/nights/x/y"]
    for key in ("config", "difference", "error", "name", "version"):
        assert found[key] == values[key]


def make_database(folder: Path, location: str) -> None:
    """Write the columns that MLflow keeps artifact URIs in."""
    with sqlite3.connect(folder / "mlflow.db") as connection:
        connection.executescript(
            "CREATE TABLE experiments (name TEXT, artifact_location TEXT); CREATE TABLE runs (artifact_uri TEXT);"
            "CREATE TABLE logged_models (artifact_location TEXT);"
            "CREATE TABLE model_versions (source TEXT, storage_location TEXT)"
        )
        connection.execute("INSERT INTO experiments VALUES ('daybreak-x', ?)", (location,))
        connection.execute("INSERT INTO runs VALUES (?)", (f"{location}/r/artifacts",))
        connection.execute("INSERT INTO runs VALUES (?)", (f"{location}-apart/r",))
        connection.execute("INSERT INTO logged_models VALUES (?)", (f"{location}/models/m",))
        connection.execute("INSERT INTO model_versions VALUES (?, NULL)", (f"{location}/models/m",))
    connection.close()


def test_the_registry_of_a_moved_home_follows_it_and_only_that(tmp_path: Path) -> None:
    """Every URI below the old place is below the new one; a second look finds nothing; other databases are left alone."""
    make_database(tmp_path, "file:///old/mlartifacts")
    uri, root = f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path / "mlartifacts")

    assert relocating.follow(uri, str(tmp_path / "elsewhere" / "mlartifacts"), "daybreak-x") is None
    assert relocating.follow(uri, root, "daybreak-other") is None
    assert relocating.follow("http://server", root, "daybreak-x") is None
    assert relocating.follow(uri, root, "daybreak-x") == "file:///old/mlartifacts"
    assert relocating.follow(uri, root, "daybreak-x") is None

    now = (tmp_path / "mlartifacts").as_uri()
    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        assert connection.execute("SELECT artifact_location FROM experiments").fetchall() == [(now,)]
        uris = [row[0] for row in connection.execute("SELECT artifact_uri FROM runs")]
        assert uris == [f"{now}/r/artifacts", "file:///old/mlartifacts-apart/r"]
        assert connection.execute("SELECT * FROM model_versions").fetchall() == [(f"{now}/models/m", None)]
    connection.close()
