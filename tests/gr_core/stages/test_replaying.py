"""Replay, label sampling and event weights through the data stages of a lineage of nights."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.tiny as tiny
from benchmarks._nights import DataResult, open_day, promote, run_data, unread_checkpoint
from gr_core.config import load_config
from gr_core.data.batches import PackReader
from gr_core.hashing import is_holdout
from gr_core.schema import DUE, REPLAYED
from gr_core.stages import sequencing
from tests.plain import run

NIGHTS = 4
Seen = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Target:
    """A target token of a pack and the history it sees."""

    event: str
    user: str
    flag: int
    label_known: int
    labels: int
    weight: float
    seen: Seen
    """(actions, known, time) of each key."""


def targets_of(pack: dict[str, Any]) -> list[Target]:
    """Read the targets of a pack."""
    reader = PackReader(Path(pack["uri"]))
    names, found = list(zip(*reader.targets(), strict=True)), []
    for batch in reader:
        columns = {name: getattr(batch, name).numpy() for name in ("actions", "known", "time", "lo", "hi", "supervise")}
        for token in np.flatnonzero(columns["supervise"]):
            keys = slice(int(columns["lo"][token]), int(columns["hi"][token]))
            seen = tuple(zip(*(columns[name][keys].tolist() for name in ("actions", "known", "time")), strict=True))
            event, user = names[len(found)]
            own = (int(getattr(batch, name)[token]) for name in ("supervise", "label_known", "labels"))
            found.append(Target(event, user, *own, weight=float(batch.weight[token]), seen=seen))
    return found


def lineage(folder: Path, config: Path, *overrides: str) -> list[DataResult]:
    """Run the data stages of nights that all promote; the last one is left unfinished."""
    made = []
    for number in range(NIGHTS):
        night = open_day(load_config(config, list(overrides)), str(folder), tiny.FIRST_DAY + timedelta(days=number))
        data = run_data(night)
        if number < NIGHTS - 1:
            promote(
                night,
                data,
                {"uri": unread_checkpoint(night), "watermark": data.ingested["bound"], "digest": f"d{number}"},
            )
        made.append(data)
    return made


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the config of a feed of some nights."""
    return tiny.make(tmp_path_factory.mktemp("feed"), days=NIGHTS)


