"""The nightly flow on a source of two feeds, conf/shop.toml on local files: a killed night, and the one after it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from flows.nightly import nightly
from gr_core.config import load_config
from gr_core.data import due
from gr_core.lake.events import EventTable
from tests import shop
from tests.shop import BUY, CLICK, DAY, ROOT

pytestmark = [
    pytest.mark.prefect,
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.filterwarnings("default"),  # a whole night runs MLflow, pandas and SQLAlchemy
]
PARTS = ("merged", "duplicates", "pending", "quarantined", "forgotten")


def test_two_nights_of_two_feeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A night killed right after its commit goes on from it; each action row is counted, and ends where it belongs."""
    taken = shop.write_world(tmp_path / "raw", rows=400)
    home, overrides = tmp_path / "home", shop.overrides(tmp_path / "raw")
    config = str(ROOT / "conf" / "shop.toml")
    with monkeypatch.context() as patch:
        patch.setattr(due, "make_bound", lambda *_: 1 / 0)
        killed = nightly(config=config, date=DAY, home=str(home), overrides=overrides, return_state=True)
    assert killed.is_failed()
    first = nightly(config=config, date=DAY, home=str(home), overrides=overrides)
    second = nightly(config=config, date=DAY + timedelta(days=1), home=str(home), overrides=overrides)

    table = EventTable(str(home / "lake" / "events"), load_config(config, overrides))
    assert [commit.night for commit in table.commits()] == [first["date"], second["date"]]
    rows = table.read(table.delta_version())
    bits = {"click": CLICK, "buy": BUY}
    assert dict(rows.select("event_id", "actions").rows()) == {
        event: sum(bits[name] for name in names) for event, names in taken.items()
    }
    for night, late in ((first, 0), (second, 1)):
        counts = night["action_rows"]
        assert counts["read"] == sum(counts[name] for name in PARTS)
        assert counts["pending_before"] == sum(counts["carried"].values())
        assert counts["duplicates"] == 3
        assert counts["quarantined"] == 3  # a click after its window, one without impression, a view
        assert night["rows"]["read"] == 400
        assert night["attempts"] == 2 - late
    merged = first["action_rows"]["merged"] + second["action_rows"]["merged"]
    assert merged == sum(map(len, taken.values()))
    assert (first["gate"], second["parent"]) == ("promoted", 1)
    assert second["next_day"]["click"]["positives"] > 0
