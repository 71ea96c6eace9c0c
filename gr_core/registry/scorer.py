"""A registered model as it serves: requests in, one logit per candidate and action out. MLflow's loader module.

Needs torch, numpy and pyarrow; imports neither MLflow nor Polars nor pandas (a data frame is only read as what MLflow
hands over). A request is one row of `score --input` (examples 9):

    request_id  any value, given back
    shown_at    when the candidates are shown: timestamp (UTC where it has no zone), ISO text, or int microseconds
    history     list of {item_id, visible_at, actions, known, side features}: one entry a history token in order, a
                late action its own (pack.tokens = interleaved: with shown_at, null for late actions); null or absent: none. Entries not visible before shown_at are left out, as are
                those beyond the training's limits (max_history, max_age_days, time window)
    candidates  list of item ids, or of {item_id, side features}
    candidate_<feature>  optional lists parallel to `candidates`: side features of candidates given as plain ids
    <context feature>    one value of the request

Ids and features are text or integers. A feature that is not given is unknown (the unknown row), so give candidates
the side features they were trained with. A request is one segment: its history is computed once, and candidates are
target tokens that do not see each other. The computation is a pack's: logits equal those of a segment with the same
first history token (a segment of many targets begins earlier, which its deeper layers can tell). Scores are logits:
their order never saturates, and a sigmoid makes probabilities of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from gr_core.data.batches import Batch
from gr_core.data.intervals import Layout, Limits, lay_out
from gr_core.errors import DataContractError
from gr_core.eval.scores import keep
from gr_core.eval.scoring import Scorer
from gr_core.model.inputs import InputBuilder
from gr_core.registry.interleaving import LATE, interleaved
from gr_core.registry.signature import interleaves
from gr_core.schema import FIRST_FALLBACK_ROW, PACK_COLUMNS, PAD_ROW, UNKNOWN_ROW

Request = Mapping[str, Any]
_UNLIMITED = 2**31
_UNLIMITED_US = 2**61
_CHUNK_TOKENS = 32_768
_DAY_US = 86_400_000_000


class RequestScorer:
    """A checkpoint that answers requests.

    Args:
        path: A complete checkpoint with its vocabulary tables.
        num_threads: CPU threads.

    Raises:
        FormatError: No complete checkpoint.
        DataContractError: A vocabulary table is missing.
    """

    def __init__(self, path: Path, *, num_threads: int = 1) -> None:
        self._scorer = Scorer(path, num_threads=num_threads)
        state, config = self._scorer.state, self._scorer.config
        self.actions: list[str] = list(self._scorer.supervised)
        self.all_actions: tuple[str, ...] = tuple(self._scorer.actions)
        self.item_features = config.item_features
        self.context_features = config.context_features
        self._ids = {name: _read_rows(path / "vocabulary" / f"{name}.arrow") for name in config.features}
        self._limits = _limits(state["config"])
        self.max_history = self._limits.max_history
        self._builder = InputBuilder(
            config,
            len(self._scorer.actions),
            int(state["supervised_mask"]),
            self._scorer.row_map(None),
            interleaved=interleaves(state),
        )

    def score(self, requests: Sequence[Request]) -> dict[str, list[list[float]]]:
        """Score the candidates of every request.

        Args:
            requests: Rows as the module's docstring tells them.

        Returns:
            scores_<action> -> one list a request: one fp32 logit a candidate, in order.

        Raises:
            DataContractError: A request without shown_at, or lists of unequal length; names the request.
        """
        found: dict[str, list[list[float]]] = {f"scores_{action}": [] for action in self.actions}
        for chunk in _chunks(requests):
            sizes = [len(_entries(request, "candidates")) for request in chunk]
            logits = self._logits(chunk, sizes)
            for column, name in enumerate(found):
                parts = np.split(logits[:, column], np.cumsum(sizes)[:-1])
                found[name] += [part.tolist() for part in parts]
        return found

    def predict(self, frame: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Score a pandas data frame of requests; MLflow's entry point.

        Args:
            frame: One row a request.
            params: None; the model takes none.

        Returns:
            A frame of the same class and index: request_id where given, then scores_<action> lists.
        """
        del params
        requests = frame.to_dict("records")
        kept = {"request_id": list(frame["request_id"])} if "request_id" in frame else {}
        return type(frame)({**kept, **self.score(requests)}, index=frame.index)

    def get_raw_model(self) -> RequestScorer:
        """Return what MLflow wraps: for `write_scores`, which is no matter of requests."""
        return self

    def write_scores(self, pack: str, vocabulary: str, out: str) -> None:
        """Score a pack, as evaluation does, and keep the logits in the folder `out`; the gate calls it (registry.artifact)."""
        scored = self._scorer.score(Path(pack), vocabulary=Path(vocabulary))
        keep(Path(out), scored, self._scorer.state["digest"])

    def _logits(self, requests: Sequence[Request], sizes: list[int]) -> npt.NDArray[np.float32]:
        if not sum(sizes):
            return np.empty((0, len(self.actions)), np.float32)
        with torch.inference_mode():
            inputs = self._builder.build(self._batch(requests, sizes))
            logits: Tensor = self._scorer.model(self._scorer.weight[inputs.rows], inputs)
        return logits.numpy()

    def _batch(self, requests: Sequence[Request], sizes: list[int]) -> Batch:
        """Lay requests out as training lays segments out, with the same function."""
        shown = [_time(request.get("shown_at"), request, "shown_at") for request in requests]
        past = [_history(request, before) for request, before in zip(requests, shown, strict=True)]
        flat = [entry for entries in past for _, entry in entries]
        visible = np.array([time for entries in past for time, _ in entries], np.int64)
        targets = np.repeat(np.array(shown, np.int64), sizes)
        plan = lay_out(visible, _starts([len(p) for p in past]), targets, _starts(sizes), self._limits)
        history, wanted = plan.source[~plan.is_target], plan.source[plan.is_target]
        rows: dict[str, npt.NDArray[Any]] = {}
        for name in self.item_features:
            seen = self._rows(name, [entry.get(name) for entry in flat])
            asked = self._rows(name, [v for request in requests for v in _candidate_values(request, name)])
            rows[name] = _spread(plan, seen[history], asked[wanted], np.int32)
        owners = np.repeat(np.arange(len(requests)), sizes)
        for name in self.context_features:
            context = self._rows(name, [request.get(name) for request in requests])
            rows[name] = _spread(plan, np.full(len(history), PAD_ROW), context[owners][wanted], np.int32)
        nothing = np.zeros(len(wanted), np.int32)
        masks = {
            name: np.array([int(entry.get(name) or 0) for entry in flat], np.int32) for name in ("actions", "known")
        }
        zeros = np.zeros(len(plan.source), np.int32)
        columns = {
            **rows,
            "actions": _spread(plan, masks["actions"][history], nothing, np.int32),
            "known": _spread(plan, masks["known"][history], nothing, np.int32),
            "labels": zeros,
            "label_known": zeros,
            "time": _spread(plan, visible[history], targets[wanted], np.int64),
            "position": plan.position,
            "lo": plan.lo,
            "hi": plan.hi,
            "supervise": plan.is_target.astype(np.uint8),
            "weight": np.ones(len(plan.source), np.float32),
        }
        lengths = plan.lengths
        if self._builder.interleaved:
            shown_at = _spread(plan, _shown(past, requests)[history], targets[wanted], np.int64)
            columns, lengths = interleaved(plan, columns, shown_at, self._limits.time_window_us, list(rows))
        return _as_batch(columns, lengths, list(rows))

    def _rows(self, feature: str, values: Sequence[Any]) -> npt.NDArray[np.int32]:
        """Look rows up, [len(values)]; not given: the unknown row; never counted: the first fallback row."""
        table = self._ids[feature]
        found = [UNKNOWN_ROW if _missing(v) else table.get(id_text(v), FIRST_FALLBACK_ROW) for v in values]
        return np.array(found, np.int32)


