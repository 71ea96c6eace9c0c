"""Which slice every scored event of a night is in, and the night's table of slices in its home.

What an event saw stands in its pack: how much history, and whether its item has an embedding row that the parent had.
Side features are read from the event table at the version that the pack was made of, bucket by bucket, and only where a
slice asks for them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from gr_core.config import Config, SliceConfig
from gr_core.data.batches import PackReader
from gr_core.eval import slicing
from gr_core.eval.metrics import Array
from gr_core.eval.scoring import Scored
from gr_core.eval.slices import Slicing
from gr_core.hashing import buckets_of
from gr_core.lake import store
from gr_core.lake.events import EventTable
from gr_core.night import Night
from gr_core.schema import FIRST_FALLBACK_ROW, PAD_ROW

logger = logging.getLogger(__name__)

TABLE_FILE = "slices.parquet"
ITEM = "item_id"
_LATE = 50  # one row in so many may be late: users of those still missing are read whole
_NO_COMMIT = 2**62  # greater than any: a read takes rows by their time alone


def of(night: Night, pack: Mapping[str, Any], scored: Scored, config: Config | None = None) -> list[Slicing]:
    """Part the rows of a scored pack as `evaluation.slices` says.

    Args:
        night: The night that the pack is of.
        pack: The pack (uri), of the night's own vocabulary.
        scored: Its scores; N rows in pack order.
        config: Whose slices; None: the night's.

    Returns:
        One slicing a configured one.

    Raises:
        FormatError: The pack is damaged, or the event table's version is not there any more.
        FileNotFoundError: The parent's vocabulary is not there any more.
    """
    config = config or night.settings
    wanted = config.evaluation.slices
    if not wanted:
        return []
    reader = PackReader(store.local_copy(str(pack["uri"])), verify=False)  # who scored it has verified it
    features = list(dict.fromkeys(one.feature for one in wanted if one.feature is not None))
    sides = side_features(config, night.table_uri, reader.index["bound"], scored, features)
    history, items = _seen(reader)
    return [_one(night, one, sides, history, items) for one in wanted]


def _one(night: Night, one: SliceConfig, sides: pl.DataFrame, history: Array, items: Array) -> Slicing:
    match one.by:
        case "feature":
            return slicing.by_feature(one, sides[str(one.feature)])
        case "history":
            return slicing.by_history(one, history)
        case _:
            return slicing.by_items(one, _are_new(night, items))


def _seen(reader: PackReader) -> tuple[Array, Array]:
    """Return how many history entries each target sees, int [N], and the row of its item, int32 [N]."""
    interleaved = reader.index["tokens"] == "interleaved"
    counts, items = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
    with reader.ahead() as batches:
        for batch in batches:
            if batch.weights["token"] == 0:
                continue
            at = (batch.supervise > 0).numpy()
            lo, hi = batch.lo.numpy()[at], batch.hi.numpy()[at]
            if interleaved:  # an entry has one action token, and that alone has no item
                is_entry = batch.rows[ITEM].numpy() == PAD_ROW
                before = np.append(0, np.cumsum(is_entry))
                lo, hi = before[lo], before[hi]
            counts.append(hi.astype(np.int64) - lo)
            items.append(batch.rows[ITEM].numpy()[at])
    return np.concatenate(counts), np.concatenate(items)


def _are_new(night: Night, rows: Array) -> Array:
    """Tell which items had no embedding row of their own in the vocabulary that the night started from, bool [N]."""
    if night.parent is None:
        return np.ones(len(rows), np.bool_)
    uri = store.join(night.parent.vocabulary, "vocabulary.json")
    table = store.read_json(uri)["tables"][ITEM]
    return np.asarray((rows >= table["rows"]) | (rows < FIRST_FALLBACK_ROW + table["fallbacks"]))


def side_features(
    config: Config, table_uri: str, bound: Mapping[str, Any], scored: Scored, features: Sequence[str]
) -> pl.DataFrame:
    """Return the side features of scored events, one row an event in their order; null where the table has none.

    Args:
        config: The run's config.
        table_uri: The event table.
        bound: What the events' pack was read up to: delta_version and commit.
        scored: The events.
        features: Names of side features.

    Raises:
        FormatError: The version is not there any more.
    """
    keys = slicing.keys_of(scored.events)
    if not features:
        return keys.select()
    table = EventTable(table_uri, config, up_to=bound["commit"])
    version, columns = bound["delta_version"], ["user_id", "shown_at", "event_id", *features]
    users = keys["user_id"].unique()
    buckets = pl.DataFrame({"user_id": users, "bucket": buckets_of(users, config.lake.num_buckets)})
    parts = [pl.DataFrame(schema={**keys.schema, **dict.fromkeys(features, pl.String)})]
    for (bucket,), own in keys.join(buckets, on="user_id").group_by("bucket"):
        wanted = own.drop("bucket")
        start = int(own["shown_at"].sort()[len(own) // _LATE])
        read = table.read_since(
            version, bucket=int(str(bucket)), commit_after=_NO_COMMIT, shown_from_us=start, columns=columns
        )
        parts.append(_matching(read, wanted))
        late = wanted.join(parts[-1], on=keys.columns, how="anti")["user_id"].unique().to_list()
        if late:
            read = table.read_users(version, bucket=int(str(bucket)), users=late, columns=columns)
            parts.append(_matching(read, wanted.filter(pl.col("shown_at") < start)))
    found = pl.concat(parts).unique(keys.columns, keep="first", maintain_order=True)
    return keys.join(found, on=keys.columns, how="left", maintain_order="left").select(features)


def _matching(rows: pl.DataFrame, wanted: pl.DataFrame) -> pl.DataFrame:
    rows = rows.with_columns(pl.col("shown_at").dt.epoch("us"))
    return rows.join(wanted, on=wanted.columns, how="semi")


def named(rows: Iterable[dict[str, Any]], role: str, model: int) -> list[dict[str, Any]]:
    """Return rows of `slices.measure` with the events' role and the version that scored them."""
    return [{"role": role, "model": model, **row} for row in rows]


def write_table(night: Night, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the night's table of slices into its folder, whole and over an older one: a row a metric, however often.

    Args:
        night: The night.
        rows: What its evaluation and gate measured.

    Returns:
        The table as CSV text, for the night's MLflow run.
    """
    table = slicing.long_table(night.key, rows)
    store.write_bytes(table_uri(night.home, night.key), slicing.as_parquet(table))
    return slicing.as_csv(table)


def table_uri(home: str, key: str) -> str:
    """Return where a night's table of slices lies; beside what stages wrote, since it holds no user."""
    return store.join(home, "nights", key, TABLE_FILE)
