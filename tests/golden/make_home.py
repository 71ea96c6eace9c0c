"""Write the golden home of this release: `python -m tests.golden.make_home`, from the checkout, once a release.

Three nights of a tiny feed, packed: what the next release must read and go on from. Left out is what any release makes
again: Prefect's database, compiled kernels, and our own code inside registered models (the reading release's is used).
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from datetime import timedelta
from pathlib import Path

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.lake.journal import Journal, champion
from gr_core.stages import moving, paging
from tests.plain import run

ARCHIVE = Path(__file__).parent / "home.tar.xz"
CONFIG = "golden.toml"
NIGHTS = 3
ROWS = 120
DAYS = [tiny.FIRST_DAY + timedelta(days=n) for n in range(NIGHTS + 1)]
SMALLER = (("width = 16", "width = 8"), ("num_layers = 2", "num_layers = 1"))  # it is committed
_MADE_AGAIN = ("prefect", "compiled", "history")


def make_feed(folder: Path) -> None:
    """Write the raw files of all days, that of the next night too; the same ones each time."""
    for day in DAYS:
        tiny.write_day(folder / "raw", day, rows=ROWS)


def configure(folder: Path) -> Path:
    """Write the config that the home was made with, but for where the raw files lie; returns its path."""
    path = folder / CONFIG
    path.write_text(path.read_text().replace("{root}", str(folder / "raw")))
    return path


def unpack(folder: Path) -> tuple[Path, Path]:
    """Unpack the golden home and make its feed; returns config and home."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    make_feed(folder)
    return configure(folder), folder / "home"


def make(folder: Path) -> None:
    """Run the nights in a folder and leave there what is packed: the config and the home."""
    make_feed(folder)
    plain = tiny.CONFIG.format(root="{root}")
    for size in SMALLER:
        plain = plain.replace(*size)
    (folder / CONFIG).write_text(plain)
    config, home = configure(folder), folder / "home"
    for version, day in enumerate(DAYS[:NIGHTS], start=1):
        run(config, home, day)
        best = champion(Journal(str(home / "lake" / "journal")).entries())
        if best is None or best.version != version:  # held: so few rows
            moving.promote(load_config(config), str(home), version, reason="golden", at_us=version)
        paging.write(str(home), str(day))
    (folder / CONFIG).write_text(plain)
    for path in sorted(home.rglob("*"), reverse=True):
        own = path.relative_to(home).parts
        if path.is_dir() and (path.name in _MADE_AGAIN or (path.name == "code" and own[0] == "mlartifacts")):
            shutil.rmtree(path)
            path.mkdir()


def main() -> None:
    """Make the home in a temporary folder and pack it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            for part in (CONFIG, "home"):
                archive.add(folder / part, arcname=part, filter=_plain)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()
