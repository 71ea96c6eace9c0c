"""The embedded world's truth: users, items, sessions, probabilities and outcomes of any day, by numpy alone.

In: a `World` (seed, first day, sizes) and a day. Out: `DayEvents`, arrays over the impressions of that day. A day is a
pure function of (world, day): every draw comes from a generator seeded by (seed, day, purpose), and what a user wants
depends on what the feed has SHOWN before, never on realised actions. So no other day is replayed, and day 500 costs
what day 1 costs.

Taste. Each type of user has a ring of `RING` categories. Every session has a theme, a category of the user's ring, and
ends in it. In a session the user wants the category that follows, on the ring, the theme of the session BEFORE, and
clicks more or less on everything according to that theme (`_KEEN`). The end of the visible history tells it. The set of
the history does not: any of its themes may have been the last. Where the world has a `taste_shift_day`, the wanted
category is from that day on the one BEFORE the theme on the ring: what was learned until then misleads.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gr_core.data.population import (
    NUM_CATEGORIES,
    NUM_TYPES,
    RING,
    Floats,
    Ints,
    Items,
    Users,
    World,
    age_days,
    generator,
    items_of,
    uniform,
    users_of,
)

Bools = NDArray[np.bool_]

ACTIONS = ("click", "like", "purchase")
WINDOW_SECONDS = {"click": 1800, "like": 6 * 3600, "purchase": 2 * 86400}
VISIBILITY_SECONDS = 600
"""The visibility delay that the sessions are made for: a session is over before its first event is visible."""
NEVER = -1
"""Time of an action that is not taken."""

SURFACES = ("home", "search", "related")
SURFACE_SHARES = (0.6, 0.25, 0.15)
MAX_SESSIONS = 4
"""Sessions of a user and day."""
MIN_LENGTH, MAX_LENGTH = 4, 16
"""Impressions of a session."""
CLOSING = 3
"""Impressions at a session's end that are all of its theme."""
LOOK_BACK_DAYS = 21
"""Days within which the last session still counts; a user without one is curious about all of the ring."""
MOOD_DAYS, MOOD_SHARE = 2, 0.5
"""For so many days a user has a mood, a category that is the theme of this share of the sessions."""
GAP_MS = (8_000, 35_000)
"""Time between two impressions of a session."""
BOT_CLICK = 0.05
"""Click probability of the bot, whatever it is shown."""

DAY_MS = 86_400_000
_EPOCH_MS = date(1970, 1, 1).toordinal() * DAY_MS
_SLOT_MS = 4 * 3_600_000
_SLOT_WEIGHTS = np.array([0.3, 0.5, 1.0, 1.2, 1.6, 1.4])  # how likely a session falls into each four hours of a day
_MARGIN_MS = 1_260_000  # a session (at most 560 s) and its visibility delay end before the next four hours begin

_THEME, _WANTED, _OWN = 0.30, 0.30, 0.15  # shares of a session's open slots; the rest is of the other type
# Additive effects on the logit of a click. `_KEEN` and `_APPEAL` go by place on the ring. They make the rule learnable
# within nights: the interaction alone (match) is an exclusive-or, on which a two-layer transformer stayed at the
# base rate for 500 steps; with them it starts to learn in the second night.
_BASE, _FOREIGN, _MATCH, _CURIOUS = -2.65, -0.5, 2.8, 1.3
_KEEN = np.array([1.4, 0.5, -0.5, -1.4])
_APPEAL = np.array([-0.15, 0.15, -0.3, 0.3])
_SURFACE_EFFECT = np.array([0.0, 0.35, -0.25])
_SLOT_EFFECT = -0.07
_LIKE, _PURCHASE = -1.75, -2.4  # logits given a click


