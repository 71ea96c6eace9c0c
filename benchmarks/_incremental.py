"""What a night costs against training from scratch: tokens, seconds and normalized entropy (NE), day by day.

Incremental: the product's nights, each from the night before. Beside it, on chosen days, models without a parent on the
same events as a fresh home packs them: yesterday only, the last days, all days, all days twice. The cheapest that
reaches the incremental model's NE on the next day's new events (within `TOLERANCE`) is what a full retrain costs.
Every model is judged on the same rows, which none trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date as Date
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks._layouts import judged, twin_of
from benchmarks._nights import open_day, promote, run_data, run_night
from benchmarks._repack import repack
from benchmarks._report import Figure, Report, console, text_of
from gr_core.config import Config
from gr_core.lake import store
from gr_core.night import Night
from gr_core.refs import day_end_us
from gr_core.stages import ingesting, training

TOLERANCE = 0.002
"""NE is equal where it is at most this share above the incremental model's."""
ALL = 0
"""Days of a window without a beginning."""
Window = tuple[int, int]
"""Days of events (ALL: all), passes over them."""
YESTERDAY: Window = (1, 1)


def measure_incremental(
    report: Report, work: Path, name: str, config: Config, first: Date, sizes: Mapping[str, Any]
) -> None:
    """Add tokens, seconds and NE of every arm by day.

    Args:
        report: Gets the figures.
        work: Where homes lie.
        name: Names the data set.
        config: Its config; `gate.action` is judged.
        first: The first night.
        sizes: nights: how many; judged: numbers of the nights whose models are compared; windows: those tried, besides
            yesterday only.
    """
    days = compare(config, work / f"incremental-{name}", first, sizes)
    for day in days:
        prefix = f"incremental/{name}/night{day['night']}"
        ours, rival, yesterday = day["incremental"], day["cheapest"], day["yesterday"]
        report.figures |= {
            f"{prefix}/ne": Figure(value=ours["ne"], unit="NE", baseline=rival and rival["ne"]),
            f"{prefix}/tokens_fraction": Figure(
                value=rival and ours["tokens"] / rival["tokens"], unit="of the cheapest equal retrain's tokens"
            ),
            f"{prefix}/seconds_fraction": Figure(
                value=rival and ours["seconds"] / rival["seconds"], unit="of its seconds"
            ),
            f"{prefix}/ne_yesterday_only": Figure(value=yesterday["ne"], unit="NE", baseline=ours["ne"]),
        }
    report.conditions[f"incremental/{name}"] = {
        "days": days,
        "tolerance": TOLERANCE,
        "first": first.isoformat(),
        **{key: list(value) if isinstance(value, tuple) else value for key, value in sizes.items()},
    }


def compare(config: Config, work: Path, first: Date, sizes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run the nights, and train the rivals of the judged ones.

    Returns:
        For each judged night: night, date, incremental, yesterday, cheapest (None where no window reached it) and
        retrains (all that were tried, in order of tokens); each with days, passes, tokens, seconds, ne, auc, count.
    """
    home = str(work / "nights")
    found: list[dict[str, Any]] = []
    before: dict[str, Any] | None = None
    for number in range(1, sizes["nights"] + 1):
        result = run_night(config, home, first + timedelta(days=number - 1))
        judge = result.evaluated["next_day"][config.gate.action]
        if before is not None and number - 1 in sizes["judged"]:
            ours = before | {key: judge[key] for key in ("ne", "auc", "count")}
            folder = work / f"retrain-{number - 1}"
            found.append(rivals(config, folder, first, number - 1, ours, sizes["windows"]))
        before = {
            "tokens": result.packs["train"]["num_tokens"],
            "seconds": result.trained["metrics"]["perf/train_seconds"],
        }
    return found


def rivals(
    config: Config, work: Path, first: Date, number: int, ours: Mapping[str, Any], windows: Sequence[Window]
) -> dict[str, Any]:
    """Train from scratch up to a night in a fresh home until a window reaches the incremental model's NE.

    Args:
        config: The config.
        work: The fresh home lies below.
        first: The first night.
        number: Its number, from 1.
        ours: The incremental model's figures.
        windows: To try besides yesterday only, in order of cost.
    """
    home = str(work)
    days = [first + timedelta(days=back) for back in range(number)]
    for day in days[:-1]:
        ingesting.ingest(open_day(config, home, day))
    night = open_day(config, home, days[-1])
    data = run_data(night)
    source = store.local_path(data.packs["train"]["uri"])
    trained: dict[Window, dict[str, Any]] = {}

    def train(window: Window) -> dict[str, Any]:
        own = twin_of(night, f"days{window[0]}-passes{window[1]}", None)
        pack = window_pack(night, source, store.local_path(own.uri("pack", "packs", "train")), window)
        made = training.train(own, {"train": pack}, data.words)
        seconds = made["metrics"]["perf/train_seconds"]
        return {**made, "tokens": pack["num_tokens"], "seconds": seconds}

    trained[YESTERDAY] = train(YESTERDAY)
    promote(night, data, trained[YESTERDAY])
    after = open_day(config, home, days[-1] + timedelta(days=1))
    judge_data = run_data(after)

    def told(window: Window) -> dict[str, Any]:
        own = twin_of(after, f"days{window[0]}-passes{window[1]}", trained[window]["uri"])
        scores = judged(own, judge_data.packs["next_day"], judge_data.words)
        return {
            "days": window[0],
            "passes": window[1],
            **{key: trained[window][key] for key in ("tokens", "seconds")},
            **scores,
        }

    yesterday = told(YESTERDAY)
    retrains: list[dict[str, Any]] = [yesterday]
    for days_back, passes in windows:
        if reaches(retrains[-1], ours):
            break
        window = (ALL if days_back >= number else days_back, passes)
        if window not in trained:
            trained[window] = train(window)
            retrains.append(told(window))
    cheapest = retrains[-1] if reaches(retrains[-1], ours) else None
    console.print(
        f"night {number}: NE {text_of(ours['ne'])} from {ours['tokens']:,} tokens; yesterday only "
        f"{text_of(yesterday['ne'])}; cheapest equal retrain: {cheapest or 'none of those tried'}"
    )
    return {
        "night": number,
        "date": days[-1].isoformat(),
        "incremental": dict(ours),
        "yesterday": yesterday,
        "cheapest": cheapest,
        "retrains": retrains,
    }


def window_pack(night: Night, source: Path, out: Path, window: Window) -> dict[str, Any]:
    """Write the pack of a window: the targets shown in the night's last days, so often."""
    days, passes = window
    since = None if days == ALL else day_end_us(night.day - timedelta(days=days), night.settings.lake.zone)
    return repack(source, out, since_us=since, passes=passes)


def reaches(rival: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Tell whether a retrain's NE is equal or better."""
    if rival["ne"] is None or ours["ne"] is None:
        return False
    return bool(rival["ne"] <= ours["ne"] * (1 + TOLERANCE))
