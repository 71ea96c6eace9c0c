"""What the cases are made of: raw rows that have the trouble, and the part of a case that runs in a child process."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks._nights import open_day, run_data
from gr_core.config import Config, parse_config
from gr_core.data import vocabulary
from gr_core.data.batches import Batch, PackReader
from gr_core.lake import store

DAY = date(2025, 6, 1)
_DAY_MS = int(datetime(DAY.year, DAY.month, DAY.day, tzinfo=UTC).timestamp()) * 1000
_MODEL = {"width": 32, "num_heads": 2, "item_features": ["item_id"]}


def config_of(root: Path, form: str = "parquet", **sections: Any) -> Config:
    """Return the config of a case, see `raw_config`."""
    return parse_config(raw_config(root, form, **sections))


def raw_config(root: Path, form: str = "parquet", **sections: Any) -> dict[str, Any]:
    """Return a case's sections: one feed `log/date={date}/*`, one action, everything due and nobody held out."""
    feed = {
        "name": "log",
        "path": "log/date={date}/*",
        "format": form,
        "event_id": "id",
        "types": {"id": "string", "uid": "string", "item": "string", "ts": "int64", "clicked": "bool"},
        "shown_at": {"column": "ts", "unit": "ms"},
        "columns": {"user_id": "uid", "item_id": "item"},
        "actions": {"click": "clicked"},
    }
    source = {"root": str(root), "visibility_delay_seconds": 60, "actions": [{"name": "click"}], "feeds": [feed]}
    raw: dict[str, Any] = {
        "name": "case",
        "lake": {"num_buckets": 2, "holdout_fraction": 0.0},
        "source": source,
        "model": _MODEL,
    }
    for section, keys in sections.items():
        raw[section] = {**raw.get(section, {}), **keys}
    return raw


def event_rows(numbers: npt.NDArray[np.int64], users: npt.NDArray[np.int64], shown: npt.NDArray[np.int64]) -> pa.Table:
    """Return raw rows; the item's id is the event's own, and ids sort as their numbers do."""
    ids = pa.array([f"e{number:09d}" for number in numbers])
    return pa.table(
        {
            "id": ids,
            "uid": pa.array([f"u{user}" for user in users]),
            "item": ids,
            "ts": pa.array(shown),
            "clicked": pa.array(numbers % 3 == 0),
        }
    )


