"""The eleven optimisations of the design, each alone and one after the other: seconds per million supervised events.

Naive is the padded loop of `_rival` with what most teams have around it: every night trains a week of events again from
scratch, users are collated one by one, attention is masked, a thousand thresholds follow every step, checkpoints are
scored between steps, AdamW runs its default loop, every feature has its own dense table. One switch after the other is
set as the design orders them; from `packed` on the model is the product's, with its own switches. Only this night's events
count, so a week's training divides by a seventh of its targets. All arms are interleaved in one run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks._child import measure
from benchmarks._figures import Figure, Report
from benchmarks._ours import ROWS, Ours, night_of, pack_of
from benchmarks._pairs import interleave, medians
from benchmarks._rival import Longs, PaddedModel, Rival, Users, read_users
from benchmarks._speed import HEADS
from gr_core.data.batches import PackReader
from gr_core.train.running_metrics import ThresholdedAUC
from kernels.bucketed_auc import BucketedAUC

SWITCHES = {
    "incremental": "-64 % of the hours of a day",
    "loader": "step time -50 %",
    "length_bucketing": "GPU time -50 %",
    "packed": "GPU hours -30 %",
    "memory": "GPU hours -30 %",
    "attention": "attention +25 %",
    "metrics": "GPU hours -22 %",
    "parallel_evaluation": "GPU hours -16 %",
    "fused_optimizer": "GPU hours -15 %",
    "fused_lookup": "training time -10 %",
}
"""Switches in the design's order, and what LinkedIn saw. HSDP, the eleventh, needs several devices: see `links`."""
RETRAIN_DAYS = 7
SMALL, LARGE = 2048, 8192
"""Tokens of a batch before and after `memory`; a padded batch has 64 and 256 users."""
EVALUATE_EVERY = 4
"""Tokens trained to one of the holdout scored: five checkpoints on a holdout of 5 %."""
HOLDOUT_USERS = 16
"""Of a padded batch of the holdout; a packed one has SMALL tokens."""
On = frozenset[str]


def measure_rollout(report: Report, work: Path, sizes: Mapping[str, Any]) -> None:
    """Add seconds per million supervised events: naive, each switch alone, and all up to it."""
    found = measure(
        "benchmarks._rollout:roll_out",
        work=str(work),
        width=sizes["width"] or 64,
        layers=sizes["layers"],
        num_tokens=sizes["tokens"],
        amount=sizes["rollout_tokens"],
        rounds=sizes["rounds"],
    ).result
    naive = found["alone"]["naive"]
    report.figures["rollout/naive"] = Figure(value=naive, unit="s per million supervised events")
    for place, name in enumerate(SWITCHES, start=1):
        report.figures |= {
            f"rollout/{place}_{name}/{kind}": Figure(
                value=found[kind][name], unit="s per million supervised events", baseline=naive
            )
            for kind in ("alone", "cumulative")
        }
    report.figures["rollout/all/speedup"] = Figure(value=naive / found["cumulative"][name], unit="x the naive loop")
    report.conditions["rollout"] = {**found, "linkedin": SWITCHES, "preset": "ads", "retrain_days": RETRAIN_DAYS}


def arms_of() -> dict[str, On]:
    """Return the switches of every arm: alone/<name> and cumulative/<name>."""
    arms: dict[str, On] = {"alone/naive": frozenset()}
    names = list(SWITCHES)
    for place, name in enumerate(names):
        arms[f"alone/{name}"] = frozenset({name})
        arms[f"cumulative/{name}"] = frozenset(names[: place + 1])
    return arms


def roll_out(work: str, width: int, layers: int, num_tokens: int, amount: int, rounds: int) -> dict[str, Any]:
    """Train a little with every arm in turn.

    Args:
        work: A folder for packs.
        width: Of the model.
        layers: Blocks.
        num_tokens: Of each pack.
        amount: About how many tokens an arm trains in a round.
        rounds: How often.

    Returns:
        alone and cumulative: seconds per million supervised events by switch; load.
    """
    packs = _Packs(Path(work), num_tokens)
    shape = {"width": width, "num_layers": layers, "num_heads": HEADS}
    arms: dict[str, Callable[[], float]] = {}
    built: dict[On, Callable[[], float]] = {}
    for name, switches in arms_of().items():
        if switches not in built:
            make = _packed if "packed" in switches else _padded
            built[switches] = make(packs, shape, switches, amount)
        arms[name] = built[switches]
    rates = medians(interleave(arms, rounds))
    seconds = {name: 1e6 / rate for name, rate in rates.items()}
    return {
        kind: {name.partition("/")[2]: value for name, value in seconds.items() if name.startswith(kind)}
        for kind in ("alone", "cumulative")
    } | {"load": round(os.getloadavg()[0], 2)}


class _Packs:
    """Packs of a night or a week, in small or large batches, written when they are asked for."""

    def __init__(self, work: Path, num_tokens: int) -> None:
        self._work, self._num_tokens = work, num_tokens
        self._users: dict[int, Users] = {}

    def path(self, days: int, budget: int) -> Path:
        out = self._work / f"rollout-{days}-{budget}"
        return out if out.exists() else pack_of(out, "ads", self._num_tokens, token_budget=budget, days=days)

    def users(self, days: int) -> Users:
        if days not in self._users:
            self._users[days] = read_users(night_of(self.path(days, SMALL), {"width": 16}).reader)
        return self._users[days]


