"""Checkpoints of a running training: killed, damaged, non-finite; a resumed night is the uninterrupted one, bit for bit."""

import logging
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch

from gr_core.errors import FormatError, TrainingError
from gr_core.train import loop, saving
from gr_core.train.optim import SparseOptimizer
from gr_core.train.series import read_series
from gr_core.train.state import load_checkpoint, read_state, step_checkpoints, steps_folder, verify

KILLED = """
import os, signal, sys
from pathlib import Path
from gr_core.train import loop
from gr_core.train.run import read_run

def say(line):
    if line["step"] == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

loop._PROGRESS_SECONDS = 0.0
loop.train(read_run(Path(sys.argv[1])), say)
"""


class Stop(Exception):
    """Ends a training in this process."""


def stop_at(step):
    """Return a `say` that ends the training after a step."""

    def say(line):
        if line["step"] == step:
            raise Stop

    return say


def quiet(line):
    del line


def told(state):
    """Return what a final state says of the night, without its clock, its advice and its settings."""
    metrics = {key: value for key, value in state["metrics"].items() if not key.startswith("perf/")}
    return {**state, "metrics": metrics, "config": None, "advice": None}


@pytest.fixture(autouse=True)
def every_step(monkeypatch):
    """Tell of every step."""
    monkeypatch.setattr(loop, "_PROGRESS_SECONDS", 0.0)


@pytest.fixture
def crowd(packs, tokens):
    """Return a pack of 12 batches, one user each."""
    return packs.pack("p", [tokens.random_user(f"u{i}", 34, 4, seed=i) for i in range(12)], token_budget=64)


def saving_run(packs, pack, output, every=5, **changes):
    """Return a run that saves every some steps."""
    settings = {"save_every_steps": every, **changes.pop("settings", {})}
    return packs.run(pack, output, settings=settings, **changes)


def test_f3_killed_twice_every_sample_is_in_one_step(packs, tokens, root):
    """100 samples, two a step, kill -9 after 38 and again after 62 (case F3): order, weights and metrics are the whole's."""
    pack = packs.pack("p", [tokens.random_user(f"u{i}", 30, 1, seed=i) for i in range(100)], token_budget=64)
    whole = loop.train(saving_run(packs, pack, "whole", every=0), quiet)
    run = saving_run(packs, pack, "c")
    file = packs.run_file(run)

    for step in (19, 31):
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, str(file), str(step)], cwd=root, check=False, timeout=120
        )
        assert killed.returncode == -signal.SIGKILL
        newest = read_state(step_checkpoints(run.output)[-1])
        assert step - 10 <= newest["step"] <= step
        assert newest["cursor"] == {"batch": newest["step"], "batches": 50}
    steps = []
    state = loop.train(run, lambda line: steps.append(line["step"]))

    assert steps == list(range(newest["step"] + 1, 51))
    assert told(state) == told(whole)
    assert read_series(run.output) == read_series(packs.root / "whole")
    assert read_series(run.output)["batch"] == list(range(50))
    assert state["metrics"]["train/count/click"] + state["metrics"]["train/count/like"] >= 100
    assert not steps_folder(run.output).exists()


@pytest.mark.parametrize("step", [1, 3, 4, 5])
def test_a_resumed_night_is_the_uninterrupted_one(packs, tokens, users, step):
    """With parent, dropout, micro-batches and batches without targets: stopped anywhere, the night ends bit-equal."""
    blank = [tokens.random_user(f"x{i}", 36, 0, seed=i) for i in range(4)]
    mixed = [tokens.random_user(f"u{i}", 34, 4, seed=i) for i in range(8)] + blank
    loop.train(packs.run(packs.pack("q", users), "parent"), quiet)
    pack = packs.pack("p", mixed, token_budget=64)
    settings = {"micro_batches": 2}
    changes = {"parent": packs.root / "parent", "seed": 5, "settings": settings}
    whole = loop.train(saving_run(packs, pack, "whole", every=0, **changes), quiet)
    run = saving_run(packs, pack, "c", every=2, **changes)

    with pytest.raises(Stop):
        loop.train(run, stop_at(step))
    state = loop.train(run, quiet)

    assert told(state) == told(whole)
    assert read_series(run.output) == read_series(packs.root / "whole")


def test_a_step_checkpoint_is_what_the_night_was_at_its_step(packs, crowd, monkeypatch):
    """Written late, by a thread that the loop overtakes, it holds the tensors of its own step; the loop waits for one."""
    release, seen = threading.Event(), []
    write = saving.save_checkpoint

    def slow(path, *arguments):
        release.wait(10)
        seen.append((path.name, threading.current_thread() is not threading.main_thread()))
        return write(path, *arguments)

    monkeypatch.setattr(saving, "save_checkpoint", slow)
    night = loop.Night(saving_run(packs, crowd, "c", every=2))
    clock = loop.Attribution(night.device, 64)
    groups = [[i] for i in range(12)]
    with saving.StepSaver(night.run) as saver:
        assert saver.start(night, groups) == 0
        for number in range(3):
            night.step([number], 1.0, clock)
            if number == 1:
                kept = {name: tensor.clone() for name, tensor in night.checkpoint(clock)[0].items()}
            saver.after_step(night, clock)
        assert seen == []
        release.set()
        night.step([3], 1.0, clock)
        saver.after_step(night, clock)
        assert seen[0] == ("step-00000002", True)
    tensors, state = load_checkpoint(step_checkpoints(night.run.output)[0])

    assert state["step"] == 2
    assert all(torch.equal(tensors[name], tensor) for name, tensor in kept.items())
    assert night.save_seconds > 0


