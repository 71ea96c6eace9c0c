"""Score a pack with a checkpoint: logits, labels and who they belong to, in pack order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gr_core.data.batches import PackReader
from gr_core.errors import FormatError
from gr_core.model.attention import bucketed_planner
from gr_core.model.embeddings import RowMap, TableSpec, read_fallbacks
from gr_core.model.execution import PLAIN, Execution
from gr_core.model.inputs import InputBuilder
from gr_core.model.recommender import Recommender, new_recommender
from gr_core.model.settings import ModelConfig
from gr_core.train.optim import copy_tensors
from gr_core.train.run import settings_of
from gr_core.train.state import load_checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """N supervised tokens of a pack as one checkpoint sees them; W supervised actions."""

    logits: npt.NDArray[np.float32]
    """[N, W]."""
    labels: npt.NDArray[np.int32]
    """Label bits, [N]."""
    label_known: npt.NDArray[np.int32]
    """Which of them are due, [N]."""
    time: npt.NDArray[np.int64]
    """shown_at, microseconds UTC, [N]."""
    users: list[str]
    event_ids: list[str]
    actions: list[str]
    """Names of the W logit columns."""
    action_bits: list[int]
    """Bit number of each logit column."""
    digest: str
    """SHA-256 of the pack's rows: equal exactly when two scorings saw the same rows."""

    @property
    def events(self) -> list[tuple[str, int, str]]:
        """What tells the events apart: user, shown_at (us) and event_id, which may come again (docs/event_table.md)."""
        return list(zip(self.users, self.time.tolist(), self.event_ids, strict=True))


class Scorer:
    """A checkpoint ready to score.

    Args:
        checkpoint: A complete checkpoint.
        num_threads: CPU threads.
        device: Where the model and the tables lie; scores come back on the CPU.
        execution: How the model runs.

    Raises:
        FormatError: The checkpoint is not complete or of another format.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        num_threads: int = 1,
        device: torch.device | str = "cpu",
        execution: Execution = PLAIN,
    ) -> None:
        torch.set_num_threads(num_threads)
        self.device = torch.device(device)
        tensors, self.state = load_checkpoint(checkpoint)
        self.config: ModelConfig = settings_of(ModelConfig, self.state["config"]["model"], "model")
        self.actions: list[str] = self.state["actions"]
        self.supervised: list[str] = self.state["supervised"]
        self.known_rows: dict[str, int] = {
            name: table["known_rows"] for name, table in self.state["vocabulary"]["tables"].items()
        }
        self.model: Recommender = new_recommender(self.config, len(self.actions), len(self.supervised), seed=0)
        copy_tensors({f"dense.{name}": p for name, p in self.model.named_parameters()}, tensors)
        execution.apply(self.model.eval().to(self.device))
        self.weight = torch.cat([tensors[f"sparse.{name}.weight"] for name in self.config.features]).to(self.device)

    def row_map(self, vocabulary: Path | None) -> RowMap:
        """Return the map from a pack's rows to this checkpoint's, given the pack's vocabulary directory (None: own)."""
        own = self.state["vocabulary"]["tables"]
        specs = [
            TableSpec(
                name=name, rows=own[name]["rows"], capacity=own[name]["capacity"], fallbacks=own[name]["fallbacks"]
            )
            for name in self.config.features
        ]
        if vocabulary is not None:
            described = json.loads((vocabulary / "vocabulary.json").read_text(encoding="utf-8"))["tables"]
            specs = [_with_vocabulary(spec, described[spec.name], vocabulary) for spec in specs]
        return RowMap(specs, self.known_rows)

    @torch.inference_mode()
    def score(self, pack: Path, *, vocabulary: Path | None = None) -> Scored:
        """Score every supervised token of a pack; see `score_pack`."""
        reader = PackReader(pack)
        self._check(reader)
        index = reader.index
        builder = _builder(self.config, index, self.row_map(vocabulary))
        parts: list[tuple[Any, ...]] = []
        with reader.ahead() as batches:
            for batch in batches:
                if batch.weights["token"] == 0:
                    continue
                inputs = builder.build(batch)
                at = inputs.targets
                there = inputs.to(self.device)
                logits = self.model(self.weight[there.rows], there).cpu()
                parts.append((logits, batch.labels[at], batch.label_known[at], batch.time[at]))
        empty = (torch.empty(0, len(self.supervised)), *(torch.empty(0, dtype=t) for t in _KINDS))
        columns = [torch.cat(column).numpy() for column in zip(*(parts or [empty]), strict=True)]
        event_ids, users = reader.targets()
        return Scored(
            logits=columns[0],
            labels=columns[1],
            label_known=columns[2],
            time=columns[3],
            users=users,
            event_ids=event_ids,
            actions=self.supervised,
            action_bits=builder.bits,
            digest=reader.digest,
        )

    def _check(self, reader: PackReader) -> None:
        index = reader.index
        same = index["actions"] == self.actions and index["supervised"] == self.state["supervised_mask"]
        if not same or set(index["features"]) != set(self.config.features):
            raise FormatError(
                f"{reader.path} has features {index['features']} and actions {index['actions']}, the checkpoint "
                f"{list(self.config.features)} and {self.actions}; pack again with the checkpoint's config",
                where=str(reader.path),
            )


