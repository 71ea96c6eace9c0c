"""Hand-made users as batches and packs, for tests of model, training and scoring: no Polars, no vocabulary files."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from gr_core.data.batches import Batch
from gr_core.data.packfile import PackMeta, Segments, write_pack
from gr_core.hashing import file_sha256
from gr_core.model.embeddings import RowMap, Tables, TableSpec
from gr_core.model.inputs import InputBuilder
from gr_core.model.recommender import Recommender, new_recommender
from gr_core.model.settings import ModelConfig
from gr_core.refs import Bound
from gr_core.schema import PACK_COLUMNS, pack_schema
from gr_core.train.run import Run
from gr_core.train.settings import TrainConfig

torch.set_num_threads(1)  # small tensors; a second thread only waits

US = 1_000_000
FEATURES = ("item_id", "kind", "surface")
ACTIONS = ("click", "like", "hate")
SUPERVISED = 0b011
MODEL = ModelConfig(
    width=16, num_layers=2, num_heads=2, item_features=("item_id", "kind"), context_features=("surface",)
)
ROWS = {"item_id": 40, "kind": 9, "surface": 6}


@dataclass(frozen=True, kw_only=True)
class User:
    """One segment: history in (visible_at) order, then targets in (shown_at) order; rows by feature."""

    name: str
    rows: dict[str, np.ndarray]
    actions: np.ndarray
    known: np.ndarray
    labels: np.ndarray
    label_known: np.ndarray
    time: np.ndarray
    supervise: np.ndarray
    weight: np.ndarray
    max_history: int = 1000

    def columns(self) -> dict[str, np.ndarray]:
        """Return the pack columns, lo and hi counted from the segment's first token."""
        history = self.time[self.supervise == 0]
        number = np.arange(len(self.time))
        seen = np.searchsorted(history, self.time, side="left")
        hi = np.where(self.supervise != 0, seen, number)
        lo = np.where(self.supervise != 0, np.maximum(hi - self.max_history, 0), 0)
        own = {name: getattr(self, name) for name in PACK_COLUMNS if name not in ("lo", "hi", "position")}
        values = {**self.rows, **own, "lo": lo, "hi": hi, "position": hi}
        return {f.name: values[f.name].astype(f.type.to_pandas_dtype()) for f in pack_schema(list(self.rows))}

    def change(self, column: str, token: int, value: int) -> "User":
        """Return a copy with one entry changed."""
        values = getattr(self, column).copy()
        values[token] = value
        return dataclasses.replace(self, **{column: values})


def random_user(name: str, num_history: int, num_targets: int, seed: int, **more: Any) -> User:
    """Return a user with random rows, actions, labels and times; targets fall between and after the history."""
    rng = np.random.default_rng([seed, num_history, num_targets])
    total = num_history + num_targets
    is_target = np.arange(total) >= num_history
    visible = np.sort(rng.integers(0, 10**5, num_history))
    shown = np.sort(rng.integers(2 * 10**4, 12 * 10**4, num_targets))
    rows = {table: rng.integers(2, count, total) for table, count in ROWS.items()}
    rows["surface"] = np.where(is_target, rows["surface"], 0)
    label_known = np.where(is_target, rng.integers(1, 4, total), 0)
    known = np.where(is_target, 0, rng.integers(0, 8, total))
    return User(
        name=name,
        rows=rows,
        actions=known & rng.integers(0, 8, total),
        known=known,
        labels=label_known & rng.integers(0, 4, total),
        label_known=label_known,
        time=np.concatenate([visible, shown]) * US,
        supervise=is_target.astype(np.uint8),
        weight=rng.choice([0.5, 1.0, 2.0], total),
        **more,
    )


