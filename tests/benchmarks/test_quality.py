"""The quality benchmark: shuffled histories that leak nothing, the contract of its object, nights without Prefect."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.tiny as tiny
from benchmarks import quality
from benchmarks._nights import run_night
from benchmarks._report import Figure, Report
from benchmarks._shuffle import read_segments, shuffle_histories, shuffle_pack
from gr_core.config import load_config
from gr_core.data.intervals import Limits, lay_out
from gr_core.data.packfile import PackMeta, Segments, write_pack
from gr_core.refs import Bound

HOUR_US = 3_600_000_000
FEATURES = ("item_id", "surface")
CONTENT = ("item_id", "actions", "known")


def segments_of(seed: int, *, users: int = 6) -> Segments:
    """Make segments as a night does: sessions whose targets see the same history, limits that move lo, two of a user."""
    rng = np.random.default_rng(seed)
    limits = Limits(max_history=8, max_targets=6, max_age_us=200 * HOUR_US, token_budget=64)
    history = [np.sort(rng.choice(100, rng.integers(0, 40), replace=False)) * HOUR_US for _ in range(users)]
    targets = [np.sort(rng.choice(100, rng.integers(1, 5)).repeat(3)) * HOUR_US + 1 for _ in range(users)]
    starts = [np.concatenate([[0], np.cumsum([len(part) for part in parts])]) for parts in (history, targets)]
    times = [np.concatenate(parts).astype(np.int64) for parts in (history, targets)]
    layout = lay_out(times[0], starts[0], times[1], starts[1], limits)
    is_target, total = layout.is_target, len(layout.is_target)
    time = np.empty(total, np.int64)
    time[~is_target], time[is_target] = times[0][layout.source[~is_target]], times[1][layout.source[is_target]]
    # An item a history token, so that a set of items is a set of tokens.
    item = np.where(is_target, 0, 10 + layout.source).astype(np.int32)
    columns: dict[str, Any] = {
        "item_id": item,
        "surface": is_target.astype(np.int32) * 3,
        "actions": np.where(is_target, 0, item % 4).astype(np.int32),
        "known": np.where(is_target, 0, 3).astype(np.int32),
        "labels": np.where(is_target, layout.source % 2, 0).astype(np.int32),
        "label_known": is_target.astype(np.int32) * 3,
        "time": time,
        "position": layout.position,
        "lo": layout.lo,
        "hi": layout.hi,
        "supervise": is_target.astype(np.uint8),
        "weight": np.ones(total, np.float32),
    }
    return Segments(
        columns=columns,
        lengths=layout.lengths,
        users=[f"u{user}" for user in layout.user],
        event_ids=[f"e{source}" for source in layout.source[is_target]],
    )


def seen_by_target(segments: Segments) -> dict[str, dict[str, Any]]:
    """Return for each event what its target is and what it sees: times in order, content in order, user, label."""
    starts = np.concatenate([[0], np.cumsum(segments.lengths)])
    segment = np.repeat(np.arange(len(segments.lengths)), segments.lengths)
    columns, found = segments.columns, {}
    events = [str(event) for event in segments.event_ids]
    for event, token in zip(events, np.flatnonzero(columns["supervise"]).tolist(), strict=True):
        begin = starts[segment[token]]
        keys = slice(begin + columns["lo"][token], begin + columns["hi"][token])
        found[event] = {
            "user": segments.users[segment[token]],
            "itself": [int(columns[name][token]) for name in (*FEATURES, "labels", "label_known", "time")],
            "times": columns["time"][keys].tolist(),
            "content": list(zip(*(columns[name][keys].tolist() for name in CONTENT), strict=True)),
        }
    return found


@pytest.mark.parametrize("seed", range(8))
def test_shuffling_keeps_what_a_target_sees_as_a_set(seed: int) -> None:
    """Each target has its user, features, labels and the times it saw; what it saw is the same set of tokens."""
    segments = segments_of(seed)
    before = seen_by_target(segments)
    after = seen_by_target(shuffle_histories(segments, FEATURES, np.random.default_rng(seed)))

    assert before.keys() == after.keys()
    for event, was in before.items():
        now = after[event]
        assert [was[key] for key in ("user", "itself", "times")] == [now[key] for key in ("user", "itself", "times")]
        assert sorted(was["content"]) == sorted(now["content"])


@pytest.mark.parametrize("seed", range(8))
def test_shuffling_leaks_nothing(seed: int) -> None:
    """All targets of a shuffled segment see all of its history, and all of it was visible to them before."""
    shuffled = shuffle_histories(segments_of(seed), FEATURES, np.random.default_rng(seed))
    columns = shuffled.columns
    ends = np.cumsum(shuffled.lengths)
    for begin, end in zip(ends - shuffled.lengths, ends, strict=True):
        is_target = columns["supervise"][begin:end] == 1
        num_history = int((~is_target).sum())
        time = columns["time"][begin:end]

        assert not is_target[:num_history].any()
        assert is_target.any()
        assert set(columns["lo"][begin:end]) == {0}
        assert columns["hi"][begin:end].tolist() == np.minimum(np.arange(end - begin), num_history).tolist()
        assert columns["position"][begin:end].tolist() == columns["hi"][begin:end].tolist()
        assert time[:num_history].max(initial=-1) < time[is_target].min()


def test_shuffling_destroys_order_and_depends_on_the_seed_alone() -> None:
    """Histories come in another order than before, another one for another seed, the same one for the same seed."""
    segments = segments_of(1, users=30)
    before = seen_by_target(segments)
    one, again, other = (
        seen_by_target(shuffle_histories(segments, FEATURES, np.random.default_rng(seed))) for seed in (5, 5, 6)
    )
    long = [event for event, was in before.items() if len(was["content"]) >= 5]

    assert one == again
    assert len(long) > 50
    for twin, first in ((one, before), (other, before), (one, other)):
        assert sum(twin[event]["content"] == first[event]["content"] for event in long) < 0.1 * len(long)


def test_a_shuffled_pack_has_the_same_targets_and_says_the_same(tmp_path: Path) -> None:
    """Through the files: same role, bound, budget, seed and vocabulary; every event once, with what it saw as a set."""
    bound = Bound(commit=3, cutoff_us=7, shown_before_us={"click": 5})
    meta = PackMeta(
        role="train",
        features=FEATURES,
        actions=("click", "like"),
        supervised=3,
        token_budget=64,
        seed=4,
        vocabulary="v",
        bound=bound,
    )
    segments = segments_of(2, users=12)
    index = write_pack(tmp_path / "plain", segments, meta)
    shuffled = shuffle_pack(tmp_path / "plain", tmp_path / "shuffled", seed=1)
    before, after = (seen_by_target(read_segments(tmp_path / name)[0]) for name in ("plain", "shuffled"))
    kept = ("role", "bound", "token_budget", "seed", "vocabulary", "features", "actions", "num_supervised")

    assert {key: index[key] for key in kept} == {key: shuffled[key] for key in kept}
    assert before == seen_by_target(segments)
    assert {e: sorted(was["content"]) for e, was in before.items()} == {
        e: sorted(now["content"]) for e, now in after.items()
    }
    assert max(shuffled["batch_tokens"]) <= 64


def test_a_segment_that_is_not_history_then_targets_is_refused() -> None:
    """A target without supervision cannot be told from history in a pack, so it is refused."""
    segments = segments_of(3)
    columns = dict(segments.columns)
    last = int(np.flatnonzero(columns["supervise"])[-1])
    columns["supervise"] = columns["supervise"].copy()
    columns["supervise"][last] = 0
    broken = Segments(columns=columns, lengths=segments.lengths, users=segments.users, event_ids=[])

    with pytest.raises(ValueError, match="history and then supervised targets"):
        shuffle_histories(broken, FEATURES, np.random.default_rng(0))


def world_night(*, model: float) -> dict[str, Any]:
    return {
        "date": "2025-06-08",
        "rows": 9,
        "positives": 3,
        "truth": 0.87,
        "model": model,
        "popularity": 0.6,
        "shuffled": 0.7,
    }


def test_the_object_has_the_contracts_shape_and_knows_what_misses() -> None:
    """Four keys a figure, plain JSON; a figure on the wrong side of its goal, or without a value, misses."""
    report = Report(conditions={"quick": False, "world": {}})
    quality.add_world(report, 0, [world_night(model=0.84), world_night(model=0.86)])
    quality.add_world(report, 1, [world_night(model=0.71)])
    report.figures["undefined"] = Figure(value=None, unit="AUC", at_least=0.5)
    printed = json.loads(json.dumps(report.to_json()))

    assert list(printed) == ["figures", "conditions"]
    assert all(list(figure) == ["value", "goal", "baseline", "unit"] for figure in printed["figures"].values())
    assert printed["figures"]["world/0/click/gap_to_truth"]["value"] == pytest.approx(0.02)
    assert printed["figures"]["world/0/click/gap_to_truth"]["goal"] == 0.03
    assert printed["conditions"]["goals"]["world/0/click/gap_to_truth"] == "at most"
    assert printed["conditions"]["goals"]["world/0/click/loss_of_shuffling"] == "at least"
    assert report.missed() == ["world/1/click/gap_to_truth", "world/1/click/loss_of_shuffling", "undefined"]
    assert all(figure["goal"] is None for figure in report.to_json(enforce=False)["figures"].values())


def test_a_missing_source_is_skipped_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without KuaiRand's files there are no figures of it, the conditions say so, and nothing has failed."""
    status = quality.main(["--only", "kuairand", "--source", str(tmp_path), "--json"])
    printed = json.loads(capsys.readouterr().out)

    assert status == 0
    assert printed["figures"] == {}
    assert printed["conditions"]["kuairand"].startswith("skipped")


def test_nights_follow_each_other_as_in_the_product(tmp_path: Path) -> None:
    """The second night starts from the first one's checkpoint, which has never seen what it is judged on."""
    config = load_config(tiny.make(tmp_path, days=2))
    home = str(tmp_path / "home")
    first, second = (run_night(config, home, tiny.FIRST_DAY + timedelta(days=n)) for n in range(2))

    assert first.auc("click") is None
    assert second.night.parent is not None
    assert second.night.parent.checkpoint == first.trained["uri"]
    assert second.trained["step"] > first.trained["step"]
    assert 0.5 < (second.auc("click") or 0) <= 1
    assert 0 < second.trained["seconds"] < second.seconds
