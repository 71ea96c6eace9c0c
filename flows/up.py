"""`daybreak up` and `down`: Prefect, MLflow, workers and deployments of one home on this machine, for a browser.

Both servers keep what they know in the home (Prefect's and MLflow's databases, as nights from the command line do), so
whatever ran before is there to see. They listen on 127.0.0.1 alone: neither asks for a password.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flows import hosting, options
from flows.hosting import Record, Server, ServerError
from gr_core import environment
from gr_core.config import Config
from gr_core.errors import UsageError
from gr_core.registry import database
from gr_core.registry.mlflow_store import MlflowStore

HOST = "127.0.0.1"
READY_SECONDS = 300.0  # the longest wait for each part; a machine with nothing else to do takes 10
ROOT = Path(__file__).parent.parent  # the checkout: prefect.yaml, and where the flows' modules are


def up(asked: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Start what is not up yet.

    Returns:
        {"state", "prefect", "mlflow", "nights", "home", "servers", "deployments", "next_date"}; `nights` is where MLflow
        lists them: its start page shows none.
    """
    folder = servers_folder(home)
    with hosting.one_at_a_time(folder):
        record = hosting.read(folder)
        state = "up already"
        environment.prepare_tools(home)
        if record is None or not record.alive() or not _answers(record.about):
            _refuse(asked, record)
            hosting.end(folder, record.servers[::-1] if record else [])
            record, state = _start(asked, settings, home, folder), "up"
        next_date = _next(settings, home)
        if settings.source.world is not None and next_date is not None:
            from flows import deploying

            deploying.fill_in_date(f"{record.about['prefect']}/api", next_date)
    return {"state": state, **record.about, "servers": _listed(record), "next_date": next_date}, options.DONE