def test_only_the_newest_are_kept(packs, crowd):
    """Of a training that saves every 2 steps, two checkpoints are there at the end; each is complete."""
    run = saving_run(packs, crowd, "c", every=2)
    with pytest.raises(Stop):
        loop.train(run, stop_at(9))

    assert [path.name for path in step_checkpoints(run.output)] == ["step-00000006", "step-00000008"]
    for path in step_checkpoints(run.output):
        verify(path)


def test_f9_a_kill_during_a_save_leaves_the_one_before(packs, crowd, monkeypatch, caplog):
    """Killed while step 10 is saved (case F9): the newest is step 5, the rerun saves 10 over the leftover and ends equal."""
    whole = loop.train(saving_run(packs, crowd, "whole", every=0), quiet)
    run = saving_run(packs, crowd, "c")
    write = saving.save_checkpoint

    def broken(path, *arguments):
        if path.name == "step-00000010":
            making = path.with_name(f".{path.name}.making")
            making.mkdir()
            (making / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"half")
            raise Stop
        return write(path, *arguments)

    monkeypatch.setattr(saving, "save_checkpoint", broken)
    with pytest.raises(Stop):
        loop.train(run, quiet)
    assert not run.output.exists()
    assert [path.name for path in step_checkpoints(run.output)] == ["step-00000005"]
    monkeypatch.undo()

    with caplog.at_level(logging.INFO):
        state = loop.train(run, quiet)

    assert "step-00000005: 5 of 12 batches" in caplog.text
    assert state["digest"] == whole["digest"]
    assert not steps_folder(run.output).exists()


def damage(path):
    """Flip a byte of a checkpoint's tensors."""
    (file,) = path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_damaged_and_foreign_step_checkpoints_are_passed_over(packs, crowd, caplog):
    """A flipped byte, a missing manifest or another fingerprint: a warning each, and the night goes on from the next."""
    run = saving_run(packs, crowd, "c", every=2, settings={"keep_checkpoints": 9})
    with pytest.raises(Stop):
        loop.train(run, stop_at(11))
    paths = step_checkpoints(run.output)
    damage(paths[-1])
    (paths[-2] / "manifest.json").unlink()
    state = (paths[-3] / "state.json").read_text()
    (paths[-3] / "state.json").write_text(state.replace('"fingerprint": "f"', '"fingerprint": "g"'))
    steps = []

    with caplog.at_level(logging.WARNING):
        loop.train(run, lambda line: steps.append(line["step"]))

    assert caplog.text.count("is passed over") == 3
    assert steps[0] == 5


def test_f12_forced_training_starts_from_the_parent_again(packs, crowd):
    """Without resume, or for another fingerprint, the step checkpoints of a killed training are not used (case F12)."""
    whole = loop.train(saving_run(packs, crowd, "whole", every=0), quiet)
    run = saving_run(packs, crowd, "c")
    for changes in ({"resume": False}, {"fingerprint": "g"}):
        with pytest.raises(Stop):
            loop.train(run, stop_at(8))
        steps = []

        state = loop.train(saving_run(packs, crowd, "c", **changes), lambda line, seen=steps: seen.append(line["step"]))

        assert steps == list(range(1, 13))
        assert state["digest"] == whole["digest"]
        assert not steps_folder(run.output).exists()
        shutil.rmtree(run.output)


def test_f4_bad_numbers_leave_the_newest_step_checkpoint(packs, crowd, monkeypatch):
    """An infinite gradient at step 7 (case F4): the error names batch and step checkpoint, and the night goes on from it."""
    whole = loop.train(saving_run(packs, crowd, "whole", every=0), quiet)
    run = saving_run(packs, crowd, "c")
    collect, calls = SparseOptimizer.collect, []

    def infinite(optimizer, rows, grad):
        calls.append(1)
        collect(optimizer, rows, grad * (torch.inf if len(calls) == 8 else 1.0))

    monkeypatch.setattr(SparseOptimizer, "collect", infinite)
    with pytest.raises(TrainingError, match=r"gradient is not finite at step 7, batches \[7\].*step-00000005$"):
        loop.train(run, quiet)
    assert not run.output.exists()
    assert read_state(step_checkpoints(run.output)[-1])["step"] == 5
    monkeypatch.undo()

    assert loop.train(run, quiet)["digest"] == whole["digest"]


def test_nothing_non_finite_becomes_a_step_checkpoint(packs, crowd, monkeypatch):
    """A parameter that became NaN stops the training at the latest at its end; no checkpoint holds it."""
    run = saving_run(packs, crowd, "c", every=2)
    apply = SparseOptimizer.step

    def poison(optimizer, factor):
        apply(optimizer, factor)
        optimizer._tables.weight[1] = torch.nan  # unknown ids do not occur

    monkeypatch.setattr(SparseOptimizer, "step", poison)

    with pytest.raises(TrainingError, match="not finite"):
        loop.train(run, quiet)
    assert step_checkpoints(run.output) == []
    assert not run.output.exists()


def test_a_step_checkpoint_is_no_parent(packs, crowd):
    """A checkpoint in the middle of a night is refused as a parent, with its cursor."""
    run = saving_run(packs, crowd, "c")
    with pytest.raises(Stop):
        loop.train(run, stop_at(6))
    (path,) = step_checkpoints(run.output)

    with pytest.raises(FormatError, match=r"5 of 12 batches; only a night's final checkpoint"):
        loop.train(packs.run(crowd, "next", parent=path), quiet)


def test_leftovers_beside_a_finished_checkpoint_go(packs, crowd):
    """A kill between the final checkpoint and its tidying leaves step checkpoints; the next start removes them."""
    run = saving_run(packs, crowd, "c")
    loop.train(run, quiet)
    steps_folder(run.output).mkdir()

    loop.train(run, quiet)

    assert not steps_folder(run.output).exists()
