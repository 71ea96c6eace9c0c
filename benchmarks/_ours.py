"""Our side of the training benchmark: the product's own night on a pack of a preset's lengths.

A pack is written by the product's packer, RUN.json by hand as a user of a bare machine would, and steps are those of
`gr_core.train.loop.Night`, read ahead by the product's thread.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import _segments
from gr_core.data.packfile import PackMeta, write_pack
from gr_core.data.prefetch import Prefetched
from gr_core.schema import FIRST_FALLBACK_ROW
from gr_core.train.loop import Night
from gr_core.train.run import read_run

ROWS = {"item_id": 10_000, "category": 100, "creator": 1_000, "surface": 3, "slot": 20, "device": 3}
"""Real rows of each table: small, so that layout and attention are compared and not the tables (`tables` does that)."""
ITEM_FEATURES, CONTEXT_FEATURES = ("item_id", "category", "creator"), ("surface", "slot", "device")
RESERVED = FIRST_FALLBACK_ROW + 1
TOKEN_BUDGET = 8192
NIGHT_STEPS = 1000
"""Steps that a night's attribution is told it will have."""


def pack_of(
    out: Path,
    preset: str,
    num_tokens: int,
    *,
    token_budget: int = TOKEN_BUDGET,
    rows: Mapping[str, int] | None = None,
    days: int = 1,
    **rules: Any,
) -> Path:
    """Write a train pack of a preset's lengths.

    Args:
        out: Its directory.
        preset: A key of _padding.PRESETS.
        num_tokens: About how many.
        token_budget: Of a batch.
        rows: Real rows of each table; None: `ROWS`.
        days: Sessions of targets of a segment.
        rules: layout and grouping.
    """
    source = _segments.source_of(preset, num_tokens, rows=rows or ROWS, days=days)
    meta = PackMeta(
        role="train",
        features=_segments.FEATURES,
        actions=_segments.ACTIONS,
        supervised=(1 << len(_segments.ACTIONS)) - 1,
        token_budget=token_budget,
        vocabulary="none",
        **rules,
    )
    write_pack(out, source, meta)
    return out


def night_of(
    pack: Path,
    model: Mapping[str, Any],
    train: Mapping[str, Any] | None = None,
    *,
    rows: Mapping[str, int] | None = None,
    device: str = "cpu",
    sections: Mapping[str, Any] | None = None,
) -> Night:
    """Return a night without a parent on a pack.

    Args:
        pack: Its directory; RUN.json is written beside it.
        model: Model settings that differ from the defaults, features aside.
        train: Training settings likewise.
        rows: Real rows of each table; None: `ROWS`.
        device: auto, cpu or cuda.
        sections: Other sections of the config: attention, pack.
    """
    run = pack.with_name(f"RUN-{pack.name}.json")
    counts = {name: RESERVED + count for name, count in (rows or ROWS).items()}
    features = {"item_features": ITEM_FEATURES, "context_features": CONTEXT_FEATURES}
    values = {
        "packs": {"train": pack.name},
        "vocabulary": {name: {"rows": count, "capacity": count} for name, count in counts.items()},
        "parent": None,
        "output": f"checkpoint-{pack.name}",
        "config": {
            "model": {**features, **model},
            "train": {"num_threads": torch.get_num_threads(), **(train or {})},
            **(sections or {}),
        },
        "fingerprint": "sha256:benchmark",
        "seed": 0,
        "device": device,
        "resume": False,
    }
    run.write_text(json.dumps(values), encoding="utf-8")
    return Night(read_run(run))


class Ours:
    """Trains a night's batches in order, over and over, with a constant learning rate.

    Args:
        night: The night.
        first: The batch it begins with.
    """

    def __init__(self, night: Night, first: int = 0) -> None:
        self.night = night
        self.clock = night.clock(NIGHT_STEPS)
        self._numbers: Iterator[int] = itertools.cycle([*range(first, len(night.reader)), *range(first)])

    def train(self, count: int) -> int:
        """Train the next `count` batches, the first one made within the time; returns their real tokens."""
        groups = [[next(self._numbers)] for _ in range(count)]
        with Prefetched(self.night.prepared(groups)) as ready:
            for numbers in groups:
                self.night.step(numbers, 1.0, self.clock, ready)
        if self.night.device.type == "cuda":
            torch.cuda.synchronize()
        tokens: list[int] = self.night.reader.index["batch_tokens"]
        return sum(tokens[numbers[0]] for numbers in groups)
