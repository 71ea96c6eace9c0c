"""What is wrong with a Delta table that cannot be read: the file of its log, or of its data, that is damaged or gone.

Delta Lake's own message is a fault of its parser without the file's name. So when a table does not open, its log is read
here once more, line by line, and the first file that is not whole is named, with what to do about it.
"""

from __future__ import annotations

import io
import json
import os
import re

import pyarrow as pa
import pyarrow.parquet as pq

from gr_core.errors import FormatError
from gr_core.lake import store
from gr_core.lake.remote import Object

LOG = "_delta_log"
_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint.*\.parquet")
_NOT_WHOLE = (ValueError, RecursionError, OSError, pa.ArrowException)


def unreadable(uri: str, what: str, error: BaseException, *, untouched: str) -> FormatError:
    """Return the error of a table that does not open.

    Args:
        uri: The table.
        what: What it is, for the message.
        error: What the library raised; its first line is told where the log shows no damaged file.
        untouched: What of the home is as it was.

    Returns:
        FormatError with the name of the first file that is damaged or missing.
    """
    found = _first_damaged(uri)
    if found is None:
        said = (str(error).splitlines() or [""])[0]
        return _damage(store.join(uri, LOG), what, f"the log cannot be read: {said}", untouched)
    name, why = found
    return _damage(store.join(uri, LOG, name), what, why, untouched)


def damaged_entry(uri: str, version: int, what: str, why: str, *, untouched: str) -> FormatError:
    """Return the error of one version's log file that says nothing of itself; arguments as `unreadable` has them."""
    return _damage(store.join(uri, LOG, commit_name(version)), what, why, untouched)


def damaged_data(file: str, what: str, error: BaseException, *, untouched: str) -> FormatError:
    """Return the error of a data file that is gone or cut off; arguments as `unreadable` has them."""
    gone = "it is missing (a vacuum takes files of versions older than lake.rerun_days)"
    why = gone if isinstance(error, FileNotFoundError) else f"it is damaged: {error}"
    return _damage(file, what, why, untouched)


def refuse_lost_log(uri: str, what: str, *, untouched: str) -> None:
    """Refuse a folder that holds data files and no log: it would be taken for a table that was never made.

    Raises:
        FormatError: Names the log.
    """
    has_data = any(one.name.endswith(".parquet") for one in store.listing(uri))
    # looked at last: another process may make the table meanwhile, its log first
    if has_data and not store.listing(store.join(uri, LOG)):
        raise _damage(store.join(uri, LOG), what, "it is missing, and data files lie beside it", untouched)


def refuse_lost_commits(uri: str, version: int, what: str, *, untouched: str) -> None:
    """Refuse a local table of whose log a file since the last checkpoint is empty or gone: its commit would be lost.

    A crash of the machine leaves files empty, and Delta Lake reads on without them. One listing, no file is read. The
    newest file, once it is gone, cannot be missed here.

    Args:
        uri: The table.
        version: The version that was opened.
        what: What the table is, for the message.
        untouched: What of the home is as it was.

    Raises:
        FormatError: Names the file.
    """
    if not store.is_local(uri):
        return  # an object store puts a file whole or not at all
    sizes = {one.name: one.stat().st_size for one in os.scandir(store.local_path(uri) / LOG) if one.is_file()}
    starts = [int(match.group(1)) for name in sizes if (match := _CHECKPOINT.fullmatch(name))]
    for number in range(max((start for start in starts if start <= version), default=-1) + 1, version + 1):
        size = sizes.get(commit_name(number))
        if not size:
            why = "it is missing" if size is None else "it is empty"
            raise _damage(store.join(uri, LOG, commit_name(number)), what, why, untouched)


def refuse_damaged(uri: str, what: str, *, untouched: str) -> None:
    """Refuse a table that opens though a file of its log is damaged: its rows are not the table's.

    Raises:
        FormatError: Names the first such file.
    """
    found = _first_damaged(uri)
    if found is not None:
        name, why = found
        raise _damage(store.join(uri, LOG, name), what, why, untouched)


def newest_commit(uri: str) -> int:
    """Return the newest version that has a file in a table's log; -1 where there is none."""
    log = store.listing(store.join(uri, LOG))
    return max((int(match.group(1)) for one in log if (match := _COMMIT.fullmatch(one.name))), default=-1)


def commit_name(version: int) -> str:
    """Return the name of a version's file in the log."""
    return f"{version:020d}.json"


def _damage(file: str, what: str, why: str, untouched: str) -> FormatError:
    return FormatError(
        f"the {what} cannot be read, {file}: {why}; restore this file from a backup ({untouched}), or start a new home "
        "with --home",
        where=file,
    )


def _first_damaged(uri: str) -> tuple[str, str] | None:
    """Return the name of the first log file that is not whole, and what is wrong with it."""
    log = sorted(store.listing(store.join(uri, LOG)), key=lambda one: one.name)
    for one in log:
        why = _checked(one) if _COMMIT.fullmatch(one.name) or _CHECKPOINT.fullmatch(one.name) else None
        if why is not None:
            return one.name, why
    versions = [int(match.group(1)) for one in log if (match := _COMMIT.fullmatch(one.name))]
    starts = [int(match.group(1)) for one in log if (match := _CHECKPOINT.fullmatch(one.name))]
    there = set(versions)
    first = 0 if not starts else min(versions, default=0)
    gap = next((n for n in range(first, max(versions, default=0) + 1) if n not in there), None)
    return None if gap is None else (commit_name(gap), "it is missing")


def _checked(file: Object) -> str | None:
    """Return what is wrong with a file of the log; None where it is whole."""
    line = 0
    try:
        content = store.read_bytes(file.uri)
        if file.name.endswith(".parquet"):
            pq.read_metadata(io.BytesIO(content))
            return None
        if not content:
            return "it is empty"
        actions: set[str] = set()
        for line, text in enumerate(content.splitlines(), 1):  # noqa: B007 -- told when it fails
            action = json.loads(text)
            if not isinstance(action, dict):
                raise ValueError("no action of a commit")
            actions |= action.keys()
        if "commitInfo" not in actions:
            return "it tells nothing of its commit"
    except _NOT_WHOLE as error:
        return f"it is damaged{f' in line {line}' if line else ''}: {str(error).splitlines()[0]}"
    return None
