"""Config: TOML to frozen models, unknown keys refused, errors with dotted name, rule, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from gr_core.config import Config, load_config, parse_config
from gr_core.errors import ConfigError
from gr_core.model.settings import ModelConfig
from gr_core.train.settings import TrainConfig

ROOT = Path(__file__).parent.parent.parent
CONFIGS = sorted((ROOT / "conf").glob("*.toml"))
KUAIRAND = ROOT / "conf" / "kuairand.toml"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_shipped_config_loads_and_keeps_its_fingerprint(path: Path) -> None:
    """A shipped config is valid, and reading its resolved form again gives the same fingerprint."""
    config = load_config(path)

    again = Config.model_validate(config.resolved())

    assert config.fingerprint() == again.fingerprint()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("modell.width=3", ["modell", "no known key"]),
        ("train.dense_lerning_rate=1", ["train.dense_lerning_rate", "no known key"]),
        ("train.dense_learning_rate=fast", ["train.dense_learning_rate", "fast"]),
        ("train.dense_learning_rate=-1", ["train.dense_learning_rate", "above 0", "-1"]),
        ("model.width=3", ["model.width", "multiple", "3"]),
        ("lake.zone=Mars/Base", ["lake.zone", "IANA", "Mars/Base"]),
        ("lake.holdout_fraction=1.5", ["lake.holdout_fraction", "1.5"]),
        ("pack.token_budget=100", ["pack.token_budget", "100"]),
        ("gate.action=buy", ["gate.action", "buy"]),
        ("vocabulary.colour.min_count=1", ["vocabulary", "colour"]),
        ("model.item_features=['item_id', 'play_time']", ["play_time"]),
        ("name=Bad Name", ["name", "Bad Name"]),
        ("pack", ["--set", "pack"]),
        ("source.feeds.path=x", ["source.feeds.path", "list"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_key_or_value_is_one_error_that_names_it(override: str, words: list[str]) -> None:
    """Whatever is wrong with a config, the one error names the dotted key, the rule and the value."""
    with pytest.raises(ConfigError) as caught:
        load_config(KUAIRAND, [override])

    for word in words:
        assert word in caught.value.message, caught.value.message
    assert caught.value.exit_code == 2


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    """A config file that is not there or is no TOML is a config error with its path."""
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")

    for path in (tmp_path / "absent.toml", broken):
        with pytest.raises(ConfigError, match=path.name):
            load_config(path)


def test_overrides_read_toml_values_and_plain_text() -> None:
    """0.1 and 0.10 are one value, so one fingerprint; a bare word is text (case B4)."""
    one = load_config(KUAIRAND, ["train.dense_learning_rate=0.1", "source.root=some/where"])
    two = load_config(KUAIRAND, ["train.dense_learning_rate=0.10", "source.root=some/where"])

    assert one.source.root == "some/where"
    assert one.fingerprint() == two.fingerprint()


def test_a_source_without_an_events_feed_is_refused() -> None:
    """Exactly one feed has the role events."""
    values = load_config(KUAIRAND).resolved()
    values["source"]["feeds"] = [feed for feed in values["source"]["feeds"] if feed["role"] != "events"]

    with pytest.raises(ConfigError, match="exactly one feed"):
        parse_config(values)


def test_model_and_train_are_plain_dataclasses() -> None:
    """The trainer builds its settings without pydantic, and they refuse the same values."""
    config = load_config(KUAIRAND)

    assert isinstance(config.model, ModelConfig)
    assert isinstance(config.train, TrainConfig)
    with pytest.raises(ValueError, match="num_layers"):
        ModelConfig(num_layers=0)
