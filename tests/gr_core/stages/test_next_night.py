"""The next-night check on nights of a tiny feed: a bad champion that an operator promoted is rolled back by itself."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gr_core.config import load_config
from gr_core.lake.entries import Entry
from gr_core.lake.journal import Journal, champion, nights, previous
from gr_core.night import Night
from gr_core.report.next_night import rows, sentence
from gr_core.report.status import build_status
from gr_core.stages import gating, judging, moving, next_night, served
from tests.erased import FIRST, SECOND, THIRD, Registry, entries_of, interrupt, write_day
from tests.plain import run

World = tuple[Path, Path, Path]
FEW = "next_night.min_positives=20"


def promote_again(config: Path, home: Path) -> None:
    """Roll the poisoned version back, and let an operator promote it all the same."""
    settings = load_config(config)
    moving.rollback(settings, str(home), reason="looks bad", at_us=5)
    moving.promote(settings, str(home), 2, reason="no, it is fine", at_us=6)


def decide(night: Night, done: dict[str, Any]) -> dict[str, Any]:
    """Register the night's model in the journal alone, as version 3, and let the gate judge it."""
    payload = judging.registration(night, 3, done["train"], done["vocabulary"])
    night.journal.append("registered", night.key, payload, at_us=1)
    rest = (done["pack"]["holdout"], done["vocabulary"], done["ingest"], done["sequences"])
    with pytest.MonkeyPatch.context() as patch:  # the registry has no version 3
        patch.setattr(served, "score", lambda *arguments: served.Served(scored=arguments[-1](True)))
        return gating.gate(night, {"version": 3}, done["train"], *rest)


