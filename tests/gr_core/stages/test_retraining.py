"""A full retrain's windows: every label once and as it is now, taken up where a kill left them, and nobody forgotten in them."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.data import vocabulary
from gr_core.errors import UsageError
from gr_core.lake import store
from gr_core.lake.journal import champion, finished_bounds, nights
from gr_core.lake.lock import RETRAIN_LOCK, night_lock
from gr_core.retrain import newest_checkpoint, open_retrain, retrain_key, window_ends
from gr_core.stages import gating, retraining, tidying, training
from tests import retrained
from tests.erased import FIRST, HIM, SECOND, THIRD, conclude, entries_of, forget, write_day

DAILY = "train.retrain_window_days=1"
OLD_ITEM = "99"
CLICK, LIKE = 1, 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a config and a home of three nights; the second day turned clicks of the first, one item ended with the first."""
    folder = tmp_path_factory.mktemp("nights")
    config, home = tiny.make(folder, days=0), folder / "home"
    for number, day in enumerate((FIRST, SECOND, THIRD), 1):
        write_day(folder / "raw", day, poisoned=day == SECOND)
        path = folder / "raw" / "log" / f"date={day}" / "part-0.parquet"
        table = pq.read_table(path)
        if day == FIRST:
            items = table["item"].to_pylist()
            items[50:60] = [int(OLD_ITEM)] * 10
            pq.write_table(table.set_column(table.column_names.index("item"), "item", pa.array(items)), path)
        conclude(config, home, day, number)
    return config, home


@pytest.fixture
def home(finished: tuple[Path, Path], tmp_path: Path) -> Path:
    """Return a copy of the home."""
    shutil.copytree(finished[1], tmp_path / "home")
    return tmp_path / "home"


class Packs:
    """Remembers what each window trained on."""

    def __init__(self) -> None:
        self.seen: list[tuple[int | None, retrained.Targets]] = []

    def __call__(self, night: Any, pack: dict[str, Any]) -> None:
        """Take in a window's pack."""
        self.seen.append((night.window, retrained.targets(pack)))

    @property
    def pairs(self) -> Counter[tuple[str, int]]:
        """How often each (event, action) was supervised."""
        masks = [(event, known) for _, rows in self.seen for _, event, known, _ in rows]
        return Counter((event, bit) for event, known in masks for bit in (CLICK, LIKE) if known & bit)


@pytest.fixture(scope="module")
def undisturbed(finished: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Packs, str, Path]:
    """Run three windows of a day each; returns what they trained on, the last checkpoint's digest, and the home."""
    copy, packs = tmp_path_factory.mktemp("whole") / "home", Packs()
    shutil.copytree(finished[1], copy)
    retrain, _ = retrained.run(finished[0], copy, THIRD, DAILY, watch=packs)
    return packs, str(retrain.trained(retrain.entries())[-1]["digest"]), copy


def test_windows_supervise_each_label_once_in_the_order_of_days(
    finished: tuple[Path, Path], home: Path, undisturbed: tuple[Packs, str, Path]
) -> None:
    """Three windows together train on exactly what one of all days does, each (event, action) once, oldest days first."""
    whole = Packs()
    retrained.run(finished[0], home, THIRD, watch=whole)
    packs = undisturbed[0]

    assert [number for number, _ in packs.seen] == [1, 2, 3]
    assert [number for number, _ in whole.seen] == [1]
    assert set(packs.pairs.values()) == {1}
    assert packs.pairs == whole.pairs
    days = [{event[:10] for _, event, known, _ in rows if known & LIKE} for _, rows in packs.seen]
    assert days == [{str(FIRST)}, {str(SECOND)}, {str(THIRD)}]


def test_labels_are_those_of_today(undisturbed: tuple[Packs, str, Path], finished: tuple[Path, Path]) -> None:
    """Clicks of the first day that the second delivered otherwise are trained on as delivered last."""
    root = Path(load_config(finished[0]).source.root)
    delivered: dict[str, bool] = {}
    for day in (FIRST, SECOND):
        rows = pq.read_table(root / "log" / f"date={day}" / "part-0.parquet").to_pylist()
        turned = {row["id"]: row["clicked"] for row in rows if row["id"].startswith(str(FIRST))}
        changed = [key for key in turned if key in delivered and delivered[key] != turned[key]]
        delivered |= turned
    rows_of_first = undisturbed[0].seen[0][1]
    found = {event: bool(labels & CLICK) for _, event, known, labels in rows_of_first if known & CLICK}

    assert len(changed) == 30
    assert set(changed) & found.keys()
    assert found == {event: delivered[event] for event in found}


