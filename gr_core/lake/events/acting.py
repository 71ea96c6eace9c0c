"""The action rows of one attempt to ingest: which rows of the table they may be about, and what became of them.

In: tonight's action rows and those that waited. Out, bucket by bucket: events with what they learnt; at the end the
rows that wait on, their quarantine and their counts. Of the table only the days around the action rows are read.
"""

from __future__ import annotations

import polars as pl

from gr_core.config import Config
from gr_core.data import joining
from gr_core.data.actions import ActionBatch
from gr_core.data.joining import Met, Settled
from gr_core.lake.events import reach


class Acting:
    """Asks the events of each bucket, in any order, and remembers the greatest answer to each row.

    Args:
        config: The run's config.
        batch: Tonight's rows.
        waiting: `joining.WAITING`: rows that the commit before left pending.
    """

    def __init__(self, config: Config, batch: ActionBatch, waiting: pl.DataFrame) -> None:
        self._config, self._batch = config, batch
        self._asked = joining.ask(batch, waiting)
        self._ids = self._asked.rows["event_id"].unique()
        self._spans = reach.apart(joining.spans(config, self._asked.rows))
        self._fates = pl.zeros(self._asked.rows.height, pl.Int8, eager=True)

    def candidates(self, files: pl.DataFrame) -> pl.DataFrame:
        """Read the rows of a bucket's files that action rows may be about: whole rows with the URI of their file."""
        return reach.with_ids(files, self._config, self._ids, self._spans)

    def meet(self, inserts: pl.DataFrame, old: pl.DataFrame, repeats: pl.DataFrame) -> Met:
        """Let events learn from the rows, as `joining.meet`."""
        met = joining.meet(self._config, self._asked, inserts, old, repeats)
        self._fates = pl.select(pl.max_horizontal(self._fates, met.fates)).to_series()
        return met

    def settle(self, number: int, forgotten: pl.Series) -> Settled:
        """Say what became of every row once all buckets were asked, as `joining.settle`."""
        return joining.settle(self._config, self._batch, self._asked, self._fates, number=number, forgotten=forgotten)
