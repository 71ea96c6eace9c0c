"""The one config of a run: TOML in conf/ to frozen pydantic models, unknown keys refused.

`load_config` reads a file, applies `--set dotted.key=value`, validates, and raises ConfigError with
the dotted name, the rule, the value and the remedy. The descriptions below feed the Prefect form.
"""

from __future__ import annotations

import datetime as dt
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from gr_core.alerts_config import AlertsConfig
from gr_core.drift_config import DriftConfig
from gr_core.errors import ConfigError
from gr_core.evaluation_config import EvaluationConfig, SliceConfig
from gr_core.gate_config import GateConfig, check_tail
from gr_core.hashing import fingerprint
from gr_core.model.settings import AttentionConfig, ModelConfig
from gr_core.next_night_config import NextNightConfig
from gr_core.nightly_config import NightlyConfig
from gr_core.prune_config import PruneConfig
from gr_core.section import CENTURY_DAYS, Days, Section, Seed
from gr_core.source_config import (
    ActionConfig,
    FeedConfig,
    SourceConfig,
    TableConfig,
    TimeColumn,
    WorldConfig,
)
from gr_core.train.settings import TrainConfig

__all__ = [
    "ActionConfig",
    "AttentionConfig",
    "Config",
    "DriftConfig",
    "EvaluationConfig",
    "FeedConfig",
    "GateConfig",
    "LakeConfig",
    "NextNightConfig",
    "NightlyConfig",
    "PackConfig",
    "PruneConfig",
    "Section",
    "SequencesConfig",
    "SliceConfig",
    "SourceConfig",
    "TableConfig",
    "TimeColumn",
    "VocabularyTable",
    "WorldConfig",
    "load_config",
    "parse_config",
]

AUTO_BUDGET = "auto"
_BUDGETS = (64, 2**30)
_MAX_ERRORS = 5  # of one config, listed in its error


class LakeConfig(Section):
    """What never changes in a home."""

    zone: str = "UTC"
    """IANA zone of the lake's days: day D is [D 00:00, D+1 00:00) here."""
    num_buckets: int = Field(default=8, ge=1, le=4096)
    """Units of data parallelism; a user's bucket is stable_hash(user_id, "bucket") % num_buckets."""
    holdout_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Share of users that are evaluated only, never trained on (0-1)."""
    rerun_days: Days = 7
    """Days for which vacuum keeps the table versions that nights were pinned to."""

    @field_validator("zone")
    @classmethod
    def _known_zone(cls, zone: str) -> str:
        try:
            ZoneInfo(zone)
        except Exception as error:
            raise ValueError("must be an IANA time zone such as Asia/Shanghai") from error
        return zone


class SequencesConfig(Section):
    """How much of a user a target sees."""

    max_history: int = Field(default=128, ge=1, le=2**20)
    """History tokens a target can see."""
    max_targets: int = Field(default=64, ge=1, le=2**20)
    """Target tokens in a segment."""
    max_age_days: int = Field(default=360, ge=1, le=CENTURY_DAYS)
    """Oldest history, counted back from the target's shown_at."""


class VocabularyTable(Section):
    """Admission to one table."""

    min_count: int = Field(default=1, ge=1)
    """Events of trained users an id needs before it gets a row of its own."""
    fallback_by: str | None = None
    """Side feature by whose value fallback rows are kept apart; unset: one fallback row."""
    ttl_days: int | None = Field(default=None, ge=1, le=CENTURY_DAYS)
    """A full retrain gives no row to ids that were last shown more than so many days before its end; unset: it keeps all.
    Between full retrains no row is ever taken away, and this key may change."""


class PackConfig(Section):
    """How segments become batches."""

    tokens: Literal["targets", "interleaved"] = "targets"
    """targets: history and target tokens; interleaved: item, action, item, action, from the same history: up to twice the
    tokens (sequences.max_history counts events and late actions either way)."""
    layout: Literal["packed", "padded"] = "packed"
    """packed: segments end to end; padded: every segment to the longest of its batch."""
    grouping: Literal["none", "sorted", "bucketed"] = "none"
    """Whether batches hold segments of like lengths (changes what a step sees)."""
    token_budget: int | Literal["auto"] = 8192
    """Tokens a batch and rank, from 64 on; auto: as many as a step with train.memory_gib holds, found before packing from
    the model, its tables and the longest segments there can be."""
    time_window_seconds: int | None = Field(default=None, ge=1, le=CENTURY_DAYS * 86_400)
    """Keys older than this, counted back from the query, are not attended to; unset: no window."""
    event_weight: str | None = None
    """Side feature (SQL over the raw row) whose number is an event's weight, for train.normalize = "event_weight"; a text
    that is no number of at least 0 weighs 1. Unset: every event weighs 1."""
    seed: Seed = 0
    """Seed of the shuffle of users."""

    @field_validator("token_budget", mode="before")
    @classmethod
    def _tokens(cls, tokens: Any) -> Any:
        is_number = isinstance(tokens, int) and not isinstance(tokens, bool)
        if tokens != AUTO_BUDGET and not (is_number and _BUDGETS[0] <= tokens <= _BUDGETS[1]):
            raise ValueError(
                f'must be "auto" or a number of tokens, at least {_BUDGETS[0]} and less than {_BUDGETS[1] + 1}'
            )
        return tokens


