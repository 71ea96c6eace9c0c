"""The attention path of a run, from its config to the checkpoint's state."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from gr_core.errors import ConfigError
from gr_core.model.settings import AttentionConfig
from gr_core.train.loop import train
from gr_core.train.run import read_run
from gr_core.train.state import load_checkpoint


def quiet(line):
    """Say nothing."""


@pytest.mark.parametrize(("path", "kernel"), [("auto", "bucketed"), ("dense", "dense")])
def test_the_kernel_that_ran_is_logged_once_and_stands_in_the_state(packs, users, caplog, path, kernel):
    """On the CPU auto is bucketed SDPA; the log says which path and why, once."""
    run = packs.run(packs.pack("pack", users), "out", attention=AttentionConfig(path=path))

    with caplog.at_level(logging.INFO, logger="gr_core.train.attention"):
        state = train(run, quiet)

    assert state["attention"] == kernel
    assert [record.message for record in caplog.records if "attention path" in record.message] == [
        f"attention path: {kernel} on cpu; " + ("the device is cpu" if path == "auto" else "attention.path")
    ]


def test_both_cpu_paths_train_the_same_model(packs, users):
    """A night by the dense reference ends within rounding of one by the bucketed path (case F11)."""
    pack = packs.pack("pack", users)
    for path in ("bucketed", "dense"):
        train(packs.run(pack, path, attention=AttentionConfig(path=path)), quiet)

    mine, theirs = (load_checkpoint(packs.root / path)[0] for path in ("bucketed", "dense"))

    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.numpy() == pytest.approx(theirs[name].numpy(), abs=1e-4), name


@pytest.mark.parametrize("require", ["fa3", "flex", "varlen"])
def test_a_requirement_that_the_machine_cannot_meet_stops_before_anything_trains(packs, users, require):
    """The error names the kernel; there is no checkpoint."""
    run = packs.run(packs.pack("pack", users), "out", attention=AttentionConfig(require=require))

    with pytest.raises(ConfigError, match=f"attention.require = '{require}' cannot be met"):
        train(run, quiet)

    assert not run.output.exists()


def test_run_json_names_the_path_and_an_older_one_has_the_default(packs, users):
    """config.attention is read, kept in the checkpoint's config, and optional."""
    run = packs.run(packs.pack("pack", users), "out")
    chosen = dataclasses.replace(run, config={**run.config, "attention": {"path": "dense"}})

    read = read_run(packs.run_file(chosen))

    assert read.attention == AttentionConfig(path="dense")
    assert read.config["attention"] == {"path": "dense", "require": "none"}
    assert read_run(packs.run_file(run)).attention == AttentionConfig()


VARIANTS = [{"block": "hstu", "head": "mmoe"}, {"time": "rope", "time_half_life_days": 2.0}]


@pytest.mark.parametrize("changes", VARIANTS, ids=["hstu", "rope and decay"])
def test_a_variant_trains_resumes_from_its_parent_and_refuses_another(packs, users, tokens, changes):
    """A night of another block or head warm-starts from its own kind alone."""
    model = dataclasses.replace(tokens.MODEL, **changes)
    pack = packs.pack("pack", users)
    first = packs.run(pack, "first", model=model)
    train(first, quiet)

    second = train(packs.run(pack, "second", model=model, parent=first.output), quiet)

    assert second["step"] == 2 * load_checkpoint(first.output)[1]["step"]
    with pytest.raises(ConfigError, match="model must equal the parent's"):
        train(packs.run(pack, "third", parent=first.output), quiet)