@dataclass(frozen=True, kw_only=True, slots=True)
class DayEvents:
    """Impressions of one day, arrays over events [E] by (user, shown_ms), the bot's last; times in ms, UTC."""

    day: date
    user: Ints
    """User number; `World.num_users` is the bot."""
    item: Ints
    """Item number, never given to another item."""
    category: Ints
    creator: Ints
    surface: Ints
    device: Ints
    slot: Ints
    """Place in the session's list, from 0."""
    session: Ints
    """Number of the session within the day."""
    shown_ms: Ints
    probability: dict[str, Floats]
    """Action -> its probability when the impression is made."""
    acted_ms: dict[str, Ints]
    """Action -> when it is taken, `NEVER` if not; always within the action's window."""
    late_days: Ints
    """By how many days (0, 1 or 2) the feed delivers the event late."""

    def __len__(self) -> int:
        """Return E, the number of events."""
        return len(self.user)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """Impressions of some sessions in their order, arrays [E]."""

    session: Ints
    """Which of the sessions."""
    slot: Ints
    place: Ints
    """The item's place in the catalogue."""
    probability: dict[str, Floats]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """Sessions of a day in order of time: counts [U]; begins (ms within the day) and themes [U, MAX_SESSIONS]."""

    counts: Ints
    begins: Ints
    themes: Ints


def wanted_after(theme: Any, step: int = 1) -> Any:
    """Return the category wanted after a session of this theme: so many steps on along its ring. Works on arrays."""
    return theme // RING * RING + (theme + step) % RING


def taste_step(world: World, day: date) -> int:
    """Return how far on along the ring the wanted category lies on a day: one step, since the taste's shift one back."""
    has_shifted = 0 < world.taste_shift_day <= age_days(world, day) + 1
    return RING - 1 if has_shifted else 1


def show(rng: np.random.Generator, items: Items, users: Users, sessions: dict[str, Ints], step: int = 1) -> Shown:
    """Fill sessions with impressions and give each its true probabilities.

    Args:
        rng: Draws the items.
        items: The catalogue.
        users: Traits of the user of each session, [S].
        sessions: Arrays [S]: theme; before (theme of the session before, -1: none); length; surface.
        step: How far on along the ring the wanted category lies.

    Returns:
        The impressions, session by session. P(like) and P(purchase) are products with P(click): both follow a click.
    """
    theme, before, length, surface = (sessions[name] for name in ("theme", "before", "length", "surface"))
    session = np.repeat(np.arange(len(length)), length)
    slot = np.arange(len(session)) - (np.cumsum(length) - length)[session]
    wanted = np.where(before >= 0, wanted_after(before, step), -1)[session]
    kind = users.kind[session]
    open_slot = slot < (length - CLOSING)[session]
    category = _categories(rng, kind, theme[session], wanted, open_slot)
    place = _choose(rng, items, category)

    quality, own = items.quality[place], category // RING == kind
    logit = _BASE + users.bias[session] + quality + _APPEAL[category % RING]
    logit += _SURFACE_EFFECT[surface][session] + _SLOT_EFFECT * slot + np.where(own, 0.0, _FOREIGN)
    logit += np.where(before >= 0, _KEEN[before % RING], 0.0)[session]
    logit += _MATCH * (category == wanted) + _CURIOUS * (own & (wanted < 0))
    click = _sigmoid(logit)
    probability = {
        "click": click,
        "like": click * _sigmoid(_LIKE + users.like[session] + quality),
        "purchase": click * _sigmoid(_PURCHASE + users.purchase[session] - quality),
    }
    return Shown(session=session, slot=slot, place=place, probability=probability)