def _load_pyfunc(path: str) -> RequestScorer:
    """Load the model from the checkpoint that was registered; called by mlflow.pyfunc.load_model."""
    return RequestScorer(Path(path))


def _limits(config: Mapping[str, Any]) -> Limits:
    """Return what a target may see, as the checkpoint was trained; without a `sequences` section, all that is given."""
    rules, pack = config.get("sequences") or {}, config.get("pack") or {}
    window, age = pack.get("time_window_seconds"), rules.get("max_age_days")
    return Limits(
        max_history=rules.get("max_history") or _UNLIMITED,
        max_targets=_UNLIMITED,
        max_age_us=age * _DAY_US if age else _UNLIMITED_US,
        token_budget=4 * _UNLIMITED,
        time_window_us=window * 1_000_000 if window else None,
    )


def _read_rows(path: Path) -> dict[str, int]:
    """Return id -> row of a vocabulary table; an id that has no row yet has its fallback row."""
    try:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
            ids, row, fallback = (table.column(name).to_pylist() for name in ("id", "row", "fallback"))
    except (OSError, KeyError, pa.ArrowInvalid) as error:
        raise DataContractError(
            f"vocabulary table {path} cannot be read: {error}; register a checkpoint with its vocabulary",
            where=str(path),
        ) from error
    return {key: own if own >= 0 else shared for key, own, shared in zip(ids, row, fallback, strict=True)}


def _chunks(requests: Sequence[Request]) -> list[list[Request]]:
    """Cut requests into runs of about `_CHUNK_TOKENS` tokens, so that memory does not follow the file's length."""
    chunks: list[list[Request]] = []
    room = 0
    for request in requests:
        size = len(_entries(request, "history")) + len(_entries(request, "candidates"))
        if not chunks or size > room:
            chunks.append([])
            room = _CHUNK_TOKENS
        chunks[-1].append(request)
        room -= size
    return chunks


