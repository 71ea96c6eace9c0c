"""The embedded world's truth: what tells a click, and what does not."""

from __future__ import annotations

from collections import Counter
from datetime import date, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from gr_core.data.population import World, items_of
from gr_core.data.world import ACTIONS, NEVER, WINDOW_SECONDS, events_of, taste_step, wanted_after

WORLD = World()


def day(number: int) -> date:
    return WORLD.start + timedelta(days=number)


def auc(labels: npt.NDArray[np.bool_], scores: npt.NDArray[np.float64]) -> float:
    """Return the area under the ROC curve, ties half."""
    place, counts = np.unique(scores, return_inverse=True, return_counts=True)[1:]
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    positives = int(labels.sum())
    negatives = len(labels) - positives
    return float((ranks[labels].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def test_truth_is_good_and_popularity_is_not() -> None:
    """Click: the truth's AUC is at least 0.80, that of the items' true rates of the very day at most 0.68."""
    events = events_of(WORLD, day(9))
    clicked, known = events.acted_ms["click"] != NEVER, events.probability["click"]
    items = np.unique(events.item, return_inverse=True)[1]
    rate = np.bincount(items, known) / np.bincount(items)

    assert auc(clicked, known) >= 0.80
    assert 0.55 <= auc(clicked, rate[items]) <= 0.68


def test_only_the_order_of_the_history_tells_what_is_wanted() -> None:
    """Rates by (last category seen, category), counted on other days, beat those by the history's commonest category."""
    last: dict[int, int] = {}
    seen: dict[int, Counter[int]] = {}
    clicks, shows = Counter[tuple[Any, ...]](), Counter[tuple[Any, ...]]()
    scores: dict[str, list[float]] = {"order": [], "set": []}
    world = World(num_users=700)
    for number in range(5):
        events = events_of(world, day(number))
        clicked = (events.acted_ms["click"] != NEVER).tolist()
        ends = np.flatnonzero(np.diff(events.session, append=-1)) + 1
        users, categories = events.user.tolist(), events.category.tolist()
        for begin, end in zip([0, *ends], ends, strict=False):
            user = users[begin]
            common = seen[user].most_common(1)[0][0] if user in seen else -1
            for row in range(begin, end):
                keys = {"order": (last.get(user, -1), categories[row]), "set": (common, categories[row])}
                for name, pair in keys.items():
                    key = (name, *pair)
                    if number == 4:
                        scores[name].append((clicks[key] + 1) / (shows[key] + 5))
                    else:
                        clicks[key] += clicked[row]
                        shows[key] += 1
            last[user] = categories[end - 1]
            seen.setdefault(user, Counter()).update(categories[begin:end])
    order, unordered = (auc(np.array(clicked), np.array(scores[name])) for name in ("order", "set"))

    assert order >= 0.82
    assert unordered <= order - 0.1


def test_a_day_needs_no_other_day() -> None:
    """Events of a far day come at once and are equal each time; what is shown before a day starts with the world."""
    first, again = (events_of(WORLD, day(3000)) for _ in range(2))

    assert len(first) > 20_000
    assert all(np.array_equal(first.acted_ms[action], again.acted_ms[action]) for action in ACTIONS)
    assert np.array_equal(first.shown_ms, again.shown_ms)
    assert len(events_of(WORLD, day(-1))) == 0


def test_actions_lie_inside_their_windows_and_follow_a_click() -> None:
    """Every action time is in [shown, shown + window); a like or a purchase comes after its click; the bot does neither."""
    events = events_of(WORLD, day(2))
    for action, seconds in WINDOW_SECONDS.items():
        taken = events.acted_ms[action] != NEVER
        delay = (events.acted_ms[action] - events.shown_ms)[taken]
        assert delay.min() >= 0
        assert delay.max() < seconds * 1000
        assert (events.acted_ms["click"][taken] != NEVER).all()
        assert (events.acted_ms["click"] <= events.acted_ms[action])[taken].all()
        assert (delay > 600_000).any()
    bot = events.user == WORLD.num_users
    assert bot.sum() == WORLD.bot_events
    assert (events.acted_ms["like"][bot] == NEVER).all()


def test_only_items_alive_are_shown() -> None:
    """What is shown on a day is in that day's catalogue, and a catalogue has each category equally often."""
    for number in (0, 30, 200):
        items = items_of(WORLD, day(number))
        assert set(events_of(WORLD, day(number)).item) <= set(items.number)
        assert len(set(items.number)) == WORLD.num_items
        assert set(np.bincount(items.category)) == {WORLD.num_items // 8}


def test_lower_slots_are_clicked_less() -> None:
    """Position bias: the same expectation falls with the place in the list."""
    events = events_of(WORLD, day(5))
    people = events.user < WORLD.num_users
    opening, middle = (people & (events.slot == slot) for slot in (0, 8))

    assert events.probability["click"][middle].mean() < events.probability["click"][opening].mean()
    assert set(np.unique(events.slot)) == set(range(16))


def test_a_taste_shift_turns_what_is_wanted_from_its_day_on() -> None:
    """Days before the shift are those of a world without it; from its day on the same (last, shown) pairs click otherwise."""
    plain, shifted = World(num_users=300), World(num_users=300, taste_shift_day=6)
    before, after = [events_of(world, day(4)) for world in (plain, shifted)], events_of(shifted, day(5))

    assert np.array_equal(before[0].probability["click"], before[1].probability["click"])
    assert np.array_equal(before[0].item, before[1].item)
    assert not np.array_equal(after.probability["click"], events_of(plain, day(5)).probability["click"])
    assert taste_step(shifted, day(4)) == taste_step(plain, day(5)) == 1
    assert wanted_after(np.array([0, 1, 5]), taste_step(shifted, day(5))).tolist() == [3, 0, 4]
