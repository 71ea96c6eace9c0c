"""Evaluation beside training: which checkpoints are scored, when, and what is told of them."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from gr_core.errors import UsageError
from gr_core.eval import metrics, scores
from gr_core.eval.__main__ import main
from gr_core.eval.scoring import score_pack
from gr_core.eval.watching import (
    Watch,
    Watcher,
    open_results,
    read_lines,
    read_results,
    read_watch,
    results_file,
    scores_folder,
)
from gr_core.train import loop
from gr_core.train.state import step_path


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Keep main's setting of the environment, and of this process's priority, inside the test."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setattr(os, "nice", lambda _: 0)


def quiet(line):
    del line


def trained_as(packs, run, step, **state):
    """Train a run into a step checkpoint of `run.output`, under this step's number."""
    path = step_path(run.output, step)
    path.parent.mkdir(exist_ok=True)
    loop.train(dataclasses.replace(run, output=path, seed=step), quiet)
    text = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**text, "step": step, **state}))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"].pop("state.json")
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


@pytest.fixture
def run(packs, users):
    return packs.run(packs.pack("train", users, token_budget=120), "out")


@pytest.fixture
def holdout(packs, users):
    return packs.pack("holdout", users[3:], role="holdout", token_budget=120)


class Script:
    """What tells a watcher whether training is over: does one thing at each question, and is over after the last."""

    def __init__(self, *things):
        self.things = list(things)

    def __call__(self, seconds):
        """Answer; a question that waits moves the script on."""
        if seconds and self.things:
            self.things.pop(0)()
        return not self.things


def watch(run, holdout, script):
    told = []
    watcher = Watcher(Watch(run=run, holdout=holdout, num_threads=1), told.append)
    watcher.warm_up()
    return watcher.follow(script), told


def shown(told):
    return [(line["step"], line["final"], line["scored_during_training"]) for line in told if line["event"] == "scored"]


def test_each_new_checkpoint_is_scored_once_and_the_final_one_last(packs, run, holdout):
    """Checkpoints that come one by one are scored while training runs; the final one after it, and its logits kept."""
    final = loop.train(run, quiet)
    script = Script(
        lambda: trained_as(packs, run, 1),
        lambda: None,
        lambda: trained_as(packs, run, 2),
        lambda: None,
    )

    done, told = watch(run, holdout, script)

    assert done
    assert [line["event"] for line in told] == ["ready", "scored", "scored", "training_ended", "scored"]
    assert shown(told) == [(1, False, True), (2, False, True), (final["step"], True, False)]
    times = [line["at"] for line in told]
    assert times == sorted(times)
    kept = scores.kept(scores_folder(run.output), holdout, final["digest"])
    assert kept is not None
    assert (kept.logits == score_pack(run.output, holdout).logits).all()


def test_the_metrics_are_the_exact_ones_of_the_checkpoint(packs, run, holdout):
    """What is told of a step is what scoring its checkpoint by itself gives, by action and with counts."""
    loop.train(run, quiet)
    path = trained_as(packs, run, 1)
    scored = score_pack(path, holdout)
    expected = metrics.evaluate(scored.labels, scored.label_known, scored.logits, ["click", "like", "hate"], 0b011)

    _, told = watch(run, holdout, Script(lambda: None, lambda: None))

    found = next(line for line in told if line["event"] == "scored" and not line["final"])["holdout"]
    assert set(found) == {"click", "like"}
    for action, values in found.items():
        assert set(values) == {"auc", "ne", "calibration", "count", "positives"}
        assert values == {key: expected[action][key] for key in values}
    assert found["click"]["count"] > found["click"]["positives"] > 0


def test_the_newest_checkpoint_goes_first(packs, run, holdout):
    """Of several that wait, the newest is scored first: an older one may be removed at any moment."""
    loop.train(run, quiet)
    for step in (1, 2, 3):
        trained_as(packs, run, step)

    _, told = watch(run, holdout, Script(*[lambda: None] * 4))

    assert [step for step, final, _ in shown(told) if not final] == [3, 2, 1]


def test_what_is_no_checkpoint_of_this_training_is_passed_over(packs, run, holdout):
    """A half-written checkpoint and one of another training are not scored, and no trouble."""
    loop.train(run, quiet)
    half = trained_as(packs, run, 1)
    (half / "manifest.json").unlink()
    trained_as(packs, dataclasses.replace(run, fingerprint="another"), 2)

    done, told = watch(run, holdout, Script(*[lambda: None] * 3))

    assert done
    assert [final for _, final, _ in shown(told)] == [True]
    assert not any(line["event"] == "failed" for line in told)


def test_a_damaged_checkpoint_is_told_and_the_next_one_scored(packs, run, holdout):
    """Tensors that differ from the manifest: one line with the checkpoint's name, and the others go on."""
    loop.train(run, quiet)
    path = trained_as(packs, run, 1)
    (file,) = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    trained_as(packs, run, 2)

    done, told = watch(run, holdout, Script(*[lambda: None] * 4))

    (failed,) = (line for line in told if line["event"] == "failed")
    assert done
    assert (failed["step"], failed["final"]) == (1, False)
    assert "step-00000001" in failed["message"]
    assert "sha256" in failed["message"]
    assert [step for step, final, _ in shown(told) if not final] == [2]


def test_a_checkpoint_that_goes_while_it_is_read_is_no_trouble(packs, run, holdout, monkeypatch):
    """Training removes old checkpoints whenever it likes: nothing is told of one that went."""
    loop.train(run, quiet)
    path = trained_as(packs, run, 1)
    monkeypatch.setattr("gr_core.eval.watching.Scorer", lambda p, **_: (shutil.rmtree(path), 1 / 0))

    watcher = Watcher(Watch(run=run, holdout=holdout, num_threads=1), told := [].append)
    assert not watcher._score(path, lambda _: False)
    assert told.__self__ == []


