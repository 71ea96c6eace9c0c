"""How far a night is, for those who look on: written as stages begin and end, read from any process, never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from gr_core import progress


def test_stages_are_told_as_they_begin_and_end(tmp_path: Path) -> None:
    """A stage of several parts runs while one does; an ended one has its time; training has its steps."""
    home = str(tmp_path)
    assert progress.read(home, "2025-06-01") == {}

    with progress.of_stage(home, "2025-06-01", "sequences"):
        with progress.of_stage(home, "2025-06-01", "sequences"):
            assert progress.read(home, "2025-06-01")["sequences"]["running"] == 2
        within = progress.read(home, "2025-06-01")["sequences"]
    progress.step(home, "2025-06-01", 3, 10)
    after = progress.read(home, "2025-06-01")

    assert (within["running"], within["parts"]) == (1, 1)
    assert (after["sequences"]["running"], after["sequences"]["parts"]) == (0, 2)
    assert after["sequences"]["started_us"] <= after["sequences"]["ended_us"]
    assert (after["train"]["step"], after["train"]["steps"]) == (3, 10)
    assert progress.read(home, "2025-06-02") == {}


def test_a_stage_that_failed_has_not_ended(tmp_path: Path) -> None:
    """Whoever looks sees where the night stopped; the next attempt starts with nothing told."""
    with pytest.raises(ValueError, match="no"), progress.of_stage(str(tmp_path), "night", "train"):
        raise ValueError("no")
    assert progress.read(str(tmp_path), "night")["train"]["running"] == 1

    progress.clear(str(tmp_path), "night")
    assert progress.read(str(tmp_path), "night") == {}
    with progress.of_stage(str(tmp_path), "night", "ingest"):
        assert list(progress.read(str(tmp_path), "night")) == ["ingest"]


def test_a_damaged_file_is_nothing_told(tmp_path: Path) -> None:
    """It may be lost or half written: then nothing is known."""
    (tmp_path / "progress").mkdir()
    (tmp_path / "progress" / "night.json").write_text('{"train": ')

    assert progress.read(str(tmp_path), "night") == {}
