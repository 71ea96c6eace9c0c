"""Score a night's rows by any registered model: on the night's pack where it numbers ids alike, else on its own encoding.

A night's pack is encoded by its own vocabulary, in which no row of its ancestors moved. Another lineage's model numbers
its ids differently: the same events are encoded anew by that model's vocabulary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gr_core.config_rules import features_of, trained_with
from gr_core.data import vocabulary
from gr_core.errors import FormatError
from gr_core.eval import scoring
from gr_core.lake import manifests, store
from gr_core.lake.entries import Entry
from gr_core.lake.ledger import NightRecord
from gr_core.lake.lineage import Lineage
from gr_core.lake.moved import rebased
from gr_core.night import Night
from gr_core.stages import judging, packing, sequencing
from gr_core.stages.sequencing import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What is needed to score with a model."""

    version: int | None
    """None: a checkpoint that is no registered version."""
    checkpoint: str
    vocabulary: str

    @classmethod
    def of(cls, entries: Sequence[Entry], version: int) -> Model:
        """Return a registered version; UsageError where there is none."""
        payload = judging.registered(entries, version)
        return cls(version=version, checkpoint=payload["checkpoint"], vocabulary=payload["vocabulary"])

    def state(self) -> dict[str, Any]:
        """Return the checkpoint's state.json; FileNotFoundError where it is gone."""
        state: dict[str, Any] = store.read_json(store.join(self.checkpoint, "state.json"))
        return state


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows of one role of a night, and what they were made from."""

    role: Role
    pack: dict[str, Any]
    """The night's PackRef."""
    words: dict[str, Any]
    """The night's vocabulary (uri, version)."""
    ingested: dict[str, Any]
    buckets: list[dict[str, Any]]


def pinned(record: NightRecord, home: str) -> Night:
    """Return a night as its last attempt had it; its stages' results are read, never made again."""
    values = {key: value for key, value in record.opened.items() if key in Night.__slots__}
    night = Night.from_json({**values, "parent": record.pinned_parent})
    config = next(attempt["config"] for attempt in reversed(record.attempts) if "config" in attempt)
    return replace(night, home=home, config=config, finished=True)


def recorded(night: Night, stage: str, part: str = "") -> dict[str, Any]:
    """Return what a stage of the night recorded, whether or not the night finished; FormatError where it did not."""
    uri = night.uri(stage, "manifests", f"{stage}{'-' if part else ''}{part}.json")
    manifest = rebased(
        manifests.recorded(uri, f"night {night.key} has no record of stage {stage} {part}".rstrip()), night.home
    )
    return {**manifest["result"], "fingerprint": manifest["fingerprint"]}


def score(
    night: Night, entries: Sequence[Entry], model: Model, rows: Rows, *, into: Night | None = None
) -> scoring.Scored:
    """Score the rows by a model.

    Args:
        night: The night.
        entries: The whole journal.
        model: The model.
        rows: The rows.
        into: The night in the place where an encoding of the model's own is written; None: the night's folder.

    Returns:
        The scores over all actions, in the order of the pack that was read; `rivals.aligned` brings two of them into one.

    Raises:
        FormatError: Its checkpoint or vocabulary is damaged; or it has no version, and other features than the night encodes.
        ConfigError: It reads a feature that the night's source no longer gives.
    """
    parent = night.parent.version if night.parent else None
    if model.vocabulary == rows.words["uri"] or model.version in _ancestors(entries, parent):
        return judging.score(night, model.checkpoint, rows.pack, rows.words)
    trained = None if model.version is None else trained_with(entries, model.version)
    if trained is not None and features_of(trained) != set(night.settings.model.features):
        words = {"uri": model.vocabulary, "version": vocabulary.load(store.local_copy(model.vocabulary)).version}
        return score_by_own_features(night, trained, model.checkpoint, words, rows.ingested, rows.role)
    return score_anew(into or night, model, rows.ingested, rows.buckets, rows.role)


def score_anew(
    night: Night, model: Model, ingested: dict[str, Any], buckets: list[dict[str, Any]], role: Role
) -> scoring.Scored:
    """Score a night's sequences by a model, encoded by the model's own vocabulary.

    Args:
        night: The night in the place where the encoding is written.
        model: The model.
        ingested: What the night's ingestion returned.
        buckets: What `sequencing.build_bucket` returned, bucket by bucket.
        role: Which of its rows.

    Raises:
        FormatError: As `score`.
    """
    found = vocabulary.load(store.local_copy(model.vocabulary))
    missing = set(night.settings.model.features) - found.tables.keys()
    if missing:
        raise FormatError(
            f"the model at {model.checkpoint} knows no ids of {sorted(missing)}, which night {night.key} encodes; score it "
            "on nights of its own features",
            where=model.vocabulary,
        )
    own = {"uri": model.vocabulary, "version": found.version}
    pack = packing.encode_pack(night, ingested, buckets, own, role, name=f"{role}-of-{found.version}")
    return judging.score(night, model.checkpoint, pack, own)


def score_by_own_features(
    night: Night, trained: dict[str, Any], checkpoint: str, words: dict[str, Any], ingested: dict[str, Any], role: Role
) -> scoring.Scored:
    """Score a night's rows by a version of other features: from sequences of its own, made and left in a scratch folder.

    Args:
        night: The night; what it is due to, and whose rows they are.
        trained: The resolved config that the version was trained with.
        checkpoint: The version's.
        words: The version's vocabulary (uri, version).
        ingested: What the night's ingestion returned.
        role: Which of its rows.

    Returns:
        The scores over all of the night's actions, in the order of the version's own pack.

    Raises:
        ConfigError: The version reads a feature that the night's source no longer gives.
    """
    config = night.config
    train = {**config["train"], "position_feature": None, "position_weights": {}, "planned_rows": {}}
    own = {name: trained[name] for name in ("model", "vocabulary", "sequences")}
    own |= {"pack": {**trained["pack"], "event_weight": None}, "train": train}
    with tempfile.TemporaryDirectory(prefix="daybreak-rival-") as folder:
        alike = replace(night, config={**config, **own})
        scratch = replace(alike, home=folder, finished=False)
        every = range(night.settings.lake.num_buckets)
        buckets = [sequencing.build_bucket(alike, ingested, bucket, into=scratch) for bucket in every]
        rows = packing.encode_pack(scratch, ingested, buckets, words, role, name=role)
        return judging.score(night, checkpoint, rows, words, num_threads=2)


def _ancestors(entries: Sequence[Entry], version: int | None) -> set[int]:
    """Return a version and all that it was warm-started from."""
    lineage, found = Lineage.of(entries), set()
    while version is not None:
        found.add(version)
        version = lineage.parents.get(version)
    return found
