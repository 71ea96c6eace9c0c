"""The challenger as it was registered: downloaded, compared, loaded in a fresh process, scored on the holdout.

Its scores must equal those of this night's own evaluation (case G3: train/serve skew); else the gate holds.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gr_core.errors import FormatError, UsageError
from gr_core.eval.scoring import Scored
from gr_core.lake import store
from gr_core.night import Night
from gr_core.registry import fresh
from gr_core.stages import judging

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The challenger's scores, as the gate takes them."""

    scored: Scored
    """All actions in bit order: the registered model's, or the night's own where that gave none."""
    troubles: list[str] = field(default_factory=list)
    """Reasons to hold."""
    figures: dict[str, Any] = field(default_factory=dict)


def score(
    night: Night,
    version: int,
    trained: dict[str, Any],
    pack: dict[str, Any],
    words: dict[str, Any],
    own: Callable[[bool], Scored],
) -> Served:
    """Score the holdout by the registered challenger, and compare with the night's own evaluation.

    Args:
        night: The night.
        version: The challenger's version.
        trained: Its training's result.
        pack: The holdout pack.
        words: The night's vocabulary.
        own: Returns the night's own scores of the checkpoint, all actions in bit order; True: from beside training
            where they are kept, False: made now.

    Returns:
        The scores with what speaks against them.

    Raises:
        StoreUnavailable: The registry or its artifacts did not answer.
        DaybreakError: A signal ended the process that scored.
    """
    where = f"gate.artifact: registered version {version}"
    expected = own(True)
    with tempfile.TemporaryDirectory(prefix="daybreak-served-") as folder:
        try:
            model = judging.model_store(night, night.settings).download(version, Path(folder) / "model")
            scored = fresh.score(
                model,
                store.local_copy(trained["uri"]),
                store.local_copy(pack["uri"]),
                store.local_copy(words["uri"]),
                Path(folder),
                limit_seconds=night.settings.nightly.stage_timeout_seconds,
            )
        except (FormatError, UsageError) as error:
            logger.warning("%s: %s", where, error.message)
            return Served(scored=expected, troubles=[f"{where}: {error.message}"])
    found = judging.by_action(night, scored)
    difference, equal = fresh.largest_difference(found, expected)
    if not equal:  # kept scores may come from another device: only this process's own speak against a model
        expected = own(False)
        difference, equal = fresh.largest_difference(found, expected)
    figures = {"artifact_difference": difference}
    if equal:
        return Served(scored=found, figures=figures)
    told = "on other rows" if difference is None else f"with logits up to {difference:.2g} apart"
    trouble = (
        f"{where} scores the holdout {told} from the night's own evaluation, at most {fresh.TOLERANCE:g} is allowed"
    )
    return Served(scored=found, troubles=[trouble], figures=figures)
