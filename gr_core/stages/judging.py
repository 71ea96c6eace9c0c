"""Stages around the decision: evaluate the parent, register, finish; the gate itself stands in gating."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gr_core import environment
from gr_core.config import Config
from gr_core.config_rules import trained_with
from gr_core.errors import DaybreakError, FormatError, UsageError
from gr_core.eval import metrics, next_night, progressive, scoring, slices
from gr_core.hashing import fingerprint
from gr_core.lake import store
from gr_core.lake.events import EventTable
from gr_core.lake.journal import Entry, challenger, champion, nights, previous
from gr_core.lake.pruned import refuse_version
from gr_core.night import STAGE_NOTE, Night, run_stage
from gr_core.registry import recorded
from gr_core.registry.mlflow_store import MlflowStore
from gr_core.revision import git_revision
from gr_core.stages import restoring, slicing
from gr_core.train.series import step_metrics

logger = logging.getLogger(__name__)

_DRIFT = ("figures", "metrics", "triggers")


def any_due(buckets: Sequence[dict[str, Any]]) -> bool:
    """Tell whether anything came due in any bucket."""
    return any(part["counts"]["due"] for part in buckets)


def evaluate(night: Night, pack: dict[str, Any], words: dict[str, Any]) -> dict[str, Any]:
    """Progressive validation: score the night's new events by the parent, which has not trained on them.

    Returns:
        next_day, late, late_events, new_events; all None or 0 without a parent. With one, next_day_errors besides, slices
        (`slices.measure` of the next_day labels, each row with role and model), and score_bins (`drift.histogram` by action).
    """
    config = night.settings
    names, supervised = config.source.action_names, config.source.supervised_mask
    identity = {
        "pack": pack["digest"],
        "parent": night.parent.checkpoint if night.parent else None,
        "slices": [one.model_dump(mode="json") for one in config.evaluation.slices],
    }

    def work() -> dict[str, Any]:
        if night.parent is None:
            return progressive.unscored(None, names, supervised)  # its pack is empty; sequences count the events
        scored = score(night, night.parent.checkpoint, pack, words)
        newest = store.read_json(store.join(night.parent.checkpoint, "state.json"))["newest_supervised_us"]
        errors = progressive.next_day_errors(scored, newest, names, supervised)
        parts = slicing.of(night, pack, scored)
        sliced = progressive.next_day_slices(scored, newest, names, supervised, parts)
        found = progressive.next_day_metrics(scored, newest, names, supervised)
        return found | {
            "next_day_errors": errors,
            "score_bins": progressive.score_bins(scored, newest, names, supervised),
            "slices": slicing.named(sliced, "next_day", night.parent.version),
        }

    return run_stage(night, "evaluate", identity, work)


def registered(entries: Sequence[Entry], version: int) -> dict[str, Any]:
    """Return the journal's payload of a registered version; UsageError where there is none, or only its record is left."""
    refuse_version(entries, version)
    for entry in reversed(entries):
        if entry.kind == "registered" and entry.payload["version"] == version:
            return dict(entry.payload)
    raise UsageError(f"version {version} is not in the journal", where="version")


def score(
    night: Night, checkpoint: str, pack: dict[str, Any], words: dict[str, Any], *, num_threads: int = 1
) -> scoring.Scored:
    """Score a pack by a checkpoint; ids it does not know read the fallback rows that the child's vocabulary names.

    Returns:
        The scores, as `by_action` returns them.
    """
    found = scoring.score_pack(
        store.local_copy(checkpoint),
        store.local_copy(pack["uri"]),
        vocabulary=store.local_copy(words["uri"]),
        num_threads=num_threads,
    )
    return by_action(night, found)