def events_of(world: World, day: date) -> DayEvents:
    """Return a day's events with their true probabilities and outcomes.

    Args:
        world: The world.
        day: Any day; before world.start there are no events.

    Returns:
        The impressions shown on that day (UTC), whenever the feed delivers them.
    """
    items, plan = items_of(world, day), _plan(world, day)
    user, index = np.nonzero(np.arange(MAX_SESSIONS) < plan.counts[:, None])
    users = users_of(world).take(user)
    rng = generator(world, "events", day.toordinal())
    sessions = {
        "theme": plan.themes[user, index],
        "before": np.where(index > 0, plan.themes[user, index - 1], _last_themes(world, day)[user]),
        "length": rng.integers(MIN_LENGTH, MAX_LENGTH + 1, len(user)),
        "surface": rng.choice(len(SURFACES), len(user), p=SURFACE_SHARES),
    }
    shown = show(rng, items, users, sessions, taste_step(world, day))
    elapsed = np.cumsum(rng.integers(*GAP_MS, len(shown.session)))
    if len(elapsed):
        elapsed -= elapsed[np.cumsum(sessions["length"]) - sessions["length"]][shown.session]
    begins = day_end_ms(day) - DAY_MS + plan.begins[user, index]
    drawn = {
        "user": user[shown.session],
        "place": shown.place,
        "surface": sessions["surface"][shown.session],
        "device": users.device[shown.session],
        "slot": shown.slot,
        "session": shown.session,
        "shown_ms": begins[shown.session] + elapsed,
        **shown.probability,
    }
    drawn = _with_bot(world, day, drawn)
    rng = generator(world, "outcomes", day.toordinal())
    bot = drawn["user"] == world.num_users
    late = np.where(rng.random(len(bot)) < 0.01, np.where(rng.random(len(bot)) < 0.7, 1, 2), 0)
    return DayEvents(
        day=day,
        item=items.number[drawn["place"]],
        category=items.category[drawn["place"]],
        creator=items.creator[drawn["place"]],
        probability={action: drawn[action] for action in ACTIONS},
        acted_ms=outcomes(rng, drawn["shown_ms"], {action: drawn[action] for action in ACTIONS}, slow=~bot),
        late_days=np.where(bot, 0, late),
        **{name: drawn[name] for name in ("user", "surface", "device", "slot", "session", "shown_ms")},
    )


def outcomes(rng: np.random.Generator, shown_ms: Ints, probability: dict[str, Floats], slow: Bools) -> dict[str, Ints]:
    """Draw which actions are taken and when.

    Args:
        rng: Draws all.
        shown_ms: Times of the impressions, ms [E].
        probability: Action -> true probability [E]; those of like and purchase include the click.
        slow: Where a click may come later than the event is visible (one in twenty does) [E].

    Returns:
        Action -> time in ms, `NEVER` where it is not taken; inside the window, likes and purchases after the click.
    """
    size = len(shown_ms)
    click = probability["click"]
    hesitant = slow & (rng.random(size) < 0.05)
    quick = np.minimum(2e3 + rng.exponential(30e3, size), 500e3)
    delay = np.where(hesitant, rng.uniform(600e3, 1790e3, size), quick).astype(np.int64)
    clicked = rng.random(size) < click
    acted = {"click": np.where(clicked, shown_ms + delay, NEVER)}
    for action, median_ms in (("like", 1_200e3), ("purchase", 6 * 3_600e3)):
        taken = clicked & (rng.random(size) * click < probability[action])
        longest = (WINDOW_SECONDS[action] * 1000 - delay - 1000) * rng.uniform(0.5, 1, size)
        more = np.minimum(median_ms * np.exp(rng.normal(0, 1.3, size)), longest)
        acted[action] = np.where(taken, shown_ms + delay + more.astype(np.int64), NEVER)
    return acted


def day_end_ms(day: date) -> int:
    """Return the first instant after a day, ms UTC."""
    return (day.toordinal() + 1) * DAY_MS - _EPOCH_MS


