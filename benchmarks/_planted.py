"""Planted bad challengers: the product's own training and gate on embedded worlds, one world a seed.

The first model learns the first days in one night and becomes the champion; the next night's challenger starts from it.
Beside the honest one stand five that must be held: learning rates x100, labels shuffled, trained on that one day alone and
from nothing, the item table zeroed, and probabilities 1.3 times too high in the mean. All are judged on the same holdout of
`gate.nights` nights by the gate's own stage; registry and aliases are left out. A training that stops by itself (loss not
finite) leaves no version, so it counts as held.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks._incremental import YESTERDAY, window_pack
from benchmarks._layouts import twin_of
from benchmarks._nights import DataResult, open_day, promote, run_data
from benchmarks._report import Figure, Report, console
from benchmarks._shuffle import read_segments
from gr_core.config import Config, load_config
from gr_core.data.packfile import PackMeta, write_pack
from gr_core.errors import TrainingError
from gr_core.eval.scoring import Scored
from gr_core.hashing import fingerprint
from gr_core.lake import store
from gr_core.lake.journal import Champion, champion
from gr_core.night import Night
from gr_core.refs import Bound
from gr_core.stages import gating, ingesting, judging, rivals, training
from gr_core.train import loop
from gr_core.train.run import read_run
from gr_core.train.state import load_checkpoint, save_checkpoint

CONF = Path(__file__).parent.parent / "conf"
HONEST = "honest"
FACTOR = 1.3
"""By which a miscalibrated challenger's mean prediction is too high."""
RATES = ("dense_learning_rate", "sparse_learning_rate")
SMALL_WORLD = (
    "source.world.num_users=600",
    "source.world.num_items=100",
    "lake.holdout_fraction=0.3",
    "lake.num_buckets=2",
    "model.width=32",
    'model.item_features=["item_id"]',
    f"vocabulary={{{', '.join(f'{name}={{min_count=1}}' for name in ('item_id', 'surface', 'slot', 'device'))}}}",
)
"""As many holdout users as conf/world.toml has. Items are told by their id alone: beside category and creator, which tell most
of what an item of this world is, a zeroed item table costs a young model less than a day of new data brings."""
SETTINGS = ("train.num_threads=1", "train.save_every_steps=0", "evaluation.parallel=false")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A night with a champion, whose data stages are done."""

    night: Night
    data: DataResult
    standing: Champion
    honest: dict[str, Any]
    """What the honest challenger's training returned."""
    work: Path
    known: dict[str, rivals.Rivals] = field(default_factory=dict)
    """The rivals' scores by the digest of the rows: they are the same for every challenger."""

    @property
    def holdout(self) -> rivals.Holdout:
        """What scores the night's holdout."""
        data = self.data
        return rivals.Holdout(
            pack=data.packs["holdout"], words=data.words, ingested=data.ingested, buckets=data.buckets
        )

    @property
    def train_pack(self) -> Path:
        """Where the night's training pack lies."""
        return store.local_path(self.data.packs["train"]["uri"])


def measure_planted(
    report: Report, work: Path, *, seeds: Sequence[int], days: int, overrides: Sequence[str] = ()
) -> None:
    """Add how many challengers of each kind were held, and of the honest ones promoted.

    Args:
        report: Gets the figures, and every decision in its conditions.
        work: Where homes lie.
        seeds: One world each.
        days: Days that the champion was trained on.
        overrides: Of conf/world.toml.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in seeds:
        for kind, told in judge_all(seed, work / f"world-{seed}", days, overrides).items():
            found.setdefault(kind, []).append({"seed": seed, **told})
            console.print(f"world {seed} {kind}: {'promoted' if told['promote'] else 'held'}, {told['reasons']}")
    runs = len(seeds)
    for kind, rows in found.items():
        held = sum(not row["promote"] for row in rows)
        if kind == HONEST:
            report.figures["planted/honest/promoted"] = Figure(
                value=runs - held, unit=f"of {runs} runs", at_least=math.ceil(0.8 * runs)
            )
        else:
            goal = None if kind in WITHOUT_GOAL else math.floor(0.95 * runs)
            report.figures[f"planted/{kind}/held"] = Figure(value=held, unit=f"of {runs} runs", at_least=goal)
    report.conditions["planted"] = {
        "seeds": list(seeds),
        "days": days,
        "overrides": list(overrides),
        "decisions": found,
    }


def judge_all(seed: int, work: Path, days: int, overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the gate's decision on each kind of challenger in one world: promote, reasons and what it was decided on."""
    config = load_config(CONF / "world.toml", [*SETTINGS, *overrides, f"source.world.seed={seed}", f"pack.seed={seed}"])
    found = {}
    with patch.object(
        training, "run_training", _train_here
    ):  # the product's loop; a process each would cost as much again
        scene = prepare(config, work, days)
        for kind, plant in {HONEST: lambda one: one.honest["uri"], **PLANTS}.items():
            try:
                scored = judging.score(scene.night, plant(scene), scene.holdout.pack, scene.holdout.words)
            except TrainingError as error:
                found[kind] = {"promote": False, "reasons": [f"training stopped: {error.message}"]}
                continue
            found[kind] = judge(scene, scored)
    return found


