"""Embedding tables: lookup, backward and update of 8 tables of width 32, 20,000 Zipf ids each.

Ours: duplicates merged, one lookup, rowwise Adagrad on touched rows. Default: nn.Embedding and torch's default Adam on
dense gradients. Fused: the same with Adam(fused=True). fbgemm's CPU operator (EXACT_ROWWISE_ADAGRAD, SUM) where it is
installed; it is no dependency.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks._child import measure
from benchmarks._others import add_folder
from benchmarks._pairs import interleave, medians, ratio
from benchmarks._report import Figure, Report
from benchmarks._segments import zipf
from gr_core.model.embeddings import Tables, TableSpec
from gr_core.train.optim import SparseOptimizer
from gr_core.train.settings import TrainConfig
from kernels.embedding import fused_lookup, merge_ids

NUM_TABLES, WIDTH, NUM_IDS = 8, 32, 20_000
GOALS = {100_000: 3.0, 1_000_000: 25.0}
MAX_OVER_FBGEMM = 2.0
_RESERVED = 3
_FUSED_UP_TO = 200_000  # rows a table: a dense arm of a million takes 4 GB, and one is enough


def measure_tables(report: Report, work: Path, sizes: Mapping[str, Any]) -> None:
    """Add ours against default Adam, and against fbgemm where it is there, by rows of a table."""
    del work
    for rows in sizes["table_rows"]:
        found = measure(
            "benchmarks._tables:compare",
            rows=rows,
            num_ids=sizes["ids"],
            steps=sizes["steps"],
            rounds=sizes["rounds"],
            rivals=sizes["rivals"],
        ).result
        name = f"tables/{rows}"
        report.figures[f"{name}/speedup_over_adam"] = Figure(
            value=found["over"]["adam"], unit="x", at_least=GOALS.get(rows), baseline=found["milliseconds"]["adam"]
        )
        report.figures[f"{name}/milliseconds"] = Figure(value=found["milliseconds"]["ours"], unit="ms a step")
        if "fbgemm" in found["milliseconds"]:
            report.figures[f"{name}/over_fbgemm"] = Figure(
                value=1 / found["over"]["fbgemm"],
                unit="of its time",
                at_most=MAX_OVER_FBGEMM,
                baseline=found["milliseconds"]["fbgemm"],
            )
        report.conditions[name] = found
    report.conditions["tables"] = {"tables": NUM_TABLES, "width": WIDTH, "ids": sizes["ids"], "baseline": "ms a step"}


def compare(rows: int, num_ids: int, steps: int, rounds: int, rivals: str = "") -> dict[str, Any]:
    """Time a step of every arm on the same ids, interleaved.

    Args:
        rows: Of each table.
        num_ids: Of each table, Zipf-distributed.
        steps: A round of our arm; the dense ones take one.
        rounds: How often.
        rivals: Folder of packages besides those of this Python; empty: none.

    Returns:
        milliseconds a step by arm; over: how many times slower than ours; which arms were not there.
    """
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(
        np.stack([_RESERVED + zipf(rng, rows - _RESERVED, num_ids) for _ in range(NUM_TABLES)], axis=1)
    )
    grad = torch.from_numpy(rng.standard_normal((num_ids, WIDTH), dtype=np.float32))
    add_folder(rivals)
    arms: dict[str, Callable[[], None]] = {
        "ours": ours(rows, ids, grad),
        "adam": dense(rows, ids, grad, fused=False),
    }
    if rows <= _FUSED_UP_TO:
        arms["fused_adam"] = dense(rows, ids, grad, fused=True)
    if importlib.util.find_spec("fbgemm_gpu") is not None:
        arms["fbgemm"] = fbgemm(rows, ids, grad)
    counts = {name: 1 if name.endswith("adam") else steps for name in arms}
    rates = interleave({name: _repeated(work, counts[name]) for name, work in arms.items()}, rounds)
    return {
        "milliseconds": {name: 1000 / rate for name, rate in medians(rates).items()},
        "over": {name: ratio(rates, "ours", name) for name in arms},
        "distinct_ids": int(sum(len(torch.unique(ids[:, place])) for place in range(NUM_TABLES))),
        "fbgemm": "measured" if "fbgemm" in arms else "not installed",
        "load": round(os.getloadavg()[0], 2),
    }


def _repeated(work: Callable[[], None], count: int) -> Callable[[], float]:
    def run() -> float:
        for _ in range(count):
            work()
        return count

    return run


def ours(rows: int, ids: Tensor, grad: Tensor) -> Callable[[], None]:
    """Return one step of the product: flat rows, merge, lookup, backward, rowwise Adagrad."""
    specs = [TableSpec(name=f"table{place}", rows=rows, capacity=rows) for place in range(NUM_TABLES)]
    tables = Tables(specs, WIDTH)
    optimizer = SparseOptimizer(tables, TrainConfig())
    local = ids.numpy().astype(np.int32)

    def step() -> None:
        flat = np.stack([tables.map.map(spec.name, local[:, place]) for place, spec in enumerate(specs)], axis=1)
        distinct, places = merge_ids(torch.from_numpy(flat.ravel()), tables.map.num_rows)
        values = tables.read(distinct).requires_grad_()
        fused_lookup(values, places.view(flat.shape)).backward(grad)
        assert values.grad is not None
        optimizer.collect(distinct, values.grad)
        optimizer.step(1.0)

    return step


def dense(rows: int, ids: Tensor, grad: Tensor, *, fused: bool) -> Callable[[], None]:
    """Return one step of most teams: nn.Embedding, a gradient of every row, Adam."""
    tables = nn.ModuleList(nn.Embedding(rows, WIDTH) for _ in range(NUM_TABLES))
    optimizer = torch.optim.Adam(tables.parameters(), lr=1e-3, fused=True if fused else None)

    def step() -> None:
        optimizer.zero_grad()
        total: Tensor = sum(table(ids[:, place]) for place, table in enumerate(tables))  # type: ignore[assignment]
        total.backward(grad)  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def fbgemm(rows: int, ids: Tensor, grad: Tensor) -> Callable[[], None]:
    """Return one step of fbgemm's table-batched CPU operator; it updates inside backward."""
    training = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    operator = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, WIDTH, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU) for _ in range(NUM_TABLES)],
        optimizer=importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        pooling_mode=common.PoolingMode.SUM,
        learning_rate=0.05,
    )
    flat = ids.t().reshape(-1).contiguous()
    offsets = torch.arange(flat.numel() + 1)
    wide = grad.repeat(1, NUM_TABLES)

    def step() -> None:
        operator(flat, offsets).backward(wide)

    return step
