"""Interleaved tokens through the model: what a target's logits may depend on, and the same history as in `targets`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from gr_core.data.batches import Batch, PackReader
from gr_core.data.packfile import PackMeta, write_pack
from gr_core.data.sequences import build_sequences
from gr_core.data.vocabulary import Vocabulary, grow
from gr_core.model.embeddings import RowMap, Tables, TableSpec
from gr_core.model.inputs import InputBuilder
from gr_core.model.recommender import new_recommender
from gr_core.model.settings import ModelConfig
from tests.sequences import ACTIONS, TIME, US, count_ids, rules, source_of, table

FEATURES = ("item_id", "surface")
MODEL = ModelConfig(width=16, num_heads=2, item_features=("item_id",), context_features=("surface",))


class _Rule:
    min_count = 1
    fallback_by = None


class Layouts:
    """Events as one batch in either layout, and the logits of one model on them."""

    def __init__(self, folder: Path, items: list[str]) -> None:
        every = table([{"id": i, "user": "u", "item": i, "shown": 0, "surface": "home"} for i in items])
        self.words: Vocabulary = grow(None, count_ids(every, FEATURES, {}), {name: _Rule() for name in FEATURES})
        specs = tuple(
            TableSpec(name=name, rows=found.rows, capacity=found.capacity) for name, found in self.words.tables.items()
        )
        self.rows = RowMap(specs)
        self.tables = Tables(specs, MODEL.width, seed=0)
        self.tables.weight.mul_(20)  # rows of visible size, so that what should change a logit does
        self.model = new_recommender(MODEL, len(ACTIONS), 2, seed=0).eval()
        self.folder, self.made = folder, 0

    def batch(self, events: pl.DataFrame, tokens: Any, **limits: Any) -> tuple[Batch, list[str]]:
        """Pack the events; return the only batch and the events of its targets."""
        built = build_sequences(events, {"train": events["due"]}, rules(features=FEATURES, tokens=tokens, **limits))
        self.made += 1
        meta = PackMeta(
            role="next_day", features=FEATURES, actions=ACTIONS, supervised=3, tokens=tokens, token_budget=8192
        )
        path = self.folder / str(self.made)
        write_pack(path, source_of([built], self.words), meta)
        reader = PackReader(path)
        assert len(reader) == 1
        return reader.batch(0), reader.targets()[0]

    def inputs(self, events: pl.DataFrame, tokens: Any, **limits: Any) -> tuple[Any, list[str]]:
        """Return the model's inputs and the events of the targets."""
        batch, names = self.batch(events, tokens, **limits)
        builder = InputBuilder(MODEL, len(ACTIONS), 3, self.rows, interleaved=tokens == "interleaved")
        return builder.build(batch), names

    def logits(self, events: pl.DataFrame, **limits: Any) -> dict[str, torch.Tensor]:
        """Score the events, interleaved: target to logits."""
        inputs, names = self.inputs(events, "interleaved", **limits)
        with torch.no_grad():
            values = self.model(self.tables.weight[inputs.rows], inputs)
        return dict(zip(names, values, strict=True))


EXAMPLE = [
    {"id": "a1", "user": "A", "item": "6", "shown": 1000, "taken": {"click": 1010, "like": 4000}},
    {"id": "a2", "user": "A", "item": "7", "shown": 1100},
    {"id": "a3", "user": "A", "item": "8", "shown": 1200, "taken": {"like": 1500}},
    {"id": "a4", "user": "A", "item": "7", "shown": 5000, "taken": {"click": 5020}, "due": 0b11},
    {"id": "a5", "user": "A", "item": "9", "shown": 7000, "due": 0b11},
    {"id": "b1", "user": "B", "item": "6", "shown": 2000},
    {"id": "b2", "user": "B", "item": "9", "shown": 3000, "taken": {"click": 3005}, "due": 0b11},
    {"id": "b3", "user": "B", "item": "10", "shown": 4000, "known": 0b01, "due": 0b01},
]


