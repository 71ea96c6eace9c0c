"""Which rows of a bucket lie together in one file of the event table: rows of about the same time.

Then a file's statistics rule it out for every other time: a night's few late rows go into a file of their own, and a
long history into one file for each span of days.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

DAY_US = 86_400_000_000
RECENT_US = 3 * DAY_US  # rows shown earlier than this before a commit's newest are late ones
SPAN_US = 32 * DAY_US  # of a history in one file
FEW_ROWS = 2**15  # late rows that go together, whatever they span

Longs = npt.NDArray[np.int64]


def clusters_of(shown_us: Longs, recent_us: int = RECENT_US) -> npt.NDArray[np.uint16]:
    """Return the cluster of each row, numbered from 0.

    Args:
        shown_us: shown_at of a bucket's rows, microseconds since the epoch.
        recent_us: Rows shown up to this long before the newest belong together.
    """
    alone = np.zeros(len(shown_us), np.uint16)
    if not len(shown_us) or int(shown_us.max()) - int(shown_us.min()) <= recent_us:
        return alone
    late = shown_us < shown_us.max() - recent_us
    number = int(late.sum())
    if number <= max(FEW_ROWS, len(shown_us) - number):
        return np.where(late, np.uint16(1), np.uint16(0))
    spans = shown_us // SPAN_US
    first = int(spans.min())
    counts = np.bincount(spans - first)
    # neighbouring spans of few rows share a file; one of many has its own
    small = counts < FEW_ROWS
    starts = ~small | ~np.append(False, small[:-1])
    numbers: npt.NDArray[np.uint16] = (np.cumsum(starts) - 1).astype(np.uint16)
    found: npt.NDArray[np.uint16] = numbers[spans - first]
    return found
