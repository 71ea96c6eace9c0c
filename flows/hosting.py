"""Processes that outlive the command that started them: started detached, recorded, watched, and ended again.

A record (`servers.json` in a folder of the home) names each process by id and start time, so that an id which the system
has given to another process since is left alone. All of them, and what they start, carry the folder in their
environment: a night whose worker was killed is found too. Nothing else is ever ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from gr_core.atomic import write_whole
from gr_core.errors import DaybreakError, UsageError

MARK = "DAYBREAK_SERVERS"  # variable of every process that was started here: the folder of its record
FORMAT = 1
END_SECONDS = 20.0  # from being told to end until being killed: a night closes its training and reports to the server
POLL_SECONDS = 0.1
LOG_LINES = 15  # of a log that an error shows
_SAME_START_SECONDS = 1.0  # the start time is read from the kernel in ticks


class ServerError(DaybreakError):
    """A server did not start, or ended before it was ready; the end of its log is in the message."""


@dataclass(frozen=True)
class Server:
    """One detached process."""

    name: str
    pid: int
    started: float
    """Seconds since the epoch, as the system has it."""
    log: str

    def process(self) -> psutil.Process | None:
        """Return the process; None when it ended, also when its id was given to another one since."""
        try:
            found = psutil.Process(self.pid)
            same = abs(found.create_time() - self.started) < _SAME_START_SECONDS
            return found if same and found.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None


@dataclass(frozen=True)
class Record:
    """What is up in a folder: its processes, and what the command that started them wants to know again."""

    servers: tuple[Server, ...]
    about: Mapping[str, Any]

    def alive(self) -> bool:
        """Tell whether every process still runs."""
        return all(server.process() is not None for server in self.servers)

    def any_alive(self) -> bool:
        """Tell whether any of its processes still runs."""
        return any(server.process() is not None for server in self.servers)


def read(folder: Path) -> Record | None:
    """Return the record of a folder; None without one.

    Raises:
        UsageError: It was written by another release, or is damaged.
    """
    try:
        told = json.loads((folder / "servers.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UsageError(
            f"{folder / 'servers.json'} is damaged ({error}); delete it: `daybreak down` then ends what `up` started, which "
            f"it knows by {MARK} in the environment",
            where=str(folder),
        ) from error
    if told.get("format") != FORMAT:
        raise UsageError(
            f"{folder / 'servers.json'} has format {told.get('format')}, this release reads {FORMAT}; end those servers "
            "with the release that started them, or end them by hand and delete the file",
            where=str(folder),
        )
    return Record(tuple(Server(**one) for one in told["servers"]), told["about"])


def write(folder: Path, record: Record) -> None:
    """Write the record of a folder, whole."""
    body = {"format": FORMAT, "servers": [asdict(one) for one in record.servers], "about": dict(record.about)}
    write_whole(folder / "servers.json", lambda stream: stream.write(json.dumps(body, indent=2).encode()))


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the folder: two commands at once would start everything twice.

    Raises:
        UsageError: Another command holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another up or down works in {folder}; run it again when it is done") from None
        yield


def refuse_taken(port: int, option: str, host: str) -> None:
    """Refuse a port that something else listens on.

    Args:
        port: The port.
        option: How another one is asked for.
        host: The address it is bound to.

    Raises:
        UsageError: It is taken, or may not be used.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what a server does: a closing one is no hindrance
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"port {port} of {host} cannot be used ({error.strerror}); end what listens there, or take another "
                f"port: {option}",
                where=option,
            ) from None


def start(folder: Path, name: str, words: Sequence[str], variables: Mapping[str, str], where: Path) -> Server:
    """Start a process that stays when this one and its terminal end; what it prints goes to a log.

    Args:
        folder: Of the record; <name>.log lies there.
        name: What it is.
        words: Arguments of this Python.
        variables: Its whole environment.
        where: Its working directory.
    """
    log = folder / f"{name}.log"
    with log.open("ab") as stream:
        child = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**variables, MARK: str(folder)},
            cwd=where,
            start_new_session=True,
        )
    _CHILDREN[child.pid] = child
    return Server(name, child.pid, psutil.Process(child.pid).create_time(), str(log))


_CHILDREN: dict[int, subprocess.Popen[bytes]] = {}  # kept: Python warns of one that it forgets while it runs


def wait_until(ready: Callable[[], bool], servers: Sequence[Server], what: str, seconds: float) -> None:
    """Wait for a condition while processes live.

    Args:
        ready: The condition.
        servers: Without any of them it cannot come true.
        what: The condition in words.
        seconds: The longest wait.

    Raises:
        ServerError: A process ended, or the time was up; with the end of the log.
    """
    deadline = time.monotonic() + seconds
    while not ready():
        for server in servers:
            if server.process() is None:
                raise ServerError(f"{server.name} ended before {what}; {server.log} ends with\n{tail(server.log)}")
        if time.monotonic() > deadline:
            logs = "\n".join(f"{server.log} ends with\n{tail(server.log)}" for server in servers)
            raise ServerError(f"{what}: not so after {seconds:g} s; {logs}")
        time.sleep(POLL_SECONDS)


def tail(log: str) -> str:
    """Return the last lines of a log."""
    lines = Path(log).read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_LINES:])


def end(folder: Path, servers: Sequence[Server]) -> list[dict[str, Any]]:
    """End processes in the given order, each with all that it started, then whatever else carries the folder's mark.

    Returns:
        {"name", "pid"} of each process that was told to end.
    """
    ended: list[dict[str, Any]] = []
    for server in servers:
        found = server.process()
        if found is not None:
            ended += _end_tree(found, server.name)
    for left in marked(folder):
        ended += _end_tree(left, "left behind")
    for child in _CHILDREN.values():
        child.poll()
    return ended


def marked(folder: Path) -> list[psutil.Process]:
    """Return the living processes that were started for this folder, and what those started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == str(folder):
                found.append(process)
        except (psutil.Error, OSError):
            continue  # ended meanwhile, or another user's
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def _end_tree(process: psutil.Process, name: str) -> list[dict[str, Any]]:
    """Tell a process to end, then its descendants; kill what stays."""
    with contextlib.suppress(psutil.NoSuchProcess):
        below = process.children(recursive=True)
        process.terminate()
        psutil.wait_procs([process], timeout=END_SECONDS)  # it may tell them itself
        for tell in (psutil.Process.terminate, psutil.Process.kill):
            _, alive = psutil.wait_procs([process, *below], timeout=0)
            for one in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    tell(one)
            psutil.wait_procs(alive, timeout=END_SECONDS)
        return [{"name": name, "pid": process.pid}]
    return []
