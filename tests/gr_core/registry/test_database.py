"""MLflow's SQLite file is made whole or not at all, whenever its maker is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy.exc
from mlflow import MlflowClient
from mlflow.store.tracking.dbmodels.initial_models import Base
from sqlalchemy import create_engine

from gr_core.errors import FormatError
from gr_core.registry import database
from gr_core.registry.mlflow_store import MlflowStore
from tests.stand import until

real_build = database.build  # tests copy what it made once: tests/conftest.py
MAKE = "import sys; from gr_core.registry import database; database.make(sys.argv[1], sys.argv[2])"


def tables(file: Path) -> set[str]:
    """The tables of a database, empty where it cannot be read at this moment."""
    if not file.exists():
        return set()
    with contextlib.closing(sqlite3.connect(file)) as connection, contextlib.suppress(sqlite3.OperationalError):
        return {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return set()


def test_a_process_killed_while_it_makes_the_database_leaves_nothing_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After kill -9 among the migrations the file is not there, and the next one makes it, without leftovers."""
    file, root = tmp_path / "mlflow.db", tmp_path / "mlartifacts"
    maker = subprocess.Popen([sys.executable, "-c", MAKE, f"sqlite:///{file}", str(root)])
    until(
        lambda: any(len(tables(found)) > 3 for found in tmp_path.glob(".mlflow.db-*/building.db")), what="some tables"
    )
    os.kill(maker.pid, signal.SIGKILL)
    maker.wait()
    assert not file.exists()

    monkeypatch.setattr(database, "build", real_build)
    MlflowStore(f"sqlite:///{file}", str(root), "x")
    found = MlflowClient(f"sqlite:///{file}").get_experiment("0")
    assert found.artifact_location == f"{root.as_uri()}/0"  # not the working directory's (B6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlflow.db"]


def test_a_database_cut_off_while_it_was_made_is_made_anew_and_kept(tmp_path: Path) -> None:
    """What a killed MLflow leaves, and MLflow itself refuses, is put aside as <file>.unfinished."""
    file = tmp_path / "mlflow.db"
    engine = create_engine(f"sqlite:///{file}")
    Base.metadata.create_all(engine)
    with contextlib.closing(sqlite3.connect(file)) as connection:  # of a later migration, which is run again
        connection.execute("CREATE TABLE registered_model_tags (name VARCHAR(256))")
    engine.dispose()
    part = tables(file)
    copy = shutil.copy(file, tmp_path / "copy.db")
    with pytest.raises(sqlalchemy.exc.OperationalError, match="already exists"):
        MlflowClient(f"sqlite:///{copy}").get_experiment_by_name("x")

    store = MlflowStore(f"sqlite:///{file}", str(tmp_path / "mlartifacts"), "x")
    assert store.aliases() == {}
    assert part <= tables(tmp_path / "mlflow.db.unfinished")


def test_many_make_one_database(tmp_path: Path) -> None:
    """Of several at once the first makes it; the others find it made."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: database.make(uri, str(tmp_path / "mlartifacts")), range(3)))
    before = (tmp_path / "mlflow.db").stat().st_ino
    database.make(uri, "elsewhere")
    assert (tmp_path / "mlflow.db").stat().st_ino == before
    assert not (tmp_path / "mlflow.db.unfinished").exists()


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    """It is neither replaced nor taken for an empty one."""
    file = tmp_path / "mlflow.db"
    file.write_text("no database, but longer than the sixteen bytes of its header")
    with pytest.raises(FormatError, match=r"mlflow\.db cannot be read.*not a database.*backup"):
        database.make(f"sqlite:///{file}", str(tmp_path))
    assert file.read_text().startswith("no database")


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """A folder in its place, as a container makes it of a missing mount."""
    (tmp_path / "mlflow.db").mkdir()
    with pytest.raises(FormatError, match=r"mlflow\.db cannot be read.*unable to open"):
        database.make(f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path))


def test_another_applications_database_stays_where_it_is(tmp_path: Path) -> None:
    """It is no part of ours, though it has none of MLflow's rows."""
    file = tmp_path / "shop.db"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE customers (name TEXT)")
    with pytest.raises(FormatError, match=r"shop\.db is another application's database.*customers"):
        database.make(f"sqlite:///{file}", str(tmp_path))
    assert tables(file) == {"customers"}
    assert [path.name for path in tmp_path.iterdir()] == ["shop.db"]


def test_the_drivers_options_are_no_part_of_the_files_name(tmp_path: Path) -> None:
    """SQLAlchemy takes them after a question mark."""
    database.make(f"sqlite:///{tmp_path}/mlflow.db?timeout=60", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    """A database that was laid on another disk is made there."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "mlflow.db").symlink_to(tmp_path / "disk" / "mlflow.db")
    database.make(f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path))
    assert (tmp_path / "mlflow.db").is_symlink()
    assert "experiments" in tables(tmp_path / "disk" / "mlflow.db")


@pytest.mark.parametrize("uri", ["https://mlflow.example.com", "sqlite:///:memory:", "sqlite:///file:x?uri=true"])
def test_what_is_no_file_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    """Only an SQLite file is ours to make."""
    monkeypatch.chdir(tmp_path)
    database.make(uri, str(tmp_path))
    assert not list(tmp_path.iterdir())
