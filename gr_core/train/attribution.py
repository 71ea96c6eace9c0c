"""Where a night's training time goes: five parts of a step, unused budget, padding, utilisation, launches, cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from gr_core.train import hardware
from gr_core.train.flops import BatchFlops
from gr_core.train.run import Run
from gr_core.train.tracing import Counts, Trace, counted

PARTS = ("forward", "backward", "optimizer", "data_wait", "metrics")

# One step a night is counted, once so many seconds have passed that what the counting costs is below 1 % of them.
_COUNT_AFTER_SECONDS = {"cpu": 10.0, "cuda": 300.0}
_MEASURE_AGAIN_SECONDS = 30.0  # between two measurements of the peak: the best counts, since a busy machine tells less
_DRAIN_EVENTS = 256  # pairs of CUDA events that may wait to be read


class Attribution:
    """Sums up seconds by part and counts tokens; on CUDA by events, without a sync inside a step.

    Args:
        device: The training device.
        token_budget: Tokens a batch could hold.
        terms: What utilisation and cost are reckoned by; None: neither is told.
        trace: Where a few steps are recorded; None: nowhere.
        count_after_seconds: When one step's operators are counted; None: as the device's counting costs.
    """

    def __init__(
        self,
        device: torch.device,
        token_budget: int,
        *,
        terms: hardware.Terms | None = None,
        trace: Trace | None = None,
        count_after_seconds: float | None = None,
    ) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._budget = token_budget
        self._terms = terms
        self._trace = trace
        self._count_after = _COUNT_AFTER_SECONDS[device.type] if count_after_seconds is None else count_after_seconds
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []
        self._tokens = self._places = self._batches = self._steps = 0
        self._padded = self._matrix_flops = self._attention_flops = 0.0
        self._counts: Counts = {}
        self._own = 0.0  # seconds spent on attribution beyond reading clocks
        self._peak: hardware.Peak | None = None
        self._measured = -float("inf")
        self._began = time.perf_counter()
        self._measure_peak()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Attribute what runs inside to one of `PARTS`; an NVTX range on CUDA, a named range in a trace."""
        traced = self._trace is not None and self._trace.is_recording
        with torch.profiler.record_function(name) if traced else nullcontext():
            if self._cuda:
                with self._ranged(name):
                    yield
                return
            began = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - began

    @contextmanager
    def _ranged(self, name: str) -> Iterator[None]:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        try:
            if name == "data_wait":  # the host waits, the device need not
                began = time.perf_counter()
                yield
                self._seconds[name] += time.perf_counter() - began
                return
            begin, end = self._event(), self._event()
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        finally:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround one step of the night: it is counted, recorded in the trace, or its operators are, where due."""
        with self._trace.step(self._steps) if self._trace else nullcontext():
            if (
                not self._counts
                and self.seconds >= self._count_after
                and not (self._trace and self._trace.is_recording)
            ):
                with self._counted():
                    yield
            else:
                yield
        self._steps += 1
        if len(self._events) > _DRAIN_EVENTS:
            self._drain()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the operators of a step; what it takes longer than an average one is attribution's own."""
        usual = self.seconds / max(self._steps, 1)
        began = time.perf_counter()
        with counted(self._device, self._counts):
            yield
        self._own += max(time.perf_counter() - began - usual, 0.0)

    def count(self, num_tokens: int, padding_fraction: float, flops: BatchFlops | None = None) -> None:
        """Count a batch: its tokens, the share of attention's padded places without one, and what it computes."""
        self._tokens += num_tokens
        self._places += self._budget
        self._padded += padding_fraction
        self._batches += 1
        if flops is not None:
            self._matrix_flops += flops.matrices
            self._attention_flops += flops.attention

    @property
    def counts(self) -> Counts:
        """What the counted step asked of the machine; empty before it."""
        return dict(self._counts)

    @property
    def seconds(self) -> float:
        """Wall seconds since the start."""
        return time.perf_counter() - self._began

    @property
    def tokens_per_second(self) -> float:
        """Real tokens a wall second so far."""
        return self._tokens / max(self.seconds, 1e-9)

    def metrics(self) -> dict[str, float]:
        """Return perf/*: seconds by part, rates, unused budget and padding, memory, utilisation, counts and cost.

        Seconds, counts and memory are this rank's; tokens, FLOP and what follows from them are of all ranks, so every rank
        must call this.
        """
        wall = self.seconds
        if self._events:
            torch.cuda.synchronize(self._device)
            self._drain()
        total = self._over_ranks()
        told = {
            "perf/train_seconds": wall,
            "perf/steps": float(self._steps),
            "perf/tokens_per_second": total["tokens"] / max(wall, 1e-9),
            "perf/unused_budget_fraction": 1 - total["tokens"] / total["places"] if total["places"] else 0.0,
            "perf/padding_fraction": total["padded"] / total["batches"] if total["batches"] else 0.0,
            **{f"perf/seconds/{name}": value for name, value in self._seconds.items()},
            "perf/other_seconds": max(wall - sum(self._seconds.values()), 0.0),
            "perf/peak_memory_bytes": float(hardware.peak_memory(self._device)),
            "perf/peak_host_memory_bytes": float(hardware.peak_host_memory()),
            **self._counts,
            **compiled_graphs(),
        }
        told |= self._utilisation(wall, total["matrices"], total["attention"]) | self._cost(wall)
        return told | {"perf/attribution_seconds": self._own}

    def _over_ranks(self) -> dict[str, float]:
        """Return what was counted, summed over the ranks."""
        own = {
            "tokens": float(self._tokens),
            "places": float(self._places),
            "batches": float(self._batches),
            "padded": self._padded,
            "matrices": self._matrix_flops,
            "attention": self._attention_flops,
        }
        if self._terms is None or self._terms.ranks == 1:
            return own
        sums = torch.tensor(list(own.values()), dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(sums)
        return dict(zip(own, sums.tolist(), strict=True))

    def _utilisation(self, wall: float, matrices: float, attention: float) -> dict[str, float]:
        """Tell the share of the peak that the model's own FLOP reach."""
        flops = matrices + attention
        self._measure_peak()
        if self._terms is None or self._peak is None or not flops:
            return {}
        return {
            "perf/model_flops": flops,
            "perf/attention_flops_fraction": attention / flops,
            "perf/peak_flops_per_second": self._peak.flops,
            "perf/mfu": flops / max(wall, 1e-9) / self._peak.flops / self._terms.ranks,
        }

    def _cost(self, wall: float) -> dict[str, float]:
        """Tell what is occupied: GPUs where there are any, else CPU cores, by that name."""
        if self._terms is None:
            return {}
        if not self._cuda:
            return {"perf/core_seconds": wall * self._terms.num_threads * self._terms.ranks}
        gpu_seconds = wall * self._terms.ranks
        told = {"perf/gpu_seconds": gpu_seconds}
        if self._terms.price_per_gpu_hour:
            told["perf/cost"] = gpu_seconds / 3600 * self._terms.price_per_gpu_hour
        return told

    def _measure_peak(self) -> None:
        began = time.perf_counter()
        if self._terms is None or began - self._measured < _MEASURE_AGAIN_SECONDS:
            return
        found = hardware.peak(self._device, self._terms)
        if self._peak is None or found.flops > self._peak.flops:
            self._peak = found
        self._measured = time.perf_counter()
        self._own += self._measured - began

    def _drain(self) -> None:
        """Read the events that the device has passed, oldest first, and keep them for use again."""
        done = 0
        for name, begin, end in self._events:
            if not end.query():  # type: ignore[no-untyped-call]
                break
            self._seconds[name] += begin.elapsed_time(end) / 1000
            self._free += (begin, end)
            done += 1
        del self._events[:done]


def attribution(
    run: Run,
    device: torch.device,
    *,
    token_budget: int,
    steps: int,
    trace: Path | None = None,
    count_after_seconds: float | None = None,
) -> Attribution:
    """Return the attribution of a run.

    Args:
        run: Its settings say price and peak.
        device: The training device.
        token_budget: Tokens a batch could hold.
        steps: How many steps there will be.
        trace: Where two of them are recorded, not the first two if there are more; None: nowhere.
        count_after_seconds: See `Attribution`.
    """
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    terms = hardware.Terms(
        precision=getattr(run.train, "precision", "fp32"),
        peak_tflops=run.train.peak_tflops,
        price_per_gpu_hour=run.train.price_per_gpu_hour,
        num_threads=run.train.num_threads,
        ranks=ranks,
    )
    first = min(2, max(steps - 1, 0))
    recorder = Trace(trace, device, first=first, steps=min(2, steps - first)) if trace is not None and steps else None
    return Attribution(device, token_budget, terms=terms, trace=recorder, count_after_seconds=count_after_seconds)


def compiled_graphs() -> dict[str, float]:
    """Return perf/compiled_graphs and perf/recompiles of this process; nothing where torch.compile was not used."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")  # importing it costs seconds
    if dynamo is None or not dynamo.counters["stats"].get("unique_graphs"):
        return {}
    again = 0
    for one in dynamo.get_compilation_metrics():
        frame = str(getattr(one, "compile_id", "") or "").rpartition("/")[2].partition("_")[0]
        again += frame.isdecimal() and int(frame) > 0  # "3/1": frame 3 was compiled a second time
    return {"perf/compiled_graphs": float(dynamo.counters["stats"]["unique_graphs"]), "perf/recompiles": float(again)}
