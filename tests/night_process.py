"""A night without Prefect as a process of its own, to be killed: `python -m tests.night_process CONFIG HOME DAY`."""

from __future__ import annotations

import logging
import sys
from datetime import date
from pathlib import Path

import pytest

from tests.beside import score_here, train_here
from tests.plain import run

if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    with pytest.MonkeyPatch.context() as patch:
        score_here(patch)
        train_here(patch)  # a kill meets training as well, and each night saves the starts of processes of its own
        run(Path(sys.argv[1]), Path(sys.argv[2]), date.fromisoformat(sys.argv[3]))
