"""RUN.json: everything that `python -m gr_core.train` needs to know, paths relative to the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from gr_core.data.batches import read_index
from gr_core.errors import ConfigError, UsageError
from gr_core.hashing import file_sha256, fingerprint
from gr_core.model.embeddings import TableSpec, read_tables
from gr_core.model.settings import AttentionConfig, ModelConfig
from gr_core.train.layout import DistributedConfig
from gr_core.train.settings import UNDECIDING, TrainConfig
from gr_core.train.state import read_state

S = TypeVar("S", ModelConfig, AttentionConfig, TrainConfig)


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
    """The resolved config, defaults included, kept in the checkpoint."""
    fingerprint: str
    """What the checkpoint is made of: a finished one with the same fingerprint is not trained again."""
    seed: int
    device: str
    resume: bool
    attention: AttentionConfig = field(default_factory=AttentionConfig)


def read_run(path: Path) -> Run:
    """Read RUN.json.

    Raises:
        UsageError: Missing, no JSON, or a key is missing.
        ConfigError: A setting breaks a rule, or is unknown.
        FormatError: A vocabulary table cannot be read; or, where the file names no fingerprint, the pack or the parent.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"RUN file {path} cannot be read: {error}; give the path of a RUN.json", where=str(path)
        ) from error
    root = path.parent
    try:
        vocabulary, config = values["vocabulary"], values["config"]
        model = settings_of(ModelConfig, config["model"], "model")
        train = settings_of(TrainConfig, config["train"], "train")
        attention = settings_of(AttentionConfig, config.get("attention", {}), "attention")
        run = Run(
            pack=root / values["packs"]["train"],
            tables=read_tables(vocabulary, root),
            vocabulary_version=values.get("vocabulary_version", ""),
            vocabulary_files={name: root / v["path"] for name, v in vocabulary.items() if v.get("path")},
            parent=root / values["parent"] if values.get("parent") else None,
            output=root / values["output"],
            model=model,
            train=train,
            config={**config, "model": asdict(model), "train": asdict(train), "attention": asdict(attention)},
            fingerprint=values.get("fingerprint", ""),
            seed=int(values.get("seed", 0)),
            device=values.get("device", "auto"),
            resume=bool(values.get("resume", True)),
            attention=attention,
        )
    except KeyError as error:
        raise UsageError(
            f"RUN file {path} lacks the key {error}; give vocabulary, config.model, config.train, packs.train and output",
            where=str(path),
        ) from error
    return run if run.fingerprint else replace(run, fingerprint=_fingerprint(run))


def _fingerprint(run: Run) -> str:
    """Return the fingerprint of all that decides the checkpoint: settings, seed, vocabulary, parent and pack."""
    read_index(run.pack, verify=True)
    return fingerprint(
        {
            "config": {**run.config, "train": {k: v for k, v in run.config["train"].items() if k not in UNDECIDING}},
            "seed": run.seed,
            "vocabulary": {table.name: [table.rows, table.capacity, table.fallbacks] for table in run.tables},
            "vocabulary_version": run.vocabulary_version,
            "vocabulary_files": {name: file_sha256(file) for name, file in run.vocabulary_files.items()},
            "parent": read_state(run.parent)["digest"] if run.parent else None,
            "pack": file_sha256(run.pack / "index.json"),
        }
    )


def settings_of(kind: type[S], values: Mapping[str, Any], section: str) -> S:
    """Build settings from plain JSON values; lists become tuples.

    Raises:
        ConfigError: An unknown key or a broken rule.
    """
    frozen: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    try:
        if isinstance(frozen.get("distributed"), Mapping):
            frozen["distributed"] = DistributedConfig(**frozen["distributed"])
        return kind(**frozen)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.{section}: {error}", where=section) from error
