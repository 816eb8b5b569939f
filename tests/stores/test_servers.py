"""All that a store is used for, on three servers that differ in what they honor. `make test-stores` installs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reprise.storage import iteration_name
from tests import ROOT
from tests.crash.outcomes import assert_ends_as
from tests.harness import TINY
from tests.profiles import nightly
from tests.stores.saving import content, save
from tests.stores.servers import Server, server

TIMEOUT_S = 300.0
CREATE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from reprise.stores.client import StoreClient
from reprise.stores.path import store_path
client, url = StoreClient(), store_path(f"{sys.argv[1]}/raced/object")
with ThreadPoolExecutor(8) as threads:
    print(sum(threads.map(lambda n: client.create(url, str(n)), range(8))))
"""
LARGE = """
import os, sys
from pathlib import Path
from reprise.stores.client import StoreClient
from reprise.stores.path import store_path
client, path, size = StoreClient(), Path(sys.argv[2]), (20 << 20) + 5
first, second = (store_path(f"{sys.argv[1]}/large/{name}") for name in ("object", "copy"))
path.write_bytes(os.urandom(size))
client.put(first, path)
client.put(second, first)
parts = [client.read(second, at, min(8 << 20, size - at)) for at in range(0, size, 8 << 20)]
assert b"".join(parts) == path.read_bytes()
assert client.head(second)[0] == size
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["moto", nightly("juicefs"), nightly("azurite")])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


def program(store: Server, *words: object, cwd: Path, is_ok: bool = True) -> str:
    """Run a program of Python that finds the server; return what it prints."""
    ended = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, **store.variables},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (ended.returncode == 0) == is_ok, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def train(store: Server, run: Path, *overrides: str, ranks: int = 1) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, "--standalone"]
    program(store, *launcher, "-m", "trainer", f"run.dir={run}", *overrides, cwd=ROOT)


def reprise(store: Server, *words: object, cwd: Path, is_ok: bool = True) -> str:
    return program(store, "-m", "reprise", *words, cwd=cwd, is_ok=is_ok)


def test_doctor_names_what_the_server_honors(store: Server, tmp_path: Path) -> None:
    text = reprise(store, "doctor", f"{store.url}/probed", cwd=tmp_path)
    assert ("a second creation of an object is refused" in text) == store.creates_once
    assert ("not honored" in text) != store.creates_once
    assert "can be created, read and deleted" in text


def test_racing_creates_have_one_winner_where_honored(store: Server, tmp_path: Path) -> None:
    winners = int(program(store, "-c", CREATE, store.url, cwd=tmp_path))
    assert winners == 1 if store.creates_once else winners >= 1


def test_a_file_of_several_parts_comes_back(store: Server, tmp_path: Path) -> None:
    program(store, "-c", LARGE, store.url, tmp_path / "large", cwd=tmp_path)


def test_a_folder_goes_into_the_store_and_back(store: Server, tmp_path: Path) -> None:
    folder, url = tmp_path / "run", f"{store.url}/there"
    save(folder, [5, 10, 15])
    reprise(store, "checkpoint", "mirror", folder, url, "--once", cwd=tmp_path)
    reprise(store, "checkpoint", "copy", url, tmp_path / "back", cwd=tmp_path)
    for name in map(iteration_name, (5, 10, 15)):
        assert content(tmp_path / "back" / name) == content(folder / name)
    assert reprise(store, "checkpoint", "verify", url, cwd=tmp_path).count("whole") == 3
    assert iteration_name(10) in reprise(store, "checkpoint", "ls", url, cwd=tmp_path)
    names = [f"{url}/{iteration_name(n)}" for n in (5, 10)]
    assert "differ" in reprise(store, "checkpoint", "diff", *names, cwd=tmp_path, is_ok=False)
    echo = [sys.executable, "-c", "import json, sys; print(json.dumps({'url': sys.argv[1]}))", "{}"]
    reprise(store, "follow", url, "--once", "--", *echo, cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "follow.jsonl").read_text().splitlines()]
    assert [line["result"]["url"] for line in lines] == [f"{url}/{iteration_name(n)}" for n in (5, 10, 15)]
    assert "2 of 3 checkpoints deleted" in reprise(store, "checkpoint", "prune", url, "--keep", "1", cwd=tmp_path)
    assert iteration_name(10) not in reprise(store, "checkpoint", "ls", url, cwd=tmp_path)


@pytest.mark.nightly
def test_a_mirrored_run_goes_on_at_another_topology(store: Server, tmp_path: Path) -> None:
    url, runs = f"{store.url}/trained", [tmp_path / name for name in ("run", "one", "two")]
    always = ["parallel.invariant_ranks=2", "train.threads=1", "checkpoint.save_interval=2"]
    train(store, runs[0], "model=gpt2_tiny", *TINY, "train.train_iters=4", *always, f"checkpoint.mirror={url}")
    always += ["train.train_iters=6"]
    train(store, runs[1], f"checkpoint.load={runs[0]}", *always)
    train(store, runs[2], f"checkpoint.load={url}", *always, "parallel=zero3", "checkpoint.reshard=true", ranks=2)
    assert_ends_as(runs[2], runs[1])
