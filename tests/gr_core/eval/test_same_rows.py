"""Case G2: the challenger is compared with the champion on its own rows, never with a score of other data."""

from __future__ import annotations

import numpy as np
import pytest

from gr_core.config import GateConfig
from gr_core.eval.gate import Scores, decide
from gr_core.eval.metrics import normalized_entropy

DAYS = {"challenger_date": "2025-06-02", "champion_date": "2025-06-01"}


def rows_of(day: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return a day's true logits, labels and users, 6000 rows."""
    rng = np.random.default_rng(int(day[-2:]))
    truth = rng.normal(-0.5, 1.2, 6000)
    labels = (rng.random(6000) < 1 / (1 + np.exp(-truth))).astype(np.int64)
    return truth, labels, [f"u{n % 1500}" for n in range(6000)]


def scored(day: str, ne: float) -> Scores:
    """Return a model's scores of a day with this NE: between the base rate's logit (NE 1) and the truth's."""
    truth, labels, users = rows_of(day)
    rate = np.log(labels.mean() / (1 - labels.mean()))
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        found = normalized_entropy(labels, rate + middle * (truth - rate))
        low, high = (middle, high) if found is not None and found > ne else (low, middle)
    return Scores((rate + low * (truth - rate)).astype(np.float32), labels, users, f"rows of {day}")


@pytest.mark.parametrize(
    ("before", "champion", "promote"), [(0.90, 0.95, True), (0.95, 0.90, False)], ids=["promote", "hold"]
)
def test_a_champions_older_score_decides_nothing(before: float, champion: float, *, promote: bool) -> None:
    """Champion .90 on D-1 and .95 on D, challenger .93 on D: promoted; .95, then .90: held. Both say on which rows."""
    yesterday, today = scored("2025-06-01", before), scored("2025-06-02", champion)
    challenger = scored("2025-06-02", 0.93)

    found = decide(today, challenger, GateConfig(num_resamples=200), **DAYS)
    crossed = decide(yesterday, challenger, GateConfig(num_resamples=200), **DAYS)

    assert found.promote is promote
    assert found.figures["ne_champion"] == pytest.approx(champion, abs=1e-4)
    assert found.figures["ne_challenger"] == pytest.approx(0.93, abs=1e-4)
    assert found.figures["rows_champion"] == found.figures["rows_challenger"] == "rows of 2025-06-02"
    assert not crossed.promote
    assert crossed.reasons[0].startswith("gate.rows: champion and challenger were scored on different rows")
