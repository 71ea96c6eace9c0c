"""Ready packs of the embedded world."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from gr_core.data.batches import PackReader
from gr_core.data.population import World
from gr_core.data.ready_packs import FIRST_ROW, write_packs
from gr_core.errors import ConfigError
from gr_core.schema import pack_schema

SMALL = World(num_items=120)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return packs of 150 users."""
    out = tmp_path_factory.mktemp("packs")
    write_packs(out, SMALL, num_users=150, token_budget=512, seed=3)
    return out


def columns(pack: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    with pa.memory_map(str(pack / "pack.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
    return {name: table.column(name).to_numpy() for name in table.column_names}, json.loads(
        (pack / "index.json").read_text()
    )


def test_packs_are_whole(packs: Path) -> None:
    """All roles can be opened, share no user, keep the budget, and have the pack's columns."""
    users: set[str] = set()
    for role in ("train", "next_day", "holdout"):
        reader = PackReader(packs / role)
        tokens, index = columns(packs / role)
        assert index["role"] == role
        assert list(tokens) == pack_schema(index["features"]).names
        assert max(index["batch_tokens"]) <= index["token_budget"] == 512
        assert len(reader) == len(index["batch_tokens"])
        assert not users & set(index["segment_users"])
        users |= set(index["segment_users"])
    assert len(users) == 150 + 15 + 15


def test_pack_intervals_follow_the_times(packs: Path) -> None:
    """A target sees exactly the history of its segment that was visible strictly before it, the newest 64 of it."""
    tokens, index = columns(packs / "train")
    batch_of = np.repeat(np.arange(len(index["batch_tokens"])), index["batch_tokens"])
    base = (np.cumsum(index["batch_tokens"]) - index["batch_tokens"])[batch_of]
    for begin, end in zip(index["segment_starts"], index["segment_starts"][1:], strict=False):
        part = {name: values[begin:end] for name, values in tokens.items()}
        target = part["supervise"] == 1
        history = part["time"][~target]
        lo, hi = part["lo"] + base[begin] - begin, part["hi"] + base[begin] - begin
        expected = np.searchsorted(history, part["time"][target], side="left")
        assert (np.diff(history) >= 0).all()
        assert np.array_equal(hi[target], expected)
        assert np.array_equal(part["position"][target], expected)
        assert np.array_equal(lo[target], np.maximum(expected - 64, 0))
        assert np.array_equal(hi[~target], np.arange(len(history)))
        assert (lo[~target] == 0).all()


def test_labels_stand_on_targets_and_actions_on_history(packs: Path) -> None:
    """Targets carry labels and no action, history actions and no label; context rows only stand on targets."""
    tokens, index = columns(packs / "train")
    target = tokens["supervise"] == 1

    assert index["num_supervised"] == target.sum() > 0
    assert (tokens["label_known"] == np.where(target, 7, 0)).all()
    assert (tokens["known"] == np.where(target, 0, 7)).all()
    assert (tokens["labels"][~target] == 0).all()
    assert (tokens["actions"][target] == 0).all()
    assert 0.1 < (tokens["labels"][target] & 1).mean() < 0.35
    assert 0.1 < (tokens["actions"][~target] & 1).mean() < 0.35
    for name in ("item_id", "category", "creator"):
        assert tokens[name].min() >= FIRST_ROW
    for name in ("surface", "slot", "device"):
        assert (tokens[name][~target] == 0).all()
        assert tokens[name][target].min() >= FIRST_ROW


def test_packs_are_repeatable_and_run_json_fits_them(packs: Path, tmp_path: Path) -> None:
    """Equal arguments give equal bytes, another seed others; the vocabulary of RUN.json holds every row."""
    same = write_packs(tmp_path / "same", SMALL, num_users=150, token_budget=512, seed=3)
    other = write_packs(tmp_path / "other", SMALL, num_users=150, token_budget=512, seed=4)
    tokens, index = columns(packs / "train")
    run = json.loads((packs / "RUN.json").read_text())

    assert same["train"] == index
    assert other["train"]["sha256"] != index["sha256"]
    assert (packs / run["packs"]["train"] / "index.json").exists()
    assert run["vocabulary_version"] == index["vocabulary"]
    assert set(run["vocabulary"]) == set(index["features"])
    for name, table in run["vocabulary"].items():
        assert tokens[name].max() < table["rows"] <= table["capacity"]


@pytest.mark.parametrize(("preset", "full"), [("feed", 0.25), ("ads", 0.13)])
def test_presets_have_the_reports_padding(tmp_path: Path, preset: str, full: float) -> None:
    """Padded to the longest, Feed is a quarter full and Ads an eighth: 75 % and 87 % padding."""
    index = write_packs(tmp_path, SMALL, num_users=1000, preset=preset, max_history=256)["train"]
    lengths = np.diff(index["segment_starts"])

    assert abs(lengths.mean() / lengths.max() - full) < 0.04


def test_a_preset_or_budget_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """The message names the setting and its value."""
    with pytest.raises(ConfigError, match=r"preset must be one of .* got 'tv'"):
        write_packs(tmp_path, SMALL, preset="tv")
    with pytest.raises(ConfigError, match="token_budget must be at least"):
        write_packs(tmp_path, SMALL, token_budget=64)