def test_nights_notice_nothing(finished: tuple[Path, Path], undisturbed: tuple[Packs, str, Path]) -> None:
    """The history store, the event table, the nights' files and what is new tonight are as before."""
    before, after = finished[1], undisturbed[2]
    folders = ("lake/history", "lake/events", *(f"nights/{day}" for day in (FIRST, SECOND, THIRD)))
    for name in folders:
        files = {p.relative_to(before): p.read_bytes() for p in (before / name).rglob("*") if p.is_file()}
        assert files == {p.relative_to(after): p.read_bytes() for p in (after / name).rglob("*") if p.is_file()}
    assert finished_bounds(entries_of(before)) == finished_bounds(entries_of(after))


def test_only_the_newest_window_keeps_its_files_and_the_pinned_version_stays(
    undisturbed: tuple[Packs, str, Path],
) -> None:
    """A year of windows does not fill the disk; vacuum keeps the version that an unfinished full retrain reads."""
    home, key = undisturbed[2], retrain_key(THIRD)
    entries = entries_of(home)

    assert [path.name for path in (home / "nights" / key).glob("window-*")] == ["window-003"]
    pinned = nights(entries)[key].delta_version
    assert pinned is not None
    assert pinned in tidying.kept_versions(entries, rerun_days=0)


def test_a_killed_window_is_trained_again_and_those_before_it_are_not(
    finished: tuple[Path, Path], home: Path, undisturbed: tuple[Packs, str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the training of the second window: the next start does two trainings and ends at the same weights (F12)."""
    retrained.run(finished[0], home, THIRD, DAILY, limit=1)

    def killed(*_args: object, **_more: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "run_training", killed)
        with pytest.raises(KeyboardInterrupt):
            retrained.run(finished[0], home, THIRD, DAILY)
    packs = Packs()
    retrain, _ = retrained.run(finished[0], home, THIRD, DAILY, watch=packs)
    record = nights(entries_of(home))[retrain.night.key]

    assert [number for number, _ in packs.seen] == [2, 3]
    assert retrain.trained(retrain.entries())[-1]["digest"] == undisturbed[1]
    assert [window["number"] for window in record.windows if window["state"] == "started"] == [1, 2, 3]
    again = Packs()
    retrained.run(finished[0], home, THIRD, DAILY, watch=again)
    assert again.seen == [], "nothing is trained twice"


def test_another_recipe_begins_anew(finished: tuple[Path, Path], home: Path) -> None:
    """A config that trains otherwise, or another model, goes on from no window of the first one."""
    retrained.run(finished[0], home, THIRD, DAILY, limit=1)
    same = open_retrain(load_config(finished[0], ["gate.nights=2"]), str(home), THIRD, at_us=2)
    other = open_retrain(load_config(finished[0], ["model.width=32"]), str(home), THIRD, at_us=3)

    assert len(same.trained(same.entries())) == 1
    assert other.trained(other.entries()) == []


def test_it_catches_up_with_nights_that_finish_meanwhile(
    finished: tuple[Path, Path], home: Path, undisturbed: tuple[Packs, str, Path]
) -> None:
    """Through the second day, with the third night done: one window more, from its own commit, and still each label once."""
    packs = Packs()
    retrain, surveyed = retrained.run(finished[0], home, SECOND, DAILY, watch=packs)
    last = newest_checkpoint(retrain.trained(retrain.entries()))

    assert [number for number, _ in packs.seen] == [1, 2, 3]
    assert packs.pairs == undisturbed[0].pairs
    assert last is not None
    assert last.date == str(THIRD)
    night, inputs = retraining.holdout_inputs(retrain, last)
    assert (night.date, inputs["bound"]) == (str(THIRD), last.watermark.to_json())
    assert surveyed["first"] == str(FIRST)


def test_ids_that_were_not_shown_for_long_get_no_row(finished: tuple[Path, Path], home: Path) -> None:
    """An item of the first day alone: with ttl_days = 2 a full retrain through the third day has no row for it.

    It is read as the fallback row from then on, which is trained (case E11: what its own row had learned is gone).
    """
    rows = {}
    for days in (2, 30):
        config = load_config(finished[0], [f"vocabulary.item_id.ttl_days={days}"])
        surveyed = retraining.survey(open_retrain(config, str(home), THIRD, at_us=1))
        table = vocabulary.load(store.local_path(surveyed["uri"])).tables["item_id"]
        rows[days] = set(table.ids["id"])
        assert surveyed["evicted"]["item_id"] == (1 if days == 2 else 0)
        asked = pl.DataFrame({"id": [OLD_ITEM], "type": [None]}, schema={"id": pl.String, "type": pl.String})
        assert (vocabulary.rows_of(asked, table)[-1] == 2) == (days == 2)  # the first after pad and unknown

    assert rows[30] - rows[2] == {OLD_ITEM}


def test_a_forgotten_user_is_in_none_of_it(finished: tuple[Path, Path], home: Path) -> None:
    """Forgotten in the middle: windows begin anew at a version without the user, and no file of it names him (case E11)."""
    before, packs = Packs(), Packs()
    retrained.run(finished[0], home, THIRD, DAILY, limit=1, watch=before)
    told = forget(finished[0], home)
    fourth = THIRD + timedelta(days=1)
    write_day(Path(load_config(finished[0]).source.root), fourth)
    delivered = conclude(finished[0], home, fourth, 4)
    retrain, _ = retrained.run(finished[0], home, THIRD, DAILY, watch=packs)

    assert HIM in {user for _, rows in before.seen for user, *_ in rows}
    assert told["rows"]["events"] > 0
    assert delivered["ingest"]["rows"]["forgotten"] > 0, "he was delivered again, and counted"
    assert [number for number, _ in packs.seen] == [1, 2, 3, 4]
    assert HIM not in {user for _, rows in packs.seen for user, *_ in rows}
    files = [path for path in (home / "nights" / retrain.night.key).rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if HIM.encode() in path.read_bytes()] == []


def test_forget_and_retract_wait_for_it(finished: tuple[Path, Path], home: Path) -> None:
    """While a process works on a full retrain, rows are not taken out under it; the message says what to do."""
    with night_lock(str(home), retrain_key(THIRD), name=RETRAIN_LOCK) as holder:
        assert holder is None
        with pytest.raises(UsageError, match=r"full-retrain.* reads.*stop it"):
            forget(finished[0], home)


def test_what_cannot_begin_is_refused_by_name(finished: tuple[Path, Path], home: Path) -> None:
    """A day that no night covers, a second full retrain beside an unfinished one, and a home without nights."""
    config = load_config(finished[0])
    with pytest.raises(UsageError, match=r"2025-06-01 to 2025-06-03"):
        open_retrain(config, str(home), THIRD + timedelta(days=1), at_us=1)
    open_retrain(config, str(home), SECOND, at_us=1)
    with pytest.raises(UsageError, match=r"through 2025-06-02 has not finished"):
        open_retrain(config, str(home), THIRD, at_us=1)
    with pytest.raises(UsageError, match=r"daybreak nightly"):
        open_retrain(config, str(home / "none"), THIRD, at_us=1)


@pytest.mark.parametrize(
    ("first", "days", "expected"),
    [(0, 28, [27]), (27, 28, [27]), (-1, 28, [-1, 27]), (0, 10, [7, 17, 27]), (0, 1, list(range(28)))],
)
def test_windows_are_whole_from_the_end(first: int, days: int, expected: list[int]) -> None:
    """All windows but the first have their full number of days; together they cover every day once."""
    ends = window_ends(FIRST + timedelta(days=first), FIRST + timedelta(days=27), days)

    assert ends == [FIRST + timedelta(days=number) for number in expected]


@pytest.mark.parametrize(
    ("mode", "day", "outcome"),
    [("full_retrain", 4, "judged"), ("full_retrain", 3, "refused"), ("nightly", 4, "refused")],
)
def test_only_a_full_retrain_may_be_of_the_champions_own_day(
    finished: tuple[Path, Path], home: Path, mode: str, day: int, outcome: str
) -> None:
    """One that ends before the champion's day is no more promoted than a night of an old day (case G1)."""
    standing = champion(entries_of(home))
    assert standing is not None
    model = replace(standing.model, date="2025-06-04")
    night = replace(
        open_retrain(load_config(finished[0]), str(home), THIRD, at_us=1).night, mode=mode, date=f"2025-06-0{day}"
    )

    assert (gating._before(night, replace(standing, model=model)) is not None) == (outcome == "refused")
