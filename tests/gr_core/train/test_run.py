"""RUN.json: paths relative to the file, settings checked, errors by name."""

import json

import pytest

from gr_core.errors import ConfigError, UsageError
from gr_core.train.run import read_run, settings_of
from gr_core.train.settings import TrainConfig


def test_a_run_reads_back(packs, tmp_path):
    """What is written is what training gets; paths are relative to the file; lists become tuples."""
    run = packs.run(tmp_path / "p", "out", parent=tmp_path / "parent", seed=5, settings={"micro_batches": 3})

    got = read_run(packs.run_file(run))

    assert (got.pack, got.parent, got.output) == (run.pack, run.parent, run.output)
    assert (got.model, got.train, got.seed, got.fingerprint) == (run.model, run.train, 5, "f")
    assert [table.rows for table in got.tables] == [table.rows for table in run.tables]


@pytest.mark.parametrize(
    ("section", "values", "match"),
    [
        ("model", {"width": 10}, "width"),
        ("model", {"item_features": ["kind"]}, "item_id"),
        ("train", {"learning_rate": 1}, "learning_rate"),
        ("train", {"micro_batches": 0}, "micro_batches"),
    ],
)
def test_a_bad_setting_is_a_config_error(packs, tmp_path, section, values, match):
    """An unknown key or a broken rule names the key."""
    path = packs.run_file(packs.run(tmp_path / "p", "out"))
    content = json.loads(path.read_text())
    content["config"][section] |= values
    path.write_text(json.dumps(content))

    with pytest.raises(ConfigError, match=match):
        read_run(path)


def test_a_file_that_is_no_run_is_a_usage_error(tmp_path):
    """Missing, not JSON, or without a key: one error that names file and key."""
    with pytest.raises(UsageError, match="cannot be read"):
        read_run(tmp_path / "RUN.json")
    (tmp_path / "RUN.json").write_text("{}")
    with pytest.raises(UsageError, match=r"lacks the key 'vocabulary'; give .*packs\.train and output$"):
        read_run(tmp_path / "RUN.json")


def test_defaults_are_settings_too():
    """No key at all gives the documented defaults."""
    assert settings_of(TrainConfig, {}, "train") == TrainConfig()
