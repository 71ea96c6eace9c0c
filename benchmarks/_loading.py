"""The loader: every byte of every column of a pack summed in its training type, from a warm and from a cold page cache.

The packs have long-tailed segments (preset feed) in shuffled order. A pass opens the pack in a fresh reader, so its
pages are mapped anew; tokens a second and core are tokens over the larger of wall time and CPU time of all threads, the
read-ahead thread's included.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks._child import measure
from benchmarks._report import Figure, Report
from gr_core.data.batches import Batch, PackReader
from gr_core.data.packfile import PACK_FILE
from gr_core.schema import PACK_COLUMNS

BUDGETS = {"8k": 8192, "64k": 65536}
MIN_TOKENS_PER_SECOND = 50e6
MAX_WAIT_FRACTION = 0.01
WORLD, FIRST_WORLD_DAY = Path(__file__).parent.parent / "conf" / "world.toml", "2025-06-01"
PASSES = 3


def measure_loader(report: Report, work: Path, num_tokens: int) -> None:
    """Add the loader's figures for both budgets, warm and cold."""
    for name, budget in BUDGETS.items():
        pack = str(work / f"pack-{name}")
        made = measure("benchmarks._packing:pack", preset="feed", num_tokens=num_tokens, token_budget=budget, out=pack)
        warm, cold = (measure("benchmarks._loading:read", pack=pack, cold=cold).result for cold in (False, True))
        plain, read = (measure("benchmarks._loading:read_bytes", pack=pack, cold=cold).result for cold in (False, True))
        report.figures |= {
            f"loader/{name}/warm_tokens_per_second_and_core": Figure(
                value=warm["tokens_per_second_and_core"],
                unit="tokens/s/core",
                at_least=MIN_TOKENS_PER_SECOND,
                baseline=plain["tokens_per_second_and_core"],
            ),
            f"loader/{name}/cold_tokens_per_second": Figure(
                value=cold["tokens_per_second"], unit="tokens/s", baseline=read["tokens_per_second"]
            ),
        }
        shape = {key: made.result[key] for key in ("num_tokens", "num_segments", "token_budget", "batches")}
        report.conditions[f"loader/{name}"] = {**shape, "warm": warm, "cold": cold, "plain": plain, "read": read}
        shutil.rmtree(pack)
    report.conditions["loader"] = {
        "passes": f"median of {PASSES}",
        "baseline": "warm: numpy sums the whole mapped file as int64; cold: read() of the whole file",
    }


def measure_wait(report: Report, work: Path) -> None:
    """Add the share of a step that the embedded world's first night waits for data, as its own attribution says."""
    home = work / "home-world"
    told = measure("benchmarks._stages:train_night", config=str(WORLD), home=str(home), day=FIRST_WORLD_DAY).result
    parts = {key: value for key, value in told.items() if key.startswith("perf/seconds/")}
    report.figures["loader/data_wait_fraction"] = Figure(
        value=told["perf/seconds/data_wait"] / sum(parts.values()), unit="of a step", at_most=MAX_WAIT_FRACTION
    )
    report.conditions["loader/data_wait"] = {"config": "conf/world.toml", "day": FIRST_WORLD_DAY, **told}
    shutil.rmtree(home)


def read(pack: str, cold: bool) -> dict[str, Any]:  # noqa: FBT001 -- a JSON argument
    """Sum every column of every batch, read ahead.

    Returns:
        Medians of wall seconds, CPU seconds, and tokens a second; the sum over all columns.
    """
    torch.set_num_threads(1)
    return _passes(Path(pack), _sum_all, cold=cold)


def read_bytes(pack: str, cold: bool) -> dict[str, Any]:  # noqa: FBT001 -- a JSON argument
    """Measure what the machine can do at best: sum the mapped file in one go (warm), read() it (cold)."""
    return _passes(Path(pack), _read_file if cold else _sum_file, cold=cold)


def _passes(pack: Path, work: Callable[[PackReader], Sequence[Any]], *, cold: bool) -> dict[str, Any]:
    runs = []
    for _ in range(PASSES):
        if cold:
            _drop_pages(pack / PACK_FILE)
        else:
            _read_file(PackReader(pack, verify=False))
        reader = PackReader(pack, verify=False)
        began, cpu = time.perf_counter(), time.process_time()
        sums = work(reader)
        runs.append((time.perf_counter() - began, time.process_time() - cpu))
    tokens = int(reader.index["num_tokens"])
    wall, cpu_seconds = median(run[0] for run in runs), median(run[1] for run in runs)
    return {
        "seconds": wall,
        "cpu_seconds": cpu_seconds,
        "tokens_per_second": tokens / wall,
        "tokens_per_second_and_core": tokens / max(wall, cpu_seconds),
        "sum": float(sum(map(float, sums))),
    }


def _sum_all(reader: PackReader) -> list[torch.Tensor]:
    with reader.ahead() as batches:
        return [torch.sum(column, dtype=column.dtype) for batch in batches for column in columns_of(batch)]


def columns_of(batch: Batch) -> list[torch.Tensor]:
    """Return all columns of a batch in their training types."""
    return [*batch.rows.values(), *(getattr(batch, name) for name in PACK_COLUMNS)]


def _sum_file(reader: PackReader) -> list[int]:
    mapped = np.memmap(reader.path / PACK_FILE, np.uint8, "r")
    return [int(np.add.reduce(mapped[: len(mapped) // 8 * 8].view(np.int64)))]


def _read_file(reader: PackReader) -> list[int]:
    size, buffer = 0, bytearray(2**22)
    with (reader.path / PACK_FILE).open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            size += count
    return [size]


def _drop_pages(file: Path) -> None:
    """Drop a file's clean pages from the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
