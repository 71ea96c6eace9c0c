"""Training on several ranks: equal to one process, uneven ranks, other numbers of ranks, bad numbers, the parent's end."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest
import torch

from gr_core.errors import ConfigError, TrainingError
from gr_core.stages.training import run_training
from gr_core.train import launch, loop
from gr_core.train.distributed import Ranks, blank_batch, connect
from gr_core.train.layout import DistributedConfig
from gr_core.train.optim import own_part
from gr_core.train.state import load_checkpoint

BUDGET = 24
JOBS = Path(__file__).with_name("rank_jobs.py")
DDP_2 = DistributedConfig(strategy="ddp", replicate=2)
HSDP_2X2 = DistributedConfig(strategy="hsdp", replicate=2, shard=2)


def fsdp(ranks):
    """Return FSDP over so many ranks."""
    return DistributedConfig(strategy="hsdp", shard=ranks)


def quiet(line):
    del line


def child_environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Let child processes have a core each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def crowd(tokens):
    """Return 80 users, each of whom fills a batch of BUDGET tokens alone."""
    return [tokens.random_user(f"u{i}", 10 + i % 9, 3 + i % 3, seed=i) for i in range(80)]


def difference(one, many):
    """Return the largest distance of two tensors of a name over the size of the first, and that name."""
    assert one.keys() == many.keys()
    sizes = {name: float(tensor.double().norm()) for name, tensor in one.items()}
    apart = {name: float((many[name].double() - tensor.double()).norm()) for name, tensor in one.items()}
    return max((apart[name] / size if size else apart[name], name) for name, size in sizes.items())


def run_jobs(folder, jobs):
    """Run rank_jobs.py and return {(name of the run's output, rank): result}."""
    path = folder / "JOBS.json"
    path.write_text(json.dumps(jobs))
    command, environment = [sys.executable, str(JOBS), str(path)], child_environment()
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {(Path(each["run"]).name.removesuffix(".RUN.json"), each["rank"]): each for each in found}


@pytest.mark.parametrize(
    ("layout", "micro_batches"), [(DDP_2, 3), (HSDP_2X2, 4)], ids=["ddp of 2, uneven", "hsdp of 2 x 2"]
)
def test_twenty_steps_equal_one_process(packs, tokens, crowd, layout, micro_batches):
    """Under torchrun: losses, dense parameters and moments, table rows and accumulators, within 1e-5; counts exactly."""
    pack = packs.pack("p", crowd[: 20 * micro_batches], token_budget=BUDGET)
    # without it a row's first step has the full rate whatever its gradient, and rounding of small ones shows
    settings = {"micro_batches": micro_batches, "initial_accumulator": 0.1}
    model = dataclasses.replace(tokens.MODEL, dropout=0.1)
    one = loop.train(packs.run(pack, "one", settings=settings, model=model), quiet)
    several = packs.run(pack, "several", settings={**settings, "distributed": layout}, model=model)
    lines = []

    done = run_training(packs.run_file(several), lines.append, timeout_seconds=200)

    alone, _ = load_checkpoint(packs.root / "one")
    together, state = load_checkpoint(packs.root / "several")
    assert one["step"] == state["step"] == 20
    assert done["digest"] == state["digest"]
    apart, name = difference(alone, together)
    assert apart < 1e-5, name
    counts = [key for key in one["metrics"] if key.startswith("train/count/")]
    assert counts
    for key in ("train/loss", "train/ne/click", "train/auc/like", *counts):
        assert state["metrics"][key] == pytest.approx(one["metrics"][key], rel=1e-5), key
    assert state["newest_supervised_us"] == one["newest_supervised_us"]
    assert state["ranks"] == {"world": layout.ranks, **dataclasses.asdict(layout), "backend": "gloo"}
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps)), "only the first rank tells progress"
    assert lines[-1]["loss"] == pytest.approx(one["metrics"]["train/loss"], rel=1e-5)


def test_f20_f21_uneven_ranks_finish_and_any_number_of_ranks_goes_on(packs, users, crowd):
    """Uneven, resharded, resumed and spoilt in one go, since every start costs seconds.

    Eight batches go 5 and 3 to two ranks, each once (F20); 1, 3 and 4 ranks go on from that as one (F21); killed at step 2
    and started again it ends bit-equal; one bad loss on one of four ranks stops all before anything moves (F4).
    """
    eight = packs.pack("p", crowd[:8], token_budget=BUDGET)
    three, more = {"micro_batches": 3}, {"micro_batches": 100}
    saved = packs.run(eight, "saved", settings={**three, "distributed": fsdp(2)})
    follow = {
        "one": packs.run(packs.pack("q", users, token_budget=64), "one", parent=packs.root / "saved", settings=more)
    }
    for name, layout in (("three", fsdp(3)), ("four", HSDP_2X2), ("ddp", DDP_2)):
        settings = {**more, "distributed": layout}
        follow[name] = packs.run(packs.root / "q", name, parent=packs.root / "saved", settings=settings)
    bad = packs.run(eight, "bad", settings={"micro_batches": 4, "distributed": HSDP_2X2})
    again = packs.run(eight, "again", settings={**three, "distributed": fsdp(2), "save_every_steps": 1})
    jobs = [(saved, {}), *((follow[name], {}) for name in ("three", "four", "ddp")), (bad, {"spoil": 6})]
    jobs += [(again, {"kill": 2}), (again, {})]

    found = run_jobs(
        packs.root,
        [{"run": str(packs.run_file(run)), "ranks": run.train.distributed.ranks, **more} for run, more in jobs],
    )

    used = [found["saved", rank]["used"] for rank in (0, 1)]
    assert [len(each) for each in used] == [5, 3]
    assert sorted(chain(*used)) == list(range(8))
    assert loop.train(packs.run(eight, "alone", settings=three), quiet)["step"] == 3
    apart, name = difference(*(load_checkpoint(packs.root / output)[0] for output in ("alone", "saved")))
    assert apart < 1e-5, name

    loop.train(follow["one"], quiet)
    one, state = load_checkpoint(packs.root / "one")
    assert state["step"] == 4
    for name in ("three", "four", "ddp"):
        many, state = load_checkpoint(packs.root / name)
        apart, tensor = difference(one, many)
        assert apart < 1e-5, (name, tensor)
        assert state["step"] == 4

    digest, resumed = found["saved", 0]["digest"], found["again", 0]
    assert resumed["digest"] == digest
    assert resumed["used"] in ([6], [3, 5, 6]), "it goes on from step 2, or from step 1 where step 2 was being written"

    errors = [found["bad", rank] for rank in range(4)]
    assert {error["where"] for error in errors} == {"batch 6"}
    assert {(error["moved"], error["step"]) for error in errors} == {(False, 1)}


