"""`daybreak evaluate`: any model on the new events of a finished night, as that night would have scored it.

The night's own rows are read where they are still there, else they are built again, in a temporary folder, from the event
table's version that the night was pinned to. Nothing in the home changes; the metrics are a run of their own in MLflow,
nested under the night's, and scoring again adds no second value there (case G14).
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import date as Date
from typing import Any

from gr_core.config import Config
from gr_core.config_rules import check_lake
from gr_core.data import due
from gr_core.errors import DaybreakError, FormatError, UsageError
from gr_core.eval import progressive
from gr_core.eval.scoring import Scored
from gr_core.hashing import is_holdout
from gr_core.lake import manifests, store
from gr_core.lake.events import EventTable
from gr_core.lake.journal import Entry, Journal, NightRecord, challenger, champion, nights, previous, versions
from gr_core.lake.moved import rebased
from gr_core.lake.pruned import refuse_night, refuse_version
from gr_core.night import Night
from gr_core.refs import Bound
from gr_core.registry.base import ALIASES, checkpoint_state
from gr_core.stages import judging, packing, rescoring, sequencing
from gr_core.stages.rescoring import Model

logger = logging.getLogger(__name__)

Z = 1.959964  # of a two-sided 95 % interval
_SHOWN = 10  # numbers that a message names


def evaluate_model(config: Config, home: str, model: str, day: Date | None = None) -> dict[str, Any]:
    """Score a model on the new events of a finished night; writes nothing but a run in MLflow.

    Args:
        config: The run's config.
        home: URI of the home.
        model: champion, challenger or previous; a version's number; or path or URI of a complete checkpoint.
        day: The lake day; None: that of the newest finished night.

    Returns:
        model (as asked), version (None: the checkpoint is no registered version), date, metrics, count (new events
        scored), trained_on (whether the model's lineage was supervised on any of them). Metrics are those of
        progressive validation (next_day/*: events after all that the model was trained on; late_events/*: the others),
        with the ends of 95 % intervals over users: next_day/auc_low/<action> and so on.

    Raises:
        UsageError: No such model or finished night, or nothing was new in it.
        ConfigError: The config's lake is not the home's.
        FormatError: Neither the night's rows nor what they were made from is there any more, or the model is damaged or
            has other features or actions.
    """
    entries = Journal(store.join(home, "lake", "journal")).entries()
    check_lake(config, entries)
    record = _finished(entries, day)
    refuse_night(entries, record.key, config.lake.rerun_days)
    chosen = find_model(home, entries, model)
    night = rescoring.pinned(record, home)
    ingested = rescoring.recorded(night, "ingest")
    state = checkpoint_state(store.local_copy(chosen.checkpoint))
    scored = _scored(night, entries, chosen, ingested)
    names, supervised = night.settings.source.action_names, night.settings.source.supervised_mask
    newest = state["newest_supervised_us"]
    result = progressive.next_day_metrics(scored, newest, names, supervised)
    errors = progressive.next_day_errors(scored, newest, names, supervised)
    value = {
        "model": model,
        "version": chosen.version,
        "date": record.date,
        "metrics": {**progressive.progressive_keys(result), **_intervals(result["next_day"], errors)},
        "count": result["new_events"],
        "trained_on": _trained_on(night, ingested, Bound.from_json(state["watermark"])),
    }
    _log(night, config, value, str(state["digest"]), scored.digest)
    return value


def _finished(entries: Sequence[Entry], day: Date | None) -> NightRecord:
    """Return the main line's finished night of a day, or the newest one."""
    done = [record for record in nights(entries).values() if record.is_main and record.is_finished]
    found = [record for record in done if day is None or record.date == day.isoformat()]
    if not found:
        newest = ", ".join(sorted(record.date for record in done)[-_SHOWN:])
        remedy = f" of {day}; the newest are {newest}" if newest else " yet; run `daybreak nightly` first"
        raise UsageError(f"evaluate needs a finished night, and there is none{remedy}", where="date")
    return max(found, key=lambda record: record.date)


def find_model(home: str, entries: Sequence[Entry], model: str) -> Model:
    """Return what an alias, a version's number, or a checkpoint's path or URI names.

    Raises:
        UsageError: There is no such model, or no vocabulary of this home belongs to the checkpoint.
    """
    known = versions(entries)
    if model in ALIASES:
        standing = {"champion": champion(entries), "previous": previous(entries)}
        one = standing[model] if model in standing else known.get(challenger(entries) or 0)
        if one is None:
            raise UsageError(f"--model {model}: there is none yet; see `daybreak status`", where="model")
        return Model.of(entries, one.version)
    if model.isdecimal():
        refuse_version(entries, int(model), "model")
        if int(model) not in known:
            there = ", ".join(map(str, sorted(known)[-_SHOWN:])) or "none"
            raise UsageError(f"--model {model} is no registered version; the newest are {there}", where="model")
        return Model.of(entries, int(model))
    return _checkpoint(home, entries, model)


def _checkpoint(home: str, entries: Sequence[Entry], uri: str) -> Model:
    if not store.exists(store.join(uri, "manifest.json")):
        raise UsageError(
            f"--model {uri} is neither one of {', '.join(ALIASES)}, nor a version's number, nor a complete checkpoint "
            "(a folder with manifest.json)",
            where="model",
        )
    state = checkpoint_state(store.local_copy(uri))
    for entry in reversed(entries):
        if entry.kind == "registered" and entry.payload.get("digest") == state["digest"]:
            return Model.of(entries, entry.payload["version"])
    wanted = state["vocabulary"]["version"]
    for key in nights(entries):
        place = store.join(home, "nights", key, "manifests", "vocabulary.json")
        manifest = rebased(manifests.read_or_warn(place, f"night {key} is passed over"), home)
        words = manifest["result"] if manifest is not None else {}
        if words.get("version") == wanted:
            return Model(version=None, checkpoint=uri, vocabulary=words["uri"])
    raise UsageError(
        f"--model {uri} numbers its ids by vocabulary {wanted}, which no night in this home made; name --home of its own",
        where="model",
    )


def _scored(night: Night, entries: Sequence[Entry], model: Model, ingested: dict[str, Any]) -> Scored:
    """Score the night's new events: its own pack where that is there, else sequences and pack made again elsewhere."""
    with tempfile.TemporaryDirectory(prefix="daybreak-evaluate-") as folder:
        scratch = replace(night, home=folder, finished=False)
        rows = _own_rows(night, ingested)
        if rows is not None:
            return rescoring.score(night, entries, model, rows, into=scratch)
        logger.info("night %s has no rows to score any more, or never had: they are built again", night.key)
        every = range(night.settings.lake.num_buckets)
        buckets = [sequencing.build_bucket(night, ingested, bucket, into=scratch) for bucket in every]
        return rescoring.score_anew(scratch, model, ingested, buckets, "next_day")


def _own_rows(night: Night, ingested: dict[str, Any]) -> rescoring.Rows | None:
    """Return the night's pack of new events and its sequences; None where it had no parent, or any of it is gone."""
    if night.parent is None:
        return None
    try:
        pack, words = rescoring.recorded(night, "pack", "next_day"), rescoring.recorded(night, "vocabulary")
        every = range(night.settings.lake.num_buckets)
        buckets = [rescoring.recorded(night, "sequences", f"{bucket:05d}") for bucket in every]
    except FormatError:
        return None
    there = packing.pack_intact(pack) and all(sequencing.folder_intact(part) for part in buckets)
    return (
        rescoring.Rows(role="next_day", pack=pack, words=words, ingested=ingested, buckets=buckets) if there else None
    )


def _intervals(metrics: dict[str, Any], errors: dict[str, dict[str, float | None]]) -> dict[str, float | None]:
    """Return the ends of 95 % intervals over users of each action's AUC and NE, None where undefined."""
    found: dict[str, float | None] = {}
    for action, spreads in errors.items():
        for key, error in spreads.items():
            value = metrics[action][key]
            for end, sign in (("low", -Z), ("high", Z)):
                there = value is not None and error is not None
                found[f"next_day/{key}_{end}/{action}"] = value + sign * error if there and error is not None else None
    return found


def _trained_on(night: Night, ingested: dict[str, Any], watermark: Bound) -> bool:
    """Tell whether a lineage of this watermark was supervised on any of the night's new events, bucket by bucket."""
    config, scope = night.settings, sequencing.due_scope(night, ingested)
    if due.outermost([watermark, *scope.earlier]) == due.outermost(scope.earlier):
        return False  # all that it was trained on is inside an earlier night's bound
    names, table = list(scope.action_names), EventTable(night.table_uri, config, up_to=scope.now.commit)
    new = due.new_mask(scope.now, scope.earlier, names, scope.supervised, scope.context_commits)
    both = new & due.inside_mask(watermark, names)
    columns = ["user_id", "commit", "shown_at", "known"]
    for bucket in range(config.lake.num_buckets):
        rows = table.read(scope.now.delta_version, buckets=[bucket], columns=columns)
        users = rows.filter(both != 0)["user_id"].unique()
        if not all(is_holdout(user, config.lake.holdout_fraction) for user in users):
            return True
    return False


def _log(night: Night, config: Config, value: dict[str, Any], checkpoint: str, rows: str) -> None:
    """Log to the model's own run below the night's; what is printed stands also where MLflow does not answer."""
    name = f"evaluate version {value['version']}" if value["version"] else f"evaluate checkpoint {checkpoint[-12:]}"
    try:
        models = judging.model_store(night, config)
        above = models.run_of(night.key)
        if above is None:
            logger.warning("night %s has no MLflow run; the metrics are not logged", night.key)
            return
        run = models.child(above, name)
        models.tag(
            run, {key: value[key] for key in ("date", "version", "trained_on")} | {"rows": rows, "model": checkpoint}
        )
        models.log(run, value["metrics"])
        models.finish(run, "FINISHED")
    except DaybreakError as error:
        logger.warning("the metrics are not logged: %s", error)
