"""The gate: champion and challenger on the same holdout rows, and the decision in the journal."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import polars as pl

from gr_core.config import Config
from gr_core.eval import gate as gates
from gr_core.eval import metrics, scoring, slices, vetoes
from gr_core.hashing import is_holdout
from gr_core.lake.events import EventTable
from gr_core.lake.journal import Champion, champion
from gr_core.lake.predecessors import held_for_lineage
from gr_core.night import Night, run_stage
from gr_core.stages import evaluating, judging, rivals, served, slicing

logger = logging.getLogger(__name__)

SMOOTHING = 20.0  # events of prior weight in the smoothed counts that a first model must beat
KEYS = {"user_id": pl.String, "shown_at": pl.Int64, "event_id": pl.String}  # `Scored.events`


def gate(
    night: Night,
    version: dict[str, Any],
    trained: dict[str, Any],
    pack: dict[str, Any],
    words: dict[str, Any],
    ingested: dict[str, Any],
    buckets: list[dict[str, Any]],
) -> dict[str, Any]:
    """Judge the challenger against the champion on the same holdout rows, and write the decision to the journal.

    What is judged is the registered model, downloaded and loaded in a fresh process (stages.served); whom it is measured
    against says stages.rivals.

    Returns:
        gate (promoted | held), reasons, figures, the challenger's holdout metrics, and slices: those of challenger and
        champion (`slices.measure`, each row with role and model).
    """
    config = night.settings
    # An earlier decision of this unfinished night is being made again: it does not judge itself.
    entries = [e for e in night.journal.entries() if e.kind != "decided" or e.night != night.key]
    standing = champion(entries)
    holdout = rivals.Holdout(pack=pack, words=words, ingested=ingested, buckets=buckets)
    rolled_back = held_for_lineage(entries, night.parent.version if night.parent else None)
    identity = {
        "version": version["version"],
        "pack": pack["digest"],
        "gate": config.resolved()["gate"],
        "champion": standing.version if standing else None,
        "full_retrain": rivals.root(night, standing),
        "findings": ingested.get("findings", []),
        "slices": [one.model_dump(mode="json") for one in config.evaluation.slices],
        **({"rolled_back": rolled_back} if rolled_back else {}),
    }

    def work() -> dict[str, Any]:
        registered = score_registered(night, version["version"], trained, holdout)
        challenger = registered.scored
        others = rivals.score_all(night, standing, challenger, holdout)
        rival, data_ok = others.champion, all(found["level"] != "hold" for found in identity["findings"])
        parts = slicing.of(night, pack, challenger)
        decision = gates.held(decide(night, trained, challenger, others, standing, data_ok=data_ok), rolled_back)
        names, supervised = config.source.action_names, config.source.supervised_mask
        measured, bit = (challenger.labels, challenger.label_known, challenger.logits), names.index(config.gate.action)
        decision = vetoes.with_vetoes(decision, rival, challenger, parts, config.gate, bit=bit, seed=night.seed)
        decision = _with_troubles(decision, [*registered.troubles, *others.troubles])
        return {
            "gate": "promoted" if decision.promote else "held",
            "reasons": [*decision.reasons, *(found["message"] for found in identity["findings"])],
            "figures": decision.figures | registered.figures | {"full_retrain": identity["full_retrain"]},
            "holdout": metrics.evaluate(*measured, names, supervised),
            "champion": standing.version if standing else None,
            "slices": _sliced(config, parts, (challenger, version["version"]), (rival, standing)),
        }

    result = run_stage(night, "gate", identity, work)
    evaluating.discard_scores(trained)
    _write_decision(night, version["version"], result)
    return result


def _sliced(
    config: Config,
    parts: list[slices.Slicing],
    challenger: tuple[scoring.Scored, int],
    rival: tuple[scoring.Scored | None, Champion | None],
) -> list[dict[str, Any]]:
    """Return the slices of the challenger, and of the champion where it was scored on the same rows."""
    names, supervised = config.source.action_names, config.source.supervised_mask
    scored, standing = rival
    models = [challenger]
    if scored is not None and standing is not None and scored.digest == challenger[0].digest:
        models.append((scored, standing.version))
    measured = (slicing.named(slices.measure(one, parts, names, supervised), "holdout", v) for one, v in models)
    return [row for rows in measured for row in rows]


def _write_decision(night: Night, version: int, result: dict[str, Any]) -> None:
    """Append the decision to the journal, unless its newest one on this night is the same."""
    payload = {
        "decision": "promote" if result["gate"] == "promoted" else "hold",
        "reasons": result["reasons"],
        "version": version,
        "previous": result["champion"],
        "figures": result["figures"],
    }
    own = [e.payload for e in night.journal.entries() if e.kind == "decided" and e.night == night.key]
    if not own or any(own[-1][key] != payload[key] for key in ("decision", "version")):
        night.journal.append("decided", night.key, payload, at_us=night.at_us)


def decide(
    night: Night,
    trained: dict[str, Any],
    challenger: scoring.Scored,
    others: rivals.Rivals,
    standing: Champion | None,
    *,
    data_ok: bool,
) -> gates.Decision:
    """Compare the challenger's scores with the champion's on the same events, or with smoothed counts without one.

    Args:
        night: The challenger's night.
        trained: Its training's result; without a champion its watermark bounds the counts.
        challenger: Its scores of the holdout, all actions in bit order.
        others: The rivals' scores of the same rows.
        standing: The champion.
        data_ok: The night's data checks are green.
    """
    config, rival, full = night.settings, others.champion, others.full_retrain
    bit = config.source.action_names.index(config.gate.action)
    known = np.flatnonzero(challenger.label_known >> bit & 1)
    judged = pl.DataFrame(challenger.events, schema=KEYS, orient="row")[known]
    return gates.decide(
        gates.Scores.of(rival, bit) if rival else None,
        gates.Scores.of(challenger, bit),
        config.gate,
        data_ok=data_ok,
        challenger_date=night.date,
        champion_date=_before(night, standing) if standing else None,
        baseline=smoothed_counts(night, config, trained, judged) if rival is None else None,
        full_retrain=gates.Scores.of(full, bit) if full else None,
        seed=night.seed,
    )


def _with_troubles(decision: gates.Decision, troubles: list[str]) -> gates.Decision:
    """Hold where the registered model or a rival could not be judged; what else was found stands behind it."""
    if not troubles:
        return decision
    return gates.Decision(False, [*troubles, *([] if decision.promote else decision.reasons)], decision.figures)


def score_registered(night: Night, version: int, trained: dict[str, Any], holdout: rivals.Holdout) -> served.Served:
    """Score the holdout by the registered challenger; see `served.score`."""

    def own(kept: bool) -> scoring.Scored:  # noqa: FBT001 -- a callback with one argument
        if kept:
            return score_challenger(night, trained, holdout.pack, holdout.words)
        return judging.score(night, trained["uri"], holdout.pack, holdout.words, num_threads=2)

    return served.score(night, version, trained, holdout.pack, holdout.words, own)


def _before(night: Night, standing: Champion) -> str | None:
    """Return the data day that the challenger's must lie after; a full retrain may be of the champion's own day."""
    is_as_new = night.mode == "full_retrain" and night.date >= standing.date
    return None if is_as_new else standing.date


def score_challenger(
    night: Night, trained: dict[str, Any], pack: dict[str, Any], words: dict[str, Any]
) -> scoring.Scored:
    """Return the challenger's scores of the holdout: those from beside training where they are of this very pack."""
    found = evaluating.kept_scores(trained, pack)
    if found is not None:
        logger.info("the challenger was scored on this holdout beside training; its scores are used")
        return judging.by_action(night, found)
    return judging.score(night, trained["uri"], pack, words, num_threads=2)


