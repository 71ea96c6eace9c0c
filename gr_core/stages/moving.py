"""What an operator does to the champion: `daybreak promote VERSION` and `daybreak rollback [--to VERSION]`.

Each holds the home's lock and writes one journal entry, and that alone moves the champion: the next night starts from
it. The registry's aliases follow; a kill in between loses nothing, since every night sets them from the journal again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

from gr_core.config import Config
from gr_core.config_rules import check_lake
from gr_core.errors import UsageError
from gr_core.lake import store, tombstones
from gr_core.lake.journal import Entry, Journal, champion, previous, versions
from gr_core.lake.ledger import Champion, champions
from gr_core.lake.lineage import Lineage
from gr_core.lake.lock import alone
from gr_core.lake.pruned import refuse_version
from gr_core.stages import aliases

logger = logging.getLogger(__name__)

Kind = Literal["promoted", "rollback"]
_COMMANDS: dict[Kind, str] = {"promoted": "promote", "rollback": "rollback"}
_SAID: dict[Kind, str] = {"promoted": "promoted by an operator", "rollback": "rolled back by an operator"}
_SHOWN = 10  # numbers that a message names


def promote(config: Config, home: str, version: int, *, reason: str, at_us: int) -> dict[str, Any]:
    """Make a registered version the champion, whatever the gate said of it.

    Args:
        config: The run's config.
        home: URI of the home.
        version: The version.
        reason: Why; stands in the journal and in the status of the version's night.
        at_us: The time of the journal entry, microseconds since the epoch.

    Returns:
        champion (version), previous (the champion before; None: there was none).

    Raises:
        UsageError: No such version, it is the champion already, was tainted by a retraction, would bring a forgotten
            user back, or has lost its checkpoint; no reason; or a night is running. Nothing has changed.
        ConfigError: The config's lake is not the home's.
    """

    def choose(entries: Sequence[Entry]) -> int:
        return usable(home, entries, version, "promote")

    return _move(config, home, "promoted", choose, reason=reason, at_us=at_us)


def rollback(config: Config, home: str, version: int | None = None, *, reason: str, at_us: int) -> dict[str, Any]:
    """Go back to the champion before the present one, or to an earlier one.

    What is rolled back from is out: a second rollback goes further back, never forth again.

    Args:
        config: The run's config.
        home: URI of the home.
        version: An earlier champion; None: the one before.
        reason: Why; stands in the journal and in the status of the night whose version was the champion.
        at_us: The time of the journal entry, microseconds since the epoch.

    Returns:
        champion (version), previous (what the next rollback goes to; None: nothing).

    Raises:
        UsageError: There is no champion, or none before it; `version` was none of those, or cannot be used, as for
            `promote`; no reason; or a night is running. Nothing has changed.
        ConfigError: The config's lake is not the home's.
    """

    def choose(entries: Sequence[Entry]) -> int:
        stack = champions(entries)
        if version is not None:
            usable(home, entries, version, "rollback")
        return usable(home, entries, _earlier(stack, version), "rollback")

    return _move(config, home, "rollback", choose, reason=reason, at_us=at_us)


def _earlier(stack: list[Champion], version: int | None) -> int:
    """Return which of the earlier champions is meant."""
    if not stack:
        raise UsageError("rollback needs a champion, and there is none yet; see `daybreak status`", where="version")
    before = [one.version for one in stack[:-1]]
    if not before:
        raise UsageError(
            f"champion {stack[-1].version} has none before it to go back to; name any version with `daybreak promote`",
            where="version",
        )
    if version is None:
        return before[-1]
    if version not in before:
        raise UsageError(
            f"--to {version} was not the champion before version {stack[-1].version}; those were "
            f"{before[-_SHOWN:]}: name one of them, or use `daybreak promote {version}`",
            where="to",
        )
    return version


def usable(home: str, entries: Sequence[Entry], version: int, command: str) -> int:
    """Return a version that may become the champion; UsageError, beginning with the command's name, where it may not."""
    refuse_version(entries, version)
    known, lineage, best = versions(entries), Lineage.of(entries), champion(entries)
    trouble, remedy = None, f"name another one with `daybreak {command}`"
    if version not in known:
        there = ", ".join(map(str, sorted(known)[-_SHOWN:])) or "none"
        trouble, remedy = "is no registered version", f"the newest are {there}"
    elif known[version].experiment is not None:
        trouble = f"is of experiment {known[version].experiment}, which never moves an alias"
        remedy = "run a night with the experiment's settings instead"
    elif version in lineage.tainted:
        trouble = "is tainted: it was trained on retracted rows, or descends from a version that was"
    elif best is not None and best.version == version:
        trouble = "is the champion already"
    elif _brings_back(home, lineage, version, best):
        trouble = "was trained on a user who was forgotten, whom the champion does not hold"
    elif not store.exists(store.join(known[version].checkpoint, "manifest.json")):
        trouble = f"has no checkpoint any more at {known[version].checkpoint}, so no night could start from it"
    if trouble is not None:
        raise UsageError(f"{command}: version {version} {trouble}; {remedy}", where="version")
    return version


def _brings_back(home: str, lineage: Lineage, version: int, best: Champion | None) -> bool:
    """Tell whether a version holds a forgotten user whom the present champion (None: nobody) does not hold."""
    for trained in tombstones.trained(store.join(home, "lake")):
        holders = lineage.descendants(trained)
        if version in holders and (best is None or best.version not in holders):
            return True
    return False


def _move(
    config: Config, home: str, kind: Kind, choose: Callable[[Sequence[Entry]], int], *, reason: str, at_us: int
) -> dict[str, Any]:
    """Write the entry, then set the aliases; `choose` returns the version or refuses."""
    command = _COMMANDS[kind]
    if not reason.strip():
        raise UsageError(
            f"{command} needs a reason, for those who read the status later: --reason TEXT", where="reason"
        )
    journal = Journal(store.join(home, "lake", "journal"))
    entries = journal.entries()
    check_lake(config, entries)
    choose(entries)  # a wrong one changes nothing, not even a lock
    with alone(home, command):
        entries = journal.entries()
        version, before = choose(entries), champion(entries)
        payload = {
            "version": version,
            "previous": before.version if before else None,
            "reason": f"{_SAID[kind]}: {reason.strip()}",
        }
        journal.append(kind, versions(entries)[version].night, payload, at_us=at_us, expect=entries[-1].seq)
        logger.info("champion is version %d now, before it was %s: %s", version, payload["previous"], reason.strip())
        aliases.repair(config, home)
    second = previous(journal.entries())
    return {"champion": version, "previous": second.version if second else None}