def write_ordered(root: Path, num_events: int) -> None:
    """Write D1's day: events sorted by a coarse time with many ties, and a side table of all their items."""
    rng = np.random.default_rng(1)
    numbers = rng.permutation(num_events)
    shown = _DAY_MS + np.sort(rng.integers(0, 144, num_events)) * 600_000
    rows = event_rows(numbers, rng.integers(0, max(num_events // 40, 1), num_events), shown)
    _write(root / f"log/date={DAY}/part-0.parquet", rows)
    items = pa.table({"item": rows["item"], "kind": pa.array([f"k{number % 9}" for number in numbers])})
    _write(root / "items/part-0.parquet", items.take(pa.array(rng.permutation(num_events))))


def ordered(root: str, home: str, runs: int) -> dict[str, Any]:
    """Build D1's day several times over, each in a home of its own.

    Returns:
        digests of the train packs, and how many segments are out of order in the first of them.
    """
    table = {"name": "items", "path": "items/*.parquet", "on": {"item_id": "item"}, "side": {"kind": "kind"}}
    config = config_of(
        Path(root),
        source={**config_of(Path(root)).source.model_dump(mode="json"), "tables": [table]},
        model={**_MODEL, "item_features": ["item_id", "kind"]},
        sequences={"max_history": 64, "max_targets": 16},
    )
    digests, disordered = [], 0
    for run in range(runs):
        data = run_data(open_day(config, f"{home}/run-{run}", DAY), workers=4)
        digests.append(data.packs["train"]["digest"])
        if run == 0:
            words = vocabulary.load(store.local_path(data.words["uri"])).tables["item_id"].ids
            numbers = np.full(int(words["row"].max()) + 1, -1, np.int64)  # type: ignore[arg-type]
            numbers[words["row"].to_numpy()] = words["id"].str.slice(1).cast(int).to_numpy()
            reader = PackReader(store.local_path(data.packs["train"]["uri"]))
            disordered = sum(_disordered(batch, numbers) for batch in reader)
    return {"digests": digests, "disordered": disordered}


def _disordered(batch: Batch, numbers: npt.NDArray[np.int64]) -> int:
    """Count segments whose history or targets are not ascending in (time, event id)."""
    time, target = batch.time.numpy(), batch.supervise.numpy()
    number = numbers[batch.rows["item_id"].numpy()]
    segment = np.repeat(np.arange(len(batch.segment_starts) - 1), np.diff(batch.segment_starts))
    together = (np.diff(segment) == 0) & (np.diff(target) == 0)
    wrong = together & ((np.diff(time) < 0) | ((np.diff(time) == 0) & (np.diff(number) <= 0)))
    back = (np.diff(segment) == 0) & (np.diff(target.astype(np.int8)) < 0)
    return len(np.unique(segment[1:][wrong | back]))


def write_bot(root: Path, day: str, num_events: int) -> None:
    """Add E9's user to a generated night's files: so many events of one user in one day."""
    rng = np.random.default_rng(9)
    begin = int(datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp()) * 1000
    rows = {
        "id": np.arange(num_events, dtype=np.int64) + (1 << 50),
        "uid": np.full(num_events, 1 << 41),
        "item": rng.integers(1, 1000, num_events),
        "ts": begin + np.sort(rng.integers(0, 86_400_000, num_events)),
        "click": np.ones(num_events, np.bool_),
        "like": np.zeros(num_events, np.bool_),
        "watched": np.ones(num_events, np.bool_),
        "category": pa.array(["c00"] * num_events),
        "surface": pa.array(["home"] * num_events),
    }
    _write(root / f"nights/date={day}/bot-0.parquet", pa.table(rows))


def write_many_files(root: Path, num_files: int) -> int:
    """Write A17's day: so many small files with long names; returns the bytes of their paths."""
    rng = np.random.default_rng(17)
    size = 0
    for number in range(num_files):
        numbers = np.arange(2) + 2 * number
        shown = _DAY_MS + rng.integers(0, 86_400_000, 2)
        path = root / f"log/date={DAY}/region-north-{number % 7}-shard-{number:06d}-of-{num_files:06d}.parquet"
        _write(path, event_rows(numbers, rng.integers(0, 400, 2), shown))
        size += len(str(path))
    return size


def many_files(root: str, home: str) -> dict[str, Any]:
    """Run the data stages of A17's day.

    Returns:
        rows of the ingestion; bytes of the largest value that stages exchange, and of the largest journal or Delta entry.
    """
    data = run_data(open_day(config_of(Path(root)), home, DAY))
    return {"rows": data.ingested["rows"], **exchanged_bytes(Path(home))}


def exchanged_bytes(home: Path) -> dict[str, int]:
    """Return how large the largest stage result of a home is, and its largest entry of a Delta log."""
    results = [file.stat().st_size for file in home.glob("nights/*/manifests/*.json")]
    entries = [file.stat().st_size for file in home.glob("lake/*/_delta_log/*.json")]
    return {"largest_result_bytes": max(results), "largest_log_entry_bytes": max(entries)}


def flow_parameter_bytes(home: Path) -> int:
    """Return the size of the largest parameters of a flow run that Prefect's database below the home knows."""
    with closing(sqlite3.connect(home / "prefect" / "prefect.db")) as database:
        found = database.execute("select max(length(parameters)) from flow_run").fetchone()
    return int(found[0])


def write_toml(root: Path, path: Path) -> None:
    """Write A17's config as a file, for the command line; a fifth of the users is judged on."""
    sections = raw_config(root, lake={"holdout_fraction": 0.2})
    path.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in sections.items()), encoding="utf-8")


def _toml(value: Any) -> str:
    """Return a value as TOML, tables inline; of JSON values without null."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(item)}' for key, item in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)


def write_json_lines(root: Path, num_lines: int) -> None:
    """Write C6(b)'s file: half of the lines know the declared keys, the other half has one more."""
    shown = _DAY_MS + np.arange(num_lines) * 1000
    lines = (_line(number, int(shown[number]), has_more=number >= num_lines // 2) for number in range(num_lines))
    path = root / f"log/date={DAY}/part-0.ndjson"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _line(number: int, shown: int, *, has_more: bool) -> str:
    row = {"id": f"e{number}", "uid": f"u{number % 5}", "item": f"i{number % 7}", "ts": shown, "clicked": True}
    return json.dumps(row | ({"new": number} if has_more else {}))


def json_lines(root: str, home: str) -> dict[str, Any]:
    """Ingest C6(b)'s file; returns rows and unknown columns of the commit."""
    data = run_data(open_day(config_of(Path(root), "ndjson"), home, DAY))
    return {"rows": data.ingested["rows"], "unknown_columns": data.ingested["unknown_columns"]}


def targets_of_user(home: Path, role: str, user: str) -> Iterator[int]:
    """Yield, for each night's pack of a role, how many supervised targets a user has in it."""
    for folder in sorted(home.glob(f"nights/*/packs/{role}")):
        yield PackReader(folder).targets()[1].count(user)


def _write(path: Path, rows: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path)
