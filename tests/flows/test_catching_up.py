"""Nights that nobody ran come before the scheduled one: oldest first, one at a time, none left out in silence (case A10)."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from flows.catching_up import catch_up
from flows.nightly import nightly
from gr_core.config import load_config
from gr_core.errors import DataContractError, TrainingError
from gr_core.lake.journal import Journal, champion, nights
from gr_core.stages import outcome, training

FIRST = tiny.FIRST_DAY


def day(number: int) -> date:
    """Return the n-th day, from 1 on."""
    return FIRST + timedelta(days=number - 1)


def journal_of(home: Path, *finished: int, begun: tuple[int, ...] = ()) -> None:
    """Write a journal of nights that finished, and of some that only began."""
    journal = Journal(str(home / "lake" / "journal"))
    for number in sorted({*finished, *begun}):
        key = str(day(number))
        pins = {"date": key, "mode": "nightly", "parent": None, "cutoff_us": number, "fingerprint": "f", "seed": 0}
        journal.append("opened", key, pins, at_us=number)
        if number in finished:
            journal.append("finished", key, {"state": "no_data", "bound": None, "status": {}}, at_us=number)


@pytest.mark.parametrize(
    ("finished", "begun", "limit", "wanted"),
    [
        ((), (), 7, ([], [])),
        ((1,), (), 7, ([2, 3, 4], [])),
        ((1, 2, 3, 4), (), 7, ([], [])),
        ((1,), (2,), 7, ([2, 3, 4], [])),
        ((), (3,), 7, ([3, 4], [])),
        ((1, 3), (2,), 7, ([4], [])),
        ((1,), (), 2, ([3, 4], [2])),
        ((1,), (), 0, ([], [2, 3, 4])),
        ((6,), (), 7, ([], [])),
    ],
    ids=["no-night", "downtime", "none", "killed", "killed-first", "passed-over", "limit", "off", "older"],
)
def test_the_missing_days_come_from_the_journal(
    tmp_path: Path, finished: tuple[int, ...], begun: tuple[int, ...], limit: int, wanted: tuple[list[int], list[int]]
) -> None:
    """Days after the newest finished night, begun or not; a day that later nights have passed over stays as it is."""
    journal_of(tmp_path, *finished, begun=begun)

    found = outcome.missed_days(str(tmp_path), day(5), limit)

    assert found == ([day(n) for n in wanted[0]], [day(n) for n in wanted[1]])


def test_a_refused_day_is_told_and_any_other_failure_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Later nights do not wait for a delivery that may never come; they do wait for whatever else is broken."""
    settings, home = load_config(tiny.make(tmp_path, days=0)), tmp_path / "home"
    journal_of(home, 1)
    errors: dict[date, Exception] = {day(2): DataContractError("no file of this day")}
    ran = []

    def run(missed: date) -> None:
        ran.append(missed)
        if missed in errors:
            raise errors[missed]

    with caplog.at_level(logging.WARNING, logger="gr_core.flows"):
        assert catch_up(settings, str(home), day(5), run) == [day(3), day(4)]
    assert "no file of this day" in caplog.text
    assert ran == [day(2), day(3), day(4)]
    ran.clear()
    errors[day(3)] = TrainingError("the disk is full")
    with pytest.raises(TrainingError):
        catch_up(settings, str(home), day(5), run)
    assert ran == [day(2), day(3)]


@pytest.fixture(scope="module")
def started_twice(prefect_server: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Any]:
    """Start the first night twice at once; returns the flow's parameters, and the two final states."""
    del prefect_server
    folder = tmp_path_factory.mktemp("twice")
    parameters = {"config": str(tiny.make(folder, days=4)), "home": str(folder / "home")}
    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(nightly, date=day(1), **parameters, return_state=True) for _ in range(2)]
    return parameters, [start.result() for start in starts]


@pytest.mark.prefect
@pytest.mark.filterwarnings("default")  # whole nights run MLflow, pandas and SQLAlchemy, with deprecations of theirs
def test_of_two_starts_of_a_night_one_trains(started_twice: tuple[dict[str, str], Any]) -> None:
    """The other ends as a named skip: one attempt, one version, each event trained once (case A3)."""
    parameters, states = started_twice
    entries = Journal(f"{parameters['home']}/lake/journal").entries()

    (skipped,) = (state for state in states if state.name == "Skipped")
    (ran,) = (state for state in states if state.name == "Completed")
    assert "is already running; this start ends" in skipped.message
    assert skipped.is_completed()
    assert ran.result()["attempts"] == 1
    kinds = [entry.kind for entry in entries]
    assert [kinds.count(kind) for kind in ("opened", "attempt", "ingested", "registered")] == [1, 0, 1, 1]


@pytest.mark.prefect
@pytest.mark.filterwarnings("default")
def test_after_downtime_a_scheduled_night_runs_those_before_it_first(
    started_twice: tuple[dict[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Days 2 and 3 were missed: day 4's run takes them up in order, each from the champion as the day before left it.

    Day 3's own late run, which comes after, finds its night finished. At most one training runs at any moment.
    """
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow
    from prefect.states import Scheduled

    parameters, home = started_twice[0], Path(started_twice[0]["home"])
    real, trained, running = training.run_training, [], []

    def one_at_a_time(run: Path, *arguments: Any, **named: Any) -> dict[str, Any]:
        assert not running
        running.append(run)
        trained.append(run.parent.name)
        try:
            return real(run, *arguments, **named)
        finally:
            running.remove(run)

    def scheduled(number: int) -> Any:
        when = datetime.combine(day(number + 1), datetime.min.time(), UTC) + timedelta(hours=4)
        with get_client(sync_client=True) as client:
            run = client.create_flow_run(nightly, parameters=parameters, state=Scheduled(scheduled_time=when))
        return run_flow(nightly, flow_run=run, parameters=parameters)

    monkeypatch.setattr(training, "run_training", one_at_a_time)
    last, late = scheduled(4), scheduled(3)

    assert trained == [str(day(n)) for n in (2, 3, 4)]
    assert (last["date"], late["date"]) == (str(day(4)), str(day(3)))
    entries = Journal(str(home / "lake" / "journal")).entries()
    assert list(nights(entries)) == [str(day(n)) for n in (1, 2, 3, 4)]
    best: int | None = None
    for record in nights(entries).values():
        assert record.is_finished
        assert record.parent_version == best
        best = record.version if record.decision == "promote" else best
    found = champion(entries)
    assert found is not None
    assert found.version == best
