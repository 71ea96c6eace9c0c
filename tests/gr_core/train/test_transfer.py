"""Copies to a CUDA device, played on the CPU: what is called when, and that nothing is overwritten on its way."""

from contextlib import contextmanager

import pytest
import torch

from gr_core.data.batches import PackReader
from gr_core.model.embeddings import RowMap
from gr_core.model.inputs import InputBuilder
from gr_core.train.transfer import Transfer


class FakeEvent:
    """Tells the log what is asked of it."""

    def __init__(self, log, number):
        self.log, self.number = log, number

    def record(self, stream):
        """Mark a place."""
        self.log.append(("record", self.number, stream))

    def synchronize(self):
        """Wait on the host."""
        self.log.append(("synchronize", self.number))


class FakeStream:
    """Tells the log what it waits for."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def __repr__(self):
        return self.name

    def wait_event(self, event):
        """Wait on the device."""
        self.log.append(("wait", event.number, self.name))


class FakeRuntime:
    """A device whose copies happen only when their event is recorded, as late as a stream may make them."""

    def __init__(self):
        self.log, self.events, self.buffers, self.pending = [], 0, [], []
        self.side, self.main = FakeStream("side", self.log), FakeStream("main", self.log)
        self.used = self.main

    def new_stream(self):
        """Return the side stream."""
        return self.side

    def new_event(self):
        """Return an event; the copies before it are made now."""
        self.events += 1
        for target, source in self.pending:
            target.copy_(source)
        self.pending = []
        return FakeEvent(self.log, self.events)

    @contextmanager
    def use(self, stream):
        """Make a stream current."""
        self.used, before = stream, self.used
        yield
        self.used = before

    def current(self):
        """Return the consumer's stream."""
        return self.main

    def pinned(self, num_bytes):
        """Return a buffer that is remembered."""
        self.buffers.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.buffers[-1]

    def to_device(self, tensor):
        """Return where the copy will be."""
        assert self.used is self.side
        inside = [b for b in self.buffers if b.data_ptr() <= tensor.data_ptr() <= b.data_ptr() + b.numel()]
        assert inside, "only pinned memory is copied asynchronously"
        target = torch.zeros_like(tensor)
        self.pending.append((target, tensor))
        return target

    def keep(self, tensor, stream):
        """Note what is kept."""
        assert stream is self.main
        self.log.append(("keep", tensor.data_ptr()))


@pytest.fixture
def inputs(packs, users, tokens):
    """Inputs of several batches of unlike sizes."""
    reader = PackReader(packs.pack("p", users, token_budget=70))
    builder = InputBuilder(tokens.MODEL, len(tokens.ACTIONS), 0b011, RowMap(tokens.table_specs()))
    return [builder.build(batch) for batch in reader]


def test_on_the_cpu_nothing_is_copied(inputs):
    """The same object comes out."""
    transfer = Transfer(torch.device("cpu"))

    assert transfer.receive(transfer.send(inputs[0])) is inputs[0]


def test_every_tensor_arrives_whole(inputs):
    """Values, types and shapes of all micro-batches are those sent, though buffers are used again."""
    transfer = Transfer(torch.device("cuda"), slots=2, runtime=FakeRuntime())
    sent = [transfer.send(one) for one in inputs]

    assert len(inputs) >= 4
    for one, there in zip(inputs, sent, strict=True):
        pairs = list(zip(one.tensors(), transfer.receive(there).tensors(), strict=True))
        assert all(torch.equal(a, b) and a.dtype == b.dtype and a.data_ptr() != b.data_ptr() for a, b in pairs)


def test_a_buffer_is_written_again_only_after_its_copy(inputs):
    """Two buffers: the third micro-batch waits on the host for the first one's event, the fourth for the second's."""
    runtime = FakeRuntime()
    transfer = Transfer(torch.device("cuda"), slots=2, runtime=runtime)
    for one in inputs[:4]:
        transfer.send(one)

    waits = [("synchronize", 1), ("record", 3, runtime.side), ("synchronize", 2), ("record", 4, runtime.side)]
    assert runtime.log == [("record", 1, runtime.side), ("record", 2, runtime.side), *waits]


def test_the_consumers_stream_waits_and_keeps_the_memory(inputs):
    """Receiving makes the current stream wait for the copy's event, before use, and never the host."""
    runtime = FakeRuntime()
    transfer = Transfer(torch.device("cuda"), runtime=runtime)
    sent = transfer.send(inputs[0])
    runtime.log.clear()

    got = transfer.receive(sent)

    assert runtime.log == [("wait", 1, "main"), *(("keep", tensor.data_ptr()) for tensor in got.tensors())]


@pytest.mark.gpu
def test_a_real_device_receives_what_was_sent(inputs):
    """On CUDA: equal tensors, however many are on their way."""
    device = torch.device("cuda")
    transfer = Transfer(device, slots=2)
    for one in inputs * 3:
        got = transfer.receive(transfer.send(one))
        assert all(b.is_cuda and torch.equal(a, b.cpu()) for a, b in zip(one.tensors(), got.tensors(), strict=True))
