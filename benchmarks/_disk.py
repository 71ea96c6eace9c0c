"""A disk that is full, and a home that is read-only: on a small tmpfs in a mount namespace of the trial's own."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks import _faults
from benchmarks._faults import Command
from benchmarks._report import Figure, Report, console
from gr_core.config import Config

SPARE_BYTES = (300_000, 1_500_000, 4_000_000)
"""Free on the full disk when the night starts: too little for its first stages, its packs, its model."""
_LATER = "2g"
_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


class Stand(Protocol):
    """What a trial is compared with; see `benchmarks.faults.Stand`."""

    config: Config
    key: str
    command: Command
    calm: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What the disturbed run said, and what stands after the run after it."""

    status: int
    error: dict[str, Any] | None
    """Of the one object on stdout; None where there was none, or more than that."""
    differs: list[str]


def is_possible() -> bool:
    """Tell whether this system lets a user mount a tmpfs of his own."""
    if shutil.which(_NAMESPACE[0]) is None:
        return False
    script = "mount -t tmpfs -o size=1m tmpfs /mnt"
    return subprocess.run([*_NAMESPACE, "sh", "-c", script], capture_output=True, check=False).returncode == 0


def measure(report: Report, base: Path, work: Path, stand: Stand, *, quick: bool) -> None:
    """Add the figures of the full disk and of the read-only home."""
    if not is_possible():
        report.conditions["disk"] = "not measured: this system lets no user mount a tmpfs"
        return
    used = sum(path.stat().st_size for path in base.rglob("*") if path.is_file())
    blocks = 4096 * sum(1 for _ in base.rglob("*"))  # a file takes whole pages
    wanted = SPARE_BYTES[1:2] if quick else SPARE_BYTES
    full = [_trial(base, work / f"full-{spare}", stand, size=used + blocks + spare) for spare in wanted]
    locked = [_trial(base, work / "read-only", stand, size=None)]
    for name, own in (("full_disk", full), ("read_only", locked)):
        clear = sum(one.error is not None and one.status in (1, 2) for one in own)
        equal = sum(not one.differs for one in own)
        for what, value in (("one_clear_error", clear), ("nights_as_undisturbed", equal)):
            report.figures[f"{name}/{what}"] = Figure(value=value, unit=f"of {len(own)}", at_least=len(own))
    report.conditions["disk"] = [
        {"status": one.status, "error": one.error, "differs": one.differs} for one in (*full, *locked)
    ]


def _trial(base: Path, folder: Path, stand: Stand, *, size: int | None) -> Told:
    """Run the night on a full (size in bytes) or read-only (None) tmpfs, mend that, and run it again."""
    folder.mkdir(parents=True)
    place = folder / "disk"
    place.mkdir()
    home = place / "home"
    night = shlex.join(stand.command(home))
    look = shlex.join([sys.executable, "-c", _LOOK.format(module=_faults.__name__), str(home), stand.key])
    limit = _LATER if size is None else str(size)
    script = f"""
mount -t tmpfs -o size={limit} tmpfs {shlex.quote(str(place))} || exit 99
cp -a {shlex.quote(str(base))} {shlex.quote(str(home))} || exit 98
{"mount -o remount,ro " + shlex.quote(str(place)) if size is None else ""}
{night} > first.out 2> first.log; echo $? > first.status
mount -o remount,rw,size={_LATER} {shlex.quote(str(place))} || exit 97
{night} > last.out 2> last.log; echo $? > last.status
{look} > stands.json
"""
    config = folder / "config.json"
    config.write_text(json.dumps(stand.config.resolved()))
    _faults.run([*_NAMESPACE, "sh", "-c", script], folder)
    status = _text(folder / "first.status")
    try:
        found = json.loads((folder / "stands.json").read_text())
    except (OSError, ValueError):
        found = {"state": f"unknown: {_text(folder / 'log')[-200:]} {_text(folder / 'last.log')[-300:]}"}
    differs = _faults.differing(json.loads(json.dumps(stand.calm)), found)
    told = Told(status=int(status or -1), error=_error(_text(folder / "first.out")), differs=differs)
    console.print(
        f"disk of {limit}{' read-only' if size is None else ''}: status {told.status}, {told.error}, {differs}"
    )
    return told


_LOOK = (
    "import json, sys; from pathlib import Path; import {module} as faults; from gr_core.config import parse_config; "
    "config = parse_config(json.loads(Path('config.json').read_text())); "
    "print(json.dumps(faults.standing(config, Path(sys.argv[1]), sys.argv[2])))"
)


def _text(path: Path) -> str:
    return path.read_text(errors="replace").strip() if path.exists() else ""


def _error(out: str) -> dict[str, Any] | None:
    """Return the error of an output that is exactly one object with a remedy in it, and no raw exception."""
    try:
        error = json.loads(out)["error"]
    except (ValueError, KeyError, TypeError):
        return None
    named = error["type"] in ("StoreFull", "UsageError", "StoreUnavailable")
    return dict(error) if named else None
