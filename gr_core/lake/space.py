"""A disk without space, told by whatever met it: Python, Delta, Polars, SQLite, MLflow, Prefect's server or training."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator

from gr_core.environment import state_directory, without_secrets
from gr_core.errors import DaybreakError, StoreFull

_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SAID = re.compile(
    r"No space left on device|(?:database or )?disk is full|Disk quota exceeded|File too large|os error (?:28|122|27)\b",
    re.IGNORECASE,
)
_NOTHING_LEFT = 2**18  # bytes: with less, what failed without a word of it failed for it
_LONGEST = 200


def named(home: str, error: BaseException) -> StoreFull | None:
    """Return what an error means where a disk, a quota or a file size limit is what it met; else None.

    Args:
        home: URI of the home; of a remote one, its local state is looked at.
        error: Any exception.
    """
    if isinstance(error, StoreFull):
        return None
    place = state_directory(home)
    met = next((one for one in _chain(error) if _is_full(one)), None)
    try:
        free = shutil.disk_usage(place if place.exists() else place.parent).free
    except OSError:
        free = _NOTHING_LEFT
    if met is None and (isinstance(error, DaybreakError) or not isinstance(error, Exception) or free >= _NOTHING_LEFT):
        return None
    said = without_secrets(" ".join(str(met or error).split()))[:_LONGEST]
    return StoreFull(
        f"{place}: its disk, or a quota, is full, {free // 1000:,} kB are left ({said}); free some, for example with "
        "`daybreak prune` in another home of it, and run it again: what is done stays",
        where=str(place),
    )


def _is_full(error: BaseException) -> bool:
    return (isinstance(error, OSError) and error.errno in _ERRNOS) or _SAID.search(str(error)) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__
