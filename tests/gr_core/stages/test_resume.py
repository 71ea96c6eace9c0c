"""A night that died is taken up: redone is what is missing, damaged or made by another config, and nothing else."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.data import vocabulary
from gr_core.errors import ConfigError, FormatError, UsageError
from gr_core.lake.journal import Journal, champion, nights
from gr_core.night import open_night
from gr_core.registry.mlflow_store import MlflowStore
from gr_core.stages import ingesting, judging, packing, rivals, sequencing
from tests.plain import run

pytestmark = pytest.mark.filterwarnings("default")  # MLflow, pandas and SQLAlchemy warn of their own
DAY = tiny.FIRST_DAY
NEXT = DAY + timedelta(days=1)
# the second attempt's config: another model that cannot pass
HOLD = ("train.dense_learning_rate=0.9", "gate.min_positives=1000000", "gate.insufficient_data=hold")


def journal_of(home: Path) -> Journal:
    """Return a home's journal."""
    return Journal(str(home / "lake" / "journal"))


def aliases(home: Path) -> dict[str, int]:
    """Return the registry's aliases."""
    return MlflowStore(f"sqlite:///{home}/mlflow.db", str(home / "mlartifacts"), "tiny").aliases()


@pytest.fixture(scope="module")
def one_night(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """Run one night once, for tests that only look or only damage a copy."""
    folder = tmp_path_factory.mktemp("one")
    config = tiny.make(folder, days=3)
    _, done = run(config, folder / "home", DAY)
    return config, folder / "home", done


def test_a_night_redone_with_another_config_is_decided_again(tmp_path: Path) -> None:
    """After a kill between gate and finish, the redo's word counts; the first word's checkpoint stays unchanged."""
    config = tiny.make(tmp_path, days=1)
    home = tmp_path / "home"
    _, first = run(config, home, DAY, stop_after="gate")
    assert first["gate"]["gate"] == "promoted"

    _, second = run(config, home, DAY, *HOLD)

    assert second["register"]["version"] == 2
    assert second["gate"]["gate"] == "held"
    entries = journal_of(home).entries()
    assert champion(entries) is None
    assert nights(entries)[str(DAY)].decision == "hold"
    kept = json.loads((Path(first["train"]["uri"]) / "state.json").read_text())
    assert kept["digest"] == first["train"]["digest"]
    assert "champion" not in aliases(home)


def test_a_killed_redo_leaves_no_manifest_that_names_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packs redone under another config, killed half way: the first config's manifest is not believed afterwards."""
    config = tiny.make(tmp_path, days=1)
    home = tmp_path / "home"
    night, first = run(config, home, DAY, stop_after="pack")
    monkeypatch.setattr("gr_core.stages.packing.PackRef.to_json", lambda _self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(config, home, DAY, "pack.token_budget=64", stop_after="pack")
    monkeypatch.undo()

    _, again = run(config, home, DAY, stop_after="pack")

    index = json.loads((Path(again["pack"]["train"]["uri"]) / "index.json").read_text())
    assert again["pack"]["train"]["digest"] == first["pack"]["train"]["digest"]
    assert index["token_budget"] == night.config["pack"]["token_budget"]


@pytest.mark.parametrize("what", ["manifest", "pack", "sequences", "vocabulary"])
def test_damaged_outputs_of_an_unfinished_night_are_made_again(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A truncated manifest, pack, sequence or vocabulary file is noticed, told and redone, to the same result."""
    config = tiny.make(tmp_path, days=1)
    home = tmp_path / "home"
    _, first = run(config, home, DAY, stop_after="pack")
    folder = home / "nights" / str(DAY)
    victims = {
        "manifest": folder / "manifests" / "ingest.json",
        "pack": folder / "packs" / "train" / "pack.arrow",
        "sequences": folder / "sequences" / "bucket-00000" / "rows.arrow",
        "vocabulary": next(folder.glob("vocabulary-*/item_id.arrow")),
    }
    victims[what].write_bytes(victims[what].read_bytes()[:-40])
    caplog.clear()

    _, again = run(config, home, DAY, stop_after="pack")

    for role in sequencing.ROLES:
        assert again["pack"][role]["digest"] == first["pack"][role]["digest"]
    assert again["ingest"]["bound"] == first["ingest"]["bound"]
    warned = [one.getMessage() for one in caplog.records if one.name == "gr_core.night" and one.levelname == "WARNING"]
    told = {
        "manifest": f"{victims[what]} is damaged; ingest is done again",
        "pack": "pack train: its output is missing or damaged; it is made again",
        "sequences": "sequences 00000: its output is missing or damaged; it is made again",
        "vocabulary": "vocabulary: its output is missing or damaged; it is made again",
    }
    assert [one.startswith(told[what]) for one in warned] == [True]


def test_a_damaged_parent_is_never_trained_on(tmp_path: Path) -> None:
    """One flipped bit in the champion's tensors stops the next night by name."""
    config = tiny.make(tmp_path, days=2)
    home = tmp_path / "home"
    _, done = run(config, home, DAY)
    (tensors,) = Path(done["train"]["uri"]).glob("*.safetensors")
    content = bytearray(tensors.read_bytes())
    content[len(content) * 4 // 5] ^= 1
    tensors.write_bytes(content)

    with pytest.raises(Exception, match=r"safetensors is missing or differs from the manifest"):
        run(config, home, NEXT, stop_after="train")


def test_a_kill_before_the_last_entry_leaves_nothing_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while finishing, the next start finishes: aliases, run state and journal agree."""
    config = tiny.make(tmp_path, days=1)
    home = tmp_path / "home"
    monkeypatch.setattr(judging, "repair_aliases", _repair_once(judging.repair_aliases))
    with pytest.raises(RuntimeError, match="killed"):
        run(config, home, DAY)
    assert not nights(journal_of(home).entries())[str(DAY)].is_finished

    _, done = run(config, home, DAY)

    assert nights(journal_of(home).entries())[str(DAY)].is_finished
    assert aliases(home)["champion"] == done["register"]["version"] == 1


def _repair_once(real: Any) -> Any:
    calls = iter([None, RuntimeError("killed"), *[None] * 9])

    def repair(*arguments: Any) -> None:
        error = next(calls)
        if error is not None:
            raise error
        real(*arguments)

    return repair


def test_a_lost_registry_is_named_before_the_journal_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that counts anew would give an old number to a new model: the night stops and says so."""
    config = tiny.make(tmp_path, days=2)
    home = tmp_path / "home"
    run(config, home, DAY)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/another.db")

    with pytest.raises(FormatError, match="gave version 1 again"):
        run(config, home, NEXT)

    chosen = champion(journal_of(home).entries())
    assert chosen is not None
    assert (chosen.version, chosen.date) == (1, str(DAY))


def test_changes_that_need_a_full_retrain_are_refused_before_anything_is_written(
    one_night: tuple[Path, Path, dict[str, Any]],
) -> None:
    """Model, vocabulary, lake and the list of actions: one ConfigError with the key, and no entry in the journal."""
    config, home, _ = one_night
    before = journal_of(home).entries()
    for override, key in [
        ("model.width=32", "model.width"),
        ("vocabulary.item_id.min_count=5", "vocabulary.item_id.min_count"),
        ("lake.num_buckets=4", "lake.num_buckets"),
        ("lake.holdout_fraction=0.5", "lake.holdout_fraction"),
    ]:
        with pytest.raises(ConfigError, match=key):
            open_night(load_config(config, [override]), str(home), NEXT, at_us=2)
    text = config.read_text()
    for changed in (
        text.replace('[[source.actions]]\nname = "like"\n', '[[source.actions]]\nname = "like"\nsupervise = false\n'),
        text.replace('name = "like"\n', 'name = "like"\n[[source.actions]]\nname = "share"\n', 1),
        text.replace('name = "click"\n', 'name = "tap"\n', 1)
        .replace("click =", "tap =")
        .replace("[gate]", '[gate]\naction = "tap"'),
    ):
        other = config.with_name("other.toml")
        other.write_text(changed)
        with pytest.raises(ConfigError, match=r"source\.actions"):
            open_night(load_config(other), str(home), NEXT, at_us=2)
    assert journal_of(home).entries() == before


def test_a_finished_night_without_a_stage_cannot_be_made_to_have_it(tmp_path: Path) -> None:
    """Forcing a stage that a night without due events never had is refused; its folder stays as it was."""
    config = tiny.make(tmp_path, days=0)
    tiny.write_day(tmp_path / "raw", DAY, rows=0)
    home = tmp_path / "home"
    settings = load_config(config)
    night = open_night(settings, str(home), DAY, at_us=1)
    ingested = ingesting.ingest(night)
    buckets = [sequencing.build_bucket(night, ingested, bucket) for bucket in range(2)]
    status = judging.finish(night, {"ingest": ingested, "sequences": buckets})
    assert (status["state"], status["gate"]) == ("no_data", "none")
    before = sorted(p for p in (home / "nights").rglob("*"))

    forced = open_night(settings, str(home), DAY, at_us=2, force="train")
    with pytest.raises(UsageError, match="finished without stage vocabulary"):
        packing.grow_vocabulary(forced, buckets)

    assert sorted(p for p in (home / "nights").rglob("*")) == before


def test_a_champion_that_is_not_the_parent_is_scored_by_its_own_vocabulary(tmp_path: Path) -> None:
    """With --parent the two lineages number new ids differently; the champion's scores are those of its own rows."""
    config = tiny.make(tmp_path, days=0)
    for n in range(3):  # each day brings ids of its own, so that the numbering depends on the lineage
        tiny.write_day(tmp_path / "raw", DAY + timedelta(days=n), items=12 + 8 * n)
    home = tmp_path / "home"
    for n in range(2):
        run(config, home, DAY + timedelta(days=n))
    chosen = champion(journal_of(home).entries())
    assert chosen is not None
    assert chosen.version == 2
    night, done = run(config, home, DAY + timedelta(days=2), parent=1)

    holdout = rivals.Holdout(
        pack=done["pack"]["holdout"], words=done["vocabulary"], ingested=done["ingest"], buckets=done["sequences"]
    )
    wrong = judging.score(night, chosen.checkpoint, done["pack"]["holdout"], done["vocabulary"])
    payload = judging.registered(journal_of(home).entries(), 2)
    own = {"uri": payload["vocabulary"], "version": vocabulary.load(Path(payload["vocabulary"])).version}
    rows = packing.encode_pack(night, done["ingest"], done["sequences"], own, "holdout", name="check")
    right = judging.score(night, chosen.checkpoint, rows, own)
    scored = rivals.score_version(night, chosen.version, holdout)

    assert right.event_ids == scored.event_ids
    assert (right.logits == scored.logits).all()
    assert not (wrong.logits == scored.logits).all()
    assert done["gate"]["champion"] == 2


def test_a_first_night_counts_its_new_events_and_writes_none_for_scoring(
    one_night: tuple[Path, Path, dict[str, Any]],
) -> None:
    """Without a parent nobody scores the new events: their pack is empty, and the night tells their number."""
    _, _, done = one_night

    assert done["pack"]["next_day"]["num_tokens"] == 0
    assert done["finish"]["new_events"] == sum(part["counts"]["next_day"] for part in done["sequences"]) > 0
