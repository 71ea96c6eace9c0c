"""`python -m gr_core.train RUN.json` as a child process, and its main function here."""

import json
import subprocess
import sys

import pytest

from gr_core.train.__main__ import main
from gr_core.train.state import read_state


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Keep main's setting of the environment inside the test."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")


def start(path, root):
    command = [sys.executable, "-m", "gr_core.train", str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root)


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_two_processes_give_one_digest_and_a_finished_one_trains_nothing(packs, users, root, capsys):
    """Same seed, machine and threads: the same digest. Stdout is JSON lines, the last one done; logs go to stderr."""
    pack = packs.pack("p", users, token_budget=120)
    files = [packs.run_file(packs.run(pack, name)) for name in ("a", "b")]

    children = [start(path, root) for path in files]
    (first, log), (second, _) = [child.communicate(timeout=120) for child in children]

    assert [child.returncode for child in children] == [0, 0]
    done = lines(first)[-1]
    state = read_state(packs.root / "a")
    assert done == {
        "event": "done",
        "checkpoint": str(packs.root / "a"),
        "digest": state["digest"],
        "step": state["step"],
    }
    rates = {"dense_learning_rate", "sparse_learning_rate"}
    assert lines(first)[0].keys() == {"event", "step", "steps", "loss", "tokens_per_second"} | rates
    assert {line["event"] for line in lines(first)[:-1]} == {"progress"}
    assert "Error" not in log
    assert lines(second)[-1]["digest"] == done["digest"]

    assert main([str(files[0])]) == 0
    assert lines(capsys.readouterr().out) == [done]


def test_bad_input_is_one_error_line_and_exit_2(packs, capsys):
    """A pack that is none: exit 2 and an error object with type, message and where; nothing is written."""
    code = main([str(packs.run_file(packs.run(packs.root / "missing", "c")))])

    (error,) = lines(capsys.readouterr().out)
    assert code == 2
    assert (error["event"], error["type"], error["where"]) == ("error", "FormatError", str(packs.root / "missing"))
    assert not (packs.root / "c").exists()


def test_a_fault_of_ours_is_one_error_line_and_exit_1(packs, capsys, monkeypatch):
    """An unforeseen exception is told in the same form, with exit 1."""
    monkeypatch.setattr("gr_core.train.run.read_run", lambda path: 1 / 0)

    assert main([str(packs.root / "RUN.json")]) == 1
    assert lines(capsys.readouterr().out)[0]["type"] == "ZeroDivisionError"
