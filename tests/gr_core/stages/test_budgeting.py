"""What a night computes with, from config to checkpoint: the token budget that fits a memory, and a compiler."""

from pathlib import Path

import pytest

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.errors import ConfigError
from gr_core.lake import store
from gr_core.train.memory import GIB
from tests.plain import run

FITTED = {
    "token_budget = 128": 'token_budget = "auto"',
    "num_threads = 1": 'num_threads = 1\nmemory_gib = 0.755\nprecision = "bf16"\nactivation_checkpointing = "block"',
}


def fitted(folder: Path, changes: dict[str, str]) -> Path:
    """Return a tiny config with some lines changed."""
    path = tiny.make(folder, days=1)
    text = path.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def test_a_night_trains_with_the_budget_that_fits(tmp_path: Path) -> None:
    """Packs, RUN.json and checkpoint tell one budget; it is above one segment, and its step fits the memory."""
    config = fitted(tmp_path, FITTED)

    _, done = run(config, tmp_path / "home", tiny.FIRST_DAY, stop_after="train")

    index = store.read_json(store.join(done["pack"]["train"]["uri"], "index.json"))
    state = store.read_json(store.join(done["train"]["uri"], "state.json"))
    assert index["token_budget"] == state["metrics"]["perf/token_budget"]
    assert index["token_budget"] >= 32
    assert index["token_budget"] % 64 == 0
    assert max(index["batch_tokens"]) <= index["token_budget"]
    assert state["metrics"]["perf/modelled_bytes"] <= 0.755 * GIB
    assert state["config"]["pack"]["token_budget"] == "auto"
    assert state["config"]["train"]["precision"] == "bf16"


def test_a_memory_that_holds_no_segment_stops_the_night_before_anything_is_written(tmp_path: Path) -> None:
    """The night's preflight names the key and the smallest memory that works; there is no home yet."""
    config = fitted(tmp_path, {**FITTED, "num_threads = 1": "num_threads = 1\nmemory_gib = 0.1"})

    with pytest.raises(ConfigError, match=r"train\.memory_gib = 0\.1 holds no batch.*the smallest that works is 0\.7"):
        run(config, tmp_path / "home", tiny.FIRST_DAY, stop_after="ingest")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("pack.token_budget=auto", 'pack.token_budget = "auto" needs train.memory_gib'),
        ("pack.token_budget=most", 'must be "auto" or a number of tokens'),
        ("train.planned_rows.nothing=5", r"train.planned_rows must name features"),
    ],
)
def test_a_budget_that_cannot_be_is_refused_with_the_config(tmp_path: Path, override: str, told: str) -> None:
    """Named by key, with the remedy, before anything is read."""
    config = tiny.make(tmp_path, days=0)

    with pytest.raises(ConfigError, match=told):
        load_config(config, [override])


def test_compiling_without_a_compiler_stops_the_night_before_anything_is_written(tmp_path: Path) -> None:
    """The night's preflight names train.compile; there is no home yet."""
    from torch._inductor import config as inductor

    config = fitted(tmp_path, {"num_threads = 1": 'num_threads = 1\ncompile = "blocks"'})

    told = r"train\.compile = 'blocks' needs a C\+\+ compiler"
    with inductor.patch({"cpp.cxx": (None, "no-such-compiler")}), pytest.raises(ConfigError, match=told):
        run(config, tmp_path / "home", tiny.FIRST_DAY, stop_after="ingest")
    assert not (tmp_path / "home").exists()
