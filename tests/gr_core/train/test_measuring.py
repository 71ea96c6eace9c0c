"""Steps that are measured and not saved: `python -m gr_core.train RUN.json --attribute N --trace FILE`."""

import dataclasses
import json

import pytest

from gr_core.errors import UsageError
from gr_core.train import loop
from gr_core.train.__main__ import main
from gr_core.train.attribution import PARTS
from gr_core.train.measuring import attribute


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Keep main's setting of the environment inside the test."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")


def test_attribute_says_one_object_and_saves_nothing(packs, users, capsys):
    """Steps, seconds by part, perf and advice as examples 7 has them; more steps than the pack has go through it again."""
    path = packs.run_file(packs.run(packs.pack("p", users, token_budget=120), "c"))
    before = sorted(packs.root.rglob("*"))
    trace = packs.root.parent / f"{packs.root.name}-trace.json"

    assert main([str(path), "--attribute", "7", "--trace", str(trace)]) == 0

    (said,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(packs.root.rglob("*")) == before
    assert said.keys() == {"event", "steps", "seconds", "perf", "advice"}
    assert (said["event"], said["steps"], said["perf"]["perf/steps"]) == ("attribution", 7, 7)
    assert said["seconds"].keys() == set(PARTS)
    assert min(said["seconds"][part] for part in ("forward", "backward", "optimizer", "metrics")) > 0
    wall = said["perf"]["perf/train_seconds"]
    assert sum(said["seconds"].values()) + said["perf"]["perf/other_seconds"] == pytest.approx(wall, rel=0.05)
    assert {"perf/mfu", "perf/ops_per_step", "perf/core_seconds", "perf/peak_memory_bytes"} <= said["perf"].keys()
    assert said["perf"]["perf/ops_per_step"] > 100
    assert said["perf"]["perf/host_syncs_per_step"] >= 1
    assert all(one.keys() == {"action", "expected_saving_fraction"} for one in said["advice"])
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"forward", "backward", "optimizer"} <= names


def test_a_traced_night_trains_the_same(packs, users, capsys):
    """--trace without --attribute trains as ever and records two steps of it: the digest is that without."""
    pack = packs.pack("p", users, token_budget=120)
    plain, traced = (packs.run_file(packs.run(pack, name)) for name in ("a", "b"))
    trace = packs.root / "trace.json"

    assert [main([str(plain)]), main([str(traced), "--trace", str(trace)])] == [0, 0]

    digests = [line["digest"] for line in map(json.loads, capsys.readouterr().out.splitlines()) if "digest" in line]
    assert digests[0] == digests[1]
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_pack_without_due_events_cannot_be_measured(packs, users):
    """It is refused by name; a number of steps below 1 is bad usage."""
    bare = [dataclasses.replace(user, label_known=user.label_known * 0, labels=user.labels * 0) for user in users]
    run = packs.run(packs.pack("p", bare, token_budget=120), "c")

    with pytest.raises(UsageError, match="supervises nothing"):
        attribute(run, 2)
    with pytest.raises(SystemExit) as stopped:
        main([str(packs.run_file(run)), "--attribute", "0"])
    assert stopped.value.code == 2


def test_every_night_has_attribution_and_advice(packs, users):
    """A trained checkpoint's metrics hold perf/*, from which `advice` in its state is made."""
    state = loop.train(packs.run(packs.pack("p", users, token_budget=120), "c"), lambda line: None)

    told = {"perf/mfu", "perf/model_flops", "perf/core_seconds", "perf/peak_memory_bytes", "perf/attribution_seconds"}
    assert told <= state["metrics"].keys()
    assert 0 < state["metrics"]["perf/mfu"] < 1.5
    assert state["advice"][-1]["action"]
    savings = [one["expected_saving_fraction"] for one in state["advice"]]
    assert savings == sorted(savings, reverse=True)
