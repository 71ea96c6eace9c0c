"""The parts of `python -m benchmarks.training` and their sizes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import (
    _compiled,
    _incremental,
    _layouts,
    _links,
    _memory,
    _mfu,
    _others,
    _overhead,
    _parallel,
    _rollout,
    _speed,
    _steps,
    _tables,
)
from benchmarks._figures import Report
from gr_core.config import Config, load_config
from gr_core.data.population import World

CONF = Path(__file__).parent.parent / "conf"
KUAIRAND = Path("../shared/data/kuairand")
KUAIRAND_FIRST = date(2022, 4, 25)
SHIFT_NIGHT = 6
Sizes = dict[str, Any]
FULL: Sizes = {
    "presets": ["ads", "feed", "long"],
    "width": None,
    "layers": 2,
    "tokens": 1_500_000,
    "batches": {"ours": 4, "padded": 2, "bucketed": 8, "equal": 6},
    "rounds": 5,
    "rollout_tokens": 32_768,
    "parallel": {"num_users": 20_000, "pairs": 5},
    "links": {},
    "memory": {},
    "compiled": {},
    "matrix": 1024,
    "steps": 10,
    "table_rows": [100_000, 1_000_000],
    "ids": _tables.NUM_IDS,
    "rivals": "",
    "world": [],
    "layouts": {"seeds": (0, 1, 2), "nights": 5, "judged_from": 3},
    "incremental": {
        "nights": 10,
        "judged": (4, 5, 6, 7, 8, 9),
        "windows": ((2, 1), (4, 1), (_incremental.ALL, 1), (_incremental.ALL, 2)),
    },
    "kuairand": {"nights": 7, "judged": (3, 6), "windows": ((3, 1), (_incremental.ALL, 1), (_incremental.ALL, 2))},
}
QUICK: Sizes = {
    **FULL,
    "presets": ["ads"],
    "width": 16,
    "tokens": 20_000,
    "batches": {"ours": 1, "padded": 1, "bucketed": 2, "equal": 1},
    "rounds": 1,
    "rollout_tokens": 2_048,
    "parallel": {"num_users": 200, "pairs": 1},
    "links": {"steps": 1, "width": 32, "layers": 2},
    "memory": {"model": {"width": 16, "num_layers": 6, "num_heads": 2}, "token_budget": 2048},
    "compiled": {"model": {"width": 16, "num_layers": 1, "num_heads": 2}, "token_budget": 2048, "rounds": 1},
    "matrix": 64,
    "steps": 1,
    "table_rows": [1_000],
    "ids": 500,
    "world": ["source.world.num_users=100", "lake.num_buckets=2", "model.width=16"],
    "layouts": {"seeds": (0,), "nights": 2, "judged_from": 2},
    "incremental": {"nights": 3, "judged": (2,), "windows": ((_incremental.ALL, 1),)},
    "kuairand": {"nights": 2, "judged": (), "windows": ()},
}


def _evaluation(report: Report, work: Path, sizes: Sizes) -> None:
    """Measure what evaluation beside training adds to training's wall time, on the embedded world's users."""
    _parallel.measure_parallel(report, work, World(), **sizes["parallel"])


def _world(report: Report, work: Path, sizes: Sizes, what: str) -> None:
    """Measure quality on the embedded world; for `incremental` its taste shifts on night SHIFT_NIGHT."""
    shift = [f"source.world.taste_shift_day={SHIFT_NIGHT}"] if what == "incremental" else []
    config = load_config(CONF / "world.toml", [*_PLAIN, *sizes["world"], *shift])
    first = config.source.world.start if config.source.world else date.min
    _quality(report, work, "world", config, first, sizes, what)


def _kuairand(report: Report, work: Path, sizes: Sizes, what: str) -> None:
    """Measure quality on KuaiRand where its raw files are; else say in the conditions that they are not."""
    if not (KUAIRAND / "log").is_dir():
        report.conditions[f"{what}/kuairand"] = f"skipped: {KUAIRAND} has no raw files"
        return
    config = load_config(CONF / "kuairand.toml", [*_PLAIN, f"source.root={KUAIRAND.resolve()}"])
    _quality(report, work, "kuairand", config, KUAIRAND_FIRST, sizes, what)


_PLAIN = ("train.save_every_steps=0",)  # nothing beside the training: its seconds are compared


def _quality(report: Report, work: Path, name: str, config: Config, first: date, sizes: Sizes, what: str) -> None:
    if what == "layouts":
        _layouts.measure_layouts(report, work, name, config, first, sizes["layouts"])
    else:
        chosen = sizes["kuairand"] if name == "kuairand" else sizes["incremental"]
        _incremental.measure_incremental(report, work, name, config, first, chosen)


PARTS: dict[str, Callable[[Report, Path, Sizes], None]] = {
    "speed64": lambda report, work, sizes: _speed.measure_speed(report, work, sizes, 64),
    "speed256": lambda report, work, sizes: _speed.measure_speed(report, work, sizes, 256),
    "others": _others.measure_others,
    "mfu": _mfu.measure_mfu,
    "steps": _steps.measure_steps,
    "overhead": _overhead.measure_overhead,
    "tables": _tables.measure_tables,
    "rollout": _rollout.measure_rollout,
    "parallel": _evaluation,
    "links": lambda report, work, sizes: _links.measure_links(report, work, **sizes["links"]),
    "memory": lambda report, work, sizes: _memory.measure_memory(report, work, **sizes["memory"]),
    "compiled": lambda report, work, sizes: _compiled.measure_compiled(report, work, **sizes["compiled"]),
    "layouts_world": lambda report, work, sizes: _world(report, work, sizes, "layouts"),
    "layouts_kuairand": lambda report, work, sizes: _kuairand(report, work, sizes, "layouts"),
    "incremental_world": lambda report, work, sizes: _world(report, work, sizes, "incremental"),
    "incremental_kuairand": lambda report, work, sizes: _kuairand(report, work, sizes, "incremental"),
}
