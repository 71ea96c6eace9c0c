"""Slices on nights of a tiny feed: whose rows they are, the one row a metric, re-runs, and what people see of them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.data.batches import PackReader
from gr_core.eval.slices import METRICS
from gr_core.hashing import is_holdout
from gr_core.lake.events import EventTable
from gr_core.lake.journal import Journal
from gr_core.night import Night
from gr_core.stages import comparing, gating, judging, paging, slicing
from tests.plain import run
from tests.tiny import FIRST_DAY

pytestmark = pytest.mark.filterwarnings("default")  # MLflow, pandas and SQLAlchemy, with deprecations of theirs

SLICES = (
    'evaluation.slices=[{name="surface", by="feature", feature="surface"}, {name="activity", by="history", bounds=[1, 12]},'
    ' {name="items", by="items"}]'
)
SECOND = FIRST_DAY + timedelta(days=1)
NAMES = [
    "surface=home",
    "surface=search",
    "activity=new",
    "activity=seldom",
    "activity=heavy",
    "items=new",
    "items=known",
]
Done = dict[str, Any]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[tuple[Night, Done]]]:
    """Return a config, a home after two nights, and what their stages returned; the second day brings an item and users."""
    folder = tmp_path_factory.mktemp("sliced")
    config = tiny.make(folder, days=2)
    path = folder / "raw" / "log" / f"date={SECOND}" / "part-0.parquet"
    rows = pq.read_table(path).slice(0, tiny.ROWS_A_DAY)  # without the repeated ones
    for name, value, every in (("item", lambda _: 99, 10), ("uid", lambda n: 1000 + n % 50, 7)):
        changed = [value(n) if n % every == 0 else old for n, old in enumerate(rows[name].to_pylist())]
        rows = rows.set_column(rows.column_names.index(name), name, pa.array(changed))
    pq.write_table(rows, path)
    return config, folder / "home", [run(config, folder / "home", day, SLICES) for day in (FIRST_DAY, SECOND)]


def raw(config: Path, *days: Any) -> pl.DataFrame:
    """Return the raw rows of some days."""
    root = config.parent / "raw" / "log"
    return pl.concat([pl.read_parquet(root / f"date={day}" / "part-0.parquet") for day in days]).unique("id")


def table(home: Path, day: Any) -> pl.DataFrame:
    return pl.read_parquet(home / "nights" / str(day) / "slices.parquet")


def counted(rows: pl.DataFrame, role: str, model: int) -> dict[str, int]:
    found = rows.filter(role=role, model=model, action="click", metric="auc")
    return dict(found.select("slice", "count").iter_rows())


def test_the_slices_of_a_night_are_those_of_its_rows(home: tuple[Path, Path, list[tuple[Night, Done]]]) -> None:
    """Next-day events by surface, item and history are exactly those that the raw rows say."""
    config, folder, (_, (_, done)) = home
    found = counted(table(folder, SECOND), "next_day", 1)
    rows = raw(config, FIRST_DAY, SECOND).sort("ts")
    # a click is final half an hour later, so the night's new ones are shown from half an hour before its day on
    end = int(datetime.fromisoformat(f"{SECOND}T23:30:00+00:00").timestamp() * 1000)
    due = rows.filter(pl.col("ts").is_between(end - 86_400_000, end, closed="left"))
    times = {uid: part["ts"] for (uid,), part in rows.group_by("uid")}
    history = [min(16, (times[uid] + 60_000 < at).sum()) for uid, at in due.select("uid", "ts").rows()]
    activity = Counter("new" if n < 1 else "seldom" if n < 12 else "heavy" for n in history)

    assert list(found) == ["all", *NAMES]
    assert found["all"] == due.height == done["evaluate"]["next_day"]["click"]["count"]
    assert {name: found[f"surface={name}"] for name in ("home", "search")} == dict(due["surface"].value_counts().rows())
    assert (found["items=new"], found["items=known"]) == (
        due.filter(item=99).height,
        due.filter(pl.col("item") != 99).height,
    )
    assert {name: found[f"activity={name}"] for name in activity} == activity
    assert min(found.values()) > 10


def test_a_table_has_one_row_a_metric_and_mlflow_one_value(home: tuple[Path, Path, list[tuple[Night, Done]]]) -> None:
    """Case G14: (night, role, model, action, slice, metric) is unique, in the home, the artifact and the run's keys."""
    _, folder, (_, (night, done)) = home
    rows = table(folder, SECOND)
    key = ["night", "role", "model", "action", "slice", "metric"]

    assert rows.select(key).n_unique() == rows.height
    assert rows["night"].unique().to_list() == [str(SECOND)]
    assert sorted(rows.select("role", "model").unique().rows()) == [("holdout", 1), ("holdout", 2), ("next_day", 1)]
    assert rows.height == 3 * len(["all", *NAMES]) * 2 * len(METRICS)
    undefined = rows.filter(pl.col("value").is_null() | pl.col("value").is_nan())
    assert undefined.filter(pl.col("value").is_nan()).is_empty()
    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    (logged,) = client.search_runs(["1"], f"tags.`daybreak.night` = '{SECOND}' and tags.`daybreak.kind` = 'night'")
    value = rows.filter(role="next_day", action="click", slice="surface=home", metric="auc")["value"].item()
    assert logged.data.metrics["next_day/auc/click/surface:home"] == value
    assert logged.data.metrics["holdout/gauc_user_mean/click"] is not None
    assert "holdout/auc/click/items:new" in logged.data.metrics
    artifact = Path(logged.info.artifact_uri.removeprefix("file://")) / "slices.csv"
    assert pl.read_csv(artifact).height == rows.height
    assert done["finish"]["state"] == "completed"
    assert night.key == str(SECOND)


