"""Trainings of several ranks for test_distributed.py: `python rank_jobs.py JOBS.json` forks the ranks of one job after another.

Ranks forked from one process spare each of them the import of torch; test_distributed.py also starts real torchruns.
JOBS.json: [{"run": RUN.json, "ranks": N, "spoil": batch, "kill": step}], the last two where wanted. Stdout: one JSON object a
job and rank.
"""

import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint.hf_storage
import torch.distributed.checkpoint.state_dict_saver
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel

from gr_core.errors import TrainingError
from gr_core.train import loop
from gr_core.train.run import read_run


def spoiled(batch):
    """Make the loss of one batch of the pack nan, on whichever rank has it."""
    original = loop.Night._micro_batch

    def patched(night, micro, inputs, step_weight, *rest):
        original(night, micro, inputs, float("nan") if micro.number == batch else step_weight, *rest)

    loop.Night._micro_batch = patched


def killed(step):
    """End every rank at once where the night would take a step."""
    original = loop.Night.step

    def patched(night, *rest):
        if night.global_step == step:
            os._exit(0)
        original(night, *rest)

    loop.Night.step = patched


def moved(run):
    """Train by hand up to the error; return what it says, and whether any parameter moved in the step that failed."""
    ranks = loop.connect(run.train.distributed, run.device)
    night = loop.Night(run, ranks)
    clock = night.clock(2)
    groups = loop._groups(len(night.reader), run.train.micro_batches)
    try:
        for numbers in groups:
            tensors = night._dense() | {"weight": night.tables.weight, "accumulator": night.tables.accumulator}
            before = {name: tensor.clone() for name, tensor in tensors.items()}
            night.step(numbers, 1.0, clock)
    except TrainingError as error:
        same = all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
        return {"error": error.message, "where": error.where, "moved": not same, "step": night.global_step}
    return {"error": None}


def work(job):
    """Do one rank's part of a job."""
    run = read_run(Path(job["run"]))
    torch.set_num_threads(1)
    if job.get("spoil") is not None:
        spoiled(job["spoil"])
        return moved(run)
    if job.get("kill") is not None:
        killed(job["kill"])
    used = []
    original = loop.Night._micro_batch

    def noted(night, micro, *rest):
        used.append(micro.number)
        original(night, micro, *rest)

    loop.Night._micro_batch = noted
    state = loop.train(run, lambda line: None)
    return {"used": used, "digest": state.get("digest")}


def rank(job, number, port):
    """Run as one rank, and print its result."""
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(job["ranks"]))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="rank_jobs")
    code = 1
    try:
        line = json.dumps({"run": job["run"], "rank": number, **work(job)})
        os.write(1, (line + "\n").encode())
        code = 0
    finally:
        if code:
            import traceback

            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def main():
    """Run the jobs; exit 1 when a rank failed."""
    failed = False
    for job in json.loads(Path(sys.argv[1]).read_text()):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for number in range(job["ranks"]):
            child = os.fork()
            if child == 0:
                rank(job, number, port)
            children.append(child)
        failed |= any(os.waitpid(child, 0)[1] for child in children)
    assert not dist.is_initialized()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
