"""From host memory to the training device, ahead of the step: pinned buffers, a side stream, events.

On the CPU nothing is copied. On CUDA the read-ahead thread copies a micro-batch into a pinned buffer and from there,
asynchronously, to the device; the consumer's stream waits for the copy, the host never does. A buffer is written again
only when its last copy has ended.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from gr_core.model.inputs import Inputs

_ALIGN = 64  # bytes; every tensor of a buffer begins on such a border


class Event(Protocol):
    """What is used of torch.cuda.Event."""

    def record(self, stream: Any) -> None:
        """Mark the place that the stream has reached."""

    def synchronize(self) -> None:
        """Wait on the host until the stream has passed it."""


class Runtime(Protocol):
    """What is used of torch.cuda; a test gives its own."""

    def new_stream(self) -> Any:
        """Return a stream of the device."""

    def new_event(self) -> Event:
        """Return an event without timing."""

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream current."""

    def current(self) -> Any:
        """Return the current stream."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Return page-locked host memory, [num_bytes] uint8."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """Start a copy to the device on the current stream."""

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory until the stream has done what it has been given so far."""


class _Cuda:
    """torch.cuda on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def new_event(self) -> Event:
        return cast(Event, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def current(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)


class _Slot:
    """One pinned buffer and the event behind its last copy."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._buffer = runtime.pinned(0)
        self._used = 0
        self._done: Event | None = None

    def clear(self, num_bytes: int) -> None:
        """Wait until the buffer may be written, and make it large enough."""
        if self._done is not None:
            self._done.synchronize()
        if self._buffer.numel() < num_bytes:
            self._buffer = self._runtime.pinned(num_bytes)
        self._used = 0

    def send(self, tensor: Tensor) -> Tensor:
        place = self._buffer[self._used : self._used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._used += _padded(tensor.nbytes)
        return self._runtime.to_device(place.copy_(tensor))

    def close(self, stream: Any) -> Event:
        self._done = self._runtime.new_event()
        self._done.record(stream)
        return self._done


@dataclass(frozen=True, slots=True)
class Sent:
    """A micro-batch on its way; `Transfer.receive` hands it out."""

    inputs: Inputs
    done: Event | None


class Transfer:
    """Sends micro-batches to a device.

    Args:
        device: The training device.
        slots: Pinned buffers: one more than micro-batches may be on their way at once.
        runtime: torch.cuda, unless a test gives its own.
    """

    def __init__(self, device: torch.device, *, slots: int = 3, runtime: Runtime | None = None) -> None:
        self._runtime = runtime if runtime is not None or device.type != "cuda" else _Cuda(device)
        if self._runtime is not None:
            self._stream = self._runtime.new_stream()
            self._slots = cycle([_Slot(self._runtime) for _ in range(slots)])

    def send(self, inputs: Inputs) -> Sent:
        """Start the copy; called in the read-ahead thread. On the CPU the inputs are there already."""
        if self._runtime is None:
            return Sent(inputs, None)
        slot = next(self._slots)
        slot.clear(sum(_padded(tensor.nbytes) for tensor in inputs.tensors()))
        with self._runtime.use(self._stream):
            moved = inputs.map(slot.send)
            return Sent(moved, slot.close(self._stream))

    def receive(self, sent: Sent) -> Inputs:
        """Return the inputs for use on the current stream, which waits for the copy; the host does not."""
        if self._runtime is None or sent.done is None:
            return sent.inputs
        stream = self._runtime.current()
        stream.wait_event(sent.done)
        for tensor in sent.inputs.tensors():
            self._runtime.keep(tensor, stream)
        return sent.inputs


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
