"""What one step asks of the machine, and traces of some steps."""

import json

import torch

from gr_core.train.tracing import Trace, counted

CPU = torch.device("cpu")


def test_operators_are_counted_once_with_forward_and_backward():
    """Three operators and their backward ones count, those that they call do not; a value read on the host is a sync."""
    x = torch.ones(4, 4, requires_grad=True)
    counts: dict[str, float] = {}

    with counted(CPU, counts):
        y = torch.relu(x)
        z = y.sum()
        z.item()
    alone = dict(counts)
    with counted(CPU, counts):
        torch.relu(x).sum().backward()

    assert alone == {"perf/ops_per_step": 3.0, "perf/host_syncs_per_step": 1.0}
    assert counts["perf/ops_per_step"] > 4
    assert counts["perf/host_syncs_per_step"] == 0


def test_a_trace_holds_the_steps_it_was_asked_for(tmp_path):
    """Steps before are passed over; the file is a chrome trace with the named ranges of the others."""
    path = tmp_path / "new" / "trace.json"
    trace = Trace(path, CPU, first=1, steps=2)

    for number in range(4):
        with trace.step(number), torch.profiler.record_function(f"step {number}"):
            torch.ones(2).add(1)
            assert trace.is_recording == (number in (1, 2))

    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {"step 1", "step 2"} <= names
    assert not {"step 0", "step 3"} & names


def test_a_trace_that_ends_early_is_written(tmp_path):
    """A recording that is cut off by the night's end can be written; without one nothing is."""
    path = tmp_path / "trace.json"
    trace = Trace(path, CPU, first=0, steps=5)
    trace.write()
    assert not path.exists()
    with trace.step(0):
        torch.ones(2)
    trace.write()

    assert json.loads(path.read_text())["traceEvents"]