def join(users: Sequence[User]) -> Segments:
    """Put users end to end as segments."""
    parts = [user.columns() for user in users]
    lengths = [len(user.time) for user in users]
    events = [f"{user.name}:{i}" for user in users for i in range(np.count_nonzero(user.supervise))]
    return Segments(
        columns={name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
        lengths=np.asarray(lengths, np.int64),
        users=[user.name for user in users],
        event_ids=events,
    )


def make_batch(users: Sequence[User]) -> Batch:
    """Return one batch with the users in the given order."""
    segments = join(users)
    starts = np.concatenate([[0], np.cumsum(segments.lengths)])
    columns = dict(segments.columns)
    shift = np.repeat(starts[:-1], segments.lengths).astype(np.int32)
    columns["lo"], columns["hi"] = columns["lo"] + shift, columns["hi"] + shift
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    return Batch(
        number=0,
        rows={name: tensors[name] for name in users[0].rows},
        **{name: tensors[name] for name in PACK_COLUMNS},
        segment_starts=starts,
        weights={"token": float(columns["supervise"].sum())},
    )


def table_specs(rows: Mapping[str, int] = ROWS) -> tuple[TableSpec, ...]:
    """Return one table a feature."""
    return tuple(TableSpec(name=name, rows=count, capacity=2 * count) for name, count in rows.items())


@dataclass
class Net:
    """A model with tables, as scoring runs it."""

    config: ModelConfig = MODEL
    actions: int = len(ACTIONS)
    supervised: int = SUPERVISED
    seed: int = 0
    rows: Mapping[str, int] = field(default_factory=lambda: dict(ROWS))

    def __post_init__(self) -> None:
        self.tables = Tables(table_specs(self.rows), self.config.width, seed=self.seed)
        # rows of visible size, so that what should change a logit does
        self.tables.weight.mul_(20)
        self.model: Recommender = new_recommender(
            self.config, self.actions, self.supervised.bit_count(), seed=self.seed
        )
        self.builder = InputBuilder(self.config, self.actions, self.supervised, RowMap(table_specs(self.rows)))

    def logits(self, users: Sequence[User]) -> torch.Tensor:
        """Score one batch, [N, W]."""
        inputs = self.builder.build(make_batch(users))
        self.model.eval()
        with torch.no_grad():
            return self.model(self.tables.weight[inputs.rows], inputs)


EXAMPLE_2 = {
    "item_id": [6, 7, 8, 6, 7, 7, 9, 6, 9, 10],
    "actions": [1, 0, 2, 2, 1, 0, 0, 0, 0, 0],
    "known": [3, 3, 3, 3, 3, 0, 0, 3, 0, 0],
    "labels": [0, 0, 0, 0, 0, 1, 0, 0, 1, 0],
    "label_known": [0, 0, 0, 0, 0, 3, 3, 0, 3, 1],
    "time": [t * US for t in (2800, 2900, 3000, 4000, 6800, 5000, 7000, 3800, 3000, 4000)],
    "position": [0, 1, 2, 3, 4, 4, 5, 0, 0, 1],
    "lo": [0, 0, 0, 0, 0, 0, 0, 7, 7, 7],
    "hi": [0, 1, 2, 3, 4, 4, 5, 7, 7, 8],
    "supervise": [0, 0, 0, 0, 0, 1, 1, 0, 1, 1],
    "weight": [1.0] * 10,
}
EXAMPLE_9_INDEX = {
    "format": 1,
    "tokens": "targets",
    "role": "train",
    "num_tokens": 10,
    "num_segments": 2,
    "num_targets": 4,
    "num_supervised": 4,
    "segment_starts": [0, 7, 10],
    "segment_users": ["A", "B"],
    "batch_segments": [0, 2],
    "batch_weights": {"token": [4.0], "segment": [2.0], "event_weight": [4.0]},
    "vocabulary": "v1",
    "bound": {"commit": 1, "cutoff": "2025-06-02T00:00:00Z", "delta_version": 1},
    "fingerprint": "sha256:...",
}
EXAMPLE_9_RUN = {
    "packs": {"train": "packs/train"},
    "vocabulary": {"item_id": {"rows": 11, "capacity": 16}},
    "parent": None,
    "output": "checkpoint",
    "config": {"model": {}, "train": {}, "pack": {}},
    "seed": 0,
    "device": "auto",
    "resume": True,
}


@dataclass(frozen=True)
class PackMaker:
    """Writes packs and runs below one folder."""

    root: Path

    def pack(self, name: str, users: Sequence[User], **meta: Any) -> Path:
        """Write a pack of the users and return its folder."""
        values = {"role": "train", "token_budget": 256, "bound": Bound(commit=1, cutoff_us=2), "vocabulary": "v1"}
        described = {"features": FEATURES, "actions": ACTIONS, "supervised": SUPERVISED, **values, **meta}
        write_pack(self.root / name, join(users), PackMeta(**described))
        return self.root / name

    def example_9(self, name: str, *, labels: Mapping[int, int] | None = None, **more: Any) -> Path:
        """Write example 2's pack by hand with example 9's index and RUN.json; return RUN.json's path.

        Args:
            name: Folder to write below.
            labels: Token number to other label bits.
            more: Keys that the index says besides.
        """
        folder = self.root / name
        pack = folder / "packs/train"
        pack.mkdir(parents=True, exist_ok=True)
        columns = {**EXAMPLE_2, "labels": [(labels or {}).get(i, bits) for i, bits in enumerate(EXAMPLE_2["labels"])]}
        # fields as pyarrow makes them: nullable, though nothing is null
        table = pa.table({f.name: pa.array(columns[f.name], f.type) for f in pack_schema(["item_id"])})
        with pa.OSFile(str(pack / "pack.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        digests = {"pack.arrow": file_sha256(pack / "pack.arrow")}
        (pack / "index.json").write_text(json.dumps({**EXAMPLE_9_INDEX, **more, "sha256": digests}))
        (folder / "RUN.json").write_text(json.dumps(EXAMPLE_9_RUN))
        return folder / "RUN.json"

    def edit(self, pack: Path, **changes: Any) -> Path:
        """Change entries of a pack's index, as another release would have written them."""
        index = json.loads((pack / "index.json").read_text())
        (pack / "index.json").write_text(json.dumps({**index, **changes}))
        return pack

    def run(self, pack: Path, output: str, **changes: Any) -> Run:
        """Return a run on a pack; changes are Run's fields, or `train` settings as a dict."""
        train = TrainConfig(num_threads=1, **changes.pop("settings", {}))
        model = changes.pop("model", MODEL)
        return Run(
            pack=pack,
            tables=changes.pop("tables", table_specs()),
            vocabulary_version="v1",
            vocabulary_files=changes.pop("vocabulary_files", {}),
            parent=changes.pop("parent", None),
            output=self.root / output,
            model=model,
            train=train,
            config={"model": dataclasses.asdict(model), "train": dataclasses.asdict(train), "pack": {}},
            fingerprint=changes.pop("fingerprint", "f"),
            seed=changes.pop("seed", 0),
            device="cpu",
            resume=changes.pop("resume", True),
            **changes,
        )

    def run_file(self, run: Run) -> Path:
        """Write RUN.json of a run and return its path."""
        values = {
            "packs": {"train": str(run.pack.relative_to(self.root))},
            "vocabulary": {t.name: {"rows": t.rows, "capacity": t.capacity} for t in run.tables},
            "vocabulary_version": run.vocabulary_version,
            "parent": str(run.parent.relative_to(self.root)) if run.parent else None,
            "output": str(run.output.relative_to(self.root)),
            "config": dict(run.config),
            "fingerprint": run.fingerprint,
            "seed": run.seed,
            "device": "cpu",
            "resume": run.resume,
        }
        path = self.root / f"{run.output.name}.RUN.json"
        path.write_text(json.dumps(values))
        return path


class Tokens:
    """Access to the helpers above; a fixture, because test folders are no packages."""

    User, Net, PackMaker = User, Net, PackMaker
    MODEL, ROWS, ACTIONS, FEATURES, US = MODEL, ROWS, ACTIONS, FEATURES, US
    random_user = staticmethod(random_user)
    make_batch = staticmethod(make_batch)
    join = staticmethod(join)
    table_specs = staticmethod(table_specs)


@pytest.fixture
def tokens() -> type[Tokens]:
    """Return the helpers."""
    return Tokens


@pytest.fixture
def packs(tmp_path: Path) -> PackMaker:
    """Return a writer of packs and runs below the test's folder."""
    return PackMaker(tmp_path)


@pytest.fixture
def users() -> list[User]:
    """Return nine users of lengths 2 to 60, one without history."""
    sizes = [(0, 2), (1, 1), (5, 3), (8, 2), (13, 5), (20, 1), (33, 4), (40, 9), (50, 10)]
    return [random_user(f"u{i}", history, targets, seed=i) for i, (history, targets) in enumerate(sizes)]