def _plan(world: World, day: date) -> _Plan:
    """Draw a day's sessions; none before the world's start."""
    shape = (world.num_users, MAX_SESSIONS)
    if age_days(world, day) < 0:
        empty = np.zeros(shape, np.int64)
        return _Plan(counts=empty[:, 0], begins=empty, themes=empty)
    users, everyone = users_of(world), np.arange(world.num_users)
    rng = generator(world, "plan", day.toordinal())
    counts = np.minimum(rng.poisson(users.rate), MAX_SESSIONS)
    # An exponential race draws without replacement, by weight; slots that are not needed sort behind the others.
    race = rng.exponential(size=(world.num_users, len(_SLOT_WEIGHTS))) / _SLOT_WEIGHTS
    slots = np.argsort(race, axis=1)[:, :MAX_SESSIONS]
    slots[np.arange(MAX_SESSIONS) >= counts[:, None]] = len(_SLOT_WEIGHTS)
    begins = np.sort(slots, axis=1) * _SLOT_MS + rng.integers(0, _SLOT_MS - _MARGIN_MS, shape)
    # Users change their mood on different days.
    period = (age_days(world, day) + everyone) // MOOD_DAYS
    mood = (uniform(world, period * world.num_users + everyone, 6) * RING).astype(np.int64)
    theme = np.where(rng.random(shape) < MOOD_SHARE, mood[:, None], rng.integers(0, RING, shape))
    return _Plan(counts=counts, begins=begins, themes=users.kind[:, None] * RING + theme)


def _last_themes(world: World, day: date) -> Ints:
    """Return the theme of each user's last session before a day [U], -1 where none counts any more."""
    themes = np.full(world.num_users, -1)
    for back in range(1, min(LOOK_BACK_DAYS, age_days(world, day)) + 1):
        plan = _plan(world, date.fromordinal(day.toordinal() - back))
        found = (themes < 0) & (plan.counts > 0)
        themes[found] = plan.themes[found, plan.counts[found] - 1]
        if (themes >= 0).all():
            break
    return themes


def _categories(rng: np.random.Generator, kind: Ints, theme: Ints, wanted: Ints, open_slot: Bools) -> Ints:
    """Draw the category of each impression; a closing slot always shows the session's theme."""
    size = len(kind)
    draw = rng.random(size)
    own = kind * RING + rng.integers(0, RING, size)
    other = (own + RING * rng.integers(1, NUM_TYPES, size)) % NUM_CATEGORIES
    category = np.where(draw < _THEME + _WANTED + _OWN, own, other)
    category = np.where((draw < _THEME + _WANTED) & (wanted >= 0), wanted, category)
    return np.where(~open_slot | (draw < _THEME), theme, category)


def _choose(rng: np.random.Generator, items: Items, category: Ints) -> Ints:
    """Draw an item's place for each impression [E], by weight within the category."""
    draw = rng.random(len(category))
    place = np.zeros(len(category), np.int64)
    for value in np.unique(category):
        members = np.flatnonzero(items.category == value)
        steps = np.cumsum(items.weight[members])
        here = category == value
        place[here] = members[np.searchsorted(steps / steps[-1], draw[here], side="right")]
    return place


def _with_bot(world: World, day: date, people: dict[str, Any]) -> dict[str, Any]:
    """Append the bot's impressions: any item, any time until 22:00, one a session, no likes or purchases."""
    size = world.bot_events if age_days(world, day) >= 0 else 0
    rng = generator(world, "bot", day.toordinal())
    zeros = np.zeros(size, np.int64)
    bot = {
        "user": zeros + world.num_users,
        "place": rng.integers(0, world.num_items, size),
        "surface": zeros,
        "device": zeros + 2,
        "slot": zeros,
        "session": np.arange(size) + people["session"].max(initial=-1) + 1,
        "shown_ms": day_end_ms(day) - DAY_MS + np.sort(rng.integers(0, 22 * 3_600_000, size)),
        "click": np.full(size, BOT_CLICK),
        "like": np.zeros(size),
        "purchase": np.zeros(size),
    }
    return {name: np.concatenate([people[name], bot[name]]) for name in people}


def _sigmoid(logit: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-logit)))
