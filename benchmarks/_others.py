"""RecBole's SASRec and RePlay's SasRec on the same users, where they are installed; they are no dependencies.

Each is trained by its own model, loss and batches as its library makes them, by torch's default AdamW. RePlay supervises
every position, so real tokens count. RecBole makes a row of every supervised action, its history padded to the longest, so
supervised actions count. Ours are the same two figures of one run, interleaved with them.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks._child import measure
from benchmarks._figures import Figure, Report
from benchmarks._ours import ROWS, Ours, night_of, pack_of
from benchmarks._pairs import interleave, medians, ratio
from benchmarks._rival import Longs, Users, read_users
from benchmarks._speed import HEADS

MIN_SPEEDUP = 5.0
_NUMPY_1 = {"float_": np.float64, "bool_": np.bool_, "complex_": np.complex128, "unicode_": np.str_}
"""Names that RecBole still takes from numpy 1."""


def measure_others(report: Report, work: Path, sizes: Mapping[str, Any]) -> None:
    """Add ours over each library that is there, and over the best of them; what is not there stands in the conditions."""
    for preset in sizes["presets"][:2]:
        found = measure(
            "benchmarks._others:compare",
            work=str(work),
            preset=preset,
            width=sizes["width"] or 64,
            layers=sizes["layers"],
            num_tokens=sizes["tokens"],
            batches=sizes["batches"],
            rounds=sizes["rounds"],
            rivals=sizes["rivals"],
        ).result
        for name, times in found["ratios"].items():
            report.figures[f"others/{preset}/ours_over_{name}"] = Figure(
                value=times, unit="x", baseline=found["rates"][name]
            )
        if found["ratios"]:
            report.figures[f"others/{preset}/ours_over_best"] = Figure(
                value=min(found["ratios"].values()), unit="x", at_least=MIN_SPEEDUP
            )
        report.conditions[f"others/{preset}"] = found
    report.conditions["others"] = {"baseline": "replay: real tokens/s; recbole: supervised actions/s; no dropout"}


def compare(
    work: str,
    preset: str,
    width: int,
    layers: int,
    num_tokens: int,
    batches: Mapping[str, int],
    rounds: int,
    rivals: str,
) -> dict[str, Any]:
    """Train ours and each library in turn.

    Args:
        work: A folder for the pack.
        preset: Lengths.
        width: Of the models.
        layers: Blocks.
        num_tokens: Of the pack.
        batches: Batches of a round, by arm.
        rounds: How often.
        rivals: Folder of packages besides those of this Python; empty: none.

    Returns:
        rates, ratios (of tokens, or of supervised actions), missing: why a library was not measured.
    """
    add_folder(rivals)
    pack = pack_of(Path(work) / f"others-{preset}", preset, num_tokens)
    ours = Ours(night_of(pack, {"width": width, "num_layers": layers, "num_heads": HEADS}))
    index = ours.night.reader.index
    users = read_users(ours.night.reader)
    arms: dict[str, Callable[[], float]] = {"ours": lambda: ours.train(batches["ours"])}
    missing: dict[str, str] = {}
    for name, make in {"replay_sasrec": _replay, "recbole_sasrec": _recbole}.items():
        try:
            arms[name] = _repeated(make(users, width, layers), batches["padded"])
        except Exception as error:  # noqa: BLE001 -- whatever another library stumbles over is told, not raised
            missing[name] = f"{type(error).__name__}: {error}"
    rates = interleave(arms, rounds)
    supervised = index["num_supervised"] / index["num_tokens"]
    share = {"recbole_sasrec": supervised}
    return {
        "rates": medians(rates),
        "ours_supervised_per_second": medians(rates)["ours"] * supervised,
        "ratios": {name: ratio(rates, "ours", name) * share.get(name, 1.0) for name in arms if name != "ours"},
        "missing": missing,
        "load": round(os.getloadavg()[0], 2),
    }


def add_folder(rivals: str) -> None:
    """Let packages of a folder be imported, after those of this Python."""
    if rivals and rivals not in sys.path:
        sys.path.append(rivals)


def _repeated(step: Callable[[], int], count: int) -> Callable[[], float]:
    return lambda: float(sum(step() for _ in range(count)))


def _numbers(users: Users, size: int) -> Iterator[Longs]:
    rng = np.random.default_rng(0)
    while True:
        yield rng.integers(0, len(users.lengths), size)


def _items(users: Users, numbers: Longs, longest: int) -> tuple[Tensor, Tensor]:
    """Return item rows of users, padded on the left, [B, longest], and where they are real."""
    column = np.arange(longest) - longest + users.lengths[numbers][:, None]
    valid = column >= 0
    place = np.where(valid, users.starts[numbers][:, None] + column, 0)
    return torch.from_numpy(np.where(valid, users.rows[place, 0], 0)), torch.from_numpy(valid)


def _train(model: torch.nn.Module, loss_of: Callable[[], tuple[Tensor, int]]) -> Callable[[], int]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()

    def step() -> int:
        loss, amount = loss_of()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return amount

    return step


def _replay(users: Users, width: int, layers: int) -> Callable[[], int]:
    """RePlay's SasRec: 64 users padded to the longest of all, every position's next item among sampled negatives."""
    nn = importlib.import_module("replay.data.nn")
    data = importlib.import_module("replay.data")
    sasrec = importlib.import_module("replay.models.nn.sequential.sasrec")
    longest = int(users.lengths.max())
    schema = nn.TensorSchema(
        nn.TensorFeatureInfo(
            name="item_id",
            is_seq=True,
            feature_type=data.FeatureType.CATEGORICAL,
            feature_hint=data.FeatureHint.ITEM_ID,
            cardinality=ROWS["item_id"] + 3,
            padding_value=0,
            embedding_dim=width,
        )
    )
    model = sasrec.SasRec(
        schema,
        block_count=layers,
        head_count=HEADS,
        hidden_size=width,
        max_seq_len=longest,
        dropout_rate=0.0,
        loss_type="BCE",
        loss_sample_count=1,
    )
    numbers = _numbers(users, 64)

    def loss_of() -> tuple[Tensor, int]:
        chosen = next(numbers)
        items, valid = _items(users, chosen, longest)
        labels = torch.roll(items, -1, dims=1)
        batch = sasrec.SasRecTrainingBatch(
            query_id=torch.from_numpy(chosen)[:, None],
            padding_mask=valid,
            features={"item_id": items},
            labels=labels,
            labels_padding_mask=valid,
        )
        return model._compute_loss(batch.convert_to_dict()), int(valid.sum())

    return _train(model, loss_of)


def _recbole(users: Users, width: int, layers: int) -> Callable[[], int]:
    """RecBole's SASRec: one row a supervised action, 64 of them a batch, the next item against one negative (BPR)."""
    for name, kind in _NUMPY_1.items():
        if not hasattr(np, name):
            setattr(np, name, kind)
    sasrec = importlib.import_module("recbole.model.sequential_recommender.sasrec")
    longest = int(users.lengths.max())
    config = {
        "USER_ID_FIELD": "user",
        "ITEM_ID_FIELD": "item",
        "LIST_SUFFIX": "_list",
        "ITEM_LIST_LENGTH_FIELD": "length",
        "NEG_PREFIX": "neg_",
        "MAX_ITEM_LIST_LENGTH": longest,
        "device": "cpu",
        "n_layers": layers,
        "n_heads": HEADS,
        "hidden_size": width,
        "inner_size": 2 * width,
        "hidden_dropout_prob": 0.0,
        "attn_dropout_prob": 0.0,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "initializer_range": 0.02,
        "loss_type": "BPR",
    }

    class Counts:
        """What the model asks of RecBole's dataset."""

        def num(self, field: str) -> int:
            """Return the rows of a table."""
            return ROWS["item_id"] + 3 if field == "item" else len(users.lengths)

    model = sasrec.SASRec(config, Counts())
    numbers = _numbers(users, 64)
    rng = np.random.default_rng(1)

    def loss_of() -> tuple[Tensor, int]:
        chosen = next(numbers)
        items, valid = _items(users, chosen, longest)
        # RecBole pads on the right
        lengths = valid.sum(dim=1)
        place = (torch.arange(longest) + (longest - lengths)[:, None]).clamp(max=longest - 1)
        right = torch.where(torch.arange(longest) < lengths[:, None], items.gather(1, place), 0)
        positive, negative = (torch.from_numpy(rng.integers(3, ROWS["item_id"], 64)) for _ in range(2))
        given = {"item_list": right, "length": lengths, "item": positive, "neg_item": negative}
        return model.calculate_loss(given), 64

    return _train(model, loss_of)
