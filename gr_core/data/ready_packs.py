"""Ready packs of the embedded world, for machines and benchmarks that have no event table: numpy and pyarrow alone.

In: a world and how many users with how long histories. Out: packs of the roles train, next_day and holdout, and a
RUN.json beside them. Users live the world's sessions (gr_core.data.world), so labels can be learnt from the order of the
history; segments and intervals come from gr_core.data.intervals, as in a night.
Dims: `U` users, `S` sessions, `E` impressions, `T` tokens.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gr_core.data.intervals import Layout, Limits, lay_out, starts_of
from gr_core.data.packfile import PackMeta, Segments, write_pack
from gr_core.data.population import (
    CREATORS_PER_CATEGORY,
    DEVICES,
    NUM_CATEGORIES,
    RING,
    Ints,
    Items,
    World,
    WorldValues,
    generator,
    items_of,
    users_of,
)
from gr_core.data.world import (
    ACTIONS,
    DAY_MS,
    GAP_MS,
    MAX_LENGTH,
    MIN_LENGTH,
    NEVER,
    SURFACE_SHARES,
    SURFACES,
    VISIBILITY_SECONDS,
    WINDOW_SECONDS,
    day_end_ms,
    outcomes,
    show,
)
from gr_core.errors import ConfigError
from gr_core.hashing import fingerprint
from gr_core.refs import Bound
from gr_core.schema import FIRST_FALLBACK_ROW

Role = Literal["train", "next_day", "holdout"]

ITEM_FEATURES = ("item_id", "category", "creator")
CONTEXT_FEATURES = ("surface", "slot", "device")
FIRST_ROW = FIRST_FALLBACK_ROW + 1
"""First row of a real id: one fallback row a table."""
_SESSION_SPACING_MS = 5 * 3_600_000
_ALL = (1 << len(ACTIONS)) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """How long histories are: lognormal, cut at the longest. A padded batch is empty by 1 - mean / longest."""

    longest: int
    """Tokens."""
    median_fraction: float
    """Median over longest (0-1)."""
    sigma: float
    """Standard deviation of the logarithm."""


PRESETS = {
    "world": Preset(longest=64, median_fraction=0.7, sigma=0.6),
    "feed": Preset(longest=512, median_fraction=0.17, sigma=0.9),  # a quarter full, as the report's Feed (75 % padding)
    "ads": Preset(longest=512, median_fraction=0.073, sigma=1.0),  # 13 % full, as the report's Ads (87 % padding)
}


def write_packs(
    out: Path,
    world: WorldValues,
    *,
    num_users: int = 2000,
    preset: str = "world",
    max_history: int | None = None,
    token_budget: int = 8192,
    seed: int = 0,
    model: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Write packs of the roles train, next_day and holdout, and RUN.json last.

    Args:
        out: Directory; gets train/, next_day/, holdout/ and RUN.json.
        world: Seed and catalogue. Its users are not used: a pack has users of its own.
        num_users: Users of the train pack, one segment each; the others have a tenth of them.
        preset: History lengths: world, feed or ads.
        max_history: Longest history in tokens; None: the preset's.
        token_budget: Most tokens of a batch.
        seed: Of the users, their histories and the shuffle.
        model: Model settings other than the defaults (width, num_layers, ...).

    Returns:
        The index of each pack by role.

    Raises:
        ConfigError: An unknown preset, or a budget that does not hold one segment.
    """
    if preset not in PRESETS:
        raise ConfigError(f"preset must be one of {sorted(PRESETS)}, got {preset!r}", where="preset")
    shape = PRESETS[preset]
    if max_history is not None:
        shape = dataclasses.replace(shape, longest=max_history)
    limits = _limits(shape, token_budget)
    place = World.of(world)
    indexes: dict[str, dict[str, Any]] = {}
    roles: dict[Role, int] = {
        "train": num_users,
        "next_day": max(num_users // 10, 1),
        "holdout": max(num_users // 10, 1),
    }
    mark = fingerprint([dataclasses.asdict(place), num_users, dataclasses.asdict(shape), token_budget, seed])
    for number, (role, size) in enumerate(roles.items()):
        # Users of another seed, so that no role has a user of another.
        people = dataclasses.replace(place, seed=(place.seed * 1000 + seed) * 10 + number, num_users=size)
        segments = _segments(people, items_of(place, place.start), shape, limits, f"{role}-")
        meta = PackMeta(
            role=role,
            features=ITEM_FEATURES + CONTEXT_FEATURES,
            actions=ACTIONS,
            supervised=_ALL,
            token_budget=token_budget,
            seed=seed,
            vocabulary=mark,
            bound=_bound(place),
            fingerprint=mark,
        )
        indexes[role] = write_pack(out / role, segments, meta)
    _write_run(out, _run(place, {"token_budget": token_budget, "seed": seed}, model or {}, mark, seed))
    return indexes


def _limits(shape: Preset, token_budget: int) -> Limits:
    try:
        return Limits(
            max_history=shape.longest,
            max_targets=2 * MAX_LENGTH,
            max_age_us=10 * 365 * DAY_MS * 1000,
            token_budget=token_budget,
        )
    except ValueError as error:
        raise ConfigError(f"{error}; raise the token budget or lower max_history", where="token_budget") from error


def _segments(people: World, items: Items, shape: Preset, limits: Limits, prefix: str) -> Segments:
    """Let users live sessions until their histories are long enough, then one more: the targets."""
    rng = generator(people, "packs")
    users = users_of(people)
    everyone = np.arange(people.num_users)
    wanted = shape.longest * shape.median_fraction * np.exp(rng.normal(0, shape.sigma, people.num_users))
    mean_length = (MIN_LENGTH + MAX_LENGTH) / 2
    num_sessions = np.maximum(np.round(np.minimum(wanted, shape.longest) / mean_length), 0).astype(np.int64) + 1

    user = np.repeat(everyone, num_sessions)
    first = np.cumsum(num_sessions) - num_sessions
    number = np.arange(len(user)) - first[user]
    theme = users.kind[user] * RING + rng.integers(0, RING, len(user))
    sessions = {
        "theme": theme,
        "before": np.where(number > 0, np.roll(theme, 1), -1),
        "length": rng.integers(MIN_LENGTH, MAX_LENGTH + 1, len(user)),
        "surface": rng.choice(len(SURFACES), len(user), p=SURFACE_SHARES),
    }
    shown = show(rng, items, users.take(user), sessions)
    # Every user's last session begins on the last day; the earlier ones lie five hours apart.
    from_last = (num_sessions[user] - 1 - number)[shown.session]
    begin = day_end_ms(people.start) - DAY_MS // 2 + rng.integers(0, DAY_MS // 4, people.num_users)
    gap = rng.integers(*GAP_MS, len(user))[shown.session]
    shown_ms = begin[user[shown.session]] - from_last * _SESSION_SPACING_MS + shown.slot * gap
    acted = outcomes(rng, shown_ms, shown.probability, slow=np.ones(len(shown_ms), np.bool_))

    rows = {
        "item_id": shown.place,
        "category": items.category[shown.place],
        "creator": items.creator[shown.place],
        "surface": sessions["surface"][shown.session],
        "slot": shown.slot,
        "device": users.device[user[shown.session]],
    }
    return _tokens(user[shown.session], from_last == 0, shown_ms, acted, rows, limits, prefix)


def _tokens(
    user: Ints,
    is_target: npt.NDArray[np.bool_],
    shown_ms: Ints,
    acted: dict[str, Ints],
    rows: dict[str, Ints],
    limits: Limits,
    prefix: str,
) -> Segments:
    """Turn impressions [E] into tokens [T]: history with the actions known by then, late actions apart, targets."""
    visible_ms = shown_ms + VISIBILITY_SECONDS * 1000
    history = np.flatnonzero(~is_target)
    event, time = [history], [visible_ms[history]]
    bits = [sum(((acted[a] != NEVER) & (acted[a] <= visible_ms))[history] << bit for bit, a in enumerate(ACTIONS))]
    for bit, action in enumerate(ACTIONS):
        late = history[acted[action][history] > visible_ms[history]]
        event.append(late)
        time.append(acted[action][late])
        bits.append(np.full(len(late), 1 << bit))
    events, times, actions = np.concatenate(event), np.concatenate(time), np.concatenate(bits)
    order = np.lexsort((events, times, user[events]))
    events, times, actions = events[order], times[order], actions[order]

    targets = np.flatnonzero(is_target)
    num_users = int(user[-1]) + 1
    layout = lay_out(
        times * 1000,
        starts_of(user[events], num_users),
        shown_ms[targets] * 1000,
        starts_of(user[targets], num_users),
        limits,
    )
    target = layout.is_target
    source = np.empty(len(target), np.int64)
    source[target], source[~target] = targets[layout.source[target]], events[layout.source[~target]]
    labels = sum((acted[action] != NEVER).astype(np.int64) << bit for bit, action in enumerate(ACTIONS))
    token = {name: np.where(target | (name in ITEM_FEATURES), rows[name][source] + FIRST_ROW, 0) for name in rows}
    token |= {
        "actions": _where(~target, actions, layout.source),
        "known": np.where(target, 0, _ALL),
        "labels": np.where(target, np.asarray(labels)[source], 0),
        "label_known": np.where(target, _ALL, 0),
        "time": _where(~target, times, layout.source, shown_ms[source]) * 1000,
        "position": layout.position,
        "lo": layout.lo,
        "hi": layout.hi,
        "supervise": target,
        "weight": np.ones(len(target)),
    }
    return _as_segments(token, layout, prefix, source[target])


def _where(mask: npt.NDArray[np.bool_], values: Ints, index: Ints, otherwise: Any = 0) -> Ints:
    """Return values[index] where the mask holds, else `otherwise`; the index may point nowhere elsewhere."""
    out = np.broadcast_to(np.asarray(otherwise, np.int64), mask.shape).copy()
    out[mask] = values[index[mask]]
    return out


def _as_segments(token: dict[str, Any], layout: Layout, prefix: str, events: Ints) -> Segments:
    return Segments(
        columns=token,
        lengths=layout.lengths,
        users=[f"{prefix}u{number}" for number in layout.user],
        event_ids=[f"{prefix}e{number}" for number in events],
    )


def _bound(world: World) -> Bound:
    cutoff = (day_end_ms(world.start) + 2 * DAY_MS) * 1000
    before = {action: cutoff - WINDOW_SECONDS[action] * 1_000_000 for action in ACTIONS}
    return Bound(commit=1, cutoff_us=cutoff, shown_before_us=before)


def _run(world: World, pack: dict[str, Any], model: Mapping[str, Any], mark: str, seed: int) -> dict[str, Any]:
    """Return RUN.json's values (examples 9)."""
    ids = {
        "item_id": world.num_items,
        "category": NUM_CATEGORIES,
        "creator": NUM_CATEGORIES * CREATORS_PER_CATEGORY,
        "surface": len(SURFACES),
        "slot": MAX_LENGTH,
        "device": len(DEVICES),
    }
    settings = {"item_features": list(ITEM_FEATURES), "context_features": list(CONTEXT_FEATURES), **model}
    return {
        "packs": {role: role for role in ("train", "next_day", "holdout")},
        "vocabulary": {
            name: {"rows": FIRST_ROW + count, "capacity": 1 << (FIRST_ROW + count).bit_length()}
            for name, count in ids.items()
        },
        "vocabulary_version": mark,
        "parent": None,
        "output": "checkpoint",
        "config": {"model": settings, "train": {}, "pack": pack},
        "fingerprint": mark,
        "seed": seed,
        "device": "auto",
        "resume": True,
    }


def _write_run(out: Path, run: dict[str, Any]) -> None:
    temporary = out / ".tmp-RUN.json"
    temporary.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, out / "RUN.json")
