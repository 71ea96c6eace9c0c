"""`daybreak up`: real Prefect and MLflow servers, driven over HTTP and in a headless Chromium; `down` ends them all."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.sync_api import Browser, Page, expect

import tests.chromium as chromium
import tests.tiny as tiny
from flows import hosting
from flows.deploying import fill_in_date
from tests.chromium import shoot

ROOT = Path(__file__).parent.parent.parent
FIRST, SECOND = (str(tiny.FIRST_DAY + timedelta(days=n)) for n in range(2))
NIGHT_SECONDS = 400  # the longest that a night of the tiny feed may take; beside two other test processes it takes 30
ENDS = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}

pytestmark = [
    pytest.mark.filterwarnings("default"),  # Playwright's driver is a process with pipes, closed when it likes
]


@dataclass
class Up:
    """What `daybreak up` started for the tiny feed, and how to ask it."""

    folder: Path
    words: list[str]
    told: dict[str, Any]

    def daybreak(self, command: str, *more: str) -> dict[str, Any]:
        """Run a command on this config and home; returns its object."""
        done = daybreak(command, *self.words, *more)
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(json.loads(done.stdout))

    def prefect(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask Prefect's API."""
        return ask(f"{self.told['prefect']}/api{path}", body)

    def mlflow(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask MLflow's API."""
        return ask(f"{self.told['mlflow']}/api/2.0/mlflow{path}", body)

    def nights(self) -> list[dict[str, Any]]:
        """Return MLflow's runs of nights, oldest first."""
        (found,) = [
            e for e in self.mlflow("/experiments/search", {"max_results": 9})["experiments"] if "tiny" in e["name"]
        ]
        wanted = {"experiment_ids": [found["experiment_id"]], "filter": "tags.`daybreak.kind` = 'night'"}
        return sorted(self.mlflow("/runs/search", wanted)["runs"], key=lambda run: str(run["info"]["run_name"]))


def daybreak(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a person does, with no server named in the environment."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_TRACKING"))}
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *words, "--json"],
        check=False,
        env=variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """Send a request to an API, again while its database is busy; returns what it answers."""
    data = None if body is None else json.dumps(body).encode()
    for _ in range(20):
        try:
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(0.5)
    raise AssertionError(f"{url} was busy all the time")


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Start everything once, for a feed that has one day."""
    folder = tmp_path_factory.mktemp("up")
    config, home = tiny.make(folder, days=1), folder / "home"
    words = ["--config", str(config), "--home", str(home)]
    ports = ["--prefect-port", str(free_port()), "--mlflow-port", str(free_port())]
    try:
        done = daybreak("up", *words, *ports)
        assert done.returncode == 0, done.stderr[-3000:]
        yield Up(folder, words, json.loads(done.stdout))
    finally:
        daybreak("down", *words)


@pytest.fixture(scope="module")
def first_night(up: Up) -> dict[str, Any]:
    """Start the first night by the API with a date alone; return its run when it has ended."""
    deployment = up.prefect("/deployments/name/nightly/nightly")["id"]
    run = up.prefect(f"/deployments/{deployment}/create_flow_run", {"parameters": {"date": FIRST}})["id"]
    deadline = time.monotonic() + NIGHT_SECONDS
    while True:
        found: dict[str, Any] = up.prefect(f"/flow_runs/{run}")
        if found["state_type"] in ENDS:
            return found
        assert time.monotonic() < deadline, found["state"]
        time.sleep(0.5)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Run Chromium once, where there is one."""
    path = chromium.executable()
    if path is None:
        pytest.skip(chromium.MISSING)
    with chromium.started(path) as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Open a page of a desktop's size that asks no other machine for anything."""
    context = browser.new_context(viewport=chromium.DESKTOP)  # type: ignore[arg-type]
    context.set_default_timeout(chromium.WAIT_MS)
    opened, elsewhere = context.new_page(), []
    opened.on("request", lambda request: elsewhere.append(request.url))
    yield opened
    context.close()
    assert [url for url in elsewhere if not url.startswith(("http://127.0.0.1:", "data:", "blob:", "file:"))] == []


