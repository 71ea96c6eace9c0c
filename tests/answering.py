"""The least server that answers as Prefect's does when asked for its health."""

from __future__ import annotations

from typing import Any


def create_app() -> Any:
    """Return an ASGI application that says 200 and 0 to everything: there is no task run that is still open."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for said in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{said}.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"0"})

    return app
