"""The page of a night in its home: written from the journal and manifests, over and over, and beside the MLflow run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.errors import UsageError
from gr_core.lake import store
from gr_core.lake.journal import Journal
from gr_core.night import Night, open_night
from gr_core.registry.base import InMemoryStore
from gr_core.stages import judging, paging

DAY = str(tiny.FIRST_DAY)


@pytest.fixture
def night(tmp_path: Path) -> Night:
    """Return a night that was opened and decided, in a home of its own."""
    settings = load_config(tiny.make(tmp_path, days=0))
    found = open_night(settings, str(tmp_path / "home"), tiny.FIRST_DAY, at_us=1)
    decided = {"decision": "hold", "reasons": ["too few positives"], "version": 1, "previous": None}
    found.journal.append("decided", DAY, decided, at_us=2)
    return found


def manifest(night: Night, stage: str, result: Any) -> None:
    store.write_json(night.uri(stage, "manifests", f"{stage}.json"), {"fingerprint": "f", "result": result})


def page_of(written: dict[str, str]) -> str:
    return Path(written["page"]).read_text(encoding="utf-8")


def test_a_page_lies_in_the_nights_folder_and_is_written_again(night: Night, tmp_path: Path) -> None:
    """From the journal alone at first; later with what stages wrote and what befell the night since."""
    home = tmp_path / "home"
    first = paging.write(str(home))
    assert first == {"date": DAY, "page": str(home / "nights" / DAY / "page.html")}
    assert "too few positives" in page_of(first)
    assert "No result was left by: ingest, train, evaluate, gate." in page_of(first)

    manifest(night, "ingest", {"reasons": {"null_user": 41}})
    night.journal.append("failed", DAY, {"stage": "train", "error": "no memory left"}, at_us=3)
    again = page_of(paging.write(str(home), DAY))

    assert "<td>null_user</td><td>41</td>" in again
    assert "failed in train: no memory left" in again
    assert again == page_of(paging.write(str(home), DAY))


def test_damaged_manifests_are_left_out(night: Night, caplog: pytest.LogCaptureFixture) -> None:
    """Half a file, or one of another shape, costs its figures and not the page, and is named."""
    store.write_bytes(night.uri("ingest", "manifests", "ingest.json"), b'{"result": {"rea')
    store.write_json(night.uri("gate", "manifests", "gate.json"), [1, 2])

    assert "No result was left by: ingest, train, evaluate, gate." in page_of(paging.write(night.home, DAY))
    assert "ingest.json is damaged" in caplog.text
    assert "gate.json is damaged; the page is without gate" in caplog.text


def test_a_name_that_no_encoding_has_is_written_all_the_same(night: Night) -> None:
    """A lone surrogate, as a damaged file name has it, becomes a question mark."""
    manifest(night, "ingest", {"reasons": {"bad \udc80 name": 1}})

    assert "bad ? name" in page_of(paging.write(night.home, DAY))


def test_a_night_that_never_was_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    """The message names the night and the home; a home without nights has no newest one either."""
    home = tmp_path / "home"

    with pytest.raises(UsageError, match="no night 2031-01-01"):
        paging.write(str(home), "2031-01-01")
    with pytest.raises(UsageError, match="no night at all"):
        paging.write(str(home))
    assert not home.exists()


def test_the_newest_night_is_that_of_the_main_line(night: Night) -> None:
    """Separately named attempts have pages under their own keys."""
    entry = Journal(night.journal.uri).entries()[0]
    key = f"{DAY}+parent-1"
    night.journal.append("opened", key, {**entry.payload, "key": key}, at_us=9)

    assert paging.write(night.home)["date"] == DAY
    assert paging.write(night.home, key)["page"].endswith(f"{key}/page.html")


def test_the_page_is_put_beside_the_nights_run(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text; a night without a run (nothing due) asks no registry."""
    models = InMemoryStore()
    models.start_night(DAY, params={}, tags={})
    monkeypatch.setattr(judging, "model_store", lambda *_: models)

    uri = paging.conclude(night, logged=True)
    assert models.runs[DAY].files == {"page.html": Path(uri).read_text(encoding="utf-8")}

    monkeypatch.setattr(judging, "model_store", None)
    assert paging.conclude(night, logged=False) == uri