@pytest.mark.parametrize(
    ("event", "changed"),
    [("a1", "a4 a5"), ("a2", "a4 a5"), ("a3", "a4 a5"), ("a4", "a5"), ("a5", ""), ("b1", "b3"), ("b2", ""), ("b3", "")],
)
def test_an_events_actions_change_the_targets_that_see_it_and_no_others(
    tmp_path: Path, event: str, changed: str
) -> None:
    """The table of example 2 holds for example 3: no label leaks, directly or through another token."""
    net = Layouts(tmp_path, ["6", "7", "8", "9", "10"])
    plain = net.logits(table(EXAMPLE))
    flipped = table(EXAMPLE).with_columns(
        actions=pl.when(event_id=event).then(pl.col("actions") ^ 1).otherwise("actions").cast(pl.Int32)
    )
    if event != "a1":
        flipped = flipped.with_columns(click_at=pl.when(event_id=event).then(None).otherwise("click_at"))

    found = net.logits(flipped)

    moved = {name for name in plain if not torch.allclose(plain[name], found[name], atol=1e-6)}
    assert moved == set(changed.split())


def world(seed: int, num_events: int) -> pl.DataFrame:
    """Random events of three users, with visibility delays of their own and no late action."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(num_events):
        shown = int(rng.integers(0, 300)) * 10
        taken = {name: None for name in ACTIONS if rng.random() < 0.5}
        rows.append(
            {
                "id": f"e{i:03d}",
                "user": f"u{rng.integers(0, 3)}",
                "item": f"i{rng.integers(0, 8)}",
                "shown": shown,
                "visible": shown + int(rng.integers(0, 8)) * 50,
                "taken": taken,
                "due": 0b11 if rng.random() < 0.5 else 0,
            }
        )
    return table(rows)


ITEMS = [f"i{n}" for n in range(8)]


def test_history_counts_are_those_of_targets(tmp_path: Path) -> None:
    """Actions known and taken in all that a target sees, its newest entries, and those of its own item: equal numbers."""
    net, events = Layouts(tmp_path, ITEMS), world(3, 80)

    plain, names = net.inputs(events, "targets", max_history=20)
    mixed, others = net.inputs(events, "interleaved", max_history=20)

    place = [others.index(name) for name in names]
    assert torch.allclose(mixed.counts[place], plain.counts)
    for name in ("hours", "weekdays", "labels", "known", "weights", "gaps"):
        one, other = getattr(plain, name), getattr(mixed, name)
        if name == "gaps":
            one, other = one[plain.targets], other[mixed.targets]
        assert torch.equal(other[place], one), name


def test_logits_of_200_targets_are_as_of_their_shown_at(tmp_path: Path) -> None:
    """Rebuilt from only the rows shown before, whatever was shown later: equal within 1e-5."""
    net, compared = Layouts(tmp_path, ITEMS), 0
    for seed in range(4):
        events = world(seed, 140)
        found = net.logits(events, max_history=500, max_targets=200)
        for name in list(found)[:50]:
            moment = pl.lit(events.filter(event_id=name)["shown_at"].item(), TIME)
            itself = pl.col("event_id") == name
            before = events.filter((pl.col("shown_at") < moment) | itself).with_columns(
                actions=pl.when(itself).then(0).otherwise("actions").cast(pl.Int32),
                due=pl.when(itself).then(0b11).otherwise(0).cast(pl.Int32),
            )
            alone = net.logits(before, max_history=500, max_targets=200)[name]
            assert torch.allclose(alone, found[name], atol=1e-5), name
            compared += 1
    assert compared >= 200


def test_a_later_event_that_is_visible_earlier_moves_nothing(tmp_path: Path) -> None:
    """Shown after the target but visible before the target's own event is: its tokens lie between, and change no logit."""
    net = Layouts(tmp_path, ITEMS)
    rows = [
        {"id": "h", "user": "u", "item": "i1", "shown": 0, "visible": 10, "taken": {"click": 5}},
        {"id": "t", "user": "u", "item": "i2", "shown": 100, "visible": 900, "due": 0b11},
        {"id": "x", "user": "u", "item": "i3", "shown": 200, "visible": 210, "due": 0b11},
        {"id": "y", "user": "u", "item": "i4", "shown": 300, "visible": 310, "due": 0b11},
    ]

    full, short = net.logits(table(rows)), net.logits(table(rows[:2]))

    assert torch.allclose(full["t"], short["t"], atol=1e-6)
    batch, _ = net.batch(table(rows), "interleaved")
    assert batch.time.tolist() == [t * US for t in (0, 10, 200, 210, 300, 100)]
