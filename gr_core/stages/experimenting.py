"""The last stage of an experiment: its model beside its night's challenger on the same rows. Decides nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from gr_core.config import Config
from gr_core.errors import FormatError
from gr_core.eval import metrics, pairing, scoring, slices
from gr_core.experiments import changes, config_of, told
from gr_core.lake import manifests, store
from gr_core.lake.journal import nights
from gr_core.lake.moved import rebased
from gr_core.night import Night, run_stage
from gr_core.stages import evaluating, gating, judging, rivals, slicing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rival:
    """What an experiment is set beside."""

    version: int
    checkpoint: str
    is_parent: bool
    """The night has no challenger yet, so it is the parent of both."""


def judge(
    night: Night, version: dict[str, Any], trained: dict[str, Any], pack: dict[str, Any], words: dict[str, Any]
) -> dict[str, Any]:
    """Score an experiment on the holdout, and its night's challenger (without one: the parent) on the same rows.

    Args:
        night: The experiment.
        version: What `judging.register` returned.
        trained: What its training returned.
        pack: Its holdout pack.
        words: Its vocabulary.

    Returns:
        gate ("none"), reasons (what the config changes, and how NE compares), figures (version, rows, and the pairs
        {"holdout/<metric>/<action>": {"a", "b", "delta", "low", "high"}}: a the other's, b the experiment's), holdout, slices (of its own model).
    """
    config = night.settings
    record = nights(night.journal.entries())[str(night.beside)]
    rival = _rival(night, record.version, record.checkpoint)
    changed = changes(config_of(record), night.config)
    identity = {
        "version": version["version"],
        "pack": pack["digest"],
        "gate": config.resolved()["gate"],
        "rival": None if rival is None else [rival.version, rival.checkpoint],
        "difference": changed,
        "slices": [one.model_dump(mode="json") for one in config.evaluation.slices],
    }

    def work() -> dict[str, Any]:
        mine = gating.score_challenger(night, trained, pack, words)
        names, supervised = config.source.action_names, config.source.supervised_mask
        found = _paired(night, rival, mine, pack, words)
        figures = {"version": rival.version if rival else None, "rows": mine.digest, "pairs": found}
        said = _said(config, rival, found)
        sliced = slices.measure(mine, slicing.of(night, pack, mine), names, supervised)
        return {
            "gate": "none",
            "reasons": [*([told(changed)] if changed else ["the night's own config"]), *said],
            "figures": figures,
            "holdout": metrics.evaluate(mine.labels, mine.label_known, mine.logits, names, supervised),
            "champion": None,
            "slices": slicing.named(sliced, "holdout", version["version"]),
        }

    result = run_stage(night, "gate", identity, work)
    evaluating.discard_scores(trained)
    return result


def _rival(night: Night, version: int | None, checkpoint: str | None) -> _Rival | None:
    if version is not None and checkpoint is not None:
        return _Rival(version=version, checkpoint=checkpoint, is_parent=False)
    if night.parent is not None:
        return _Rival(version=night.parent.version, checkpoint=night.parent.checkpoint, is_parent=True)
    return None


def _paired(
    night: Night, rival: _Rival | None, mine: scoring.Scored, pack: dict[str, Any], words: dict[str, Any]
) -> dict[str, pairing.Paired]:
    """Return both models' metrics on the same rows; none where the other's cannot be scored on them."""
    if rival is None:
        return {}
    try:
        if rival.is_parent:
            theirs = judging.score(night, rival.checkpoint, pack, words, num_threads=2)
        else:
            # by the night's own pack: an experiment with another vocabulary numbers ids differently
            rows, numbers = _of_night(night, "pack-holdout"), _of_night(night, "vocabulary")
            theirs = judging.score(night, rival.checkpoint, rows, numbers, num_threads=2)
        theirs = rivals.aligned(theirs, mine)
    except (FormatError, FileNotFoundError) as error:
        logger.warning("experiment %s is not compared with version %d: %s", night.key, rival.version, error)
        return {}
    if theirs.digest != mine.digest:
        logger.warning("experiment %s was scored on other rows than version %d", night.key, rival.version)
        return {}
    source, gate = night.settings.source, night.settings.gate
    found = pairing.pair(theirs, mine, source.action_names, source.supervised_mask, gate, seed=night.seed)
    return pairing.flat("holdout", found)


def _of_night(night: Night, manifest: str) -> dict[str, Any]:
    """Return what a stage of the experiment's night recorded."""
    uri = store.join(night.home, "nights", str(night.beside), "manifests", f"{manifest}.json")
    found = manifests.recorded(uri, f"night {night.beside} has no record of {manifest}")
    return dict(rebased(found, night.home)["result"])


def _said(config: Config, rival: _Rival | None, found: dict[str, pairing.Paired]) -> list[str]:
    """Return how the two compare on the gate's action, as a person reads it."""
    if rival is None:
        return []
    who = f"{'the parent' if rival.is_parent else 'the challenger'}, version {rival.version}"
    pair = found.get(f"holdout/ne/{config.gate.action}")
    if pair is None or pair["a"] is None or pair["b"] is None:
        return [f"not compared with {who}: no common rows with both labels"]
    a, b = pair["a"], pair["b"]
    low, high = (None if pair[end] is None else 100.0 * float(pair[end] or 0.0) / a for end in ("low", "high"))
    interval = "" if low is None or high is None else f" [{low:+.2f}, {high:+.2f}]"
    return [f"against {who}, same rows: NE {config.gate.action} {b:.4f}, {100.0 * (b - a) / a:+.2f} %{interval}"]
