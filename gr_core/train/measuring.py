"""Some steps of a run measured, and nothing saved: where their time goes, and what would make them cheaper.

`python -m gr_core.train RUN.json --attribute N`, and below it `daybreak attribute`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from gr_core.data.prefetch import Prefetched
from gr_core.errors import UsageError
from gr_core.train.advice import advise, nodes_of
from gr_core.train.attribution import PARTS, Attribution, attribution
from gr_core.train.distributed import connect
from gr_core.train.loop import Night
from gr_core.train.optim import schedule
from gr_core.train.run import Run
from gr_core.train.tracing import Trace

logger = logging.getLogger(__name__)

WARM_UP = 2  # steps before the measured ones: memory is allocated, caches fill
_COUNTED, _TRACED = 1, 2  # steps after them; neither disturbs the measured ones


def attribute(run: Run, steps: int, trace: Path | None = None) -> dict[str, Any]:
    """Measure some steps of a night as it would start, warm start included.

    Args:
        run: The run; its output is neither read nor written.
        steps: Steps to measure; a pack with fewer is gone through again.
        trace: Where two further steps are recorded by torch.profiler; None: nowhere.

    Returns:
        steps; seconds by part; perf, keys as in state.json; advice, as examples 7 has them. {} on ranks but the first.

    Raises:
        UsageError: The pack supervises nothing.
        DaybreakError: As `gr_core.train.loop.train`.
    """
    ranks = connect(run.train.distributed, run.device)
    torch.set_num_threads(run.train.num_threads)
    night = Night(run, ranks)
    groups = supervised_steps(night, run.train.micro_batches)
    plan = list(islice(cycle(groups), WARM_UP + steps + _COUNTED + _TRACED * (trace is not None)))
    budget = int(night.reader.index["token_budget"])
    with Prefetched(night.prepared(plan)) as ready:
        place = 0

        def take(count: int, clock: Attribution) -> None:
            nonlocal place
            for _ in range(count):
                with clock.step():
                    night.step(plan[place], schedule(place, len(plan), run.train), clock, ready)
                place += 1

        take(WARM_UP, Attribution(night.device, budget, count_after_seconds=float("inf")))
        clock = attribution(run, night.device, token_budget=budget, steps=steps, count_after_seconds=float("inf"))
        take(steps, clock)
        perf = clock.metrics()
        counting = Attribution(night.device, budget, count_after_seconds=0.0)
        take(_COUNTED, counting)
        perf |= counting.counts
        if trace is not None:
            recorder = Trace(trace, night.device, first=0, steps=_TRACED)
            take(_TRACED, Attribution(night.device, budget, trace=recorder, count_after_seconds=float("inf")))
            logger.info("two steps are recorded in %s; open it at ui.perfetto.dev", trace)
    ranks.close()
    return summary(perf, run, night.device, steps) if ranks.is_first else {}


def summary(perf: dict[str, float], run: Run, device: torch.device, steps: int) -> dict[str, Any]:
    """Return the object of a measured run: steps, seconds, perf, advice."""
    prefix = "perf/seconds/"
    return {
        "steps": steps,
        "seconds": {part: perf[prefix + part] for part in PARTS},
        "perf": {key: value for key, value in perf.items() if not key.startswith(prefix)},
        "advice": advise(perf, run.config, nodes=nodes_of(run, device)),
    }


def supervised_steps(night: Night, micro_batches: int) -> list[Sequence[int]]:
    """Return the batch numbers of each step that supervises anything.

    Raises:
        UsageError: There is none.
    """
    found = list(_supervised(night, micro_batches))
    if not found:
        raise UsageError(
            f"{night.run.pack} supervises nothing, so no step can be measured; name a pack with due events",
            where=str(night.run.pack),
        )
    return found


def _supervised(night: Night, micro_batches: int) -> Iterator[Sequence[int]]:
    weights = night.reader.index["batch_weights"]["token"]
    for first in range(0, len(weights), micro_batches):
        numbers = range(first, min(first + micro_batches, len(weights)))
        if any(weights[number] > 0 for number in numbers):
            yield numbers
