"""`python -m gr_core.train RUN.json` as a child process, and its main function here."""

import json
import subprocess
import sys

import pytest

from gr_core.data.batches import PackReader
from gr_core.refs import Bound
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


def test_example_9_trains_as_printed(packs, capsys):
    """Example 2's pack with example 9's index and RUN.json: trained with defaults, and as with all keys written out."""
    bare = packs.example_9("bare")
    full = packs.example_9("full", **PackReader(bare.parent / "packs/train").index)

    assert [main([str(path)]) for path in (bare, full)] == [0, 0]

    first, second = (read_state(path.parent / "checkpoint") for path in (bare, full))
    assert lines(capsys.readouterr().out)[-1]["digest"] == first["digest"] == second["digest"]
    assert (first["step"], first["actions"], first["vocabulary"]["version"]) == (1, ["action_0", "action_1"], "v1")
    assert [first["metrics"][f"train/count/action_{bit}"] for bit in (0, 1)] == [4, 3]
    assert Bound.from_json(first["watermark"]) == Bound(commit=1, cutoff_us=1_748_822_400_000_000, delta_version=1)


@pytest.mark.parametrize(
    "edit",
    [
        lambda values: values.update(seed=1),
        lambda values: values["config"]["train"].update(dense_learning_rate=0.1),
        lambda values: values.update(parent="first"),
        lambda values: values["vocabulary"]["item_id"].update(rows=12),
    ],
    ids=["seed", "config", "parent", "vocabulary"],
)
def test_an_edited_run_without_fingerprint_is_trained_again(packs, capsys, edit):
    """RUN.json as in example 9: unedited it trains nothing the second time, edited it gives another checkpoint."""
    path = packs.example_9("run")
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "output": "first"}))
    assert main([str(path)]) == main([str(path)]) == 0
    path.write_text(json.dumps(values))
    assert main([str(path)]) == main([str(path)]) == 0
    edit(values)
    path.write_text(json.dumps(values))
    assert main([str(path)]) == main([str(path)]) == 0

    said = lines(capsys.readouterr().out)
    assert [line["event"] for line in said] == ["progress", "done", "done"] * 3
    digests = [line["digest"] for line in said if line["event"] == "done"]
    assert digests[0] == digests[1] == digests[2] == digests[3] != digests[4] == digests[5]


def test_an_edited_pack_is_trained_again(packs, capsys):
    """Another row in the pack that RUN.json names: trained again; a pack that is not what its index says: exit 2."""
    path = packs.example_9("run")
    assert main([str(path)]) == 0
    packs.example_9("run", labels={5: 0b10})
    assert main([str(path)]) == 0
    (path.parent / "packs/train/pack.arrow").write_bytes(b"damaged")
    assert main([str(path)]) == 2

    said = lines(capsys.readouterr().out)
    assert [line["event"] for line in said] == ["progress", "done"] * 2 + ["error"]
    assert said[1]["digest"] != said[3]["digest"]


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
