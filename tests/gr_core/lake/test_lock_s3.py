"""The lock of a home on S3: one writer across machines, stolen from the dead only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gr_core.errors import ConfigError
from gr_core.lake import lease, remote
from gr_core.lake.lock import LOCK, night_lock, running_night
from tests.s3 import bucket, point_at, refusing, s3_endpoint

__all__ = ["bucket", "s3_endpoint"]

HOLD = """
import sys, time
from gr_core.lake.lock import night_lock
with night_lock(sys.argv[1], sys.argv[2]) as holder:
    print(holder, flush=True)
    time.sleep(0 if holder else 60)
"""
ROOT = Path(__file__).parent.parent.parent.parent


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 3.0)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.5)
    monkeypatch.setattr(lease, "_LOOK_SECONDS", 0.2)


def hold(home: str, night: str) -> subprocess.Popen[str]:
    """Start a process that tries to hold the lock; its first line says who did before."""
    return subprocess.Popen([sys.executable, "-c", HOLD, home, night], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def first_line(process: subprocess.Popen[str]) -> str:
    """Return what a process says first."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_two_starts_at_once_and_a_killed_holder(bucket: str) -> None:
    """Of two starts one holds the lock, the other learns its night at once; after kill -9 it is free at once (A3, A8)."""
    home = f"{bucket}/home"
    both = [hold(home, night) for night in ("2025-06-01", "2025-06-02")]
    told = [first_line(process) for process in both]
    winner = told.index("None")
    assert told[1 - winner] == f"2025-06-0{winner + 1}"

    with night_lock(home, "2025-06-03") as holder:
        assert holder == f"2025-06-0{winner + 1}"
    os.kill(both[winner].pid, signal.SIGKILL)
    for process in both:
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    began = time.monotonic()
    assert running_night(home) is None
    with night_lock(home, "2025-06-03") as holder:
        assert holder is None
    assert time.monotonic() - began < 2


def test_a_dead_holder_of_another_machine_is_robbed_after_the_lease(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its process cannot be seen, a holder that stopped beating loses the lock after the lease, without a reset."""
    home = f"{bucket}/home"
    dead = lease.Lease(f"{home}/{LOCK}")
    dead._night = "2025-06-01"
    assert dead._take() is None
    monkeypatch.setattr(lease, "_machine", lambda: "another machine")
    assert running_night(home) == "2025-06-01"

    began = time.monotonic()
    with night_lock(home, "2025-06-01") as holder:
        assert holder is None
        assert 1 < time.monotonic() - began < 10
        assert not dead._renew()
        assert running_night(home, watch=True) == "2025-06-01"
    assert running_night(home, watch=True) is None


def test_a_live_holder_of_another_machine_is_never_robbed(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that beats keeps the lock beyond the lease; who asks is told soon, and changes nothing."""
    home = f"{bucket}/home"
    with night_lock(home, "2025-06-01") as holder:
        assert holder is None
        monkeypatch.setattr(lease, "_machine", lambda: "another machine")
        ends = time.monotonic() + 1.5 * lease.LEASE_SECONDS
        while time.monotonic() < ends:
            with night_lock(home, "2025-06-02") as told:
                assert told == "2025-06-01"
            assert running_night(home, watch=True) == "2025-06-01"
        assert json.loads(remote.read(f"{home}/{LOCK}"))["beat"] >= 4


def test_one_of_many_thieves_takes_a_dead_lock(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six threads that all see the lease end take turns: never two hold the lock."""
    home = f"{bucket}/home"
    dead = lease.Lease(f"{home}/{LOCK}")
    assert dead._take() is None
    monkeypatch.setattr(lease, "_machine", lambda: None)
    inside, most, got = [], [], []

    def steal(number: int) -> None:
        with night_lock(home, str(number)) as holder:
            if holder is None:
                inside.append(number)
                most.append(len(inside))
                time.sleep(0.3)
                inside.remove(number)
            got.append(holder)

    threads = [threading.Thread(target=steal, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len(got) == 6
    assert None in got
    assert set(most) == {1}


def test_a_lost_answer_is_no_lost_lock(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put that arrived though its answer did not is the holder's own, in taking and in beating."""
    one, real = lease.Lease(f"{bucket}/{LOCK}"), remote.put_if

    def unanswered(uri: str, content: bytes, etag: str | None) -> None:
        real(uri, content, etag)

    monkeypatch.setattr(remote, "put_if", unanswered)
    assert one._take() is None
    assert one._renew()
    monkeypatch.setattr(remote, "put_if", real)
    assert one._renew()
    one._free()
    assert running_night(bucket) is None


def test_what_is_no_lock_of_ours_stops_nobody(bucket: str) -> None:
    """A torn or foreign object at the lock's place is replaced."""
    remote.write(f"{bucket}/{LOCK}", b"{")
    assert running_night(bucket) is None
    with night_lock(bucket, "2025-06-01") as holder:
        assert holder is None


def test_refused_credentials_stop_the_start_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the right to write, the night does not start, and says which right is missing."""
    with refusing("AccessDenied") as endpoint:
        point_at(endpoint, monkeypatch)
        wanted = pytest.raises(ConfigError, match=r"bucket shop: these credentials may not do this \(AccessDenied\)")
        with wanted, night_lock("s3://shop/home", "2025-06-01"):
            pass
