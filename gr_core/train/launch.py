"""How a training of several ranks is started: torchrun around `python -m gr_core.train`; loads no torch.

All ranks inherit the first process's stdin, so each of them ends when its pipe closes (`--exit-with-stdin`), and torchrun
with them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def is_launched() -> bool:
    """Tell whether this process is a rank of torchrun's already."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first() -> bool:
    """Tell whether this process speaks for all ranks; a process alone does."""
    return os.environ.get("RANK", "0") == "0"


def ranks_asked(run: Path) -> int:
    """Return how many ranks a RUN.json asks for; 1 where that cannot be read (reading the run will say what is wrong)."""
    try:
        values = json.loads(run.read_text(encoding="utf-8"))["config"]["train"].get("distributed", {})
        return int(values.get("replicate", 1)) * int(values.get("shard", 1))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 1


def command(run: Path, arguments: Sequence[str]) -> list[str]:
    """Return the command line of a training: plain Python for one rank, torchrun on this machine for several.

    Args:
        run: RUN.json.
        arguments: Of `python -m gr_core.train`, RUN.json included.
    """
    ranks = ranks_asked(run)
    if ranks <= 1:
        return [sys.executable, "-m", "gr_core.train", *arguments]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *torchrun, "-m", "gr_core.train", *arguments]
