"""The memory and compile benchmarks: figures of every setting, beside what the model of memory counts on."""

from pathlib import Path

import pytest

from benchmarks import _child, _compiled, _memory, _parts
from benchmarks._figures import Report
from gr_core.model import execution


def here(target: str, **arguments: object) -> _child.Measured:
    """Measure in this process: a start of Python each would cost more than all else."""
    return _child.call(target, arguments)


def test_memory_is_measured_beside_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting trains, has a peak and its ratio to the modelled bytes; the modelled ones fall with each saving."""
    monkeypatch.setattr(_memory, "measure", here)
    report = Report()
    _memory.measure_memory(report, tmp_path, **_parts.QUICK["memory"])

    modelled = {}
    for name in _memory.SETTINGS:
        peak = report.figures[f"memory/{name}/peak_bytes"].value or 0
        assert peak > 100 * 2**20
        modelled[name] = peak / (report.figures[f"memory/{name}/peak_over_modelled"].value or 0)
    assert modelled["bf16/block"] < modelled["fp32/block"] < modelled["fp32/none"]
    assert report.conditions["memory"]["idle_bytes"] > 0


def test_starts_and_rates_with_and_without_compiled_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of night train the same batches in turn; graphs stay within the most there may be."""
    monkeypatch.setattr(_compiled, "measure", here)
    monkeypatch.setattr(execution, "BACKEND", "eager")
    execution._compiled.cache_clear()
    report = Report()
    _compiled.measure_compiled(report, tmp_path, **_parts.QUICK["compiled"])
    execution._compiled.cache_clear()

    assert (report.figures["compiled/rate_over_plain"].value or 0) > 0
    assert (report.figures["compiled/cold_seconds"].value or 0) > 0
    assert 0 < (report.figures["compiled/graphs"].value or 0) <= _compiled.MOST_GRAPHS
