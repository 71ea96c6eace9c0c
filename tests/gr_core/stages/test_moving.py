"""Promote and rollback on nights of a tiny feed: the journal moves the champion, the rest follows, after kills too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gr_core.config import load_config
from gr_core.errors import ConfigError, UsageError
from gr_core.lake import tombstones
from gr_core.lake.journal import Journal, champion, nights, previous
from gr_core.lake.lock import night_lock
from gr_core.registry.mlflow_store import MlflowStore
from gr_core.stages import aliases, moving
from tests.erased import FIRST, THIRD, Registry, entries_of, forget, interrupt, retract, snapshot
from tests.plain import run

World = tuple[Path, Path, Path]


def promote(config: Path, home: Path, version: int, reason: str = "looks right", *overrides: str) -> dict[str, Any]:
    """Promote a version."""
    return moving.promote(load_config(config, list(overrides)), str(home), version, reason=reason, at_us=7)


def rollback(config: Path, home: Path, to: int | None = None, reason: str = "clicks fell") -> dict[str, Any]:
    """Roll back."""
    return moving.rollback(load_config(config), str(home), to, reason=reason, at_us=7)


def register_first(home: Path, key: str, version: int, **changes: Any) -> None:
    """Open a night without a parent and register the first night's checkpoint under another number."""
    journal = Journal(str(home / "lake" / "journal"))
    opened, made = (next(e.payload for e in journal.entries() if e.kind == kind) for kind in ("opened", "registered"))
    journal.append("opened", key, {**opened, "parent": None}, at_us=8)
    journal.append("registered", key, {**made, "version": version, **changes}, at_us=8)


def test_after_a_rollback_the_next_night_starts_from_the_champion_before(
    poisoned: World, poisoned_home: Path, no_mlflow: None, clean_digest: str
) -> None:
    """One entry, the aliases, the night's reason; the next night's parent is the older one, and it learns both days."""
    config, count = poisoned[0], len(entries_of(poisoned_home))

    assert rollback(config, poisoned_home) == {"champion": 1, "previous": None}

    entries = entries_of(poisoned_home)
    assert len(entries) == count + 1
    assert (entries[-1].kind, entries[-1].night, entries[-1].at_us) == ("rollback", str(FIRST), 7)
    assert entries[-1].payload == {"version": 1, "previous": 2, "reason": "rolled back by an operator: clicks fell"}
    assert nights(entries)["2025-06-02"].reasons[-1] == "rolled back by an operator: clicks fell"
    assert Registry.aliases == {"champion": 1, "previous": None, "challenger": 2}
    night, done = run(config, poisoned_home, THIRD, stop_after="train")
    assert night.parent is not None
    assert night.parent.version == 1
    assert done["train"]["watermark"]["commit"] == 3
    assert done["train"]["digest"] != clean_digest  # rolled back, not retracted: the second day is due again


def test_a_version_that_was_rolled_back_can_be_promoted_again(
    poisoned: World, poisoned_home: Path, no_mlflow: None
) -> None:
    """Promote brings it back, says so in its night, and rollback goes to the one before it again."""
    config = poisoned[0]
    rollback(config, poisoned_home)

    assert promote(config, poisoned_home, 2) == {"champion": 2, "previous": 1}

    entries = entries_of(poisoned_home)
    assert (entries[-1].kind, entries[-1].payload["previous"]) == ("promoted", 1)
    assert nights(entries)["2025-06-02"].reasons[-1] == "promoted by an operator: looks right"
    assert Registry.aliases == {"champion": 2, "previous": 1, "challenger": 2}
    night, _ = run(config, poisoned_home, THIRD, stop_after="ingest")
    assert night.parent is not None
    assert night.parent.version == 2
    assert rollback(config, poisoned_home, 1) == {"champion": 1, "previous": None}


def test_an_older_version_may_be_promoted(poisoned: World, poisoned_home: Path, no_mlflow: None) -> None:
    """An operator may choose any registered version; the one before is kept to roll back to."""
    config = poisoned[0]

    assert promote(config, poisoned_home, 1) == {"champion": 1, "previous": 2}
    assert rollback(config, poisoned_home) == {"champion": 2, "previous": 1}


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda config, home: promote(config, home, 9), r"version 9 is no registered version; the newest are 1, 2"),
        (lambda config, home: promote(config, home, 2), "version 2 is the champion already"),
        (lambda config, home: promote(config, home, 1, " "), "promote needs a reason"),
        (lambda config, home: rollback(config, home, None, ""), "rollback needs a reason"),
        (lambda config, home: rollback(config, home, 9), "version 9 is no registered version"),
        (lambda config, home: rollback(config, home, 2), "version 2 is the champion already"),
    ],
    ids=["unknown", "champion", "reason", "rollback-reason", "to-unknown", "to-champion"],
)
def test_a_wrong_move_changes_nothing(
    poisoned: World, poisoned_home: Path, no_mlflow: None, call: Any, match: str
) -> None:
    """One clear error, exit status 2, before any state changes."""
    before = snapshot(poisoned_home)

    with pytest.raises(UsageError, match=match):
        call(poisoned[0], poisoned_home)

    assert snapshot(poisoned_home) == before


def test_another_lakes_config_is_refused(poisoned: World, poisoned_home: Path, no_mlflow: None) -> None:
    """As a night would refuse it."""
    with pytest.raises(ConfigError, match=r"lake.num_buckets never changes"):
        promote(poisoned[0], poisoned_home, 1, "r", "lake.num_buckets=4")


