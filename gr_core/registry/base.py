"""What the pipeline needs of a model registry, as a protocol, and a version of it in memory for tests.

Truth is the journal; a registry is a projection of it that people look at. A night is one run with children (train,
evaluate); a registered checkpoint is a numbered version; aliases champion, challenger and previous point at versions
and are set from the journal alone (`repair`).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from gr_core.errors import FormatError, UsageError
from gr_core.formats import listed_files
from gr_core.hashing import file_sha256

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
ALIASES = ("champion", "challenger", "previous")
PREFIX = "daybreak."
"""Of our tags' names."""
DATA = "checkpoint"
"""Name of the checkpoint's folder in a model's folder `data`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelVersion:
    """A registered version."""

    version: int
    night: str
    digest: str
    """Of the checkpoint (state.json)."""
    run: str
    source: str
    """Where the model lies, as the registry names it."""
    tags: dict[str, str] = field(default_factory=dict)


class ModelStore(Protocol):
    """A registry of nights and models. Every method may be repeated: nothing is made twice."""

    def start_night(self, night: str, *, params: Mapping[str, Any], tags: Mapping[str, Any]) -> str:
        """Return the run of a night: a new one, or the one it has, running again.

        Args:
            night: The night's key; one run a key, ever.
            params: Logged once; a value that differs from the first attempt's becomes a tag `changed/<key>`.
            tags: Set, each below "daybreak.".
        """

    def child(self, run: str, name: str) -> str:
        """Return the nested run of this name, new or running again."""

    def log(self, run: str, metrics: Mapping[str, Any], *, step: int | None = None) -> None:
        """Log scalars: numbers, bools, numpy and torch scalars. None is left out; NaN is logged and flagged by a tag.

        Without a step, a value that the run already has is not logged again.
        """

    def log_series(self, run: str, series: Mapping[int, Mapping[str, Any]]) -> None:
        """Log metrics of many steps, as `log` does; what the run has of a metric at a step is not logged again.

        Args:
            run: The run.
            series: Step to metrics.
        """

    def tag(self, run: str, tags: Mapping[str, Any]) -> None:
        """Set tags, each below "daybreak."."""

    def log_dataset(self, run: str, table_uri: str, bound: Mapping[str, Any], rows: Mapping[str, int]) -> None:
        """Record what the night read: event table, Delta version, bound and row counts; no row is loaded."""

    def run_of(self, night: str) -> str | None:
        """Return the run of a night as it is, ended or not; None where it has none."""

    def attach(self, night: str, name: str, text: str) -> None:
        """Put a text file beside the run of a night, also of one that has ended; an older file of the name is replaced.

        Args:
            night: The night's key.
            name: Of the file.
            text: Its content.

        Raises:
            UsageError: The night has no run.
        """

    def finish(self, run: str, status: RunStatus) -> None:
        """End a run, and its children that still run, in this state."""

    def register(self, run: str, checkpoint: Path, *, night: str, tags: Mapping[str, Any]) -> int:
        """Register a complete checkpoint and return its version.

        Args:
            run: The night's run.
            checkpoint: Directory of a complete checkpoint.
            night: The night's key.
            tags: Of the version, each below "daybreak.".

        Returns:
            The version; the one it has when this night already registered a checkpoint of this digest.

        Raises:
            FormatError: The checkpoint, or its uploaded copy, is not complete or damaged; there is no version then.
        """

    def version(self, version: int) -> ModelVersion:
        """Return a registered version; UsageError where there is none."""

    def download(self, version: int, folder: Path) -> Path:
        """Return a version's model folder: a copy below `folder`, or the artifact itself where it is local.

        Raises:
            UsageError: There is no such version.
            FormatError: Its artifact is not there.
        """

    def missing(self, version: int, files: Sequence[str]) -> list[str]:
        """Return which files of a version's model are gone; none of one that was pruned. UsageError: no such version.

        Args:
            version: The version.
            files: The names of its checkpoint's files.
        """

    def restore(self, version: int, checkpoint: Path) -> None:
        """Upload a version's model files again.

        Args:
            version: The version.
            checkpoint: Directory of its complete checkpoint.

        Raises:
            UsageError: There is no such version.
            FormatError: The checkpoint is incomplete or another one, or its uploaded copy is damaged.
        """

    def model_bytes(self, version: int) -> int:
        """Return the bytes of a version's model files; 0 where they were dropped. UsageError: no such version."""

    def drop_model(self, version: int, tags: Mapping[str, Any]) -> None:
        """Remove a version's model files and then tag it; its record stays. UsageError where there is no such version."""

    def aliases(self) -> dict[str, int]:
        """Return alias -> version."""

    def set_alias(self, alias: str, version: int | None) -> None:
        """Point an alias at a version; None removes it."""

    def repair(self, *, champion: int | None, previous: int | None, challenger: int | None) -> dict[str, int | None]:
        """Set the aliases to what the journal says and return those that were wrong."""

    def link(self, run: str) -> str:
        """Return where a person finds the run."""


