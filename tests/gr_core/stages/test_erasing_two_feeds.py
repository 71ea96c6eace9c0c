"""Retract and forget where actions come as rows of their own: late ones, waiting ones, pseudonymised users."""

from __future__ import annotations

import shutil
from datetime import date, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from gr_core.config import Config, load_config
from gr_core.hashing import is_holdout
from gr_core.stages import erasing
from tests import shop
from tests.erased import conclude
from tests.gr_core.lake.test_erasure import holders
from tests.plain import run

pytestmark = pytest.mark.usefixtures("no_mlflow")  # opening its database costs seconds
SHOP = shop.ROOT / "conf" / "shop.toml"
FIRST, SECOND, THIRD = (shop.DAY + timedelta(days=n) for n in range(3))


class World:
    """Three days of the shop on disk, and the homes after its first night and after its second.

    Args:
        folder: Where raw files and homes lie.
        more: Further settings.
    """

    def __init__(self, folder: Path, *more: str) -> None:
        shop.write_world(folder / "raw", days=3, rows=120)
        self.overrides = [*shop.overrides(folder / "raw"), *more]
        self.one = folder / "one"
        conclude(SHOP, self.one, FIRST, 1, *self.overrides)

    @cached_property
    def two(self) -> Path:
        """The home after the second night."""
        home = self.one.with_name("two")
        shutil.copytree(self.one, home)
        conclude(SHOP, home, SECOND, 2, *self.overrides)
        return home

    @property
    def config(self) -> Config:
        """The shop's config at a test's size."""
        return load_config(SHOP, self.overrides)

    def packed(self, home: Path, day: date) -> dict[str, Any]:
        """Run a night up to its packs."""
        return run(SHOP, home, day, *self.overrides, stop_after="pack")[1]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return two nights of the shop."""
    return World(tmp_path_factory.mktemp("shop"))


def test_the_night_after_a_retraction_is_that_of_a_world_without_the_day(world: World, tmp_path: Path) -> None:
    """Late actions that came with the day are taken back, rows that waited wait again: packs and counts are equal.

    Not next_day's pack: what the retracted night was scored on stays scored, each event and action once ever.
    """
    retracted, clean = tmp_path / "retracted", tmp_path / "clean"
    shutil.copytree(world.two, retracted)
    shutil.copytree(world.one, clean)
    told = erasing.retract(world.config, str(retracted), date=SECOND, commit=None, reason="bots", at_us=7)

    assert (told["rows"], told["tainted"], told["next_parent"]) == (120, [2], 1)
    without, after = (world.packed(home, THIRD) for home in (clean, retracted))
    for role in ("train", "holdout"):
        assert after["pack"][role]["digest"] == without["pack"][role]["digest"], role
    for counts in ("rows", "action_rows"):
        assert after["ingest"][counts] == without["ingest"][counts], counts


def test_a_forgotten_user_is_nowhere_and_his_late_actions_meet_nothing(world: World, tmp_path: Path) -> None:
    """His impressions of the next day count as forgotten, and so do the actions on them, late ones too."""
    home = tmp_path / "home"
    shutil.copytree(world.two, home)
    user = next(str(uid) for uid in range(24) if not is_holdout(str(uid), 0.25))
    told = erasing.forget(world.config, str(home), user, at_us=7)

    assert all(count > 0 for count in told["rows"].values())
    counts = world.packed(home, THIRD)["ingest"]
    assert counts["rows"]["forgotten"] > 0
    assert counts["action_rows"]["forgotten"] > 0
    parts = ("merged", "duplicates", "pending", "quarantined", "forgotten")
    assert counts["action_rows"]["read"] == sum(counts["action_rows"][part] for part in parts)


def test_a_pseudonymised_user_is_forgotten_by_his_own_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home knows him by his hash alone; that, too, is in no file afterwards."""
    monkeypatch.setenv(load_config(SHOP).source.user_key_variable, "k" * 32)
    world = World(tmp_path, "source.pseudonymise_users=true")
    user = next(uid for uid in map(str, range(24)) if not is_holdout(erasing.stored_user(world.config, uid), 0.25))
    stored = erasing.stored_user(world.config, user)
    assert stored != user
    assert holders(world.one, stored)

    told = erasing.forget(world.config, str(world.one), user, at_us=7)

    assert told["user"] == user
    assert all(count > 0 for count in told["rows"].values())
    assert holders(world.one, stored) == []
    assert world.packed(world.one, SECOND)["ingest"]["rows"]["forgotten"] > 0