class Config(Section):
    """One complete run: one name, one home, one registered model."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=60)]
    """Names the home (.daybreak/<name>) and the registered model (daybreak-<name>)."""
    lake: LakeConfig = LakeConfig()
    source: SourceConfig
    sequences: SequencesConfig = SequencesConfig()
    vocabulary: dict[str, VocabularyTable] = Field(default_factory=dict)
    pack: PackConfig = PackConfig()
    model: ModelConfig = ModelConfig()
    attention: AttentionConfig = AttentionConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    gate: GateConfig = GateConfig()
    next_night: NextNightConfig = NextNightConfig()
    drift: DriftConfig = DriftConfig()
    nightly: NightlyConfig = NightlyConfig()
    prune: PruneConfig = PruneConfig()
    alerts: AlertsConfig = AlertsConfig()

    @model_validator(mode="after")
    def _across(self) -> Self:
        sides = set(self.source.side_features)
        unknown = set(self.model.features) - sides - {"item_id"}
        if unknown:
            raise ValueError(f"model: features {sorted(unknown)} are neither item_id nor side features {sorted(sides)}")
        unknown = set(self.vocabulary) - set(self.model.features)
        if unknown:
            raise ValueError(f"vocabulary: {sorted(unknown)} are no features of the model {list(self.model.features)}")
        for table, rule in self.vocabulary.items():
            if rule.fallback_by is not None and rule.fallback_by not in sides:
                raise ValueError(f"vocabulary.{table}.fallback_by must be a side feature, got {rule.fallback_by!r}")
        if self.pack.event_weight is not None and self.pack.event_weight not in sides:
            raise ValueError(
                f"pack.event_weight must be a side feature {sorted(sides)}, got {self.pack.event_weight!r}; add it to "
                "source.feeds.side, or leave the key out"
            )
        place = self.train.position_feature
        if place is not None and place not in self.model.features:
            raise ValueError(
                f"train.position_feature must be a feature of the model {list(self.model.features)}, got {place!r}; add it "
                "to model.context_features, or leave the key out"
            )
        supervised = [a.name for a in self.source.actions if a.supervise]
        for where, names in (
            ("gate.action", {self.gate.action}),
            ("train.action_weights", set(self.train.action_weights)),
        ):
            if names - set(supervised):
                raise ValueError(
                    f"{where} must name supervised actions {supervised}, got {sorted(names - set(supervised))}"
                )
        unknown = set(self.train.planned_rows) - set(self.model.features)
        if unknown:
            raise ValueError(
                f"train.planned_rows must name features {list(self.model.features)}, got {sorted(unknown)}"
            )
        self.evaluation.check_features(sides)
        check_tail("next_night.confidence", self.next_night.confidence, self.gate.num_resamples)
        self._check_budget()
        return self

    def _check_budget(self) -> None:
        budget, times = self.pack.token_budget, self.tokens_per_event
        need = times * self.sequences.max_history + 1
        if budget == AUTO_BUDGET:
            if self.train.memory_gib is None:
                raise ValueError(
                    'pack.token_budget = "auto" needs train.memory_gib, the memory of one rank; set it, or give a number '
                    "of tokens"
                )
        elif int(budget) < need:
            raise ValueError(
                f"pack.token_budget must be at least {'2 * ' if times > 1 else ''}sequences.max_history + 1 = {need}, got "
                f"{budget}"
            )

    @property
    def tokens_per_event(self) -> int:
        """Most tokens that an event becomes in a pack."""
        return 2 if self.pack.tokens == "interleaved" else 1

    @property
    def segment_tokens(self) -> int:
        """Most tokens of a segment: the token budget, or where that is fitted later, whole history and targets."""
        whole = self.tokens_per_event * (self.sequences.max_history + self.sequences.max_targets)
        return whole if self.pack.token_budget == AUTO_BUDGET else int(self.pack.token_budget)

    def resolved(self) -> dict[str, Any]:
        """Return the complete config as plain JSON values, defaults included."""
        return self.model_dump(mode="json")

    def fingerprint(self) -> str:
        """Return the SHA-256 of the canonical JSON of the resolved config."""
        return fingerprint(self.resolved())


def load_config(path: Path | str, overrides: list[str] | None = None) -> Config:
    """Read a TOML config and apply `dotted.key=value` overrides.

    Args:
        path: The TOML file.
        overrides: Each `dotted.key=value`; the value is read as TOML, else as text.

    Returns:
        The validated, frozen config.

    Raises:
        ConfigError: Unreadable file, unknown key, broken rule; names key, rule, value, remedy.
    """
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"config file {path} does not exist (seen from {Path.cwd()}); name one of conf/*.toml with --config",
            where=str(path),
        ) from error
    except (OSError, ValueError) as error:  # no TOML, no UTF-8, no name of a file
        raise ConfigError(f"config file {path} cannot be read: {error}", where=str(path)) from error
    given = [_apply(raw, override) for override in overrides or []]
    return parse_config(raw, where=str(path), overridden=given)


def parse_config(raw: dict[str, Any], *, where: str = "config", overridden: Sequence[str] = ()) -> Config:
    """Validate plain values as a config; raises ConfigError as `load_config` does.

    Args:
        raw: The values.
        where: Their file, for messages.
        overridden: Keys that --set gave: an error of these alone names it and not the file.
    """
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        found = error.errors(include_url=False)
        # a list of which every entry is wrong also counts as too short: that is no error of its own
        inner = {detail["loc"][:end] for detail in found for end in range(len(detail["loc"]))}
        details = [detail for detail in found if not (detail["type"] == "too_short" and detail["loc"] in inner)]
        keys = [_key(raw, detail["loc"]) for detail in details]
        told = [_explain(key, detail) for key, detail in zip(keys, details, strict=True)]
        if all(any(f"{key}.".startswith(f"{given}.") for given in overridden) for key in keys):
            where = "--set"
        raise ConfigError(f"{where}: {_listed(told)}", where=keys[0] or where) from error


def _key(raw: Any, loc: tuple[int | str, ...]) -> str:
    """Return a place as a dotted key; an entry of a list stands under its name where it has one."""
    key, node = "", raw
    for part in loc:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            node = None
        name = node.get("name") if isinstance(part, int) and isinstance(node, dict) else None
        key += f"[{name}]" if isinstance(name, str) and name else f".{part}"
    return key.removeprefix(".")


def _listed(told: list[str]) -> str:
    """Return one error as it is, several one a line."""
    if len(told) == 1:
        return told[0]
    lines = told[:_MAX_ERRORS] + ([f"and {len(told) - _MAX_ERRORS} more"] if len(told) > _MAX_ERRORS else [])
    return "\n  ".join([f"{len(told)} errors", *lines])


def _explain(key: str, detail: Any) -> str:
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{key} is no known key; remove it or mend its spelling"
    if detail["type"] in ("missing", "missing_argument"):
        return f"{key} is missing; add it"
    if (told := _other_kind(key, detail)) is not None:
        return told
    text = detail["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(detail["input"], dict | BaseModel) else f", got {detail['input']!r}"
    named = not key or text.startswith((f"{key}.", f"{key}:"))  # a rule across keys names its own
    return f"{'' if named else f'{key}: '}{text}{shown}"


def _other_kind(key: str, detail: Any) -> str | None:
    """Return what to write where a value is of another TOML type than the key; None for all else."""
    kind, value, name = detail["type"], detail["input"], key.rpartition(".")[2]
    if kind == "string_type" and isinstance(value, dt.time):
        clock = f"{value:%H:%M:%S}".removesuffix(":00") if not value.microsecond else str(value)
        return f'{key} must be text, and {value} without quotes is a time to TOML; write {name} = "{clock}"'
    if kind == "string_type" and isinstance(value, dt.date):  # a datetime, too
        return f'{key} must be text, and {value} without quotes is a date to TOML; write {name} = "{value}"'
    if kind == "string_type" and isinstance(value, int | float):
        return f'{key} must be text, got {value!r}; write {name} = "{_toml(value)}"'
    if kind in ("tuple_type", "list_type"):
        remedy = f"; write {name} = [{json.dumps(value, ensure_ascii=False)}]" if isinstance(value, str) else ""
        return f"{key} must be a list, got {value!r}{remedy}"
    if kind in ("model_type", "dict_type", "dataclass_type"):
        return f"{key} must be a table, got {value!r}; write its keys below [{key}]"
    return None


def _toml(value: float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _apply(raw: dict[str, Any], override: str) -> str:
    """Set one key of the values and return it."""
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set needs dotted.key=value, got {override!r}", where=override)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    node: Any = raw
    *parents, last = key.strip().split(".")
    for part in parents:
        node = node.setdefault(part, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise ConfigError(f"--set {key}: the key's parent is no table; lists are set whole", where=key)
    node[last] = value
    return key.strip()
