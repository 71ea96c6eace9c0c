"""Headless Chromium for tests: where it is, a page in it, and screenshots for docs/.

`DAYBREAK_SCREENSHOTS=docs/screenshots pytest tests/flows/test_up.py` takes the pictures that README shows.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MISSING = "no Chromium on this machine (apt-get install chromium, or playwright install chromium): browser not tested"
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
WAIT_MS = 60_000


def executable() -> str | None:
    """Return the system's Chromium, else the one that Playwright installed; None without any."""
    for name in NAMES:
        found = shutil.which(name)
        if found:
            return found
    with sync_playwright() as tools:
        own = tools.chromium.executable_path
    return own if Path(own).exists() else None


@contextmanager
def started(path: str) -> Iterator[Browser]:
    """Run a headless browser for the block."""
    # a container's root has no sandbox, and its /dev/shm is small
    words = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=path, args=words)
        try:
            yield browser
        finally:
            browser.close()


def shoot(page: Page, name: str, *hidden: Locator) -> None:
    """Keep a screenshot of what is seen, if screenshots are wanted; without paths of this machine."""
    folder = os.environ.get("DAYBREAK_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png", mask=list(hidden), mask_color="#26272b")
