"""Generated feeds: the same rows for the same seed, heavy-tailed users, and a config that reads them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks._events import EVENTS_A_USER, Feed, config_of, day_rows, files_of, population_of, write_feed


def rows_of(feed: Feed) -> pa.Table:
    people = population_of(feed)
    return pa.concat_tables([day_rows(feed, people, number) for number in range(feed.num_days)])


def test_a_day_depends_on_its_seed_and_number_alone() -> None:
    """The same day twice is equal, however it is asked for; another day and another seed are not."""
    feed, other = Feed(num_events=9_000, num_days=9), Feed(num_events=9_000, num_days=9, seed=1)
    first = day_rows(feed, population_of(feed), 3)

    assert first.equals(day_rows(feed, population_of(feed), 3))
    assert not first.equals(day_rows(feed, population_of(feed), 4))
    assert not first.equals(day_rows(other, population_of(other), 3))


def test_activity_and_popularity_have_tails_and_ids_do_not_repeat() -> None:
    """About 26.6 events a user, a hundredth of the users with a tenth of the events and more; times lie in their day."""
    feed = Feed(num_events=100_000, num_days=20)
    rows = rows_of(feed)
    _, counts = np.unique(rows["uid"].to_numpy(), return_counts=True)
    _, shown = np.unique(rows["item"].to_numpy(), return_counts=True)
    top = np.sort(counts)[::-1][: len(counts) // 100].sum() / len(rows)
    days = rows["ts"].to_numpy() // 86_400_000

    assert len(rows) == 100_000
    assert abs(len(rows) / len(counts) / EVENTS_A_USER - 1) < 0.05
    assert top > 0.1
    assert shown.max() > 50 * np.median(shown)
    assert len(np.unique(rows["id"].to_numpy())) == len(rows)
    assert np.array_equal(days - days.min(), np.repeat(np.arange(20), 5_000))


def test_a_wanted_number_of_users_is_met() -> None:
    """`num_users` decides, within a few in a hundred."""
    found = len(np.unique(rows_of(Feed(num_events=50_000, num_days=10, num_users=1_000))["uid"].to_numpy()))

    assert abs(found / 1_000 - 1) < 0.05


def test_files_lie_where_the_config_looks(tmp_path: Path) -> None:
    """History and nights apart, a file a day; the first night is the last of `num_days`, later ones follow."""
    feed = Feed(num_events=600, num_days=6)
    told = write_feed(tmp_path, feed, nights=2)
    files = [Path(file).relative_to(tmp_path).as_posix() for file in files_of(str(tmp_path))]
    config = config_of(tmp_path, feed, sequences={"max_history": 7})

    assert told["rows"] == 700
    assert told["files"] == 7
    assert [file.split("/")[0] for file in files] == ["history"] * 5 + ["nights"]
    assert files[-1] == f"nights/date={feed.first_night}/part-0.parquet"
    assert (tmp_path / f"nights/date={feed.day(6)}/part-0.parquet").exists()
    assert config.source.feeds[1].path.format(date=feed.first_night) == f"nights/date={feed.first_night}/*.parquet"
    assert config.sequences.max_history == 7
    assert pq.read_metadata(tmp_path / files[0]).num_rows == 100
