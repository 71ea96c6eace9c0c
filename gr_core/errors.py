"""The exception tree. Every error names what is wrong, where, and what to do about it.

DaybreakError
├── UsageError          exit 2: a wrong parameter or command
├── ConfigError         exit 2: a config file or override that breaks a rule
├── DataContractError   exit 2: raw data that breaks the contract (file, column, value)
├── BoundError          exit 2: a run whose bound lies below its parent's
├── FormatError         exit 2: a file written by another format version, or damaged
│   └── DamagedFile     exit 2: a JSON file that is none any more; also a ValueError
├── StoreUnavailable    exit 1: storage did not answer; the only transient one, retried
├── StoreFull           exit 1: a disk or a quota is full; waiting does not mend it
├── CommitConflict      exit 1: other writers won every attempt
└── TrainingError       exit 1: training stopped (non-finite loss, child process died)
"""

from __future__ import annotations


class DaybreakError(Exception):
    """Base of all errors that Daybreak raises on purpose.

    Args:
        message: One sentence with the offending value, then the remedy.
        where: File, column or dotted config key that the message is about.
    """

    exit_code = 1

    def __init__(self, message: str, *, where: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where

    def __reduce__(self) -> tuple[object, ...]:
        """Keep `where` and the notes, which name the stage, across processes (of itself only arguments are kept)."""
        return (_rebuild, (type(self), self.message, self.where), {"__notes__": list(getattr(self, "__notes__", []))})


def _rebuild(kind: type[DaybreakError], message: str, where: str | None) -> DaybreakError:
    return kind(message, where=where)


class UsageError(DaybreakError):
    """A command or flow was started with a parameter that cannot be."""

    exit_code = 2


class ConfigError(DaybreakError):
    """A config breaks a rule; the message has dotted name, rule, value and remedy."""

    exit_code = 2


class DataContractError(DaybreakError):
    """Raw data breaks the contract; the message names the file, column or value."""

    exit_code = 2


class BoundError(DaybreakError):
    """A run would move a lineage's bound backwards; both bounds are in the message."""

    exit_code = 2


class FormatError(DaybreakError):
    """A stored file has another format number, or its digest does not match."""

    exit_code = 2


class DamagedFile(FormatError, ValueError):
    """A stored file is cut off or holds other bytes; a ValueError too, for readers that make such a file again."""


class StoreUnavailable(DaybreakError):
    """Storage did not answer. Transient: stages are retried on it."""


class StoreFull(DaybreakError):
    """A disk, a quota or a file size limit is full; the message says where and how much is left."""


class CommitConflict(DaybreakError):
    """Every attempt to commit met another writer's commit."""


class TrainingError(DaybreakError):
    """Training stopped; the message names the step, the batch and the last good checkpoint."""
