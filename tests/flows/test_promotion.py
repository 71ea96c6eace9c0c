"""The promotion flow: what the form offers, the champion moved, and the table of the run."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from flows.promotion import promotion
from gr_core.errors import UsageError
from gr_core.lake.journal import Journal
from tests.erased import REGISTRY, Registry

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture
def parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the parameters of a home with champion 1 and the held version 2; no MLflow."""
    monkeypatch.setattr(REGISTRY, Registry)
    config, home = tiny.make(tmp_path, days=0), tmp_path / "home"
    journal = Journal(str(home / "lake" / "journal"))
    for version, decision in ((1, "promote"), (2, "hold")):
        checkpoint = tmp_path / f"checkpoint-{version}"
        checkpoint.mkdir()
        (checkpoint / "manifest.json").write_text("{}")
        day = f"2025-06-0{version}"
        pins = {"date": day, "mode": "nightly", "parent": None, "cutoff_us": version, "fingerprint": "f", "seed": 0}
        journal.append("opened", day, pins | {"config": promoted_config(config)}, at_us=1)
        watermark = {"commit": version, "cutoff_us": version}
        made = {"version": version, "checkpoint": str(checkpoint), "watermark": watermark, "date": day}
        journal.append("registered", day, made, at_us=1)
        decided = {"decision": decision, "reasons": ["r"], "version": version, "previous": None}
        journal.append("decided", day, decided, at_us=1)
        journal.append("finished", day, {"state": "completed", "bound": None, "status": {}}, at_us=1)
    return {"config": str(config), "home": str(home)}


def promoted_config(config: Path) -> dict[str, Any]:
    """Return a resolved config."""
    from gr_core.config import load_config

    return load_config(config).resolved()


def table_of(run: uuid.UUID) -> Any:
    """Return the promotion table of a flow run."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
    with get_client(sync_client=True) as client:
        (found,) = client.read_artifacts(artifact_filter=wanted)
    return found


def test_the_form_offers_the_two_actions() -> None:
    """Action is an enumeration, version a number or nothing; action and reason are asked for, each is described."""
    form = promotion.parameters

    assert form.properties["action"]["enum"] == ["promote", "rollback"]
    assert {one["type"] for one in form.properties["version"]["anyOf"]} == {"integer", "null"}
    assert form.required == ["action", "reason"]
    assert all(one.get("description") for one in form.properties.values())


def test_a_version_is_promoted_and_rolled_back(parameters: dict[str, Any]) -> None:
    """The journal, the aliases and the run's table say the same; the run is named by what it did."""
    from prefect.client.orchestration import get_client

    state = promotion("promote", "looked at by hand", 2, **parameters, return_state=True)
    assert state.result() == {"champion": 2, "previous": 1}
    assert Registry.aliases["champion"] == 2
    run = state.state_details.flow_run_id
    table = table_of(run)
    assert table.description == "promote: champion is 2"
    assert "looked at by hand" in str(table.data)
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(run).name == "promote 2"

    assert promotion("rollback", "clicks fell", **parameters) == {"champion": 1, "previous": None}
    entries = Journal(f"{parameters['home']}/lake/journal").entries()
    assert [entry.kind for entry in entries[-2:]] == ["promoted", "rollback"]


def test_promoting_nothing_is_refused(parameters: dict[str, Any]) -> None:
    """Without a version, or with one that nobody registered, the run fails by one error and nothing moves."""
    before = len(Journal(f"{parameters['home']}/lake/journal").entries())

    with pytest.raises(UsageError, match="promote needs a version"):
        promotion("promote", "r", **parameters)
    with pytest.raises(UsageError, match="version 7 is no registered version"):
        promotion("promote", "r", 7, **parameters)

    assert len(Journal(f"{parameters['home']}/lake/journal").entries()) == before
