"""URLs of stores, and those that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from reprise.errors import ConfigError
from reprise.stores.path import store_path
from reprise.stores.url import is_store_url, place_of
from tests.messages import refused


@pytest.mark.parametrize(
    ("text", "root", "key"),
    [
        ("s3://bucket/run", "s3://bucket", "run"),
        ("S3://bucket/a/b/", "s3://bucket", "a/b"),
        ("gs://bucket", "gs://bucket", ""),
        ("az://container/x", "az://container", "x"),
        ("file:///data/run", "file://", "data/run"),
        ("s3://bucket/me@example.org/run", "s3://bucket", "me@example.org/run"),
        ("file:///home/me@example.org/run", "file://", "home/me@example.org/run"),
    ],
)
def test_a_url_is_a_store_and_a_key(text: str, root: str, key: str) -> None:
    url = store_path(text)
    assert place_of(url) == (root, key)
    assert store_path(str(url)) == url


@pytest.mark.parametrize(
    "text",
    [
        "http://host/run", "/data/run", "s3://", "s3:///run", "s3://bucket/a/../b", "s3://bucket/./b", "s3://bucket/..",
        "s3://bucket//b", "s3://bucket/run?versionId=secret", "s3://bucket/run#secret", "s3://user:secret@bucket/run",
        "s3://secret@bucket", "s3://user:sec/secret@bucket/run", "file://user:secret@host/run",
    ],
)  # fmt: skip
def test_what_is_no_store_is_refused_without_its_secrets(text: str) -> None:
    with refused(ConfigError, "://") as refusal:
        store_path(text)
    assert "secret" not in str(refusal.value)


def test_paths_are_no_urls() -> None:
    assert not is_store_url("runs/s3:/x")
    assert is_store_url("s3://bucket")


@pytest.mark.parametrize("text", ["/data/run", "//data/run"])
def test_a_path_of_this_host_is_in_the_file_store(text: str) -> None:
    assert place_of(Path(text)) == ("file://", "data/run")