def down(_asked: argparse.Namespace, _settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """End what `up` started in this home, workers first; returns {"ended": [{"name", "pid"}]}."""
    folder = servers_folder(home)
    if not folder.exists():
        return {"ended": []}, options.DONE
    with hosting.one_at_a_time(folder):
        record = hosting.read(folder)
        ended = hosting.end(folder, record.servers[::-1] if record else [])
        (folder / "servers.json").unlink(missing_ok=True)
    return {"ended": ended}, options.DONE


def use(home: str) -> None:
    """Let nights of the command line report to the servers of this home, where they are up."""
    record = hosting.read(servers_folder(home))
    if record is not None and record.alive() and _answers(record.about):
        environment.use_servers(f"{record.about['prefect']}/api", record.about["mlflow"])


def servers_folder(home: str) -> Path:
    """Return where a home's servers have their record and logs."""
    return environment.state_directory(home) / "servers"


def _listed(record: Record) -> list[dict[str, Any]]:
    return [{"name": one.name, "pid": one.pid, "log": one.log} for one in record.servers]


def _next(settings: Config, home: str) -> str | None:
    """Return the day of the night that is next; None where a feed of one's own has had none yet."""
    from gr_core.stages import outcome

    try:
        return outcome.next_day(settings, home).isoformat()
    except UsageError:
        return None


def _refuse(asked: argparse.Namespace, record: Record | None) -> None:
    """Refuse what cannot work before anything is started."""
    for name, url in environment.servers_given().items():
        raise UsageError(
            f"{name} is set ({url}), so nights go to that server, and `up` starts servers of its own; unset {name}, or "
            "deploy to your own servers: infra/README.md",
            where=name,
        )
    if asked.prefect_port == asked.mlflow_port:
        raise UsageError(f"both servers were given port {asked.prefect_port}; name two", where="port")
    own = (
        {urlsplit(record.about[name]).port for name in ("prefect", "mlflow")}
        if record and record.any_alive()
        else set()
    )
    for name, number in (("prefect", asked.prefect_port), ("mlflow", asked.mlflow_port)):
        if number not in own:
            hosting.refuse_taken(number, f"--{name}-port N (make up {name.upper()}_PORT=N)", HOST)


def _answers(about: Mapping[str, Any]) -> bool:
    return _is_healthy(f"{about['prefect']}/api/health") and _is_healthy(f"{about['mlflow']}/health")


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _start(asked: argparse.Namespace, settings: Config, home: str, folder: Path) -> Record:
    """Start servers, then pools, deployments and workers; what was started is ended again where one fails."""
    prefect, mlflow = f"http://{HOST}:{asked.prefect_port}", f"http://{HOST}:{asked.mlflow_port}"
    variables = environment.child_variables() | {
        "PREFECT_API_URL": f"{prefect}/api",
        # SQLite waits for other writers: on a busy machine longer than Prefect's 5 and 10 s
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
        "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(folder / "ui"),
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "MLFLOW_TRACKING_URI": mlflow,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # processes for what we do not use
    }
    about: dict[str, Any] = {"prefect": prefect, "mlflow": mlflow, "home": home}
    started: list[Server] = []

    def begin(name: str, *words: str) -> Server:
        started.append(hosting.start(folder, name, words, variables, ROOT))
        hosting.write(folder, Record(tuple(started), about))  # at once: `down` knows of it, whatever happens next
        return started[-1]

    try:
        servers = [
            begin("prefect", "-m", "prefect", "server", "start", "--host", HOST, "--port", str(asked.prefect_port))
        ]
        # makes database and experiment, whole, before the server meets them
        store = MlflowStore(environment.own_database(home), environment.artifact_root(home), settings.name)
        about["nights"] = f"{mlflow}/#/experiments/{store.experiment}/runs"
        servers.append(begin("mlflow", *_mlflow_words(home, asked.mlflow_port)))
        hosting.wait_until(lambda: _answers(about), servers, "Prefect and MLflow answer", READY_SECONDS)
        from flows import deploying

        file = deploying.render(ROOT / "prefect.yaml", folder / "prefect.yaml", settings, asked.config, home)
        pools = deploying.make_pools(f"{prefect}/api", file)
        workers = [begin(f"worker-{pool}", "-m", "prefect", "worker", "start", "--pool", pool) for pool in pools]
        _deploy(file, variables)
        about |= {"deployments": deploying.names(f"{prefect}/api")}
        ready = f"a worker of each pool ({', '.join(pools)}) is online"
        hosting.wait_until(lambda: deploying.are_online(f"{prefect}/api", pools), workers, ready, READY_SECONDS)
    except BaseException:
        hosting.end(folder, started[::-1])
        (folder / "servers.json").unlink(missing_ok=True)
        raise
    record = Record(tuple(started), about)
    hosting.write(folder, record)
    return record


def _mlflow_words(home: str, port: int) -> list[str]:
    """Return the arguments of the tracking server: on the home's own database, one worker process.

    Artifacts are not sent through the server: an experiment keeps one location for good, and nights of this home run
    without the server too.
    """
    location = database.location(environment.artifact_root(home))
    words = ["-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    return [
        *words,
        "--backend-store-uri",
        environment.own_database(home),
        "--default-artifact-root",
        location,
        "--no-serve-artifacts",
    ]


def _deploy(file: Path, variables: Mapping[str, str]) -> None:
    """Register the deployments of a rendered prefect.yaml, with Prefect's own command."""
    words = ["-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
    try:
        done = subprocess.run(
            [sys.executable, *words],
            check=False,
            env=dict(variables),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=READY_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ServerError(f"prefect deploy had not ended after {READY_SECONDS:g} s", where=str(file)) from error
    if done.returncode:
        raise ServerError(f"prefect deploy failed:\n{(done.stdout + done.stderr)[-2000:]}", where=str(file))


def shown(value: dict[str, Any]) -> str:
    """Return what a person reads of `up`: the addresses, and the clicks that run a night."""
    day = value["next_date"] or "a day of the feed"
    return f"""{value["state"]}: {value["home"]}

  Prefect  {value["prefect"]}/deployments  {len(value["deployments"])} deployments; runs, logs, artifacts
  MLflow   {value.get("nights", value["mlflow"])}  nights: tick two, Compare

Four clicks run a night, in Prefect: 1 the deployment `nightly`, 2 Run, 3 Custom run (there, `date`: {day}), 4 Submit.
The run's artifacts link the night's metrics and its page in MLflow. `make down` (`daybreak down`) ends all of this.
Logs: {Path(value["servers"][0]["log"]).parent}
"""


def ended_shown(value: dict[str, Any]) -> str:
    """Return what a person reads of `down`."""
    names = ", ".join(f"{one['name']} ({one['pid']})" for one in value["ended"])
    return f"ended: {names}\n" if names else "nothing was up\n"


def add_commands(commands: options.Commands[Any], common: argparse.ArgumentParser) -> None:
    """Add the commands and their options to those of `daybreak`; `common` are the options that all commands take."""
    begin = commands.add_parser(
        "up", parents=[common], allow_abbrev=False, help="Prefect, MLflow, workers and deployments, for a browser"
    )
    begin.add_argument(
        "--prefect-port", type=options.port, default=4200, metavar="N", help="Prefect's port (default: 4200)"
    )
    begin.add_argument(
        "--mlflow-port", type=options.port, default=5000, metavar="N", help="MLflow's port (default: 5000)"
    )
    begin.set_defaults(run=up, show=shown)
    stop = commands.add_parser("down", parents=[common], allow_abbrev=False, help="end what `up` started")
    stop.set_defaults(run=down, show=ended_shown)
