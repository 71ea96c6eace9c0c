"""Who and what the embedded world consists of: its seed and sizes, users, items born and dying; numpy alone.

In: a `World`. Out: arrays of traits, each drawn from (seed, purpose) or hashed from the item's own number, so that they
never depend on a day, on the other items, or on what was asked before.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RING = 4
NUM_TYPES = 2
NUM_CATEGORIES = RING * NUM_TYPES
CREATORS_PER_CATEGORY = 5
DEVICES = ("phone", "tablet", "desktop")

_QUALITY_STD, _USER_STD = 0.45, 0.3


class WorldValues(Protocol):
    """What a world is made from; `gr_core.config.WorldConfig` and `World` have it."""

    @property
    def seed(self) -> int: ...  # noqa: D102 - documented by World
    @property
    def start(self) -> date: ...  # noqa: D102
    @property
    def num_users(self) -> int: ...  # noqa: D102
    @property
    def num_items(self) -> int: ...  # noqa: D102
    @property
    def sessions_per_user_day(self) -> float: ...  # noqa: D102
    @property
    def bot_events(self) -> int: ...  # noqa: D102
    @property
    def taste_shift_day(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """A world without pydantic, for machines that have numpy and pyarrow alone."""

    seed: int = 0
    """Another seed is another world."""
    start: date = date(2025, 6, 1)
    """The first day; before it there is nothing."""
    num_users: int = 2000
    """Users, the bot not among them."""
    num_items: int = 400
    """Items alive on any day."""
    sessions_per_user_day: float = 1.5
    """Mean sessions of a user and day (at most 4 are held)."""
    bot_events: int = 400
    """Impressions of the bot a day."""
    taste_shift_day: int = 0
    """From this day of the world on (1: the first) users want another category than before; 0: they never change."""

    @classmethod
    def of(cls, values: WorldValues) -> Self:
        """Copy the values of a config."""
        return cls(**{name: getattr(values, name) for name in cls.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True, slots=True)
class Users:
    """Fixed traits, arrays over users [U]."""

    kind: Ints
    """Type: which ring of categories."""
    rate: Floats
    """Mean sessions a day."""
    bias: Floats
    like: Floats
    purchase: Floats
    device: Ints

    def take(self, users: Ints) -> Users:
        """Return the traits of the given users, one entry each."""
        return Users(**{name: getattr(self, name)[users] for name in self.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True, slots=True)
class Items:
    """Items alive on a day, arrays over the catalogue's places [I]; each place holds one item at a time."""

    number: Ints
    category: Ints
    creator: Ints
    quality: Floats
    weight: Floats
    """How often the feed shows it, relative to the others of its category."""


def generator(world: World, purpose: str, number: int = 0) -> np.random.Generator:
    """Return the random generator of one purpose and number (of a day); independent of every other."""
    words = [world.seed % 2**64, number, *purpose.encode()]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))


def users_of(world: World) -> Users:
    """Return the fixed traits of the world's users."""
    rng = generator(world, "users")
    size = world.num_users
    activity = np.clip(rng.gamma(3.0, 1 / 3, size), 0.3, 2.5)
    return Users(
        kind=rng.integers(0, NUM_TYPES, size),
        rate=activity / activity.mean() * world.sessions_per_user_day,
        bias=rng.normal(0, _USER_STD, size),
        like=rng.normal(0, 0.4, size),
        purchase=rng.normal(0, 0.4, size),
        device=rng.choice(len(DEVICES), size, p=[0.7, 0.1, 0.2]),
    )


def items_of(world: World, day: date) -> Items:
    """Return the items alive on a day: each lives 14 to 60 days, then another is born in its place."""
    rng = generator(world, "items")
    life = rng.integers(14, 61, world.num_items)
    phase = rng.integers(0, life)
    places = np.arange(world.num_items)
    number = (age_days(world, day) + phase) // life * world.num_items + places
    category = places % NUM_CATEGORIES
    creator = (uniform(world, number, 1) * CREATORS_PER_CATEGORY).astype(np.int64)
    return Items(
        number=number,
        category=category,
        creator=category * CREATORS_PER_CATEGORY + creator,
        quality=_QUALITY_STD * _normal(world, number, 2),
        weight=np.exp(0.8 * _normal(world, number, 4)),
    )


def age_days(world: World, day: date) -> int:
    """Return how many days of the world come before a day; negative before its start."""
    return (day - world.start).days


def uniform(world: World, ids: Ints, salt: int) -> Floats:
    """Hash ids to (0, 1) by splitmix64: a trait belongs to its id and to nothing else."""
    start = (world.seed * 1_000_003 + salt) * 0x9E3779B97F4A7C15 % 2**64
    word = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ (word >> np.uint64(shift))) * np.uint64(factor)
    word ^= word >> np.uint64(31)
    return np.asarray((word >> np.uint64(11)) * 2.0**-53 + 2.0**-54)


def _normal(world: World, ids: Ints, salt: int) -> Floats:
    """Hash ids to a standard normal (Box and Muller); uses salt and salt + 1."""
    radius = np.sqrt(-2 * np.log(uniform(world, ids, salt)))
    return np.asarray(radius * np.cos(2 * np.pi * uniform(world, ids, salt + 1)))