def test_up_starts_servers_workers_and_deployments(up: Up) -> None:
    """Both servers answer, each pool has its worker, the nightly deployment runs this config in this home."""
    assert up.told["state"] == "up"
    names = [server["name"] for server in up.told["servers"]]
    assert names[:2] == ["prefect", "mlflow"]
    assert "worker-cpu" in names
    nightly = up.prefect("/deployments/name/nightly/nightly")
    assert nightly["parameters"]["config"] == up.words[1]
    assert nightly["parameters"]["home"] == up.words[3]
    assert {"nightly/nightly", "backfill/backfill"} <= set(up.told["deployments"])
    for server in up.told["servers"]:
        assert Path(server["log"]).is_relative_to(up.folder)


def test_up_again_starts_nothing(up: Up) -> None:
    """What is up stays as it is: the same processes, and the deployments are not touched."""
    again = up.daybreak("up")

    assert again["state"] == "up already"
    assert again["servers"] == up.told["servers"]


def test_a_night_started_by_the_api_is_all_there_over_http(up: Up, first_night: dict[str, Any]) -> None:
    """It ends Completed under its day's name; its table, links, metrics and model version are read from both servers."""
    assert (first_night["state_type"], first_night["name"]) == ("COMPLETED", f"nightly {FIRST}")
    wanted = {"flow_runs": {"id": {"any_": [first_night["id"]]}}}
    artifacts = {one["key"]: one for one in up.prefect("/artifacts/filter", wanted)}
    figures = {row["figure"]: row["value"] for row in json.loads(artifacts["night"]["data"])}
    assert figures["rows committed"] == str(tiny.ROWS_A_DAY)
    (run,) = up.nights()
    assert run["info"]["status"] == "FINISHED"
    link = f"{up.told['mlflow']}#/experiments/{run['info']['experiment_id']}/runs/{run['info']['run_id']}"
    assert link in artifacts["mlflow-run"]["data"]
    assert f"{link}/artifacts/page.html" in artifacts["night-page"]["data"]
    metrics = {metric["key"]: metric["value"] for metric in run["data"]["metrics"]}
    assert metrics["holdout/ne/click"] > 0
    champion = up.mlflow("/registered-models/alias?name=daybreak-tiny&alias=champion")["model_version"]
    assert (champion["version"], champion["run_id"]) == ("1", run["info"]["run_id"])


def test_the_run_of_a_night_shows_its_stages_and_artifacts(up: Up, first_night: dict[str, Any], page: Page) -> None:
    """The run's page has the state, the stages' graph and the artifacts, among them the links to MLflow."""
    page.goto(f"{up.told['prefect']}/runs/flow-run/{first_night['id']}")
    _expect_state(page, "Completed")
    expect(page.get_by_text("register").first).to_be_visible()
    shoot(page, "prefect-night")
    page.get_by_role("tab", name="Artifacts").or_(page.get_by_text("Artifacts", exact=True)).first.click()
    for key in ("night", "mlflow-run", "night-page"):
        expect(page.get_by_text(key, exact=True).first).to_be_visible()


def test_the_homes_own_database_has_the_nights_of_the_servers(up: Up, first_night: dict[str, Any]) -> None:
    """One MLflow database, in the home (case B6): what the worker did, the command line sees without the server."""
    assert [path.name for path in up.folder.rglob("mlflow.db")] == ["mlflow.db"]
    assert not (ROOT / "mlflow.db").exists()
    assert not (ROOT / "mlruns").exists()
    status = up.daybreak("status")
    assert [(night["date"], night["state"]) for night in status["nights"]] == [(FIRST, "completed")]
    assert status["champion"]["version"] == 1


