"""RUN.json: everything that `python -m gr_core.train` needs to know, paths relative to the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gr_core.errors import ConfigError, UsageError
from gr_core.model.embeddings import TableSpec, read_tables
from gr_core.model.settings import ModelConfig
from gr_core.train.settings import TrainConfig

S = TypeVar("S", ModelConfig, TrainConfig)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of one night, read from RUN.json (examples 9)."""

    pack: Path
    tables: tuple[TableSpec, ...]
    vocabulary_version: str
    vocabulary_files: Mapping[str, Path]
    """Table name to its <table>.arrow, where RUN.json names one."""
    parent: Path | None
    output: Path
    model: ModelConfig
    train: TrainConfig
    config: Mapping[str, Any]
    """The resolved config as given, kept in the checkpoint."""
    fingerprint: str
    seed: int
    device: str
    resume: bool


def read_run(path: Path) -> Run:
    """Read RUN.json.

    Raises:
        UsageError: Missing, no JSON, or a key is missing.
        ConfigError: A setting breaks a rule, or is unknown.
        FormatError: A vocabulary table cannot be read.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"RUN file {path} cannot be read: {error}; see examples 9", where=str(path)) from error
    root = path.parent
    try:
        vocabulary, config = values["vocabulary"], values["config"]
        return Run(
            pack=root / values["packs"]["train"],
            tables=read_tables(vocabulary, root),
            vocabulary_version=values.get("vocabulary_version", ""),
            vocabulary_files={name: root / v["path"] for name, v in vocabulary.items() if v.get("path")},
            parent=root / values["parent"] if values.get("parent") else None,
            output=root / values["output"],
            model=settings_of(ModelConfig, config["model"], "model"),
            train=settings_of(TrainConfig, config["train"], "train"),
            config=config,
            fingerprint=values.get("fingerprint", ""),
            seed=int(values.get("seed", 0)),
            device=values.get("device", "auto"),
            resume=bool(values.get("resume", True)),
        )
    except KeyError as error:
        raise UsageError(f"RUN file {path} lacks the key {error}; see examples 9", where=str(path)) from error


def settings_of(kind: type[S], values: Mapping[str, Any], section: str) -> S:
    """Build settings from plain JSON values; lists become tuples.

    Raises:
        ConfigError: An unknown key or a broken rule.
    """
    frozen: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    try:
        return kind(**frozen)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.{section}: {error}", where=section) from error
