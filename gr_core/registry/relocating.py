"""MLflow's database in a home that was moved or copied: its artifact URIs follow the home.

MLflow stores the artifact root of an experiment, and from it every run's and model's, as whole URIs, and has no call to
change them. A moved home would go on writing to where it was, a copied one into the other home. Only the home's own
SQLite file beside its own artifact folder is touched; a team's server or database never is.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from pathlib import Path
from urllib.parse import urlsplit

from gr_core.registry.database import SQLITE

logger = logging.getLogger(__name__)

_COLUMNS = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}


def follow(tracking_uri: str, artifact_root: str, experiment: str) -> str | None:
    """Rewrite the database's artifact URIs where its experiment lies elsewhere than beside it.

    Args:
        tracking_uri: MLflow's; anything but the SQLite file beside `artifact_root` is left alone.
        artifact_root: Where the home keeps artifacts now.
        experiment: The name of the home's experiment.

    Returns:
        Where the artifacts were; None where nothing had to be changed.
    """
    database = Path(tracking_uri.removeprefix(SQLITE)).absolute()
    if not tracking_uri.startswith(SQLITE) or urlsplit(artifact_root).scheme or not database.exists():
        return None
    root = Path(artifact_root).absolute()
    if database.parent != root.parent:
        return None
    with contextlib.closing(sqlite3.connect(database, timeout=60)) as connection:
        try:
            query = "SELECT artifact_location FROM experiments WHERE name = ?"
            found = connection.execute(query, (experiment,)).fetchone()
        except sqlite3.DatabaseError:
            return None  # MLflow makes it, or says what is wrong
        was, now = str(found[0]) if found else "", root.as_uri()
        if found is None or was == now or Path(was).name != root.name:
            return None
        with connection:  # one transaction
            for table, columns in _COLUMNS.items():
                for column in columns:
                    connection.execute(
                        f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                        f"WHERE {column} = ? OR substr({column}, 1, ?) = ?",
                        (now, len(was) + 1, was, len(was) + 1, f"{was}/"),
                    )
    logger.info("the home was moved: its registry's artifacts are at %s now, were at %s", now, was)
    return was
