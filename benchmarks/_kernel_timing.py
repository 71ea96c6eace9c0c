"""Times of kernels on a device, and what the device could do: medians, with its cache flushed between repeats."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

REPEATS, WARM_UP = 20, 3
_FLUSH_BYTES = 256 * 2**20  # several times the 50 MiB of an H100's L2 cache
_COPY_BYTES = 2**30


@dataclass(kw_only=True, slots=True)
class Machine:
    """A device, how it is timed, and whether sizes are small."""

    device: torch.device
    quick: bool
    repeats: int
    bytes_per_second: float
    """Of a large copy, read and written: what "bandwidth" is measured against, in the same run."""
    _flush: Tensor | None = field(default=None)

    @classmethod
    def of(cls, device: torch.device, *, quick: bool) -> Machine:
        """Return the machine, its bandwidth measured."""
        made = cls(device=device, quick=quick, repeats=3 if quick else REPEATS, bytes_per_second=1.0)
        size = 2**20 if quick else _COPY_BYTES
        source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
        made.bytes_per_second = 2 * size / made.seconds(lambda: target.copy_(source))
        if device.type == "cuda" and not quick:
            made._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
        return made

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median time of some work on the device, launch included, compiled and warmed up before."""
        for _ in range(1 if self.quick else WARM_UP):
            work()
        return median(self._once(work) for _ in range(self.repeats))

    def fraction(self, moved: int, seconds: float) -> float:
        """Return the share of the measured bandwidth that moving so many bytes in that time is."""
        return moved / seconds / self.bytes_per_second

    def describe(self) -> dict[str, Any]:
        """Return the conditions of its figures."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return {
            "device": name,
            "quick": self.quick,
            "repeats": self.repeats,
            "copy_bytes_per_second": self.bytes_per_second,
            "times": "medians, device cache flushed before each" if self._flush is not None else "medians",
        }

    def _once(self, work: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        if self._flush is not None:
            self._flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000


def generator(machine: Machine, seed: int = 0) -> torch.Generator:
    """Return a seeded generator on the device."""
    return torch.Generator(device=machine.device).manual_seed(seed)


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference over the largest right value (1 where that is less), in fp64; NaN where one is."""
    if wanted.numel() == 0:
        return 0.0
    found, wanted = found.detach(), wanted.detach().double()
    return float((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
