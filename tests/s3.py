"""An S3 server for tests: moto's, in a process of its own, and a door that refuses everybody.

The server answers one request at a time, so that a conditional put is atomic there as on S3 (moto looks, then writes).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

KEY_ID = "AKIATESTKEYID4DAYBREAK"
SECRET = "test-secret-that-no-log-may-show"
TOKEN = "test-token-that-no-log-may-show"
ROOT = Path(__file__).parent.parent

_SERVER = """
import io, sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

class Quiet(WSGIRequestHandler):
    def log(self, type, message, *args):
        pass

app, one_at_a_time = DomainDispatcherApplication(create_backend_app), threading.Lock()

conditional = []

def serial(environ, start):
    if environ["PATH_INFO"] == "/conditional-puts":
        start("200 OK", [("Content-Type", "text/plain")])
        return ["\\n".join(conditional).encode()]
    if environ["REQUEST_METHOD"] == "PUT" and environ.get("HTTP_IF_NONE_MATCH") == "*":
        conditional.append(environ["PATH_INFO"])
    length = int(environ.get("CONTENT_LENGTH") or 0)
    if length:  # before the lock: a client that does not go on sending holds up nobody else
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
    with one_at_a_time:
        return [b"".join(app(environ, start))]

server = make_server("127.0.0.1", 0, serial, threaded=True, request_handler=Quiet)
print(server.server_port, flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
"""


def variables(endpoint: str) -> dict[str, str]:
    """Return the environment that points every S3 client at an endpoint."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }


def point_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point every S3 client of this process at an endpoint, those that MLflow and boto3 keep included."""
    for key, value in variables(endpoint).items():
        monkeypatch.setenv(key, value)
    forget_clients(monkeypatch)


def forget_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make boto3 and MLflow forget the clients that they keep, with endpoint, credentials and methods."""
    import boto3

    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    kept = sys.modules.get("mlflow.store.artifact.s3_artifact_repo")
    if kept is not None:
        kept._cached_get_s3_client.cache_clear()


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Run moto's S3 server in a process of its own; yields its endpoint."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean
    ) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        assert port.isdecimal(), "the S3 server did not start"
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def conditional_puts(endpoint: str) -> list[str]:
    """Return the paths that were put with If-None-Match: * so far."""
    with urllib.request.urlopen(f"{endpoint}/conditional-puts") as answer:
        return answer.read().decode().splitlines()


@contextlib.contextmanager
def refusing(code: str, status: int = 403) -> Iterator[str]:
    """Run a server that answers every request with one S3 error, quoting the credentials as S3 does; yields its endpoint."""
    body = (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>refused</Message>'
        f"<AWSAccessKeyId>{KEY_ID}</AWSAccessKeyId><Token-0>{TOKEN}</Token-0><RequestId>1</RequestId></Error>"
    ).encode()

    class Door(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # answers "Expect: 100-continue", which a put waits for

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = _answer  # noqa: N815 -- http.server's names
        do_PUT = _answer  # noqa: N815
        do_POST = _answer  # noqa: N815
        do_DELETE = _answer  # noqa: N815
        do_HEAD = _answer  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    """Yield the endpoint of an S3 server that the tests of a module share."""
    with serving() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URI of a new empty bucket; the environment points at it, and local state stays in the test's folder."""
    point_at(s3_endpoint, monkeypatch)
    monkeypatch.setenv("DAYBREAK_STATE", str(tmp_path / "state"))
    return make_bucket(tmp_path.name)


def make_bucket(name: str) -> str:
    """Make a bucket with a name like this one and return its URI."""
    from gr_core.lake import remote

    plain = "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")[:40].strip("-")
    found = {item["Name"] for item in remote.filesystem().call_s3("list_buckets")["Buckets"]}
    unique = f"{plain}-{len(found)}"
    remote.filesystem().call_s3("create_bucket", Bucket=unique)
    return f"s3://{unique}"
