"""Stages from checkpoint to decision: evaluate the parent, register, gate, finish; and what `status` reads."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import date as Date
from datetime import timedelta
from typing import Any

import numpy as np
import polars as pl

from gr_core import environment
from gr_core.config import Config
from gr_core.errors import UsageError
from gr_core.eval import gate as gates
from gr_core.eval import metrics, progressive, scoring
from gr_core.hashing import fingerprint, is_holdout
from gr_core.lake import store
from gr_core.lake.events import EventTable
from gr_core.lake.journal import Journal, champion, nights, previous
from gr_core.night import STAGE_NOTE, Night, run_stage
from gr_core.registry.mlflow_store import MlflowStore
from gr_core.report.status import STALE_DAYS, build_status, night_object

logger = logging.getLogger(__name__)

SMOOTHING = 20.0  # events of prior weight in the smoothed counts that a first model must beat


def any_due(buckets: Sequence[dict[str, Any]]) -> bool:
    """Tell whether anything came due in any bucket."""
    return any(part["counts"]["due"] for part in buckets)


def evaluate(night: Night, pack: dict[str, Any], words: dict[str, Any]) -> dict[str, Any]:
    """Progressive validation: score the night's new events by the parent, which has not trained on them.

    Returns:
        next_day, late, late_events, new_events; all None or 0 without a parent.
    """
    config = night.settings
    names, supervised = config.source.action_names, config.source.supervised_mask
    identity = {"pack": pack["digest"], "parent": night.parent.checkpoint if night.parent else None}

    def work() -> dict[str, Any]:
        if night.parent is None:
            return progressive.unscored(pack["num_supervised"], names, supervised)
        scored = score(night, night.parent.checkpoint, pack, words)
        newest = store.read_json(store.join(night.parent.checkpoint, "state.json"))["newest_supervised_us"]
        return progressive.next_day_metrics(scored, newest, names, supervised)

    return run_stage(night, "evaluate", identity, work)


def score(
    night: Night, checkpoint: str, pack: dict[str, Any], words: dict[str, Any], *, num_threads: int = 1
) -> scoring.Scored:
    """Score a pack by a checkpoint; ids it does not know read the fallback rows that the child's vocabulary names.

    Returns:
        The scores, logits [N, A] over all actions in bit order (0 where an action is not supervised).
    """
    found = scoring.score_pack(
        store.local_path(checkpoint),
        store.local_path(pack["uri"]),
        vocabulary=store.local_path(words["uri"]),
        num_threads=num_threads,
    )
    logits = np.zeros((len(found.labels), len(night.config["source"]["actions"])), np.float32)
    logits[:, found.action_bits] = found.logits
    return replace(found, logits=logits)


def model_store(night: Night, config: Config) -> MlflowStore:
    """Open the home's model registry."""
    return MlflowStore(environment.tracking_uri(night.home), environment.artifact_root(night.home), config.name)


def register(
    night: Night,
    ingested: dict[str, Any],
    trained: dict[str, Any],
    evaluated: dict[str, Any],
    words: dict[str, Any],
) -> dict[str, Any]:
    """Log the night to MLflow and register its checkpoint, before the gate judges it.

    Returns:
        version and the URI of the night's run.
    """
    config = night.settings
    identity = {"checkpoint": trained["digest"], "night": night.key}

    def work() -> dict[str, Any]:
        models = model_store(night, config)
        run = models.start_night(night.key, params=_parameters(config), tags=_tags(night, ingested))
        models.log_dataset(run, night.table_uri, ingested["bound"], ingested["rows"])
        child = models.child(run, "train")
        models.log(child, trained["metrics"])
        models.finish(child, "FINISHED")
        child = models.child(run, "evaluate")
        models.log(child, progressive.progressive_keys(evaluated))
        models.finish(child, "FINISHED")
        models.log(run, trained["metrics"] | progressive.progressive_keys(evaluated))
        version = models.register(
            run, store.local_path(trained["uri"]), night=night.key, tags={"digest": trained["digest"]}
        )
        return {"version": version, "mlflow": models.link(run)}

    result = run_stage(night, "register", identity, work)
    journal = night.journal
    if all(e.kind != "registered" or e.payload["version"] != result["version"] for e in journal.entries()):
        payload = {
            "version": result["version"],
            "date": night.date,
            "checkpoint": trained["uri"],
            "vocabulary": words["uri"],
            "watermark": trained["watermark"],
            "digest": trained["digest"],
            "config": night.config,
        }
        journal.append("registered", night.key, payload, at_us=night.at_us)
    return result


