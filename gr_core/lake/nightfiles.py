"""What nights have written of one user: sequences, encoded rows and packs below <home>/nights.

An output that holds a forgotten user is removed whole, with the manifest that vouches for it: a finished night stays
finished without it, an unfinished one makes it again.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from dataclasses import dataclass

import polars as pl

from gr_core.lake import store
from gr_core.lake.entries import WINDOW
from gr_core.lake.remote import Object

_BUCKET = re.compile(r"bucket-(\d+)")
_UNFINISHED = (".tmp-", ".old-")
COUNTED = ("sequences", "packs")


@dataclass(frozen=True, slots=True)
class _Output:
    """A folder that one manifest vouches for."""

    uri: str
    below: str
    """Its path below its night's folder, or below `forced` or a retrain's window in it."""
    base: str
    """URI of that folder."""


def forget(home: str, user: str, bucket: int) -> dict[str, int]:
    """Remove every output of a night that holds a user, whole or not at all; the night lock must be held.

    Args:
        home: URI of the home.
        user: The id as the event table has it.
        bucket: The user's bucket; folders of other buckets are not looked at.

    Returns:
        Segments of the user that were removed, by `COUNTED` kind of output.
    """
    root = store.join(home, "nights")
    store.remove_leftovers(home)
    files = store.listing(root)
    held: Counter[str] = Counter()
    for output, own in _outputs(root, files).items():
        if any(part.startswith(_UNFINISHED) for part in output.uri.split("/")):
            store.remove_tree(output.uri)  # left by a killed process; nobody else writes now
            continue
        other = _BUCKET.fullmatch(output.below.rsplit("/", 1)[-1])
        if other and int(other.group(1)) != bucket:
            continue
        segments = _segments(own, user)
        if segments:
            # the manifest first: it must not outlive what it vouches for
            _remove_manifests(output)
            store.remove_tree(output.uri)
            held[output.below.split("/")[0]] += segments
    return {kind: held[kind] for kind in COUNTED}


def _outputs(root: str, files: list[Object]) -> dict[_Output, list[Object]]:
    """Group files by the folder they lie in; what lies directly in a night's folder holds nobody."""
    found: dict[_Output, list[Object]] = {}
    for one in files:
        night, *rest = one.name.split("/")
        base = store.join(root, night)
        while rest and (rest[0] == "forced" or rest[0].startswith(WINDOW)):
            base, rest = store.join(base, "forced"), rest[1:]
        folder = rest[:-1]
        if not folder or folder[0] == "manifests" or folder[0].startswith("checkpoint"):
            continue
        below = "/".join(folder)
        found.setdefault(_Output(store.join(base, below), below, base), []).append(one)
    return found


def _segments(files: list[Object], user: str) -> int:
    """Count a user's segments in an output: in a pack's index, in files of segments, else in whatever names him."""
    told = [one for one in files if one.name.endswith("/index.json") or "segments" in one.name.rsplit("/", 1)[-1]]
    return sum(_rows(one, user) for one in told or files)


def _rows(file: Object, user: str) -> int:
    """Count a file's rows of a user; what cannot be read may hold him."""
    try:
        if file.name.endswith("/index.json"):
            users = json.loads(store.read_bytes(file.uri)).get("segment_users") or []
            return sum(one == user for one in users)
        if not file.name.endswith(".arrow"):
            return 0
        names = [name for name in pl.read_ipc_schema(_source(file)) if "user" in name]
        if not names:
            return 0
        rows = pl.read_ipc(_source(file), columns=names)
    except (ValueError, AttributeError, pl.exceptions.PolarsError, OSError):
        return 1
    return int(rows.select(pl.any_horizontal(pl.col(names).cast(pl.String) == user).sum()).item() or 0)


def _source(file: Object) -> str | io.BytesIO:
    return file.uri if store.is_local(file.uri) else io.BytesIO(store.read_bytes(file.uri))


def _remove_manifests(output: _Output) -> None:
    for one in store.listing(store.join(output.base, "manifests")):
        try:
            result = json.loads(store.read_bytes(one.uri))["result"]
        except (ValueError, KeyError, TypeError):
            continue
        # a home may have been moved: only the path below the night counts
        if str(result.get("uri", "")).endswith("/" + output.below):
            store.remove(one.uri)