def by_action(night: Night, scored: scoring.Scored) -> scoring.Scored:
    """Return scores with logits [N, A] over all actions in bit order (0 where an action is not supervised)."""
    logits = np.zeros((len(scored.labels), len(night.config["source"]["actions"])), np.float32)
    logits[:, scored.action_bits] = scored.logits
    actions = [action["name"] for action in night.config["source"]["actions"]]
    return replace(scored, logits=logits, actions=actions, action_bits=list(range(len(actions))))


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
    journal = night.journal
    identity = {"checkpoint": trained["digest"], "uri": trained["uri"], "night": night.key}

    def work() -> dict[str, Any]:
        models = model_store(night, config)
        models.close_dead(keep=night.key)
        repair_aliases(night, models)
        restoring.restore_champions(models, journal.entries())
        run = models.start_night(night.key, params=_parameters(config), tags=_tags(night, ingested))
        models.log_dataset(run, night.table_uri, ingested["bound"], ingested["rows"])
        child = models.child(run, "train")
        models.log(child, trained["metrics"])
        models.tag(child, {"attention": trained.get("attention")})
        checkpoint = store.local_copy(trained["uri"])
        models.log_series(child, step_metrics(checkpoint))
        models.finish(child, "FINISHED")
        child = models.child(run, "evaluate")
        models.log(child, progressive.progressive_keys(evaluated))
        checkpoints = trained.get("checkpoints", [])
        models.log_series(child, {one["step"]: metrics.metric_keys("holdout", one["holdout"]) for one in checkpoints})
        models.finish(child, "FINISHED")
        models.log(run, trained["metrics"] | progressive.progressive_keys(evaluated))
        version = models.register(run, checkpoint, night=night.key, tags=_version_tags(night, ingested, trained))
        _refuse_reused_number(journal.entries(), version, trained["digest"])
        restoring.restore(models, version, trained["uri"])
        return {"version": version, "mlflow": models.link(run)}

    def intact(result: dict[str, Any]) -> bool:
        with contextlib.suppress(UsageError):  # a registry that was restored from before the version
            return not restoring.missing(model_store(night, config), result["version"], trained["uri"])
        return False

    result = run_stage(night, "register", identity, work, intact=intact)
    if all(e.kind != "registered" or e.payload["version"] != result["version"] for e in journal.entries()):
        payload = registration(night, result["version"], trained, words)
        journal.append("registered", night.key, payload, at_us=night.at_us)
    return result


def registration(night: Night, version: int, trained: dict[str, Any], words: dict[str, Any]) -> dict[str, Any]:
    """Return the journal's payload of a registered version: all that a later night needs to start from it."""
    return {
        "version": version,
        "date": night.date,
        "checkpoint": trained["uri"],
        "vocabulary": words["uri"],
        "watermark": trained["watermark"],
        "digest": trained["digest"],
        "config": night.config,
    }


def _refuse_reused_number(entries: Sequence[Entry], version: int, digest: str) -> None:
    """Refuse a registry that counts anew: its numbers would name other models than the journal's."""
    for entry in entries:
        if entry.kind == "registered" and entry.payload["version"] == version and entry.payload["digest"] != digest:
            raise FormatError(
                f"the model registry gave version {version} again, which the journal knows as the model of "
                f"{entry.payload['date']}: its database was lost or replaced; restore it (mlflow.db in the home), or "
                "name the one that nights were registered in with MLFLOW_TRACKING_URI",
                where=f"version {version}",
            )


def finish(night: Night, results: dict[str, Any], *, ended_us: int | None = None) -> dict[str, Any]:
    """Write the night's status object to the journal and project it to MLflow; a finished night is immutable.

    Args:
        night: The night.
        results: Those of its stages.
        ended_us: Now, microseconds since the epoch; later nights are forecast from how long this one took.

    Returns:
        The night as in `daybreak status --json`.
    """
    config = night.settings
    EventTable(night.table_uri, config).check_rows()
    status = _status_object(night, config, results)
    if "register" in results:
        models = model_store(night, config)
        run = models.start_night(night.key, params={}, tags={})
        seconds = {f"perf/seconds/{stage}": value for stage, value in status["seconds"].items()}
        checked = next_night.metric_keys(results.get("next_night"))
        drifted = (results.get("drift") or {}).get("metrics", {})
        found = metrics.metric_keys("holdout", results["gate"]["holdout"])
        models.log(run, found | checked | seconds | drifted)
        _log_slices(night, models, run, results)
        models.tag(run, {"gate": status["gate"], "reasons": "; ".join(status["reasons"])})
        repair_aliases(night, models)
        models.finish(run, "FINISHED")
    # Last: a night that died before this is finished again, and MLflow with it.
    payload = {"state": status["state"], "bound": results["ingest"]["bound"], "status": status}
    payload |= {"ended_us": ended_us} if ended_us is not None else {}
    night.journal.append("finished", night.key, payload, at_us=night.at_us)
    return status


def _log_slices(night: Night, models: MlflowStore, run: str, results: dict[str, Any]) -> None:
    """Write the night's table of slices to its home and its MLflow run, there the models' own metrics by key besides."""
    rows = [*(results["evaluate"].get("slices") or []), *(results["gate"].get("slices") or [])]
    told = slicing.write_table(night, rows)
    shown = [row for row in rows if row["role"] == "next_day" or row["model"] == results["register"]["version"]]
    models.log(run, slices.metric_keys(shown))
    models.attach(night.key, "slices.csv", told)


