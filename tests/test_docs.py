"""What the documents name is there."""

from __future__ import annotations

import re
from pathlib import Path


def test_every_test_that_the_table_of_cases_names_is_there(root: Path) -> None:
    """docs/cases.md names tests by file and function; one that was renamed or removed shows here."""
    named = re.findall(r"`([\w/]+)/(\w+)::(\w+)`", (root / "docs" / "cases.md").read_text())
    gone = [
        f"{folder}/{file}::{test}"
        for folder, file, test in named
        if not (path := root / "tests" / folder / f"test_{file}.py").exists()
        or f"def test_{test}(" not in path.read_text()
    ]

    assert len(named) > 90
    assert gone == []
