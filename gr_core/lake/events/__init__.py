"""The event table: one Delta Lake table, one ingestion = one atomic commit (design section 4)."""

from gr_core.lake.events.table import EventTable

__all__ = ["EventTable"]