_KINDS = (torch.int32, torch.int32, torch.int64)


def _with_vocabulary(spec: TableSpec, described: dict[str, Any], vocabulary: Path) -> TableSpec:
    rows = int(described["rows"])
    return replace(spec, rows=rows, fallback_of=read_fallbacks(vocabulary / f"{spec.name}.arrow", rows))


def _builder(config: ModelConfig, index: dict[str, Any], rows: RowMap) -> InputBuilder:
    """Return what turns the batches of a pack with this index into inputs."""
    planner, interleaved = bucketed_planner(index["layout"]), index["tokens"] == "interleaved"
    return InputBuilder(
        config, len(index["actions"]), index["supervised"], rows, planner=planner, interleaved=interleaved
    )


@torch.inference_mode()
def warm_up(
    reader: PackReader,
    config: ModelConfig,
    tables: Sequence[TableSpec],
    device: torch.device | str = "cpu",
    execution: Execution = PLAIN,
) -> None:
    """Score one batch of a pack with untrained weights: what a process does only once is done before it matters.

    Args:
        reader: The pack.
        config: Shape of the model.
        tables: Tables of the pack's vocabulary.
        device: Where the model will run.
        execution: How it will run: compiled regions come from the disk cache where an earlier process left them.
    """
    index = reader.index
    number = next((n for n, weight in enumerate(index["batch_weights"]["token"]) if weight > 0), None)
    if number is None:
        return
    ordered = sorted(tables, key=lambda table: config.features.index(table.name))
    inputs = _builder(config, index, RowMap(ordered)).build(reader.batch(number)).to(torch.device(device))
    model = new_recommender(config, len(index["actions"]), int(index["supervised"]).bit_count(), seed=0)
    execution.apply(model.eval().to(device))
    with torch.inference_mode():
        model(torch.zeros(len(inputs.rows), config.width, device=device), inputs)


def score_pack(checkpoint: Path, pack: Path, *, vocabulary: Path | None = None, num_threads: int = 1) -> Scored:
    """Score every supervised token of a pack, in pack order.

    Args:
        checkpoint: A complete checkpoint.
        pack: Any role; of this checkpoint's vocabulary or of a later one of its lineage.
        vocabulary: Directory of the pack's vocabulary. Rows that the checkpoint does not know map to that vocabulary's
            fallback rows, so the scores equal those on a pack of the checkpoint's own vocabulary. None: to row 2.
        num_threads: CPU threads.

    Returns:
        Logits, labels and owners of the N supervised tokens.

    Raises:
        FormatError: Checkpoint, pack or vocabulary of another format, or of other features or actions.
    """
    return Scorer(checkpoint, num_threads=num_threads).score(pack, vocabulary=vocabulary)
