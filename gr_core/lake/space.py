"""A disk without space, or one that is read-only, told by whatever met it.

Python, Delta, Polars, SQLite, MLflow, Prefect's server and the training child each say it in their own way.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator

from gr_core.environment import state_directory, without_secrets
from gr_core.errors import DaybreakError, StoreFull, UsageError

_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SAID = re.compile(
    r"No space left on device|(?:database or )?disk is full|Disk quota exceeded|File too large|os error (?:28|122|27)\b",
    re.IGNORECASE,
)
_READ_ONLY = re.compile(r"Read-only file ?system|attempt to write a readonly database|os error 30\b", re.IGNORECASE)
_NOTHING_LEFT = 2**18  # bytes: with less, what failed without a word of it failed for it
_LONGEST = 200


def named(home: str, error: BaseException) -> StoreFull | UsageError | None:
    """Return what an error means where a full or read-only disk, a quota or a file size limit is what it met; else None.

    Args:
        home: URI of the home; of a remote one, its local state is looked at.
        error: Any exception.
    """
    if isinstance(error, StoreFull | UsageError):
        return None
    place = state_directory(home)
    locked = next((one for one in _chain(error) if _is_read_only(one)), None)
    if locked is not None:
        return UsageError(
            f"{place} cannot be written, its disk is read-only ({_short(locked)}); mount it writable, or name another home "
            "with --home or DAYBREAK_HOME, and run it again: what is done stays",
            where=str(place),
        )
    met = next((one for one in _chain(error) if _is_full(one)), None)
    try:
        free = shutil.disk_usage(place if place.exists() else place.parent).free
    except OSError:
        free = _NOTHING_LEFT
    if met is None and (isinstance(error, DaybreakError) or not isinstance(error, Exception) or free >= _NOTHING_LEFT):
        return None
    return StoreFull(
        f"{place}: its disk, or a quota, is full, {free // 1000:,} kB are left ({_short(met or error)}); free some, for example with "
        "`daybreak prune` in another home on it, and run it again: what is done stays",
        where=str(place),
    )


def _short(error: BaseException) -> str:
    return without_secrets(" ".join(str(error).split()))[:_LONGEST]


def _is_read_only(error: BaseException) -> bool:
    is_code = isinstance(error, OSError) and error.errno == errno.EROFS
    return is_code or _READ_ONLY.search(str(error)) is not None


def _is_full(error: BaseException) -> bool:
    return (isinstance(error, OSError) and error.errno in _ERRNOS) or _SAID.search(str(error)) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__
