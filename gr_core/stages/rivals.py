"""Whom a challenger is measured against, on its own holdout rows: the champion, and the last full retrain.

The last full retrain is the root of the lineage: its newest version that was trained anew, by a full retrain or as a
first night. Each night may lose up to `gate.margin`; against the root the losses may not add up to more than
`gate.cumulative_margin`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gr_core.config_rules import features_of, trained_with
from gr_core.data import vocabulary
from gr_core.errors import ConfigError, FormatError, UsageError
from gr_core.eval.scoring import Scored
from gr_core.lake import store
from gr_core.lake.journal import Champion
from gr_core.lake.lineage import FULL_RETRAIN, Lineage
from gr_core.night import Night
from gr_core.stages import judging, packing, rescoring


@dataclass(frozen=True, kw_only=True, slots=True)
class Holdout:
    """What a version needs to score a night's holdout."""

    pack: dict[str, Any]
    words: dict[str, Any]
    ingested: dict[str, Any]
    buckets: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rivals:
    """Scores of the challenger's rows by earlier versions, in the challenger's order."""

    champion: Scored | None = None
    full_retrain: Scored | None = None
    troubles: list[str] = field(default_factory=list)
    """Reasons to hold: what could not be scored."""


def root(night: Night, standing: Champion | None) -> int | None:
    """Return the version that counts as the last full retrain; None where the challenger is the first of its kind.

    Args:
        night: The challenger's night. A full retrain is measured against the champion's root, any other by its own.
        standing: The champion.
    """
    own = None if night.mode in FULL_RETRAIN else night.parent
    start = own.version if own else standing.version if standing else None
    return Lineage.of(night.journal.entries()).root(start)


def score_all(night: Night, standing: Champion | None, challenger: Scored, holdout: Holdout) -> Rivals:
    """Score the challenger's rows by the champion and by the last full retrain.

    Args:
        night: The challenger's night.
        standing: The champion; None: there is none.
        challenger: The challenger's scores.
        holdout: The night's holdout.
    """
    best = aligned(score_version(night, standing.version, holdout), challenger) if standing else None
    version = root(night, standing)
    if version is None or (standing is not None and version == standing.version):
        return Rivals(champion=best, full_retrain=best if version is not None else None)
    try:
        full = aligned(score_version(night, version, holdout), challenger)
    except (ConfigError, FormatError, UsageError, FileNotFoundError) as error:
        action = night.settings.gate.action
        trouble = (
            f"gate.cumulative.{action}: the last full retrain, version {version}, cannot be scored ({error}); restore it, "
            "retrain in full, or `daybreak promote` by hand"
        )
        return Rivals(champion=best, troubles=[trouble])
    return Rivals(champion=best, full_retrain=full)


def score_version(night: Night, version: int, holdout: Holdout) -> Scored:
    """Score a night's holdout by an earlier version: on the night's pack by an ancestor, else on its own encoding of it.

    Args:
        night: The night.
        version: A registered version.
        holdout: The night's holdout.

    Returns:
        Scores of the same events; a version of another lineage numbers ids differently and packs them in another order.

    Raises:
        FormatError: The version's checkpoint is damaged, or of other actions.
        ConfigError: It reads a feature that the night's source no longer gives.
        FileNotFoundError: It is gone.
        UsageError: It was pruned.
    """
    entries = night.journal.entries()
    payload = judging.registered(entries, version)
    if night.parent is not None and night.parent.version in Lineage.of(entries).descendants([version]):
        return judging.score(night, payload["checkpoint"], holdout.pack, holdout.words, num_threads=2)
    own = {"uri": payload["vocabulary"], "version": vocabulary.load(store.local_copy(payload["vocabulary"])).version}
    name = f"holdout-version-{version}"
    trained = trained_with(entries, version)
    if features_of(trained) != set(night.settings.model.features):
        return rescoring.score_by_own_features(night, trained, payload["checkpoint"], own, holdout.ingested, "holdout")
    rows = packing.encode_pack(night, holdout.ingested, holdout.buckets, own, "holdout", name=name)
    return judging.score(night, payload["checkpoint"], rows, own, num_threads=2)


def aligned(rival: Scored, challenger: Scored) -> Scored:
    """Return a rival's scores in the challenger's row order; equal row sets get equal digests.

    Args:
        rival: The rival's scores, with their own digest.
        challenger: The challenger's.

    Returns:
        The rival's scores with the challenger's digest; unchanged where the rows are not the same.
    """
    place, events = {event: row for row, event in enumerate(rival.events)}, challenger.events
    if len(place) != len(events) or any(event not in place for event in events):
        return rival  # other rows: the digests differ, and the gate holds and says so
    order = np.array([place[event] for event in events], np.int64)
    return replace(
        challenger,
        logits=rival.logits[order],
        labels=rival.labels[order],
        label_known=rival.label_known[order],
        actions=rival.actions,
        action_bits=rival.action_bits,
    )
