"""The sized cases of the data plane (D1, D6, E9, A17, C6) at small sizes, by the functions that run them in full."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import _cases, _stages, cases
from benchmarks._events import Feed, fields_of, write_feed
from benchmarks._report import Report
from gr_core.data.batches import PackReader


def test_d1_histories_and_targets_keep_their_order(tmp_path: Path) -> None:
    """With many ties in time and a joined side table: ascending in (time, event id), twice the same pack (case D1)."""
    _cases.write_ordered(tmp_path / "raw", 2_000)

    found = _cases.ordered(str(tmp_path / "raw"), str(tmp_path / "home"), 2)

    assert found["disordered"] == 0
    assert len(set(found["digests"])) == 1


def test_d1_a_wrong_order_is_seen(tmp_path: Path) -> None:
    """Two tokens of one history exchanged, in time or by id at one time, make their segment disordered."""
    _cases.write_ordered(tmp_path / "raw", 500)
    _cases.ordered(str(tmp_path / "raw"), str(tmp_path / "home"), 1)
    folder = next((tmp_path / "home").glob("run-0/nights/*/packs/train"))
    batch = PackReader(folder).batch(0)
    # Ids are rows in their own order here, so the other way round every tie in time is in the wrong order.
    numbers = -np.arange(int(batch.rows["item_id"].max()) + 1)
    first = int(batch.segment_starts[np.argmax(np.diff(batch.segment_starts))])
    time = batch.time.clone()
    time[[first, first + 1]] = torch.tensor([time[first + 1] + 1, time[first + 1]])
    ascending = replace(batch, rows={"item_id": torch.arange(batch.num_tokens, dtype=torch.int32)})
    places = np.arange(batch.num_tokens)

    assert _cases._disordered(batch, numbers) > 0
    assert _cases._disordered(ascending, places) == 0
    assert _cases._disordered(replace(ascending, time=time), places) == 1


def test_d6_the_cut_into_buckets_changes_no_pack(tmp_path: Path) -> None:
    """One bucket or eight, one at a time or two side by side: the same packs (case D6)."""
    feeds = [Feed(num_events=6_000, num_days=6, num_buckets=buckets) for buckets in (1, 8)]
    write_feed(tmp_path / "raw", feeds[0])
    found = [
        _stages.data_night(str(tmp_path / "raw"), str(tmp_path / f"home-{n}"), fields_of(feed), workers=n)
        for n, feed in enumerate(feeds, start=1)
    ]

    assert found[0]["digests"] == found[1]["digests"]
    assert found[0]["bootstrap"]["committed"] == 5_000
    assert found[0]["tokens"]["train"] > 5_000


def test_e9_a_users_day_is_capped_and_counted(tmp_path: Path) -> None:
    """Of 3,000 events in a day 1,000 enter and are trained on, the others are quarantined by name (case E9)."""
    feed = Feed(num_events=3_000, num_days=6, num_buckets=2)
    write_feed(tmp_path / "raw", feed)
    _cases.write_bot(tmp_path / "raw", feed.first_night.isoformat(), 3_000)

    found = _stages.data_night(str(tmp_path / "raw"), str(tmp_path / "home"), fields_of(feed))

    assert found["rows"] == {"read": 3_500, "committed": 1_500, "duplicates": 0, "quarantined": 2_000, "forgotten": 0}
    assert found["reasons"] == {"over_daily_cap": 2_000}
    assert list(_cases.targets_of_user(tmp_path / "home", "train", str(1 << 41))) == [1_000]


def test_a17_what_stages_exchange_does_not_grow_with_the_number_of_files(tmp_path: Path) -> None:
    """Ten times as many files, the same size of results and of commit records (case A17)."""
    sizes: list[dict[str, Any]] = []
    for number in (8, 80):
        root = tmp_path / f"raw-{number}"
        path_bytes = _cases.write_many_files(root, number)
        sizes.append(_cases.many_files(str(root), str(tmp_path / f"home-{number}")))
        assert sizes[-1]["rows"]["read"] == 2 * number

    few, many = sizes
    assert path_bytes > 8_000
    assert many["largest_result_bytes"] - few["largest_result_bytes"] < 100
    assert many["largest_log_entry_bytes"] - few["largest_log_entry_bytes"] < 100


def test_c6_keys_of_later_lines_are_counted_and_cost_no_row(tmp_path: Path) -> None:
    """The case as the command runs it, in a child: every line committed, the unknown key told, nothing missed."""
    report = Report()

    cases.case_c6(report, tmp_path, num_lines=400)

    assert report.missed() == []
    assert report.figures["c6/lines_not_committed"].value == 0
    assert report.conditions["c6"]["unknown_columns"] == {"new": 1}


@pytest.mark.parametrize("sizes", [cases.FULL, cases.QUICK], ids=["full", "quick"])
def test_every_case_has_its_sizes(sizes: dict[str, Any]) -> None:
    """The stated sizes for the command, smaller ones for --quick."""
    assert sizes.keys() == cases.CASES.keys()
    assert (sizes is cases.FULL) == (sizes["d1"] == {"num_events": 200_000, "runs": 10})
    assert (sizes is cases.FULL) == (sizes["a17"] == {"num_files": 20_000})
