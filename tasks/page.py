"""The page of a night at its end: written, logged and linked; the body is gr_core's. Never fails a night."""

import logging

from prefect.artifacts import create_link_artifact

from gr_core.lake import store
from gr_core.night import Night
from gr_core.stages import paging

logger = logging.getLogger("gr_core.page")


def publish_page(night: Night, *, run: str | None) -> str | None:
    """Write a finished night's page and link it from the current flow run.

    Args:
        night: The night; its result stands, whatever happens here.
        run: URI of its MLflow run, which then carries the page too; a server shows it there, and browsers follow that
            link, which they do not from a page to a file. None: it has no run.

    Returns:
        URI of the page; None where it could not be made, which is logged.
    """
    try:
        uri = paging.conclude(night, logged=run is not None)
        link = store.local_path(uri).as_uri() if store.is_local(uri) else uri
        if run is not None and run.startswith(("http://", "https://")):
            link = f"{run}/artifacts/page.html"
        about = f"One self-contained file; open {uri} in any browser. `daybreak page --date` writes it again."
        create_link_artifact(link=link, link_text=f"Page of night {night.key}", key="night-page", description=about)
    except Exception as error:  # noqa: BLE001 -- a night that is done is not undone by what tells of it
        logger.warning("the page of night %s was not made (%s: %s)", night.key, type(error).__name__, error)
        return None
    return uri
