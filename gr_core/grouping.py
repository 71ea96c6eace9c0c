"""Whether batches of like lengths were compared with random ones on this feed, before they are trained on every night.

`pack.grouping` other than none changes what a step sees, and on some feeds that costs AUC (LinkedIn's Ads refused it, its
Feed took it). So a config that uses it is warned until `grouping.json` in its home holds a comparison on this feed:

    {"format": 1, "comparisons": [{"feed": "sha256:...", "grouping": "bucketed", "auc": {"click": {"difference": -0.001,
     "low": -0.003, "high": 0.001}}, "seeds": 3}]}

`python -m benchmarks.grouping --config CONFIG` measures it and records it through `record`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gr_core.config import Config
from gr_core.errors import FormatError
from gr_core.hashing import fingerprint
from gr_core.lake import store

FORMAT = 1
FILE = "grouping.json"
COMMAND = "python -m benchmarks.grouping --config CONFIG --first DATE"


def feed_of(config: Config) -> str:
    """Return what tells feeds apart: where their files lie and which actions are supervised."""
    source = config.source
    return fingerprint(
        {
            # an embedded world's root is wherever its home is
            "root": source.root if source.world is None else source.world.model_dump(mode="json"),
            "feeds": [[feed.role, feed.path] for feed in source.feeds],
            "actions": source.action_names,
            "supervised": source.supervised_mask,
        }
    )


def comparison(config: Config, home: str) -> dict[str, Any] | None:
    """Return the recorded comparison of this config's grouping on this feed; None: there is none.

    Raises:
        FormatError: The home's record is of another format, or damaged.
    """
    wanted = (feed_of(config), config.pack.grouping)
    return next((one for one in _read(home) if (one["feed"], one["grouping"]) == wanted), None)


def record(config: Config, home: str, *, auc: Mapping[str, Mapping[str, float]], seeds: int) -> dict[str, Any]:
    """Record a comparison of `pack.grouping` with random batches, in place of an earlier one.

    Args:
        config: The config, with the grouping that was compared.
        home: URI of the config's home.
        auc: By action: difference (grouped less random), low and high of its interval.
        seeds: How many trainings a side.

    Returns:
        What was written.

    Raises:
        ValueError: The grouping is none, or a number is missing.
    """
    if config.pack.grouping == "none":
        raise ValueError("pack.grouping = none is what others are compared with; set sorted or bucketed")
    figures = {action: {key: float(told[key]) for key in ("difference", "low", "high")} for action, told in auc.items()}
    made = {"feed": feed_of(config), "grouping": config.pack.grouping, "auc": figures, "seeds": seeds}
    others = [one for one in _read(home) if (one["feed"], one["grouping"]) != (made["feed"], made["grouping"])]
    store.write_json(store.join(home, FILE), {"format": FORMAT, "comparisons": [*others, made]})
    return made


def warning(config: Config, home: str) -> str | None:
    """Return what to tell whoever trains on grouped batches that nobody compared on this feed; None: nothing.

    Raises:
        FormatError: As `comparison`.
    """
    if config.pack.grouping == "none" or comparison(config, home) is not None:
        return None
    return (
        f"pack.grouping = {config.pack.grouping!r} changes what a step sees, and no comparison of its AUC on this feed is "
        f"recorded in {store.join(home, FILE)}; run `{COMMAND}`, or set pack.grouping = 'none'"
    )


def _read(home: str) -> list[dict[str, Any]]:
    uri = store.join(home, FILE)
    try:
        values = store.read_json(uri)
        found: list[dict[str, Any]] = values["comparisons"]
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']}")
        return [{"feed": one["feed"], "grouping": one["grouping"], **one} for one in found]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{uri} cannot be read ({error!r}), this release reads format {FORMAT}; remove it and run `{COMMAND}` again",
            where=uri,
        ) from error