def repair_aliases(night: Night, models: MlflowStore) -> None:
    """Set the registry's aliases to what the journal says; a version that the registry lost is left out, loudly."""
    entries = night.journal.entries()
    chosen, before = champion(entries), previous(entries)
    wanted = {
        "champion": chosen.version if chosen else None,
        "previous": before.version if before else None,
        "challenger": challenger(entries),
    }
    for alias, version in wanted.items():
        try:
            _ = models.version(version) if version is not None else None
        except UsageError:
            logger.warning("the registry has no version %s, the journal's %s; the alias is left out", version, alias)
            wanted[alias] = None
    models.repair(**wanted)


def _status_object(night: Night, config: Config, results: dict[str, Any]) -> dict[str, Any]:
    ingested, buckets = results["ingest"], results["sequences"]
    counts = {name: sum(part["counts"][name] for part in buckets) for name in buckets[0]["counts"]}
    names, supervised = config.source.action_names, config.source.supervised_mask
    evaluated = results.get("evaluate") or progressive.unscored(counts["next_day"], names, supervised)
    decision, trained = results.get("gate"), results.get("train") or {}
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
        **({"action_rows": ingested["action_rows"]} if ingested.get("action_rows") else {}),
        "due_events": counts["due"],
        "supervised_events": counts["train"],
        "new_events": counts["next_day"],
        "holdout_events": counts["due_holdout"],
        "late_events": evaluated["late_events"],
        **{f"{name}_events": counts[name] for name in ("replayed", "sampled_out") if name in counts},
        "next_day": evaluated["next_day"],
        **({"next_day_errors": evaluated["next_day_errors"]} if evaluated.get("next_day_errors") else {}),
        **(
            {"next_night": next_night.told(results["next_night"])} if "next_night" in results and record.is_main else {}
        ),
        **({"drift": {k: results["drift"][k] for k in _DRIFT}} if results.get("drift") else {}),
        "seconds": {name: _seconds(results.get(name)) for name in stages},
        "attempts": record.num_attempts,
        **{key: trained[key] for key in ("checkpoints", "evaluation_trouble") if trained.get(key)},
        **({"bootstrap_rows": ingested["bootstrap"]} if ingested["bootstrap"] and night.parent is None else {}),
        **({"mlflow": results["register"]["mlflow"]} if decision else {}),
    }


def _seconds(result: Any) -> float:
    parts = result if isinstance(result, list) else [result] if result else []
    return round(sum(float(part["seconds"]) for part in parts), 3)


def fail(night: Night, error: BaseException) -> None:
    """Write to the journal that this attempt failed or was cancelled; the next one redoes only what is missing."""
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith(STAGE_NOTE)]
    text = environment.without_secrets(f"{type(error).__name__}: {error}")
    payload = {"stage": notes[-1].removeprefix(STAGE_NOTE) if notes else "flow", "error": text}
    try:
        kind = "failed" if isinstance(error, Exception) else "cancelled"
        night.journal.append(kind, night.key, payload, at_us=night.at_us)
    except DaybreakError as silent:  # what failed the night stands, also where its store is what failed
        logger.warning("the journal was not told that night %s failed: %s", night.key, silent)


def result_digest(result: dict[str, Any]) -> str:
    """Return a stage result's digest; for results without files, that of the values themselves."""
    # the last three: nights of older releases have none
    apart = ("seconds", "reused", "fingerprint", "next_day_errors", "slices", "score_bins")
    values = {key: value for key, value in result.items() if key not in apart}
    return str(result.get("digest") or fingerprint(values))


def _parameters(config: Config) -> dict[str, Any]:
    wanted = {name: config.resolved()[name] for name in ("sequences", "pack", "model", "train", "gate")}
    return {f"{name}.{key}": value for name, section in wanted.items() for key, value in section.items()}


def _version_tags(night: Night, ingested: dict[str, Any], trained: dict[str, Any]) -> dict[str, str]:
    parent = trained_with(night.journal.entries(), night.parent.version) if night.parent else None
    return recorded.version_tags(
        night=night.to_json(),
        table_uri=night.table_uri,
        bound=ingested["bound"],
        trained=trained,
        parent_config=parent,
    )


def _tags(night: Night, ingested: dict[str, Any]) -> dict[str, str]:
    bound = ingested["bound"]
    return {
        "date": night.date,
        "mode": night.mode,
        "parent": str(night.parent.version if night.parent else None),
        **({"experiment": str(night.experiment), "beside": str(night.beside)} if night.experiment else {}),
        **{f"git.{key}": value for key, value in git_revision().items()},
        "config.fingerprint": fingerprint(night.config),
        "bound.commit": str(bound["commit"]),
        "bound.delta_version": str(bound["delta_version"]),
    }