def gate(
    night: Night, version: dict[str, Any], trained: dict[str, Any], pack: dict[str, Any], words: dict[str, Any]
) -> dict[str, Any]:
    """Judge the challenger against the champion on the same holdout rows, and write the decision to the journal.

    Returns:
        gate (promoted | held), reasons, figures, and the challenger's holdout metrics.
    """
    config = night.settings
    journal = night.journal
    entries = journal.entries()
    standing = champion(entries)
    identity = {
        "version": version["version"],
        "pack": pack["digest"],
        "gate": config.resolved()["gate"],
    }

    def work() -> dict[str, Any]:
        challenger = score(night, trained["uri"], pack, words, num_threads=2)
        rival = None
        if standing is not None:
            rival = score(night, standing.checkpoint, pack, words, num_threads=2)
        names = config.source.action_names
        bit = names.index(config.gate.action)
        known = np.flatnonzero(challenger.label_known >> bit & 1)
        judged = [challenger.event_ids[row] for row in known.tolist()]
        baseline = smoothed_counts(night, config, trained, judged) if rival is None else None
        decision = gates.decide(
            gates.Scores.of(rival, bit) if rival else None,
            gates.Scores.of(challenger, bit),
            config.gate,
            challenger_date=night.date,
            champion_date=standing.date if standing else None,
            baseline=baseline,
            seed=night.seed,
        )
        holdout = metrics.evaluate(
            challenger.labels, challenger.label_known, challenger.logits, names, config.source.supervised_mask
        )
        return {
            "gate": "promoted" if decision.promote else "held",
            "reasons": list(decision.reasons),
            "figures": decision.figures,
            "holdout": holdout,
            "champion": standing.version if standing else None,
        }

    result = run_stage(night, "gate", identity, work)
    if all(e.kind != "decided" or e.night != night.key for e in journal.entries()):
        payload = {
            "decision": "promote" if result["gate"] == "promoted" else "hold",
            "reasons": result["reasons"],
            "version": version["version"],
            "previous": result["champion"],
            "figures": result["figures"],
        }
        journal.append("decided", night.key, payload, at_us=night.at_us)
    return result


def smoothed_counts(night: Night, config: Config, trained: dict[str, Any], event_ids: Sequence[str]) -> Any:
    """Return the gate action's smoothed item rate for each holdout event: the mark a first model must beat.

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
    wanted = pl.DataFrame({"event_id": list(event_ids)}, schema={"event_id": pl.String})
    joined = wanted.join(events.select("event_id", "item_id"), on="event_id", how="left", maintain_order="left")
    joined = joined.join(rates, on="item_id", how="left", maintain_order="left")
    return joined["rate"].fill_null(overall).to_numpy()


def finish(night: Night, results: dict[str, Any]) -> dict[str, Any]:
    """Write the night's status object to the journal and project it to MLflow; a finished night is immutable.

    Returns:
        The night as in `daybreak status --json`.
    """
    config = night.settings
    status = _status_object(night, config, results)
    journal = night.journal
    journal.append(
        "finished",
        night.key,
        {"state": status["state"], "bound": results["ingest"]["bound"], "status": status},
        at_us=night.at_us,
    )
    if "register" in results:
        models = model_store(night, config)
        run = models.start_night(night.key, params={}, tags={})
        models.log(
            run,
            metrics.metric_keys("holdout", results["gate"]["holdout"])
            | {f"perf/seconds/{k}": v for k, v in status["seconds"].items()},
        )
        models.tag(run, {"gate": status["gate"], "reasons": "; ".join(status["reasons"])})
        models.finish(run, "FINISHED")
        repair_aliases(night, models)
    return status


def repair_aliases(night: Night, models: MlflowStore) -> None:
    """Set the registry's aliases to what the journal says."""
    entries = night.journal.entries()
    chosen, before = champion(entries), previous(entries)
    newest = next((e.payload["version"] for e in reversed(entries) if e.kind == "registered"), None)
    models.repair(
        champion=chosen.version if chosen else None, previous=before.version if before else None, challenger=newest
    )