@pytest.fixture(scope="module")
def checked(poisoned: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any], Entry]:
    """Promote the poisoned version by hand, run the third night to its end; returns config, home, results, the entry."""
    config, home = poisoned[0], tmp_path_factory.mktemp("checked") / "home"
    shutil.copytree(poisoned[2], home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gr_core.registry.mlflow_store.MlflowStore", Registry)
        promote_again(config, home)
        night, done = run(config, home, THIRD, FEW, stop_after="next_night")
        done["aliases"] = dict(Registry.aliases)
        entry = entries_of(home)[-1]
        done["gate"] = decide(night, done)
    status = {"state": "completed", "bound": done["ingest"]["bound"], "status": {"next_night": done["next_night"]}}
    night.journal.append("finished", night.key, status, at_us=1)
    return config, home, {**done, "night": night}, entry


def test_a_bad_champion_is_rolled_back_by_itself(checked: tuple[Path, Path, dict[str, Any], Entry]) -> None:
    """One entry with the reason and the figures; both were scored on the same rows; the aliases follow at once."""
    _, home, done, entry = checked
    found = done["next_night"]

    assert (found["champion"], found["previous"], found["worse"], found["rolled_back"]) == (2, 1, True, True)
    assert found["figures"]["rows_champion"] == found["figures"]["rows_previous"]
    assert found["figures"]["lower_bound"] > 0.01
    assert found["figures"]["ne_champion"] > found["figures"]["ne_previous"]
    assert found["figures"]["count"] == done["evaluate"]["next_day"]["click"]["count"]
    assert found["figures"]["ne_champion"] == pytest.approx(done["evaluate"]["next_day"]["click"]["ne"])
    assert (entry.kind, entry.night, entry.payload["checked_by"]) == ("rollback", str(FIRST), str(THIRD))
    assert (entry.payload["version"], entry.payload["previous"]) == (1, 2)
    assert f"rolled back by the next-night check of {THIRD}: NE of click +" in entry.payload["reason"]
    assert [e.kind for e in entries_of(home)].count("rollback") == 2
    assert done["aliases"] == {"champion": 1, "previous": None, "challenger": 2}
    assert nights(entries_of(home))[str(SECOND)].reasons[-1] == entry.payload["reason"]


def test_the_model_that_started_from_it_is_held_and_the_next_night_covers_both_days(
    checked: tuple[Path, Path, dict[str, Any], Entry], tmp_path: Path
) -> None:
    """The night keeps its pinned parent; whatever the gate measured it holds; then version 1 learns days 2, 3 and 4."""
    config, done = checked[0], checked[2]
    home = tmp_path / "home"
    shutil.copytree(checked[1], home)

    assert done["night"].parent.version == 2
    assert done["gate"]["gate"] == "held"
    assert done["gate"]["reasons"][0].startswith("gate.lineage: it was warm-started from version 2, which was rolled")
    best = champion(entries_of(home))
    assert best is not None
    assert best.version == 1
    write_day(config.parent / "raw", THIRD + timedelta(days=1))
    night, after = run(config, home, THIRD + timedelta(days=1), stop_after="sequences")
    assert night.parent is not None
    assert night.parent.version == 1
    commits = [record.rows["committed"] for record in nights(entries_of(home)).values() if record.rows is not None]
    assert sum(part["counts"]["due"] for part in after["sequences"]) >= sum(commits[1:])


def test_status_page_and_artifact_say_so(checked: tuple[Path, Path, dict[str, Any], Entry]) -> None:
    """A finding until another version is promoted; the night's object; a table."""
    _, home, done, entry = checked
    entries = entries_of(home)

    value = build_status(entries, today=THIRD)
    (finding,) = [one for one in value["findings"] if one["where"] == f"{THIRD} next-night check"]
    assert finding["level"] == "warning"
    assert "the champion is version 1 again: version 2 was rolled back" in finding["message"]
    assert value["nights"][-1]["next_night"]["figures"] == done["next_night"]["figures"]
    assert "rolled back; NE of click +" in sentence(done["next_night"])
    assert {"figure": "version", "champion": "2", "previous": "1"} in rows(done["next_night"])
    moved = Entry(seq=99, at_us=9, kind="promoted", night="x", payload={"version": 3, "previous": 1, "reason": "r"})
    assert not any("next-night" in one["where"] for one in build_status([*entries, moved], today=THIRD)["findings"])
    assert json.loads(json.dumps(entry.payload, allow_nan=False)) == entry.payload


def test_a_night_that_is_taken_up_again_rolls_back_once(
    poisoned: World, checked: tuple[Path, Path, dict[str, Any], Entry], no_mlflow: None, tmp_path: Path
) -> None:
    """Killed between the verdict and the entry it writes the entry; after it, it checks nobody else."""
    config, home = poisoned[0], tmp_path / "home"
    shutil.copytree(checked[1], home)
    done = checked[2]
    night: Night = done["night"]
    again = Night.from_json({**night.to_json(), "home": str(home)})
    rest = (done["pack"]["next_day"], done["vocabulary"], done["ingest"], done["sequences"])
    count = len(entries_of(home))

    assert next_night.check(again, *rest) == done["next_night"]
    assert len(entries_of(home)) == count

    killed = tmp_path / "killed"
    shutil.copytree(poisoned[2], killed)
    promote_again(config, killed)
    shutil.copytree(home / "nights" / str(THIRD), killed / "nights" / str(THIRD))
    late = Night.from_json({**night.to_json(), "home": str(killed)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next_night.check(late, *rest)
    best = champion(entries_of(killed))
    assert best is not None
    assert best.version == 2
    assert next_night.check(late, *rest)["rolled_back"] is True
    best, before = champion(entries_of(killed)), previous(entries_of(killed))
    assert best is not None
    assert (best.version, before) == (1, None)


@pytest.mark.parametrize("rule", ["warn", "off"])
def test_an_operator_may_have_the_last_word(
    poisoned: World, checked: tuple[Path, Path, dict[str, Any], Entry], no_mlflow: None, tmp_path: Path, rule: str
) -> None:
    """`warn` leaves the champion and says so in status; `off` scores nothing."""
    home, done = tmp_path / "home", checked[2]
    shutil.copytree(poisoned[2], home)
    night = Night.from_json(
        {**done["night"].to_json(), "home": str(home), "config": with_rule(done["night"].config, rule)}
    )
    rest = (done["pack"]["next_day"], done["vocabulary"], done["ingest"], done["sequences"])

    found = next_night.check(night, *rest)

    assert found["rolled_back"] is False
    assert found["worse"] is (rule == "warn")
    best = champion(entries_of(home))
    assert best is not None
    assert best.version == 2
    pins = {**done["night"].to_json(), "fingerprint": "f"}
    night.journal.append("opened", night.key, pins, at_us=1)
    bound = done["ingest"]["bound"]
    night.journal.append(
        "finished", night.key, {"state": "completed", "bound": bound, "status": {"next_night": found}}, at_us=1
    )
    told = [one["message"] for one in build_status(entries_of(home), today=THIRD)["findings"]]
    assert any("was not rolled back (next_night.rollback)" in one for one in told) is (rule == "warn")


def with_rule(config: dict[str, Any], rule: str) -> dict[str, Any]:
    """Return a resolved config with another rule of rollbacks."""
    return {**config, "next_night": {**config["next_night"], "rollback": rule}}


def test_an_older_day_and_a_named_attempt_check_nobody(
    checked: tuple[Path, Path, dict[str, Any], Entry], no_mlflow: None, tmp_path: Path
) -> None:
    """Their events tell nothing of what came after the champion, or they are no night of the main line."""
    done, home = checked[2], tmp_path / "home"
    shutil.copytree(checked[1], home)
    rest = (done["pack"]["next_day"], done["vocabulary"], done["ingest"], done["sequences"])
    settings = load_config(checked[0])
    moving.promote(settings, str(home), 3, reason="r", at_us=7)
    for changes, why in (
        ({"key": "2025-06-02", "date": "2025-06-02"}, "data day 2025-06-02 is not after the champion's, 2025-06-03"),
        ({"key": "2025-06-04+parent-1", "date": "2025-06-04"}, "only nights of the main line do"),
    ):
        night = Night.from_json({**done["night"].to_json(), "home": str(home), **changes})
        assert next_night.check(night, *rest)["reason"] == f"not checked: {why}"
