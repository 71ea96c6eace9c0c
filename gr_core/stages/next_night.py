"""The next-night check: the champion and the one before it on the night's new events, and the rollback that may follow.

The night is pinned to the champion when it opens, before the events that judge the champion are there. A rollback found
on the way therefore leaves the night as it is pinned: its model is trained and registered, and the gate holds it, since
it started from what was rolled back. The next night starts from the champion gone back to, and its bound covers both days.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gr_core.errors import ConfigError, FormatError, UsageError
from gr_core.eval import gate as gates
from gr_core.eval import next_night
from gr_core.eval.scoring import Scored
from gr_core.lake.entries import Entry
from gr_core.lake.journal import JournalMoved, champion, previous, versions
from gr_core.lake.ledger import Champion
from gr_core.night import Night, run_stage
from gr_core.stages import aliases, moving, rescoring, rivals

logger = logging.getLogger(__name__)

ROLLED_BACK = "rolled back by the next-night check"


def check(
    night: Night,
    pack: dict[str, Any],
    words: dict[str, Any],
    ingested: dict[str, Any],
    buckets: list[dict[str, Any]],
) -> dict[str, Any]:
    """Score the night's new events by the champion and by the one before it; roll a worse champion back.

    One journal entry moves the champion, and the aliases follow at once. A night rolls back at most once, however often
    it is taken up again.

    Args:
        night: The night.
        pack: PackRef of its next_day pack.
        words: Its vocabulary.
        ingested: What its ingestion returned.
        buckets: What `sequencing.build_bucket` returned, bucket by bucket.

    Returns:
        champion and previous (versions), worse, rolled_back, reason, figures.
    """
    entries = night.journal.entries()
    done = rollback_of(entries, night.key)
    if done is not None:
        return dict(done.payload["check"])
    best, before = champion(entries), previous(entries)
    rules, gate = night.settings.next_night, night.settings.gate
    identity = {
        "pack": pack["digest"],
        "champion": best.version if best else None,
        "previous": before.version if before else None,
        "rules": rules.model_dump(),
        "gate": [gate.action, gate.num_resamples],
    }

    def work() -> dict[str, Any]:
        told = {key: identity[key] for key in ("champion", "previous")}
        why_not = _unchecked(night, entries, best, before)
        if best is None or before is None or why_not is not None:
            return {**told, "worse": False, "reason": f"not checked: {why_not}", "figures": {}}
        rows = rescoring.Rows(role="next_day", pack=pack, words=words, ingested=ingested, buckets=buckets)
        found = _compared(night, entries, (best, before), rows)
        return {**told, "worse": found.worse, "reason": found.reason, "figures": found.figures}

    result = run_stage(night, "next_night", identity, work)
    result["rolled_back"] = bool(result["worse"]) and rules.rollback == "auto"
    if result["worse"]:
        logger.warning("the champion, version %s, is worse than version %s before it: %s", *_said(result))
    if result["rolled_back"]:
        _roll_back(night, result)
    return result


def _said(result: Mapping[str, Any]) -> tuple[Any, Any, str]:
    return result["champion"], result["previous"], result["reason"]


def rollback_of(entries: Sequence[Entry], key: str) -> Entry | None:
    """Return the entry with which a night's check rolled the champion back; None where it did not."""
    found = (e for e in reversed(entries) if e.kind == "rollback" and e.payload.get("checked_by") == key)
    return next(found, None)


def _unchecked(night: Night, entries: Sequence[Entry], best: Champion | None, before: Champion | None) -> str | None:
    """Return why a night does not check the champion; None: it does."""
    if night.settings.next_night.rollback == "off":
        return "next_night.rollback is off"
    if night.key != night.date:
        return "only nights of the main line do"
    if best is None or before is None:
        return "there is no champion yet" if best is None else "there is no champion before it"
    if night.date <= best.date:
        return f"data day {night.date} is not after the champion's, {best.date}"
    try:
        moving.usable(night.home, entries, before.version, "rollback")
    except UsageError as error:
        return str(error)
    return None


def _compared(
    night: Night, entries: Sequence[Entry], two: tuple[Champion, Champion], rows: rescoring.Rows
) -> next_night.Verdict:
    """Score both on the same rows and judge them on those that neither was trained on."""
    config = night.settings
    action, bit = config.gate.action, config.source.action_names.index(config.gate.action)
    models = [rescoring.Model.of(entries, one.version) for one in two]
    try:
        ours, theirs = (rescoring.score(night, entries, model, rows) for model in models)
        newest = [model.state()["newest_supervised_us"] for model in models]
    except (ConfigError, FormatError, FileNotFoundError) as error:
        logger.warning("the champion is not checked: %s", error)
        return next_night.Verdict(worse=False, reason=f"not checked: {error}")
    fresh = next_night.untrained(ours, bit, action, newest)
    scores = [_only(one, bit, fresh) for one in (ours, rivals.aligned(theirs, ours))]
    return next_night.judge(scores[0], scores[1], config.next_night, config.gate, seed=night.seed)


def _only(scored: Scored, bit: int, rows: np.ndarray[Any, np.dtype[np.bool_]]) -> gates.Scores:
    """Return one action's scores of some rows; all of them where the two models' rows differ, which judges nothing."""
    chosen = np.flatnonzero(rows) if len(rows) == len(scored.labels) else np.arange(len(scored.labels))
    users = [scored.users[row] for row in chosen.tolist()]
    return gates.Scores(scored.logits[chosen, bit], scored.labels[chosen] >> bit & 1, users, scored.digest)


def _roll_back(night: Night, result: dict[str, Any]) -> None:
    """Write the one entry that moves the champion, then set the aliases; whoever moved it meanwhile has the word."""
    journal = night.journal
    reason = f"{ROLLED_BACK} of {night.key}: {result['reason']}"
    payload = {
        "version": result["previous"],
        "previous": result["champion"],
        "reason": reason,
        "checked_by": night.key,
        "check": result,
    }
    while True:
        entries = journal.entries()
        best, before = champion(entries), previous(entries)
        standing = (best and best.version, before and before.version)
        if standing != (result["champion"], result["previous"]):
            logger.warning("the champion moved while it was checked; nothing is rolled back")
            result["rolled_back"] = False
            return
        key = versions(entries)[result["previous"]].night
        try:
            journal.append("rollback", key, payload, at_us=night.at_us, expect=entries[-1].seq)
        except JournalMoved:
            continue
        break
    logger.warning("champion is version %s again: %s", result["previous"], reason)
    aliases.repair(night.settings, night.home)
