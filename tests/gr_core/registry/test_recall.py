"""Histories from the event table are the requests that a service would have made, late actions included."""

from __future__ import annotations

from datetime import timedelta

import polars as pl

from gr_core.data import recall


def test_a_users_history_is_what_was_visible_then(trained, requests):
    """For every due event: the same tokens, in order, as were visible before it, the newest of them where limited."""
    asked = [(one["user_id"], round(one["shown_at"].timestamp() * 1e6)) for one in requests]
    made = recall.histories(
        trained.events, asked, features=("item_id", "kind"), action_names=("click", "like", "hate"), limit=6
    )

    def told(entry, at):
        shown = entry["shown_at"]
        return {
            **{name: entry[name] for name in ("item_id", "kind", "actions", "known")},
            "visible_at": round(at.timestamp() * 1e6),
            "shown_at": None if shown is None else round(shown.timestamp() * 1e6),
        }

    for one, history in zip(requests, made, strict=True):
        past = [told(entry, entry["visible_at"]) for entry in one["history"] if entry["visible_at"] < one["shown_at"]]
        assert history == past[-6:]
    assert any(entry["shown_at"] is None for history in made for entry in history)


def test_nobody_and_nothing_is_known_of_strangers(trained):
    """A user without rows, and one before his first event, have no history."""
    first = trained.events["shown_at"].min() - timedelta(days=1)
    asked = [("nobody", 0), ("u00", round(first.timestamp() * 1e6))]
    rules = {"features": ("item_id",), "action_names": ("click", "like", "hate"), "limit": 9}

    assert recall.histories(trained.events, asked, **rules) == [[], []]
    assert recall.histories(trained.events.clear(), asked, **rules) == [[], []]


def test_an_item_has_the_features_of_its_newest_event():
    """Over all parts, whatever their order; later events first by time, then by id."""
    rows = {
        "item_id": ["a", "b", "a", "a"],
        "event_id": ["1", "2", "3", "4"],
        "shown_at": [1, 1, 3, 3],
        "kind": ["old", None, "early", "late"],
    }
    frame = pl.DataFrame(rows)

    for parts in ([frame], [frame[2:], frame[:2]], [frame[:1], frame[1:2], frame[2:]]):
        assert recall.newest_features(parts, ["kind"]) == {"a": ("late",), "b": (None,)}
    assert recall.newest_features([], ["kind"]) == {}
