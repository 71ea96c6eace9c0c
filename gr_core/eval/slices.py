"""Metrics by action and cohort: each slice of the evaluated events with its own counts, errors and GAUC. Numpy only.

A slicing parts N rows, such as `surface` into surface=feed and surface=search; the slice `all` is the whole. A metric that
is not defined (one class, no rows) is None beside its counts, never 0, 0.5 or NaN. Slices are measured on the rows
themselves, so shards are joined before and never averaged (`metrics.evaluate_shards`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gr_core.eval.metrics import KEYS as PLAIN
from gr_core.eval.metrics import Array, ScoredRows, binary_metrics, gauc, supervised_bits
from gr_core.eval.spread import standard_errors
from gr_core.hashing import fingerprint, short

ALL = "all"
GAUC = ("gauc_user_mean", "gauc_impression_weighted")
METRICS = (*PLAIN, *GAUC)
COUNTS = ("count", "positives", "users", "gauc_users")
"""Rows, positive ones, users, and users with both classes, over whom GAUC is taken."""
ERRORS = {"auc": "auc_error", "ne": "ne_error"}
"""Standard errors over users (gr_core.eval.spread) of these metrics."""
_LOGGED = ("auc", "ne", "calibration", *GAUC, "count", "positives", "users")  # hundreds of keys a night are enough
_UNSAFE = re.compile(r"[^\w.\- ]")  # what MLflow refuses in a key, and the slash that parts it
_LONGEST = 60

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Slicing:
    """One way to part N rows."""

    name: str
    labels: tuple[str, ...]
    place: Array
    """Number of each row's label, int [N]; -1: the row is in no slice."""
    veto: bool = True
    """Whether a slice may hold a challenger."""

    @property
    def slices(self) -> list[str]:
        """Return the names of the slices, such as surface=feed."""
        return [f"{self.name}={label}" for label in self.labels]


def parts(slicings: Iterable[Slicing]) -> Iterator[tuple[str, Array, bool]]:
    """Yield (slice, numbers of its rows, whether it may veto) of every slicing, in order."""
    for one in slicings:
        for number, name in enumerate(one.slices):
            yield name, np.flatnonzero(np.asarray(one.place) == number), one.veto


def measure(
    scored: ScoredRows,
    slicings: Sequence[Slicing],
    action_names: Sequence[str],
    supervised: int,
    *,
    known: Array | None = None,
    unmeasured: Collection[str] = (),
) -> list[Row]:
    """Return the metrics of every slice and supervised action, the whole first.

    Args:
        scored: A model's scores; N rows.
        slicings: How the rows are parted, each with N places.
        action_names: All A action names in bit order.
        supervised: Mask of the supervised actions.
        known: Masks of the labels that count, int32 [N]; None: all that are known.
        unmeasured: Actions whose logits mean nothing: their metrics are None, their counts stand.

    Returns:
        One object a (slice, action): slice, action, METRICS, `ERRORS`' values and COUNTS.

    Raises:
        ValueError: A slicing is of another number of rows.
    """
    mask = np.asarray(scored.label_known if known is None else known)
    for one in slicings:
        if len(one.place) != len(mask):
            raise ValueError(f"slicing {one.name} must have one place a row, got {len(one.place)} for {len(mask)} rows")
    _, users = np.unique(np.asarray(scored.users, dtype=str), return_inverse=True)
    chosen = [(ALL, np.arange(len(mask))), *((name, rows) for name, rows, _ in parts(slicings))]
    found = []
    for name, rows in chosen:
        for action, bit in supervised_bits(action_names, supervised).items():
            at = rows[(mask[rows] >> bit & 1) == 1]
            logits = np.asarray(scored.logits)[at, list(scored.action_bits).index(bit)]
            made = _of(
                np.asarray(scored.labels)[at] >> bit & 1, logits, users[at], is_measured=action not in unmeasured
            )
            found.append({"slice": name, "action": action, **made})
    return found


def _of(labels: Array, logits: Array, users: Array, *, is_measured: bool) -> Row:
    values: Row = binary_metrics(labels, logits)
    is_finite = "non_finite" not in values
    within = gauc(labels, logits, users) if is_finite else {}
    errors = standard_errors(labels, logits, users) if is_finite else {}
    values |= {key: within.get(key) for key in GAUC} | {name: errors.get(key) for key, name in ERRORS.items()}
    if not is_measured:
        values |= dict.fromkeys((*METRICS, *ERRORS.values()))
    both = within.get("num_users", 0)
    return {**values, "users": len(np.unique(users)), "gauc_users": both}


def metric_keys(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return flat keys of rows that name their `role`: next_day/auc/click/surface:feed.

    MLflow takes no `=` in a key, so the slice has a colon there. Of the whole only what `metrics.metric_keys` does not
    give is told: GAUC and users; of slices the chief figures, the table has all.
    """
    found: dict[str, Any] = {}
    for row in rows:
        is_whole = row["slice"] == ALL
        names = (*GAUC, "users", "gauc_users") if is_whole else _LOGGED
        end = "" if is_whole else f"/{key_part(row['slice'])}"
        found |= {f"{row['role']}/{name}/{row['action']}{end}": row[name] for name in names}
    return found


def key_part(name: str) -> str:
    """Return a slice's name as MLflow takes it in a key; a value that had to be changed carries a hash, so it stays apart."""
    of, _, value = name.partition("=")
    kept = _UNSAFE.sub("_", value)[:_LONGEST].strip(". ")
    return f"{of}:{kept}" if kept == value and kept else f"{of}:{kept}-{short(fingerprint(value))}"
