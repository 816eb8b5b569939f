"""Mirror, copy and probe on a server of S3, in processes of their own, also where the server fails as stores do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import boto3
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from reprise.folder import iteration_name
from reprise.stores.client import PARTS_AT_ONCE
from reprise.stores.mirror_process import TOKIO_THREADS
from tests.harness import TINY, run_ok
from tests.stores.moto_server import BUCKET, environment, moto_server
from tests.stores.proxy import Faults, faulty
from tests.stores.saving import content, save

TIMEOUT_S = 240.0
MEMORY = """
import sys
from pathlib import Path
from reprise.stores.client import PART_BYTES, StoreClient

def kib(member):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if member in line)

client, path = StoreClient("s3://bucket"), Path(sys.argv[1])
client.put("memory/first", b"what a first request takes stays")
before = kib("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
for number in range(3):
    client.put_file(f"memory/{number}", path)
print((kib("VmHWM") - before) * 1024 / PART_BYTES)
"""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with moto_server() as number:
        yield number


def reprise(*words: object, endpoint: str, cwd: Path, is_ok: bool = True) -> str:
    """Run the command against a server; return what it prints."""
    ended = subprocess.run(
        [sys.executable, "-m", "reprise", *map(str, words)],
        env={**os.environ, **environment(endpoint)},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (ended.returncode == 0) == is_ok, ended.stderr
    assert "test-secret" not in ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def server(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def test_a_run_goes_into_a_bucket_and_back(port: int, tmp_path: Path) -> None:
    folder, url = tmp_path / "run", f"s3://{BUCKET}/there"
    save(folder, [5, 10])
    large = folder / iteration_name(10)
    client = boto3.client("s3", endpoint_url=server(port), region_name="us-east-1", **_secret())
    key = f"there/{iteration_name(10)}/{next(large.glob('*.safetensors')).name}"
    upload = client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    client.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=1, Body=b"of a dead process")
    reprise("checkpoint", "mirror", folder, url, "--once", endpoint=server(port), cwd=tmp_path)
    assert client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []) == []
    reprise("checkpoint", "copy", url, tmp_path / "back", endpoint=server(port), cwd=tmp_path)
    for iteration in (5, 10):
        name = iteration_name(iteration)
        assert content(tmp_path / "back" / name) == content(folder / name)
    shown = reprise("checkpoint", "prune", url, "--keep", 1, endpoint=server(port), cwd=tmp_path)
    assert "1 was deleted, 1 stays" in shown
    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket=BUCKET, Prefix="there/")["Contents"]]
    assert {key.split("/")[1] for key in keys} == {iteration_name(10)}


def _secret() -> dict[str, str]:
    return {"aws_access_key_id": "test", "aws_secret_access_key": "test-secret"}


@pytest.mark.slow
def test_faults_of_a_store_are_not_seen(port: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save(folder, [5, 10, 15], files=6)
    faults = Faults(busy=19, cut=7, conflict=11, silent=41)
    with faulty(port, faults) as endpoint:
        reprise("checkpoint", "mirror", folder, f"s3://{BUCKET}/faulty", "--once", endpoint=endpoint, cwd=tmp_path)
        reprise("checkpoint", "copy", folder, f"s3://{BUCKET}/copied", endpoint=endpoint, cwd=tmp_path)
        reprise("checkpoint", "copy", f"s3://{BUCKET}/faulty", tmp_path / "back", endpoint=endpoint, cwd=tmp_path)
    assert set(faults.counts) == {"busy", "cut", "conflict", "silent"}
    reprise("checkpoint", "copy", f"s3://{BUCKET}/copied", tmp_path / "again", endpoint=server(port), cwd=tmp_path)
    for name in map(iteration_name, (5, 10, 15)):
        assert content(tmp_path / "back" / name) == content(tmp_path / "again" / name) == content(folder / name)


@pytest.mark.nightly
def test_an_upload_takes_at_most_four_parts_a_thread(port: int, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes((96 << 20) + 5))
    ended = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path / "large"],
        env={**os.environ, **environment(server(port)), "TOKIO_WORKER_THREADS": TOKIO_THREADS},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    parts = float(ended.stdout)
    print(f"{parts:.1f} parts for {PARTS_AT_ONCE} requests at a time by {TOKIO_THREADS} threads")
    assert parts <= PARTS_AT_ONCE + 2 <= 4 * int(TOKIO_THREADS)


@pytest.mark.slow
def test_wrong_bytes_are_found(port: int, tmp_path: Path) -> None:
    folder, url = tmp_path / "run", f"s3://{BUCKET}/wrong"
    save(folder, [5], files=6)
    reprise("checkpoint", "copy", folder, url, endpoint=server(port), cwd=tmp_path)
    with faulty(port, Faults(wrong=5)) as endpoint:
        text = reprise("checkpoint", "copy", url, tmp_path / "back", endpoint=endpoint, cwd=tmp_path, is_ok=False)
    assert "damaged" in text
    assert not (tmp_path / "back" / iteration_name(5)).exists()
    reprise("checkpoint", "copy", url, tmp_path / "back", endpoint=server(port), cwd=tmp_path)
    assert content(tmp_path / "back" / iteration_name(5)) == content(folder / iteration_name(5))


def test_the_doctor_tries_a_store(port: int, tmp_path: Path) -> None:
    text = reprise("doctor", f"s3://{BUCKET}/probe", endpoint=server(port), cwd=tmp_path)
    lines = {line[9:38].strip(): line[:8].strip() for line in text.splitlines()}
    expected = ("objects can be written", "and read", "latency", "conditional creation")
    assert lines == dict.fromkeys(expected, "ok")
    client = boto3.client("s3", endpoint_url=server(port), region_name="us-east-1", **_secret())
    assert "Contents" not in client.list_objects_v2(Bucket=BUCKET, Prefix="probe/")


def test_a_store_that_refuses_is_named_in_a_line(port: int, tmp_path: Path) -> None:
    save(tmp_path / "run", [5])
    words = ("checkpoint", "copy", tmp_path / "run", "s3://no-bucket/run")
    text = reprise(*words, endpoint=server(port), cwd=tmp_path, is_ok=False)
    assert text.startswith("reprise checkpoint: s3://no-bucket/run/")
    assert len(text.splitlines()) == 1


@pytest.mark.slow
def test_others_open_what_plain_tools_download(port: int, tmp_path: Path) -> None:
    run_ok(tmp_path / "run", ["model=gpt2_tiny", *TINY, "train.train_iters=4", "checkpoint.save_interval=4"])
    folder, plain = tmp_path / "run" / "checkpoints" / iteration_name(4), tmp_path / "plain"
    reprise("checkpoint", "copy", folder, f"s3://{BUCKET}/plain", endpoint=server(port), cwd=tmp_path)
    client = boto3.client("s3", endpoint_url=server(port), region_name="us-east-1", **_secret())
    prefix = f"plain/{iteration_name(4)}/"
    for entry in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]:
        path = plain / entry["Key"].removeprefix(prefix)
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(BUCKET, entry["Key"], str(path))
    digests = [{name: sha256(data).hexdigest() for name, data in content(root).items()} for root in (folder, plain)]
    assert digests[0] == digests[1]
    tensors = [table for path in plain.glob("model*.safetensors") for table in load_file(path).items()]
    model = AutoModelForCausalLM.from_pretrained(plain)
    values = model.state_dict()
    assert len(tensors) > 10
    for name, tensor in tensors:
        assert torch.equal(values[name], tensor), name


def test_a_bucket_that_does_not_exist_is_named_at_once(port: int, tmp_path: Path) -> None:
    save(tmp_path / "run", [5])
    url = "s3://absent/run"
    for words in (
        ["checkpoint", "mirror", tmp_path / "run", url],
        ["checkpoint", "ls", url],
        ["doctor", url],
        ["follow", url, "--", "true", "{}"],
    ):
        text = reprise(*words, endpoint=server(port), cwd=tmp_path, is_ok=False)
        assert "the bucket does not exist: create it, or correct the URL (NoSuchBucket" in text
        assert "<?xml" not in text


def test_an_expired_token_is_named_at_once(tmp_path: Path) -> None:
    with faulty(1, Faults(expired=1)) as endpoint:
        save(tmp_path, [5])
        for words in (["mirror", tmp_path, f"s3://{BUCKET}/x", "--once"], ["ls", f"s3://{BUCKET}/x"]):
            text = reprise("checkpoint", *words, endpoint=endpoint, cwd=tmp_path, is_ok=False)
            assert "the store refuses the credentials" in text