class _Pace:
    """Says when a batch of the holdout is due: once every EVALUATE_EVERY times its tokens."""

    def __init__(self, holdout_tokens: int) -> None:
        self._every, self._since = EVALUATE_EVERY * holdout_tokens, 0

    def due(self, tokens: int) -> int:
        """Count trained tokens; returns how many batches are due."""
        self._since += tokens
        times, self._since = divmod(self._since, self._every)
        return times


class _Loop(Rival):
    """The padded loop with what surrounds it.

    Args:
        users: What to train on.
        switches: Those that are set.
        model: The model.
        events: What share of the targets is this night's.
    """

    def __init__(self, users: Users, switches: On, model: PaddedModel, events: float) -> None:
        super().__init__(
            users,
            model,
            "bucketed" if "length_bucketing" in switches else "random",
            batch_users=256 if "memory" in switches else 64,
            masked="attention" not in switches,
            fused="fused_optimizer" in switches,
        )
        self._switches, self._events = switches, events
        num_actions = users.labels.shape[1]
        self._metrics = BucketedAUC(num_actions) if "metrics" in switches else ThresholdedAUC(num_actions)
        self._holdout: Longs = np.random.default_rng(2).permutation(len(users.lengths))[:HOLDOUT_USERS]
        self._pace = _Pace(int(users.lengths[self._holdout].sum()))

    def amount(self, numbers: Longs) -> int:
        """Score the holdout where it is due; return this night's events of a batch, in millionths to stay whole."""
        users = self.users
        if "parallel_evaluation" not in self._switches:
            for _ in range(self._pace.due(int(users.lengths[numbers].sum()))):
                with torch.no_grad():
                    self.model(*self.inputs(self._holdout)[0])
        ends = users.starts[numbers] + users.lengths[numbers]
        targets = sum(int(users.is_target[b:e].sum()) for b, e in zip(users.starts[numbers], ends, strict=True))
        return round(1e6 * self._events * targets)

    def after_step(self, logits: Tensor, labels: Tensor) -> None:
        """Update the metrics."""
        self._metrics.update(logits, labels == 1, torch.ones_like(labels, dtype=torch.bool))

    def gather(self, numbers: Longs, place: Longs, valid: npt.NDArray[np.bool_]) -> tuple[Tensor, Tensor, Tensor]:
        """Collate by whole columns, or user by user as most teams do."""
        if "loader" in self._switches:
            return super().gather(numbers, place, valid)
        ends = self.users.starts[numbers] + self.users.lengths[numbers]
        spans = [slice(int(begin), int(end)) for begin, end in zip(self.users.starts[numbers], ends, strict=True)]
        columns = (self.users.rows, self.users.states, self.users.gaps)
        rows, states, gaps = (
            pad_sequence([torch.tensor(column[span].tolist()) for span in spans], batch_first=True)
            for column in columns
        )
        return rows, states, gaps


def _padded(packs: _Packs, shape: Mapping[str, int], switches: On, amount: int) -> Callable[[], float]:
    days = 1 if "incremental" in switches else RETRAIN_DAYS
    users = packs.users(days)
    torch.manual_seed(0)
    rows = [3 + ROWS[name] for name in ("item_id", "category", "creator", "surface", "slot", "device")]
    model = PaddedModel(
        shape["width"],
        shape["num_layers"],
        shape["num_heads"],
        rows,
        users.labels.shape[1],
        0.0,
        one_table="fused_lookup" in switches,
    )
    loop = _Loop(users, switches, model, 1 / days)
    count = max(round(amount / float(users.lengths.mean()) / (256 if "memory" in switches else 64)), 1)
    work = loop.spread(max(count, 4)) if "length_bucketing" in switches else loop.some(count)
    return lambda: work() / 1e6


def _packed(packs: _Packs, shape: Mapping[str, int], switches: On, amount: int) -> Callable[[], float]:
    days, budget = 1 if "incremental" in switches else RETRAIN_DAYS, LARGE if "memory" in switches else SMALL
    train = {
        "fused_optimizer": "fused_optimizer" in switches,
        "fused_lookup": "fused_lookup" in switches,
        "update_touched_rows": "fused_lookup" in switches,
        "metrics": "fused" if "metrics" in switches else "naive",
    }
    # a packed batch's attention padded to its longest segment, or by length
    layout = {"pack": {"layout": "packed" if "attention" in switches else "padded"}}
    ours = Ours(night_of(packs.path(days, budget), shape, train, sections=layout))
    night = ours.night
    holdout = night.builder.build(PackReader(packs.path(days, SMALL), verify=False).batch(0))
    pace = _Pace(holdout.positions.numel())
    share = night.reader.index["num_supervised"] / night.reader.index["num_tokens"] / days
    count = max(round(amount / budget), 1)

    def work() -> float:
        tokens = 0
        for _ in range(1 if "loader" in switches else count):
            tokens += ours.train(count if "loader" in switches else 1)
        if "parallel_evaluation" not in switches:
            for _ in range(pace.due(tokens)):
                with torch.no_grad():
                    night.model(night.tables.weight[holdout.rows], holdout)
        return tokens * share

    return work