def test_running_the_evaluation_again_adds_nothing(
    home: tuple[Path, Path, list[tuple[Night, Done]]], tmp_path: Path
) -> None:
    """Case G14: evaluation, gate and finish again: the weights untouched, one value a metric, promotion decided once.

    Evaluation forced once more of the finished night stands beside it and is equal.
    """
    config, folder, _ = home
    copy = tmp_path / "home"
    shutil.copytree(folder, copy)
    for name in ("evaluate", "gate"):  # a night that was killed before they were done
        (copy / "nights" / str(SECOND) / "manifests" / f"{name}.json").unlink()
    weights = {path: path.stat().st_mtime_ns for path in (copy / "nights").rglob("*.safetensors")}
    before, was = (copy / "nights" / str(SECOND) / "slices.parquet").read_bytes(), _values(folder)
    journal = Journal(str(copy / "lake" / "journal"))
    settings = load_config(config, [SLICES])
    record = next(e.payload for e in journal.entries() if e.kind == "opened" and e.night == str(SECOND))
    night = Night.from_json({key: value for key, value in record.items() if key in Night.__slots__})
    night = replace(night, home=str(copy), config=settings.resolved(), at_us=9)
    old = _moved(home[2][1][1], folder, copy)

    found = {**old, "evaluate": judging.evaluate(night, old["pack"]["next_day"], old["vocabulary"])}
    again = gating.gate(
        night, old["register"], old["train"], old["pack"]["holdout"], old["vocabulary"], old["ingest"], old["sequences"]
    )
    judging.finish(night, {**found, "gate": again, "pack": [*old["encode"], *old["pack"].values()]})
    done = replace(night, finished=True, force="evaluate")
    forced = judging.evaluate(done, old["pack"]["next_day"], old["vocabulary"])

    assert {path: path.stat().st_mtime_ns for path in weights} == weights
    assert (copy / "nights" / str(SECOND) / "slices.parquet").read_bytes() == before
    assert not found["evaluate"]["reused"]
    assert not again["reused"]
    assert (forced["slices"], forced["reused"]) == (found["evaluate"]["slices"], False)
    assert judging.result_digest(forced) == judging.result_digest(found["evaluate"])
    assert _values(copy) == was
    assert set(was.values()) == {1}
    decided = [entry for entry in journal.entries() if entry.kind == "decided" and entry.night == str(SECOND)]
    assert len(decided) == 1


def _values(folder: Path) -> Counter[str]:
    """Return how many values each metric of slices has in the second night's run."""
    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    (logged,) = client.search_runs(["1"], f"tags.`daybreak.night` = '{SECOND}' and tags.`daybreak.kind` = 'night'")
    keys = [key for key in logged.data.metrics if key.count("/") == 3 or "gauc" in key]
    assert len(keys) > 50
    return Counter({key: len(client.get_metric_history(logged.info.run_id, key)) for key in keys})


def _moved(done: Done, was: Path, now: Path) -> Done:
    """Return results whose URIs are of the home's copy."""
    return dict(json.loads(json.dumps(done).replace(str(was), str(now))))


def test_side_features_are_the_events_own_however_buckets_are_cut(
    home: tuple[Path, Path, list[tuple[Night, Done]]], tmp_path: Path
) -> None:
    """1, 2 and 4 buckets give every event the surface of its raw row; rows that are late, or not there, too (case G13)."""
    config, _, _ = home
    rows = raw(config, FIRST_DAY, SECOND)
    for buckets in (1, 2, 4):
        night, done = {}, {}
        for day in (FIRST_DAY, SECOND):
            night, done = run(
                config, tmp_path / f"home-{buckets}", day, f"lake.num_buckets={buckets}", stop_after="ingest"
            )
        assert isinstance(night, Night)
        own = EventTable(night.table_uri, night.settings).read(done["ingest"]["bound"]["delta_version"])
        mixed = own.sample(fraction=1.0, shuffle=True, seed=buckets)
        late = mixed.filter(pl.col("shown_at") == mixed["shown_at"].min())
        second = mixed.filter(pl.col("shown_at").dt.date() == SECOND)
        events = [*(pl.concat([second, late]).select("user_id", pl.col("shown_at").dt.epoch("us"), "event_id").rows())]
        asked: Any = _Events([*events, ("nobody", events[0][1], "none")])

        found = slicing.side_features(night.settings, night.table_uri, done["ingest"]["bound"], asked, ["surface"])

        surfaces = dict(rows.select("id", "surface").iter_rows())
        assert found["surface"].to_list() == [*(surfaces[event] for _, _, event in events), None]