def smoothed_counts(night: Night, config: Config, trained: dict[str, Any], judged: pl.DataFrame) -> Any:
    """Return the gate action's smoothed item rate of each event in `judged` (some of KEYS): the mark a first model must beat.

    Counts what trained users did up to the night's bound; item rate = (positives + k * overall) / (events + k).
    """
    bit = 1 << config.source.action_names.index(config.gate.action)
    columns = ["event_id", "user_id", "item_id", "actions", "known", "commit", "shown_at"]
    bound = trained["watermark"]
    events = EventTable(night.table_uri, config).read(bound["delta_version"], columns=columns)
    users = events["user_id"].unique()
    held = pl.Series([u for u in users if is_holdout(u, config.lake.holdout_fraction)], dtype=pl.String)
    inside = (
        (pl.col("commit") <= bound["commit"])
        & (pl.col("shown_at").dt.epoch("us") < bound["shown_before_us"][config.gate.action])
        & (pl.col("known") & bit != 0)
        & ~pl.col("user_id").is_in(held.implode())
    )
    seen = events.filter(inside).with_columns(label=(pl.col("actions") & bit != 0).cast(pl.Float64))
    overall = float(seen["label"].mean() or 0.0)  # type: ignore[arg-type]  # a float column's mean
    rates = seen.group_by("item_id").agg(rate=(pl.col("label").sum() + SMOOTHING * overall) / (pl.len() + SMOOTHING))
    items = events.select("user_id", pl.col("shown_at").dt.epoch("us"), "event_id", "item_id")
    joined = judged.join(items, on=judged.columns, how="left", maintain_order="left")
    joined = joined.join(rates, on="item_id", how="left", maintain_order="left")
    return joined["rate"].fill_null(overall).to_numpy()
