"""A server of S3 in a process of its own: moto, which keeps objects in memory and checks no checksum."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from scripts.faults.ranks import free_port

START_S = 60.0
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_REGION": "us-east-1"}
BUCKET = "bucket"


def environment(endpoint: str) -> dict[str, str]:
    """Return the variables by which programs find a server."""
    return {**KEYS, "AWS_DEFAULT_REGION": KEYS["AWS_REGION"], "AWS_ENDPOINT_URL": endpoint}


@contextmanager
def moto_server() -> Iterator[int]:
    """Yield the port of a server with an empty bucket."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _make_bucket(port, process)
        yield port
    finally:
        process.kill()
        process.wait(START_S)


def _make_bucket(port: int, process: subprocess.Popen[bytes]) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
    request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request")
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=START_S):
                return
        except urllib.error.HTTPError:
            raise
        except OSError:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)
