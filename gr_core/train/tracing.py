"""What a step asks of the machine: operators, kernel launches, waits of the host, counted on one sampled step; traces.

On CUDA torch.profiler counts the runtime's launches and synchronisations. On the CPU, where there is neither, operators are
counted by RecordFunction alone: starting torch.profiler there costs seconds, as much as many steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
# A tensor's value read on the host: .item(), bool(), float(); shapes that follow from values
_READERS = ("aten::item", "aten::is_nonzero", "aten::_local_scalar_dense", "aten::equal", "aten::nonzero")

Counts = dict[str, float]


@contextmanager
def counted(device: torch.device, counts: Counts) -> Iterator[None]:
    """Count what runs inside on this thread (and, on CUDA, on autograd's), into `counts` when it ends.

    Args:
        device: The training device.
        counts: Filled with perf/launches_per_step (CUDA) or perf/ops_per_step (CPU: operators that no other operator
            called), and perf/host_syncs_per_step: how often the host waits for the device; on the CPU, how often it
            would, since a value is read there.
    """
    with _cuda_counted(counts) if device.type == "cuda" else _cpu_counted(counts):
        yield


@contextmanager
def _cpu_counted(counts: Counts) -> Iterator[None]:
    of: Any = torch.autograd
    nothing = torch._C._profiler._ExperimentalConfig()
    of._enable_profiler_legacy(of.ProfilerConfig(of.ProfilerState.CPU, False, False, False, False, False, nothing))
    try:
        yield
    finally:
        threads = of._disable_profiler_legacy()
    names = [name for events in threads for name in _outermost((event.kind(), event.name()) for event in events)]
    reads = sum(name in _READERS for name in names)
    counts |= {"perf/ops_per_step": float(len(names)), "perf/host_syncs_per_step": float(reads)}


def _outermost(events: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the operators of one thread's (push or pop, name) records that no other operator called."""
    depth = inside = 0  # of open records; of the open operator that no other one called, 0: there is none
    for kind, name in events:
        if kind == "push":
            depth += 1
            if not inside and name.startswith("aten::"):
                inside = depth
                yield name
        elif kind == "pop" and depth:
            if inside == depth:
                inside = 0
            depth -= 1


@contextmanager
def _cuda_counted(counts: Counts) -> Iterator[None]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        yield
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    waits = sum(name in _WAITS for name in names)
    counts |= {
        "perf/launches_per_step": float(sum(name.startswith(_LAUNCHES) for name in names)),
        "perf/host_syncs_per_step": float(max(waits - 1, 0)),  # one is ours, above
    }


class Trace:
    """Records some steps with torch.profiler and writes them for chrome://tracing or ui.perfetto.dev.

    Args:
        path: The file.
        device: The training device.
        first: Steps to pass over, while caches warm up.
        steps: Steps to record.
    """

    def __init__(self, path: Path, device: torch.device, *, first: int, steps: int = 2) -> None:
        self.path = path
        self._device = device
        self._first, self._last = first, first + steps - 1
        self._profiler: Any = None

    @property
    def is_recording(self) -> bool:
        """Whether the step is recorded."""
        return self._profiler is not None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surround a step of the night, counted from 0; the file is written after the last one that is recorded."""
        if number == self._first:
            from torch.profiler import ProfilerActivity, profile

            cuda = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *cuda])
            self._profiler.start()
        yield
        if number == self._last:
            self.write()

    def write(self) -> None:
        """End the recording, if there is one, and write the file."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.path))
