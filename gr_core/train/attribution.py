"""Where a night's training time goes: five parts of a step, unused budget, padding, tokens a second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PARTS = ("forward", "backward", "optimizer", "data_wait", "metrics")


class Attribution:
    """Sums up seconds by part and counts tokens; on CUDA by events, without a sync inside a step.

    Args:
        device: The training device.
        token_budget: Tokens a batch could hold.
    """

    def __init__(self, device: torch.device, token_budget: int) -> None:
        self._cuda = device.type == "cuda"
        self._budget = token_budget
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._began = time.perf_counter()
        self._tokens = 0
        self._places = 0
        self._padded = 0.0
        self._batches = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Attribute what runs inside to one of `PARTS`."""
        if self._cuda and name != "data_wait":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            return
        began = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - began

    def count(self, num_tokens: int, padding_fraction: float) -> None:
        """Count a batch: its tokens, and the share of attention's padded places without one."""
        self._tokens += num_tokens
        self._places += self._budget
        self._padded += padding_fraction
        self._batches += 1

    @property
    def seconds(self) -> float:
        """Wall seconds since the start."""
        return time.perf_counter() - self._began

    @property
    def tokens_per_second(self) -> float:
        """Real tokens a wall second so far."""
        return self._tokens / max(self.seconds, 1e-9)

    def metrics(self) -> dict[str, float]:
        """Return perf/*: wall seconds, tokens a second, unused budget, attention padding, seconds by part."""
        seconds = dict(self._seconds)
        if self._events:
            torch.cuda.synchronize()
            for name, begin, end in self._events:
                seconds[name] += begin.elapsed_time(end) / 1000
        return {
            "perf/train_seconds": self.seconds,
            "perf/tokens_per_second": self.tokens_per_second,
            "perf/unused_budget_fraction": 1 - self._tokens / self._places if self._places else 0.0,
            "perf/padding_fraction": self._padded / self._batches if self._batches else 0.0,
            **{f"perf/seconds/{name}": value for name, value in seconds.items()},
        }
