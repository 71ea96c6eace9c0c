"""MLflow's SQLite file, made whole or not at all.

MLflow makes its tables in some fifty migrations, each committed by itself, and afterwards refuses a file where a killed
process left only some of them ("table already exists"). So ours is made beside its place and put there by one rename.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import sqlite3
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gr_core.errors import FormatError

logger = logging.getLogger(__name__)

SQLITE = "sqlite:///"
_FIRST_MADE = "experiments"
"""The table that MLflow makes before any other: a part that was cut off has it."""
_LAST_MADE = ("experiments", "registered_models")
"""Tables of which a finished database has a row: MLflow makes its Default experiment after the last migration."""


def make(tracking_uri: str, artifact_root: str) -> None:
    """Make the database of an SQLite URI where there is none yet, or only a part of one.

    A part holds no row of ours; it is kept beside as <file>.unfinished. Any other URI is a server's, and left alone, as
    is one that names no file.

    Args:
        tracking_uri: MLflow's.
        artifact_root: URI or path under which MLflow's Default experiment keeps artifacts.

    Raises:
        FormatError: The file is not a database, or another application's.
    """
    name = tracking_uri.removeprefix(SQLITE).partition("?")[0]  # after it stand options of the driver
    if not tracking_uri.startswith(SQLITE) or not name or name.startswith((":memory:", "file:")):
        return
    file = Path(name).resolve()  # of a link, the file that it means
    if _is_finished(file):
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        lock = os.open(file.parent, os.O_RDONLY)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)  # of the folder, so no file is left; freed when its holder dies
        if _is_finished(file):  # another process was faster
            return
        building = f".{file.name}-"
        for left in file.parent.glob(f"{building}*"):  # by a process that was killed: we hold its lock
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=building, dir=file.parent) as folder:
            with quiet():
                made = build(Path(folder), artifact_root)
            if file.exists():
                kept = file.with_name(f"{file.name}.unfinished")
                os.replace(file, kept)
                logger.warning("the making of %s was cut off; it is made anew, what there was is at %s", file, kept)
            for suffix in ("-journal", "-wal", "-shm"):  # of the cut-off file: SQLite would apply them to the new one
                file.with_name(file.name + suffix).unlink(missing_ok=True)
            os.replace(made, file)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep MLflow's own affairs from people: what SQLAlchemy and pandas deprecate in it, and its own type hints."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message=r"(?s).*(noload|inferred as AnyType)")
        yield


def _is_finished(file: Path) -> bool:
    if not file.exists() or not file.stat().st_size:
        return False
    try:
        with contextlib.closing(sqlite3.connect(file, timeout=60)) as connection:
            tables = {str(row[0]) for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            has_rows = any(
                connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() is not None
                for table in _LAST_MADE
                if table in tables
            )
    except sqlite3.DatabaseError as error:
        raise FormatError(
            f"{file} cannot be read as MLflow's database: {error}; put a backup in its place, or move it away",
            where=str(file),
        ) from error
    if tables and _FIRST_MADE not in tables:
        raise FormatError(
            f"{file} is another application's database, with tables such as {min(tables)}, not MLflow's; name another "
            "file, or move it away",
            where=str(file),
        )
    return has_rows


def location(artifact_root: str) -> str:
    """Return a folder of artifacts as MLflow stores it: a URI."""
    return artifact_root if urlsplit(artifact_root).scheme else Path(artifact_root).absolute().as_uri()


def build(folder: Path, artifact_root: str) -> Path:
    """Make an empty database in a folder; return its only file."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path = folder / "building.db"
    opened: Any = SqlAlchemyStore  # it has no type hints
    store = opened(f"{SQLITE}{path}", location(artifact_root))  # makes the tables, then the Default experiment
    store.engine.dispose()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("VACUUM INTO ?", (str(folder / "made.db"),))  # one file, no journal beside it
    return folder / "made.db"