def _status_object(night: Night, config: Config, results: dict[str, Any]) -> dict[str, Any]:
    ingested, buckets = results["ingest"], results["sequences"]
    counts = {name: sum(part["counts"][name] for part in buckets) for name in buckets[0]["counts"]}
    names, supervised = config.source.action_names, config.source.supervised_mask
    evaluated = results.get("evaluate") or progressive.unscored(counts["next_day"], names, supervised)
    decision = results.get("gate")
    record = nights(night.journal.entries())[night.key]
    stages = ("ingest", "sequences", "pack", "evaluate", "train", "register", "gate")
    return {
        "date": night.date,
        "mode": night.mode,
        "state": "completed" if decision else "no_data",
        "version": results["register"]["version"] if decision else None,
        "parent": night.parent.version if night.parent else None,
        "gate": decision["gate"] if decision else "none",
        "reasons": decision["reasons"] if decision else ["nothing due"],
        "rows": ingested["rows"],
        "due_events": counts["due"],
        "supervised_events": counts["train"],
        "new_events": counts["next_day"],
        "holdout_events": counts["due_holdout"],
        "late_events": evaluated["late_events"],
        "next_day": evaluated["next_day"],
        "seconds": {name: _seconds(results.get(name)) for name in stages},
        "attempts": len(record.attempts),
        **({"bootstrap_rows": ingested["bootstrap"]} if ingested["bootstrap"] and night.parent is None else {}),
        **({"mlflow": results["register"]["mlflow"]} if decision else {}),
    }


def _seconds(result: Any) -> float:
    parts = result if isinstance(result, list) else [result] if result else []
    return round(sum(float(part["seconds"]) for part in parts), 3)


def fail(night: Night, error: BaseException) -> None:
    """Write to the journal that this attempt failed or was cancelled; the next one redoes only what is missing."""
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith(STAGE_NOTE)]
    stage = notes[-1].removeprefix(STAGE_NOTE) if notes else "flow"
    kind = "failed" if isinstance(error, Exception) else "cancelled"
    payload = {"stage": stage, "error": f"{type(error).__name__}: {error}"}
    night.journal.append(kind, night.key, payload, at_us=night.at_us)


def result_digest(result: dict[str, Any]) -> str:
    """Return a stage result's digest; for results without files, that of the values themselves."""
    ignored = ("seconds", "reused", "fingerprint")
    values = {key: value for key, value in result.items() if key not in ignored}
    return str(result.get("digest") or fingerprint(values))


def finished(home: str, key: str) -> dict[str, Any] | None:
    """Return a finished night's object, or None when it has not finished; reads the journal alone."""
    record = nights(Journal(store.join(home, "lake", "journal")).entries()).get(key)
    return night_object(record) if record is not None and record.is_finished else None


def status(config: Config, home: str, today: Date, running: str | None = None) -> dict[str, Any]:
    """Return the object of `daybreak status --json`."""
    entries = Journal(store.join(home, "lake", "journal")).entries()
    stale_days = None if config.source.world else STALE_DAYS  # an embedded world's days are not the calendar's
    return build_status(entries, today=today, running=running, stale_days=stale_days)


def next_day(config: Config, home: str) -> Date:
    """Return the day after the newest night, the newest itself while it is unfinished, or the world's first day.

    Raises:
        UsageError: There is no night yet, and the source is no embedded world.
    """
    records = nights(Journal(store.join(home, "lake", "journal")).entries())
    plain = [record for key, record in records.items() if key == record.date]
    if plain:
        newest = max(plain, key=lambda record: record.date)
        return Date.fromisoformat(newest.date) + timedelta(days=int(newest.is_finished))
    if config.source.world is None:
        raise UsageError("--next needs a night to count from; run the first with --date YYYY-MM-DD", where="next")
    return config.source.world.start


def _parameters(config: Config) -> dict[str, Any]:
    resolved = config.resolved()
    sections = ("sequences", "pack", "model", "train", "gate")
    return {f"{name}.{key}": value for name in sections for key, value in resolved[name].items()}


def _tags(night: Night, ingested: dict[str, Any]) -> dict[str, str]:
    bound = ingested["bound"]
    return {
        "date": night.date,
        "mode": night.mode,
        "parent": str(night.parent.version if night.parent else None),
        "bound.commit": str(bound["commit"]),
        "bound.delta_version": str(bound["delta_version"]),
    }
