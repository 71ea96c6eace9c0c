"""The five-way split, utilisation, cost, and what a step asks of the machine."""

import json
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from gr_core.train.attribution import PARTS, Attribution, compiled_graphs
from gr_core.train.flops import BatchFlops
from gr_core.train.hardware import Terms
from gr_core.train.tracing import Trace


def test_seconds_go_to_their_part_and_tokens_are_counted():
    """A part has the time spent in it; unused budget and padding are shares over batches."""
    clock = Attribution(torch.device("cpu"), token_budget=100)
    with clock.part("forward"):
        time.sleep(0.02)
    clock.count(60, 0.1)
    clock.count(100, 0.3)

    metrics = clock.metrics()

    assert metrics["perf/seconds/forward"] >= 0.02
    assert metrics["perf/seconds/backward"] == 0.0
    assert metrics["perf/unused_budget_fraction"] == pytest.approx(0.2)
    assert metrics["perf/padding_fraction"] == pytest.approx(0.2)
    assert metrics["perf/tokens_per_second"] > 0
    assert {f"perf/seconds/{part}" for part in PARTS} <= metrics.keys()


def test_a_night_without_batches_has_no_shares():
    """Nothing counted gives zeros, not a division by zero."""
    metrics = Attribution(torch.device("cpu"), 100).metrics()
    assert (metrics["perf/unused_budget_fraction"], metrics["perf/padding_fraction"]) == (0.0, 0.0)


def test_utilisation_and_core_seconds_follow_from_the_terms():
    """MFU is the batches' FLOP over wall time and peak; on the CPU cores are charged under their own name."""
    terms = Terms(peak_tflops=1e-3, num_threads=3, price_per_gpu_hour=4.0)
    clock = Attribution(torch.device("cpu"), 100, terms=terms)
    with clock.step():
        clock.count(60, 0.0, BatchFlops(matrices=6e6, attention=2e6))
        time.sleep(0.02)

    metrics = clock.metrics()

    assert metrics["perf/model_flops"] == 8e6
    assert metrics["perf/attention_flops_fraction"] == 0.25
    assert metrics["perf/mfu"] == pytest.approx(8e6 / 1e9 / metrics["perf/train_seconds"])
    assert metrics["perf/core_seconds"] == pytest.approx(3 * metrics["perf/train_seconds"])
    assert not {"perf/gpu_seconds", "perf/cost"} & metrics.keys()
    assert metrics["perf/steps"] == 1
    assert metrics["perf/peak_memory_bytes"] > 2**20


def test_one_step_is_counted_once_it_pays():
    """Operators are counted on one step alone, and not before so many seconds; what it costs is told."""
    late, soon = (Attribution(torch.device("cpu"), 100, count_after_seconds=after) for after in (60.0, 0.0))
    for clock in (late, soon):
        for number in range(3):
            with clock.step():
                torch.ones(2).add(1)
                _ = [torch.ones(2) for _ in range(number)]

    assert "perf/ops_per_step" not in late.metrics()
    assert soon.metrics()["perf/ops_per_step"] == 2  # of the first step
    assert soon.metrics()["perf/attribution_seconds"] < soon.metrics()["perf/train_seconds"]


def test_parts_are_named_in_a_trace(tmp_path):
    """A trace shows the five parts as ranges."""
    path = tmp_path / "trace.json"
    clock = Attribution(torch.device("cpu"), 100, trace=Trace(path, torch.device("cpu"), first=0, steps=1))
    with clock.step():
        for name in PARTS:
            with clock.part(name):
                torch.ones(2)

    assert set(PARTS) <= {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def test_graphs_and_recompilations_are_those_of_torch(monkeypatch):
    """Nothing is told where nothing was compiled; a frame compiled again is a recompilation."""
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert compiled_graphs() == {}
    metrics = [SimpleNamespace(compile_id=name) for name in ("0/0", "0/1", "1/0", "0/2", None)]
    fake = SimpleNamespace(counters={"stats": {"unique_graphs": 4}}, get_compilation_metrics=lambda: metrics)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", fake)

    assert compiled_graphs() == {"perf/compiled_graphs": 4.0, "perf/recompiles": 2.0}
