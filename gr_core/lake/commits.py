"""What one ingestion tells about itself: a small value, kept in the metadata of its Delta commit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from gr_core.refs import ActionRows, Ref, Rows

NIGHT_KEY = "daybreak.night"
COMMIT_KEY = "daybreak.commit"
INGEST = "ingest"  # app transaction: the newest commit's number


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit(Ref):
    """One ingestion, as its Delta commit tells it."""

    number: int
    """1 for the first ingestion, then one more each."""
    delta_version: int
    """Version of the Delta table that this commit made."""
    night: str
    """The night that ingested."""
    feed: str
    rows: Rows
    updated: int = 0
    """Events of earlier commits that learnt or changed action bits or times."""
    labels_changed_after_supervision: int = 0
    """(event, action)s that changed although a lineage's checkpoint may have been trained on them."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Quarantined rows by reason."""
    missing_side: dict[str, int] = field(default_factory=dict)
    """Side table -> events of the batch without a row in it."""
    outside_window: int = 0
    """(event, action)s of the batch whose time lay outside the attribution window."""
    bad_action_times: int = 0
    """(event, action)s of the batch that are unknown because their time could not be read."""
    unknown_columns: dict[str, int] = field(default_factory=dict)
    """Raw column that the config neither reads nor declares -> files that have it."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What the next days' data checks compare with (`data.checks`), the counts of rows apart."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Feed day (ISO) -> digest of the identity of its files as they were read; restated days first."""
    numbers: dict[str, list[int]] = field(default_factory=dict)
    """Restated feed day -> all numbers that its rows came under, this commit's last."""
    restated: int = 0
    """Rows read of feed days that were read again."""
    replaced: int = 0
    """Events of restated days that left the table because they were not delivered again."""
    action_rows: ActionRows | None = None
    """Accounting of the actions feeds' rows; None where the ingestion had none of such feeds."""
    action_reasons: dict[str, int] = field(default_factory=dict)
    """Quarantined action rows by reason."""
    pending: str = ""
    """File of the action rows that wait after this commit, below the lake's directory of them; empty: no row."""
    quarantine: str = ""
    """Quarantine file below the lake's quarantine directory; empty: no row."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Build from plain JSON values, the counts of rows included."""
        names = set(cls.__dataclass_fields__)
        known = {key: value for key, value in values.items() if key in names}
        if known.get("action_rows") is not None:
            known["action_rows"] = ActionRows.from_json(known["action_rows"])
        return cls(**{**known, "rows": Rows.from_json(values["rows"])})