def _train_here(run: Path, *_: object, **__: object) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        loop.train(read_run(run), lambda _: None)


def judge(scene: Scene, challenger: Scored) -> dict[str, Any]:
    """Return the gate's decision on a challenger's scores."""
    others = scene.known.get(challenger.digest)
    if others is None:
        others = rivals.score_all(scene.night, scene.standing, challenger, scene.holdout)
        scene.known[challenger.digest] = others
    decision = gating.decide(scene.night, scene.honest, challenger, others, scene.standing, data_ok=True)
    wanted = ("users", "positives", "difference", "upper_bound", "standard_error", "ne_challenger", "ne_champion")
    figures = {key: decision.figures.get(key) for key in (*wanted, "calibration_challenger", "calibration_champion")}
    return {"promote": decision.promote, "reasons": decision.reasons, **figures}


def prepare(config: Config, work: Path, days: int) -> Scene:
    """Train a champion on the first days, and an honest challenger on the day after them."""
    if config.source.world is None:
        raise ValueError("planted challengers need a config with source.world")
    home, first = str(work / "home"), config.source.world.start
    for back in range(days - 1):  # read in nights of their own, and left for the first training
        night = open_day(config, home, first + timedelta(days=back))
        ingested = ingesting.ingest(night)
        finished = {"state": "no_data", "bound": ingested["bound"], "status": {}}
        night.journal.append("finished", night.key, finished, at_us=night.at_us)
    night = open_day(config, home, first + timedelta(days=days - 1))
    data = run_data(night)
    promote(night, data, training.train(night, data.packs, data.words))
    night = open_day(config, home, first + timedelta(days=days))
    data = run_data(night)
    standing = champion(night.journal.entries())
    if standing is None:
        raise ValueError("the first night made no champion")
    honest = training.train(night, data.packs, data.words)
    return Scene(night=night, data=data, standing=standing, honest=honest, work=work)


def plant_rates(scene: Scene) -> str:
    """Train with both learning rates x100; returns the checkpoint's URI, as every plant does."""
    config = {**scene.night.config, "train": dict(scene.night.config["train"])}
    for key in RATES:
        config["train"][key] *= 100
    return _trained(scene, "rates", config=config)


def plant_labels(scene: Scene) -> str:
    """Train on labels that were dealt out among the night's targets at random."""
    segments, index = read_segments(scene.train_pack)
    targets = np.flatnonzero(segments.columns["supervise"] == 1)
    dealt = np.random.default_rng(scene.night.seed).permutation(targets)
    for name in ("labels", "label_known"):
        column = segments.columns[name].copy()
        column[targets] = column[dealt]
        segments.columns[name] = column  # type: ignore[index]  # read_segments made this dict
    names = ("role", "supervised", "tokens", "layout", "grouping", "token_budget", "seed", "vocabulary")
    meta = PackMeta(
        features=tuple(index["features"]),
        actions=tuple(index["actions"]),
        bound=Bound.from_json(index["bound"]),
        **{name: index[name] for name in names},
    )
    out = scene.work / "labels-pack"
    written = write_pack(out, segments, meta)
    told = {key: written[key] for key in ("num_tokens", "num_supervised")}
    return _trained(scene, "labels", pack={"uri": str(out), "digest": fingerprint(written["sha256"]), **told})


