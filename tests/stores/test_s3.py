"""Mirror and copy on a server of S3, in processes of their own, also where the server fails as stores do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reprise.storage import iteration_name
from tests.stores.proxy import Faults, faulty
from tests.stores.saving import content, save
from tests.stores.servers import BUCKET, KEYS, environment, s3_client, server

TIMEOUT_S = 240.0
URL = f"s3://{BUCKET}"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server("moto", tmp_path_factory.mktemp("moto")) as running:
        yield running.endpoint


def python(*words: object, endpoint: str, is_ok: bool = True) -> str:
    """Run Python against a server; return what it prints."""
    ended = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, **environment(endpoint)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (ended.returncode == 0) == is_ok, ended.stderr
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def checkpoint(*words: object, endpoint: str, is_ok: bool = True) -> str:
    return python("-m", "reprise", "checkpoint", *words, endpoint=endpoint, is_ok=is_ok)


def test_a_run_goes_into_a_bucket(endpoint: str, tmp_path: Path) -> None:
    save(tmp_path, [5, 10])
    client = s3_client(endpoint)
    checkpoint("mirror", tmp_path, f"{URL}/there", "--once", endpoint=endpoint)
    names = map(iteration_name, (5, 10))
    expected = {f"there/{name}/{file}": data for name in names for file, data in content(tmp_path / name).items()}
    for key, data in expected.items():
        assert client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == data, key
    keys = {entry["Key"] for entry in client.list_objects_v2(Bucket=BUCKET, Prefix="there/iter_")["Contents"]}
    assert keys == expected.keys()


@pytest.mark.slow
def test_faults_of_a_store_are_not_seen(endpoint: str, tmp_path: Path) -> None:
    folder, again = tmp_path / "run", tmp_path / "again"
    save(folder, [5, 10, 15], files=6)
    faults = Faults(busy=19, cut=7, conflict=11, silent=41)
    with faulty(int(endpoint.rpartition(":")[2]), faults) as proxy:
        checkpoint("mirror", folder, f"{URL}/faulty", "--once", endpoint=proxy)
        faults.conflict = 0  # a copy does not repeat a refused request
        checkpoint("copy", folder, f"{URL}/copied", endpoint=proxy)
        checkpoint("copy", f"{URL}/faulty", tmp_path / "back", endpoint=proxy)
    assert set(faults.counts) == {"busy", "cut", "conflict", "silent"}
    checkpoint("copy", f"{URL}/copied", again, endpoint=endpoint)
    for name in map(iteration_name, (5, 10, 15)):
        assert content(tmp_path / "back" / name) == content(again / name) == content(folder / name)
    with faulty(int(endpoint.rpartition(":")[2]), Faults(wrong=5)) as proxy:
        text = checkpoint("copy", f"{URL}/copied", tmp_path / "wrong", endpoint=proxy, is_ok=False)
    assert "damaged" in text


@pytest.mark.slow
def test_a_store_that_refuses_is_named_at_once(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where `follow` keeps its record
    save(tmp_path, [5])
    absent = "s3://absent/run"
    for words in (
        ["checkpoint", "mirror", tmp_path, absent],
        ["doctor", absent],
        ["follow", absent, "--", "true", "{}"],
    ):
        text = python("-m", "reprise", *words, endpoint=endpoint, is_ok=False)
        assert "(NoSuchBucket" in text
        assert "<?xml" not in text
    text = checkpoint("copy", tmp_path, absent, endpoint=endpoint, is_ok=False)
    assert text.startswith(f"reprise checkpoint: {absent}/")
    assert len(text.splitlines()) == 1
    with faulty(1, Faults(expired=1)) as proxy:
        for words in (["mirror", tmp_path, f"{URL}/x", "--once"], ["ls", f"{URL}/x"]):
            assert "the store refuses the request" in checkpoint(*words, endpoint=proxy, is_ok=False)
