"""Alerts: a Prefect notification block of the config is told over HTTP what `status` shows without it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from flows.alerting import tell, telling
from gr_core.config import Config, load_config
from gr_core.errors import TrainingError
from gr_core.lake.journal import Journal

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]

YESTERDAY = datetime.now(UTC).date() - timedelta(days=1)


@pytest.fixture(scope="module")
def told() -> Iterator[tuple[list[dict[str, Any]], str]]:
    """Serve a webhook on this machine; yields what it was sent, and its address."""
    received: list[dict[str, Any]] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Webhook)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    yield received, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.fixture
def settings(prefect_server: None, told: tuple[list[dict[str, Any]], str], tmp_path: Path) -> Config:
    """Return a config whose alerts go to the webhook."""
    from prefect.blocks.notifications import CustomWebhookNotificationBlock

    del prefect_server
    block = CustomWebhookNotificationBlock(
        name="on-call", url=told[1], json_data={"subject": "{{subject}}", "body": "{{body}}"}
    )
    block.save("on-call", overwrite=True)
    told[0].clear()
    overrides = ["alerts.block=custom-webhook/on-call", "nightly.ready_by=00:00"]
    return load_config(tiny.make(tmp_path, days=0), overrides)


def journal_of(home: Path, *days: date, took_minutes: int = 60) -> None:
    """Write a journal of promoted nights that took so long each."""
    journal = Journal(str(home / "lake" / "journal"))
    for number, day in enumerate(days, 1):
        pins = {"date": str(day), "mode": "nightly", "parent": None, "cutoff_us": 1, "fingerprint": "f", "seed": 0}
        journal.append("opened", str(day), pins, at_us=1)
        watermark = {"commit": number, "cutoff_us": 1}
        made = {"version": number, "checkpoint": "c", "watermark": watermark, "date": str(day)}
        journal.append("registered", str(day), made, at_us=1)
        decided = {"decision": "promote", "reasons": ["gate passed"], "version": number, "previous": None}
        journal.append("decided", str(day), decided, at_us=1)
        done = {"state": "completed", "bound": None, "status": {"seconds": {"train": 60.0 * took_minutes}}}
        journal.append("finished", str(day), {**done, "ended_us": 1 + took_minutes * 60_000_000}, at_us=1)


def test_a_failed_night_is_told_and_still_fails(
    settings: Config, told: tuple[list[dict[str, Any]], str], tmp_path: Path
) -> None:
    """The message names config, night, error and remedy; the error goes on its way."""

    def run() -> dict[str, Any]:
        raise TrainingError("the loss is not finite at step 7")

    with pytest.raises(TrainingError):
        telling(settings, str(tmp_path / "home"), tiny.FIRST_DAY, run)

    (message,) = told[0]
    assert message["subject"] == "daybreak tiny: night 2025-06-01 failed"
    assert "TrainingError: the loss is not finite at step 7" in message["body"]
    assert "daybreak status" in message["body"]


def test_a_held_night_and_a_stale_champion_are_told(
    settings: Config, told: tuple[list[dict[str, Any]], str], tmp_path: Path
) -> None:
    """One message each, with the gate's reason and the champion's age; a finished night that is asked again tells nothing."""
    home = tmp_path / "home"
    journal_of(home, tiny.FIRST_DAY)
    day = tiny.FIRST_DAY + timedelta(days=1)

    def run() -> dict[str, Any]:
        return {"gate": "held", "reasons": ["gate.ne.click: upper bound +0.021 relative, margin +0.010"]}

    telling(settings, str(home), day, run)
    telling(settings, str(home), tiny.FIRST_DAY, run)

    held, stale = told[0]
    assert (held["subject"], held["body"]) == (f"daybreak tiny: night {day} was held", run()["reasons"][0])
    assert stale["subject"] == "daybreak tiny: the champion is stale"
    assert "champion 1 of 2025-06-01 is" in stale["body"]


def test_a_night_that_will_miss_ready_by_is_told_as_it_starts(
    settings: Config, told: tuple[list[dict[str, Any]], str], tmp_path: Path
) -> None:
    """Past nights took longer than what is left until `ready_by`: one warning before the night, with the time to expect."""
    home, tomorrow = tmp_path / "home", YESTERDAY + timedelta(days=1)
    journal_of(home, YESTERDAY, took_minutes=60 * 25)  # more than a day: late at any moment of the night before
    order: list[str] = []

    def run() -> dict[str, Any]:
        order.extend(message["subject"] for message in told[0])
        return {"gate": "promoted", "reasons": []}

    telling(settings, str(home), tomorrow, run)

    assert order == [f"daybreak tiny: night {tomorrow} will be late"]
    assert "after 00:00 (nightly.ready_by)" in told[0][0]["body"]
    assert "1500 min, the median of the last 7" in told[0][0]["body"]


def test_what_cannot_be_told_fails_nothing(
    settings: Config, told: tuple[list[dict[str, Any]], str], caplog: pytest.LogCaptureFixture
) -> None:
    """No block, an unwanted kind, or a block that is not there: nothing is sent, the last with a line in the log."""
    alerts = settings.alerts.model_copy(update={"block": "slack-webhook/nowhere"})

    assert not tell(settings.model_copy(update={"alerts": alerts}), "failed", "a", "b")
    assert "alerts.block slack-webhook/nowhere was not told 'a'" in caplog.text
    for quiet in ({"block": None}, {"on": ("held",)}):
        alerts = settings.alerts.model_copy(update=quiet)
        assert not tell(settings.model_copy(update={"alerts": alerts}), "failed", "a", "b")
    assert told[0] == []
