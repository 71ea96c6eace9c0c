"""A small trained checkpoint, made by the product's own stages, and the events it came from."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pytest
import torch

from gr_core.data import vocabulary
from gr_core.data.packfile import PackMeta, write_pack
from gr_core.data.sequences import SequenceRules, build_sequences
from gr_core.model.settings import ModelConfig
from gr_core.refs import Bound
from gr_core.train.loop import train
from gr_core.train.run import Run, read_tables
from gr_core.train.settings import TrainConfig
from tests.sequences import count_ids, source_of

US, DELAY = 1_000_000, 1800 * 1_000_000
START = 1_748_736_000 * US
ACTIONS = ("click", "like", "hate")
ITEM_FEATURES, CONTEXT = ("item_id", "kind"), ("surface",)
TIME = pl.Datetime("us", "UTC")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A checkpoint, a pack to score, and the events of both."""

    checkpoint: Path
    pack: Path
    events: pl.DataFrame


def make_events(users: int = 12, each: int = 14) -> pl.DataFrame:
    rng = np.random.default_rng(7)
    rows: list[dict[str, Any]] = []
    for user in range(users):
        times = np.sort(rng.integers(0, 40 * 3600, each)) * US + START
        for place, shown in enumerate(times.tolist()):
            item = int(rng.integers(0, 30))
            clicked = bool(rng.random() < 0.4)
            liked = shown + int(rng.integers(60, 7200)) * US if rng.random() < 0.2 else None
            rows.append(
                {
                    "event_id": f"u{user:02d}:{place:02d}",
                    "user_id": f"u{user:02d}",
                    "item_id": f"i{item}",
                    "kind": None if item == 7 else f"k{item % 4}",
                    "surface": "home" if rng.random() < 0.5 else "feed",
                    "shown_at": shown,
                    "visible_at": shown + DELAY,
                    "actions": clicked + 2 * (liked is not None),
                    "known": 0b111 if place % 5 else 0b011,
                    "click_at": None,
                    "like_at": liked,
                    "hate_at": None,
                    "due": 0b11 if place >= each // 2 else 0,
                }
            )
    times = [pl.col(name).cast(TIME) for name in ("shown_at", "visible_at", "click_at", "like_at", "hate_at")]
    return pl.DataFrame(rows, infer_schema_length=None).with_columns(
        *times, pl.col("actions", "known", "due").cast(pl.Int32)
    )


def build_checkpoint(root: Path, tokens: Literal["targets", "interleaved"] = "targets") -> Trained:
    """Train one pass with limits that bite: 5 history tokens, 30 hours."""
    events = make_events()
    features = ITEM_FEATURES + CONTEXT
    counts = count_ids(events.filter(pl.col("item_id") != "i3"), features, {})
    words = vocabulary.grow(None, counts, {name: _Rule() for name in features})
    vocabulary.save(words, root / "vocabulary")
    # One target a segment in the pack to score: history tokens then begin where a request's do.
    rules = SequenceRules(
        action_names=ACTIONS,
        features=features,
        item_features=ITEM_FEATURES,
        max_history=5,
        max_targets=1,
        max_age_us=86_400 * US,
        token_budget=256,
        time_window_us=None,
        tokens=tokens,
    )
    segments = source_of([build_sequences(events, {"due": events["due"]}, rules)], words)
    bound = Bound(commit=1, cutoff_us=START + 3 * 86_400 * US, shown_before_us={}, delta_version=1)
    for role in ("train", "next_day"):
        meta = PackMeta(
            role=role,  # type: ignore[arg-type]
            features=features,
            actions=ACTIONS,
            supervised=0b011,
            tokens=tokens,
            token_budget=256,
            vocabulary=words.version,
            bound=bound,
        )
        write_pack(root / role, segments, meta)
    config = {
        "model": {
            "width": 16,
            "num_layers": 2,
            "num_heads": 2,
            "item_features": ITEM_FEATURES,
            "context_features": CONTEXT,
        },
        "train": {"num_threads": 1},
        "pack": {"time_window_seconds": None, "tokens": tokens},
        "sequences": {"max_history": 5, "max_age_days": 1},
    }
    tables = {
        name: {"rows": t.rows, "capacity": t.capacity, "fallbacks": t.fallbacks, "path": f"vocabulary/{name}.arrow"}
        for name, t in words.tables.items()
    }
    run = Run(
        pack=root / "train",
        tables=read_tables(tables, root),
        vocabulary_version=words.version,
        vocabulary_files={name: root / "vocabulary" / f"{name}.arrow" for name in features},
        parent=None,
        output=root / "checkpoint",
        model=ModelConfig(**config["model"]),
        train=TrainConfig(**config["train"]),
        config=config,
        fingerprint="f",
        seed=0,
        device="cpu",
        resume=True,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        train(run, lambda _: None)
    return Trained(checkpoint=root / "checkpoint", pack=root / "next_day", events=events)


class _Rule:
    min_count = 2
    fallback_by = None


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a trained checkpoint; read only."""
    torch.set_num_threads(1)
    return build_checkpoint(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return one trained on item, action, item, action; read only."""
    torch.set_num_threads(1)
    return build_checkpoint(tmp_path_factory.mktemp("interleaved"), "interleaved")


@pytest.fixture(scope="session")
def requests(trained: Trained) -> list[dict[str, Any]]:
    """Return one request per due event: what a service would have known when it was shown."""
    found = []
    for row in trained.events.filter(pl.col("due") != 0).sort("user_id", "shown_at", "event_id").to_dicts():
        past = trained.events.filter(pl.col("user_id") == row["user_id"])
        tokens = []
        for other in past.to_dicts():
            late = other["like_at"] is not None and other["like_at"] > other["visible_at"]
            item = {"item_id": other["item_id"], "kind": other["kind"], "known": other["known"]}
            shown = other["actions"] & ~2 if late else other["actions"]
            first = {**item, "actions": shown, "shown_at": other["shown_at"]}
            tokens.append((other["visible_at"], other["event_id"], first))
            if late:
                tokens.append((other["like_at"], other["event_id"], {**item, "actions": 2, "shown_at": None}))
        tokens.sort(key=lambda token: token[:2])
        found.append(
            {
                "request_id": row["event_id"],
                "user_id": row["user_id"],
                "shown_at": row["shown_at"],
                "surface": row["surface"],
                "history": [{**token, "visible_at": at} for at, _, token in tokens],
                "candidates": [row["item_id"]],
                "candidate_kind": [row["kind"]],
            }
        )
    return found


@pytest.fixture(scope="session")
def mlflow_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home with MLflow's database in it: making one costs two seconds, so tests share it."""
    return tmp_path_factory.mktemp("mlflow")