def test_a_second_attempt_does_not_score_again_what_the_first_did(packs, run, holdout):
    """A training that is taken up keeps its old checkpoints; their scores stand in the file and stay."""
    final = loop.train(run, quiet)["step"]
    trained_as(packs, run, 101)
    results = open_results(run.output)
    for attempt in ((lambda: None,) * 2, (lambda: trained_as(packs, run, 102), lambda: None, lambda: None)):
        results({"event": "started"})
        watcher = Watcher(Watch(run=run, holdout=holdout, num_threads=1), results)
        watcher.follow(Script(*attempt))

    lines = [line for line in read_lines(run.output) if line["event"] == "scored" and not line["final"]]
    assert [line["step"] for line in lines] == [101, 102]
    assert [one["step"] for one in read_results(run.output)["checkpoints"]] == [final, 101, 102]


def test_a_run_file_without_a_holdout_pack_is_refused(packs, run):
    """One clear line that names the key."""
    with pytest.raises(UsageError, match=r"packs\.holdout"):
        read_watch(packs.run_file(run))


def test_results_are_read_in_steps_with_their_time_before_the_end(tmp_path):
    """Lines in any order, a torn line and an attempt that died are read; times count from training's end."""
    say = open_results(tmp_path / "c")
    base = {"event": "scored", "final": False, "seconds": 0.5, "scored_during_training": True, "holdout": {}}
    say({"event": "started"})
    say({**base, "at": 3.0, "step": 10, "digest": "a"})
    say({"event": "failed", "at": 3.5, "step": 11, "final": False, "message": "an old trouble"})
    with results_file(tmp_path / "c").open("a") as stream:
        stream.write('{"event": "sco')
    say = open_results(tmp_path / "c")
    say({"event": "started"})
    say({**base, "at": 4.0, "step": 30, "digest": "c"})
    say({**base, "at": 5.0, "step": 20, "digest": "b"})
    say({"event": "training_ended", "at": 6.5})
    say({**base, "at": 7.0, "step": 40, "digest": "d", "final": True, "scored_during_training": False})

    found = read_results(tmp_path / "c")

    rows = [(c["step"], c["before_end_seconds"], c["scored_during_training"]) for c in found["checkpoints"]]
    assert rows == [(10, None, True), (20, 1.5, True), (30, 2.5, True), (40, -0.5, False)]
    assert found["trouble"] is None
    say({"event": "failed", "at": 8.0, "step": None, "final": True, "message": "no disk"})
    assert read_results(tmp_path / "c")["trouble"] == "no disk"
    open_results(tmp_path / "c", afresh=True)
    assert read_results(tmp_path / "c") == {"checkpoints": [], "trouble": None}


def test_settings_come_from_the_run_file(packs, run, holdout):
    """Threads and device as `evaluation` says; one thread on the CPU where it says nothing."""
    path = run_file(packs, run, holdout)
    values = json.loads(path.read_text())

    plain = read_watch(path)
    path.write_text(json.dumps({**values, "evaluation": {"num_threads": 3, "device": "auto"}}))
    chosen = read_watch(path)

    auto = "cuda" if torch.cuda.is_available() else "cpu"
    assert (plain.num_threads, str(plain.device), plain.holdout) == (1, "cpu", holdout)
    assert (chosen.num_threads, torch.device(chosen.device).type) == (3, auto)


def run_file(packs, run, holdout):
    """Write RUN.json of a run with its holdout pack."""
    path = packs.run_file(run)
    values = json.loads(path.read_text())
    values["packs"]["holdout"] = str(holdout.relative_to(packs.root))
    path.write_text(json.dumps({**values, "evaluation": {"niceness": 10}}))
    return path


def test_by_hand_it_ends_when_the_final_checkpoint_is_scored(packs, run, holdout, capsys):
    """Without a parent process the command looks for the final checkpoint itself; stdout is JSON lines; exit 0."""
    path = run_file(packs, run, holdout)
    training = threading.Timer(0.3, loop.train, (run, quiet))
    training.start()

    status = main([str(path)])

    training.join()
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert status == 0
    assert [line["event"] for line in told] == ["started", "ready", "training_ended", "scored"]
    assert told == read_lines(run.output)


def test_by_hand_bad_input_is_exit_2(packs, run, holdout, capsys):
    """A pack that is not there: exit 2, and nothing is told but the start."""
    path = run_file(packs, run, holdout)
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "packs": {**values["packs"], "holdout": "nowhere"}}))

    assert main([str(path)]) == 2
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == ["started"]


def test_it_ends_with_its_parent_and_runs_at_low_priority(packs, run, holdout, root):
    """When its parent is killed (kill -9) the pipe closes and it ends: no orphan. Its niceness is the configured one."""
    path = run_file(packs, run, holdout)
    code = (
        "import subprocess, sys, time\n"
        "words = [sys.executable, '-m', 'gr_core.eval', sys.argv[1], '--exit-with-stdin']\n"
        "child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        deadline = time.monotonic() + 60
        while not any(line["event"] == "ready" for line in read_lines(run.output)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        niceness = os.getpriority(os.PRIO_PROCESS, child) - os.getpriority(os.PRIO_PROCESS, 0)
        parent.send_signal(signal.SIGKILL)
    while _alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert niceness == 10


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stream:  # noqa: PTH123 -- one line of procfs
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
