"""The page's link in the Prefect UI, and that no trouble with the page reaches the night."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from gr_core.errors import StoreUnavailable
from tasks import page

NIGHT: Any = SimpleNamespace(key="2025-06-01")


@pytest.mark.parametrize(
    ("run", "link"),
    [
        (None, "file:///home/n/page0.html"),
        ("sqlite:////home/mlflow.db#/experiments/1/runs/r", "file:///home/n/page1.html"),
        ("http://host:5000#/experiments/1/runs/r", "http://host:5000#/experiments/1/runs/r/artifacts/page.html"),
    ],
)
def test_the_page_is_linked(monkeypatch: pytest.MonkeyPatch, run: str | None, link: str) -> None:
    """A local page by a file address that a browser opens, or inside an MLflow server, where a browser follows it."""
    links: list[dict[str, Any]] = []
    monkeypatch.setattr(page, "create_link_artifact", lambda **link: links.append(link))
    monkeypatch.setattr(page.paging, "conclude", lambda _night, *, logged: f"/home/n/page{int(logged)}.html")

    assert page.publish_page(NIGHT, run=run) == f"/home/n/page{int(run is not None)}.html"
    assert [made["link"] for made in links] == [link]
    assert links[0]["key"] == "night-page"


@pytest.mark.parametrize("error", [StoreUnavailable("away"), KeyError("next_day"), OSError(28, "no space left")])
@pytest.mark.parametrize("where", ["page", "link"])
def test_a_page_that_cannot_be_made_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, where: str
) -> None:
    """Whatever goes wrong in making, logging or linking it: the night has its result already."""

    def fail(*_arguments: Any, **_named: Any) -> None:
        raise error

    monkeypatch.setattr(page, "create_link_artifact", fail)
    monkeypatch.setattr(page.paging, "conclude", fail if where == "page" else lambda _night, *, logged: "/home/page")

    with caplog.at_level(logging.WARNING):
        assert page.publish_page(NIGHT, run="runs/r") is None
    assert f"the page of night 2025-06-01 was not made ({type(error).__name__}" in caplog.text