def plant_one_day(scene: Scene) -> str:
    """Train from nothing on what was shown on the night's own day."""
    pack = window_pack(scene.night, scene.train_pack, scene.work / "one-day-pack", YESTERDAY)
    return _trained(scene, "one-day", pack=pack, warm=False)


def plant_item_table(scene: Scene) -> str:
    """Zero the honest challenger's table of items."""

    def zero(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        tensors["sparse.item_id.weight"].zero_()

    return _altered(scene, "item-table", zero)


def plant_calibration(scene: Scene) -> str:
    """Shift the honest challenger's logits so that its mean prediction is FACTOR times the rate, on what it trained on."""
    logits, labels = _scored(scene, scene.data.packs["train"])
    return _shifted(scene, "calibration", shift_to(logits, FACTOR * labels.mean()))


def plant_own_calibration(scene: Scene) -> str:
    """Shift them so that its mean prediction is FACTOR times its own, on the holdout: it may have been too low before."""
    logits, _ = _scored(scene, scene.holdout.pack)
    return _shifted(scene, "own-calibration", shift_to(logits, FACTOR * (1 / (1 + np.exp(-logits))).mean()))


PLANTS: Mapping[str, Callable[[Scene], str]] = {
    "learning_rate_x100": plant_rates,
    "labels_shuffled": plant_labels,
    "one_day_only": plant_one_day,
    "item_table_zeroed": plant_item_table,
    "calibration_x1.3": plant_calibration,
    "own_calibration_x1.3": plant_own_calibration,
}
WITHOUT_GOAL = ("own_calibration_x1.3",)
"""An honest challenger that is too low goes to less than FACTOR, which gate.calibration may allow."""


def shift_to(logits: Any, wanted: float) -> float:
    """Return what must be added to logits [N] so that the mean of their sigmoids is `wanted`."""
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 / (1 + np.exp(-logits - middle))).mean() < wanted else (low, middle)
    return low


def _scored(scene: Scene, pack: dict[str, Any]) -> tuple[Any, Any]:
    """Return the honest challenger's logits of the gate's action on a pack, and the labels, both float64 [N]."""
    bit = scene.night.settings.source.action_names.index(scene.night.settings.gate.action)
    scored = judging.score(scene.night, scene.honest["uri"], pack, scene.data.words)
    known = (scored.label_known >> bit & 1) == 1
    return scored.logits[known, bit].astype(np.float64), (scored.labels[known] >> bit & 1).astype(np.float64)


def _shifted(scene: Scene, name: str, shift: float) -> str:
    action = scene.night.settings.gate.action

    def change(tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        (bias,) = (key for key in tensors if key.startswith("dense.") and key.endswith("logits.bias"))
        tensors[bias][state["supervised"].index(action)] += shift

    return _altered(scene, name, change)


def _trained(
    scene: Scene,
    name: str,
    *,
    config: dict[str, Any] | None = None,
    pack: dict[str, Any] | None = None,
    warm: bool = True,
) -> str:
    parent = scene.standing.checkpoint if warm else None
    own = twin_of(scene.night, name, parent)
    if config is not None:
        own = _with_config(own, config)
    made = training.train(own, {**scene.data.packs, "train": pack or scene.data.packs["train"]}, scene.data.words)
    return str(made["uri"])


def _with_config(night: Night, config: dict[str, Any]) -> Night:
    values = {name: getattr(night, name) for name in Night.__slots__}
    return Night(**{**values, "config": config})


def _altered(scene: Scene, name: str, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> str:
    """Return a checkpoint that is the honest challenger's but for a change of its tensors."""
    source, out = store.local_path(scene.honest["uri"]), scene.work / name
    tensors, state = load_checkpoint(source)
    change(tensors, state)
    tables = {file.stem: file for file in (source / "vocabulary").glob("*.arrow")}
    save_checkpoint(out, tensors, state, tables)
    return str(out)