@pytest.fixture(scope="module")
def plain(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[DataResult]:
    """Return nights without sampling."""
    return lineage(tmp_path_factory.mktemp("plain"), config)


@pytest.fixture(scope="module")
def replayed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[DataResult]:
    """Return nights that replay a fifth of the users."""
    return lineage(tmp_path_factory.mktemp("replayed"), config, "train.replay_fraction=0.2")


def due_bits(targets: list[Target]) -> Counter[tuple[str, int]]:
    """Count the due (event, action)s."""
    bits = [(t.event, bit) for t in targets if t.flag == DUE for bit in (1, 2) if t.label_known & bit]
    return Counter(bits)


def test_every_event_and_action_is_due_exactly_once_along_a_lineage_with_replay(
    plain: list[DataResult], replayed: list[DataResult]
) -> None:
    """Night by night the due targets and the counts are those without replay, and none comes twice."""
    total: Counter[tuple[str, int]] = Counter()
    for without, with_replay in zip(plain, replayed, strict=True):
        due = due_bits(targets_of(with_replay.packs["train"]))
        assert due == due_bits(targets_of(without.packs["train"]))
        assert with_replay.packs["train"]["num_supervised"] == without.packs["train"]["num_supervised"]
        for one, other in zip(with_replay.buckets, without.buckets, strict=True):
            assert {k: n for k, n in one["counts"].items() if k != "replayed"} == other["counts"]
        assert with_replay.ingested["bound"]["shown_before_us"] == without.ingested["bound"]["shown_before_us"]
        total += due
    assert set(total.values()) == {1}


def test_replayed_targets_are_old_events_of_trained_users_and_counted_apart(replayed: list[DataResult]) -> None:
    """Each was due on an earlier night with the same labels; index, counts and flags agree; other nights, other users."""
    earlier: dict[tuple[str, int], int] = {}
    drawn = []
    for number, data in enumerate(replayed):
        targets = targets_of(data.packs["train"])
        again = [t for t in targets if t.flag == REPLAYED]
        counted = sum(part["counts"].get("replayed", 0) for part in data.buckets)
        index = PackReader(Path(data.packs["train"]["uri"])).index
        assert index.get("num_replayed", 0) == len(again) == counted
        assert (len(again) > 0) == (number > 0)
        for target in again:
            assert not is_holdout(target.user, 0.25)
            assert all(earlier[target.event, bit] == target.labels & bit for bit in (1, 2) if target.label_known & bit)
        assert not {t.event for t in again} & {t.event for t in targets if t.flag == DUE}
        earlier |= {(t.event, b): t.labels & b for t in targets if t.flag == DUE for b in (1, 2) if t.label_known & b}
        drawn.append({t.user for t in again})
        for role in ("next_day", "holdout"):
            assert all(t.flag == DUE for t in targets_of(data.packs[role]))
    assert drawn[2] != drawn[3]


def test_a_replayed_target_sees_what_it_saw_when_it_was_due(replayed: list[DataResult]) -> None:
    """As of its shown_at, then and now: the same history with the same actions, so nothing later leaks in."""
    first: dict[str, Seen] = {}
    compared = 0
    for data in replayed:
        for target in targets_of(data.packs["train"]):
            if target.flag == DUE:
                first.setdefault(target.event, target.seen)
            else:
                assert target.seen == first[target.event]
                compared += bool(target.seen)
    assert compared > 100


def test_replay_reads_whole_only_the_users_it_draws(
    config: Path, replayed: list[DataResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the history store those few users alone are read whole; without it the sequences are the same."""
    home = tmp_path / "home"
    shutil.copytree(Path(replayed[-1].packs["train"]["uri"]).parents[3], home)
    last = tiny.FIRST_DAY + timedelta(days=NIGHTS - 1)
    asked: list[str] = []
    real = sequencing.EventTable.read_users

    def read_users(table: Any, version: int, **named: Any) -> Any:
        asked.extend(named["users"])
        return real(table, version, **named)

    monkeypatch.setattr(sequencing.EventTable, "read_users", read_users)
    users = {t.user for t in targets_of(replayed[-1].packs["train"]) if t.flag == REPLAYED}

    for store in (True, False):
        if not store:
            shutil.rmtree(home / "lake" / "history")
        for manifest in (home / "nights" / str(last) / "manifests").glob("sequences-*"):
            manifest.unlink()
        asked.clear()
        _, again = run(config, home, last, "train.replay_fraction=0.2", stop_after="sequences")
        assert [part["digest"] for part in again["sequences"]] == [part["digest"] for part in replayed[-1].buckets]
        assert set(asked) == users


def test_sampled_labels_leave_the_due_counts_and_say_their_fraction(
    config: Path, plain: list[DataResult], tmp_path: Path
) -> None:
    """All labels 1 are there, fewer labels 0; the index has the fraction for the logits; judged packs are whole."""
    data = lineage(tmp_path, config, "train.negative_fraction=0.25")[1]

    whole, kept = (targets_of(d.packs["train"]) for d in (plain[1], data))
    assert sum(t.labels & 1 for t in kept) == sum(t.labels & 1 for t in whole) > 0
    zeros = [sum(bool(~t.labels & t.label_known & 1) for t in part) for part in (kept, whole)]
    assert zeros[0] == pytest.approx(0.25 * zeros[1], rel=0.3)
    assert PackReader(Path(data.packs["train"]["uri"])).index["negative_fraction"] == 0.25
    assert sum(part["counts"]["sampled_out"] for part in data.buckets) == len(whole) - len(kept)
    for part, other in zip(data.buckets, plain[1].buckets, strict=True):
        assert {k: n for k, n in part["counts"].items() if k != "sampled_out"} == other["counts"]
    for role in ("next_day", "holdout"):
        assert data.packs[role]["digest"] == plain[1].packs[role]["digest"]


def test_event_weights_come_from_an_expression_over_the_raw_row(config: Path, tmp_path: Path) -> None:
    """A side feature's number becomes the weight column and the index's event_weight sums; no number weighs 1."""
    text = config.read_text().replace(
        'surface = "surface"',
        "surface = \"surface\"\n  value = \"CASE WHEN surface = 'home' THEN '2.5' WHEN item > 5 THEN 'much' ELSE '0' END\"",
    )
    weighted = tmp_path / "weighted.toml"
    weighted.write_text(text)

    night, done = run(weighted, tmp_path / "home", tiny.FIRST_DAY, 'pack.event_weight="value"', stop_after="pack")

    table = sequencing.EventTable(night.table_uri, night.settings).read(done["ingest"]["bound"]["delta_version"])
    text_of = dict(table.select("event_id", "value").iter_rows())
    targets = targets_of(done["pack"]["train"])
    assert {t.weight for t in targets} == {2.5, 1.0, 0.0}
    assert all(t.weight == {"2.5": 2.5, "much": 1.0, "0": 0.0}[text_of[t.event]] for t in targets)
    index = PackReader(Path(done["pack"]["train"]["uri"])).index
    assert sum(index["batch_weights"]["event_weight"]) == pytest.approx(sum(t.weight for t in targets))