def test_a_home_without_versions_is_not_made(poisoned: World, tmp_path: Path) -> None:
    """Both commands only look."""
    for call in (lambda: promote(poisoned[0], tmp_path / "none", 1), lambda: rollback(poisoned[0], tmp_path / "none")):
        with pytest.raises(UsageError, match="none"):
            call()
    assert not (tmp_path / "none").exists()


def test_a_retracted_version_never_comes_back(poisoned: World, poisoned_home: Path, no_mlflow: None) -> None:
    """Neither by name nor by a rollback, which then has nothing to go to."""
    config = poisoned[0]
    retract(config, poisoned_home)

    with pytest.raises(UsageError, match="version 2 is tainted"):
        promote(config, poisoned_home, 2)
    with pytest.raises(UsageError, match="champion 1 has none before it"):
        rollback(config, poisoned_home)


def test_rollback_goes_to_earlier_champions_only(poisoned: World, poisoned_home: Path, no_mlflow: None) -> None:
    """What was rolled back from is none of them; the message says what to use."""
    config = poisoned[0]
    rollback(config, poisoned_home)
    register_first(poisoned_home, "2025-06-01+parent-1", 3)
    promote(config, poisoned_home, 3)

    with pytest.raises(UsageError, match=r"--to 2 was not the champion before version 3.*\[1\].*`daybreak promote 2`"):
        rollback(config, poisoned_home, 2)
    assert rollback(config, poisoned_home, 1) == {"champion": 1, "previous": None}


def test_a_forgotten_user_is_not_brought_back(poisoned: World, poisoned_home: Path, no_mlflow: None) -> None:
    """A version that holds him is refused once the champion does not; while both do, going back brings nothing back."""
    config = poisoned[0]
    forget(config, poisoned_home)
    assert tombstones.trained(str(poisoned_home / "lake")) == [[1, 2]]
    rollback(config, poisoned_home)

    register_first(poisoned_home, "full", 3)
    promote(config, poisoned_home, 3)

    before = snapshot(poisoned_home)
    with pytest.raises(UsageError, match="version 2 was trained on a user who was forgotten"):
        promote(config, poisoned_home, 2)
    with pytest.raises(UsageError, match="version 1 was trained on a user who was forgotten"):
        rollback(config, poisoned_home)
    assert snapshot(poisoned_home) == before


def test_a_version_without_its_checkpoint_is_refused(poisoned: World, poisoned_home: Path, no_mlflow: None) -> None:
    """No night could start from it."""
    register_first(poisoned_home, "lost", 3, checkpoint=str(poisoned_home / "gone"))

    with pytest.raises(UsageError, match=r"version 3 has no checkpoint any more at .*gone"):
        promote(poisoned[0], poisoned_home, 3)


def test_neither_runs_beside_a_night(poisoned: World, poisoned_home: Path, no_mlflow: None) -> None:
    """While a night holds the home, both refuse before anything changes."""
    config = poisoned[0]
    with night_lock(str(poisoned_home), str(THIRD)):
        before = snapshot(poisoned_home)
        for call in (lambda: promote(config, poisoned_home, 1), lambda: rollback(config, poisoned_home)):
            with pytest.raises(UsageError, match="2025-06-03 is running"):
                call()
        assert snapshot(poisoned_home) == before


def test_a_kill_before_the_aliases_loses_nothing(
    poisoned: World, poisoned_home: Path, no_mlflow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal has the move; the next start sets the aliases from it, and the start after that has nothing to do."""
    config = poisoned[0]
    Registry.aliases = {"champion": 2, "previous": 1, "challenger": 2}
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "repair", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rollback(config, poisoned_home)

    best, before = champion(entries_of(poisoned_home)), previous(entries_of(poisoned_home))
    assert best is not None
    assert (best.version, before) == (1, None)
    assert Registry.aliases["champion"] == 2
    assert not aliases.is_settled(entries_of(poisoned_home))
    aliases.repair_if_moved(load_config(config), str(poisoned_home))
    assert Registry.aliases == {"champion": 1, "previous": None, "challenger": 2}


def test_a_registry_that_is_away_does_not_undo_a_move(
    poisoned: World, poisoned_home: Path, no_mlflow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command says what the journal says, and does not fail."""

    def away(*_args: object, **_more: object) -> None:
        raise OSError("database is locked")

    monkeypatch.setattr(Registry, "repair", away)

    assert rollback(poisoned[0], poisoned_home) == {"champion": 1, "previous": None}


@pytest.mark.filterwarnings("default")  # MLflow, pandas and SQLAlchemy warn of their own
def test_the_next_night_repairs_the_registrys_aliases(
    poisoned: World, poisoned_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With MLflow itself: killed at its first alias, a rollback stands, and the next night sets all of them."""
    config, home = poisoned[0], poisoned_home
    models = MlflowStore(f"sqlite:///{home}/mlflow.db", str(home), "tiny")
    for made in [entry for entry in entries_of(home) if entry.kind == "registered"]:
        night = models.start_night(made.night, params={}, tags={})
        assert models.register(night, Path(made.payload["checkpoint"]), night=made.night, tags={}) in (1, 2)
    models.repair(champion=2, previous=1, challenger=2)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowStore, "set_alias", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rollback(config, home)
    assert models.aliases()["champion"] == 2

    night, _ = run(config, home, THIRD, stop_after="register")

    assert night.parent is not None
    assert night.parent.version == 1
    assert models.aliases() == {"champion": 1, "challenger": 2}
