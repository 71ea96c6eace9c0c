"""The registered model itself, scored in a fresh process as a service would load it: what the gate judges.

MLflow's loader module, the model's own copy of our code, safetensors and JSON: the process starts outside the
checkout, imports no code of ours but the model's, and refuses to unpickle anything.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gr_core.environment import loading_variables
from gr_core.errors import DaybreakError, FormatError
from gr_core.eval.scores import kept
from gr_core.eval.scoring import Scored
from gr_core.registry.base import DATA, check_files
from gr_core.registry.scorer import Request, RequestScorer

PROGRAM = """
import sys
import mlflow.pyfunc

def refuse(event, _):
    if event == "pickle.find_class":
        raise ImportError("the model needs unpickling, which is switched off")

sys.addaudithook(refuse)
mlflow.pyfunc.load_model(sys.argv[1]).get_raw_model().write_scores(*sys.argv[2:])
"""
"""What the fresh process runs: MODEL PACK VOCABULARY OUTPUT, folders. It imports what MLflow puts on its path."""
TOLERANCE = 1e-5
"""How far logits (fp32) of one model may differ between two processes; of logits beyond 1, so much of their size."""


def score(model: Path, checkpoint: Path, pack: Path, vocabulary: Path, work: Path, *, limit_seconds: float) -> Scored:
    """Score a pack by a downloaded model.

    Args:
        model: The model's folder, as the registry gave it.
        checkpoint: What was registered; every file of it must be the model's.
        pack: The pack.
        vocabulary: The pack's vocabulary.
        work: An empty folder.
        limit_seconds: The process is ended after so long.

    Returns:
        What the model's own code returned, with the rows as the pack has them.

    Raises:
        FormatError: The model differs from the checkpoint, does not load or score, or not in time.
        DaybreakError: A signal ended the process.
    """
    digest = check_files(model, checkpoint)
    run_process(model, pack, vocabulary, work / "scores", limit_seconds=limit_seconds)
    found = kept(work / "scores", pack, digest)
    if found is None:
        raise FormatError("it wrote scores of another checkpoint or of other rows", where=str(model))
    return found


def run_process(model: Path, pack: Path, vocabulary: Path, out: Path, *, limit_seconds: float) -> None:
    """Load the model in a fresh process and let it write its logits on the pack to `out`; errors as `score` has them."""
    out.mkdir(parents=True)
    command = [sys.executable, "-P", "-c", PROGRAM, *(str(path.absolute()) for path in (model, pack, vocabulary))]
    try:
        done = subprocess.run(
            [*command, str(out)],
            cwd=out,
            env=loading_variables(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FormatError(f"it did not score the holdout in {limit_seconds:g} s", where=str(model)) from error
    if done.returncode < 0:
        raise DaybreakError(
            f"the process that scores the registered model was ended by signal {-done.returncode}; run the night again",
            where=str(model),
        )
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise FormatError(f"it does not load or score in a fresh process: {last}", where=str(model))


def check_forward(model: Path, requests: Sequence[Request]) -> None:
    """Run a forward pass of a model's checkpoint, by this process's code.

    Args:
        model: The model's folder.
        requests: What it is asked.

    Raises:
        FormatError: It does not give every candidate a score.
    """
    scores = RequestScorer(model / "data" / DATA).score(requests)
    for request, *lists in zip(requests, *scores.values(), strict=True):
        if any(len(values) != len(request["candidates"]) for values in lists):
            raise FormatError(f"uploaded model {model} does not score its input example", where=str(model))


def largest_difference(one: Scored, other: Scored) -> tuple[float | None, bool]:
    """Return the largest difference of two models' logits, None where the rows differ, and whether it is none at all.

    A logit that is not finite differs from every other but its own kind.
    """
    if one.digest != other.digest or one.logits.shape != other.logits.shape:
        return None, False
    a, b = (np.asarray(scored.logits, np.float64) for scored in (one, other))
    same = np.isclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    finite = np.isfinite(a) & np.isfinite(b)
    difference: Any = np.abs(a[finite] - b[finite]).max(initial=0.0)
    return float(difference), bool(same.all())