class _Events:
    def __init__(self, events: list[tuple[str, int, str]]) -> None:
        self.events = events


def test_history_is_counted_alike_in_both_kinds_of_packs(
    home: tuple[Path, Path, list[tuple[Night, Done]]], tmp_path: Path
) -> None:
    """Interleaved tokens are two an entry; the entries that an event sees are as many."""
    config, _, _ = home
    found = []
    for tokens in ("targets", "interleaved"):
        night, done = run(config, tmp_path / tokens, FIRST_DAY, f"pack.tokens={tokens}", stop_after="pack")
        reader = PackReader(Path(done["pack"]["holdout"]["uri"]))
        history, _ = slicing._seen(reader)
        found.append(dict(zip(reader.targets()[0], history.tolist(), strict=True)))
        assert night.parent is None
    assert found[0] == found[1]
    assert max(found[0].values()) > 10
    assert min(found[0].values()) == 0


def test_compare_has_the_slices_with_the_gates_interval(home: tuple[Path, Path, list[tuple[Night, Done]]]) -> None:
    """Days, then the configured slices, of the same rows as the gate's; deltas and intervals, GAUC both ways."""
    config, folder, (_, (_, done)) = home

    value = comparing.compare(load_config(config, [SLICES]), str(folder), 1, 2)

    assert json.loads(json.dumps(value, allow_nan=False)) == value
    auc = {one["slice"]: one for one in value["slices"] if one["key"] == "holdout/auc/click"}
    assert list(auc)[:2] == [f"day={FIRST_DAY}", f"day={SECOND}"]
    rows = table(folder, SECOND).filter(role="holdout", action="click", metric="auc")
    for name in ("surface=home", "surface=search", "items=known"):
        a, b = (rows.filter(slice=name, model=model)["value"].item() for model in (1, 2))
        assert (auc[name]["a"], auc[name]["b"]) == (a, b)
        assert auc[name]["delta"] == pytest.approx(b - a)
    ne = {one["slice"]: one for one in value["slices"] if one["key"] == "holdout/ne/click"}
    assert ne["surface=home"]["low"] < ne["surface=home"]["delta"] < ne["surface=home"]["high"]
    gauc = [one for one in value["slices"] if one["key"] == "holdout/gauc_impression_weighted/click"]
    assert {one["slice"] for one in gauc} == set(auc)
    assert "holdout/gauc_user_mean/click" in value["metrics"]
    assert done["gate"]["champion"] == 1


