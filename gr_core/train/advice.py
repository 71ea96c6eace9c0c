"""What would make training cheaper, ranked by the share of a step that it is expected to save.

The rules are those of thumb of design section 8. A saving is reckoned from this run's own split where that tells it; where
it does not, it is the figure that LinkedIn saw for the same change ("Faster than Light", 2026), on the part that it touches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gr_core.train.attribution import PARTS
from gr_core.train.run import Run

PADDING, METRICS, DATA_WAIT = 0.30, 0.01, 0.01  # shares from which the rules speak
_FUSED_METRICS_LEAVE = 0.02  # of what 1,000 thresholds cost: 0.03 ms of 19 ms and more (LinkedIn: 0.5 of 40 ms)
_FUSED_OPTIMIZER_SAVES = 0.5  # of the optimizer's time [LinkedIn: -50 %]
_FUSED_LOOKUP_SAVES = 0.10  # of a step [LinkedIn: -10 %]
_EVALUATION_SAVES = 0.16  # of a night that evaluates in line, where its share is not known [LinkedIn: -16 %]
_HSDP_SAVES = 0.10  # of a step across nodes [LinkedIn: -10 %]
_ATTENTION_GAINS = 0.2  # of attention's time, by a kernel 25 % faster [LinkedIn: +25 %]
_RECOMPILES = 2.0  # more than three graphs of a region mean that shapes are not static


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do."""

    action: str
    """What to set or do, and why."""
    expected_saving_fraction: float
    """Of a step's time (0-1)."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, as examples 7 has them."""
        return {"action": self.action, "expected_saving_fraction": round(self.expected_saving_fraction, 4)}


@dataclass(frozen=True, slots=True)
class _Seen:
    """A run as the rules see it."""

    perf: Mapping[str, float]
    train: Mapping[str, Any]
    pack: Mapping[str, Any]
    nodes: int

    def share(self, part: str) -> float:
        """Return a part's share of a step."""
        whole = sum(self.perf.get(f"perf/seconds/{name}", 0.0) for name in PARTS) + self.perf.get(
            "perf/other_seconds", 0.0
        )
        return self.perf.get(f"perf/seconds/{part}", 0.0) / whole if whole > 0 else 0.0

    @property
    def attention(self) -> float:
        """Return attention's share of a step: of forward and backward, as its FLOP are, padded places included."""
        needed = self.perf.get("perf/attention_flops_fraction", 0.0)
        padded = needed / max(1.0 - self.perf.get("perf/padding_fraction", 0.0), 1e-3)
        return (self.share("forward") + self.share("backward")) * padded / max(padded + 1.0 - needed, 1e-9)


def advise(
    perf: Mapping[str, float], config: Mapping[str, Mapping[str, Any]], *, nodes: int = 1
) -> list[dict[str, Any]]:
    """Return advice, the largest expected saving first.

    Args:
        perf: `Attribution.metrics`.
        config: `train` and `pack` of the resolved config.
        nodes: Machines that train together.
    """
    seen = _Seen(perf, config.get("train", {}), config.get("pack", {}), nodes)
    return _ranked(advice.to_json() for rule in _RULES for advice in rule(seen))


def with_evaluation(advice: Sequence[dict[str, Any]], fraction: float | None) -> list[dict[str, Any]]:
    """Add what evaluation off the path would save, in its place.

    Args:
        advice: As `advise` returned it; training does not know what comes after it.
        fraction: Share of a night's training and evaluation that the new checkpoint's evaluation takes after training; 0:
            it stands there, but its share is not known; None: it runs beside training.
    """
    if fraction is None:
        return list(advice)
    told = Advice(
        "evaluate off the path: set evaluation.parallel = true and train.save_every_steps",
        fraction or _EVALUATION_SAVES,
    )
    return _ranked([*advice, told.to_json()])


def _ranked(advice: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(advice, key=lambda one: -float(one["expected_saving_fraction"]))


def nodes_of(run: Run, device: torch.device) -> int:
    """Return on how many machines a run's ranks are, a rank a GPU; CPU ranks share one."""
    local = torch.cuda.device_count() if device.type == "cuda" else run.train.distributed.ranks
    return -(-run.train.distributed.ranks // max(local, 1))


def _packing(seen: _Seen) -> Iterator[Advice]:
    padding = seen.perf.get("perf/padding_fraction", 0.0)
    if seen.pack.get("layout") == "padded" and padding > PADDING:
        yield Advice(
            f"pack: set pack.layout = 'packed'; {padding:.0%} of attention's places hold no token",
            seen.attention * padding,
        )
    elif padding > PADDING:
        yield Advice(
            f"pack: {padding:.0%} of attention's places hold no token; let attention.path be auto, or cut fewer lengths "
            "into a batch with a larger pack.token_budget",
            seen.attention * padding,
        )


def _metrics(seen: _Seen) -> Iterator[Advice]:
    share = seen.share("metrics")
    if share > METRICS and seen.train.get("metrics", "fused") == "naive":
        told = f"fuse the metrics: set train.metrics = 'fused'; they take {share:.1%} of a step"
        yield Advice(told, share * (1 - _FUSED_METRICS_LEAVE))
    elif share > METRICS:
        told = f"the fused metrics take {share:.2%} of a step, over 1 %: steps are small; raise pack.token_budget"
        yield Advice(told, share - METRICS)


def _optimizer(seen: _Seen) -> Iterator[Advice]:
    if seen.train.get("fused_optimizer") is False:
        yield Advice("set train.fused_optimizer = true, always", seen.share("optimizer") * _FUSED_OPTIMIZER_SAVES)


def _lookup(seen: _Seen) -> Iterator[Advice]:
    if seen.train.get("fused_lookup") is False:
        yield Advice("set train.fused_lookup = true: one lookup for all tables", _FUSED_LOOKUP_SAVES)
    if seen.train.get("update_touched_rows") is False:
        told = "set train.update_touched_rows = true: the rows that a step touched, not every row of the tables"
        yield Advice(told, seen.share("optimizer") * _FUSED_OPTIMIZER_SAVES)


def _loader(seen: _Seen) -> Iterator[Advice]:
    share = seen.share("data_wait")
    if share > DATA_WAIT:
        yield Advice(
            f"the step waits {share:.1%} of its time for batches, which native code makes in one thread ahead of it: give the "
            "process one core more than train.num_threads, and packs a local disk",
            share,
        )


def _links(seen: _Seen) -> Iterator[Advice]:
    strategy = (seen.train.get("distributed") or {}).get("strategy", "none")
    if seen.nodes > 1 and strategy != "hsdp":
        yield Advice(
            "across nodes set train.distributed.strategy = 'hsdp': shard within a node, replicate across", _HSDP_SAVES
        )


def _graphs(seen: _Seen) -> Iterator[Advice]:
    if seen.perf.get("perf/recompiles", 0.0) > _RECOMPILES:
        told = f"{seen.perf['perf/recompiles']:.0f} recompilations: shapes change; keep pack.token_budget, and look for what varies"
        yield Advice(told, 0.0)


def _attention(seen: _Seen) -> Iterator[Advice]:
    if seen.perf.get("perf/attention_flops_fraction"):
        yield Advice(
            f"measure before touching the attention kernel: attention is about {seen.attention:.0%} of a step, of which one "
            f"that is 25 % faster saves {seen.attention * _ATTENTION_GAINS:.1%}",
            seen.attention * _ATTENTION_GAINS,
        )


_RULES: tuple[Callable[[_Seen], Iterator[Advice]], ...] = (
    _packing,
    _metrics,
    _optimizer,
    _lookup,
    _loader,
    _links,
    _graphs,
    _attention,
)
