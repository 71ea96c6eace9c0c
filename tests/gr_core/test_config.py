"""Config: TOML to frozen models, unknown keys refused, errors with dotted name, rule, value and remedy."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any

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
        ("pack.seed=-1", ["pack.seed", "greater than or equal to 0", "-1"]),
        ("source.world={start=2025-06-01, seed=-1}", ["source.world.seed", "greater than or equal to 0", "-1"]),
        (
            "source.visibility_delay_seconds=-1",
            ["source.visibility_delay_seconds", "finite", "at least 0", "SQL", "-1"],
        ),
        ("source.visibility_delay_seconds=inf", ["source.visibility_delay_seconds", "finite", "inf"]),
        ("source.visibility_delay_seconds=nan", ["source.visibility_delay_seconds", "finite", "nan"]),
        ("gate.slice_margin=-1", ["gate.slice_margin", "greater than or equal to 0", "-1"]),
        (
            'evaluation.slices=[{name="s", by="feature", feature="colour"}]',
            ["evaluation.slices[s].feature", "side feature", "'colour'", "source.feeds.side"],
        ),
        (
            'evaluation.slices=[{name="s", by="feature", feature="surface", values=["feed", "feed"]}]',
            ["evaluation.slices[s].values", "different", "['feed', 'feed']"],
        ),
        ('evaluation.slices=[{name="s", by="history", feature="surface"}]', ["evaluation.slices[s].feature"]),
        ('evaluation.slices=[{name="s", by="history", bounds=[5, 5]}]', ["evaluation.slices[s].bounds", "[5, 5]"]),
        ('evaluation.slices=[{name="s", by="history", bounds=[5]}]', ["evaluation.slices[s].labels", "2 different"]),
        ('evaluation.slices=[{name="day", by="items"}]', ["evaluation.slices[day].name", "'day'"]),
        (
            'evaluation.slices=[{name="s", by="items"}, {name="s", by="history"}]',
            ["evaluation.slices", "['s']", "twice"],
        ),
        ("gate.margin=nan", ["gate.margin", "finite", "nan"]),
        ("gate.margin=inf", ["gate.margin", "finite", "inf"]),
        ("gate.calibration=[0.8, inf]", ["gate.calibration", "finite", "inf"]),
        ("gate.calibration=[1.25, 0.8]", ["gate.calibration", "low < high", "1.25"]),
        ("gate.calibration=[0.0, 1.2]", ["gate.calibration", "0 < low", "0.0"]),
        ("train.dense_learning_rate=inf", ["train.dense_learning_rate", "finite", "inf"]),
        ("train.clip_norm=nan", ["train.clip_norm", "finite", "nan"]),
        ("train.warmup_fraction=nan", ["train.warmup_fraction", "nan"]),
        ("train.action_weights.click=inf", ["train.action_weights.click", "finite", "inf"]),
        ("train.half_life_days=0", ["train.half_life_days", "above 0", "0"]),
        ("train.position_feature='surface'", ["train.position_weights", "train.position_feature", "set both"]),
        ("train.position_weights={top=0.0}", ["train.position_weights", "train.position_feature", "set both"]),
        ("train.negative_fraction=0.0", ["train.negative_fraction", "(0, 1]", "0.0"]),
        ("train.replay_fraction=1.0", ["train.replay_fraction", "[0, 1)", "1.0"]),
        ("model.feedforward_multiple=inf", ["model.feedforward_multiple", "finite", "inf"]),
        ("model.dropout=nan", ["model.dropout", "nan"]),
        ("nightly.ready_by=24:00", ["nightly.ready_by", "23:59", "24:00"]),
        ("nightly.ready_by=29:59", ["nightly.ready_by", "23:59", "29:59"]),
        ("source.tables=[{name='t', path='t', on={}, side={x='y'}}]", ["source.tables[t].on", "at least 1"]),
        ("source.tables=[{name='t', path='t', on={shown_at='k'}, side={x='y'}}]", ["source.tables[t].on", "shown_at"]),
        ("source.tables=[{name='t', path='t', on={other='k'}, side={x='y'}}]", ["source.tables[t].on", "other"]),
        ("nightly.ready_by=06:30:00", ["nightly.ready_by must be text", 'write ready_by = "06:30"']),
        ("nightly.ready_by=06:30:15", ["nightly.ready_by must be text", 'write ready_by = "06:30:15"']),
        ("source.root=2025-06-01", ["source.root must be text", 'write root = "2025-06-01"']),
        ("source.root=5", ["source.root must be text, got 5", 'write root = "5"']),
        ("alerts.on='failed'", ["alerts.on must be a list, got 'failed'", 'write on = ["failed"]']),
        ("model.item_features=item_id", ["model.item_features must be a list", 'write item_features = ["item_id"]']),
        ("gate.calibration=0.8", ["gate.calibration must be a list, got 0.8"]),
        ("drift='auto'", ["drift must be a table, got 'auto'", "below [drift]"]),
        ("train.action_weights=[1]", ["train.action_weights must be a table, got [1]", "[train.action_weights]"]),
        ("drift.min_nights=9", ["drift.min_nights = 9", "drift.baseline_nights = 7"]),
        ("drift.baseline_nights=2", ["drift.min_nights = 3", "drift.baseline_nights = 2"]),
        ("drift.max_days=3", ["drift.max_days = 3", "drift.min_days = 7", "0: never"]),
        ("gate.confidence=0.9999", ["gate.confidence = 0.9999", "gate.num_resamples of at least 10000, got 1000"]),
        ("next_night.confidence=0.9999", ["next_night.confidence = 0.9999", "gate.num_resamples of at least 10000"]),
        ("alerts={block='slack-webhook/x', on=[]}", ["alerts.on = []", "alerts.block = 'slack-webhook/x'"]),
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
    with pytest.raises(ConfigError, match="null byte"):
        load_config("conf\0.toml")


@pytest.mark.parametrize(
    "key",
    [
        "source.restate_days",
        "source.dedup_days",
        "source.lateness_seconds",
        "source.max_clock_skew_seconds",
        "source.daily_cap",
        "lake.rerun_days",
        "sequences.max_history",
        "sequences.max_targets",
        "sequences.max_age_days",
        "pack.time_window_seconds",
        "pack.token_budget",
        "pack.seed",
        "gate.num_resamples",
        "nightly.stage_timeout_seconds",
    ],
)
def test_a_number_that_no_stage_could_count_with_is_refused(key: str) -> None:
    """A slip of the finger is told with the key and the most there may be, not found by a stage in the night."""
    with pytest.raises(ConfigError) as caught:
        load_config(KUAIRAND, [f"{key}={10**20}"])
    assert key in str(caught.value)
    assert "less than" in str(caught.value)


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is below the working directory, which the error names."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=re.escape(f"conf/a.toml does not exist (seen from {Path.cwd()})")):
        load_config("conf/a.toml")


def minimal() -> dict[str, Any]:
    """Return the fewest values that are a config."""
    feed = {
        "name": "clicks",
        "path": "*.csv",
        "event_id": "id",
        "shown_at": {"column": "ts", "unit": "s"},
        "columns": {"user_id": "uid", "item_id": "item"},
    }
    return {"name": "t", "source": {"root": "raw", "actions": [{"name": "click"}], "feeds": [feed]}}


def test_a_minimal_config_dumps_without_a_warning() -> None:
    """Every default has the type of its field, and a default written out is the same config."""
    config = parse_config(minimal())
    written = minimal()
    written["source"]["visibility_delay_seconds"] = 0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.resolved()
        config.model_dump_json()
    assert parse_config(written).fingerprint() == config.fingerprint()


def test_a_rule_of_a_feed_names_the_feed_once() -> None:
    """An entry of a list stands under its name, not its place; without a name, under its place."""
    values = minimal()
    del values["source"]["feeds"][0]["event_id"]
    with pytest.raises(ConfigError) as caught:
        parse_config(values, where="a.toml")
    assert caught.value.message == "a.toml: source.feeds[clicks]: give event_id or event_key, one of the two"

    del values["source"]["feeds"][0]["name"]
    with pytest.raises(ConfigError, match=r"source\.feeds\.0\.name is missing"):
        parse_config(values)


def test_up_to_five_errors_are_listed_one_a_line() -> None:
    """Two errors are both told in full; of seven, five and how many more."""
    with pytest.raises(ConfigError) as caught:
        parse_config({**minimal(), "modell": {}, "pack": {"seed": -1}}, where="a.toml")
    first, *lines = caught.value.message.splitlines()
    assert first == "a.toml: 2 errors"
    assert [line.split()[0] for line in lines] == ["pack.seed:", "modell"]

    with pytest.raises(ConfigError) as caught:
        parse_config({**minimal(), **{f"key{n}": n for n in range(7)}}, where="a.toml")
    assert len(caught.value.message.splitlines()) == 1 + 5 + 1
    assert caught.value.message.endswith("and 2 more")


def test_overrides_read_toml_values_and_plain_text() -> None:
    """0.1 and 0.10 are one value, so one fingerprint; a bare word is text (case B4)."""
    one = load_config(KUAIRAND, ["train.dense_learning_rate=0.1", "source.root=some/where"])
    two = load_config(KUAIRAND, ["train.dense_learning_rate=0.10", "source.root=some/where"])

    assert one.source.root == "some/where"
    assert one.fingerprint() == two.fingerprint()


def test_an_error_of_an_override_names_set_and_not_the_file() -> None:
    """Whoever reads it looks where the mistake is; a rule across keys of the file and the override names the file."""
    with pytest.raises(ConfigError, match=r"^--set: train\.dense_lerning_rate is no known key"):
        load_config(KUAIRAND, ["train.dense_lerning_rate=1", "train.num_threads=1"])
    with pytest.raises(ConfigError, match=r"kuairand\.toml: model\.width"):
        load_config(KUAIRAND, ["model.width=3"])


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


@pytest.mark.parametrize("owner", ["feeds", "tables"])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("User_ID", "contract column"),
        ("commit", "contract column"),
        ("click_at", "action's time"),
        ("actions_new", "_new"),
        ("seen", "joins"),
        ("Genre", "lower-case"),
        ("a b", "lower-case"),
        ("../x", "lower-case"),
        ("x" * 41, "at most 40"),
        ("", "lower-case"),
    ],
)
def test_a_side_feature_has_a_name_that_columns_and_files_can_have(owner: str, name: str, rule: str) -> None:
    """In feeds and tables alike: dotted key, rule, value and remedy; nothing that the lake itself names a column."""
    values = load_config(KUAIRAND).resolved()
    values["source"][owner][0]["side"][name] = "tab"

    with pytest.raises(ConfigError, match="give it another name") as caught:
        parse_config(values)

    where = f"source.{owner}[{values['source'][owner][0]['name']}].side.{name}"
    for word in (where, rule, repr(name)):
        assert word in caught.value.message, caught.value.message


def test_an_action_and_a_table_have_names_of_their_own() -> None:
    """An action whose time column would be a contract column, and a second table of one name, are refused."""
    values = load_config(KUAIRAND).resolved()
    values["source"]["actions"].append({"name": "shown"})
    with pytest.raises(ConfigError, match="shown_at is a contract column"):
        parse_config(values)

    values = load_config(KUAIRAND).resolved()
    values["source"]["tables"].append(values["source"]["tables"][0])
    with pytest.raises(ConfigError, match=r"source\.tables: a name stands twice"):
        parse_config(values)


@pytest.mark.parametrize("owner", ["feeds", "tables"])
@pytest.mark.parametrize("path", ["/data/*.parquet", "../x/*", "s3://bucket/*", "", ".", "./", "a/b**/*.parquet"])
def test_a_path_of_raw_files_lies_below_the_root(owner: str, path: str) -> None:
    """An absolute path, one that climbs, an empty one and a ** that is no folder are named by their key."""
    values = load_config(KUAIRAND).resolved()
    values["source"][owner][0]["path"] = path
    name = values["source"][owner][0]["name"]

    with pytest.raises(
        ConfigError, match=rf": source\.{owner}\[{name}\]\.path: must (be a path below|have \*\* alone)"
    ):
        parse_config(values)


def test_a_delay_may_be_sql_and_a_promise_any_time_of_day() -> None:
    """What is right stays allowed: SQL text, whole and broken seconds, the first and last minute."""
    for delay in ("play_time_ms / 1000", 0, 2.5):
        assert (
            load_config(KUAIRAND, [f"source.visibility_delay_seconds={delay}"]).source.visibility_delay_seconds == delay
        )
    for time in ("00:00", "23:59"):
        assert load_config(KUAIRAND, [f"nightly.ready_by='{time}'"]).nightly.ready_by == time


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_the_plain_settings_refuse_what_is_not_finite(value: float) -> None:
    """RUN.json is read without pydantic, and cannot bring an infinite learning rate either."""
    for name in ("dense_learning_rate", "sparse_learning_rate", "weight_decay", "clip_norm", "initial_accumulator"):
        setting: dict[str, Any] = {name: value}
        with pytest.raises(ValueError, match=f"train.{name} must be"):
            dataclasses.replace(TrainConfig(), **setting)
    with pytest.raises(ValueError, match=r"train\.action_weights\.click must be a finite"):
        TrainConfig(action_weights={"click": value})
    with pytest.raises(ValueError, match=r"model\.feedforward_multiple must be a finite"):
        ModelConfig(feedforward_multiple=value)