def test_compare_goes_by_day_where_slices_cannot_be_read(
    home: tuple[Path, Path, list[tuple[Night, Done]]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The parent's vocabulary is gone: days alone, and the log says why."""
    config, folder, (_, (night, _)) = home
    copy = tmp_path / "home"
    shutil.copytree(folder, copy)
    assert night.parent is not None
    shutil.rmtree(copy / Path(night.parent.vocabulary).relative_to(folder))

    value = comparing.compare(load_config(config, [SLICES]), str(copy), 1, 2)

    assert {one["slice"].partition("=")[0] for one in value["slices"]} == {"day"}
    assert "its slices cannot be read" in caplog.text


def test_the_page_and_the_decision_tell_of_slices(home: tuple[Path, Path, list[tuple[Night, Done]]]) -> None:
    """The journal's decision has every slice's verdict; the page charts them and has GAUC both ways by name."""
    _, folder, (_, (_, done)) = home

    entries = Journal(str(folder / "lake" / "journal")).entries()
    figures = next(e.payload["figures"] for e in reversed(entries) if e.kind == "decided")
    text = Path(paging.write(str(folder), str(SECOND))["page"]).read_text()

    assert [one["slice"] for one in figures["slices"]] == NAMES
    assert {one["verdict"] for one in figures["slices"]} <= {"passed", "veto", "reported", "insufficient_data"}
    assert next(one for one in figures["slices"] if one["slice"] == "items=new")["verdict"] == "insufficient_data"
    assert "<h2>Slices</h2>" in text
    assert "AUC of click by slice, next day, by the parent" in text
    row = next(one for one in done["evaluate"]["slices"] if (one["slice"], one["action"]) == ("surface=home", "click"))
    assert f"<td>{row['gauc_impression_weighted']:.4f}</td>" in text


def test_an_event_sees_what_was_visible_before_it_and_not_its_own_label(
    home: tuple[Path, Path, list[tuple[Night, Done]]], tmp_path: Path
) -> None:
    """Case G16: e at 10:00 sees the 09:00 event with its click, never the 11:00 one; e's label flipped, its score stays."""
    config, folder, _ = home
    third, scores, seen = SECOND + timedelta(days=1), [], []
    for clicked in (True, False):
        world = tmp_path / str(clicked)
        (world / "raw" / "log").mkdir(parents=True)
        copied = tiny.write_day(world / "raw", third, rows=60)
        rows = pq.read_table(copied)
        at = [int(datetime.fromisoformat(f"{third}T{hour:02d}:00:00+00:00").timestamp() * 1000) for hour in (9, 10, 11)]
        own = pa.table(
            {
                "id": ["e09", "e10", "e11"],
                "uid": pa.array([777] * 3),
                "item": pa.array([1, 2, 3]),
                "ts": pa.array(at),
                "clicked": pa.array([True, clicked, True]),
                "liked": pa.array([False, clicked, False]),
                "surface": pa.array(["home"] * 3),
            },
            schema=rows.schema,
        )
        pq.write_table(pa.concat_tables([rows, own]), copied)
        shutil.copytree(folder, world / "home")
        night, done = run(config, world / "home", third, SLICES, f"source.root={world / 'raw'}", stop_after="pack")
        assert night.parent is not None
        scored = judging.score(night, night.parent.checkpoint, done["pack"]["next_day"], done["vocabulary"])
        place = scored.event_ids.index("e10")
        scores.append(scored.logits[place])
        seen.append(_seen_by(Path(done["pack"]["next_day"]["uri"]), scored.time[place]))
        assert scored.labels[place] & 1 == clicked

    assert np.array_equal(scores[0], scores[1])
    nine = at[0] * 1000 + 60 * 10**6  # visible a minute after it was shown, with the click known by then
    assert seen == [[(nine, 1)]] * 2


def _seen_by(pack: Path, shown: int) -> list[tuple[int, int]]:
    """Return time and action bits of the history that the target shown at a moment attends to."""
    for batch in PackReader(pack):
        for token in np.flatnonzero((batch.supervise.numpy() > 0) & (batch.time.numpy() == shown)):
            keys = slice(int(batch.lo[token]), int(batch.hi[token]))
            return list(zip(batch.time[keys].tolist(), batch.actions[keys].tolist(), strict=True))
    raise AssertionError(f"{pack} has no target at {shown}")


def test_a_night_that_spoils_one_slice_is_held_by_it(
    home: tuple[Path, Path, list[tuple[Night, Done]]], tmp_path: Path
) -> None:
    """Clicks of search are turned for trained users alone: within the gate's margin, yet held, and the slice is named."""
    config, folder, _ = home
    third = SECOND + timedelta(days=1)
    rows = pq.read_table(tiny.write_day(tmp_path / "raw", third, rows=1500)).slice(0, 1500)
    turned = [
        clicked != (surface == "search" and not is_holdout(str(user), 0.25))
        for clicked, surface, user in zip(
            *(rows[name].to_pylist() for name in ("clicked", "surface", "uid")), strict=True
        )
    ]
    rows = rows.set_column(rows.column_names.index("clicked"), "clicked", pa.array(turned))
    pq.write_table(rows, tmp_path / "raw" / "log" / f"date={third}" / "part-0.parquet")
    shutil.copytree(folder, tmp_path / "home")
    gate = (
        "gate.margin=9",
        "gate.cumulative_margin=9",
        "gate.slice_margin=0.4",
        "gate.slice_min_positives=10",
        "next_night.rollback=off",
    )
    rate = ("train.dense_learning_rate=0.05", "train.sparse_learning_rate=0.5", f"source.root={tmp_path / 'raw'}")

    _, done = run(config, tmp_path / "home", third, SLICES, *gate, *rate)

    found = {one["slice"]: one for one in done["gate"]["figures"]["slices"]}
    vetoes = [name for name, one in found.items() if one["verdict"] == "veto"]
    assert "surface=search" in vetoes
    assert "surface=home" not in vetoes
    assert done["gate"]["figures"]["upper_bound"] < 9
    assert done["finish"]["gate"] == "held"
    assert [reason.split(":")[0] for reason in done["finish"]["reasons"]] == [
        f"gate.slice.click.{name}" for name in vetoes
    ]
    decided = [e.payload for e in Journal(str(tmp_path / "home" / "lake" / "journal")).entries() if e.kind == "decided"]
    assert decided[-1]["decision"] == "hold"
    assert decided[-1]["figures"]["slices"] == done["gate"]["figures"]["slices"]
