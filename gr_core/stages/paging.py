"""The page of a night in its home: made from the journal and what the night's stages wrote, at its end or again later."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from gr_core.errors import UsageError
from gr_core.lake import manifests, store
from gr_core.lake.journal import Journal, nights
from gr_core.night import Night
from gr_core.report.nightly_page import STAGES, collect
from gr_core.report.page import render_page

logger = logging.getLogger(__name__)

FILE = "page.html"


def write(home: str, key: str | None = None) -> dict[str, str]:
    """Write a night's page into its folder, also over an older one; it tells what befell the night since.

    Args:
        home: URI of the home.
        key: The night's key; None: the newest night of the main line.

    Returns:
        date (the night's key) and page (URI).

    Raises:
        UsageError: There is no such night.
    """
    records = nights(Journal(store.join(home, "lake", "journal")).entries())
    if key is None:
        main = [record for record in records.values() if record.is_main]
        key = max(main, key=lambda record: (record.date, record.opened_us)).key if main else None
    if key is None or key not in records:
        which = "no night at all yet" if key is None else f"no night {key}"
        raise UsageError(
            f"there is {which} in {home}; `daybreak status` lists the nights, --date YYYY-MM-DD names one", where="date"
        )
    folder = store.join(home, "nights", key)
    beside = records[key].beside
    shared = _results(store.join(home, "nights", beside)) if beside is not None else {}
    taken = {stage: result for stage, result in shared.items() if stage in ("ingest", "evaluate")}
    page = collect(records[key], records.values(), taken | _results(folder))
    uri = store.join(folder, FILE)
    store.write_bytes(uri, render_page(page).encode("utf-8", "replace"))
    return {"date": key, "page": uri}


def _results(folder: str) -> dict[str, Mapping[str, Any]]:
    """Return the results of a night's stages, by stage; those that are absent or damaged are left out."""
    found: dict[str, Mapping[str, Any]] = {}
    for stage in STAGES:
        uri = store.join(folder, "manifests", f"{stage}.json")
        manifest = manifests.read_or_warn(uri, f"the page is without {stage}")
        if manifest is not None:
            found[stage] = manifest["result"]
    return found


def conclude(night: Night, *, logged: bool) -> str:
    """Write the page of a night that has just ended, and put it beside its MLflow run.

    Args:
        night: The night.
        logged: Whether it has an MLflow run.

    Returns:
        URI of the page.
    """
    uri = write(night.home, night.key)["page"]
    if logged:
        from gr_core.stages import judging  # brings torch, which `daybreak page` does without

        models = judging.model_store(night, night.settings)
        models.attach(night.key, FILE, store.read_bytes(uri).decode("utf-8"))
    return uri
