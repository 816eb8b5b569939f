"""The errors of requests to a store."""

from __future__ import annotations

from errno import EACCES, EIO, ENOENT
from pathlib import Path
from typing import Any

import pytest

from reprise.stores.url import StoreUrl

exceptions = pytest.importorskip("obstore.exceptions")
client = pytest.importorskip("reprise.stores.client")

DENIED = exceptions.PermissionDeniedError
ANSWER = """Generic S3 error: Error performing GET http://127.0.0.1:9/bucket in 3.5ms - Server returned non-2xx status
code: {status}: <?xml version="1.0" encoding="UTF-8"?>
<Error><Code>{code}</Code><Message>As the store has it</Message><RequestId>KKxk</RequestId></Error>"""


@pytest.mark.parametrize(
    ("kind", "code", "number", "fix"),
    [
        (exceptions.GenericError, "NoSuchBucket", EACCES, "URL"),
        (FileNotFoundError, "NoSuchBucket", EACCES, "URL"),
        (DENIED, "AccessDenied", EACCES, "list, read, write"),
        (DENIED, "InvalidAccessKeyId", EACCES, "AWS_ACCESS_KEY_ID"),
        (DENIED, "SignatureDoesNotMatch", EACCES, "AWS_SECRET_ACCESS_KEY"),
        (DENIED, "RequestTimeTooSkewed", EACCES, "clock"),
        (DENIED, "AccountProblem", EACCES, "credentials"),
        (exceptions.GenericError, "ExpiredToken", EACCES, ""),
        (exceptions.GenericError, "PermanentRedirect", EACCES, "AWS_REGION"),
        (exceptions.GenericError, "SlowDown", EIO, "As the store has it"),
        (FileNotFoundError, "NoSuchKey", ENOENT, "No such file"),
    ],
)
def test_a_code_of_the_store_is_named_with_what_to_do(kind: type[Exception], code: str, number: int, fix: str) -> None:
    with pytest.raises(OSError, match=r"s3://bucket/run") as caught, client._translated(StoreUrl("s3://bucket", "run")):
        raise kind(ANSWER.format(status=400, code=code))
    assert caught.value.errno == number
    assert fix in caught.value.strerror
    assert "<?xml" not in caught.value.strerror
    assert code in caught.value.strerror or number == ENOENT


def test_a_long_text_comes_in_requests_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, ranges, get = "".join(map(str, range(20))), list[tuple[int, int]](), client.obstore.get

    def note(*arguments: Any, options: Any) -> Any:
        ranges.append(options["range"])
        return get(*arguments, options=options)

    (tmp_path / "file").write_text(text)
    url = StoreUrl.parse(f"file://{tmp_path}/file")
    monkeypatch.setattr(client.obstore, "get", note)
    assert client.StoreClient().read_text(url) == text
    monkeypatch.setattr(client, "CELL_BYTES", 10)
    monkeypatch.setattr(client, "PART_BYTES", 8)
    assert client.StoreClient().read_text(url) == text
    assert ranges == [(0, 30), (0, 8), (8, 16), (16, 24), (24, 30)]
