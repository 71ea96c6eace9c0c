"""What the machine could do: its peak rate, by config, by the device's name or measured; its memory; its price."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

Precision = Literal["fp32", "bf16"]

# Dense TFLOP/s (bf16, tf32, fp32) of the makers' data sheets, half of what they print "with sparsity". The first name that
# the device's contains counts, so longer ones stand first. Without bf16 units the fp16 rate stands there.
_DATA_SHEETS: tuple[tuple[str, tuple[float, float, float]], ...] = (
    ("GB200", (2500.0, 1250.0, 80.0)),
    ("B200", (2250.0, 1125.0, 75.0)),
    ("H200", (989.4, 494.7, 66.9)),
    ("GH200", (989.4, 494.7, 66.9)),
    ("H100 PCIe", (756.0, 378.0, 51.0)),
    ("H100 NVL", (835.0, 417.5, 60.0)),
    ("H100", (989.4, 494.7, 66.9)),
    ("H800", (989.4, 494.7, 66.9)),
    ("A100", (312.0, 156.0, 19.5)),
    ("A800", (312.0, 156.0, 19.5)),
    ("L40S", (362.0, 183.0, 91.6)),
    ("L4", (121.0, 60.0, 30.3)),
    ("A10", (125.0, 62.5, 31.2)),
    ("V100", (125.0, 15.7, 15.7)),
    ("T4", (65.0, 8.1, 8.1)),
)
TERA = 1e12
_CPU_SIZE, _CUDA_SIZE = 512, 4096  # of the square matrices that are multiplied: a few ms
_REPEATS = 4


@dataclass(frozen=True, slots=True)
class Peak:
    """The rate that utilisation is measured against."""

    flops: float
    """FLOP/s of one rank."""
    source: Literal["config", "data sheet", "measured"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What a run is measured and charged by."""

    precision: Precision = "fp32"
    peak_tflops: float | None = None
    """The peak by config; None: by the device."""
    price_per_gpu_hour: float = 0.0
    """In the currency of whoever reads the cost; 0: not known."""
    num_threads: int = 1
    """CPU cores of a rank."""
    ranks: int = 1


def peak(device: torch.device, terms: Terms) -> Peak:
    """Return a rank's peak rate at the run's precision: from the config, the data sheet of a known GPU, or measured."""
    if terms.peak_tflops is not None:
        return Peak(terms.peak_tflops * TERA, "config")
    if device.type == "cuda":
        known = data_sheet(torch.cuda.get_device_name(device), terms.precision)
        if known is not None:
            return Peak(known, "data sheet")
    return Peak(matrix_rate(device, terms.precision), "measured")


def data_sheet(device_name: str, precision: Precision) -> float | None:
    """Return a GPU's dense peak, FLOP/s, at a precision (fp32: tf32 where torch may use it); None: not known."""
    for name, (bf16, tf32, fp32) in _DATA_SHEETS:
        if name in device_name:
            single = fp32 if torch.get_float32_matmul_precision() == "highest" else tf32
            return (bf16 if precision == "bf16" else single) * TERA
    return None


@torch.no_grad()
def matrix_rate(device: torch.device, precision: Precision = "fp32") -> float:
    """Measure the rate of one large matrix product, FLOP/s: the best of four, a few ms in all.

    On the CPU always fp32: a bf16 product runs there for the sake of memory, seldom for speed.
    """
    on_cuda = device.type == "cuda"
    size = _CUDA_SIZE if on_cuda else _CPU_SIZE
    dtype = torch.bfloat16 if on_cuda and precision == "bf16" else torch.float32
    left, right, out = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
    best = float("inf")
    for _ in range(_REPEATS + 1):  # the first warms up, and is never the best
        _wait(device)
        began = time.perf_counter()
        torch.mm(left, right, out=out)
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_host_memory() -> int:
    """Return the most bytes that this process has held in main memory."""
    try:
        # not ru_maxrss, which a child process takes over from its parent
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def peak_memory(device: torch.device) -> int:
    """Return the most bytes held on the training device; on the CPU in main memory."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_host_memory()