def test_a_night_started_from_the_form_fails_and_is_retried(up: Up, first_night: dict[str, Any], page: Page) -> None:
    """The form takes the date; without the day's file the night fails by name; once the file is there, Retry ends it."""
    page.goto(f"{up.told['prefect']}/deployments")
    page.locator("a[href*='/deployments/deployment/']", has_text="nightly").click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    _choose_date(page, SECOND)
    shoot(page, "prefect-form", page.locator("textarea").first)
    page.goto(f"{up.told['prefect']}/runs/flow-run/{_submit(page, up, first_night['id'])}")
    _expect_state(page, "Failed")
    expect(page.get_by_text(re.compile(f"{SECOND}.*no file|no .*file.*{SECOND}")).first).to_be_visible()

    tiny.write_day(up.folder / "raw", tiny.FIRST_DAY + timedelta(days=1))
    page.get_by_role("button", name="Retry").click()
    page.get_by_role("dialog").get_by_role("button", name="Retry").click()
    _expect_state(page, "Completed")
    expect(page.get_by_text(f"nightly {SECOND}").first).to_be_visible()
    assert [run["info"]["run_name"] for run in up.nights()] == [FIRST, SECOND]


def _submit(page: Page, up: Up, before: str) -> str:
    """Submit the form, again where a busy page took no notice; returns the id of the run that came after `before`."""
    for _ in range(chromium.WAIT_MS // 10_000):
        if "/deployments/deployment/" in page.url and page.url.partition("?")[0].endswith("/run"):
            page.get_by_role("button", name="Submit").click()
        patience = time.monotonic() + 10
        while time.monotonic() < patience:
            runs = up.prefect("/flow_runs/filter", {})  # those that the schedule will start among them
            by_hand = [run["id"] for run in runs if run["deployment_id"] and not run["auto_scheduled"]]
            if new := [run for run in by_hand if run != before]:
                return str(new[0])
            page.wait_for_timeout(200)
    raise AssertionError(f"no run came of {page.url}")


def _choose_date(page: Page, day: str) -> None:
    """Give the parameter `date` of the form."""
    field = page.locator(".schema-form-property", has_text="The lake day").last
    field.get_by_role("button", name="date", exact=True).click()
    field.locator(".p-date-button__control").click()
    page.locator("input[type=date]").fill(day)
    page.get_by_role("button", name="Apply").click()


def _expect_state(page: Page, state: str) -> None:
    """Wait until the page itself, untouched, shows a run's state."""
    badge = page.locator("[class*=state-badge]").first
    expect(badge).to_have_text(state, timeout=1000 * NIGHT_SECONDS)


def test_two_nights_are_compared_in_mlflow(up: Up, page: Page) -> None:
    """Both runs ticked, Compare: every metric of the two stands side by side, as the API has them."""
    nights = up.nights()
    if len(nights) < 2:
        pytest.fail("the night before this test did not end")
    page.goto(up.told["nights"])
    for night in nights:
        row = page.locator("[role=row]", has=page.get_by_role("link", name=night["info"]["run_name"]))
        row.get_by_role("checkbox").first.click()
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(page.get_by_text("Comparing 2 Runs").first).to_be_visible()
    page.get_by_role("button", name="Visualizations").click()  # folded: room for the tables
    page.get_by_role("button", name="Close", exact=True).click()  # MLflow's assistant
    names = page.get_by_role("grid").filter(has=page.get_by_role("link", name="holdout/auc/click"))
    expect(names).to_be_visible()
    page.get_by_role("button", name="Metrics", exact=True).evaluate("it => it.scrollIntoView()")
    shoot(page, "mlflow-compare")
    shown = page.get_by_role("grid").nth(-1).inner_text().split()
    rows = names.get_by_role("link").all_inner_texts()
    logged = [{metric["key"]: metric["value"] for metric in run["data"]["metrics"]} for run in nights]
    drawn = list(zip(rows, shown[::2], shown[1::2], strict=False))  # what is seen of the table, and a bit more
    assert "holdout/auc/click" in {name for name, *_ in drawn}
    for name, *values in drawn:
        for value, run in zip(values, logged, strict=True):
            if name in run:  # MLflow draws NaN for what one of the two has not
                assert float(value) == pytest.approx(run[name], abs=0.0006), name


def test_the_page_of_a_night_fits_a_phone(up: Up, browser: Browser) -> None:
    """Nothing of it is wider than the screen, it says what was decided, and it asks for no other file."""
    context = browser.new_context(viewport=chromium.PHONE, device_scale_factor=2)  # type: ignore[arg-type]
    page, requests = context.new_page(), []
    page.on("request", lambda request: requests.append(request.url))
    path = max((Path(up.words[3]) / "nights").glob("*/page.html"))
    page.goto(path.as_uri())
    shoot(page, "page-phone")

    expect(page.get_by_role("heading", name=f"Night {path.parent.name}")).to_be_visible()
    expect(page.get_by_role("heading", name="Decision")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= chromium.PHONE["width"]
    assert requests == [path.as_uri()]
    context.close()


def test_the_page_of_a_night_is_shown_by_mlflow(up: Up, first_night: dict[str, Any], page: Page) -> None:
    """The link of the Prefect artifact leads to the page inside MLflow."""
    info = up.nights()[0]["info"]
    page.goto(f"{up.told['mlflow']}#/experiments/{info['experiment_id']}/runs/{info['run_id']}/artifacts/page.html")

    shown = page.frame_locator("iframe").first
    expect(shown.get_by_role("heading", name=f"Night {FIRST}")).to_be_visible()


def test_the_next_day_is_filled_into_the_form(up: Up) -> None:
    """As `up` does for an embedded world: the date is the deployment's own, and its other parameters stay."""
    before = up.prefect("/deployments/name/nightly/nightly")["parameters"]

    fill_in_date(f"{up.told['prefect']}/api", "2025-06-09")

    assert up.prefect("/deployments/name/nightly/nightly")["parameters"] == before | {"date": "2025-06-09"}


def test_a_pool_of_kubernetes_jobs_is_taken_by_the_server(up: Up) -> None:
    """The server's own validation of the template, and of a deployment's variables against it."""
    template = json.loads((ROOT / "infra" / "kubernetes" / "pool-gpu.json").read_text())
    made = up.prefect("/work_pools/", {"name": "jobs", "type": "kubernetes", "base_job_template": template})
    assert made["base_job_template"] == template
    flow = up.prefect("/deployments/name/nightly/nightly")["flow_id"]
    wanted = {"name": "on-jobs", "flow_id": flow, "work_pool_name": "jobs", "entrypoint": "flows.nightly.nightly"}
    assert up.prefect("/deployments/", wanted | {"job_variables": {"gpus": 8}})["job_variables"] == {"gpus": 8}
    with pytest.raises(urllib.error.HTTPError, match="422"):
        up.prefect("/deployments/", wanted | {"name": "refused", "job_variables": {"gpus": "many"}})


def test_down_ends_all_that_up_started_and_nothing_else(up: Up) -> None:
    """Servers, workers and their children are gone, a neighbour lives, the ports are free; a second down says so."""
    folder = Path(up.words[3]) / "servers"
    before = hosting.marked(folder)
    assert {server["pid"] for server in up.told["servers"]} <= {process.pid for process in before}
    neighbour = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    ended = up.daybreak("down")["ended"]

    assert {server["pid"] for server in up.told["servers"]} <= {one["pid"] for one in ended}
    assert hosting.marked(folder) == []
    assert not [process for process in before if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert neighbour.poll() is None
    neighbour.communicate(b"\n")
    for url in (up.told["prefect"], up.told["mlflow"]):
        hosting.refuse_taken(int(url.rpartition(":")[2]), "port", "127.0.0.1")
    assert up.daybreak("down") == {"ended": []}
