"""The `prune` section of a config: what `daybreak prune` leaves in a home."""

from __future__ import annotations

from pydantic import Field

from gr_core.section import Section


class PruneConfig(Section):
    """How much of the past stays; champion, previous, roots of lineages and what open nights need always do."""

    keep_versions: int = Field(default=7, ge=1, le=10**6)
    """The newest registered versions that keep their files, whatever became of them (`daybreak prune --keep`)."""