def test_all_ranks_end_with_the_process_that_started_them(packs, crowd):
    """Training has begun; the parent's end of stdin closes, as it does on kill -9 (case A9): no rank and no torchrun is left."""
    pack = packs.pack("p", crowd * 6, token_budget=BUDGET)
    run = packs.run_file(packs.run(pack, "c", settings={"micro_batches": 2, "distributed": DDP_2}))
    command = launch.command(run, [str(run), "--exit-with-stdin"])
    assert "torch.distributed.run" in command
    environment = child_environment()

    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as torchrun:
        first = json.loads(torchrun.stdout.readline())
        assert first["event"] == "progress"
        assert len(processes_of(run)) >= 3
        torchrun.stdin.close()
        assert torchrun.wait(timeout=60) != 0

    deadline = time.monotonic() + 20
    while processes_of(run) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(run) == []
    assert not (packs.root / "c").exists()


def test_a_training_that_takes_too_long_is_stopped_with_all_its_ranks(packs, monkeypatch):
    """Ranks in sessions of their own hold stdout open after torchrun is killed: their stdin is closed, so they end too."""
    rank = "import sys; sys.stdin.read()"
    agent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}], start_new_session=True)"
    monkeypatch.setattr(launch, "command", lambda *_: [sys.executable, "-c", agent])
    began = time.monotonic()

    with pytest.raises(TrainingError, match="training ended with status -9"):
        run_training(packs.root / "RUN.json", None, timeout_seconds=2)
    assert time.monotonic() - began < 20


def processes_of(run):
    """Return the ids of processes that have the path among their arguments, zombies left out."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if str(run).encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:  # it ended meanwhile
                continue
    return found


@pytest.mark.parametrize(("world", "counts"), [(1, [8]), (2, [4, 4]), (3, [3, 3, 2])])
def test_a_steps_batches_are_shared_out_in_turn(world, counts):
    """The k-th supervised batch goes to rank k % world with its place in the step; every rank takes as many turns."""
    numbers = [0, 2, 3, 5, 6, 7, 10, 11]
    ranks = [Ranks(torch.device("cpu")) for _ in range(world)]
    for number, rank in enumerate(ranks):
        rank.rank, rank.world = number, world

    shares = [rank.mine(numbers) for rank in ranks]

    assert [len(share) for share in shares] == counts
    assert sorted(chain(*shares)) == list(enumerate(numbers))
    assert {rank.turns(len(numbers)) for rank in ranks} == {max(counts)}


def test_a_blank_batch_adds_nothing(packs, users):
    """Its loss and every gradient of it are exactly 0, so that a rank without a batch changes no step."""
    night = loop.Night(packs.run(packs.pack("p", users), "c"))
    night._blank_turn(night.clock(1))

    gradients = [parameter.grad for parameter in night.model.parameters()]
    assert all(grad is not None and not grad.any() for grad in gradients)
    assert all(not grad.any() for _, grad in night.sparse._parts)
    assert float(night._step_loss) == 0.0
    assert blank_batch(["item_id"]).num_tokens == 2


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"replicate": 2}, r"strategy must be ddp or hsdp for 2 x 1 ranks"),
        ({"strategy": "ddp", "shard": 2}, r"shard must be 1 under ddp"),
        ({"strategy": "hsdp", "shard": 0}, r"shard must be at least 1"),
    ],
)
def test_layouts_that_cannot_be_are_refused(values, match):
    """The message names the key and what to set."""
    with pytest.raises(ValueError, match=match):
        DistributedConfig(**values)


def test_fewer_batches_than_ranks_are_refused(packs):
    """A step of one batch over two ranks would leave one of them idle: refused by name before anything starts."""
    with pytest.raises(ValueError, match=r"train\.micro_batches must be at least the number of ranks"):
        packs.run(packs.root, "c", settings={"distributed": DDP_2})


def test_one_process_is_no_night_of_two_ranks():
    """Started without torchrun: an error that says how to start it, not a half of a training."""
    with pytest.raises(ConfigError, match=r"asks for 2 x 1 ranks, this is one process"):
        connect(DDP_2, "cpu")


def test_one_rank_starts_plain_python(packs):
    """Without train.distributed no torchrun stands between the stage and its child."""
    run = packs.run_file(packs.run(packs.root, "c"))
    assert launch.command(run, [str(run)])[1:] == ["-m", "gr_core.train", str(run)]


def test_own_part_of_a_plain_tensor_is_itself():
    """One process trains its parameters, not copies of them."""
    tensor = torch.zeros(2)
    assert own_part(tensor) is tensor