def _history(request: Request, before: int) -> list[tuple[int, Mapping[str, Any]]]:
    """Return (visible_at, entry) of what was visible before the candidates are shown, oldest first, ties as given."""
    timed = [(_time(e.get("visible_at"), request, "history.visible_at"), e) for e in _entries(request, "history")]
    return sorted((pair for pair in timed if pair[0] < before), key=lambda pair: pair[0])


def _candidate_values(request: Request, feature: str) -> list[Any]:
    entries = _entries(request, "candidates")
    given = _entries(request, f"candidate_{feature}")
    if given and len(given) != len(entries):
        raise DataContractError(
            f"request {request.get('request_id')!r} has {len(entries)} candidates and {len(given)} values of "
            f"candidate_{feature}; give one value a candidate",
            where=f"candidate_{feature}",
        )
    values = given or [None] * len(entries)
    if feature == "item_id":
        return [e.get("item_id") if isinstance(e, Mapping) else e for e in entries]
    return [e.get(feature) if isinstance(e, Mapping) else v for e, v in zip(entries, values, strict=True)]


def _entries(request: Request, name: str) -> list[Any]:
    value = request.get(name)
    return list(value) if isinstance(value, list | tuple | np.ndarray) else []


def _starts(sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.append(0, np.cumsum(sizes)).astype(np.int64)


def _spread(plan: Layout, history: npt.NDArray[Any], targets: npt.NDArray[Any], dtype: type) -> npt.NDArray[Any]:
    """Lay history and target values out in token order."""
    column: npt.NDArray[Any] = np.empty(len(plan.source), dtype)
    column[~plan.is_target], column[plan.is_target] = history, targets
    return column


def _as_batch(columns: Mapping[str, npt.NDArray[Any]], lengths: npt.NDArray[np.int64], features: list[str]) -> Batch:
    """Return one batch of segments; lo and hi become batch-relative."""
    base = np.repeat(np.cumsum(lengths) - lengths, lengths).astype(np.int32)
    shifted = {**columns, "lo": columns["lo"] + base, "hi": columns["hi"] + base}
    tensors = {name: torch.from_numpy(values) for name, values in shifted.items()}
    return Batch(
        number=0,
        rows={name: tensors[name] for name in features},
        **{name: tensors[name] for name in PACK_COLUMNS},
        segment_starts=np.append(0, np.cumsum(lengths)),
        weights={},
    )


def _shown(
    past: Sequence[Sequence[tuple[int, Mapping[str, Any]]]], requests: Sequence[Request]
) -> npt.NDArray[np.int64]:
    """Return shown_at of every history entry (us), LATE of a late action, which has none.

    Raises:
        DataContractError: A history of which no entry says when it was shown.
    """
    found = []
    for request, entries in zip(requests, past, strict=True):
        times = [entry.get("shown_at") for _, entry in entries]
        if entries and all(_missing(time) for time in times):
            raise DataContractError(
                f"request {request.get('request_id')!r} has a history without shown_at, which this model (pack.tokens = "
                "interleaved) reads; give each entry its shown_at, and null to late actions alone",
                where="history.shown_at",
            )
        found += [LATE if _missing(time) else _time(time, request, "history.shown_at") for time in times]
    return np.array(found, np.int64)


def _missing(value: Any) -> bool:
    """Tell whether pandas or the caller left a value out: None, or what does not equal itself (NaN, NaT, NA)."""
    if value is None:
        return True
    same = value == value
    return not (same is True or same is np.True_)


def id_text(value: Any) -> str:
    """Return an id as the text that vocabularies and the event table know it by."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # an integer column that has nulls reaches us as floats
    return value if isinstance(value, str) else str(value)


def moment(value: Any) -> int:
    """Return microseconds since the epoch of a time in any form that a request's shown_at may have."""
    return _time(value, {}, "shown_at")


def _time(value: Any, request: Request, where: str) -> int:
    """Return microseconds since the epoch of any form of time; one without a zone is UTC."""
    if _missing(value):
        raise DataContractError(
            f"request {request.get('request_id')!r} has no {where}; give a UTC time a row", where=where
        )
    if isinstance(value, np.datetime64):
        return int(value.astype("datetime64[us]").astype(np.int64))
    if isinstance(value, int | np.integer):
        return int(value)
    point = datetime.fromisoformat(value) if isinstance(value, str) else value
    point = point if point.tzinfo is not None else point.replace(tzinfo=UTC)
    seconds = point - datetime(1970, 1, 1, tzinfo=UTC)
    return (seconds.days * 86_400 + seconds.seconds) * 1_000_000 + seconds.microseconds