def as_float(value: Any) -> float | None:
    """Return a scalar of any numeric library as a float; None stays None (case B15).

    Raises:
        TypeError: Not a scalar.
    """
    if value is None:
        return None
    try:
        number = value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError):
        number = None
    if not isinstance(number, int | float):
        raise TypeError(f"a metric must be a scalar number, got {type(value).__name__} {value!r}")
    return float(number)


def clean_metrics(metrics: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Return the metrics as floats, without those that are None, and the names of those that are NaN."""
    values = {key: as_float(value) for key, value in metrics.items()}
    kept = {key: value for key, value in values.items() if value is not None}
    return kept, sorted(key for key, value in kept.items() if math.isnan(value))


def checkpoint_state(checkpoint: Path) -> dict[str, Any]:
    """Return a complete checkpoint's state.json, without torch.

    Raises:
        FormatError: No manifest, so the checkpoint is not complete; or no readable state.
    """
    if not (checkpoint / "manifest.json").exists():
        raise FormatError(f"{checkpoint} has no manifest.json, so it is no complete checkpoint", where=str(checkpoint))
    state: dict[str, Any] = _read_json(checkpoint / "state.json")
    return state


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{file.parent} has no readable {file.name}: {error}", where=str(file.parent)) from error


def check_files(model: Path, checkpoint: Path) -> str:
    """Compare every file of a checkpoint with its copy in a model folder, by SHA-256.

    Returns:
        The checkpoint's digest.

    Raises:
        FormatError: A file is missing or damaged; names it.
    """
    data = model / "data" / DATA
    manifest = checkpoint / "manifest.json"
    for name, expected in listed_files(_read_json(manifest), str(manifest)).items():
        if not (data / name).exists() or file_sha256(data / name) != expected:
            raise FormatError(
                f"uploaded model {model} lacks {name} or has it damaged (sha256); register again", where=name
            )
    return str(checkpoint_state(checkpoint)["digest"])


def version_of(found: Any) -> ModelVersion:
    """Return a version as MLflow has it (an entity ModelVersion) as one of ours."""
    tags = {key.removeprefix(PREFIX): str(value) for key, value in found.tags.items()}
    return ModelVersion(
        version=int(found.version),
        night=tags.pop("night", ""),
        digest=tags.pop("digest", ""),
        run=found.run_id or "",
        source=found.source,
        tags=tags,
    )


def repair_aliases(store: ModelStore, wanted: Mapping[str, int | None]) -> dict[str, int | None]:
    """Set every alias that differs from what is wanted, and return those."""
    found = store.aliases()
    wrong = {alias: version for alias, version in wanted.items() if found.get(alias) != version}
    for alias, version in wrong.items():
        store.set_alias(alias, version)
    return wrong


@dataclass(slots=True)
class _Run:
    name: str
    parent: str | None
    status: str = "RUNNING"
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    series: dict[str, dict[int, float]] = field(default_factory=dict)
    datasets: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


class InMemoryStore:
    """A ModelStore that forgets at exit; `runs` is open to tests."""

    def __init__(self, name: str = "memory") -> None:
        self.name = name
        self.runs: dict[str, _Run] = {}
        self._versions: list[ModelVersion] = []
        self._aliases: dict[str, int] = {}

    def start_night(self, night: str, *, params: Mapping[str, Any], tags: Mapping[str, Any]) -> str:
        """See ModelStore."""
        run = self.runs.setdefault(night, _Run(night, None))
        run.status = "RUNNING"
        for key, value in params.items():
            if run.params.setdefault(key, str(value)) != str(value):
                run.tags[f"changed/{key}"] = str(value)
        self.tag(night, tags)
        return night

    def child(self, run: str, name: str) -> str:
        """See ModelStore."""
        key = f"{run}/{name}"
        self.runs.setdefault(key, _Run(name, run)).status = "RUNNING"
        return key

    def log(self, run: str, metrics: Mapping[str, Any], *, step: int | None = None) -> None:
        """See ModelStore; steps are not kept."""
        del step
        values, not_numbers = clean_metrics(metrics)
        self.runs[run].metrics.update(values)
        if not_numbers:
            self.tag(run, {"nan": ", ".join(not_numbers)})

    def log_series(self, run: str, series: Mapping[int, Mapping[str, Any]]) -> None:
        """See ModelStore."""
        for step, metrics in sorted(series.items()):
            self.log(run, metrics, step=step)
            for key, value in clean_metrics(metrics)[0].items():
                self.runs[run].series.setdefault(key, {}).setdefault(step, value)

    def tag(self, run: str, tags: Mapping[str, Any]) -> None:
        """See ModelStore."""
        self.runs[run].tags.update({key: str(value) for key, value in tags.items()})

    def log_dataset(self, run: str, table_uri: str, bound: Mapping[str, Any], rows: Mapping[str, int]) -> None:
        """See ModelStore."""
        value = {"table": table_uri, "bound": dict(bound), "rows": dict(rows)}
        if value not in self.runs[run].datasets:
            self.runs[run].datasets.append(value)

    def run_of(self, night: str) -> str | None:
        """See ModelStore."""
        return night if night in self.runs else None

    def attach(self, night: str, name: str, text: str) -> None:
        """See ModelStore."""
        if night not in self.runs:
            raise UsageError(f"night {night} has no run; there is nothing to attach {name} to", where=night)
        self.runs[night].files[name] = text

    def finish(self, run: str, status: RunStatus) -> None:
        """See ModelStore."""
        for key, other in self.runs.items():
            if key == run or (other.parent == run and other.status == "RUNNING"):
                other.status = status

    def register(self, run: str, checkpoint: Path, *, night: str, tags: Mapping[str, Any]) -> int:
        """See ModelStore."""
        digest = str(checkpoint_state(checkpoint)["digest"])
        for known in self._versions:
            if (known.night, known.digest) == (night, digest):
                return known.version
        kept = {key: str(value) for key, value in tags.items()}
        number = len(self._versions) + 1
        self._versions.append(
            ModelVersion(version=number, night=night, digest=digest, run=run, source=str(checkpoint), tags=kept)
        )
        return number

    def version(self, version: int) -> ModelVersion:
        """See ModelStore."""
        if not 1 <= version <= len(self._versions):
            raise UsageError(f"there is no version {version}; there are {len(self._versions)}", where="version")
        return self._versions[version - 1]

    def download(self, version: int, folder: Path) -> Path:
        """See ModelStore; a copy of the checkpoint, without code."""
        found = self.version(version)
        if "pruned" in found.tags:
            raise FormatError(f"version {version} was pruned; its model is not there", where=found.source)
        shutil.copytree(found.source, folder / "data" / DATA)
        return folder

    def missing(self, version: int, files: Sequence[str]) -> list[str]:
        """See ModelStore; in memory nothing is lost."""
        del files
        self.version(version)
        return []

    def restore(self, version: int, checkpoint: Path) -> None:
        """See ModelStore; in memory the model is its checkpoint."""
        del checkpoint
        self.version(version)

    def model_bytes(self, version: int) -> int:
        """See ModelStore; in memory the model is its checkpoint, which is not this store's."""
        return 0 if "pruned" in self.version(version).tags else 1

    def drop_model(self, version: int, tags: Mapping[str, Any]) -> None:
        """See ModelStore."""
        self.version(version).tags.update({key: str(value) for key, value in tags.items()})

    def aliases(self) -> dict[str, int]:
        """See ModelStore."""
        return dict(self._aliases)

    def set_alias(self, alias: str, version: int | None) -> None:
        """See ModelStore."""
        self._aliases.pop(alias, None)
        if version is not None:
            self._aliases[alias] = self.version(version).version

    def repair(self, *, champion: int | None, previous: int | None, challenger: int | None) -> dict[str, int | None]:
        """See ModelStore."""
        return repair_aliases(self, {"champion": champion, "previous": previous, "challenger": challenger})

    def link(self, run: str) -> str:
        """See ModelStore."""
        return f"memory:{self.name}/{run}"
