"""The nightly flow with home and source on S3: promoted nights, a second start that does nothing, a taken-up upload."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import flows.nightly
import tests.tiny as tiny
from flows.cli import main
from flows.nightly import nightly
from gr_core.errors import StoreUnavailable
from gr_core.lake import folders, remote, store
from gr_core.lake.journal import Journal, nights
from gr_core.lake.lock import running_night
from gr_core.stages import training
from tasks.train import train
from tests.s3 import KEY_ID, SECRET, TOKEN, make_bucket, point_at, s3_endpoint

__all__ = ["s3_endpoint"]

pytestmark = [
    pytest.mark.prefect,
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.filterwarnings("default"),  # a whole night runs MLflow, pandas and SQLAlchemy, with warnings of theirs
]
DAYS = [tiny.FIRST_DAY + timedelta(days=n) for n in range(2)]


@dataclass
class Ran:
    """Two nights in a home on S3; the second's first upload of a checkpoint broke off."""

    config: str
    home: str
    nights: list[dict[str, Any]]
    trainings: list[Path]
    """RUN.json of each time that a child trained."""
    error: BaseException
    log: str


@pytest.fixture(scope="module")
def ran(s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """Run the two nights once."""
    folder = tmp_path_factory.mktemp("s3")
    stream = folder / "log"
    handler = logging.FileHandler(stream)
    with pytest.MonkeyPatch.context() as patch:
        point_at(s3_endpoint, patch)
        patch.delenv("AWS_ALLOW_HTTP")  # ours to find out
        patch.setenv("DAYBREAK_STATE", str(folder / "state"))
        patch.chdir(folder)
        logging.getLogger().addHandler(handler)
        try:
            yield _run(folder, make_bucket("nightly"), patch, stream)
        finally:
            logging.getLogger().removeHandler(handler)
            handler.close()


def _run(folder: Path, bucket: str, patch: pytest.MonkeyPatch, stream: Path) -> Ran:
    home, config = f"{bucket}/team/home", tiny.make(folder, days=2)
    for path in (folder / "raw").rglob("*.parquet"):
        store.write_bytes(store.join(bucket, "raw", path.relative_to(folder / "raw").as_posix()), path.read_bytes())
    _litter(bucket)
    config.write_text(tiny.CONFIG.format(root=f"{bucket}/raw"))
    trainings, real = [], training.run_training

    def run_training(run: Path, *told: Any, **more: Any) -> None:
        trainings.append(run)
        real(run, *told, **more)

    patch.setattr(training, "run_training", run_training)
    patch.setattr(flows.nightly, "train", train.with_options(retries=0))  # or the failing upload is tried for a minute
    first = nightly(config=str(config), date=DAYS[0], home=home)
    with pytest.raises(StoreUnavailable) as caught:
        _second_night_whose_upload_breaks_off(str(config), home, patch)
    second = nightly(config=str(config), date=DAYS[1], home=home)
    return Ran(str(config), home, [first, second], trainings, caught.value, stream.read_text())


def _litter(bucket: str) -> None:
    """Write what tools leave beside data: a directory marker, _SUCCESS, a temporary file (case C15)."""
    day = f"raw/log/date={DAYS[0]}"
    for name in (f"{day}/", f"{day}/_SUCCESS", f"{day}/.tmp-x.parquet"):
        remote.filesystem().call_s3("put_object", Bucket=bucket.removeprefix("s3://"), Key=name, Body=b"")


def _second_night_whose_upload_breaks_off(config: str, home: str, patch: pytest.MonkeyPatch) -> None:
    client, sent = remote.filesystem(), []
    real = client.put_file

    def put_file(local: str, target: str, **more: Any) -> None:
        if "/checkpoint-" in target:
            sent.append(target)
            if len(sent) > 1:
                raise ConnectionResetError("connection reset by peer")
        real(local, target, **more)

    with patch.context() as broken:
        broken.setattr(client, "put_file", put_file)
        nightly(config=config, date=DAYS[1], home=home)


def test_two_nights_are_promoted_and_all_of_them_lies_on_s3(ran: Ran) -> None:
    """Rows add up, the second night starts from the first's model, and every folder of them is whole on S3."""
    for night in ran.nights:
        assert (night["state"], night["gate"]) == ("completed", "promoted")
        assert night["rows"]["read"] == tiny.ROWS_A_DAY + 3
        assert night["rows"]["committed"] == tiny.ROWS_A_DAY
    assert [night["version"] for night in ran.nights] == [1, 2]
    assert ran.nights[1]["parent"] == 1
    assert ran.nights[1]["next_day"]["click"]["count"] > 0
    there = [one.name for one in store.listing(ran.home)]
    for part in ("lake/events/_delta_log/", "lake/journal/_delta_log/", "mlflow/artifacts/"):
        assert [name for name in there if name.startswith(part)], part
    whole = {name.rpartition("/")[0] for name in there if name.endswith(folders.COMPLETE)}
    assert {f"nights/{day}/packs/train" for day in DAYS} <= whole
    assert len([name for name in whole if "/checkpoint-" in name]) == 2
    assert running_night(ran.home) is None


def test_an_upload_that_breaks_off_is_taken_up_without_training_again(ran: Ran) -> None:
    """The second night failed as the store's silence, by name; its rerun uploaded what was trained: once a night."""
    assert "did not answer" in str(ran.error)
    assert "/checkpoint-" in str(ran.error)
    assert [run.parent.name for run in ran.trainings] == [str(day) for day in DAYS]
    record = nights(Journal(store.join(ran.home, "lake", "journal")).entries())[str(DAYS[1])]
    assert len(record.attempts) == 2
    assert record.error is None


def test_a_second_start_does_nothing(ran: Ran) -> None:
    """A finished night is returned as it was; not one object is written."""
    before = store.listing(ran.home)

    assert nightly(config=ran.config, date=DAYS[0], home=ran.home) == ran.nights[0]

    changed = [one.name for one in store.listing(ran.home) if one not in before]
    assert [name for name in changed if name != "night.lock"] == []


def test_status_reads_the_home(ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    """`daybreak status` of a home on S3 shows nights and champion."""
    assert main(["status", "--config", ran.config, "--home", ran.home, "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["champion"]["version"] == 2
    assert [night["date"] for night in told["nights"]] == [str(day) for day in DAYS]


def test_the_registered_model_loads_from_s3(ran: Ran) -> None:
    """The champion's artifacts lie below the home and score, tracking beside it in local state."""
    import mlflow.pyfunc

    from gr_core.environment import state_directory, tracking_uri
    from gr_core.registry.mlflow_store import MlflowStore

    assert tracking_uri(ran.home) == f"sqlite:///{state_directory(ran.home)}/mlflow.db"
    models = MlflowStore(tracking_uri(ran.home), "unused", "tiny")
    assert models.aliases()["champion"] == 2
    source = models.version(2).source
    assert source.startswith(f"{ran.home}/mlflow/artifacts/")
    frame = mlflow.pyfunc.load_model(source).predict(
        [{"shown_at": 1748822400000000, "history": [], "candidates": [1, 2]}]
    )
    assert len(frame["scores_click"][0]) == 2


def test_no_log_line_holds_a_credential(ran: Ran) -> None:
    """The log of two nights, a failure included, holds neither the secret nor the token nor the key id."""
    assert "night 2025-06-02 opened" in ran.log
    assert not [word for word in (SECRET, TOKEN, KEY_ID) if word in ran.log]


def test_prune_works_on_s3(ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    """Packs of a night that nobody repeats go from the bucket and from this machine; what rollback needs stays. The last."""
    from gr_core.environment import tracking_uri
    from gr_core.registry.mlflow_store import MlflowStore

    words = ["prune", "--config", ran.config, "--home", ran.home, "--set", "lake.rerun_days=0", "--json"]
    packs = store.join(ran.home, "nights", str(DAYS[0]), "packs", "train")
    copy = store.local_copy(packs)
    assert main([*words, "--dry-run"]) == 0
    would = json.loads(capsys.readouterr().out)
    assert store.is_complete(packs)

    assert main(words) == 0

    told = json.loads(capsys.readouterr().out)
    assert (told["dry_run"], told["removed"]) == (False, would["removed"])
    assert not store.exists(packs)
    assert not copy.exists()
    left = {one.name.partition("/")[0] for one in store.listing(store.join(ran.home, "nights", str(DAYS[0])))}
    assert {name.partition("-")[0] for name in left} == {"manifests", "page.html", "checkpoint", "vocabulary"}
    assert running_night(ran.home) is None
    models = MlflowStore(tracking_uri(ran.home), "unused", "tiny")
    assert models.model_bytes(1) > 0
    models.drop_model(1, {"pruned": "now"})
    assert (models.model_bytes(1), models.version(1).tags["pruned"]) == (0, "now")
    assert models.model_bytes(2) > 0
