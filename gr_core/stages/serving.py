"""`daybreak score`: a file of requests in, a file of scores out, by a registered version of the home.

What a request leaves out is read from the home's event table as it is now: a history that is null, and side features of
plain candidates (those of the item's newest event). Nothing in the home is written.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from typing import IO, Any

import pyarrow as pa

from gr_core import environment
from gr_core.atomic import write_whole
from gr_core.config import Config
from gr_core.config_rules import check_lake
from gr_core.data import recall, users
from gr_core.errors import DataContractError, FormatError, UsageError
from gr_core.lake import store, userkey
from gr_core.lake.events import EventTable
from gr_core.lake.journal import Entry, Journal, Version, challenger, champion, previous, versions
from gr_core.lake.pruned import refuse_version
from gr_core.registry import requests
from gr_core.registry.scorer import RequestScorer, id_text, moment

logger = logging.getLogger(__name__)

Progress = Callable[[int, int | None], None]
_SHOWN = 10  # numbers that a message names


def find_version(config: Config, home: str, entries: Sequence[Entry], name: str) -> Version:
    """Return the version that an alias or a number means: champion, challenger and previous as the journal has them.

    Raises:
        UsageError: No such version or alias.
    """
    known = versions(entries)
    best, before = champion(entries), previous(entries)
    ours = {
        "champion": best.version if best else None,
        "previous": before.version if before else None,
        "challenger": challenger(entries),
    }
    number = int(name) if name.isdecimal() else ours[name] if name in ours else _other_alias(config, home, name)
    if number in known:
        return known[number]
    if number is not None:
        refuse_version(entries, number, where="model")
    there = ", ".join(map(str, sorted(known)[-_SHOWN:])) or "none"
    what = "no registered version" if name.isdecimal() else "no alias of a registered version"
    raise UsageError(
        f"--model {name} is {what}; the aliases are {', '.join(k for k, v in ours.items() if v) or 'none'}, the newest "
        f"versions {there}",
        where="model",
    )


def _other_alias(config: Config, home: str, name: str) -> int | None:
    """Return the version of an alias that a person set in the registry."""
    from gr_core.registry.mlflow_store import MlflowStore  # costs a second, and few have such aliases

    return MlflowStore(environment.tracking_uri(home), environment.artifact_root(home), config.name).aliases().get(name)


def score(
    config: Config, home: str, model: str, source: str, output: str, *, progress: Progress | None = None
) -> dict[str, Any]:
    """Score the candidates of every request of a file.

    Args:
        config: The run's config.
        home: URI of the home.
        model: An alias or the number of a version.
        source: Path or s3:// URI of the requests, Parquet or JSON lines by its suffix.
        output: The same of the scores; replaced whole, and only when all are scored.
        progress: Called with the rows scored and their total (None: not known).

    Returns:
        rows, model_version, output.

    Raises:
        UsageError: No such version or file, or a suffix that names no form.
        DataContractError: A row that cannot be scored, or a column that the model does not read or that is repeated, with file, row and column; nothing is written.
        FormatError: The version's checkpoint is gone or damaged.
        ConfigError: The config's lake is not the home's, or the key of a pseudonymised source is missing or another.
    """
    asked, form = requests.RequestFile.at(source), requests.form_of(output, "--output")
    entries = Journal(store.join(home, "lake", "journal")).entries()
    check_lake(config, entries)
    version = find_version(config, home, entries, model)
    _check_output(source, output)
    try:
        scorer = RequestScorer(store.local_copy(version.checkpoint), num_threads=config.train.num_threads or 1)
    except (FileNotFoundError, FormatError) as error:
        raise FormatError(
            f"version {version.version} cannot be loaded from {version.checkpoint}: {error}; name another version",
            where="model",
        ) from error
    lake = Recall(config, home, scorer)
    columns = requests.Columns.of(scorer.item_features, scorer.context_features)

    def write(stream: IO[bytes]) -> int:
        names = [f"scores_{action}" for action in scorer.actions]
        writer, total, rows = requests.ScoreWriter(stream, form, names, asked.id_type()), asked.total(), 0
        for piece in asked.pieces():
            for row, one in piece:
                requests.check(source, row, one, scorer.item_features, columns)
            found = _scored(scorer, source, piece, lake.complete([one for _, one in piece]))
            try:
                writer.write([one.get("request_id") for _, one in piece], found)
            except pa.ArrowException as error:
                where = f"{source}: rows {piece[0][0]} to {piece[-1][0]}, column request_id"
                raise DataContractError(
                    f"{where}: the ids are not of one type ({error}); give all text or all numbers", where=where
                ) from error
            rows += len(piece)
            if progress is not None:
                progress(rows, total)
        writer.close()
        return rows

    return {"rows": _written(output, write), "model_version": version.version, "output": output}


def _check_output(source: str, output: str) -> None:
    if not store.is_local(output):
        return
    target = store.local_path(output)
    if store.is_local(source) and target.resolve() == store.local_path(source).resolve():
        raise UsageError(f"--output {output} is the file of requests; name another one", where="output")
    if not target.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {target.parent}; make it first", where="output")


def _written(output: str, write: Callable[[IO[bytes]], int]) -> int:
    """Write the file whole or not at all; returns what `write` does."""
    counts: list[int] = []
    if store.is_local(output):
        write_whole(store.local_path(output), lambda stream: counts.append(write(stream)))
        return counts[0]
    buffer = io.BytesIO()
    counts.append(write(buffer))
    store.write_bytes(output, buffer.getvalue())
    return counts[0]


def _scored(
    scorer: RequestScorer, uri: str, piece: Sequence[requests.Numbered], complete: list[dict[str, Any]]
) -> dict[str, list[list[float]]]:
    """Score a piece; where the scorer refuses it, find the row that it means."""
    try:
        return scorer.score(complete)
    except DataContractError as error:
        for (row, _), one in zip(piece, complete, strict=True):
            try:
                scorer.score([one])
            except DataContractError as alone:
                raise requests.bad_row(uri, row, alone.where or "*", alone.message) from error
        raise


class Recall:
    """Fills in what requests leave out, from the event table as it is when first asked.

    Args:
        config: The run's config.
        home: URI of the home.
        scorer: The model.
    """

    def __init__(self, config: Config, home: str, scorer: RequestScorer) -> None:
        self._config, self._scorer = config, scorer
        self._table = EventTable(store.join(home, "lake", "events"), config)
        userkey.check(config, home, started=self._table.exists())
        self._version = self._table.delta_version() if self._table.exists() else None
        self._side = [name for name in scorer.item_features if name != "item_id"]
        self._items: dict[str, tuple[Any, ...]] | None = None

    def complete(self, asked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the requests with what the lake knows where they say nothing."""
        if self._version is None:
            return list(asked)
        return self._with_features(self._with_histories(asked))

    def _with_histories(self, asked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        open_ = [n for n, one in enumerate(asked) if one.get("history") is None and one.get("user_id") is not None]
        found = list(asked)
        if not open_:
            return found
        raw = {id_text(asked[n]["user_id"]) for n in open_}
        own = {one: users.stored_user(self._config, one) for one in raw}
        features, actions = self._scorer.item_features, self._scorer.all_actions
        rows = self._table.read(
            self._version or 0, users=sorted(set(own.values())), columns=recall.history_columns(features, actions)
        )
        made = recall.histories(
            rows,
            [(own[id_text(asked[n]["user_id"])], moment(asked[n]["shown_at"])) for n in open_],
            features=features,
            action_names=actions,
            limit=self._scorer.max_history,
        )
        for n, history in zip(open_, made, strict=True):
            found[n] = {**found[n], "history": history}
        return found

    def _with_features(self, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self._with_own(one) for one in asked] if self._side else asked

    def _with_own(self, one: dict[str, Any]) -> dict[str, Any]:
        plain = [id_text(each) for each in one["candidates"] if not isinstance(each, dict)]
        missing = [name for name in self._side if one.get(f"candidate_{name}") is None]
        if not missing or len(plain) < len(one["candidates"]):
            return one
        known = self._catalogue()
        nothing = (None,) * len(self._side)
        values = [known.get(item, nothing) for item in plain]
        return one | {f"candidate_{name}": [v[self._side.index(name)] for v in values] for name in missing}

    def _catalogue(self) -> dict[str, tuple[Any, ...]]:
        """Return every item's side features; read once, a bucket at a time."""
        if self._items is None:
            columns = ["item_id", "event_id", "shown_at", *self._side]
            buckets = range(self._config.lake.num_buckets)
            parts = (self._table.read(self._version or 0, buckets=[number], columns=columns) for number in buckets)
            self._items = dict(recall.newest_features(parts, self._side))
        return self._items
